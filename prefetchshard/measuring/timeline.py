"""When each thing happened to a batch, from reading to `next()`. Threads note it as they go; nothing is worked out here."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

Work: TypeAlias = Literal["reading", "transforming", "collating", "planning", "copying", "batching", "finishing"]
"""What a thread does for a batch before its transfer, as errors name it."""

Stage: TypeAlias = Literal["reading", "transform", "copying", "transferring"]
"""What statistics tell apart."""

STAGES: tuple[Stage, ...] = ("reading", "transform", "copying", "transferring")

STAGE_OF: dict[Work, Stage] = {
    "reading": "reading",
    "transforming": "transform",
    "collating": "transform",
    "planning": "copying",
    "copying": "copying",
    "batching": "copying",
    "finishing": "copying",
}


class PartTimes(NamedTuple):
    """What one thread did for a batch in one go.

    Attributes:
        thread: its name.
        began_at: seconds of the run's clock.
        ended_at: likewise.
        seconds: of each kind of work; a process's own seconds may be more than the thread's.
    """

    thread: str
    began_at: float
    ended_at: float
    seconds: dict[Work, float]


class BatchTimes:
    """When each thing happened to one batch, in seconds of the run's clock; 0.0 for what has not happened.

    Attributes:
        epoch: of the batch.
        row: the first row of the batch in its epoch; without `batch_size`, its number.
        step: of the run, counted from its beginning; -1 before it is known.
        parts: what the readers did for it.
        dispatch_at: its transfer began.
        dispatched_at: the calls that begin its transfer returned.
        ready_at: its transfer was done.
        asked_at: the `next()` that got it was called.
        taken_at: that `next()` had it.
        bytes: of its leaves that were transferred, each counted once.
        rows: in it, padding not counted.

    Thread safety: each attribute is written by one thread; parts may be appended by any.
    """

    __slots__ = ("asked_at", "bytes", "dispatch_at", "dispatched_at", "epoch", "parts", "ready_at", "row", "rows", "step", "taken_at")

    def __init__(self, epoch: int, row: int = 0) -> None:
        self.epoch = epoch
        self.row = row
        self.step = -1
        self.parts: list[PartTimes] = []
        self.dispatch_at = self.dispatched_at = self.ready_at = self.asked_at = self.taken_at = 0.0
        self.bytes = self.rows = 0

    @property
    def began_at(self) -> float:
        """When the first thread began with it."""
        return min((part.began_at for part in self.parts), default=self.dispatch_at)

    @property
    def read_at(self) -> float:
        """When it was complete on the host."""
        return max((part.ended_at for part in self.parts), default=self.dispatch_at)

    def seconds(self) -> tuple[float, float, float]:
        """Of reading, of transforms, and of copying, summed over threads."""
        reading = transform = copying = 0.0
        for part in self.parts:
            for work, took in part.seconds.items():
                if work == "reading":
                    reading += took
                elif work in ("transforming", "collating"):
                    transform += took
                else:
                    copying += took
        return reading, transform, copying


class Recent(NamedTuple):
    """The last batches of a run that were handed out.

    Attributes:
        began_at: when the run began, in seconds of its clock.
        batches: in the order in which they were taken.
        is_end: the run ended with them; else more were being made.
    """

    began_at: float
    batches: tuple[BatchTimes, ...] = ()
    is_end: bool = False
