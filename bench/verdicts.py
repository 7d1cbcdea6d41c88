"""Loops whose bottleneck is known: what the verdict names, and whether removing it brings what the verdict promises.

    python bench/verdicts.py [--runs 10] [--only NAME ...]

Each situation runs with its cause and without it, alternating. Right: the stage named in every run, and the possible gain within ten points
of what removing the cause brought (of a gain above 100 %: within a tenth of the time that is left).
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")
import jax
import jax.numpy as jnp
import numpy as np

import prefetchshard as ps

BATCH = 16


def python_work(seconds: float) -> None:
    """Holds the interpreter's lock."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


SQUARE = np.random.default_rng(0).standard_normal((256, 256)).astype(np.float32)


def numpy_work(seconds: float) -> None:
    """Computes without the interpreter's lock."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        np.sort(SQUARE, axis=None)


class Rows:
    """A dataset whose rows take as long as `work` says."""

    def __init__(self, count: int, work: Callable[[int], object]) -> None:
        self.count, self.work = count, work

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> Any:
        if not 0 <= i < self.count:
            raise IndexError(i)
        self.work(i)
        return np.full(4, i, np.float32)


def batches(count: int, work: Callable[[int], object], shape: tuple[int, ...] = (8, 4)) -> Iterator[Any]:
    for i in range(count):
        work(i)
        yield np.full(shape, i, np.float32)


def nothing(*_: Any) -> None:
    pass


def asleep(seconds: float) -> Callable[..., None]:
    return lambda *_: time.sleep(seconds) if seconds else None


class Situation(NamedTuple):
    """A loop: `make(has_cause)` gives a loader and a step."""

    expected: str
    make: Callable[[bool], tuple[Any, Callable[[Any], object]]]
    removes: bool = True


@jax.jit
def _heavy(state: Any, batch: Any) -> Any:
    return jax.lax.fori_loop(0, 6, lambda _, s: jnp.tanh(s @ s) * 0.01 + batch.mean(), state)


def _unawaited() -> Callable[[Any], object]:
    state = [jnp.zeros((400, 400))]

    def step(batch: Any) -> None:
        state[0] = _heavy(state[0], batch)

    return step


def _leaves(count: int, leaves: int) -> Iterator[Any]:
    for i in range(count):
        yield {f"leaf {n}": np.full((8, 1), i, np.float32) for n in range(leaves)}


def _late_start(seconds: float) -> Callable[[int], None]:
    return lambda i: time.sleep(seconds if i == 0 else 0.001)


def _slow_transform(seconds: float) -> Callable[[Any], Any]:
    def transform(row: Any) -> Any:
        time.sleep(seconds)
        return row

    return transform


def _python_transform(seconds: float) -> Callable[[Any], Any]:
    def transform(row: Any) -> Any:
        python_work(seconds)
        return row

    return transform


def _slow_collate(seconds: float) -> Callable[[Any], Any]:
    def collate(rows: Any) -> Any:
        time.sleep(seconds)
        return np.stack(rows)

    return collate


LARGE = np.zeros((64, 1 << 20), np.float32)


SITUATIONS = {
    "python dataset": Situation(
        "lock", lambda has: (ps.Loader(Rows(800, (lambda i: python_work(0.0006)) if has else nothing), batch_size=BATCH), asleep(0.004))
    ),
    "python transform of an iterable": Situation(
        "lock",
        lambda has: (
            ps.Loader(
                (np.full(4, i, np.float32) for i in range(800)), batch_size=BATCH, transform=_python_transform(0.0006 if has else 0.0)
            ),
            asleep(0.004),
        ),
    ),
    "slow step": Situation(
        "consumer", lambda has: (ps.Loader(np.zeros((800, 16), np.float32), batch_size=16), asleep(0.04)), removes=False
    ),
    "step that is not waited for": Situation(
        "consumer", lambda has: (ps.Loader(np.zeros((3200, 64), np.float32), batch_size=32), _unawaited()), removes=False
    ),
    "python step": Situation(
        "consumer", lambda has: (ps.Loader(np.zeros((800, 64), np.float32), batch_size=16), lambda _: python_work(0.01)), removes=False
    ),
    "late start": Situation("start-up", lambda has: (ps.prefetch(batches(100, _late_start(2.0 if has else 0.001))), asleep(0.003))),
    "one stall": Situation(
        "reading", lambda has: (ps.prefetch(batches(40, lambda i: time.sleep(0.4 if has and i == 20 else 0.002))), asleep(0.01))
    ),
    "transform of four, reading of one": Situation(
        "transform",
        lambda has: (
            ps.Loader(Rows(1600, asleep(0.001)), batch_size=BATCH, transform=_slow_transform(0.004) if has else None, workers=8),
            asleep(0.006),
        ),
    ),
    "reading of four, transform of one": Situation(
        "reading",
        lambda has: (
            ps.Loader(Rows(1600, asleep(0.004) if has else nothing), batch_size=BATCH, transform=_slow_transform(0.001), workers=8),
            asleep(0.006),
        ),
    ),
    "sleeping generator": Situation("reading", lambda has: (ps.prefetch(batches(150, asleep(0.012 if has else 0.0))), asleep(0.008))),
    "slow collate": Situation(
        "transform",
        lambda has: (
            ps.Loader(list(np.zeros((1600, 4), np.float32)), batch_size=BATCH, collate=_slow_collate(0.03 if has else 0.0), workers=2),
            asleep(0.01),
        ),
    ),
    "numpy on one worker": Situation(
        "reading",
        lambda has: (ps.Loader(Rows(1600, (lambda i: numpy_work(0.001)) if has else nothing), batch_size=BATCH, workers=1), asleep(0.01)),
    ),
    "large copies": Situation(
        "copying",
        lambda has: (ps.Loader(LARGE if has else LARGE[:, :1024].copy(), batch_size=16, shuffle=True, epochs=30, workers=1), asleep(0.002)),
    ),
    "many leaves": Situation("transferring", lambda has: (ps.prefetch(_leaves(150, 400 if has else 1)), asleep(0.004))),
}


def run(situation: Situation, has_cause: bool) -> tuple[ps.Stats, float]:
    """The statistics of a run, and its seconds a step."""
    loader, step = situation.make(has_cause)
    iterator = iter(loader)
    for batch in iterator:
        step(batch)
    found = iterator.stats()
    if found.verdict.bound == "start-up" or situation.expected == "start-up" or found.steady.count < 20:
        return found, found.wall_seconds / found.batches
    return found, found.steady.wall / found.steady.count


def examine(name: str, runs: int) -> bool:
    """Prints a line; whether all was right."""
    situation = SITUATIONS[name]
    named, promised, brought = [], [], []
    verdict: Any = None
    for _ in range(runs):
        found, seconds = run(situation, True)
        verdict = found.verdict
        named.append(verdict.bound)
        promised.append(verdict.possible_gain)
        if situation.removes:
            _, without = run(situation, False)
            brought.append(seconds / without - 1)
    right = named.count(situation.expected)
    line = f"{name:34s} {situation.expected:12s} {right:2d} of {runs}"
    gain = statistics.median(promised)
    fits = True
    if brought:
        really = statistics.median(brought)
        fits = abs(gain - really) <= 0.1 * max(1.0, 1 + really)
        line += f"   promised {100 * gain:6.0f} %   brought {100 * really:6.0f} %{'' if fits else '   MISSED'}"
    else:
        line += f"   promised {100 * gain:6.1f} %"
    others = sorted(set(named) - {situation.expected})
    print(line + (f"   also named: {', '.join(others)}" if others else ""), flush=True)
    print(f"    {verdict}", flush=True)
    return right == runs and fits


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--only", nargs="*", choices=list(SITUATIONS), default=list(SITUATIONS))
    options = parser.parse_args()
    found = [examine(name, options.runs) for name in options.only]
    return int(not all(found))


if __name__ == "__main__":
    sys.exit(main())
