"""A batch whose transfer is done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prefetchshard.base.position import Position
from prefetchshard.base.specs import LeafSpec
from prefetchshard.measuring.timeline import BatchTimes


class PlacedBatch:
    """A batch whose transfer is done.

    Attributes:
        batch: what the consumer gets; `device_transform` may still be running on it.
        position: where it stands in the data.
        times: when each thing happened to it.
        bytes: of its leaves that were transferred, each counted once.
        rows: in it, padding not counted.
        spec: what the transfer was told to make.
        finish: makes the batch, where that is for the thread that takes it; None where it is made.
    """

    __slots__ = ("batch", "bytes", "finish", "position", "rows", "spec", "times")

    def __init__(
        self, batch: Any, position: Position, times: BatchTimes, nbytes: int, rows: int, spec: Callable[[], tuple[LeafSpec, ...]]
    ) -> None:
        self.batch = batch
        self.spec = spec
        self.rows = rows
        self.position = position
        self.times = times
        self.bytes = nbytes
        self.finish: Callable[[], Any] | None = None
