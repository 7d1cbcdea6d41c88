"""A batch whose transfer is done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prefetchshard.base.position import Position
from prefetchshard.base.specs import LeafSpec


class PlacedBatch:
    """A batch whose transfer is done.

    Attributes:
        batch: what the consumer gets; `device_transform` may still be running on it.
        position: where it stands in the data.
        ready_at: when its transfer was done, seconds of the run's clock.
        bytes: of its leaves that were transferred, each counted once.
        rows: in it, padding not counted.
        spec: what the transfer was told to make.
        finish: makes the batch, where that is for the thread that takes it; None where it is made.
    """

    __slots__ = ("batch", "bytes", "finish", "position", "ready_at", "rows", "spec")

    def __init__(
        self, batch: Any, position: Position, ready_at: float, nbytes: int, rows: int, spec: Callable[[], tuple[LeafSpec, ...]]
    ) -> None:
        self.batch = batch
        self.spec = spec
        self.rows = rows
        self.position = position
        self.ready_at = ready_at
        self.bytes = nbytes
        self.finish: Callable[[], Any] | None = None
