"""The body of a reader thread: takes parts of batches, reads, transforms and writes them, and sends each batch that is complete."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

from prefetchshard.base.errors import NarrowingError
from prefetchshard.leaves.copying import not_copied, private_copy
from prefetchshard.measuring.recorder import Span
from prefetchshard.measuring.timeline import Work
from prefetchshard.planning.plan import HostPlan
from prefetchshard.reading.open_batch import OpenBatch
from prefetchshard.reading.reading_plan import Part, ReadingPlan
from prefetchshard.reading.user_functions import no_leaves
from prefetchshard.reading.writing import Writer
from prefetchshard.sharding.batch_tree import BatchTree
from prefetchshard.sharding.rules import NoLeavesError
from prefetchshard.sources.arrays import Arrays
from prefetchshard.sources.dataset import Dataset


class Worker:
    """Does the parts that a dealer gives out. All threads of a run share one.

    Args:
        plan: of the reading.
        writer: writes into the memory of batches.
        source: for rows that are found by number; None where items are pulled.
        tree: of the arrays' tree, where rows go straight from arrays into batches.

    Attributes:
        gathers: the arrays, where rows go straight from them into batches.
        part_done: called after each part, with whether it was the last one of its batch.
        row_seconds: what reading, transforming and writing an example takes.

    Thread safety: any thread may call any method.
    """

    def __init__(self, plan: ReadingPlan, writer: Writer, source: Arrays | Dataset | None = None, tree: BatchTree | None = None) -> None:
        functions = plan.functions
        self._plan = plan
        self._writer = writer
        self._source = source
        self._tree = tree
        self._array_plan: HostPlan | None = None
        self.gathers = source if isinstance(source, Arrays) and functions.transform is None else None
        self._has_functions = functions.transform is not None or functions.collate is not None
        # What these functions do to an item must not reach the source
        self._copies_first = isinstance(source, Dataset) or (source is None and not plan.reuses_buffers)
        self._copies_arrays = plan.reuses_buffers and not (isinstance(source, Dataset) and source.shares_items)
        self.part_done: Callable[[bool], None] | None = None
        self.row_seconds = math.inf

    def read_from(self, source: Dataset) -> None:
        """Read the rows that come from another source, which has the same ones."""
        self._source = source

    def work(self, deal: Callable[[], Part | None], part_done: Callable[[], object] | None = None) -> None:
        """Do what is dealt out until there is no more.

        Args:
            deal: the next part; waits for it.
            part_done: called after each part.
        """
        recorder = self._plan.recorder
        meter = recorder.meter("readers")
        try:
            while (part := meter.wait_for(deal)) is not None:
                self.do(part)
                del part  # while the next one is waited for it would hold what it copied
                if part_done is not None:
                    part_done()
        finally:
            recorder.leave()

    def do(self, part: Part) -> None:
        """Do a part; send its batch where it was the last one."""
        batch: OpenBatch = part.batch
        is_last = self._read(part, batch) if part.work is None else self._copy(part, batch)
        if self.part_done is not None:
            self.part_done(is_last)
        if is_last:
            self.finish(batch)

    def _copy(self, part: Part, batch: OpenBatch) -> bool:
        """Do a share of a copy. Whether it was the last part of its batch."""
        span = Span(self._plan.recorder, "copying", batch.host.times)
        try:
            if not self._plan.out.cancelled:
                part.work()  # pyright: ignore[reportOptionalCall] - that is what makes it a share
        except BaseException as error:  # noqa: BLE001 - a thread has no caller: the queue is the way out
            batch.fail(error, "reading")  # what is copied comes from the source as it is, so to the user that is reading
        part.work = None  # it holds what was copied, and with the last share the source may go on
        span.end()
        return batch.part_done()

    def _read(self, part: Part, batch: OpenBatch) -> bool:
        """Read, transform and write the rows or items of a part. Whether it was the last part of its batch."""
        copies = self.gathers is not None
        work: Work = "copying" if copies else "transforming" if part.rows is None else "reading"
        span = Span(self._plan.recorder, work, batch.host.times)
        try:
            if not self._plan.out.cancelled:
                self._fill(part, span)
                took = span.end()
                # Rather the least, since waiting for the interpreter's lock comes on top, the more the smaller the parts are; but rows
                # that come from a cache must not stand for all
                self.row_seconds = max(1e-7, min(2 * self.row_seconds, took / (part.stop - part.start)))
        except BaseException as error:  # noqa: BLE001 - as above
            span.end()
            self._name_row(part, error)
            batch.fail(error, "reading" if span.work == "copying" else span.work, self._rows_of(part))
        if batch.host.fault is not None and not copies:
            batch.host.fault_stage = span.work
        part.items = None  # as with a share
        return batch.part_done()

    def _rows_of(self, part: Part) -> tuple[int, int] | None:
        if self._plan.batch_size is None:
            return None
        first = part.batch.first_row
        return first + part.start, first + part.stop

    def _name_row(self, part: Part, error: BaseException) -> None:
        """Where the order is shuffled, the row of the batch does not tell which row of the source it is."""
        rows = part.rows
        if rows is not None and isinstance(error, NarrowingError) and error.row is not None and self._plan.batch_size is not None:
            at = error.row - part.start
            error.add_note(f"that is row {rows.start + at if isinstance(rows, slice) else int(rows[at])} of the source")

    # -- filling

    def _fill(self, part: Part, span: Span) -> None:
        if self.gathers is not None:
            self._gather(part, self.gathers, span)
        elif self._plan.batch_size is None:
            self._fill_whole(part, span)
        else:
            self._fill_examples(part, span)

    def _gather(self, part: Part, source: Arrays, span: Span) -> None:
        rows = part.rows
        assert rows is not None
        if self._plan.functions.collate is not None:
            part.batch.collected = [source.gathered(rows)]
        else:
            plan = self._array_plan
            if plan is None:
                span.enter("planning")
                assert self._tree is not None
                plan = self._array_plan = self._writer.planner.for_arrays(source.leaves, self._tree)
                span.enter("copying")
            # Here, not where the batch became due: making memory takes long, and the others wait for what is due next
            part.batch.open(lambda: plan, self._writer.staging, source.leaves)
            self._writer.write_rows(part.batch, part.start, part.stop, source.leaves, rows)

    def _numbers(self, part: Part) -> tuple[Sequence[int], Sequence[Any] | None]:
        """The number of each item of the part, and the items themselves, where they are there already."""
        numbers, source = self._row_numbers(part), self._source
        if part.rows is None:
            return numbers, part.items
        return numbers, source.read_many(list(numbers)) if isinstance(source, Dataset) and source.reads_many else None

    def _row_numbers(self, part: Part) -> Sequence[int]:
        rows = part.rows
        if rows is None:
            return range(part.batch.first_row + part.start, part.batch.first_row + part.stop)
        return range(rows.start, rows.stop) if isinstance(rows, slice) else rows.tolist()

    def _transformed(self, item: Any, epoch: int, number: int) -> Any:
        functions = self._plan.functions
        if self._copies_first:
            try:
                item = private_copy(item, jax_arrays=self._copies_arrays)
            except RecursionError as error:
                raise not_copied(item, error) from None
        return item if functions.transform is None else functions.transformed(item, epoch, number)

    def _fill_examples(self, part: Part, span: Span) -> None:
        """Read, transform and write examples, one after the other: the source may make them all in one buffer."""
        batch, enter, has_functions, collected = part.batch, span.enter, self._has_functions, part.batch.collected
        writer = self._writer.examples(batch, part.start, part.stop - part.start)
        numbers, items = self._numbers(part)
        if collected is not None and items is None and self._plan.functions.transform is None and self._copies_first:
            read, jax_arrays = self._source.read, self._copies_arrays  # pyright: ignore[reportOptionalMemberAccess] - as below
            with contextlib.suppress(RecursionError):  # below it is said which example holds itself
                collected[part.start : part.stop] = [private_copy(read(number), jax_arrays=jax_arrays) for number in numbers]
                return
        for i, number in enumerate(numbers):
            if items is None:
                enter("reading")
                item = self._source.read(number)  # pyright: ignore[reportOptionalMemberAccess] - where there are no items there is one
            else:
                item = items[i]
            if has_functions:
                enter("transforming")
                item = self._transformed(item, batch.host.epoch, number)
            enter("batching")
            if collected is not None:
                collected[part.start + i] = item
                continue
            try:
                writer.write(item)
            except NoLeavesError as error:
                raise no_leaves(error, f"the example at row {number}", self._plan.functions.example_by) from None
        writer.finish()

    def _fill_whole(self, part: Part, span: Span) -> None:
        """Read, transform and write a batch that the source makes."""
        (number,), items = self._numbers(part)
        item = self._source.read(number) if items is None else items[0]  # pyright: ignore[reportOptionalMemberAccess] - as above
        if self._has_functions:
            span.enter("transforming")
            item = self._transformed(item, part.batch.host.epoch, number)
        span.enter("batching")
        self._write_whole(part.batch, item)

    def _write_whole(self, batch: OpenBatch, item: Any) -> None:
        try:
            leaves, tree = self._writer.flatten(item)
        except NoLeavesError as error:
            first, functions = batch.first_row, self._plan.functions
            what = f"batch {first} of the epoch" if self._plan.batch_size is None else f"the batch that begins at row {first}"
            raise no_leaves(error, what, functions.batch_by) from None
        self._writer.write_whole(batch, leaves, tree)

    # -- the end of a batch

    def finish(self, batch: OpenBatch) -> None:
        """All parts of the batch are done: send it on."""
        if batch.is_settled or self._plan.out.cancelled:  # it failed, or is not wanted
            batch.host.drop_memory()
            return
        if batch.collected is None and not batch.host.passed:
            batch.send()
            return
        stage: Work = "finishing" if batch.collected is None else "collating"
        span = Span(self._plan.recorder, stage, batch.host.times)
        try:
            if batch.collected is not None:
                collected, batch.collected = batch.collected, None
                made = self._plan.functions.collated(collected[0] if self.gathers is not None else collected[: batch.host.examples])
                span.enter("batching")
                self._write_whole(batch, made)
            elif batch.host.examples is not None:
                self._writer.finish_examples(batch, pads=self._plan.pads)
            span.end()
            batch.send()
        except BaseException as error:  # noqa: BLE001 - as above
            span.end()
            batch.fail(error, stage, None if batch.host.examples is None else (batch.first_row, batch.first_row + batch.host.examples))
