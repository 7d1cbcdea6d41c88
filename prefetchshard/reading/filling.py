"""A batch while it is read: opened with the first example, filled in parts by several workers, finished by the last of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from prefetchshard.base.batches import AnyArray, HostBatch, Memory, Position
from prefetchshard.base.clock import Clock
from prefetchshard.base.config import Narrow, Pad
from prefetchshard.base.errors import BatchError
from prefetchshard.base.faults import note, safe_to_raise
from prefetchshard.base.waiters import Waiters
from prefetchshard.leaves.converting import as_array, check_example, check_key
from prefetchshard.leaves.narrowing import store
from prefetchshard.leaves.on_devices import is_jax_array
from prefetchshard.leaves.on_host import blank, stack_on_host
from prefetchshard.measuring.stats import Meters
from prefetchshard.planning.full_batches import plan_full
from prefetchshard.planning.planner import MASK, Kind, Leaf, Plan, Planner
from prefetchshard.queues.bounded_queue import Ticket
from prefetchshard.reading.user_functions import UserFunctions
from prefetchshard.sharding.batch_tree import BatchTree, in_brackets
from prefetchshard.sources.arrays import Rows, gather
from prefetchshard.staging.aliased import Staging

LEAST_SHARED_BYTES = 1 << 20
"""A smaller leaf of a batch that is copied in shares goes with the first of them."""


class OpenBatch:
    """One batch on its way from the source into the staging memory.

    Attributes:
        ticket: its place in the order.
        position: where it stands in the data.
        before: the position of the batch before it in the epoch; told by this one whether it was the last.
        rows: examples in it; set before its last part is done.
        examples: what `collate` will get; None where examples are written as they come.
        work: what is copied in shares, and ended with the last of them.
        is_last: whether the source had no item after this one; None until it was asked.
    """

    __slots__ = (
        "_closed", "_lock", "_parts", "before", "examples", "is_last", "memory", "passed", "plan", "position", "rows", "settled", "ticket",
        "work",
    )  # fmt: skip

    def __init__(
        self, ticket: Ticket[HostBatch[Plan]], position: Position, before: Position | None, *, parts: int = 0, rows: int = 0
    ) -> None:
        self.ticket = ticket
        self.position = position
        self.before = before
        self.rows = rows
        self.plan: Plan | None = None
        self.memory: Memory | None = None
        self.passed: dict[int, Any] = {}
        self.examples: list[Any] | None = None
        self.is_last: bool | None = None
        self.work: CopyJob | None = None
        self._lock = threading.Lock()  # guards opening, and the count of parts
        self._parts = parts
        self._closed = parts > 0  # the number of parts is known from the start
        self.settled = False

    def open(self, make_plan: Callable[[], Plan], staging: Staging, arrays: Sequence[AnyArray] | None = None) -> Plan:
        """The plan of the batch; the first caller decides it and takes the memory. `arrays`: those whose rows it is made of."""
        if self.plan is None:
            with self._lock:
                if self.plan is None:
                    plan = make_plan()
                    for i, leaf in enumerate(plan.leaves):
                        if plan.rows is not None and leaf.kind in (Kind.HOST, Kind.KEYS):
                            self.passed[i] = [None] * plan.rows if arrays is None else blank(arrays[i], leaf.shape)
                    self.memory = staging.lease(plan.layout) if plan.layout.leaves else None
                    self.plan = plan
        return self.plan

    def add_part(self) -> None:
        """Expect one more part."""
        with self._lock:
            self._parts += 1

    def close_parts(self) -> bool:
        """No further part comes. Whether all are done already."""
        with self._lock:
            self._closed = True
            return self._parts == 0

    @property
    def is_read(self) -> bool:
        """Whether all of its parts are done."""
        return self._closed and self._parts == 0

    def part_done(self) -> bool:
        """One part is done. Whether it was the last."""
        with self._lock:
            self._parts -= 1
            return self._closed and self._parts == 0

    def fail(self, error: BaseException, stage: str, rows: tuple[int, int] | None = None) -> bool:
        """The batch cannot be made: the queue ends here. False: it failed before, or is not wanted."""
        with self._lock:
            if self.settled:
                return False
            self.settled = True
        self.ticket.fail(note(safe_to_raise(error, stage), stage, self.position, rows))
        return True

    def send(self) -> None:
        """The batch is complete."""
        with self._lock:
            if self.settled:
                return
            self.settled = True
        assert self.plan is not None
        if self.before is not None:
            self.before.settle_end(False)
        self.ticket.send(HostBatch(self.plan, self.memory, self.passed, self.position, self.rows))

    def withdraw(self) -> None:
        """The batch is not wanted (a dropped remainder)."""
        with self._lock:
            self.settled = True
        if self.before is not None:
            self.before.settle_end(True)
        self.ticket.withdraw()

    def drop_memory(self) -> None:
        """Give the memory back unused; nobody writes it any more."""
        if self.memory is not None:
            self.memory.release()
            self.memory = None


class Filler:
    """Writes examples, rows of arrays and whole batches into the memory of their batch.

    Args:
        planner: makes the plans.
        staging: the ring.
        narrow: what happens to 64-bit leaves while x64 is off.
        keep: makes what stays on the host safe from what the source does next.
        clock: monotonic seconds.
    """

    def __init__(self, planner: Planner, staging: Staging, narrow: Narrow, keep: Callable[[Any], Any], clock: Clock) -> None:
        self.clock = clock
        self.planner = planner
        self.staging = staging
        self.narrow: Narrow = narrow
        self.keep = keep
        self.flatten = planner.rules.flatten

    def examples(self, assembly: OpenBatch, start: int, count: int) -> ExampleWriter:
        """Write up to `count` examples as rows `start`, `start + 1`, ... of the batch."""
        return ExampleWriter(self, assembly, start, count)

    # -- rows of arrays

    def open_arrays(self, assembly: OpenBatch, arrays: Sequence[AnyArray], plan: Plan) -> None:
        """Take the memory for rows of these arrays."""
        assembly.open(lambda: plan, self.staging, arrays)

    def write_rows(self, assembly: OpenBatch, start: int, stop: int, arrays: Sequence[AnyArray], rows: Rows) -> None:
        """Gather rows of the arrays as rows `start` to `stop` of the batch."""
        assert assembly.plan is not None
        staged = 0
        for j, leaf in enumerate(assembly.plan.leaves):
            if leaf.kind is Kind.HOST:
                assembly.passed[j][start:stop] = arrays[j][rows]
                continue
            assert assembly.memory is not None
            view = assembly.memory.views[staged]
            whole = stop - start == len(view)
            gather(arrays[j], rows, view if whole else view[start:stop], path=leaf.path, policy=self.narrow, first_row=start)
            staged += 1

    # -- batches that the source or `collate` made

    def write_batch(self, assembly: OpenBatch, leaves: list[Any], plan: Plan, *, first: int = 0, count: int = 1) -> None:
        """Copy a whole batch, or the share `first` of `count` of its rows.

        Args:
            assembly: opened with `plan`.
            leaves: of the batch, NumPy arrays where they go through the staging memory.
            plan: of the batch.
            first: which share, from 0.
            count: into how many shares the rows are cut.
        """
        views = iter(assembly.memory.views if assembly.memory is not None else ())
        for j, value in enumerate(leaves):
            leaf = plan.leaves[j]
            if leaf.kind is Kind.STAGED:
                self._copy_share(next(views), value, leaf.path, leaf.has_rows, first, count)
            elif first == 0:
                assembly.passed[j] = value if leaf.kind is Kind.DEVICE else self.keep(value)

    def _copy_share(self, view: AnyArray, value: AnyArray, path: str, has_rows: bool, first: int, count: int) -> None:
        if count == 1 and view.shape == value.shape:
            store(view, value, path=path, policy=self.narrow, row=0 if has_rows else None)
        elif has_rows and (count == 1 or value.nbytes >= LEAST_SHARED_BYTES):
            start, stop = len(value) * first // count, len(value) * (first + 1) // count
            store(view[start:stop], value[start:stop], path=path, policy=self.narrow, row=start)
        elif first == 0:
            store(view[: len(value)] if has_rows else view, value, path=path, policy=self.narrow, row=0 if has_rows else None)

    # -- the end of a batch

    def finish(self, assembly: OpenBatch, rows: int | None) -> int:
        """Fill what padding there is, and put host leaves together. Returns the number of padding rows.

        Args:
            assembly: all of whose parts are written.
            rows: that were written; None where the batch has no rows.
        """
        plan = assembly.plan
        assert plan is not None
        missing = plan.rows - rows if plan.rows is not None and rows is not None else 0
        views = assembly.memory.views if assembly.memory is not None else ()
        if plan.mask_index is not None:
            mask = views[plan.mask_index]
            mask[:rows] = True
            mask[rows:] = False
        values: dict[int, Any] = assembly.passed
        for j, value in values.items():
            kind = plan.leaves[j].kind
            if kind is Kind.HOST and plan.leaves[j].has_rows and type(value) is list:
                assembly.passed[j] = stack_on_host(cast("list[Any]", value)[:rows], plan.leaves[j].path, plan.rows)
            elif kind is Kind.KEYS:
                assembly.passed[j] = value[:rows]
        if plan.masks_on_host and plan.rows is not None:
            assembly.passed[MASK] = np.arange(plan.rows) < (plan.rows - missing)
        if missing:
            for view, i in zip(views, plan.staged, strict=False):
                padding = plan.leaves[i].padding
                if plan.leaves[i].has_rows and padding is not None:
                    view[rows:] = padding
        return missing


class ExampleWriter:
    """Writes a run of examples into the memory of their batch, each before the next one is asked for.

    Thread safety: one thread at a time; several writers may write to one batch.
    """

    __slots__ = ("_assembly", "_count", "_filler", "_row", "_start", "_wide")

    def __init__(self, filler: Filler, assembly: OpenBatch, start: int, count: int) -> None:
        self._filler = filler
        self._assembly = assembly
        self._start = start
        self._count = count
        self._row = start
        self._wide: dict[int, AnyArray] = {}  # leaves that are narrowed, all rows at once, at the end

    def write(self, example: Any) -> None:
        """Write the next one."""
        filler, assembly = self._filler, self._assembly
        leaves, structure = filler.flatten(example)
        plan = assembly.plan
        if plan is None:
            plan = assembly.open(lambda: filler.planner.for_examples(leaves, structure), filler.staging)
        if structure is not plan.structure and structure != plan.structure:
            raise _other_structure(plan.structure, structure, assembly.position.first_row + self._row)
        self._write(plan, leaves)
        self._row += 1

    def _write(self, plan: Plan, leaves: list[Any]) -> None:
        assembly, row = self._assembly, self._row
        view = 0
        views = assembly.memory.views if assembly.memory is not None else ()
        for j, leaf in enumerate(plan.leaves):
            value = leaves[j]
            if leaf.kind is not Kind.STAGED:
                self._pass(j, leaf, value)
                continue
            array = value if type(value) is np.ndarray else as_array(value, leaf.path)
            if array.dtype != leaf.dtype or array.shape != leaf.example:
                check_example(leaf.path, assembly.position.first_row + row, array, leaf.example, leaf.dtype)
            if leaf.is_narrowed:
                self._wide_rows(j, leaf.shape, leaf.dtype)[row - self._start] = array
            else:
                views[view][row] = array
            view += 1

    def _pass(self, index: int, leaf: Leaf, value: Any) -> None:
        """A leaf that does not go through the staging memory."""
        if leaf.kind is Kind.KEYS:
            check_key(leaf.path, self._assembly.position.first_row + self._row, value, leaf.example, leaf.dtype)
        else:
            value = self._filler.keep(value)
        self._assembly.passed[index][self._row] = value

    def _wide_rows(self, index: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> AnyArray:
        rows = self._wide.get(index)
        if rows is None:
            rows = self._wide[index] = np.empty((self._count, *shape[1:]), dtype)
        return rows

    def finish(self) -> None:
        """All of them are written: narrow what is to be narrowed.

        Raises:
            NarrowingError: a value does not survive it.
        """
        assembly, written = self._assembly, self._row - self._start
        if not self._wide or not written:
            return
        assert assembly.plan is not None and assembly.memory is not None
        for j, rows in self._wide.items():
            view = assembly.memory.views[assembly.plan.staged.index(j)][self._start : self._row]
            store(view, rows[:written], path=assembly.plan.leaves[j].path, policy=self._filler.narrow, row=self._start)


def _other_structure(want: BatchTree, got: BatchTree, row: int) -> BatchError:
    lacks = [p for p in want.paths if p not in got.paths]
    more = [p for p in got.paths if p not in want.paths]
    parts = [f"lacks {lacks}" if lacks else "", f"has {more} beside" if more else ""]
    what = " and ".join(part for part in parts if part) or "is put together from other containers"
    return BatchError(
        f"the example at row {row} {what}; others of its batch have {list(want.paths)}: every example needs the same structure"
    )


class FlatBatch:
    """A batch that the source or `collate` made, taken out of its containers.

    Attributes:
        leaves: as they came.
        structure: of the batch.
        is_plain: they are known to be just as those of the first batch: to be copied, and nothing else.
    """

    __slots__ = ("is_plain", "leaves", "structure")

    def __init__(self, leaves: list[Any], structure: BatchTree) -> None:
        self.leaves = leaves
        self.structure = structure
        self.is_plain = False


class CopyJob:
    """A batch that the source or `collate` made, on its way into its memory.

    Attributes:
        leaves: of the batch, NumPy arrays where they go through the staging memory.
        plan: of the batch.
        rows: that it has, padding not counted; None where its leaves have none in common.
        is_plain: whether its leaves are just to be copied.
    """

    __slots__ = ("is_plain", "leaves", "plan", "rows")

    def __init__(self, leaves: list[Any], plan: Plan, rows: int | None, is_plain: bool) -> None:
        self.leaves = leaves
        self.plan = plan
        self.rows = rows
        self.is_plain = is_plain


class WholeBatches:
    """Batches that the source or `collate` made, and what is short among them.

    Args:
        filler: copies them.
        meters: what is measured.
        first_step: of the first batch that comes here.
        batch_size: rows of a batch, where `collate` makes them from examples.
        full_rows: rows of the first batch of the run, where that was handed out before this run went on.

    Thread safety: any worker may call any method.
    """

    def __init__(self, filler: Filler, meters: Meters, *, first_step: int, batch_size: int | None, full_rows: int | None = None) -> None:
        self._filler = filler
        self._flatten = filler.planner.rules.flatten
        self._meters = meters
        self._first_step = first_step
        self._batch_size = batch_size
        self._full_rows = full_rows
        self._first: Plan | None = None
        self._stopped = False
        self._known = Waiters()

    def stop(self) -> None:
        """Let go of those that wait for what will not come: the first batch, or word of whether an item was the last."""
        self._stopped = True
        self._known.wake()

    def tell_last(self, assembly: OpenBatch, is_last: bool) -> None:
        """The source was asked for the item after this one."""
        assembly.is_last = is_last
        self._known.wake()

    def is_last(self, assembly: OpenBatch) -> bool:
        """Whether it is made from the last item of the epoch; waits until the source was asked."""
        self._known.wait(lambda: assembly.is_last is not None or self._stopped)
        return bool(assembly.is_last)

    def _wait_for_first(self, assembly: OpenBatch) -> None:
        """By the first batch of the run it is told what is short; another worker may still be at it."""
        if assembly.position.step != self._first_step and self._full_rows is None:
            self._known.wait(lambda: self._first is not None or self._stopped)

    def parts(self, batch: Any) -> FlatBatch:
        """The batch, taken out of its containers."""
        return FlatBatch(*self._flatten(batch))

    def plain_bytes(self, parts: FlatBatch) -> int | None:
        """What is to be copied of a batch that is just like the first one of the run; None where it may be another."""
        first = self._first
        return first.nbytes if first is not None and self._is_plain(first, parts) else None

    @property
    def has_first(self) -> bool:
        """Whether the first batch of the run was planned."""
        return self._first is not None

    def _is_plain(self, first: Plan, parts: FlatBatch) -> bool:
        if not parts.is_plain:
            parts.is_plain = parts.structure is first.structure and first.is_plain_for(parts.leaves)
        return parts.is_plain

    def missing(self, assembly: OpenBatch, parts: FlatBatch) -> int:
        """How many rows fewer it has than the first batch of the run."""
        self._wait_for_first(assembly)
        first = self._first
        if self._full_rows is None and (first is None or first.rows is None):
            return 0
        if first is not None and self._is_plain(first, parts):
            return 0
        structure = parts.structure
        leaves = self._filler.planner.as_host_leaves(parts.leaves, structure)
        first = self._first_plan(leaves, structure)
        rows = rows_of(first, leaves) if first is not None and structure == first.structure else None
        return 0 if first is None or first.rows is None or rows is None else max(0, first.rows - rows)

    def _first_plan(self, leaves: list[Any], structure: BatchTree) -> Plan | None:
        """The plan of the first batch of the run; where that was handed out before, it is told from any other batch."""
        if self._first is None and self._full_rows is not None:
            self._first = plan_full(self._filler.planner, leaves, structure, self._full_rows)
        return self._first

    def write(self, assembly: OpenBatch, parts: FlatBatch, *, pads: bool, examples: int | None = None) -> None:
        """Write a batch into memory of its own and finish it; see `begin`."""
        began = self._filler.clock()
        work = self.begin(assembly, parts, pads=pads, examples=examples)
        self.copy_share(assembly, work)
        padded = self.end(assembly, work)
        self._meters.add(copy=self._filler.clock() - began, padded=padded)

    def begin(self, assembly: OpenBatch, parts: FlatBatch, *, pads: bool, examples: int | None = None) -> CopyJob:
        """Plan a batch and take its memory; `copy_share` and `end` come next.

        Args:
            assembly: of the batch.
            parts: of a batch that the source or `collate` made.
            pads: a batch with fewer rows than the first is filled up to as many.
            examples: from how many examples it was made; where it has a row for each, it is filled up to the batch size.
        """
        if pads:
            self._wait_for_first(assembly)
        plan = self._first
        leaves = parts.leaves
        if plan is not None and self._is_plain(plan, parts):
            rows, is_plain = plan.rows, True
        else:
            arrays = self._filler.planner.as_host_leaves(leaves, parts.structure)
            plan, rows, is_plain = *self._plan(arrays, parts.structure, pads, examples), False
            kinds = [leaf.kind for leaf in plan.leaves]
            leaves = [leaf if kind is Kind.HOST else array for leaf, array, kind in zip(leaves, arrays, kinds, strict=True)]
        if self._first is None:
            self._first = plan
            self._known.wake()
        if pads or self._batch_size is None:
            assembly.position.batch_rows = self._first.rows
        assembly.open(lambda: plan, self._filler.staging)
        if rows is not None and self._batch_size is None:
            assembly.rows = rows
        return CopyJob(leaves, plan, rows, is_plain)

    def _plan(self, leaves: list[Any], structure: BatchTree, pads: bool, examples: int | None) -> tuple[Plan, int | None]:
        planner = self._filler.planner
        first = self._first_plan(leaves, structure)
        like = first if pads and first is not None and self._is_short(first, leaves, structure) else None
        size = self._batch_size
        if pads and like is None and examples is not None and size is not None and examples < size:
            plan = plan_full(planner, leaves, structure, size, has=examples)
        else:
            plan = planner.for_batch(leaves, structure, like)
        return plan, rows_of(plan, leaves)

    def copy_share(self, assembly: OpenBatch, work: CopyJob, first: int = 0, count: int = 1) -> None:
        """Copy a batch, or the share `first` of `count` of its rows."""
        if work.is_plain and count == 1:  # like the first one: nothing to be found out, nothing to be converted
            assert assembly.memory is not None
            for view, leaf in zip(assembly.memory.views, work.leaves, strict=True):
                np.copyto(view, leaf)
        else:
            self._filler.write_batch(assembly, work.leaves, work.plan, first=first, count=count)

    def end(self, assembly: OpenBatch, work: CopyJob) -> int:
        """Finish a batch all of whose shares are copied. Returns the number of padding rows."""
        return 0 if work.is_plain else self._filler.finish(assembly, work.rows)

    def collate(self, assembly: OpenBatch, hooks: UserFunctions, *, pads: bool, gathered: bool) -> None:
        """Make the batch from the examples that were collected for it, and write it."""
        assert assembly.examples is not None and hooks.collate is not None
        began = self._filler.clock()
        batch = hooks.collated(assembly.examples[0] if gathered else assembly.examples)
        assembly.examples = None
        self._meters.add(transform=self._filler.clock() - began)
        self.write(assembly, self.parts(batch), pads=pads, examples=assembly.rows)

    def refuse_or_drop(self, assembly: OpenBatch, missing: int, remainder: str | Pad) -> None:
        """What becomes of a last batch that is shorter than the first one, and is not padded.

        Raises:
            BatchError: under remainder="error".
        """
        if remainder == "error":
            leaves = in_brackets([leaf.path for leaf in self._first.leaves if leaf.has_rows]) if self._first is not None else ""
            raise BatchError(
                f"the last batch is {missing} rows shorter than the first one{leaves}, and remainder='error'; drop it (remainder='drop') "
                f"or fill it up under a mask (remainder='pad')"
            )
        assert self._first is not None and self._first.rows is not None
        self._meters.add(dropped=self._first.rows - missing)
        assembly.withdraw()

    def _is_short(self, first: Plan, leaves: list[Any], structure: BatchTree) -> bool:
        rows = rows_of(first, leaves) if structure == first.structure else None
        return rows is not None and first.rows is not None and rows < first.rows


def is_shorter(planner: Planner, first: Any, last: Any) -> bool:
    """Whether one batch of the source's own making has fewer rows than another one, which is the first."""
    leaves, structure = planner.rules.flatten(first)
    plan = planner.for_batch(planner.as_host_leaves(leaves, structure), structure)
    leaves, structure = planner.rules.flatten(last)
    rows = rows_of(plan, planner.as_host_leaves(leaves, structure)) if structure == plan.structure else None
    return rows is not None and plan.rows is not None and rows < plan.rows


def rows_of(plan: Plan, leaves: list[Any]) -> int | None:
    """The rows that a batch of the source's own making has."""
    for leaf, value in zip(plan.leaves, leaves, strict=True):
        if leaf.has_rows and (is_jax_array(value) or isinstance(value, np.ndarray)):
            return len(cast("Any", value))
    return None
