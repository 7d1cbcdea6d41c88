"""Reads a source with random access: several workers, each filling runs of rows of the batch that is due."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

from prefetchshard.base.batches import Position
from prefetchshard.base.errors import NarrowingError
from prefetchshard.base.faults import of_epoch
from prefetchshard.base.waiters import Waiters
from prefetchshard.leaves.copying import private_copy
from prefetchshard.ordering.epoch_order import EpochOrder
from prefetchshard.planning.planner import Plan
from prefetchshard.reading.filling import OpenBatch, WholeBatches
from prefetchshard.reading.reading_plan import MOST_IN_FLIGHT, BatchNumbering, ReadingPlan
from prefetchshard.sharding.batch_tree import BatchTree
from prefetchshard.sources.arrays import Arrays, Rows
from prefetchshard.sources.dataset import Dataset
from prefetchshard.sources.iterables import set_epoch

PART_BYTES = 64 << 20
"""Rows of arrays are handed out in runs of about this size, mostly a whole batch: waking a thread and taking the interpreter's lock back
costs more than copying a few megabytes, so small runs lose what more threads bring."""


LEAST_PART_BYTES = 1 << 20
"""Parts are not cut smaller than this, however many workers wait."""

LEAST_PART_SECONDS = 0.002
"""Examples are handed out in runs that take at least this long: for less, handing over costs more than the help of another worker."""

ORDER_ROWS = 4096
"""A shuffled order is worked out for so many rows at once: the arithmetic costs little more for them than for a hundred."""


class _Part:
    """A run of rows of one batch: positions `start` to `stop` of it."""

    __slots__ = ("assembly", "rows", "stage", "start", "stop")

    def __init__(self, assembly: OpenBatch, start: int, stop: int, rows: Rows) -> None:
        self.assembly = assembly
        self.start = start
        self.stop = stop
        self.rows = rows
        self.stage = "reading"


class RowReader:
    """Reads arrays, or a dataset of examples or of batches.

    Args:
        task: what every reader is given.
        source: with random access.
        order: of the rows; of the items, one a batch, where the source makes the batches.
        structure: of the arrays' tree; None for datasets.
    """

    def __init__(self, task: ReadingPlan, source: Arrays | Dataset, order: EpochOrder, structure: BatchTree | None) -> None:
        self._task = task
        self._source = source
        self._order = order
        self._structure = structure
        self._line = BatchNumbering(task.start)
        self._epochs = task.epoch_numbers()
        self._lock = threading.Lock()  # guards what comes next: the fields down to _busy
        self._epoch = -1
        self._done_rows = 0  # positions of the epoch that were given out
        self._any = False
        self._assembly: OpenBatch | None = None
        self._rows: Rows = slice(0, 0)
        self._next_row = 0
        self._count = 0
        self._began = False
        self._row_seconds = math.inf  # what reading and transforming an example takes
        self._size = 1  # rows of a part of the current batch
        self._plan: Plan | None = None
        self._ahead: tuple[int, int, Rows] = (0, 0, slice(0, 0))
        self._ahead_epoch = -1
        self._over = False
        self._busy = 0
        self._idle = Waiters()
        self._busy_lock = threading.Lock()  # guards _busy
        self._wholes = WholeBatches(
            task.filler, task.meters, first_step=task.start.step, batch_size=task.batch_size, full_rows=task.start.batch_rows
        )
        self._by_arrays = isinstance(source, Arrays) and task.hooks.transform is None
        self._tells_epoch = isinstance(source, Dataset) and callable(getattr(source.dataset, "set_epoch", None))
        self._least_rows = 1
        self._part_rows = self._choose_part_rows()
        self.helpers: list[threading.Thread] = []
        self.close_failures: list[BaseException] = []

    def _choose_part_rows(self) -> int:
        task = self._task
        if task.batch_size is None:
            return 1
        if self._by_arrays and task.hooks.collate is not None:
            return task.batch_size
        if isinstance(self._source, Arrays) and self._by_arrays:
            row_bytes = sum(leaf[:1].nbytes for leaf in self._source.leaves) or 1
            self._least_rows = max(1, LEAST_PART_BYTES // row_bytes)
            return max(1, min(task.batch_size, PART_BYTES // row_bytes))
        return -(-task.batch_size // task.workers)

    @property
    def bodies(self) -> Sequence[tuple[str, Callable[[], None]]]:
        return [(f"reader-{i}", self._work) for i in range(self._task.workers)]

    def interrupt(self) -> None:
        self._wholes.stop()
        self._line.give_up()
        self._idle.wake()

    def close_from_outside(self) -> None:
        pass

    # -- a worker

    def _work(self) -> None:
        while (part := self._next()) is not None:
            assembly = part.assembly
            try:
                self._fill(part)
            except BaseException as error:  # noqa: BLE001 - a thread has no caller: the queue is the way out
                self._name_row(part, error)
                self._fail(assembly, error, part.stage, self._rows_of(part))
            self._finished_part()
            if not assembly.part_done():
                continue
            stage = "finishing" if assembly.examples is None else "collating"
            try:
                self._finish(assembly)
            except BaseException as error:  # noqa: BLE001 - as above
                self._fail(assembly, error, stage, None)

    def _fail(self, assembly: OpenBatch, error: BaseException, stage: str, rows: tuple[int, int] | None) -> None:
        if assembly.fail(error, stage, rows):
            self._wholes.stop()
            self._line.give_up()

    def _rows_of(self, part: _Part) -> tuple[int, int] | None:
        if self._task.batch_size is None:
            return None
        first = part.assembly.position.first_row
        return first + part.start, first + part.stop

    def _name_row(self, part: _Part, error: BaseException) -> None:
        """Where the order is shuffled, the row of the batch does not tell which row of the source it is."""
        if isinstance(error, NarrowingError) and error.row is not None and self._task.batch_size is not None:
            at, rows = error.row - part.start, part.rows
            error.add_note(f"that is row {rows.start + at if isinstance(rows, slice) else int(rows[at])} of the source")

    def _finished_part(self) -> None:
        if self._tells_epoch:
            with self._busy_lock:
                self._busy -= 1
            self._idle.wake()

    def _next(self) -> _Part | None:
        with self._lock:
            try:
                return self._next_part()
            except BaseException as error:  # noqa: BLE001 - as above: `set_epoch` is the source's code
                self._over = True
                self._task.out.end(of_epoch(error, "starting an epoch", self._epoch))
                return None

    def _next_part(self) -> _Part | None:
        while True:
            assembly = self._assembly
            if assembly is not None and self._next_row < self._count:
                start = self._next_row
                stop = self._next_row = min(start + self._size, self._count)
                rows = self._rows
                some = slice(rows.start + start, rows.start + stop) if isinstance(rows, slice) else rows[start:stop]
                if self._tells_epoch:
                    with self._busy_lock:
                        self._busy += 1
                return _Part(assembly, start, stop, some)
            if not self._open_batch():
                return None

    def _open_batch(self) -> bool:
        """Make the next batch the current one. False: there is none, or none is wanted."""
        self._assembly = None
        span = None if self._over else self._next_span()
        ticket = None if span is None else self._task.out.reserve()
        if span is None or ticket is None:
            if not self._over:
                self._over = True
                self._task.out.end()
            return False
        start, stop = span
        count = stop - start
        position, before = self._position(start, stop)
        self._size = self._choose_size(count)
        assembly = OpenBatch(ticket, position, before, parts=-(-count // self._size), rows=0 if self._task.batch_size is None else count)
        assembly.is_last = self._order.span(stop) is None
        if self._task.hooks.collate is not None and not self._by_arrays:
            assembly.examples = [None] * count
        self._assembly = assembly
        self._rows = self._rows_at(start, stop)
        self._next_row = 0
        self._count = count
        self._done_rows = stop
        self._any = True
        return True

    def _choose_size(self, count: int) -> int:
        """Rows of a part: small ones where all workers are wanted for one batch."""
        task = self._task
        first, self._began = not self._began, True  # the first batch is to come early
        if task.batch_size is None or (self._by_arrays and task.hooks.collate is not None):
            return self._part_rows
        if not self._by_arrays:
            enough = 0 if first else math.ceil(LEAST_PART_SECONDS / self._row_seconds)
            return max(1, min(count, max(self._part_rows, enough)))
        at_once = max(1, task.out.capacity - MOST_IN_FLIGHT)
        together = task.workers if first else -(-task.workers // at_once)
        least = min(self._part_rows, self._least_rows)
        return max(least, min(self._part_rows, -(-count // together)))

    def _rows_at(self, start: int, stop: int) -> Rows:
        """The rows of the source at these positions; those of several small batches are worked out in one go."""
        if not self._order.shuffle:
            return slice(start, stop)
        first, last, rows = self._ahead
        if self._epoch != self._ahead_epoch or not first <= start <= stop <= last:
            last = min(max(stop, start + ORDER_ROWS), self._order.length)
            rows = self._order.rows(self._epoch, start, last)
            first = start
            self._ahead, self._ahead_epoch = (first, last, rows), self._epoch
        assert not isinstance(rows, slice)
        return rows[start - first : stop - first]

    def _position(self, start: int, stop: int) -> tuple[Position, Position | None]:
        ends: bool | None = self._order.span(stop) is None
        if self._task.batch_size is not None:
            return self._line.position(self._epoch, start, stop, ends)
        if self._task.remainder == "drop" and self._order.length - stop == 1:
            ends = None  # the last item may turn out short, and be dropped
        return self._line.position(self._epoch, 0, 0, ends)

    def _next_span(self) -> tuple[int, int] | None:
        """Positions of the next batch, going on to the next epoch where this one is done."""
        while True:
            span = self._order.span(self._done_rows) if self._epoch >= 0 else None
            if span is not None:
                return span
            if self._epoch >= 0:
                self._task.meters.add(dropped=self._order.length - self._done_rows)
            epoch = next(self._epochs, None)
            if epoch is None:
                return None
            if self._epoch >= 0 and not self._any:
                self._task.refuse_empty(self._epoch)
            self._any = False
            self._begin_epoch(epoch)
            if self._task.out.cancelled:
                return None

    def _begin_epoch(self, epoch: int) -> None:
        rows, batches = self._line.begin_epoch(epoch)
        self._done_rows = batches if self._task.batch_size is None else rows
        self._any = self._done_rows > 0
        self._epoch = epoch
        if self._tells_epoch:
            assert isinstance(self._source, Dataset)
            self._idle.wait(lambda: self._busy == 0 or self._task.out.cancelled)  # it must not change while it is read
            set_epoch(self._source.dataset, epoch)

    # -- filling

    def _fill(self, part: _Part) -> None:
        task, assembly = self._task, part.assembly
        if isinstance(self._source, Arrays) and self._by_arrays:
            began = task.clock()
            if task.hooks.collate is not None:
                assembly.examples = [self._source.gathered(part.rows)]
            else:
                part.stage = "planning"
                # Here, not where the batch became due: making memory takes long, and the others wait for what is due next
                task.filler.open_arrays(assembly, self._source.leaves, self._plan_of_arrays(self._source))
                part.stage = "reading"
                task.filler.write_rows(assembly, part.start, part.stop, self._source.leaves, part.rows)
            task.meters.add(copy=task.clock() - began)
            return
        self._fill_examples(part)

    def _plan_of_arrays(self, source: Arrays) -> Plan:
        if self._plan is None:
            assert self._structure is not None
            self._plan = self._task.filler.planner.for_arrays(source.leaves, self._structure)
        return self._plan

    def _fill_examples(self, part: _Part) -> None:
        """Read examples, each of them used before the next is asked for: the dataset may make them all in one buffer."""
        task, assembly, source = self._task, part.assembly, self._source
        rows = list(range(part.rows.start, part.rows.stop)) if isinstance(part.rows, slice) else part.rows.tolist()
        writer = task.filler.examples(assembly, part.start, len(rows))
        began = task.clock()
        many = source.read_many(rows) if isinstance(source, Dataset) and source.reads_many else None
        in_source, in_transform, in_copy = task.clock() - began, 0.0, 0.0
        started = began
        for i, row in enumerate(rows):
            part.stage = "reading"
            began = task.clock()
            item = source.read(row) if many is None else many[i]
            read = task.clock()
            part.stage = "transforming"
            item = self._transformed(item, assembly, row)
            part.stage = "batching"
            done = task.clock()
            if task.batch_size is None:
                self._fill_whole(assembly, item)
            elif assembly.examples is not None:
                assembly.examples[part.start + i] = item
            else:
                writer.write(item)
            in_source += read - began
            in_transform += done - read
            in_copy += task.clock() - done
        began = task.clock()
        writer.finish()
        ended = task.clock()
        in_copy += ended - began
        # Rather the least, since waiting for the interpreter's lock comes on top, the more the smaller the parts are; but rows that
        # come from a cache must not stand for all
        self._row_seconds = max(1e-7, min(2 * self._row_seconds, (ended - started) / len(rows)))
        if task.batch_size is None:
            in_copy = 0.0  # measured where it is written
        task.meters.add(source=in_source, transform=in_transform, copy=in_copy)

    def _transformed(self, item: Any, assembly: OpenBatch, row: int) -> Any:
        hooks = self._task.hooks
        if hooks.transform is None and hooks.collate is None:
            return item
        if isinstance(self._source, Dataset):
            item = private_copy(item)  # what these do to it must not reach the dataset
        return item if hooks.transform is None else hooks.transformed(item, assembly.position.epoch, row)

    def _fill_whole(self, assembly: OpenBatch, batch: Any) -> None:
        parts = self._wholes.parts(batch)
        missing = self._wholes.missing(assembly, parts) if assembly.is_last and not self._task.pads else 0
        if missing:
            self._wholes.refuse_or_drop(assembly, missing, self._task.remainder)
        else:
            self._wholes.write(assembly, parts, pads=self._task.pads)

    def _finish(self, assembly: OpenBatch) -> None:
        task = self._task
        if assembly.settled:  # failed, or dropped
            assembly.drop_memory()
            return
        if assembly.examples is not None:
            self._wholes.collate(assembly, task.hooks, pads=task.pads, gathered=self._by_arrays)
        elif task.batch_size is not None:
            task.meters.add(padded=task.filler.finish(assembly, assembly.rows))
        assembly.send()
