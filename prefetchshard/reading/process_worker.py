"""The body of a reader thread with a process under it: hands its parts to the process, and writes what comes back."""

from __future__ import annotations

import math
import pickle
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np

from prefetchshard.base.errors import SourceError
from prefetchshard.base.memory import AnyArray
from prefetchshard.leaves.narrowing import store
from prefetchshard.measuring.recorder import Span
from prefetchshard.measuring.timeline import Work
from prefetchshard.planning.plan import Kind, Leaf
from prefetchshard.processes.child import PYTHON_NUMBERS, leaf_kinds, rebuild
from prefetchshard.processes.pool import Pool
from prefetchshard.processes.worker_process import Answer, StoppedError, WorkerProcess
from prefetchshard.reading.open_batch import OpenBatch
from prefetchshard.reading.reading_plan import Part, ReadingPlan
from prefetchshard.reading.user_functions import no_leaves
from prefetchshard.reading.worker import Worker
from prefetchshard.reading.writing import Writer
from prefetchshard.sharding.batch_tree import BatchTree
from prefetchshard.sharding.rules import NoLeavesError
from prefetchshard.sources.arrays import Arrays
from prefetchshard.sources.dataset import Dataset
from prefetchshard.sources.per_worker import WorkerDatasets

MOST_STRUCTURES = 64
"""Of examples that are remembered."""

MOST_NAMED = 64
"""Rows in an error."""

QUICK_SECONDS = 0.2
"""A process that takes no longer than this for a part is asked for the next one before it has answered, and need not wait for its thread.
Where it takes longer, that wait is nothing, and the next part is rather for whichever process is free first."""


