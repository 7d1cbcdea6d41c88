"""Writes examples, rows of arrays and whole batches into the memory of their batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from prefetchshard.base.config import Narrow
from prefetchshard.base.errors import BatchError, NarrowingError
from prefetchshard.base.memory import AnyArray
from prefetchshard.leaves.converting import NUMPY_SCALARS, as_array, check_example, check_key
from prefetchshard.leaves.narrowing import store
from prefetchshard.leaves.on_host import stack_on_host
from prefetchshard.planning.array_copies import own
from prefetchshard.planning.plan import HostPlan, Kind, Leaf
from prefetchshard.planning.planner import Planner
from prefetchshard.reading.open_batch import OpenBatch
from prefetchshard.sharding.batch_tree import BatchTree
from prefetchshard.sources.arrays import Rows, gather
from prefetchshard.staging.layout import Staging
from prefetchshard.streaming.copies import Copies

LEAST_SHARED_BYTES = 1 << 20
"""A smaller leaf of a batch that is copied in shares goes with the first of them."""


class Writer:
    """Writes into the memory of batches.

    Args:
        planner: makes the plans.
        staging: the ring.
        keep: makes what stays on the host safe from what the source does next; None where nothing need be.
        copies: copies into the memory of batches.

    Thread safety: any thread may call any method; `copy_share` writes the rows of its share alone.
    """

    def __init__(self, planner: Planner, staging: Staging, keep: Callable[[Any], Any] | None, copies: Copies) -> None:
        self.planner = planner
        self.staging = staging
        self.copies = copies
        self.keep = keep or _as_it_is
        self.keep_array = own if keep is not None else _as_it_is
        self.flatten = planner.rules.flatten
        self._narrow: Narrow = planner.narrow
        self._recent: HostPlan | None = None  # of the last whole batch; most are like the one before

    def examples(self, batch: OpenBatch, start: int, count: int) -> ExampleWriter:
        """Write up to `count` examples as rows `start`, `start + 1`, ... of the batch."""
        return ExampleWriter(self, batch, start, count)

    # -- rows of arrays

    def write_rows(self, batch: OpenBatch, start: int, stop: int, arrays: Sequence[AnyArray], rows: Rows) -> None:
        """Gather rows of the arrays as rows `start` to `stop` of the batch."""
        plan = batch.plan
        assert plan is not None
        memory, narrow, copies = batch.host.memory, self._narrow, self.copies
        staged = 0
        for j, leaf in enumerate(plan.leaves):
            if leaf.kind is Kind.HOST:
                batch.host.passed[j][start:stop] = arrays[j][rows]
                continue
            assert memory is not None
            view = memory.views[staged]
            some = view if stop - start == len(view) else view[start:stop]
            gather(arrays[j], rows, some, path=leaf.path, policy=narrow, first_row=start, copies=copies)
            staged += 1

    # -- batches that the source or `collate` made

    @property
    def has_plan(self) -> bool:
        """Whether a whole batch was planned before."""
        return self._recent is not None

    def plain_bytes(self, leaves: list[Any], tree: BatchTree) -> float:
        """Bytes of a batch like the one before that only has to be copied; infinite for any other."""
        plan = self._recent
        return plan.layout.nbytes if plan is not None and tree is plan.tree and plan.is_plain_for(leaves) else math.inf

    def write_whole(self, batch: OpenBatch, leaves: list[Any], tree: BatchTree) -> None:
        """Plan a batch that the source or `collate` made, and copy it."""
        self.copy_share(batch, self.open_whole(batch, leaves, tree))

    def open_whole(self, batch: OpenBatch, leaves: list[Any], tree: BatchTree) -> list[Any]:
        """Plan a batch that the source or `collate` made, and take its memory. Returns what `copy_share` copies."""
        plan = self._recent
        if plan is None or tree is not plan.tree or not plan.is_plain_for(leaves):
            arrays = self.planner.as_host_leaves(leaves, tree)
            plan = self._recent = self.planner.for_batch(arrays, tree)
            kinds = [leaf.kind for leaf in plan.leaves]
            leaves = [leaf if kind is Kind.HOST else array for leaf, array, kind in zip(leaves, arrays, kinds, strict=True)]
        batch.plan = plan  # one thread opens it
        if plan.refusal is not None:
            self._recent = None
            if not batch.may_be_left_out:
                raise plan.refusal
            batch.host.fault = plan.refusal
            return leaves
        batch.host.memory = self.staging.lease(plan.layout) if plan.staged else None
        return leaves

    def copy_share(self, batch: OpenBatch, leaves: list[Any], first: int = 0, count: int = 1) -> None:
        """Copy a batch, or the share `first` of `count` of its rows.

        Raises:
            NarrowingError: a value does not survive the conversion to 32 bits.
        """
        plan = batch.plan
        assert plan is not None
        if batch.host.fault is not None:
            return
        if count == 1 and plan.is_plain and batch.host.memory is not None:  # most batches: nothing of it can fail
            copy = self.copies.copy if plan.layout.count_by_size else np.copyto  # which is a call less, a leaf
            for view, value in zip(batch.host.memory.views, leaves, strict=True):
                copy(view, value)
            return
        try:
            self._copy_share(batch, plan, leaves, first, count)
        except NarrowingError as error:
            if not batch.may_be_left_out:
                raise
            batch.host.fault = error

    def _copy_share(self, batch: OpenBatch, plan: HostPlan, leaves: list[Any], first: int, count: int) -> None:
        views = iter(batch.host.memory.views if batch.host.memory is not None else ())
        for leaf, value in zip(plan.leaves, leaves, strict=True):
            if leaf.kind is Kind.STAGED:
                self._copy_leaf(next(views), value, leaf, first, count)
        if first == 0 and len(plan.staged) < len(leaves):
            for j, leaf in enumerate(plan.leaves):
                if leaf.kind is not Kind.STAGED:
                    batch.host.passed[j] = (self.keep_array if leaf.kind is Kind.DEVICE else self.keep)(leaves[j])

    def _copy_leaf(self, view: AnyArray, value: AnyArray, leaf: Leaf, first: int, count: int) -> None:
        row = 0 if leaf.has_rows else None
        if count > 1 and leaf.has_rows and value.nbytes >= LEAST_SHARED_BYTES:
            row, stop = len(value) * first // count, len(value) * (first + 1) // count
            view, value = view[row:stop], value[row:stop]
        elif first:
            return
        store(view, value, path=leaf.path, policy=self._narrow, row=row, copies=self.copies)

    # -- the end of a batch

    def finish_examples(self, batch: OpenBatch, *, pads: bool) -> None:
        """Put the leaves that stay on the host together, of a batch of examples all of which are written."""
        plan, count = batch.plan, batch.host.examples
        assert plan is not None and count is not None
        for j, value in batch.host.passed.items():
            leaf = plan.leaves[j]
            if leaf.kind is Kind.KEYS:
                batch.host.passed[j] = value[:count]
            elif type(value) is list:
                batch.host.passed[j] = stack_on_host(cast("list[Any]", value)[:count], leaf.path, plan.rows if pads else None)
            elif not pads and count < len(value):  # rows of arrays, in memory for a full batch
                batch.host.passed[j] = value[:count]


class ExampleWriter:
    """Writes a run of examples into the memory of their batch, each before the next one is asked for.

    Thread safety: one thread at a time; several writers may write to one batch.
    """

    __slots__ = ("_batch", "_count", "_row", "_staged", "_start", "_take_apart", "_wide", "_writer")

    def __init__(self, writer: Writer, batch: OpenBatch, start: int, count: int) -> None:
        self._writer = writer
        self._batch = batch
        self._start = start
        self._count = count
        self._row = start
        self._wide: dict[int, AnyArray] = {}  # leaves that are narrowed, all rows at once, at the end
        self._take_apart: Callable[[Any], list[Any]] | None = None
        self._staged: list[tuple[AnyArray, np.dtype[Any], tuple[int, ...]]] = []

    def write(self, example: Any) -> None:
        """Write the next one.

        Raises:
            BatchError: it does not stack with the others; names leaf and row.
        """
        if self._take_apart is None or not self._write_plain(example, self._take_apart):
            self._write(example)
        self._row += 1

    def _write_plain(self, example: Any, take_apart: Callable[[Any], list[Any]]) -> bool:
        """Write an example of arrays and NumPy's scalars that only have to be copied. False: it is another one."""
        row = self._row
        try:
            leaves = take_apart(example)
        except (ValueError, TypeError):
            return False
        for value, (view, dtype, shape) in zip(leaves, self._staged, strict=True):
            kind: Any = type(value)  # pyright: ignore[reportUnknownVariableType]
            if (kind is not np.ndarray and kind not in NUMPY_SCALARS) or value.dtype != dtype or value.shape != shape:
                return False
            view[row] = value
        return True

    def _expect_plain(self, plan: HostPlan, views: Sequence[AnyArray]) -> None:
        """Where no leaf needs more than a copy, take the next examples apart in the shortest way."""
        if len(views) == len(plan.leaves) and not any(leaf.is_narrowed for leaf in plan.leaves):
            self._staged = [(view, leaf.dtype, leaf.example) for view, leaf in zip(views, plan.leaves, strict=True)]
            self._take_apart = plan.tree.tree.flatten_up_to

    def _write(self, example: Any) -> None:
        writer, batch = self._writer, self._batch
        leaves, tree = writer.flatten(example)
        plan = batch.plan
        if plan is None:
            plan = batch.open(lambda: writer.planner.for_examples(leaves, tree), writer.staging)
        if tree is not plan.tree and tree != plan.tree:
            raise _other_tree(plan.tree, tree, batch.first_row + self._row)
        row, view = self._row, 0
        views = batch.host.memory.views if batch.host.memory is not None else ()
        for j, leaf in enumerate(plan.leaves):
            value = leaves[j]
            if leaf.kind is not Kind.STAGED:
                self._pass(j, leaf, value)
                continue
            kind: Any = type(value)  # pyright: ignore[reportUnknownVariableType]
            array = value if kind is np.ndarray or kind in NUMPY_SCALARS else as_array(value, leaf.path)
            if array.dtype != leaf.dtype or array.shape != leaf.example:
                check_example(leaf.path, batch.first_row + row, array, leaf.example, leaf.dtype)
            if leaf.is_narrowed:
                self._wide_rows(j, leaf.shape, leaf.dtype)[row - self._start] = array
            else:
                views[view][row] = array
            view += 1
        if row == self._start:
            self._expect_plain(plan, views)

    def _pass(self, index: int, leaf: Leaf, value: Any) -> None:
        """A leaf that does not go through the staging memory."""
        if leaf.kind is Kind.KEYS:
            check_key(leaf.path, self._batch.first_row + self._row, value, leaf.example, leaf.dtype)
            value = self._writer.keep_array(value)
        else:
            value = self._writer.keep(value)
        self._batch.host.passed[index][self._row] = value

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
        batch, written = self._batch, self._row - self._start
        if not self._wide or not written:
            return
        assert batch.plan is not None and batch.host.memory is not None
        for j, rows in self._wide.items():
            view = batch.host.memory.views[batch.plan.staged.index(j)][self._start : self._row]
            store(view, rows[:written], path=batch.plan.leaves[j].path, policy=self._writer.planner.narrow, row=self._start)


def _as_it_is(value: Any) -> Any:
    return value


def _other_tree(want: BatchTree, got: BatchTree, row: int) -> BatchError:
    ours, theirs = ([path or "(the example itself)" for path in tree.paths] for tree in (got, want))
    lacks = [path for path in theirs if path not in ours]
    more = [path for path in ours if path not in theirs]
    parts = [f"lacks {lacks}" if lacks else "", f"has {more} beside" if more else ""]
    what = " and ".join(part for part in parts if part) or "is put together from other containers"
    return BatchError(f"the example at row {row} {what}; others of its batch have {theirs}: every example needs the same structure")
