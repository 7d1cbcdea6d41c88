"""What `depth="auto"` brings: loops over sources that are fast enough on average, and pause now and then.

    python -m bench.auto_depth [--cases pauses,jitter] [--fixed 2,8] [--rounds 3] [--seconds 4]

Each figure is milliseconds of a step, the wait for its batch included, from the moment on when "auto" has had half of the seconds to find
its depth; the median of the rounds, in which fixed depths and "auto" take turns.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

import prefetchshard as ps

FIXED = (2, 4, 8, 16, 32)
STEP = 0.004
BATCH = np.zeros((64, 1024), np.float32)


def pausing(pause: float, every: int, usual: float = 0.001) -> Callable[[], Iterator[Any]]:
    """Batches that take `usual` seconds, each so many with a pause."""

    def make() -> Iterator[Any]:
        number = 0
        while True:
            number += 1
            time.sleep(pause if number % every == 0 else usual)
            yield BATCH

    return make


def jitter() -> Iterator[Any]:
    """Batches whose times are spread out as those of a network are: a third of a step at the median, and 25 steps now and then."""
    chance = random.Random(0)
    while True:
        time.sleep(min(0.1, chance.lognormvariate(-6.6, 1.2)))
        yield BATCH


def steady() -> Iterator[Any]:
    """Batches that each take longer than a step: no depth helps."""
    while True:
        time.sleep(0.006)
        yield BATCH


CASES: dict[str, Callable[[], Iterator[Any]]] = {
    "pauses": pausing(0.040, 20),
    "long pauses": pausing(0.100, 60),
    "jitter": jitter,
    "never waits": pausing(0.001, 2),
    "always waits": steady,
}


def pace(make: Callable[[], Iterator[Any]], depth: Any, seconds: float) -> tuple[float, int]:
    """Milliseconds of a step, and the depth at the end."""
    iterator = iter(ps.prefetch(make, epochs=None, depth=depth))
    try:
        next(iterator)
        began, steps = time.perf_counter(), 0
        half = None
        while (now := time.perf_counter()) < began + seconds:
            if half is None and now >= began + seconds / 2:
                half, steps = now, 0
            next(iterator)
            time.sleep(STEP)
            steps += 1
        assert half is not None
        return 1e3 * (time.perf_counter() - half) / steps, iterator.stats().ready.capacity
    finally:
        iterator.close()


def compare(make: Callable[[], Iterator[Any]], fixed: list[int], rounds: int, seconds: float) -> str:
    """A line of the table."""
    paces: dict[Any, list[float]] = {depth: [] for depth in (*fixed, "auto")}
    ends: list[int] = []
    for _ in range(rounds):
        for depth, found in paces.items():
            took, end = pace(make, depth, seconds)
            found.append(took)
            if depth == "auto":
                ends.append(end)
    return " ".join(f"{statistics.median(found):8.2f}" for found in paces.values()) + f"   {', '.join(map(str, ends))}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--fixed", default=",".join(map(str, FIXED)), help="depths")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=4.0, help="of a run")
    args = parser.parse_args()
    fixed = [int(depth) for depth in args.fixed.split(",")]
    print(
        f"{os.cpu_count()} CPUs, {len(jax.devices())} {jax.devices()[0].platform}, jax {jax.__version__}, Python {platform.python_version()}"
    )
    print(f"{'ms a step, depth':16s} {' '.join(f'{depth:>8}' for depth in (*fixed, 'auto'))}   ends at")
    for name in args.cases.split(","):
        print(f"{name:16s} {compare(CASES[name], fixed, args.rounds, args.seconds)}", flush=True)


if __name__ == "__main__":
    main()