class ProcessWorker(Worker):
    """Does parts as `Worker` does, in a process of the thread's own. Until its process is ready, the first thread does them by itself.

    Args:
        plan: of the reading.
        writer: writes into the memory of batches.
        source: for rows that are found by number; None where items are pulled.
        closing_in: gets the idents of threads that wait for their process to end.

    Attributes:
        process_row_seconds: what a process takes for an example, without the waits of its thread.
    """

    def __init__(self, plan: ReadingPlan, writer: Writer, source: Arrays | Dataset | None, closing_in: set[int]) -> None:
        super().__init__(plan, writer, source)
        self._closing_in = closing_in
        self._whole = plan.batch_size is None
        self._makes = "whole" if self._whole else "examples" if plan.functions.collate is None else "batch"
        self.pool = Pool(plan.workers, *_sent(plan, source))
        self.process_row_seconds = math.inf
        self._mine = _Mine()
        self._trees: dict[Any, tuple[BatchTree, list[int]] | None] = {}  # by the structure of examples, see `_tree_of`

    def work(
        self,
        deal: Callable[[], Part | None],
        part_done: Callable[[], object] | None = None,
        *,
        deal_at_once: Callable[[], Part | None] | None = None,
    ) -> None:
        """Do what is dealt out until there is no more.

        Args:
            deal: the next part; waits for it.
            part_done: called after each part.
            deal_at_once: the next part if that is there already, else None.
        """
        process = self._mine.process = self.pool.claim()
        try:
            process.start()
            if not process.is_first:
                process.wait_ready()
            super().work(lambda: self._next_part(process, deal, deal_at_once), part_done)
        finally:
            self.pool.over.give()
            ident = threading.get_ident()
            self._closing_in.add(ident)
            try:
                self.pool.leave(process)
                self._mine.process = None
            finally:
                self._closing_in.discard(ident)

    # -- parts

    def _next_part(
        self, process: WorkerProcess, deal: Callable[[], Part | None], deal_at_once: Callable[[], Part | None] | None
    ) -> Part | None:
        """The next part to be done; its process was asked for it, and for one more where that can be."""
        asked = self._mine.asked
        if not asked:
            part = deal()
            if part is None or part.work is not None or not process.works:
                return part
            self._ask(process, part)
        part, _ = asked[0]
        if len(asked) == 1 and deal_at_once is not None and (part.stop - part.start) * self.process_row_seconds < QUICK_SECONDS:
            following = deal_at_once()
            if following is not None:
                self._ask(process, following)
        return part

    def do(self, part: Part) -> None:
        asked = self._mine.asked
        try:
            super().do(part)
        finally:
            if asked:
                asked.popleft()

    def _fill(self, part: Part, span: Span) -> None:
        process, asked = self._mine.process, self._mine.asked
        if process is None or not asked:
            self._fill_here(part, span)
            return
        try:
            answer = self._answer(process)
        except StoppedError:
            return
        except SourceError as error:
            if error is process.trouble and not getattr(error, "__notes__", ()):  # it ended, and this part is the first that notices
                error.add_note(f"it was asked for {self._item_name}s {_some(self._row_numbers(part))}")
            raise
        waited = span.enter("batching")
        span.add(_first_work(part), -waited)  # it is not work of this process
        for work, seconds in answer.seconds.items():
            if seconds:
                span.add(cast("Work", work), seconds)
        took = sum(answer.seconds.values()) / (part.stop - part.start)
        self.process_row_seconds = max(1e-7, min(2 * self.process_row_seconds, took))  # see `Worker`
        if answer.kind == "fault":
            body = answer.body
            del answer  # the traceback of what is raised holds this frame
            self._raise_fault(process, part, span, body)
        elif answer.kind == "stack":
            self._write_stack(part, answer)
        elif answer.kind == "list":
            self._write_list(part, answer)
        else:
            self._write_batch(part, answer, span)

    def _fill_here(self, part: Part, span: Span) -> None:
        if self._makes != "batch":
            super()._fill(part, span)
            return
        made = part.batch.collected = [None] * (part.stop - part.start)
        super()._fill(part, span)
        part.batch.collected = None
        span.enter("collating")
        self._write_collated(part.batch, self._plan.functions.collated(made), span)

    def _write_collated(self, batch: OpenBatch, made: Any, span: Span) -> None:
        span.enter("batching")
        try:
            self._write_whole(batch, made)
        except BaseException:
            span.enter("collating" if self._makes == "batch" else "batching")
            raise

    def finish(self, batch: OpenBatch) -> None:
        if self._makes == "batch" and not batch.is_settled and not self._plan.out.cancelled:
            batch.send()
            return
        super().finish(batch)

    # -- asking

    def _ask(self, process: WorkerProcess, part: Part) -> None:
        """Ask for a part. What goes wrong is raised where its answer is waited for, which says of which batch that is."""
        try:
            process.ask(*self._question(part))
        except BaseException as error:  # noqa: BLE001 - as above
            self._mine.asked.append((part, error))
        else:
            self._mine.asked.append((part, None))

    def _answer(self, process: WorkerProcess) -> Answer:
        _, failure = self._mine.asked[0]
        if failure is None:
            return process.answer()
        try:
            raise failure
        finally:
            del failure  # its traceback holds this frame

    def _question(self, part: Part) -> tuple[tuple[Any, ...], Any]:
        """What to do, and what is sent with it."""
        rows, source, epoch = part.rows, self._source, part.batch.host.epoch
        tell = source.told if isinstance(source, Dataset) and source.takes_epoch else None
        if rows is None:
            first = part.batch.first_row + part.start
            return (range(first, first + len(part.items)), epoch, None, self._makes), part.items
        numbers = range(rows.start, rows.stop) if isinstance(rows, slice) else rows
        sent = [leaf[rows] for leaf in source.leaves] if isinstance(source, Arrays) else None
        return (numbers, epoch, tell, self._makes), sent

    def _raise_fault(self, process: WorkerProcess, part: Part, span: Span, body: Any) -> None:
        stage, number, (kind, what) = body
        span.enter(stage)
        where = f"in {process}" if number is None else f"in {process}, at {self._item_name} {number}"
        if kind == "none":
            self._plan.functions.refuse_none(what, number)
        if kind == "memory":
            raise SourceError(f"{process}: {what}; take smaller batches, or fewer processes")
        if kind == "refused":
            raise SourceError(what)
        raise _raised(what, where)

    @property
    def _item_name(self) -> str:
        return "batch" if self._whole else "row" if self._source is not None else "example"

    # -- what comes back

    def _write_stack(self, part: Part, answer: Answer) -> None:
        """Examples that lie leaf by leaf in shared memory."""
        structure, columns = answer.body
        count = part.stop - part.start
        values: list[Any] = [column if type(column) is list else _rows_at(answer.memory, column, count) for column in columns]
        found = self._tree_of(structure)
        if found is not None:
            tree, order = found
            kinds = list(leaf_kinds(structure))
            chosen = [values[i] for i in order]
            if self._write_columns(part.batch, part.start, part.stop, tree, chosen, [kinds[i] for i in order]):
                return
        self._write_examples(part, _examples(structure, values, count))

    def _tree_of(self, structure: Any) -> tuple[BatchTree, list[int]] | None:
        """The tree of such examples, and which of their leaves each of its leaves is; None where they have to be taken apart one by one."""
        if structure in self._trees:
            return self._trees[structure]
        marks = [_Mark(i) for i in range(len(list(leaf_kinds(structure))))]
        found: tuple[BatchTree, list[int]] | None = None
        try:
            leaves, tree = self._writer.flatten(rebuild(structure, iter(marks)))
        except Exception:  # noqa: BLE001 - it is raised again with an example itself, of which it says more
            return None
        if all(type(leaf) is _Mark for leaf in leaves):  # else a container stays on the host as a whole
            found = tree, [leaf.index for leaf in leaves]
        if len(self._trees) >= MOST_STRUCTURES:
            self._trees.clear()
        self._trees[structure] = found
        return found

    def _write_columns(self, batch: OpenBatch, start: int, stop: int, tree: BatchTree, values: list[Any], kinds: list[str]) -> bool:
        """Copy all rows of a leaf at once. False: they do not fit the plan, and have to be written one by one to say which."""
        writer, plan = self._writer, batch.plan
        if plan is None:
            firsts = [_first(value, kind) for value, kind in zip(values, kinds, strict=True)]
            plan = batch.open(lambda: writer.planner.for_examples(firsts, tree), writer.staging)
        if (tree is not plan.tree and tree != plan.tree) or not all(map(_fits, plan.leaves, values)):
            return False
        views = iter(batch.host.memory.views if batch.host.memory is not None else ())
        for j, (leaf, value, kind) in enumerate(zip(plan.leaves, values, kinds, strict=True)):
            if leaf.kind is Kind.HOST:
                batch.host.passed[j][start:stop] = _host_values(value, kind)
                continue
            view = next(views)[start:stop]
            store(view, value, path=leaf.path, policy=writer.planner.narrow, row=start, copies=writer.copies)
        return True

    def _write_list(self, part: Part, answer: Answer) -> None:
        """Examples of which each is a pickle."""
        data, where = answer.body
        # Copied, as they may be kept, and the memory is used again
        buffers = iter([bytearray(answer.memory[start : start + size]) for start, size in where])
        self._write_examples(part, (pickle.loads(pickled, buffers=[next(buffers) for _ in range(count)]) for pickled, count in data))

    def _write_examples(self, part: Part, examples: Iterator[Any]) -> None:
        writer = self._writer.examples(part.batch, part.start, part.stop - part.start)
        numbers = self._row_numbers(part)
        for number, example in zip(numbers, examples, strict=True):
            try:
                writer.write(example)
            except NoLeavesError as error:
                raise no_leaves(error, f"the example at row {number}", self._plan.functions.example_by) from None
        writer.finish()

    def _write_batch(self, part: Part, answer: Answer, span: Span) -> None:
        """A whole batch, whose arrays lie in shared memory."""
        data, where = answer.body
        memory, batch = answer.memory, part.batch
        made = pickle.loads(data, buffers=[memory[start : start + size] for start, size in where])
        self._write_collated(batch, made, span)
        kept = [j for j, leaf in enumerate(batch.plan.leaves) if leaf.kind is not Kind.STAGED] if batch.plan is not None else []
        if kept and where and batch.host.passed:  # the memory is used again, and these are kept
            copied = pickle.loads(data, buffers=[bytearray(memory[start : start + size]) for start, size in where])
            leaves, _ = self._writer.flatten(copied)
            for j in kept:
                batch.host.passed[j] = leaves[j]


