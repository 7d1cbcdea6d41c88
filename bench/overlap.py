"""How much of the reading is hidden behind the step, and how early the first batch comes.

    python bench/overlap.py [--steps 60] [--rounds 3]

Sources and steps sleep (a step runs on devices, not on the host), so the ideal is known: the slower of the two, a step. The figure is
ideal over measured, the median of the rounds, counted from the second batch on. Beside prefetchshard, in the same run: grain, where it is
installed, with the same work; and "alone", what a loader that takes no time at all would reach: the slower of the source alone and the
step alone, which take longer than they are asked to sleep.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
import jax

jax.config.update("jax_num_cpu_devices", 8)

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import prefetchshard as ps

ROWS = 64


def batch(i: int) -> dict[str, Any]:
    return {"x": np.full((ROWS, 32, 32, 3), i % 100, np.float32), "y": np.full(ROWS, i, np.int32)}


class Sleepy:
    """A dataset of batches; making one takes `seconds`, and several can be made at once."""

    def __init__(self, seconds: float, length: int) -> None:
        self.seconds = seconds
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> dict[str, Any]:
        if not 0 <= i < self.length:
            raise IndexError(i)
        time.sleep(self.seconds)
        return batch(i)


def generator(seconds: float, length: int) -> Iterator[dict[str, Any]]:
    for i in range(length):
        time.sleep(seconds)
        yield batch(i)


def through_grain(seconds: float, length: int, workers: int, sharding: NamedSharding) -> Iterator[Any]:
    import grain

    options = grain.ReadOptions(num_threads=workers, prefetch_buffer_size=max(2, workers))
    data = grain.MapDataset.source(Sleepy(seconds, length)).to_iter_dataset(options)
    return iter(grain.experimental.device_put(data, sharding, cpu_buffer_size=4, device_buffer_size=2))


def efficiency(batches: Iterator[Any], step: float, ideal: float) -> float:
    next(batches)
    began, steps = time.perf_counter(), 0
    time.sleep(step)
    for _ in batches:
        time.sleep(step)
        steps += 1
    return ideal * (steps + 1) / (time.perf_counter() - began)


def alone(seconds: float, step: float, workers: int) -> float:
    """Seconds a step where the slower of source and step runs alone, 30 times."""
    began = time.perf_counter()
    for _ in generator(seconds, 30):
        pass
    made = time.perf_counter()
    for _ in range(30):
        time.sleep(step)
    return max((made - began) / workers, time.perf_counter() - made) / 30


def first_batch(depth: int, sharding: NamedSharding) -> float:
    """Time to the first ready batch over the time of reading one with one worker: a dataset of examples, 100 ms a batch."""

    class Examples:
        def __len__(self) -> int:
            return 64 * 40

        def __getitem__(self, i: int) -> Any:
            time.sleep(0.1 / 64)
            return np.full((16,), i, np.float32)

    began = time.perf_counter()
    for i in range(64):
        Examples()[i]
    alone = time.perf_counter() - began
    began = time.perf_counter()
    iterator = iter(ps.Loader(Examples(), sharding, batch_size=64, depth=depth))
    next(iterator)
    took = time.perf_counter() - began
    iterator.close()
    began = time.perf_counter()
    iterator = iter(ps.prefetch(generator(0.1, 50), sharding, depth=depth))
    next(iterator)
    whole = (time.perf_counter() - began) / 0.1
    iterator.close()
    return max(took / alone, whole)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    jax.block_until_ready(jax.device_put(batch(0), sharding))
    n = args.steps
    cases: list[tuple[str, float, float, int, Callable[[], Iterator[Any]]]] = [
        ("source 20 ms, step 20 ms, iterator", 0.02, 0.02, 1, lambda: iter(ps.prefetch(generator(0.02, n), sharding))),
        ("source 40 ms, step 10 ms, 4 workers", 0.04, 0.01, 4, lambda: iter(ps.prefetch(Sleepy(0.04, n), sharding, workers=4))),
        ("source 5 ms, step 5 ms, iterator", 0.005, 0.005, 1, lambda: iter(ps.prefetch(generator(0.005, 3 * n), sharding))),
    ]
    has_grain = importlib.util.find_spec("grain") is not None
    print(
        f"{os.cpu_count()} cores, {len(jax.devices())} {jax.devices()[0].platform} devices, jax {jax.__version__}, Python {sys.version.split()[0]}"
    )
    print(f"{'':42s} prefetchshard   alone   {'grain' if has_grain else '(grain is not installed)'}")
    for name, source, step, workers, ours in cases:
        ideal = max(source / workers, step)
        length = 3 * n if source < 0.01 else n
        rounds = []
        for _ in range(args.rounds):
            mine = efficiency(ours(), step, ideal)
            theirs = efficiency(through_grain(source, length, workers, sharding), step, ideal) if has_grain else float("nan")
            rounds.append((mine, ideal / alone(source, step, workers), theirs))
        prefetchshard, best, grain = (statistics.median(column) for column in zip(*rounds, strict=True))
        print(f"{name:42s} {prefetchshard:13.3f}   {best:.3f}   {grain:.3f}")
    for depth in (1, 2, 8):
        print(f"first batch over reading one batch, depth {depth}: {first_batch(depth, sharding):.2f}")


if __name__ == "__main__":
    main()
