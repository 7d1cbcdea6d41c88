"""What one writes without a loader: a loop that reads a source, and a thread with a queue that puts what it reads on the devices.

It is plain on purpose. `transform` and `collate` are called as a loader calls them, but `microbatches`, `device_transform` and the filling up
of a last batch are left out, and a last batch of examples that is not full is dropped.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Generator, Iterator
from typing import Any, NamedTuple, cast

import numpy as np
from jax import Array

from prefetchshard.base.config import HOST
from prefetchshard.base.errors import BatchError, LeafTypeError
from prefetchshard.base.jax_context import x64_enabled
from prefetchshard.base.jax_types import device_put
from prefetchshard.base.memory import AnyArray
from prefetchshard.building.run_factory import Parts
from prefetchshard.leaves.converting import as_array, is_numeric
from prefetchshard.leaves.narrowing import canonical
from prefetchshard.leaves.on_host import stack_on_host
from prefetchshard.reading.user_functions import UserFunctions
from prefetchshard.sharding.batch_tree import BatchTree
from prefetchshard.sources.arrays import Arrays
from prefetchshard.sources.dataset import Dataset
from prefetchshard.sources.iterables import END, OpenSource
from prefetchshard.sources.loops import Loops


class ReadBatch(NamedTuple):
    """A batch in host memory.

    Attributes:
        leaves: in the order of the tree: NumPy arrays, jax.Arrays, and anything that stays on the host.
        tree: its containers.
        rows: that the leaves have in common; 0 where they have none.
        nbytes: of the leaves that go to devices.
        is_ours: nobody overwrites its memory.
        begins_epoch: it is the first one of its epoch.
    """

    leaves: list[Any]
    tree: BatchTree
    rows: int
    nbytes: int
    is_ours: bool
    begins_epoch: bool = False


def read_batches(parts: Parts) -> Generator[ReadBatch]:
    """The batches of a source, one epoch after the other, made in the thread that asks; a source that can be read once ends.

    Raises:
        BatchError: an epoch has no batch.
    """
    loops = parts.new_loops()
    functions = UserFunctions(
        parts.settings.transform, parts.settings.collate, parts.settings.seed, makes_examples=parts.batch_size is not None
    )
    try:
        for epoch in itertools.count():
            is_empty = True
            for batch in _epoch(parts, functions, loops, epoch):
                yield batch._replace(begins_epoch=True) if is_empty else batch
                is_empty = False
            if is_empty:
                raise BatchError(_empty(parts))
            if parts.source.one_shot:
                return
    finally:
        loops.close()
        if isinstance(parts.source, Dataset):
            parts.source.leave()


def _empty(parts: Parts) -> str:
    full = "" if parts.batch_size is None else f" of {parts.batch_size} rows"
    return f"the source gives no batch{full}: it is empty{' or too short' if full else ''}"


def _epoch(parts: Parts, functions: UserFunctions, loops: Loops, epoch: int) -> Iterator[ReadBatch]:
    source = parts.source
    if isinstance(source, Arrays) and functions.transform is None:
        yield from _gathered(parts, source, functions, epoch)
    elif isinstance(source, (Arrays, Dataset)):
        rows = _order(parts, source.length, epoch).tolist()
        yield from _made(parts, functions, ((row, source.read(row)) for row in rows), epoch)
    else:
        items = source.open(epoch, loops)
        try:
            yield from _made(parts, functions, enumerate(_pulled(items)), epoch)
        finally:
            items.close()


def _order(parts: Parts, length: int, epoch: int) -> np.ndarray[Any, Any]:
    rows = np.arange(length)
    return np.random.default_rng((parts.settings.seed, epoch)).permutation(rows) if parts.settings.shuffle else rows


def _gathered(parts: Parts, source: Arrays, functions: UserFunctions, epoch: int) -> Iterator[ReadBatch]:
    size = parts.batch_size
    assert size is not None  # arrays have no batches of their own
    rows = _order(parts, source.length, epoch)
    for start in range(0, source.length - size + 1, size):
        chosen = rows[start : start + size] if parts.settings.shuffle else slice(start, start + size)
        batch = source.gathered(chosen)
        yield _taken_apart(parts, batch if functions.collate is None else functions.collated(batch), is_ours=True)


def _pulled(items: OpenSource) -> Iterator[Any]:
    while (item := items.pull()) is not END:
        yield item


def _made(parts: Parts, functions: UserFunctions, items: Iterator[tuple[int, Any]], epoch: int) -> Iterator[ReadBatch]:
    examples: list[Any] = []
    for row, item in items:
        made = item if functions.transform is None else functions.transformed(item, epoch, row)
        if parts.batch_size is None:
            yield _taken_apart(parts, made, is_ours=parts.source.shares_items and functions.transform is None)
            continue
        examples.append(made)
        if len(examples) == parts.batch_size:
            batch = _stacked(parts, examples) if functions.collate is None else None
            yield batch or _taken_apart(parts, functions.collated(examples), is_ours=True)
            examples = []


def _stacked(parts: Parts, examples: list[Any]) -> ReadBatch:
    first, tree = parts.rules.flatten(examples[0])
    columns = [first, *(parts.rules.flatten(example)[0] for example in examples[1:])]
    each = zip(zip(*columns, strict=True), parts.rules.on_host(tree), tree.paths, strict=True)
    leaves = [stack_on_host(list(values), path) if on_host else _stack(values, path) for values, on_host, path in each]
    return _counted(parts, leaves, tree, is_ours=True)


def _stack(values: tuple[Any, ...], path: str) -> Any:
    try:
        return np.stack([as_array(value, path) for value in values])
    except LeafTypeError:
        return stack_on_host(list(values), path)


def _taken_apart(parts: Parts, batch: Any, *, is_ours: bool) -> ReadBatch:
    found, tree = parts.rules.flatten(batch)
    each = zip(found, parts.rules.on_host(tree), tree.paths, strict=True)
    leaves = [leaf if on_host or isinstance(leaf, Array) else _array(leaf, path) for leaf, on_host, path in each]
    return _counted(parts, leaves, tree, is_ours=is_ours)


def _array(leaf: Any, path: str) -> Any:
    try:
        return as_array(leaf, path)
    except LeafTypeError:  # a callable rule may say that it stays on the host
        return leaf


def _counted(parts: Parts, leaves: list[Any], tree: BatchTree, *, is_ours: bool) -> ReadBatch:
    each = zip(leaves, parts.rules.on_host(tree), strict=True)
    placed: list[Any] = [leaf for leaf, on_host in each if not on_host and _may_be_placed(leaf)]
    lengths = {leaf.shape[0] for leaf in placed if leaf.ndim}
    rows = parts.batch_size or (lengths.pop() if len(lengths) == 1 else 0)
    x64 = x64_enabled()
    nbytes = sum(leaf.size * canonical(leaf.dtype, x64).itemsize for leaf in placed)
    return ReadBatch(leaves, tree, rows, nbytes, is_ours)


def _may_be_placed(leaf: Any) -> bool:
    return isinstance(leaf, Array) or (isinstance(leaf, np.ndarray) and is_numeric(cast("AnyArray", leaf).dtype))


class Placing:
    """Puts batches on the devices with the shardings of a loader, in one call of `jax.device_put` for each batch.

    A batch whose memory the source may use again is copied before that: transfers go on after the call has returned, and the CPU backend
    uses the memory itself.
    """

    def __init__(self, parts: Parts) -> None:
        self._rules = parts.rules
        self._reuses_buffers = parts.settings.reuses_buffers
        self._known: dict[Any, list[Any]] = {}

    def __call__(self, batch: ReadBatch) -> Any:
        """The batch on the devices; its transfer may still be on its way."""
        leaves, shardings = list(batch.leaves), self._shardings(batch)
        placed = [i for i, sharding in enumerate(shardings) if sharding is not HOST]
        must_copy = self._reuses_buffers and not batch.is_ours
        sent = [np.array(leaves[i]) if must_copy and not isinstance(leaves[i], Array) else leaves[i] for i in placed]
        for i, leaf in zip(placed, device_put(sent, [shardings[i] for i in placed]), strict=True):
            leaves[i] = leaf
        return batch.tree.unflatten(leaves)

    def _shardings(self, batch: ReadBatch) -> list[Any]:
        shapes = [getattr(leaf, "shape", ()) for leaf in batch.leaves]
        key = (batch.tree.tree, *shapes)
        with contextlib.suppress(KeyError):
            return self._known[key]
        dtypes = [getattr(leaf, "dtype", None) for leaf in batch.leaves]
        self._known[key] = self._rules.shardings(batch.tree, shapes, dtypes)
        return self._known[key]
