"""From the first look at a batch: how it lies in the staging memory, how it is placed, and how it is put together again.

A plan is made once for each signature (structure, shapes, dtypes) and holds everything that the path of a batch would otherwise have
to find out again.
"""

from __future__ import annotations

import enum
import math
import threading
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, Protocol, cast

import numpy as np
from jax.sharding import NamedSharding

from prefetchshard.base.agreement import Agreement
from prefetchshard.base.batches import AnyArray, LeafSpec
from prefetchshard.base.config import HOST, Narrow, Pad
from prefetchshard.base.errors import BatchError, ConfigError, LeafTypeError, NarrowingError, PlacementError
from prefetchshard.leaves.converting import as_array
from prefetchshard.leaves.narrowing import canonical, narrows, pad_value, refuse_narrowing
from prefetchshard.leaves.on_devices import is_jax_array, is_key
from prefetchshard.planning.packing import find_packing
from prefetchshard.sharding.batch_tree import BatchTree
from prefetchshard.sharding.leaf_sharding import with_leading_axis
from prefetchshard.sharding.meshes import split_count
from prefetchshard.sharding.rules import ShardingRules
from prefetchshard.staging.aliased import Layout

Shape = tuple[int, ...]
DType = np.dtype[Any]
Refusal = LeafTypeError | NarrowingError
REFUSALS = (LeafTypeError, NarrowingError)
MASK = -1
"""In place of a leaf's index: the row mask."""


class Kind(enum.Enum):
    """How a leaf travels."""

    STAGED = "through the staging memory"
    DEVICE = "a jax.Array: from device to device"
    KEYS = "PRNG keys of examples: stacked before the transfer"
    HOST = "stays on the host"


class Leaf:
    """What is known of one leaf of the batches of a plan.

    Attributes:
        path: its place in the batch.
        kind: how it travels.
        shape: of the whole leaf on the host, `(rows, *example)` where it has rows; `()` for leaves that stay on the host.
        dtype: in the source.
        target: on the devices.
        has_rows: whether axis 0 is the rows of the batch.
        sharding: where it goes, or HOST.
        padding: what fills its padding rows; None without padding.
        refusal: why no device can hold it; raised unless its rule keeps it on the host.
        example: the shape of one example, where the batch is made of examples.
        is_narrowed: whether values could be lost on the way to the devices.
    """

    __slots__ = ("dtype", "example", "has_rows", "is_narrowed", "kind", "padding", "path", "refusal", "shape", "sharding", "target")

    def __init__(self, path: str, kind: Kind, shape: Shape, dtype: DType, target: DType) -> None:
        self.path = path
        self.kind = kind
        self.shape = shape
        self.dtype = dtype
        self.target = target
        self.has_rows = False
        self.sharding: Any = HOST
        self.padding: AnyArray | None = None
        self.refusal: Refusal | None = None
        self.example: Shape = shape[1:]
        self.is_narrowed = kind is Kind.STAGED and narrows(dtype, target)


_OBJECT = np.dtype(object)


