"""A batch whose transfer is done."""

from __future__ import annotations

import threading
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
        finish: makes the batch, where the thread that takes it has to; None where it is made.
    """

    __slots__ = ("_finishing", "batch", "bytes", "finish", "position", "ready_at", "rows", "spec")

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
        self._finishing: Any = None

    def finish_by(self, finish: Callable[[], Any]) -> None:
        """Leave the making of the batch to the thread that takes it."""
        self._finishing = threading.RLock()  # one thread may look at what another one takes
        self.finish = finish

    def finished(self) -> Any:
        """The batch, made now where it is not yet."""
        if self.finish is not None and self._finishing is not None:
            with self._finishing:
                finish = self.finish
                if finish is not None:
                    self.batch = finish()
                    self.finish = None
        return self.batch
