"""Training that is killed at any moment, again and again, ends where training ends that was left alone."""

from __future__ import annotations

import faulthandler
import json
import os
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import prefetchshard as ps
from support import REPOSITORY

pytest.importorskip("optax")
pytest.importorskip("sklearn")

# A life that is to be killed waits for that where it has said enough: whoever kills it may be slow, and would find it at its end.
SAY = """
import json, os, sys, threading

out, said, enough = os.fdopen(os.dup(1), "w", buffering=1), 0, int(sys.argv[5])

def say(**fields):
    global said
    print(json.dumps(fields), file=out)
    said += 1
    if said == enough:
        threading.Event().wait()
"""

# A loop that is quick to start again: weights and loader's state in one file that is replaced as a whole.
SMALL = (
    SAY
    + """
import hashlib
from pathlib import Path

import jax, jax.numpy as jnp, numpy as np
import prefetchshard as ps

folder, epochs, every = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
file, unfinished = folder / "small.npz", folder / "small.new.npz"
rows = {"id": np.arange(200, dtype=np.int32), "x": np.linspace(0, 1, 800, dtype=np.float32).reshape(200, 4)}
weights, state = jnp.zeros(4), None
if file.exists():
    with np.load(file) as saved:
        weights, state = jnp.asarray(saved["weights"]), ps.LoaderState.decode(saved["state"].tobytes())

def augment(row, rng):
    return {**row, "x": row["x"] + rng.random(4, np.float32)}

@jax.jit
def learn(weights, x):
    return weights + jnp.tanh(x @ weights + 1) @ x / 16

loader = ps.Loader(rows, batch_size=16, shuffle=True, seed=4, epochs=epochs, remainder="pad", transform=augment, state=state)
with loader:
    batches = iter(loader)
    for batch in batches:
        seen = hashlib.sha256(np.asarray(batch["x"]).tobytes()).hexdigest()[:16]
        say(learns=np.asarray(batch["id"])[np.asarray(batch["mask"])].tolist(), seen=seen)
        weights = learn(weights, batch["x"])
        step = batches.position.step
        say(step=step)
        if (step + 1) % every == 0 or batches.position.ends_epoch:
            np.savez(unfinished, weights=np.asarray(weights), state=np.frombuffer(batches.state().encode(), np.uint8))
            os.replace(unfinished, file)
say(end=np.asarray(weights).tobytes().hex())
"""
)

# The demo's own loop over its own loaders, every step's rows written down before it is learnt from.
DEMO = (
    SAY
    + """
import hashlib
from pathlib import Path

import jax, numpy as np
from rich.console import Console

from prefetchshard.app import demo

folder, epochs, every, use_async = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "async"
digits, learn, end, save = demo.digits, demo.Job.learn, demo.Display.end, demo.Job.save

def with_ids(seed):
    rows, held_out = digits(seed)
    return {**rows, "id": np.arange(len(rows["label"]), dtype=np.int32)}, held_out

def and_write(job, batch):
    ids = np.asarray(batch["id"]).tolist()
    seen = hashlib.sha256(np.asarray(batch["image"]).tobytes() + np.asarray(batch["label"]).tobytes()).hexdigest()[:16]
    say(learns=ids, seen=seen)
    return learn(job, {name: leaf for name, leaf in batch.items() if name != "id"})

def say_when_saving(job, batches):
    say(step=batches.position.step)
    save(job, batches)

def fingerprint(display, job, stats, seconds):
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(job.state):
        digest.update(np.asarray(leaf).tobytes())
    say(end=digest.hexdigest(), accuracy=job.accuracy)

demo.digits, demo.Job.learn, demo.Job.save, demo.Display.end = with_ids, and_write, say_when_saving, fingerprint
quiet = Console(file=open(os.devnull, "w"))
demo.run(demo.Options(epochs=epochs, checkpoint=folder, checkpoint_every=every, use_async=use_async), quiet)
"""
)


def lives(
    program: str, folder: Path, *, epochs: int, every: int, kills: int, seed: int, lines: int = 12, way: str = "sync"
) -> tuple[list[dict[str, Any]], str, int]:
    """Runs a program until it ends, killing it so many times, at some moment after one of its first `lines` lines, two a step, and
    before it has gone on for half as many more.

    A step is effective where its result lives on: of each life those that were saved, of the last one all.

    Returns:
        What effective steps learnt, the fingerprint of the end, and the kills.
    """
    faulthandler.cancel_dump_traceback_later()  # it may take long, and is watched by itself
    rng = random.Random(seed)
    effective: list[dict[str, Any]] = []
    killed = 0
    while True:
        del effective[saved_steps(folder) :]
        left = rng.randrange(lines) if killed < kills else -1
        enough = left + 1 + lines // 2 if killed < kills else 0
        command = [sys.executable, "-c", program, str(folder), str(epochs), str(every), way, str(enough)]
        process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
        watchdog = threading.Timer(120, process.kill)
        watchdog.start()
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


def saved_steps(folder: Path) -> int:
    """The steps whose results are saved, read as the programs read them."""
    for name, key in (("small.npz", "state"), ("digits.npz", "loader")):
        if (folder / name).exists():
            with np.load(folder / name) as saved:
                return ps.LoaderState.decode(saved[key].tobytes()).step
    return 0


@pytest.mark.parametrize(
    ("epochs", "every", "kills", "lines"), [(3, 2, 2, 12), pytest.param(12, 1, 50, 4, marks=pytest.mark.slow)], ids=["few", "fifty"]
)
def test_a_small_loop_killed_again_and_again(epochs: int, every: int, kills: int, lines: int, tmp_path: Path) -> None:
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    alone.mkdir()
    killed.mkdir()
    steps, end, none = lives(SMALL, alone, epochs=epochs, every=100, kills=0, seed=0)
    assert (len(steps), none) == (13 * epochs, 0)
    for epoch in range(epochs):
        assert sorted(row for step in steps[13 * epoch : 13 * epoch + 13] for row in step["learns"]) == list(range(200))
    assert lives(SMALL, killed, epochs=epochs, every=every, kills=kills, seed=1, lines=lines) == (steps, end, kills)


@pytest.fixture(scope="module")
def demo_left_alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], str]:
    steps, end, kills = lives(DEMO, tmp_path_factory.mktemp("alone"), epochs=5, every=10, kills=0, seed=0)
    assert (len(steps), kills) == (110, 0)
    assert len({row for step in steps[:22] for row in step["learns"]}) == 22 * 64
    return steps, end


@pytest.mark.slow
@pytest.mark.parametrize(("way", "every", "kills"), [("sync", 1, 5), ("async", 1, 3), ("sync", 4, 3)])
def test_the_demo_killed_again_and_again(way: str, every: int, kills: int, demo_left_alone: Any, tmp_path: Path) -> None:
    done = lives(DEMO, tmp_path, epochs=5, every=every, kills=kills, seed=kills, lines=4 * every, way=way)
    assert done == (*demo_left_alone, kills)


def test_the_unfinished_file_of_a_killed_save_is_in_nobodys_way(tmp_path: Path) -> None:
    from prefetchshard.app import demo

    checkpoint = demo.Checkpoint(tmp_path)
    assert checkpoint.load() is None
    (tmp_path / "digits.new.npz").write_bytes(b"half")
    assert checkpoint.load() is None
    state = ps.Loader(np.zeros((8, 1), np.float32), batch_size=8).state()
    checkpoint.save(demo.Saved([], 0.5, state))
    back = checkpoint.load()
    assert back is not None
    assert (back.accuracy, back.loader) == (0.5, state)
    assert os.listdir(tmp_path) == ["digits.npz"]
