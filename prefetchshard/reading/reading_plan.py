"""What every part of the reading is given, and what a run asks of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias

import msgspec

from prefetchshard.base.config import Pad, Policy
from prefetchshard.base.limits import MOST_IN_FLIGHT
from prefetchshard.base.position import StartPoint
from prefetchshard.measuring.recorder import Recorder
from prefetchshard.planning.host_batch import EpochMark, HostBatch
from prefetchshard.queues.bounded_queue import BoundedQueue, Ticket
from prefetchshard.reading.crew import Crew
from prefetchshard.reading.user_functions import UserFunctions
from prefetchshard.sources.arrays import Rows

ReadItem: TypeAlias = HostBatch | EpochMark
HostQueue: TypeAlias = BoundedQueue[ReadItem]
HostTicket: TypeAlias = Ticket[ReadItem]


class ReadingPlan(msgspec.Struct):
    """How one run reads its source.

    Attributes:
        functions: `transform` and `collate`.
        out: where the host batches go.
        recorder: of what the threads do.
        start: where to begin.
        epochs: in this run; None for ever.
        batch_size: rows of a batch; None where the source makes the batches.
        remainder: the policy.
        crew: the reader threads.
        read_ahead: the most batches that may be read and not delivered; None: as the other bounds allow.
        reuses_buffers: an iterator may overwrite an item as soon as it is asked for the next one.
        in_processes: each worker has a process under it.
    """

    functions: UserFunctions
    out: HostQueue
    recorder: Recorder
    start: StartPoint
    epochs: int | None
    batch_size: int | None
    remainder: Policy
    crew: Crew
    read_ahead: int | None
    reuses_buffers: bool
    in_processes: bool = False

    @property
    def workers(self) -> int:
        """Reader threads at present."""
        return self.crew.wanted

    @property
    def is_controlled(self) -> bool:
        """Whether there may be more or fewer of them later."""
        return self.crew.control is not None

    @property
    def collates_in_processes(self) -> bool:
        """Whether a batch is one part: its examples are put together where they are made."""
        return self.in_processes and self.functions.collate is not None

    @property
    def pads(self) -> bool:
        return isinstance(self.remainder, Pad)

    @property
    def makes_short(self) -> bool:
        """Whether the examples that are left at the end of an epoch make a batch."""
        return self.remainder == "keep" or self.pads

    @property
    def leaves_out(self) -> bool:
        """Whether a last batch that is short is no batch for the consumer, so that it need not fit the devices."""
        return not self.makes_short

    @property
    def batches_at_once(self) -> int:
        """Batches that are read at the same time; the other places are for those on their way to the devices."""
        return max(1, self.out.capacity - MOST_IN_FLIGHT)

    def epoch_numbers(self) -> Iterator[int]:
        """The epochs still to be read."""
        epoch = self.start.epoch
        while self.epochs is None or epoch < self.start.run_epoch + self.epochs:
            yield epoch
            epoch += 1


class Part:
    """A run of rows of one batch, for one worker.

    Attributes:
        batch: that it belongs to.
        start: the first of its rows in the batch.
        stop: the row after its last one.
        rows: which rows of the source; None where the items were pulled.
        items: that were pulled.
        work: what is to be done, where that is something else (a share of a copy).
    """

    __slots__ = ("batch", "items", "rows", "start", "stop", "work")

    def __init__(
        self,
        batch: Any,
        start: int,
        stop: int,
        *,
        rows: Rows | None = None,
        items: Any = None,
        work: Callable[[], None] | None = None,
    ) -> None:
        self.batch = batch
        self.start = start
        self.stop = stop
        self.rows = rows
        self.items = items
        self.work = work


class Reader(Protocol):
    """Reads a source into a queue of host batches: a dealer with its workers."""

    @property
    def bodies(self) -> Sequence[tuple[str, Callable[[], None]]]:
        """What each of its threads does: a name and a function."""
        ...

    @property
    def crew(self) -> Crew:
        """Its threads that do parts of batches."""
        ...

    @property
    def helpers(self) -> list[threading.Thread]:
        """Threads of the source beside these; the reader adds to this very list."""
        ...

    @property
    def close_failures(self) -> list[BaseException]:
        """What closing the source raised when nothing more was wanted; the reader adds to this very list."""
        ...

    @property
    def closing_in(self) -> set[int]:
        """The idents of the threads that are inside the source's own close."""
        ...

    @property
    def interrupt(self) -> Callable[[], None]:
        """Call it where nothing more is wanted. Never blocks, takes no lock.

        It does not hold the source, or who calls it could be the last to do so, and would run the source's destructor. What has to be told
        by itself is held, as an async iteration is.
        """
        ...

    def close_from_outside(self) -> None:
        """Close the source although a thread is inside it, where that is allowed; it may block as the source does."""
        ...
