"""Deals out items that are pulled, one thread at a time: iterators, iterables, factories and async sources.

The source's own thread pulls. Without functions of the user's it also writes, for handing over costs more than copying a small batch;
large batches are copied by workers, and `transform` and `collate` run there.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

from prefetchshard.base.position import EpochEnd
from prefetchshard.leaves.copying import not_copied, private_copy
from prefetchshard.measuring.recorder import Span
from prefetchshard.planning.host_batch import EpochMark, ReadFailure
from prefetchshard.reading.batch_copying import BatchCopying
from prefetchshard.reading.open_batch import OpenBatch
from prefetchshard.reading.process_worker import ProcessWorker
from prefetchshard.reading.reading_plan import Part, ReadingPlan
from prefetchshard.reading.user_functions import no_leaves
from prefetchshard.reading.worker import Worker
from prefetchshard.reading.writing import Writer
from prefetchshard.resuming.replay import ReplayedSource
from prefetchshard.sharding.rules import NoLeavesError
from prefetchshard.sources.iterables import END, OpenSource
from prefetchshard.sources.loops import Loops


class ItemDealer:
    """Pulls items in one thread, and deals them to workers where there are some.

    Args:
        plan: of the reading.
        writer: writes into the memory of batches.
        source: that is pulled; it begins where the run begins.
        tell_epoch: called before each epoch.
        loops: in which async sources are pulled.
    """

    def __init__(self, plan: ReadingPlan, writer: Writer, source: ReplayedSource, tell_epoch: Callable[[int], None], loops: Loops) -> None:
        self._plan = plan
        self._writer = writer
        self._source = source
        self._tell_epoch = tell_epoch
        self.closing_in: set[int] = set()
        self._processes = ProcessWorker(plan, writer, None, self.closing_in) if plan.in_processes else None
        self._worker = self._processes or Worker(plan, writer)
        self._items: OpenSource | None = None
        self._before: EpochEnd | None = None  # of the batch before, in this epoch
        self._closing = threading.Lock()  # guards _items' being closed once
        self.helpers = loops.threads
        self.close_failures: list[BaseException] = []
        self._loops = loops
        self._has_functions = plan.functions.transform is not None or plan.functions.collate is not None
        # Workers are told the end through it too: its put takes no lock that a finaliser could meet.
        self._jobs: queue.SimpleQueue[Part | None] = queue.SimpleQueue()
        self.crew = plan.crew
        self.interrupt = _Interrupt(self._jobs, None if self._processes is None else self._processes.pool.cancelled.give)
        self._copying = BatchCopying(plan, writer, self._worker, self._jobs)

    @property
    def bodies(self) -> Sequence[tuple[str, Callable[[], None]]]:
        workers = self.crew.bodies(self._work)
        if not self._has_functions:
            workers = workers[: self._copying.helpers if self._plan.batch_size is None else 0]
        return [("source", self._read), *workers]

    def _work(self, number: int) -> None:
        if self._plan.is_controlled:
            self.crew.work(number, self._worker.work, self._deal, self._work, self._recall)
        else:
            self._worker.work(self._deal)

    def _deal(self) -> Part | None:
        """The next part; None: there is no more, or this thread is one too many."""
        while (part := self._jobs.get()) is _LOOK:
            if self.crew.is_dismissed():
                return None
        if part is None:
            self._jobs.put(None)  # for the next one: nobody counts how many there are
        return part

    def _recall(self, workers: int) -> None:
        for _ in range(workers):
            self._jobs.put(_LOOK)

    def close_from_outside(self) -> None:
        if self._processes is not None:
            self._processes.pool.end_all()
        items = self._items
        if items is not None and self._source.is_inside and items.closable_from_outside:
            try:
                self._close(items)
            except BaseException as error:  # noqa: BLE001 - whoever closes the run says it
                self.close_failures.append(error)

    # -- the source's thread

    def _read(self) -> None:
        out = self._plan.out
        self._plan.recorder.meter("source")
        failure: ReadFailure | None = None
        epoch = self._plan.start.epoch
        try:
            for epoch in self._plan.epoch_numbers():
                if not self._read_epoch(epoch):
                    break
        except BaseException as error:  # noqa: BLE001 - a thread has no caller: the queue is the way out
            failure = ReadFailure(error, "reading the source", epoch, of_batch=False)
        try:
            if self._items is not None:
                self._close(self._items)
        except BaseException as error:  # noqa: BLE001 - as above
            if out.cancelled:
                self.close_failures.append(error)
            elif failure is None:
                failure = ReadFailure(error, "closing the source", epoch, of_batch=False)
        out.end(failure)
        self.interrupt.dismiss_workers()
        del failure  # its traceback holds this frame
        self._close_source(self._loops.close)

    def _read_epoch(self, epoch: int) -> bool:
        """Read one epoch. False: nothing more is wanted."""
        out = self._plan.out
        if out.cancelled:
            return False
        self._tell_epoch(epoch)
        self._loops.begin(None)
        self._items = items = self._source.open(epoch, self._loops)
        self.interrupt.items = interrupt = items.interrupt
        if out.cancelled:  # it came between: nobody else will tell the new items
            if interrupt is not None:
                interrupt()
            return False
        del interrupt
        if not self._source.skip(epoch, items, lambda: out.cancelled):
            return False
        if not (self._read_examples(epoch) if self._plan.batch_size is not None else self._read_batches(epoch)):
            return False
        self._close(items)
        return True

    def _close(self, items: OpenSource) -> None:
        with self._closing:
            if self._items is not items:
                return
            self._items = self.interrupt.items = None
        self._close_source(items.close)

    def _close_source(self, close: Callable[[], None]) -> None:
        ident = threading.get_ident()
        self.closing_in.add(ident)
        try:
            close()
        finally:
            self.closing_in.discard(ident)

    def _keep(self, item: Any) -> Any:
        """The item, safe from what the source does next."""
        try:
            return private_copy(item, deep=True) if self._plan.reuses_buffers else item
        except RecursionError as error:
            raise not_copied(item, error) from None

    # -- examples

    def _read_examples(self, epoch: int) -> bool:
        plan, size = self._plan, self._plan.batch_size
        assert size is not None
        first_row, home_thread = self._source.rows_done(epoch), self._loops.home_thread
        self._before = None
        while (ticket := plan.out.reserve()) is not None:
            batch = OpenBatch(ticket, epoch, first_row, EpochEnd(None, home_thread))
            batch.host.examples = size
            try:
                count = self._fill(batch, size)
                if plan.out.cancelled:
                    batch.discard()
                    return False
                if count:
                    batch.host.mark = self._source.mark(count, is_whole=count == size)
            except BaseException as error:  # noqa: BLE001 - as above
                batch.fail(error, "reading", (first_row, first_row + size))
                batch.discard()
                return False
            if count < size:
                return self._end_examples(batch, count)
            first_row += size
            self._complete(batch)
            self._before = batch.host.end
        return False

    def _fill(self, batch: OpenBatch, size: int) -> int:
        """Read up to `size` examples into a batch. Returns how many there were."""
        if self._has_functions:
            return self._fill_by_workers(batch, size)
        source, cancelled = self._source, self._plan.out
        span = Span(self._plan.recorder, "reading", batch.host.times)
        writer = self._writer.examples(batch, 0, size)
        row = 0
        try:
            for row in range(size):
                span.enter("reading")
                item = source.pull(row, size, cancelled)
                span.enter("batching")
                if item is END or cancelled.cancelled:
                    break
                if row == 0:
                    self._goes_on()
                try:
                    writer.write(item)
                except NoLeavesError as error:
                    raise no_leaves(error, f"the example at row {batch.first_row + row}", None) from None
            else:
                row = size
            if row == size or self._plan.makes_short:  # what is dropped need not fit
                writer.finish()
        finally:
            span.end()
        return row

    def _fill_by_workers(self, batch: OpenBatch, size: int) -> int:
        """As `_fill`, handing runs of examples to the workers."""
        plan = self._plan
        run = max(1, size // (2 * plan.workers))  # several runs a worker: an uneven one delays the batch less
        if plan.in_processes:
            run = size if plan.collates_in_processes else max(1, size // plan.workers)
        batch.collected = [None] * size if plan.functions.collate is not None and not plan.in_processes else None
        chunk: list[Any] = []
        span = Span(self._plan.recorder, "reading", batch.host.times)
        row = 0
        try:
            for row in range(size):
                span.enter("reading")
                item = self._source.pull(row, size, self._plan.out)
                if item is END or self._plan.out.cancelled:
                    break
                if row == 0:
                    self._goes_on()
                span.enter("copying")
                chunk.append(self._keep(item))
                if len(chunk) == run:
                    self._hand_over(batch, chunk, row + 1)
                    chunk = []
            else:
                row = size
        finally:
            span.end()
        if row == size or plan.makes_short or not plan.collates_in_processes:  # else they make no batch to be collated
            self._hand_over(batch, chunk, row)
        return row

    def _goes_on(self) -> None:
        """The epoch has an item more, so the batch before does not end it; under "drop" an item does not make a batch yet."""
        if self._before is not None and self._plan.remainder != "drop":
            self._before.settle(False)

    def _hand_over(self, batch: OpenBatch, chunk: list[Any], stop: int) -> None:
        if chunk:
            batch.add_part()
            self._jobs.put(Part(batch, stop - len(chunk), stop, items=chunk))

    def _complete(self, batch: OpenBatch) -> None:
        """All examples of a batch were read."""
        if batch.collected is not None:  # collating is work for a worker
            batch.add_part()
            self._jobs.put(Part(batch, 0, 0, work=_nothing))
        if batch.close_parts():
            self._worker.finish(batch)

    def _end_examples(self, batch: OpenBatch, count: int) -> bool:
        """The epoch ended inside a batch, or right before it."""
        ticket: Any = batch.ticket
        left, paths = count, () if batch.plan is None else batch.plan.tree.paths
        if count and self._plan.makes_short:
            batch.host.examples = count
            batch.host.is_last = True
            batch.host.end.settle(True)
            self._complete(batch)
            left, ticket = 0, self._plan.out.reserve()
        elif count and not batch.discard():
            return False
        if ticket is None:
            return False
        ticket.send(EpochMark(batch.host.epoch, left, paths))
        return not (left and self._plan.remainder == "error")  # the run is lost: nothing more is asked of the source

    # -- batches that the source makes

    def _read_batches(self, epoch: int) -> bool:
        plan, source = self._plan, self._source
        number = source.batches_done(epoch)
        home_thread, leaves_out = self._loops.home_thread, plan.leaves_out
        self._before = None
        while (ticket := plan.out.reserve()) is not None:
            batch = OpenBatch(ticket, epoch, number, EpochEnd(None, home_thread))
            batch.may_be_left_out = leaves_out
            span = Span(plan.recorder, "reading", batch.host.times)
            try:
                item = source.pull(0, 1, plan.out)
                took = span.enter("reading")
                if item is END or plan.out.cancelled:
                    span.end()
                    if plan.out.cancelled:
                        ticket.withdraw()
                        return False
                    ticket.send(EpochMark(epoch))
                    return True
                batch.host.mark = source.mark(1, is_whole=True)
                span.enter("copying")
                if self._has_functions:
                    self._goes_on()
                    batch.expect(1)
                    part = Part(batch, 0, 1, items=[self._keep(item)])
                    span.end()
                    self._jobs.put(part)
                    del part
                    del item
                else:
                    try:
                        flat = self._writer.flatten(item)
                    except NoLeavesError as error:
                        raise no_leaves(error, f"batch {number} of the epoch", None) from None
                    del item  # only the leaves are held from here on: so it shows whether the source holds them too
                    self._copying.copy(batch, *flat, span, took)
                    del flat  # the source may use its memory for the next one
            except BaseException as error:  # noqa: BLE001 - as above
                span.end()
                batch.fail(error, "reading")
                return False
            number += 1
            self._before = batch.host.end
        return False


class _Interrupt:
    """Tells that nothing more is wanted. It does not hold the dealer, which holds the source.

    Attributes:
        items: tells the items that are pulled now, where they have to be told.
    """

    def __init__(self, jobs: queue.SimpleQueue[Part | None], wake: Callable[[], None] | None) -> None:
        self.items: Callable[[], None] | None = None
        self._jobs = jobs
        self._wake = wake

    def __call__(self) -> None:
        if self._wake is not None:
            self._wake()
        items = self.items
        if items is not None:
            items()
        self.dismiss_workers()

    def dismiss_workers(self) -> None:
        self._jobs.put(None)


_LOOK: Final = Part(None, 0, 0)
"""A thread that gets it looks whether it is one too many."""


def _nothing() -> None:
    pass