class Plan:
    """How batches of one signature are staged, placed and put together.

    Attributes:
        structure: of the batch, without the mask.
        leaves: in the order of the structure.
        rows: global rows of a full batch; None where the leaves have no rows in common.
        staged: indices of the leaves in staging memory, in the order of the memory's views; the mask comes after them.
        layout: of the staging memory, the mask last.
        pad: the padding policy, or None.
        put_order: the leaf index of each array that is put, MASK for the mask.
        put_shapes: the shape in which it is put.
        put_shardings: where it goes.
        put_paths: its path, for errors.
        masks_on_host: the row mask stays on the host, as all leaves do.
        packing: of the small leaves into one buffer, where that is the better way; None where each is put by itself.
        nbytes: of one batch, over all devices once.
        spans_devices: whether an array of it lies on several.
    """

    def __init__(
        self, structure: BatchTree, leaves: list[Leaf], rows: int | None, microbatches: int | None, pad: Pad | None, rules: ShardingRules
    ) -> None:
        self.structure = structure
        self.leaves = leaves
        self.rows = rows
        self.microbatches = microbatches
        self.pad = pad if rows is not None else None
        self.staged = [i for i, leaf in enumerate(leaves) if leaf.kind is Kind.STAGED]
        in_memory: list[tuple[Shape, DType]] = [(leaves[i].shape, leaves[i].target) for i in self.staged]
        put = [*self.staged, *(i for i, leaf in enumerate(leaves) if leaf.kind in (Kind.DEVICE, Kind.KEYS))]
        self.put_order = list(put)
        self.put_shapes = [self._cut(leaves[i].shape, leaves[i].has_rows) for i in put]
        self.put_shardings = [self._cut_sharding(leaves[i].sharding, leaves[i].has_rows) for i in put]
        self.put_paths = [leaves[i].path for i in put]
        self.mask_index: int | None = None
        self.masks_on_host = False
        if self.pad is not None and rows is not None:
            self._add_mask(rows, rules)
        if self.mask_index is not None and rows is not None:
            in_memory.append(((rows,), np.dtype(bool)))
        self.layout = Layout(in_memory)
        self.packing = find_packing(self.layout, self.put_shapes, self.put_shardings)
        self.nbytes = self.layout.nbytes
        self.spans_devices = any(len(sharding.device_set) > 1 for sharding in self.put_shardings)
        plain = self.mask_index is None and len(self.staged) == len(leaves) > 0 and all(leaf.dtype == leaf.target for leaf in leaves)
        self._plain = [(leaf.shape, leaf.dtype) for leaf in leaves] if plain else None

    def is_plain_for(self, leaves: Sequence[Any]) -> bool:
        """Whether these leaves of a batch of this structure are just to be copied: NumPy arrays of the plan's shapes and dtypes."""
        if self._plain is None:
            return False
        for leaf, (shape, dtype) in zip(leaves, self._plain, strict=True):
            if type(leaf) is not np.ndarray or leaf.shape != shape or leaf.dtype != dtype:
                return False
        return True

    def _cut(self, shape: Shape, has_rows: bool) -> Shape:
        """The shape with the microbatch axis in front."""
        if self.microbatches is None or not has_rows:
            return shape
        return (self.microbatches, shape[0] // self.microbatches, *shape[1:])

    def _cut_sharding(self, sharding: Any, has_rows: bool) -> Any:
        return with_leading_axis(sharding) if self.microbatches is not None and has_rows else sharding

    def _add_mask(self, rows: int, rules: ShardingRules) -> None:
        placed = [leaf for leaf in self.leaves if leaf.sharding is not HOST]
        where = rules.mask_sharding([leaf.sharding for leaf in placed], [leaf.shape for leaf in placed])
        if where is HOST:
            self.masks_on_host = True
            return
        at = len(self.staged)
        self.mask_index = at
        self.put_order.insert(at, MASK)
        self.put_shapes.insert(at, self._cut((rows,), True))
        self.put_shardings.insert(at, self._cut_sharding(where, True))
        self.put_paths.insert(at, self.pad.mask_key if self.pad else "")

    def cut_on_host(self, passed: dict[int, Any]) -> None:
        """Cut the leaves that stayed on the host into the microbatches of the others, where they have a row for each."""
        for index, value in passed.items():
            if isinstance(value, np.ndarray) and (index == MASK or self.leaves[index].has_rows):
                array = cast("AnyArray", value)
                passed[index] = array.reshape(self._cut(array.shape, True))

    def assemble(self, placed: Sequence[Any], passed: dict[int, Any]) -> Any:
        """The batch as the consumer gets it, from the arrays in put order and the leaves that stayed on the host."""
        leaves: list[Any] = [None] * len(self.leaves)
        mask = None
        for index, array in zip(self.put_order, placed, strict=True):
            if index == MASK:
                mask = array
            else:
                leaves[index] = array
        for index, value in passed.items():
            if index == MASK:
                mask = value
            else:
                leaves[index] = value
        batch = self.structure.unflatten(leaves)
        return batch if self.pad is None else _with_mask(batch, mask, self.pad)

    def spec(self) -> tuple[LeafSpec, ...]:
        """What a batch looks like on the devices."""
        specs: list[LeafSpec] = []
        for index, shape, sharding, path in zip(self.put_order, self.put_shapes, self.put_shardings, self.put_paths, strict=True):
            dtype = np.dtype(bool) if index == MASK else self.leaves[index].target
            specs.append(leaf_spec(path, shape, dtype, sharding))
        on_host = [(leaf, self._cut(leaf.shape, leaf.has_rows and bool(leaf.shape))) for leaf in self.leaves if leaf.kind is Kind.HOST]
        specs += [LeafSpec(leaf.path, shape, leaf.dtype, HOST, 0) for leaf, shape in on_host]
        if self.masks_on_host and self.pad is not None and self.rows is not None:
            specs.append(LeafSpec(self.pad.mask_key, self._cut((self.rows,), True), np.dtype(bool), HOST, 0))
        return tuple(specs)


def leaf_spec(path: str, shape: Shape, dtype: Any, sharding: Any) -> LeafSpec:
    """The spec of an array under a sharding."""
    return LeafSpec(path, shape, dtype, sharding, math.prod(sharding.shard_shape(shape)) * dtype.itemsize)


class _LeafHasRows(Protocol):
    has_rows: bool


class HasRows(Protocol):
    """What is known of full batches: a plan of them, or as much of it as tells which leaves have rows."""

    @property
    def structure(self) -> BatchTree: ...
    @property
    def rows(self) -> int | None: ...
    @property
    def leaves(self) -> Sequence[_LeafHasRows]: ...


class Planner:
    """Makes the plans of one run.

    Args:
        rules: what `sharding=` said.
        rows: global rows of a batch where the library makes the batches; None where the source does.
        pad: the padding policy, or None.
        microbatches: pieces that each batch is cut into, or None.
        narrow: what happens to 64-bit leaves while x64 is off.
        x64: whether 64-bit types are in force.
        agreement: among processes.
        on_plan: told of each new plan, before it is used.
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
        agreement: Agreement,
        on_plan: Callable[[Plan], object],
    ) -> None:
        self.rules = rules
        self.rows = rows
        self.narrow: Narrow = narrow
        self._pad = pad
        self._microbatches = microbatches
        self._x64 = x64
        self._agreement = agreement
        self._on_plan = on_plan
        self._lock = threading.Lock()  # guards _plans; plans are made one at a time so that workers share them
        self._plans: dict[Any, Plan] = {}

    # -- batches that the library makes from examples

    def for_examples(self, values: list[Any], structure: BatchTree) -> Plan:
        """The plan of batches of examples like this one; `values` are its leaves."""
        assert self.rows is not None
        on_host = self.rules.on_host(structure)
        leaves = [
            self._example_leaf(value, path, host, self.rows) for value, path, host in zip(values, structure.paths, on_host, strict=True)
        ]
        return self._get(structure, leaves, self.rows, examples=True)

    def _example_leaf(self, value: Any, path: str, host: bool, rows: int) -> Leaf:
        if host:
            return Leaf(path, Kind.HOST, (), _OBJECT, _OBJECT)
        if is_key(value):
            return Leaf(path, Kind.KEYS, (rows, *value.shape), value.dtype, value.dtype)
        try:
            array = as_array(value, path)
        except REFUSALS as refusal:
            return _refused(path, refusal, (rows, *getattr(value, "shape", ())), value)
        return self._staged(path, (rows, *array.shape), array.dtype)

    def for_arrays(self, arrays: Sequence[AnyArray], structure: BatchTree) -> Plan:
        """The plan of batches of rows of these arrays `(length, *example)`."""
        assert self.rows is not None
        leaves: list[Leaf] = []
        for array, path, host in zip(arrays, structure.paths, self.rules.on_host(structure), strict=True):
            shape = (self.rows, *array.shape[1:])
            leaf = Leaf(path, Kind.HOST, shape, array.dtype, array.dtype)
            if not host:
                try:
                    as_array(array[:0], path)
                    leaf = self._staged(path, shape, array.dtype)
                except REFUSALS as refusal:
                    leaf.refusal = refusal
            leaves.append(leaf)
        return self._get(structure, leaves, self.rows, examples=True)

    # -- batches that the source or `collate` made

    def for_batch(self, values: list[Any], structure: BatchTree, like: HasRows | None = None, rows: int | None = None) -> Plan:
        """The plan of batches like this one.

        Args:
            values: its leaves, from `as_host_leaves`.
            structure: its structure.
            like: the plan of a batch with as many rows as this one is to be padded to.
            rows: as many rows as it is to be padded to, where `like` has fewer itself.
        """
        if like is not None and structure != like.structure:
            like = None
        if like is not None and rows is None:
            rows = like.rows
        leaves: list[Leaf] = []
        for i, (value, path, host) in enumerate(zip(values, structure.paths, self.rules.on_host(structure), strict=True)):
            if host:
                leaves.append(Leaf(path, Kind.HOST, (), _OBJECT, _OBJECT))
                continue
            refusal = None if is_jax_array(value) else _refusal(value, path)
            if refusal is not None:
                leaves.append(_refused(path, refusal, getattr(value, "shape", ()), value))
                continue
            shape: Shape = value.shape
            if like is not None and like.leaves[i].has_rows and rows is not None:
                shape = (rows, *shape[1:])
            if is_jax_array(value):
                leaves.append(Leaf(path, Kind.DEVICE, shape, value.dtype, value.dtype))
            else:
                leaves.append(self._staged(path, shape, value.dtype))
        return self._get(structure, leaves, rows, examples=False)

    def as_host_leaves(self, leaves: list[Any], structure: BatchTree) -> list[Any]:
        """The leaves of a batch as NumPy arrays, but for jax.Arrays, what stays on the host, and what no device can hold."""
        return [
            leaf if (type(leaf) is np.ndarray and leaf.dtype.kind in "biuf") or host or is_jax_array(leaf) else _try_array(leaf, path)
            for leaf, path, host in zip(leaves, structure.paths, self.rules.on_host(structure), strict=True)
        ]

    # -- both

    def _staged(self, path: str, shape: Shape, dtype: DType) -> Leaf:
        target = canonical(dtype, self._x64)
        leaf = Leaf(path, Kind.STAGED, shape, dtype, target)
        if narrows(dtype, target) and self.narrow == "error":
            leaf.refusal = refuse_narrowing(path, dtype, target)
        return leaf

    def _get(self, structure: BatchTree, leaves: list[Leaf], rows: int | None, *, examples: bool) -> Plan:
        key = (structure, rows, tuple((leaf.kind, leaf.shape, leaf.dtype) for leaf in leaves))
        plan = self._plans.get(key)
        if plan is None:
            with self._lock:
                plan = self._plans.get(key)
                if plan is None:
                    plan = self._make(structure, leaves, rows, examples)
                    self._on_plan(plan)
                    self._plans[key] = plan
                    while len(self._plans) > 64:  # shapes that never come back must not pile up
                        del self._plans[next(iter(self._plans))]
        return plan

    def _make(self, structure: BatchTree, leaves: list[Leaf], rows: int | None, examples: bool) -> Plan:
        self._place(structure, leaves)
        if examples:
            for leaf in leaves:
                leaf.has_rows = True
        else:
            rows = self._find_rows(leaves)
        self._check_cut(rows)
        if self._microbatches is not None or self._agreement.process_count > 1:
            self._place(structure, leaves)  # again, now that it is known which axes are rows
        if self._pad is not None and rows is not None:
            for leaf in leaves:
                if leaf.has_rows and (leaf.kind is Kind.STAGED or (leaf.kind is Kind.DEVICE and has_numpy_dtype(leaf))):
                    leaf.padding = pad_value(leaf.path, self._pad.value, leaf.target)
        return Plan(structure, leaves, rows, self._microbatches, self._pad, self.rules)

    def _place(self, structure: BatchTree, leaves: list[Leaf]) -> None:
        shapes = [self._checked_shape(leaf) for leaf in leaves]
        found = self.rules.shardings(structure, shapes, [leaf.target for leaf in leaves], [leaf.refusal for leaf in leaves])
        for leaf, sharding in zip(leaves, found, strict=True):
            leaf.sharding = sharding
            if sharding is HOST:
                leaf.kind = Kind.HOST

    def _checked_shape(self, leaf: Leaf) -> Shape:
        """The global shape by which the sharding is checked: rows over all processes, those of one microbatch."""
        if not leaf.has_rows or not leaf.shape:
            return leaf.shape
        rows = self._agreement.global_rows(leaf.shape[0])
        return (rows // (self._microbatches or 1), *leaf.shape[1:])

    def _find_rows(self, leaves: list[Leaf]) -> int | None:
        """Without batch_size: the rows are axis 0 of the leaves that are split along it, else the size that all leaves share."""
        placed = [leaf for leaf in leaves if leaf.kind is not Kind.HOST and leaf.shape]
        split = [leaf for leaf in placed if splits_rows(leaf.sharding, len(leaf.shape))]
        with_rows = split or placed
        sizes = {leaf.path: leaf.shape[0] for leaf in with_rows}
        if len(set(sizes.values())) > 1:
            if split:
                raise BatchError(f"the leaves that are split along axis 0 differ in rows: {sizes}")
            return None
        for leaf in with_rows:
            leaf.has_rows = True
        return next(iter(sizes.values()), None)

    def _check_cut(self, rows: int | None) -> None:
        k = self._microbatches
        if k is None:
            return
        if rows is None:
            raise PlacementError(f"microbatches={k}: the leaves of the batch have no rows in common to be cut")
        if rows % k:
            raise PlacementError(f"microbatches={k}: {rows} rows cannot be cut into {k} equal pieces; use a multiple of {k} rows")


def _with_mask(batch: Any, mask: Any, pad: Pad) -> Any:
    if not _is(batch, Mapping):
        return batch, mask
    check_mask_key(pad, batch)
    if not _is(batch, MutableMapping):
        return type(batch)({**batch, pad.mask_key: mask})
    batch[pad.mask_key] = mask
    return batch


def _is(batch: Any, kind: type) -> bool:
    return isinstance(batch, kind)


def check_mask_key(pad: Pad, batch: Mapping[Any, Any]) -> None:
    """Whether the row mask finds its name free in a mapping batch.

    Raises:
        ConfigError: the batch has an entry of that name.
    """
    if pad.mask_key in batch:
        raise ConfigError(
            f"remainder='pad' adds the row mask under {pad.mask_key!r}, and the batch has an entry of that name; "
            f"choose another: remainder=ps.Pad(mask_key=...)"
        )


def has_numpy_dtype(leaf: Leaf) -> bool:
    """Whether it is made of numbers; PRNG keys have a dtype of JAX's own."""
    dtype: Any = leaf.target
    return isinstance(dtype, np.dtype)


def _refused(path: str, refusal: Refusal, shape: Shape, value: Any) -> Leaf:
    """A leaf that no device can hold; a callable rule may still keep it on the host."""
    found: Any = getattr(value, "dtype", None)
    dtype: DType = cast("DType", found) if isinstance(found, np.dtype) else _OBJECT
    leaf = Leaf(path, Kind.HOST, shape, dtype, dtype)
    leaf.refusal = refusal
    return leaf


def _refusal(value: Any, path: str) -> Refusal | None:
    try:
        as_array(value, path)
    except REFUSALS as refusal:
        return refusal
    return None


def _try_array(leaf: Any, path: str) -> Any:
    try:
        return as_array(leaf, path)
    except REFUSALS:
        return leaf  # the plan refuses it, unless its rule keeps it on the host


def splits_rows(sharding: Any, ndim: int) -> bool:
    """Whether a sharding speaks of axis 0: also over a mesh axis of one device, so that one device and eight read alike."""
    if sharding is HOST:
        return False
    if isinstance(sharding, NamedSharding):
        return len(sharding.spec) > 0 and sharding.spec[0] is not None
    return split_count(sharding, ndim) > 1
