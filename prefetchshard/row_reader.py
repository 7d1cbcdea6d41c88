"""Reads a source with random access: several workers, each filling runs of rows of the batch that is due."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from prefetchshard.batches import Position
from prefetchshard.filling import Assembly, Wholes
from prefetchshard.order import EpochOrder
from prefetchshard.parking import Parking
from prefetchshard.reading import Line, Task
from prefetchshard.sources.arrays import Arrays, Rows
from prefetchshard.sources.dataset import Dataset
from prefetchshard.sources.iterables import set_epoch
from prefetchshard.structures import Structure

PART_BYTES = 16 << 20
"""Rows of arrays are handed out in runs of about this size: waking a thread and taking the interpreter's lock back costs more than
copying a few megabytes, so small runs lose what more threads bring."""


class _Part:
    """A run of rows of one batch: positions `start` to `stop` of it."""

    __slots__ = ("assembly", "rows", "start", "stop")

    def __init__(self, assembly: Assembly, start: int, stop: int, rows: Rows) -> None:
        self.assembly = assembly
        self.start = start
        self.stop = stop
        self.rows = rows


class RowReader:
    """Reads arrays, or a dataset of examples or of batches.

    Args:
        task: what every reader is given.
        source: with random access.
        order: of the rows; of the items, one a batch, where the source makes the batches.
        structure: of the arrays' tree; None for datasets.
    """

    def __init__(self, task: Task, source: Arrays | Dataset, order: EpochOrder, structure: Structure | None) -> None:
        self._task = task
        self._source = source
        self._order = order
        self._structure = structure
        self._line = Line(task.start)
        self._epochs = task.epoch_numbers()
        self._lock = threading.Lock()  # guards what comes next: the fields down to _busy
        self._epoch = -1
        self._done_rows = 0  # positions of the epoch that were given out
        self._any = False
        self._assembly: Assembly | None = None
        self._rows: Rows = slice(0, 0)
        self._next_row = 0
        self._count = 0
        self._over = False
        self._busy = 0
        self._idle = Parking()
        self._busy_lock = threading.Lock()  # guards _busy
        self._wholes = Wholes(
            task.filler,
            task.meters,
            first_step=task.start.step,
            batch_size=task.batch_size,
            shares_items=isinstance(source, Dataset) and source.shares_items,
        )
        self._by_arrays = isinstance(source, Arrays) and task.hooks.transform is None
        self._tells_epoch = isinstance(source, Dataset) and callable(getattr(source.dataset, "set_epoch", None))
        self._part_rows = self._choose_part_rows()

    def _choose_part_rows(self) -> int:
        task = self._task
        if task.batch_size is None:
            return 1
        if self._by_arrays and task.hooks.collate is not None:
            return task.batch_size
        if isinstance(self._source, Arrays) and self._by_arrays:
            row_bytes = sum(leaf[:1].nbytes for leaf in self._source.leaves) or 1
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
                self._fail(assembly, error, "reading", self._rows_of(part))
            self._finished_part()
            if not assembly.part_done():
                continue
            try:
                self._finish(assembly)
            except BaseException as error:  # noqa: BLE001 - as above
                self._fail(assembly, error, "finishing", None)

    def _fail(self, assembly: Assembly, error: BaseException, stage: str, rows: tuple[int, int] | None) -> None:
        if assembly.fail(error, stage, rows):
            self._wholes.stop()
            self._line.give_up()

    def _rows_of(self, part: _Part) -> tuple[int, int]:
        first = part.assembly.position.first_row
        return first + part.start, first + part.stop

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
                self._task.out.end(error)
                return None

    def _next_part(self) -> _Part | None:
        while True:
            assembly = self._assembly
            if assembly is not None and self._next_row < self._count:
                start = self._next_row
                stop = self._next_row = min(start + self._part_rows, self._count)
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
        assembly = Assembly(
            ticket, position, before, parts=-(-count // self._part_rows), rows=0 if self._task.batch_size is None else count
        )
        assembly.is_last = self._order.span(stop) is None
        if self._task.hooks.collate is not None and not self._by_arrays:
            assembly.examples = [None] * count
        self._assembly = assembly
        self._rows = self._order.rows(self._epoch, start, stop)
        self._next_row = 0
        self._count = count
        self._done_rows = stop
        self._any = True
        if self._by_arrays and self._task.hooks.collate is None:
            assert isinstance(self._source, Arrays) and self._structure is not None
            try:
                self._task.filler.open_arrays(assembly, self._source.leaves, self._structure)
            except BaseException as error:  # noqa: BLE001 - as above
                self._fail(assembly, error, "planning", None)
                self._over = True
                self._assembly = None
                return False
        return True

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
                task.filler.write_rows(assembly, part.start, part.stop, self._source.leaves, part.rows)
            task.meters.add(copy=task.clock() - began)
            return
        examples = self._read(part)
        if task.batch_size is None:
            self._fill_whole(assembly, examples[0])
        elif assembly.examples is not None:
            assembly.examples[part.start : part.stop] = examples
        else:
            began = task.clock()
            task.filler.write_examples(assembly, part.start, examples)
            task.meters.add(copy=task.clock() - began)

    def _read(self, part: _Part) -> list[Any]:
        task = self._task
        rows = list(range(part.rows.start, part.rows.stop)) if isinstance(part.rows, slice) else part.rows.tolist()
        began = task.clock()
        if isinstance(self._source, Dataset):
            items = self._source.read(rows)
        else:
            items = self._source.examples(rows)
        read = task.clock()
        if task.hooks.transform is not None:
            epoch = part.assembly.position.epoch
            items = [task.hooks.transformed(item, epoch, row) for item, row in zip(items, rows, strict=True)]
        task.meters.add(source=read - began, transform=task.clock() - read)
        return items

    def _fill_whole(self, assembly: Assembly, batch: Any) -> None:
        missing = self._wholes.missing(assembly, batch) if assembly.is_last and not self._task.pads else 0
        if missing:
            self._wholes.refuse_or_drop(assembly, batch, missing, self._task.remainder)
        else:
            self._wholes.write(assembly, batch, pads=self._task.pads)

    def _finish(self, assembly: Assembly) -> None:
        task = self._task
        if assembly.settled:  # failed, or dropped
            assembly.drop_memory()
            return
        if assembly.examples is not None:
            self._wholes.collate(assembly, task.hooks, pads=task.pads, gathered=self._by_arrays)
        elif task.batch_size is not None:
            task.meters.add(padded=task.filler.finish(assembly, assembly.rows))
        assembly.send()
