"""What the two kinds of readers share: where they begin, which epochs they read, and what they hand on."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, Protocol, TypeAlias

import msgspec

from prefetchshard.base.batches import EpochEnd, HostBatch, Position
from prefetchshard.base.clock import Clock
from prefetchshard.base.config import Pad
from prefetchshard.base.errors import ConfigError
from prefetchshard.measuring.stats import Meters
from prefetchshard.planning.planner import Plan
from prefetchshard.queues.bounded_queue import BoundedQueue
from prefetchshard.reading.filling import Filler
from prefetchshard.reading.user_functions import UserFunctions

HostQueue: TypeAlias = BoundedQueue[HostBatch[Plan]]


MOST_IN_FLIGHT = 3
"""Transfers on their way at once: while one is waited for the next is under way already, and a third covers the wake-up between."""


def cpu_count() -> int:
    """The CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class StartPoint(msgspec.Struct, frozen=True):
    """Where a run begins.

    Attributes:
        run: the number of the run.
        run_epoch: the epoch with which the run began.
        epoch: the epoch to go on with.
        rows: rows of that epoch that were handed out.
        batches: batches of that epoch that were handed out.
        step: batches that were handed out in all.
        last_rows: rows of the last batch that was handed out.
        batch_rows: rows of the first batch of the run, where the source or `collate` makes the batches.
        snapshot: the source's own state.
        since_snapshot: items to pull after it.
        sample: of the last batch that was handed out.
        resumes_by: the way of the state that this was made from.
    """

    run: int = 0
    run_epoch: int = 0
    epoch: int = 0
    rows: int = 0
    batches: int = 0
    step: int = 0
    last_rows: int = 0
    batch_rows: int | None = None
    snapshot: bytes | None = None
    since_snapshot: int = 0
    sample: bytes | None = None
    resumes_by: Literal["index", "snapshot", "replay"] = "index"


class Reader(Protocol):
    """Reads a source into a queue of host batches."""

    @property
    def bodies(self) -> Sequence[tuple[str, Callable[[], None]]]:
        """What each of its threads does: a name and a function."""
        ...

    @property
    def helpers(self) -> list[threading.Thread]:
        """Threads of the source beside these; the reader adds to this very list."""
        ...

    @property
    def close_failures(self) -> list[BaseException]:
        """What closing the source raised when nothing more was wanted; the reader adds to this very list."""
        ...

    def interrupt(self) -> None:
        """Nothing more is wanted. Never blocks, takes no lock."""
        ...

    def close_from_outside(self) -> None:
        """Close the source although a thread is inside it, where that is allowed; it may block as the source does."""
        ...


class ReadingPlan(msgspec.Struct):
    """What every reader is given.

    Attributes:
        filler: writes into the staging memory.
        hooks: transform and collate.
        out: where the host batches go.
        meters: what is measured.
        start: where to begin.
        epochs: in this run; None for ever.
        batch_size: rows of a batch; None where the source makes the batches.
        remainder: the policy, `Pad` for "pad".
        workers: threads.
        clock: monotonic seconds.
    """

    filler: Filler
    hooks: UserFunctions
    out: HostQueue
    meters: Meters
    start: StartPoint
    epochs: int | None
    batch_size: int | None
    remainder: str | Pad
    workers: int
    clock: Clock

    @property
    def pads(self) -> bool:
        return isinstance(self.remainder, Pad)

    def epoch_numbers(self) -> Iterator[int]:
        """The epochs still to be read."""
        epoch = self.start.epoch
        while self.epochs is None or epoch < self.start.run_epoch + self.epochs:
            yield epoch
            epoch += 1

    def refuse_empty(self, epoch: int) -> None:
        """Without an end, an epoch without a batch would be read again and again.

        Raises:
            ConfigError: it is so.
        """
        if self.epochs is None:
            raise ConfigError(
                f"epoch {epoch} gave no batch, and epochs=None would go on so for ever: the source is empty"
                + ("" if self.batch_size is None else f", or has fewer than batch_size={self.batch_size} examples under remainder='drop'")
            )


class BatchNumbering:
    """Numbers the batches of a run, and tells each of them, late, whether it ended its epoch.

    Thread safety: one thread at a time makes positions; `give_up` from any thread, without a lock.
    """

    def __init__(self, start: StartPoint, home_thread: int | None = None) -> None:
        self._start = start
        self._home_thread = home_thread
        self._step = start.step
        self._batches = 0
        self._last: Position | None = None
        self._open: deque[Position] = deque()
        self._given_up = False

    def begin_epoch(self, epoch: int) -> tuple[int, int]:
        """Rows and batches of this epoch that were handed out before the run."""
        resumed = epoch == self._start.epoch
        self._batches = self._start.batches if resumed else 0
        self._last = None
        return (self._start.rows, self._start.batches) if resumed else (0, 0)

    def position(self, epoch: int, first_row: int, rows: int, ends: bool | None) -> tuple[Position, Position | None]:
        """The position of the next batch, and that of the batch before it in the epoch.

        Args:
            epoch: of the batch.
            first_row: rows of the epoch before it.
            rows: rows of the epoch up to and including it.
            ends: where it is known whether the epoch ends with it.
        """
        self._batches += 1
        end = EpochEnd(ends, self._home_thread)
        position = Position(
            run=self._start.run, epoch=epoch, step=self._step, first_row=first_row, rows=rows, batches=self._batches, end=end
        )
        self._step += 1
        before, self._last = self._last, position
        while self._open and self._open[0].end_is_known:
            self._open.popleft()
        if ends is None:
            self._open.append(position)
            if self._given_up:
                position.settle_end(False)
        return position, before

    @property
    def is_empty_epoch(self) -> bool:
        """Whether no batch came of this epoch yet."""
        return self._batches == 0

    def take_back(self, before: Position | None) -> None:
        """The last position was not used: no batch came of it, and the one before it is the last again."""
        if self._open:
            self._open.pop().settle_end(True)
        self._batches -= 1
        self._step -= 1
        self._last = before

    def end_epoch(self) -> None:
        """The last position ended its epoch."""
        if self._last is not None:
            self._last.settle_end(True)

    def give_up(self) -> None:
        """Whoever waits to hear whether an epoch has ended will not hear more."""
        self._given_up = True
        for position in list(self._open):
            position.settle_end(False)
