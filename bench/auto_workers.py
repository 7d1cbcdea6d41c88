"""How near `workers="auto"` comes to the best fixed number of reader threads, and how soon.

    python -m bench.auto_workers [--cases sleeping,python] [--rounds 3] [--seconds 0.8]

The loop takes batches and does nothing else, but in `a slow step`. Fixed numbers and "auto" take turns, and each figure is the median of
the rounds. A run of a fixed number lets its first batches go by; "auto" is measured from its 51st batch on. `within` is the first batch
from which on eight batches in a row came, on average, in the time of the best fixed number over 0.9. A source that changes half-way is
compared by its second half, and the 50 batches are counted from the change.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")

import jax
import numpy as np

import prefetchshard as ps

FIXED = (1, 2, 4, 8, 16, 32)
SETTLED = 50
"""Batches that "auto" has to find its number."""
IN_A_ROW = 8
GOOD = 0.9
BATCH = 16


class Examples:
    """A dataset of examples, each made by a function; from row `change` on by another one."""

    def __init__(self, make: Callable[[int], Any], then: Callable[[int], Any] | None = None, change: int = 0) -> None:
        self.make, self.then, self.change = make, then, change

    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, row: int) -> Any:
        return self.make(row) if self.then is None or row < self.change else self.then(row)


def sleeping(seconds: float) -> Callable[[int], Any]:
    def make(row: int) -> Any:
        time.sleep(seconds)
        return np.full(256, row, np.float32)

    return make


_numbers = np.random.default_rng(0).random(200_000).astype(np.float32)


def computing(row: int) -> Any:
    """NumPy that lets go of the lock, some milliseconds."""
    return np.sort(_numbers)[:256]


def python(row: int) -> Any:
    """Python that holds the lock, about 0.5 ms."""
    total = 0
    for i in range(6000):
        total = (total * 31 + i) & 0xFFFF
    return np.full(256, total, np.float32)


def quick(row: int) -> Any:
    return np.full(256, row, np.float32)


def _examples(make: Callable[[int], Any]) -> Callable[[Any], Any]:
    return lambda workers: ps.Loader(Examples(make), batch_size=BATCH, workers=workers)


def _changing(make: Callable[[int], Any], then: Callable[[int], Any], at: int) -> Callable[[Any], Any]:
    return lambda workers: ps.Loader(Examples(make, then, at * BATCH), batch_size=BATCH, workers=workers)


def _transformed(make: Callable[[int], Any]) -> Callable[[Any], Any]:
    return lambda workers: ps.Loader(itertools.count(), batch_size=BATCH, transform=make, workers=workers)


def _images(workers: Any) -> Any:
    return ps.Loader(
        {"image": images()}, batch_size=512 if jax.default_backend() != "cpu" else 8, shuffle=True, seed=0, epochs=None, workers=workers
    )


_made: list[Any] = []


def images() -> Any:
    if not _made:
        _made.append(np.random.default_rng(0).integers(0, 256, (4096 if jax.default_backend() != "cpu" else 512, 224, 224, 3), np.uint8))
    return _made[0]


class Case:
    """A workload.

    Args:
        make: the loader with so many workers.
        change: the batch at which the source changes; 0: it does not.
        step: seconds that the loop takes for a batch.
    """

    def __init__(self, make: Callable[[Any], Any], *, change: int = 0, step: float = 0.0) -> None:
        self.make, self.change, self.step = make, change, step


CASES: dict[str, Case] = {
    "sleeping": Case(_examples(sleeping(0.01))),
    "a slow step": Case(_examples(sleeping(0.01)), step=0.04),
    "numpy": Case(_examples(computing)),
    "python": Case(_examples(python)),
    "fast": Case(_examples(quick)),
    "images": Case(_images),
    "sleeping stream": Case(_transformed(sleeping(0.01))),
    "python stream": Case(_transformed(python)),
    "slow to fast": Case(_changing(sleeping(0.01), quick, 30), change=30),
    "fast to slow": Case(_changing(quick, sleeping(0.01), 400), change=400),
    "waits to computes": Case(_changing(sleeping(0.01), computing, 30), change=30),
}


def times(case: Case, workers: Any, skip: int, seconds: float) -> tuple[list[float], int]:
    """When each batch from the change on was there, and the threads at the end; until `skip` batches and these seconds have gone by."""
    iterator = iter(case.make(workers))
    found: list[float] = []
    try:
        for _ in range(case.change):
            next(iterator)
        found.append(time.perf_counter())
        until = None
        while until is None or found[-1] < until or len(found) < skip + IN_A_ROW:
            next(iterator)
            if case.step:
                time.sleep(case.step)
            found.append(time.perf_counter())
            if len(found) == skip:
                until = found[-1] + seconds
        return found, iterator.stats().workers
    finally:
        iterator.close()


def pace(found: list[float], skip: int) -> float:
    """Milliseconds a batch."""
    some = found[skip - 1 :]
    return 1e3 * (some[-1] - some[0]) / (len(some) - 1)


def within(found: list[float], best: float) -> int | None:
    for i in range(len(found) - IN_A_ROW):
        if 1e3 * (found[i + IN_A_ROW] - found[i]) / IN_A_ROW <= best / GOOD:
            return i + 1
    return None


def compare(case: Case, fixed: list[int], rounds: int, seconds: float) -> str:
    """A line of the table."""
    paces: dict[Any, list[float]] = {workers: [] for workers in (*fixed, "auto")}
    autos: list[list[float]] = []
    ends: list[int] = []
    for _ in range(rounds):
        for workers in fixed:
            paces[workers].append(pace(times(case, workers, IN_A_ROW, seconds)[0], IN_A_ROW))
        found, end = times(case, "auto", SETTLED, seconds)
        paces["auto"].append(pace(found, SETTLED))
        autos.append(found)
        ends.append(end)
    medians = {workers: statistics.median(some) for workers, some in paces.items()}
    best = min(fixed, key=lambda workers: medians[workers])
    soon = [within(found, medians[best]) for found in autos]
    words = ", ".join("never" if some is None else str(some) for some in soon)
    ratio = medians[best] / medians["auto"]
    all_fixed = "  ".join(f"{workers}: {medians[workers]:.2f}" for workers in fixed)
    return (
        f"{best:5d} {medians[best]:9.2f} {medians['auto']:9.2f} {ratio:6.2f}  {', '.join(map(str, ends)):>12s}  {words:>14s}   {all_fixed}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--fixed", default=",".join(map(str, FIXED)), help="numbers of threads")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.6, help="measured time of a run")
    args = parser.parse_args()
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    print(f"{cpus} CPUs, {len(jax.devices())} {jax.devices()[0].platform}, jax {jax.__version__}, Python {platform.python_version()}")
    print(f"{'':20s} {'best':>5s} {'ms':>9s} {'auto ms':>9s} {'ratio':>6s}  {'threads':>12s}  {'within':>14s}   ms of each fixed number")
    for name in args.cases.split(","):
        print(f"{name:20s} {compare(CASES[name], [int(n) for n in args.fixed.split(',')], args.rounds, args.seconds)}", flush=True)


if __name__ == "__main__":
    main()
