"""Deals out rows that are found by number: of arrays, of a dataset of examples, or of a dataset of batches."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Literal

from prefetchshard.base.position import EpochEnd
from prefetchshard.base.waiters import Waiters
from prefetchshard.ordering.epoch_order import EpochOrder
from prefetchshard.planning.host_batch import EpochMark, ReadFailure
from prefetchshard.reading.first_reads import FirstReads
from prefetchshard.reading.open_batch import OpenBatch
from prefetchshard.reading.process_worker import ProcessWorker
from prefetchshard.reading.reading_plan import HostTicket, Part, ReadingPlan
from prefetchshard.reading.worker import Worker
from prefetchshard.reading.writing import Writer
from prefetchshard.sharding.batch_tree import BatchTree
from prefetchshard.sources.arrays import Arrays, Rows
from prefetchshard.sources.dataset import Dataset

PART_BYTES = 64 << 20
"""Rows of arrays are dealt in runs of about this size, mostly a whole batch: waking a thread and taking the interpreter's lock back
costs more than copying a few megabytes, so small runs lose what more threads bring."""

LEAST_PART_BYTES = 1 << 20
"""Parts are not cut smaller than this, however many workers wait."""

LEAST_PART_SECONDS = 0.002
"""Examples are dealt in runs that take at least this long: for less, handing over costs more than the help of another worker."""

LEAST_PROCESS_SECONDS = 0.05
"""The same where a process does them, of which each part costs the parent its lock: with 0.05, 0.01 and 0.005 14 processes made 706, 597 and 508
batches of 256 examples a second (`examples`, one H200, 16 cores), 8 made 469, 450 and 460."""

FIRST_PARTS = 16
"""Into so many parts the first batch is cut at least, where there may soon be more threads: those that come then find some left."""

MOST_PART_SECONDS = 0.1
"""Examples are dealt in shorter runs than this, where the number of threads is looked at after each: a slow source is soon seen to be one."""

ORDER_ROWS = 4096
"""A shuffled order is worked out for so many rows at once: the arithmetic costs little more for them than for a hundred."""


_END: Final = object()


class RowDealer:
    """Cuts each batch into runs of rows; any number of workers ask it for the next one.

    Args:
        plan: of the reading.
        writer: writes into the memory of batches.
        source: with random access.
        order: of the rows; of the items, one a batch, where the source makes the batches.
        tree: of the arrays' tree; None where examples are read.
    """

    def __init__(self, plan: ReadingPlan, writer: Writer, source: Arrays | Dataset, order: EpochOrder, tree: BatchTree | None) -> None:
        self._plan = plan
        self._order = order
        self.crew = plan.crew
        self.helpers: list[threading.Thread] = []
        reads = source
        if isinstance(source, Dataset) and FirstReads.are_wanted(source, plan):
            this = weakref.ref(self)  # a dropped run is freed without the garbage collector

            def due() -> set[int]:
                return set() if (dealer := this()) is None else dealer._rows_due()

            def decided() -> None:
                if (dealer := this()) is not None:
                    dealer._worker.read_from(source)

            reads = FirstReads(source, plan, due, self.helpers, decided)
        self.closing_in: set[int] = set()
        self._processes = ProcessWorker(plan, writer, source, self.closing_in) if plan.in_processes else None
        self._worker = self._processes or Worker(plan, writer, reads, tree)
        self._lock = threading.Lock()  # guards _parts, and with it everything that comes next
        self._parts: Iterator[Part | None] | None = None  # made by the first who asks: what was not begun would hold this for ever
        self._epoch = plan.start.epoch
        self._began = False
        self._ahead: tuple[int, int, int, Rows] = (-1, 0, 0, slice(0, 0))  # epoch, positions and rows that were worked out last
        self._next_begins: Literal["part", "batch", "epoch"] = "epoch"
        self._ticket: HostTicket | None = None  # of the next batch, where it was taken before that is dealt
        self._asks_for_many = isinstance(source, Dataset) and source.reads_many
        self._part_rows, self._least_rows = self._choose_part_rows()
        self._in_use = _InUse()
        self.interrupt: Callable[[], None] = self._in_use.wake
        if self._processes is not None:
            self.interrupt = _Both(self._in_use.wake, self._processes.pool.cancelled.give)
        self.close_failures: list[BaseException] = []
        self._dataset = source if isinstance(source, Dataset) else None
        self._told = source if isinstance(source, Dataset) and source.takes_epoch else None  # it must not change while it is read
        if self._told is not None:
            in_use = self._in_use
            self._worker.part_done = lambda _: in_use.leave()

    @property
    def bodies(self) -> Sequence[tuple[str, Callable[[], None]]]:
        return self.crew.bodies(self._work)

    def _work(self, number: int) -> None:
        try:
            if self._processes is not None:
                self._processes.work(self.deal, deal_at_once=self.deal_at_once)
            elif self._plan.is_controlled:
                self.crew.work(number, self._worker.work, self.deal, self._work, self._recall)
            else:
                self._worker.work(self.deal)
        finally:
            if self._dataset is not None:
                self._leave(self._dataset)

    def _recall(self, _: int) -> None:
        self._plan.out.senders.wake()  # who waits for room; if it leaves, the next one comes to the same place

    def _leave(self, dataset: Dataset) -> None:
        ident = threading.get_ident()
        self.closing_in.add(ident)
        try:
            dataset.leave()
        except BaseException as error:  # noqa: BLE001 - whoever closes the run says it
            self.close_failures.append(error)
        finally:
            self.closing_in.discard(ident)

    def close_from_outside(self) -> None:
        if self._processes is not None:
            self._processes.pool.end_all()

    def deal(self) -> Part | None:
        """The next run of rows; None: there is no more, or nothing more is wanted, or this thread is one too many."""
        with self._lock:
            return None if self.crew.is_dismissed() else self._deal()

    def deal_at_once(self) -> Part | None:
        """The same where nothing has to be waited for, else None; for a worker that has a part already.

        It never begins an epoch, for which the parts of the one before have to be done.
        """
        if not self._lock.acquire(blocking=False):  # who deals may be waiting
            return None
        try:
            if self._next_begins == "batch":
                # There is no looking for room first: it shrinks where a batch turns out to be large, and who waited might wait for its own part
                self._ticket = self._plan.out.reserve_nowait()
                if self._ticket is None:
                    return None
            return None if self._next_begins == "epoch" else self._deal()
        finally:
            self._lock.release()

    def _deal(self) -> Part | None:
        try:
            if self._parts is None:
                self._parts = self._deal_all()
            part: Any = next(self._parts, _END)
        except BaseException as error:  # noqa: BLE001 - a thread has no caller, and `set_epoch` is the source's code
            self._plan.out.end(ReadFailure(error, "starting an epoch", self._epoch, of_batch=False))
            return None
        if part is _END:
            self._plan.out.end()
            return None
        if part is not None and self._told is not None:
            self._in_use.enter()
        return part

    def _deal_all(self) -> Iterator[Part | None]:
        """Every part of the run, in order. Runs on under the lock, in whichever worker asks; None where that is to leave instead."""
        plan, order = self._plan, self._order
        for epoch in plan.epoch_numbers():
            self._begin(epoch)
            done = self._rows_done(epoch)
            is_empty, span = done == 0, order.span(done)
            while span is not None:
                ticket, self._ticket = self._ticket or plan.out.reserve(self.crew.is_dismissed), None
                if ticket is None and self.crew.is_dismissed():
                    yield None
                    continue
                if ticket is None:
                    return
                (start, done), is_empty = span, False
                span = order.span(done)
                # The last item of a source that makes the batches may turn out short, and be dropped
                may_be_dropped = plan.batch_size is None and plan.remainder == "drop" and order.length - done == 1
                batch = OpenBatch(ticket, epoch, start, EpochEnd(None if may_be_dropped else span is None))
                batch.host.is_last = span is None
                yield from self._cut(batch, start, done)
            plan.recorder.count(dropped=order.length - done)
            if is_empty and plan.epochs is None:
                ticket = plan.out.reserve()
                if ticket is None:
                    return
                ticket.send(EpochMark(epoch))

    def _begin(self, epoch: int) -> None:
        begins, self._epoch = epoch == self._plan.start.epoch, epoch
        if self._told is not None:
            self._in_use.wait_free(lambda: self._plan.out.cancelled)
            self._told.set_epoch(epoch, self._plan.start.run_epoch if begins else None)

    def _rows_done(self, epoch: int) -> int:
        """Rows, or batches, of the epoch that were handed out before the run."""
        start = self._plan.start
        if epoch != start.epoch:
            return 0
        return start.batches if self._plan.batch_size is None else start.rows

    def _cut(self, batch: OpenBatch, start: int, stop: int) -> Iterator[Part]:
        """The parts of one batch: positions `start` to `stop` of the epoch."""
        plan = self._plan
        count = stop - start
        if plan.batch_size is not None:
            batch.host.examples = count
        else:
            batch.may_be_left_out = bool(batch.host.is_last) and plan.leaves_out
        if plan.functions.collate is not None and self._worker.gathers is None and not plan.in_processes:
            batch.collected = [None] * count
        rows = self._rows_at(batch.host.epoch, start, stop)
        size = self._choose_size(count)
        batch.expect(-(-count // size))
        for first in range(0, count, size):
            last = min(first + size, count)
            some = slice(rows.start + first, rows.start + last) if isinstance(rows, slice) else rows[first:last]
            self._next_begins = "part" if last < count else "epoch" if batch.host.is_last else "batch"
            yield Part(batch, first, last, rows=some)

    # -- how large a part is

    def _choose_part_rows(self) -> tuple[int, int]:
        """The most rows of a part, and the least."""
        plan = self._plan
        if plan.batch_size is None:
            return 1, 1
        gathers = self._worker.gathers
        if plan.collates_in_processes:
            return plan.batch_size, plan.batch_size
        if gathers is None:
            return plan.batch_size, 1  # see `_rows_of_a_worker`
        if plan.functions.collate is not None:
            return plan.batch_size, plan.batch_size
        row_bytes = sum(leaf[:1].nbytes for leaf in gathers.leaves) or 1
        most = max(1, min(plan.batch_size, PART_BYTES // row_bytes))
        return most, min(most, max(1, LEAST_PART_BYTES // row_bytes))

    def _choose_size(self, count: int) -> int:
        """Rows of a part: small ones where all workers are wanted for one batch."""
        plan = self._plan
        first, self._began = not self._began, True  # the first batch is to come early
        if self._worker.gathers is None:
            processes = self._processes
            rows = LEAST_PART_SECONDS / self._worker.row_seconds
            if processes is not None:
                rows = LEAST_PROCESS_SECONDS / processes.process_row_seconds
            enough = 0 if first else math.ceil(rows)
            size = max(1, min(count, max(self._rows_of_a_worker(is_first=first), enough)))
            return size if processes is None else -(-count // -(-count // size))  # even ones
        together = plan.workers if first else -(-plan.workers // plan.batches_at_once)
        return max(self._least_rows, min(self._part_rows, -(-count // together)))

    def _rows_of_a_worker(self, *, is_first: bool) -> int:
        """Rows of a part of examples."""
        plan = self._plan
        if plan.batch_size is None or plan.collates_in_processes:
            return self._part_rows
        rows = -(-plan.batch_size // plan.workers)
        if plan.in_processes or not plan.is_controlled or self._asks_for_many:  # asking for fewer at once may take as long
            return rows
        row_seconds = self._worker.row_seconds
        if is_first or row_seconds == math.inf:
            return min(rows, -(-plan.batch_size // FIRST_PARTS))
        return min(rows, max(1, int(MOST_PART_SECONDS / row_seconds)))

    # -- order

    def _rows_at(self, epoch: int, start: int, stop: int) -> Rows:
        """The rows of the source at these positions; those of several small batches are worked out in one go."""
        order = self._order
        if not order.shuffle:
            return slice(start, stop)
        known, first, last, rows = self._ahead
        if epoch != known or not first <= start <= stop <= last:
            last = min(max(stop, start + ORDER_ROWS), order.length)
            rows = order.rows(epoch, start, last)
            first = start
            self._ahead = epoch, first, last, rows
        assert not isinstance(rows, slice)
        return rows[start - first : stop - first]

    def _rows_due(self) -> set[int]:
        """The rows of the batches that may be read before one is delivered."""
        plan, order, epoch = self._plan, self._order, self._plan.start.epoch
        start = self._rows_done(epoch)
        batches = min(plan.out.capacity, plan.read_ahead or plan.out.capacity)
        stop = min(start + batches * (plan.batch_size or 1), order.length)
        rows = order.rows(epoch, start, stop)
        return set(range(rows.start, rows.stop) if isinstance(rows, slice) else rows.tolist())


class _Both:
    """Calls two functions; holds neither the dealer nor its source."""

    def __init__(self, one: Callable[[], None], other: Callable[[], None]) -> None:
        self._functions = one, other

    def __call__(self) -> None:
        for function in self._functions:
            function()


class _InUse:
    """Counts the parts of a dataset that are being read."""

    def __init__(self) -> None:
        self._count = 0
        self._lock = threading.Lock()  # guards _count
        self._free = Waiters()

    def enter(self) -> None:
        with self._lock:
            self._count += 1

    def leave(self) -> None:
        with self._lock:
            self._count -= 1
        self._free.wake()

    def wait_free(self, or_else: Callable[[], bool]) -> None:
        """Wait until none is being read, or until `or_else()`; who makes that true calls `wake`."""
        self._free.wait(lambda: self._count == 0 or or_else())

    def wake(self) -> None:
        self._free.wake()
