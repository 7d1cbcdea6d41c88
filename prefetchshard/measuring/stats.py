"""The statistics that a user gets, as a value."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import msgspec
import numpy as np

from prefetchshard.measuring.delivered import Steps
from prefetchshard.measuring.distribution import Distribution
from prefetchshard.measuring.locking import Locking
from prefetchshard.measuring.setup import Setup
from prefetchshard.measuring.verdict import Bound, Measured, Verdict, judge
from prefetchshard.queues.bounded_queue import QueueStats
from prefetchshard.staging.layout import StagingStats


class Stages(msgspec.Struct, frozen=True):
    """What each stage took for a batch that was handed out, in seconds summed over the threads that worked on it.

    Attributes:
        reading: in the source's own code.
        transform: in `transform` and `collate`.
        copying: into staging memory.
        transferring: from dispatch, or from the end of the transfer before it, until the batch was ready on its devices.
    """

    reading: Distribution = Distribution()
    transform: Distribution = Distribution()
    copying: Distribution = Distribution()
    transferring: Distribution = Distribution()

    def __sub__(self, earlier: Stages) -> Stages:
        return Stages(*(getattr(self, name) - getattr(earlier, name) for name in self.__struct_fields__))


class ThreadTimes(msgspec.Struct, frozen=True):
    """What threads of one kind spent their time on; seconds, summed over them.

    Attributes:
        threads: how many there were, those among them that came and went.
        busy_seconds: at work.
        cpu_seconds: on a CPU. Far below `busy_seconds`: they waited for files or a network, or for the interpreter's lock.
        input_seconds: waiting for something to do.
        room_seconds: waiting for a place in the queue after them.
    """

    threads: int = 0
    busy_seconds: float = 0.0
    cpu_seconds: float = 0.0
    input_seconds: float = 0.0
    room_seconds: float = 0.0

    def __sub__(self, earlier: ThreadTimes) -> ThreadTimes:
        return ThreadTimes(
            self.threads,
            self.busy_seconds - earlier.busy_seconds,
            self.cpu_seconds - earlier.cpu_seconds,
            self.input_seconds - earlier.input_seconds,
            self.room_seconds - earlier.room_seconds,
        )


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """What a run has done so far, and where its time went.

    It is shown as a text: first what the loop waits for and what would change that (`verdict`), then a table. `to_dict()`, `dict(stats)`
    and `{**stats}` give all of it for a log. `later - earlier` is what happened between two of them.

    Attributes:
        batches: handed out.
        rows: in them, padding not counted; 0 where the batches have no rows in common.
        bytes: of the batches handed out, each counted once however many devices hold it.
        dropped_rows: rows of a remainder that was dropped.
        padded_rows: padding rows added.
        replayed: examples (without `batch_size`: batches) that were read again to get to where a state was saved.
        wall_seconds: from the first `next()` to the last one.
        stall_seconds: time that the consumer waited inside `next()`. Near 0: the loader keeps up. Near `wall_seconds`: input bound.
        busy_seconds: time that the consumer spent between one `next()` and the following one.
        start_up_seconds: of `stall_seconds`, the wait for the first batch.
        warm_up: the steps that used up what was read ahead during start-up and the first step, which compiles.
        steady: the steps after these, with what each wait was for.
        source_seconds: time spent in the source's own code, summed over threads; of an async source, time that it was waited for.
        transform_seconds: time spent in `transform` and `collate`, summed over threads.
        copy_seconds: time spent copying into the staging memory, summed over threads.
        transfer_seconds: time in which a transfer was on its way.
        dispatch_seconds: of the calls that begin transfers; it grows with the number of leaves.
        next: how long `next()` took, but for the first batch.
        step: how long the consumer took from one batch to its next call of `next()`, but for the first step, which compiles.
        stages: how long each stage took for a batch.
        source_thread: the thread that pulls an iterator; its `threads` are 0 where there is none.
        readers: the threads that read by number, transform and copy.
        locking: the interpreter's lock, as the transfer thread saw it while it had nothing to do.
        longest_wait: the stage for which the longest `next()` waited; empty where none has waited.
        ready_batch_seconds: how long batches were ready before they were taken, summed; see `mean_ready`.
        host_batch_seconds: how long batches were read before their transfer began, summed; see `mean_read`.
        devices: bytes a second to each device, by its name, where transfers were looked at one by one; empty where all go to one device.
        first_batch_seconds: from the start of the run until its first batch was ready.
        workers: reader threads.
        host: the queue of host batches; its `backpressure_seconds` are the readers' waits for the transfer or the consumer.
        ready: the queue of ready batches; its `backpressure_seconds` are the transfer's waits for the consumer.
        staging: the ring.
        setup: how the loader was made.

    Example:
        loader = ps.Loader(np.zeros((64, 3), np.float32), P("data"), batch_size=16)
        list(loader)
        print(loader.stats().verdict)
    """

    batches: int
    rows: int
    bytes: int
    dropped_rows: int
    padded_rows: int
    replayed: int = 0
    wall_seconds: float
    stall_seconds: float
    busy_seconds: float
    start_up_seconds: float = 0.0
    warm_up: Steps = Steps()
    steady: Steps = Steps()
    source_seconds: float
    transform_seconds: float
    copy_seconds: float
    transfer_seconds: float
    dispatch_seconds: float = 0.0
    next: Distribution = Distribution()
    step: Distribution = Distribution()
    stages: Stages = Stages()
    source_thread: ThreadTimes = ThreadTimes()
    readers: ThreadTimes = ThreadTimes()
    locking: Locking = Locking()
    longest_wait: str = ""
    ready_batch_seconds: float = 0.0
    host_batch_seconds: float = 0.0
    devices: dict[str, float] = {}
    first_batch_seconds: float
    workers: int
    host: QueueStats
    ready: QueueStats
    staging: StagingStats
    setup: Setup = Setup()

    @property
    def stall_share(self) -> float:
        """The part of the wall time that the consumer waited for input, start-up included, 0.0 to 1.0."""
        return self.stall_seconds / self.wall_seconds if self.wall_seconds else 0.0

    @property
    def verdict(self) -> Verdict:
        """What the loop's speed depends on, what that costs, and what would change it."""
        return judge(
            Measured(
                batches=self.batches,
                wall=self.wall_seconds,
                start_up=self.start_up_seconds,
                warm_up=self.warm_up,
                steady=self.steady,
                step=self.step,
                reading=self.stages.reading,
                transform=self.stages.transform,
                copying=self.stages.copying,
                transferring=self.stages.transferring,
                dispatching=self.dispatch_seconds,
                source=(self.source_thread.threads, self.source_thread.busy_seconds, self.source_thread.cpu_seconds),
                readers=(self._present, self.readers.busy_seconds, self.readers.cpu_seconds),
                locking=self.locking,
                longest=self.next.largest,
            ),
            self.setup,
        )

    @property
    def bound(self) -> Bound:
        """`verdict.bound`."""
        return self.verdict.bound

    @property
    def rows_per_second(self) -> float:
        """Rows handed out a second, from the first `next()` to the last one."""
        return self.rows / self.wall_seconds if self.wall_seconds else 0.0

    @property
    def bytes_per_second(self) -> float:
        """Bytes handed out a second, from the first `next()` to the last one."""
        return self.bytes / self.wall_seconds if self.wall_seconds else 0.0

    @property
    def transfer_bytes_per_second(self) -> float:
        """Bytes a second while a transfer was on its way, to all devices together."""
        return self.bytes / self.transfer_seconds if self.transfer_seconds else 0.0

    @property
    def mean_ready(self) -> float:
        """Batches that were ready for the consumer, averaged over the time from the first `next()` to the last one.

        It may be more than `depth`: a batch is ready as soon as its transfer is, also while it waits for its place in the queue.
        """
        return self.ready_batch_seconds / self.wall_seconds if self.wall_seconds else 0.0

    @property
    def mean_read(self) -> float:
        """Batches that were read and waited for their transfer, averaged likewise."""
        return self.host_batch_seconds / self.wall_seconds if self.wall_seconds else 0.0

    @property
    def imbalance(self) -> float:
        """By how much the fastest device gets its bytes faster than the slowest: 0.5 is "half as fast again"; 0.0 where not known."""
        rates = [rate for rate in self.devices.values() if rate > 0]
        return max(rates) / min(rates) - 1.0 if rates else 0.0

    def __sub__(self, earlier: Stats) -> Stats:
        """What happened after an earlier look at the same run. Queues, ring and rates of devices are those of the later one."""
        changes: dict[str, Any] = {}
        for name in _ADDED_UP:
            changes[name] = getattr(self, name) - getattr(earlier, name)
        if self.next.largest == earlier.next.largest:
            changes["longest_wait"] = ""
        return msgspec.structs.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Every field and what follows from them, as numbers, text and dicts that JSON can hold; None for what is not known yet."""
        found: dict[str, Any] = {**_plain(self), **{name: getattr(self, name) for name in _DERIVED}, "verdict": _plain(self.verdict)}
        if not self.batches:
            found.update(first_batch_seconds=None, stall_share=None, bound=None, verdict=None)
        return found

    def keys(self) -> list[str]:
        """The names in `to_dict()`."""
        return list(self.to_dict())

    def __getitem__(self, name: str) -> Any:
        return self.to_dict()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __repr__(self) -> str:
        return str(self)  # what a notebook shows

    def __str__(self) -> str:
        if not self.batches:
            again = f"; {self.replayed} items were read again to get to where the state was saved" if self.replayed else ""
            return f"no batch was handed out yet{again}{self._dropped}"
        return "\n".join([str(self.verdict), "", *self._table(), "", *self._lines()])

    def _table(self) -> list[str]:
        lines = [f"{'ms a batch':<14}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}{'largest':>10}  at step"]
        for name, found in (
            ("next()", self.next),
            ("step", self.step),
            *((name, getattr(self.stages, name)) for name in self.stages.__struct_fields__),
        ):
            times = (found.mean, found.p50, found.p90, found.p99, found.largest)
            at = found.largest_step if found.largest_step >= 0 else ""
            lines.append(f"{name:<14}{''.join(f'{1000 * seconds:>10.3f}' for seconds in times)}  {at}".rstrip())
        return lines

    def _lines(self) -> Iterator[str]:
        per_step = 1000 / self.batches
        yield (
            f"{self.batches} batches, {self.rows} rows in {self.wall_seconds:.2f} s: {self.rows_per_second:,.0f} rows/s, "
            f"{self.bytes_per_second / 1e6:,.1f} MB/s{self._dropped}"
        )
        yield (
            f"the step waited {100 * self.stall_share:.1f} % of the time for input ({self.stall_seconds * per_step:.2f} ms of each "
            f"{self.wall_seconds * per_step:.2f} ms), {self.start_up_seconds:.3f} s of it for the first batch"
        )
        if self.longest_wait and self.next.largest:
            yield f"the longest wait, {1000 * self.next.largest:.1f} ms at step {self.next.largest_step}, was for {self.longest_wait}"
        if self.source_thread.threads:
            yield f"source thread: {_shown(self.source_thread)}"
        if self.readers.threads:
            in_all = "" if self._present == self.readers.threads else f" ({self.readers.threads} in all, as they come and go)"
            yield f"{self._present} reader threads{in_all}: {_shown(self.readers)}"
        yield f"on average {self.mean_read:.1f} batches wait for their transfer, and {self.mean_ready:.1f} for the consumer (depth {self.ready.capacity})"
        if self.locking.waits:
            yield f"the interpreter's lock was held at {100 * self.locking.share:.0f} % of {self.locking.looks} looks"
        yield f"transfers: {self.transfer_bytes_per_second / 1e9:.2f} GB/s while one is on its way"
        if self.devices:
            rates = ", ".join(f"{name} {rate / 1e9:.2f}" for name, rate in self.devices.items())
            yield f"GB/s to each device: {rates} (imbalance {100 * self.imbalance:.0f} %)"

    @property
    def _present(self) -> int:
        """Reader threads at once: others may have come and gone."""
        return min(self.readers.threads, max(1, self.workers))

    @property
    def _dropped(self) -> str:
        return f"; {self.dropped_rows} rows of a remainder were dropped" if self.dropped_rows else ""


_DERIVED = (
    "stall_share", "bound", "rows_per_second", "bytes_per_second", "transfer_bytes_per_second", "mean_ready", "mean_read", "imbalance",
)  # fmt: skip

_ADDED_UP = (
    "batches", "rows", "bytes", "dropped_rows", "padded_rows", "replayed", "wall_seconds", "stall_seconds", "busy_seconds",
    "start_up_seconds", "warm_up", "steady", "source_seconds", "transform_seconds", "copy_seconds", "transfer_seconds", "dispatch_seconds", "next", "step", "stages",
    "source_thread", "readers", "locking", "ready_batch_seconds", "host_batch_seconds",
)  # fmt: skip


def _shown(times: ThreadTimes) -> str:
    return (
        f"{times.busy_seconds:.2f} s at work ({times.cpu_seconds:.2f} s on a CPU), {times.input_seconds:.2f} s waiting for input, "
        f"{times.room_seconds:.2f} s for room"
    )


def _plain(struct: msgspec.Struct) -> dict[str, Any]:
    """The fields as Python's own numbers, structs in them as dicts."""
    if isinstance(struct, Distribution):
        return struct.to_dict()
    return {name: _plain_value(getattr(struct, name)) for name in struct.__struct_fields__}


def _plain_value(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        return _plain(value)
    return cast("Any", value).item() if isinstance(value, np.generic) else value
