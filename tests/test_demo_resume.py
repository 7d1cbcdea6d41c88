"""Training that is killed at any moment, again and again, ends where training ends that was left alone."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from support import REPOSITORY

pytest.importorskip("optax")
pytest.importorskip("sklearn")

# The demo's own loop over its own loaders, every step's rows written down before it is learnt from.
CHILD = """
import hashlib, json, os, sys
from pathlib import Path

import jax, numpy as np
from rich.console import Console

from prefetchshard import demo

folder, epochs, every, use_async = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "async"
digits, learn, end, save = demo.digits, demo.Job.learn, demo.Display.end, demo.Job.save
out = os.fdopen(os.dup(1), "w", buffering=1)
count = 0

def with_ids(seed):
    rows, held_out = digits(seed)
    return {**rows, "id": np.arange(len(rows["label"]), dtype=np.int32)}, held_out

def and_write(job, batch):
    global count
    ids = np.asarray(batch["id"]).tolist()
    seen = hashlib.sha256(np.asarray(batch["image"]).tobytes() + np.asarray(batch["label"]).tobytes()).hexdigest()[:16]
    print(json.dumps({"learns": ids, "seen": seen}), file=out)
    return learn(job, {name: leaf for name, leaf in batch.items() if name != "id"})

def say_when_saving(job, batches):
    print(json.dumps({"step": batches.position.step}), file=out)
    save(job, batches)

def fingerprint(display, job, stats, seconds):
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(job.state):
        digest.update(np.asarray(leaf).tobytes())
    print(json.dumps({"end": digest.hexdigest(), "accuracy": job.accuracy}), file=out)

demo.digits, demo.Job.learn, demo.Job.save, demo.Display.end = with_ids, and_write, say_when_saving, fingerprint
quiet = Console(file=open(os.devnull, "w"))
demo.run(demo.Options(epochs=epochs, checkpoint=folder, checkpoint_every=every, use_async=use_async), quiet)
"""


def lives(folder: Path, epochs: int, every: int, kills: int, seed: int, way: str = "sync") -> tuple[list[dict[str, Any]], str, int]:
    """Runs the child until it ends, killing it so many times; what effective steps learnt, the end's fingerprint, and the kills.

    A step is effective where its result lives on: from each life the steps count that were saved, or that are of the last life.
    """
    rng = random.Random(seed)
    effective: list[dict[str, Any]] = []
    command = [sys.executable, "-c", CHILD, str(folder), str(epochs), str(every), way]
    killed = 0
    while True:
        begun = _saved_steps(folder)
        del effective[begun:]
        process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
        watchdog = threading.Timer(120, process.kill)
        watchdog.start()
        left = rng.randrange(12) if killed < kills else -1
        said: list[dict[str, Any]] = []
        assert process.stdout is not None
        for line in process.stdout:
            if not line.endswith("\n"):
                break
            said.append(json.loads(line))
            if left == 0:
                for _ in range(rng.randrange(20_000)):  # some moment later; the child goes on meanwhile
                    pass
                process.kill()
            left -= 1
        code = process.wait()
        watchdog.cancel()
        process.stdout.close()
        effective += [line for line in said if "learns" in line]
        ends = [line["end"] for line in said if "end" in line]
        if ends and code == 0:
            return effective, ends[0], killed
        assert code == -9, f"the child ended by itself with {code}"
        killed += 1


def _saved_steps(folder: Path) -> int:
    """The steps whose results are saved, as the demo itself will read them."""
    from prefetchshard.demo import Checkpoint

    saved = Checkpoint(folder).load()
    return saved.loader.step if saved else 0


@pytest.fixture(scope="module")
def left_alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], str]:
    steps, end, killed = lives(tmp_path_factory.mktemp("alone"), 3, 10, 0, 0)
    assert killed == 0
    assert len(steps) == 66
    assert len({row for step in steps[:22] for row in step["learns"]}) == 22 * 64
    return steps, end


def test_killed_a_few_times(left_alone: Any, tmp_path: Path) -> None:
    steps, end, killed = lives(tmp_path, 3, 1, 4, 1)
    assert killed == 4
    assert steps == left_alone[0]
    assert end == left_alone[1]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["sync", "async"])
def test_killed_fifty_times(way: str, left_alone: Any, tmp_path: Path) -> None:
    steps, end, killed = lives(tmp_path, 3, 1, 50, 2, way)
    assert killed == 50
    assert steps == left_alone[0]
    assert end == left_alone[1]


@pytest.mark.slow
def test_killed_where_only_every_few_steps_are_saved(left_alone: Any, tmp_path: Path) -> None:
    steps, end, killed = lives(tmp_path, 3, 4, 12, 3)
    assert killed == 12
    assert steps == left_alone[0]
    assert end == left_alone[1]


def test_the_unfinished_file_of_a_killed_save_is_in_nobodys_way(tmp_path: Path) -> None:
    from prefetchshard import demo

    checkpoint = demo.Checkpoint(tmp_path)
    assert checkpoint.load() is None
    (tmp_path / "digits.new.npz").write_bytes(b"half")
    assert checkpoint.load() is None
    state = _any_state()
    checkpoint.save(demo.Saved([], 0.5, state))
    back = checkpoint.load()
    assert back is not None
    assert (back.accuracy, back.loader) == (0.5, state)
    assert os.listdir(tmp_path) == ["digits.npz"]


def _any_state() -> Any:
    import numpy as np

    import prefetchshard as ps

    return ps.Loader(np.zeros((8, 1), np.float32), batch_size=8).state()
