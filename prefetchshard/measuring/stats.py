"""The statistics that a user gets, as a value."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, cast

import msgspec
import numpy as np

from prefetchshard.queues.bounded_queue import QueueStats
from prefetchshard.staging.layout import StagingStats


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """What a run has done so far, and where its time went.

    It is shown as a text that says what the loop waits for. `to_dict()`, `dict(stats)` and `{**stats}` give all of it for a log.

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
        source_seconds: time spent in the source's own code, summed over threads; of an async source, time that it was waited for.
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

    def to_dict(self) -> dict[str, Any]:
        """Every field, `stall_share` and `bound`, as numbers, text and dicts that JSON can hold; None for what is not known yet."""
        found: dict[str, Any] = {**_plain(self), "stall_share": self.stall_share, "bound": self.bound}
        if not self.batches:
            found.update(first_batch_seconds=None, stall_share=None, bound=None)
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
        return f"{head}; bound by the {self.bound}; {times}{self._dropped}"

    @property
    def _dropped(self) -> str:
        return f"; {self.dropped_rows} rows of a remainder were dropped" if self.dropped_rows else ""


def _plain(struct: msgspec.Struct) -> dict[str, Any]:
    """The fields as Python's own numbers, structs in them as dicts."""
    return {name: _plain_value(getattr(struct, name)) for name in struct.__struct_fields__}


def _plain_value(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        return _plain(value)
    return cast("Any", value).item() if isinstance(value, np.generic) else value