class _Mine(threading.local):
    """What each thread has for itself."""

    process: WorkerProcess | None = None

    def __init__(self) -> None:
        self.asked: deque[tuple[Part, BaseException | None]] = deque()  # parts that the process was asked for, and are not done


class _Mark:
    """Stands for a leaf of an example."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


def _sent(plan: ReadingPlan, source: Arrays | Dataset | None) -> tuple[dict[str, Any], dict[str, str]]:
    """What a process is sent once, and what to call the parts that are the user's."""
    functions = plan.functions
    sent: dict[str, Any] = {
        "source": "items",
        "transform": functions.transform,
        "collate": functions.collate,
        "wants_rng": functions.wants_rng,
        "seed": functions.seed,
    }
    words = {"transform": "transform", "collate": "collate"}
    if isinstance(source, WorkerDatasets):
        sent |= {"source": "per_worker", "make": source.make_dataset, "length": source.length, "name": source.name}
        words["make"] = "the function of ps.per_worker"
    elif isinstance(source, Dataset):
        sent |= {"source": "dataset", "dataset": source.dataset}
        words["dataset"] = "the source"
    elif source is not None:
        sent |= {"source": "arrays", "template": source.unflatten(list(range(len(source.leaves))))}
        words["template"] = "the container of the source's arrays"
    if isinstance(source, Dataset):
        sent["reads_many"] = source.reads_many
    return sent, words


