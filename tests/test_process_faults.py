"""Two hundred faults of worker processes at random moments: the right error or the right end, and nothing left."""

from __future__ import annotations

import gc
import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import prefetchshard as ps
import process_sources as sources
from prefetchshard.processes import worker_process
from support import HANG_SECONDS
from test_processes import children

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks files up in /proc")]

FAULTS = 50  # in each of four tests
KINDS: dict[str, tuple[Callable[..., Any] | None, str]] = {
    "killed": (None, "was ended by SIGKILL"),
    "terminated": (None, "was ended by SIGTERM"),
    "exits": (sources.exits_at_random, "ended with exit code 3"),
    "raises": (sources.raises_at_random, "that exception cannot be pickled"),
    "memory": (sources.no_memory_at_random, "there is no shared memory"),
}


def shared_files() -> list[str]:
    """The shared memory that this process holds."""
    found: list[str] = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:  # the listing's own
            continue
        if "memfd:prefetchshard" in target:
            found.append(target)
    return found


def kill_soon(kind: str, dice: random.Random, stop: threading.Event) -> threading.Thread:
    """Kills a process of the run at a random moment, in a thread."""
    seconds, number = dice.uniform(0.0, 0.4), signal.SIGKILL if kind == "killed" else signal.SIGTERM

    def kill() -> None:
        stop.wait(seconds)
        while not stop.is_set():
            for pid in sorted(children()):
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    continue
                return

    thread = threading.Thread(target=kill)
    thread.start()
    return thread


def check_for_ever(iterator: Iterator[Any]) -> None:
    """Check that batches come in order."""
    for step in itertools.count():
        first = 8 * step % 64
        assert np.array_equal(next(iterator)["row"], np.arange(first, first + 8))


@pytest.mark.parametrize("seed", range(4))
def test_faults_at_random_moments(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "DEATH_SECONDS", HANG_SECONDS)
    dice = random.Random(seed)
    files = shared_files()
    for i in range(FAULTS):
        kind = dice.choice(list(KINDS))
        transform, words = KINDS[kind]
        monkeypatch.setattr(worker_process, "MAY_WORK_BEFORE", dice.random() < 0.3)
        rows = sources.Rows(64)
        loader = ps.Loader(
            rows, P("data"), batch_size=8, epochs=None, workers=ps.Processes(2), transform=transform or sources.takes_a_while, seed=i
        )
        iterator, stop = iter(loader), threading.Event()
        killer = kill_soon(kind, dice, stop) if transform is None else None
        try:
            with pytest.raises(ps.SourceError, match=words):
                check_for_ever(iterator)
        finally:
            stop.set()
            if killer is not None:
                killer.join()
        iterator.close()
        deadline = time.monotonic() + HANG_SECONDS
        while children() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not children()
        del iterator, loader
    gc.collect()
    assert shared_files() == files
