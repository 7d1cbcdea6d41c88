"""What is measured, with the parts that a loader works with: its staging ring, its `put`, its copies.

A transfer rate is of the best of a few rounds, so that what else the machine does counts little. The cost of a put is the median. Bytes per
second are decimal: 1 GB is 1e9 bytes.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from prefetchshard.base.clock import Clock
from prefetchshard.base.jax_types import block_until_ready
from prefetchshard.base.memory import AnyArray, Memory
from prefetchshard.placing.transfer import put
from prefetchshard.planning.packing import find_packing
from prefetchshard.sharding.rules import ShardingRules
from prefetchshard.staging.layout import Layout, Staging
from prefetchshard.streaming.copies import Copies, Finding

PUT_BYTES = 64 << 20
COPY_BYTES = 1 << 30
LEAST_BYTES = 1 << 20
MEMORY_SHARE = 8
"""The part of the memory that is left of which a measurement takes at most one in so many, for each of its arrays."""

PUT_ROUNDS = 5
SMALL_ROUNDS = 30
COPY_ROUNDS = 3
SMALL_COUNTS = (1, 10, 40)
SMALL_SHAPE = (64, 16)
ENOUGH = 0.9
"""The part of the best rate at which more threads are not worth having."""


def bounded(wanted: int, available_bytes: int | None) -> int:
    """How large an array may be: as wanted where there is room for it; at least 1 MiB, in whole ones.

    Args:
        wanted: bytes.
        available_bytes: of the host's memory; None where that is not known.
    """
    most = wanted if available_bytes is None else min(wanted, available_bytes // MEMORY_SHARE)
    return max(LEAST_BYTES, most // LEAST_BYTES * LEAST_BYTES)


# ------------------------------------------------------------------------------------------------------------- transfers


class Puts(msgspec.Struct, frozen=True):
    """A large put to one device, from two kinds of memory.

    Attributes:
        device: which.
        put_bytes: of one put.
        plain_seconds: until it is ready, from ordinary memory.
        plain_bytes_per_second: the same as a rate.
        staged_seconds: until it is ready, from the loader's staging memory.
        staged_bytes_per_second: the same as a rate.
        ratio: of the second rate to the first.
    """

    device: str
    put_bytes: int
    plain_seconds: float
    plain_bytes_per_second: float
    staged_seconds: float
    staged_bytes_per_second: float
    ratio: float


class Bus(msgspec.Struct, frozen=True):
    """What gets to the devices.

    Attributes:
        is_transferred: False on the CPU backend, which uses the staging memory where it lies: a rate from there means nothing.
        devices: each by itself; of the CPU backend only the first.
        together_bytes_per_second: to all at once, from the staging memory; None for one device.
    """

    is_transferred: bool
    devices: tuple[Puts, ...]
    together_bytes_per_second: float | None


def measure_bus(devices: Sequence[Any], staging: Staging, clock: Clock, available_bytes: int | None) -> Bus:
    """Puts of 64 MiB to each device and to all at once.

    Args:
        devices: of one kind; those that get batches.
        staging: chosen for the first of them.
        clock: monotonic seconds.
        available_bytes: of the host's memory; where that is little, puts are smaller. None: not known.
    """
    is_transferred = devices[0].platform != "cpu"
    measured = devices if is_transferred else devices[:1]
    nbytes = bounded(PUT_BYTES, None if available_bytes is None else available_bytes // len(measured))
    memory = _staged(staging, (nbytes,))
    plain = np.ones(nbytes, np.uint8)
    each = tuple([_measure_puts(device, plain, memory, clock) for device in measured])
    memory.release()
    del plain, memory
    return Bus(is_transferred, each, _measure_together(measured, staging, clock, nbytes) if len(measured) > 1 else None)


def _staged(staging: Staging, shape: tuple[int, ...]) -> Memory:
    """Staging memory as the readers of a loader leave it: written, and ready for the devices."""
    memory = staging.lease(Layout([(shape, np.dtype(np.uint8))]))
    memory.views[0][...] = 1
    memory.lock()
    return memory


def _measure_puts(device: Any, plain: AnyArray, memory: Memory, clock: Clock) -> Puts:
    where = [SingleDeviceSharding(device)]
    plain_seconds, staged_seconds = _best([[plain], [memory.views[0]]], where, clock)
    nbytes = plain.nbytes
    return Puts(
        device=str(device),
        put_bytes=nbytes,
        plain_seconds=plain_seconds,
        plain_bytes_per_second=nbytes / plain_seconds,
        staged_seconds=staged_seconds,
        staged_bytes_per_second=nbytes / staged_seconds,
        ratio=plain_seconds / staged_seconds,
    )


def _measure_together(devices: Sequence[Any], staging: Staging, clock: Clock, nbytes: int) -> float:
    sharding = NamedSharding(Mesh(np.array(devices), ("data",)), PartitionSpec("data"))
    memory = _staged(staging, (len(devices), nbytes))
    (seconds,) = _best([[memory.views[0]]], [sharding], clock)
    memory.release()
    return len(devices) * nbytes / seconds


def _best(batches: Sequence[Sequence[Any]], shardings: Sequence[Any], clock: Clock) -> list[float]:
    """The shortest time of each until it is ready, in rounds in which each has its turn. The first round only makes ready."""
    times: list[list[float]] = []
    for _ in range(1 + PUT_ROUNDS):
        times.append([])
        for leaves in batches:
            began = clock()
            arrays = block_until_ready(put(leaves, shardings))
            times[-1].append(clock() - began)
            del arrays  # before the next round, so that its memory is there again
    return [min(each) for each in zip(*times[1:], strict=True)]


class SmallPut(msgspec.Struct, frozen=True):
    """A put of small leaves over all devices, as batches go.

    Attributes:
        leaves: how many.
        leaf_bytes: of each.
        dispatch_seconds: for which the call takes the thread, where they go one by one.
        ready_seconds: until they are there.
        packed_dispatch_seconds: the same where they go as one buffer, cut up on the devices; None: a loader sends them one by one here.
        packed_ready_seconds: the same.
    """

    leaves: int
    leaf_bytes: int
    dispatch_seconds: float
    ready_seconds: float
    packed_dispatch_seconds: float | None
    packed_ready_seconds: float | None


def measure_small_puts(rules: ShardingRules, staging: Staging, clock: Clock) -> tuple[SmallPut, ...]:
    """Puts of 1, 10 and 40 leaves of 4 KiB, as large as that with rows for each device.

    Args:
        rules: of a loader without `sharding`.
        staging: chosen for its devices.
        clock: monotonic seconds.
    """
    split = rules.batch_split() or 1
    shape = (-(-SMALL_SHAPE[0] // split) * split, SMALL_SHAPE[1])
    return tuple([_measure_small_put(count, shape, rules, staging, clock) for count in SMALL_COUNTS])


def _measure_small_put(count: int, shape: tuple[int, ...], rules: ShardingRules, staging: Staging, clock: Clock) -> SmallPut:
    dtype = np.dtype(np.int32)
    layout = Layout([(shape, dtype)] * count)
    memory = staging.lease(layout)
    for number, view in enumerate(memory.views):
        view[...] = number
    memory.lock()
    _, structure = rules.flatten(list(memory.views))
    shardings = rules.shardings(structure, [shape] * count, [dtype] * count)
    one_by_one = _median_times(lambda: put(memory.views, shardings), clock)  # pyright: ignore[reportArgumentType] - none stays on the host
    packing = find_packing(layout, [shape] * count, shardings)
    packed = (
        (None, None)
        if packing is None
        else _median_times(lambda: packing.unpack(put([memory.slab], [packing.sharding])[0]), clock)  # as `Placer` does
    )
    memory.release()
    return SmallPut(count, layout.nbytes // count, *one_by_one, *packed)


def _median_times(dispatch: Callable[[], Any], clock: Clock) -> tuple[float, float]:
    """Seconds until the call returns, and until what it returned is ready."""
    times: list[tuple[float, float]] = []
    for _ in range(1 + SMALL_ROUNDS):  # the first one compiles
        began = clock()
        arrays = dispatch()
        dispatched = clock()
        block_until_ready(arrays)
        times.append((dispatched - began, clock() - began))
    dispatch_seconds, ready_seconds = (statistics.median(each) for each in zip(*times[1:], strict=True))
    return dispatch_seconds, ready_seconds


# ----------------------------------------------------------------------------------------------------------- host copies


class CopyRate(msgspec.Struct, frozen=True):
    """Copies from memory to memory by some threads at once.

    Attributes:
        threads: how many.
        numpy_bytes_per_second: all together, through the processor's cache as NumPy decides.
        streaming_bytes_per_second: past it; None where there are no such copies.
    """

    threads: int
    numpy_bytes_per_second: float
    streaming_bytes_per_second: float | None


class HostCopies(msgspec.Struct, frozen=True):
    """What the readers of a loader could copy if they did nothing else.

    Attributes:
        copied_bytes: in each round, by all threads together.
        rates: by number of threads, from one up to the CPUs that may be used.
        uses_streaming: which of the two kinds a loader uses for large values.
        best_bytes_per_second: of that kind.
        saturating_threads: the fewest that come to nine tenths of it.
    """

    copied_bytes: int
    rates: tuple[CopyRate, ...]
    uses_streaming: bool
    best_bytes_per_second: float
    saturating_threads: int

    def used(self, rate: CopyRate) -> float:
        """Bytes per second of the kind that a loader uses."""
        streaming = rate.streaming_bytes_per_second
        return streaming if self.uses_streaming and streaming is not None else rate.numpy_bytes_per_second


def thread_counts(cpus: int) -> list[int]:
    """1, 2, 4, ... and the number of CPUs itself."""
    return [1 << i for i in range(cpus.bit_length()) if 1 << i < cpus] + [cpus]


def measure_copies(streaming: Finding, cpus: int, clock: Clock, available_bytes: int | None) -> HostCopies:
    """Copies of an array that no cache holds, cut into one share for each thread.

    Args:
        streaming: what was found out about copies past the cache.
        cpus: the most threads.
        clock: monotonic seconds.
        available_bytes: of the host's memory; where that is little, less is copied. None: not known.
    """
    nbytes = bounded(COPY_BYTES, available_bytes)
    source, target = np.ones(nbytes, np.uint8), np.empty(nbytes, np.uint8)
    kinds = {"numpy": Copies()} if streaming.copy_rows is None else {"numpy": Copies(), "streaming": Copies(streaming.copy_rows)}
    counts = thread_counts(cpus)
    _copy_seconds(counts[-1], {"numpy": Copies()}, target, source, clock, rounds=1)  # the system gives memory out when it is written to
    rates: list[CopyRate] = []
    for threads in counts:
        seconds = _copy_seconds(threads, kinds, target, source, clock, rounds=COPY_ROUNDS)
        rates.append(CopyRate(threads, nbytes / seconds["numpy"], nbytes / seconds["streaming"] if "streaming" in seconds else None))
    return summary(nbytes, rates, uses_streaming=streaming.is_faster)


def summary(copied_bytes: int, rates: Sequence[CopyRate], *, uses_streaming: bool) -> HostCopies:
    """The rates with what follows from them.

    Args:
        copied_bytes: in each round.
        rates: at least one.
        uses_streaming: as for `HostCopies`.
    """
    found = HostCopies(copied_bytes, tuple(rates), uses_streaming, 0.0, 1)
    best = max(found.used(rate) for rate in rates)
    saturating = min(rate.threads for rate in rates if found.used(rate) >= ENOUGH * best)
    return HostCopies(copied_bytes, tuple(rates), uses_streaming, best, saturating)


def _copy_seconds(
    threads: int, kinds: Mapping[str, Copies], target: AnyArray, source: AnyArray, clock: Clock, *, rounds: int
) -> dict[str, float]:
    """The shortest time of each kind, from when the first thread may begin to when the last has ended."""
    shares = list(zip(np.array_split(target, threads), np.array_split(source, threads), strict=True))
    began = 0.0

    def begin() -> None:
        nonlocal began
        began = clock()

    together = threading.Barrier(threads, begin)  # one of the threads calls `begin` when all are there, and then all go on

    def copy(copies: Copies, share: tuple[AnyArray, AnyArray]) -> float:
        together.wait()
        copies.copy(*share)
        return clock()

    best = dict.fromkeys(kinds, float("inf"))
    with ThreadPoolExecutor(threads, thread_name_prefix="prefetchshard-doctor") as pool:
        try:
            for _ in range(rounds):
                for name, copies in kinds.items():
                    ends = [pool.submit(copy, copies, share) for share in shares]
                    ended = max(end.result() for end in ends)
                    best[name] = min(best[name], ended - began)
        except BaseException:  # also Ctrl-C: those that wait for the others would wait for ever
            together.abort()
            raise
    return best