def _first_work(part: Part) -> Work:
    return "transforming" if part.rows is None else "reading"


def _raised(what: tuple[bytes | None, str, str], where: str) -> BaseException:
    """The exception that user code raised in a process, with the text of its traceback there."""
    data, name, text = what
    error: BaseException | None = None
    if data is not None:
        try:
            error = pickle.loads(data)
        except Exception:  # noqa: BLE001 - whatever its own unpickling raises
            error = None
    if not isinstance(error, BaseException):
        return SourceError(f"{where}: {name} (that exception cannot be pickled). Its traceback there:\n\n{text}")
    try:
        error.add_note(f"{where}. Its traceback there:\n\n{text}")
    except Exception:  # noqa: BLE001, S110 - an error that lets nothing be added goes without
        pass
    return error


def _some(numbers: Sequence[int]) -> str:
    """The numbers, for an error."""
    if isinstance(numbers, range):
        return f"{numbers.start} to {numbers.stop - 1}"
    return ", ".join(map(str, numbers[:MOST_NAMED])) + (f" and {len(numbers) - MOST_NAMED} more" if len(numbers) > MOST_NAMED else "")


def _rows_at(memory: memoryview, column: tuple[Any, tuple[int, ...], int], count: int) -> AnyArray:
    dtype, shape, start = column
    return np.ndarray((count, *shape), dtype, memory, start)


def _fits(leaf: Leaf, value: Any) -> bool:
    """Whether the rows of a leaf can be copied at once."""
    if leaf.kind is Kind.HOST:
        return True
    return leaf.kind is Kind.STAGED and type(value) is not list and value.dtype == leaf.dtype and value.shape[1:] == leaf.example


def _first(value: Any, kind: str) -> Any:
    first = value[0]
    return first.item() if kind in PYTHON_NUMBERS else first


def _host_values(value: Any, kind: str) -> list[Any]:
    """The rows of a leaf as the values that they were, in memory of their own."""
    if type(value) is list:
        return cast("list[Any]", value)
    return value.tolist() if kind in PYTHON_NUMBERS else list(value.copy())


def _examples(structure: tuple[Any, ...], values: list[Any], count: int) -> Iterator[Any]:
    columns = [_host_values(value, kind) for value, kind in zip(values, leaf_kinds(structure), strict=True)]
    for row in range(count):
        yield rebuild(structure, iter([column[row] for column in columns]))
