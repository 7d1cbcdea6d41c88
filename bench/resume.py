"""What a state costs to take and to keep, and how long going on takes: `python -m bench.resume`.

Where rows are found by number, the middle of 2**33 rows is as near as the beginning. Sources without a state of their own are read
again; the table says how many items a second are pulled and dropped.
"""

from __future__ import annotations

import statistics
import time
import timeit
from collections.abc import Callable, Iterator

import jax
import msgspec
import numpy as np

import prefetchshard as ps

ROWS = 2**33
BATCH = 64
SKIPPED = 200_000
ROUNDS = 40


class Virtual:
    """Rows that exist only when they are asked for."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> np.ndarray:
        return np.array([row >> 20, row & 0xFFFFF], np.int32)


def sharding() -> jax.sharding.NamedSharding:
    return jax.sharding.NamedSharding(jax.make_mesh((jax.device_count(),), ("data",)), jax.sharding.PartitionSpec("data"))


def main() -> None:
    where = sharding()

    def make(state: ps.LoaderState | None = None) -> ps.Loader:
        return ps.Loader(Virtual(), where, batch_size=BATCH, shuffle=True, seed=1, state=state)

    first = make().state()
    middle = msgspec.structs.replace(first, rows=ROWS // 2, batches=ROWS // 2 // BATCH, step=ROWS // 2 // BATCH)
    print(f"{jax.device_count()} {jax.devices()[0].platform} devices; {ROWS:,} rows, shuffled, {BATCH} a batch\n")
    iterator = iter(make(middle))
    next(iterator)
    row("state()", _best(iterator.state, 1_000) * 1e6, "microseconds")
    row("state().encode()", _best(iterator.state().encode, 1_000) * 1e6, "microseconds")
    row("size of a state", len(iterator.state().encode()), "bytes")
    iterator.close()
    times: dict[str, list[float]] = {"at the beginning": [], "in the middle": []}
    for _ in range(ROUNDS):  # alternating, so that a change of the machine's speed meets both
        for name, state in zip(times, (first, middle), strict=True):
            times[name].append(until_first_batch(lambda state=state: make(state)))
    for name, found in times.items():
        row(f"first batch {name}, median of {ROUNDS}", statistics.median(found) * 1e3, "ms")
        row(f"first batch {name}, best", min(found) * 1e3, "ms")
    replay(where)


def until_first_batch(make: Callable[[], ps.Loader]) -> float:
    """From making the loader to having its first batch, seconds."""
    began = time.perf_counter()
    loader = make()
    batch = next(iter(loader))
    jax.block_until_ready(batch)
    taken = time.perf_counter() - began
    loader.close()
    return taken


def replay(where: jax.sharding.NamedSharding) -> None:
    def source() -> Iterator[np.ndarray]:
        example = np.zeros(2, np.int32)
        for _ in range(SKIPPED + 4 * BATCH):
            yield example

    head = iter(ps.Loader(source(), where, batch_size=BATCH))
    next(head)
    state = msgspec.structs.replace(head.state(), rows=SKIPPED, batches=SKIPPED // BATCH, step=SKIPPED // BATCH)
    head.close()
    began = time.perf_counter()
    iterator = iter(ps.Loader(source(), where, batch_size=BATCH, state=state))
    next(iterator)
    taken = time.perf_counter() - began
    row("examples read again", iterator.stats().replayed / taken, "a second")
    iterator.close()
    began = time.perf_counter()
    for _ in zip(range(SKIPPED), source(), strict=False):
        pass
    row("the same, in a bare loop", SKIPPED / (time.perf_counter() - began), "a second")


def _best(function: Callable[[], object], number: int) -> float:
    return min(timeit.repeat(function, number=number, repeat=7)) / number


def row(name: str, value: float, unit: str) -> None:
    print(f"{name:40} {value:14,.2f} {unit}")


if __name__ == "__main__":
    main()
