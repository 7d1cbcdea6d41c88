"""The statistics that a user gets, as a value."""

from __future__ import annotations

from typing import Literal

import msgspec

from prefetchshard.queues.bounded_queue import QueueStats
from prefetchshard.staging.layout import StagingStats


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """What a run has done so far, and where its time went.

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
        source_seconds: time spent in the source's own code, summed over threads.
        transform_seconds: time spent in `transform` and `collate`, summed over threads.
        copy_seconds: time spent copying into the staging memory, summed over threads.
        transfer_seconds: from dispatch of each transfer until it was ready, summed; transfers may overlap.
        first_batch_seconds: from the start of the run until its first batch was ready.
        workers: reader threads.
        host: the queue of host batches; its `backpressure_seconds` are the readers' waits for the transfer or the consumer.
        ready: the queue of ready batches; its `backpressure_seconds` are the transfer's waits for the consumer.
        staging: the ring.

    Example:
        loader = ps.Loader(np.zeros((64, 3), np.float32), P("data"), batch_size=16)
        list(loader)
        print(f"{loader.stats().stall_share:.0%} of the time waiting for input")
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
    source_seconds: float
    transform_seconds: float
    copy_seconds: float
    transfer_seconds: float
    first_batch_seconds: float
    workers: int
    host: QueueStats
    ready: QueueStats
    staging: StagingStats

    @property
    def stall_share(self) -> float:
        """The part of the wall time that the consumer waited for input, 0.0 to 1.0."""
        return self.stall_seconds / self.wall_seconds if self.wall_seconds else 0.0

    @property
    def bound(self) -> Literal["consumer", "source", "transform", "transfer", "copy"]:
        """What the loop's speed depended on: the consumer where it seldom waited, else the stage with the most time a thread."""
        if self.stall_share < 0.05:
            return "consumer"
        stages: dict[Literal["source", "transform", "transfer", "copy"], float] = {
            "source": self.source_seconds,
            "transform": self.transform_seconds / self.workers,
            "copy": self.copy_seconds / self.workers,
            "transfer": self.transfer_seconds,
        }
        return max(stages, key=lambda name: stages[name])

    def __str__(self) -> str:
        if not self.batches:
            again = f"; {self.replayed} items were read again to get to where the state was saved" if self.replayed else ""
            return f"no batch was handed out yet{again}"
        per_step = 1000 / self.batches
        head = (
            f"{self.batches} batches, {self.rows} rows: the step waited {100 * self.stall_share:.1f} % of the time for input "
            f"({self.stall_seconds * per_step:.2f} ms of each {self.wall_seconds * per_step:.2f} ms)"
        )
        times = (
            f"a batch took {self.source_seconds * per_step:.2f} ms in the source, {self.transform_seconds * per_step:.2f} ms in transforms, "
            f"{self.copy_seconds * per_step:.2f} ms of copying (summed over {self.workers} threads), "
            f"{self.transfer_seconds * per_step:.2f} ms of transfer"
        )
        return f"{head}; bound by the {self.bound}; {times}"
