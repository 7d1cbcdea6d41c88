"""Makes the plans of a run, each once."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
from jax.sharding import NamedSharding

from prefetchshard.base.config import HOST, Narrow, Pad
from prefetchshard.base.errors import BatchError, LeafTypeError, NarrowingError, PlacementError
from prefetchshard.base.memory import AnyArray
from prefetchshard.leaves.converting import as_array
from prefetchshard.leaves.narrowing import canonical, narrows, pad_value, refuse_narrowing
from prefetchshard.leaves.on_devices import is_jax_array, is_key
from prefetchshard.planning.plan import OBJECT, DType, HostPlan, Kind, Leaf, Plan, Refusal, Shape
from prefetchshard.sharding.batch_tree import BatchTree
from prefetchshard.sharding.meshes import split_count
from prefetchshard.sharding.rules import ShardingRules

REFUSALS = (LeafTypeError, NarrowingError)
MOST_PLANS = 64
"""Shapes that never come back must not pile up."""


class Planner:
    """Makes the plans of one run.

    Args:
        rules: what `sharding=` said.
        rows: global rows of a batch where the library makes the batches; None where the source does.
        pad: the padding policy, or None.
        microbatches: pieces that each batch is cut into, or None.
        narrow: what happens to 64-bit leaves while x64 is off.
        x64: whether 64-bit types are in force.
        on_bytes: told of the bytes that a new plan takes, on the host and on one device (0: not known yet), before it is used.

    Thread safety: any thread may call any method.
    """

    def __init__(
        self,
        rules: ShardingRules,
        *,
        rows: int | None,
        pad: Pad | None,
        microbatches: int | None,
        narrow: Narrow,
        x64: bool,
        on_bytes: Callable[[int, int], object],
    ) -> None:
        self.rules = rules
        self.rows = rows
        self.narrow: Narrow = narrow
        self._pad = pad
        self._microbatches = microbatches
        self._x64 = x64
        self._on_bytes = on_bytes
        self._lock = threading.Lock()  # guards _plans; plans are made one at a time so that workers share them
        self._plans: dict[Any, HostPlan] = {}

    # -- how a batch lies on the host

    def for_examples(self, values: list[Any], tree: BatchTree) -> HostPlan:
        """The plan of batches of examples like this one; `values` are its leaves."""
        assert self.rows is not None
        leaves = [
            self._example_leaf(value, path, host, self.rows)
            for value, path, host in zip(values, tree.paths, self.rules.on_host(tree), strict=True)
        ]
        return _accepted(self._get(tree, leaves, self.rows))

    def _example_leaf(self, value: Any, path: str, host: bool, rows: int) -> Leaf:
        if host:
            return Leaf(path, Kind.HOST, (), OBJECT, OBJECT)
        if is_key(value):
            return Leaf(path, Kind.KEYS, (rows, *value.shape), value.dtype, value.dtype)
        try:
            array = as_array(value, path)
        except REFUSALS as refusal:
            return _refused(path, refusal, (rows, *getattr(value, "shape", ())), value)
        return self._staged(path, (rows, *array.shape), array.dtype)

    def for_arrays(self, arrays: Sequence[AnyArray], tree: BatchTree) -> HostPlan:
        """The plan of batches of rows of these arrays `(length, *example)`."""
        assert self.rows is not None
        leaves: list[Leaf] = []
        for array, path, host in zip(arrays, tree.paths, self.rules.on_host(tree), strict=True):
            shape = (self.rows, *array.shape[1:])
            leaf = Leaf(path, Kind.HOST, shape, array.dtype, array.dtype)
            if not host:
                try:
                    as_array(array[:0], path)
                    leaf = self._staged(path, shape, array.dtype)
                except REFUSALS as refusal:
                    leaf.refusal = refusal
            leaves.append(leaf)
        return _accepted(self._get(tree, leaves, self.rows))

    def for_batch(self, values: list[Any], tree: BatchTree) -> HostPlan:
        """The plan of batches like this one, which the source or `collate` made; `values` are its leaves, from `as_host_leaves`.

        Look at its `refusal`: only where the batch is left out is it no error.
        """
        leaves = [
            self._batch_leaf(value, path, host) for value, path, host in zip(values, tree.paths, self.rules.on_host(tree), strict=True)
        ]
        return self._get(tree, leaves, None)

    def _batch_leaf(self, value: Any, path: str, host: bool) -> Leaf:
        if host:
            return Leaf(path, Kind.HOST, (), OBJECT, OBJECT)
        if is_jax_array(value):
            return Leaf(path, Kind.DEVICE, value.shape, value.dtype, value.dtype)
        try:
            as_array(value, path)
        except REFUSALS as refusal:
            return _refused(path, refusal, getattr(value, "shape", ()), value)
        return self._staged(path, value.shape, value.dtype)

    def as_host_leaves(self, leaves: list[Any], tree: BatchTree) -> list[Any]:
        """The leaves of a batch as NumPy arrays, but for jax.Arrays, what stays on the host, and what no device can hold.

        Of jax.Arrays those are among them whose values are to be checked: JAX would move 64-bit ones in 32 bits, without a word.
        """
        return [
            leaf
            if (type(leaf) is np.ndarray and leaf.dtype.kind in "biuf") or host or (is_jax_array(leaf) and not self._would_narrow(leaf))
            else _try_array(leaf, path)
            for leaf, path, host in zip(leaves, tree.paths, self.rules.on_host(tree), strict=True)
        ]

    def _would_narrow(self, array: Any) -> bool:
        dtype = array.dtype
        if is_key(array) or not array.is_fully_addressable:
            return False
        return narrows(dtype, canonical(dtype, self._x64))

    def _staged(self, path: str, shape: Shape, dtype: DType) -> Leaf:
        target = canonical(dtype, self._x64)
        leaf = Leaf(path, Kind.STAGED, shape, dtype, target)
        if narrows(dtype, target) and self.narrow == "error":
            leaf.refusal = refuse_narrowing(path, dtype, target)
        return leaf

    def _get(self, tree: BatchTree, leaves: list[Leaf], rows: int | None) -> HostPlan:
        """The plan of these leaves; `rows`: of a batch made of examples, whose leaves all have rows."""
        key = (tree, rows, tuple((leaf.kind, leaf.shape, leaf.dtype) for leaf in leaves))
        plan = self._plans.get(key)
        if plan is None:
            with self._lock:
                plan = self._plans.get(key)
                if plan is None:
                    plan = self._make(tree, leaves, rows)
                    self._on_bytes(plan.layout.nbytes, 0)
                    self._plans[key] = plan
                    while len(self._plans) > MOST_PLANS:
                        del self._plans[next(iter(self._plans))]
        return plan

    def _make(self, tree: BatchTree, leaves: list[Leaf], rows: int | None) -> HostPlan:
        found = self.rules.resolved(tree, [leaf.shape for leaf in leaves], [leaf.target for leaf in leaves])
        refusal: Refusal | None = None
        for leaf, sharding in zip(leaves, found, strict=True):
            if sharding is HOST:
                leaf.kind = Kind.HOST
            elif refusal is None:
                refusal = leaf.refusal
        is_made = rows is None
        splits = False
        if is_made:
            rows, splits = _find_rows(leaves, found)
        else:
            for leaf in leaves:
                leaf.has_rows = True
        plan = HostPlan(tree, leaves, rows, is_made=is_made)
        plan.refusal = refusal
        plan.splits_rows = splits
        return plan

    # -- how it is placed

    def placed(self, host: HostPlan, rows: int | None) -> Plan:
        """The plan by which a batch is placed with so many rows, its own or as many as it is padded to.

        Raises:
            PlacementError: a leaf does not fit its sharding.
            BatchError: a leaf cannot hold the padding.
        """
        plan = host.placed.get(rows)
        if plan is None:
            plan = host.placed[rows] = self._place(host, rows)
            self._on_bytes(plan.nbytes, sum(leaf.bytes_per_device for leaf in plan.spec()))
        return plan

    def whole_rows(self, host: HostPlan, rows: int) -> int:
        """So many rows, or as many more as its sharding and its microbatches need."""
        _accepted(host)
        found = self.rules.resolved(host.tree, [leaf.shape for leaf in host.leaves], [leaf.target for leaf in host.leaves])
        pieces = [
            split_count(sharding, len(leaf.shape))
            for leaf, sharding in zip(host.leaves, found, strict=True)
            if leaf.has_rows and isinstance(sharding, NamedSharding)
        ]
        multiple = math.lcm(*pieces) * (self._microbatches or 1)
        return -(-rows // multiple) * multiple

    def _place(self, host: HostPlan, rows: int | None) -> Plan:
        _accepted(host)
        leaves = [leaf.with_rows(rows) for leaf in host.leaves]
        self._check_cut(rows)
        shapes = [self._checked_shape(leaf) for leaf in leaves]
        found = self.rules.shardings(host.tree, shapes, [leaf.target for leaf in leaves])
        for leaf, sharding in zip(leaves, found, strict=True):
            leaf.sharding = sharding
            if leaf.kind is not Kind.HOST and sharding is HOST:
                raise PlacementError(
                    f"leaf {leaf.path or '(the batch itself)'}: the sharding callable gave ps.HOST for shape {leaf.shape}, and a sharding for "
                    f"another number of rows or a whole batch: it must keep a leaf on the host, or not, whatever its rows"
                )
            self._set_padding(leaf, rows)
        return Plan(host, leaves, rows, self._microbatches, self._pad)

    def _set_padding(self, leaf: Leaf, rows: int | None) -> None:
        if self._pad is not None and rows is not None and leaf.has_rows:
            if leaf.kind is Kind.STAGED or (leaf.kind is Kind.DEVICE and _has_numpy_dtype(leaf)):
                leaf.padding = pad_value(leaf.path, self._pad.value, leaf.target)

    def _checked_shape(self, leaf: Leaf) -> Shape:
        """The shape by which the sharding is checked: of one microbatch."""
        if not leaf.has_rows or not leaf.shape:
            return leaf.shape
        return (leaf.shape[0] // (self._microbatches or 1), *leaf.shape[1:])

    def _check_cut(self, rows: int | None) -> None:
        k = self._microbatches
        if k is None:
            return
        if rows is None:
            raise PlacementError(f"microbatches={k}: the leaves of the batch have no rows in common to be cut")
        if rows % k:
            raise PlacementError(f"microbatches={k}: {rows} rows cannot be cut into {k} equal pieces; use a multiple of {k} rows")


def _accepted(plan: HostPlan) -> HostPlan:
    if plan.refusal is not None:
        raise plan.refusal
    return plan


def _find_rows(leaves: list[Leaf], shardings: Sequence[Any]) -> tuple[int | None, bool]:
    """Without batch_size the rows are axis 0 of the leaves that are split along it, else the size that all leaves share.

    Returns the rows, None where the leaves have none in common, and whether a sharding tells them.
    """
    placed = [(leaf, sharding) for leaf, sharding in zip(leaves, shardings, strict=True) if sharding is not HOST and leaf.shape]
    split = [leaf for leaf, sharding in placed if splits_rows(sharding, len(leaf.shape))]
    with_rows = split or [leaf for leaf, _ in placed]
    sizes = {leaf.path: leaf.shape[0] for leaf in with_rows}
    if len(set(sizes.values())) > 1:
        if split:
            raise BatchError(f"the leaves that are split along axis 0 differ in rows: {sizes}")
        return None, False
    for leaf in with_rows:
        leaf.has_rows = True
    return next(iter(sizes.values()), None), bool(split)


def splits_rows(sharding: Any, ndim: int) -> bool:
    """Whether a sharding speaks of axis 0: also over a mesh axis of one device, so that one device and eight read alike."""
    if sharding is HOST:
        return False
    if isinstance(sharding, NamedSharding):
        return len(sharding.spec) > 0 and sharding.spec[0] is not None
    try:
        return split_count(sharding, ndim) > 1
    except ValueError:  # it does not go with so many axes, which placing says
        return False


def _has_numpy_dtype(leaf: Leaf) -> bool:
    """Whether it is made of numbers; PRNG keys have a dtype of JAX's own."""
    dtype: Any = leaf.target
    return isinstance(dtype, np.dtype)


def _refused(path: str, refusal: Refusal, shape: Shape, value: Any) -> Leaf:
    """A leaf that no device can hold; a callable rule may still keep it on the host."""
    found: Any = getattr(value, "dtype", None)
    if not isinstance(cast("Any", shape), tuple):
        shape = ()  # an object with a `shape` of its own, such as a mesh
    dtype: DType = cast("DType", found) if isinstance(found, np.dtype) else OBJECT
    leaf = Leaf(path, Kind.HOST, shape, dtype, dtype)
    leaf.refusal = refusal
    return leaf


def _try_array(leaf: Any, path: str) -> Any:
    try:
        return as_array(leaf, path)
    except REFUSALS:
        return leaf  # the plan refuses it, unless its rule keeps it on the host
