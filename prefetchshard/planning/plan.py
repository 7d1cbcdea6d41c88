"""What is known of batches of one signature (structure, shapes, dtypes): how they lie on the host, and how they are placed.

A `HostPlan` is made where a batch is read. It needs no sharding to fit, so that a batch which turns out short has one too. A `Plan` is
made where batches come in order; it fixes the rows that are placed, which padding may make more than the batch has. Both are made once a
signature and hold what the path of a batch would otherwise have to find out again.
"""

from __future__ import annotations

import copy
import enum
import math
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, cast

import jax
import numpy as np

from prefetchshard.base.config import HOST, Pad
from prefetchshard.base.errors import ConfigError, LeafTypeError, NarrowingError
from prefetchshard.base.memory import AnyArray
from prefetchshard.base.specs import LeafSpec
from prefetchshard.leaves.narrowing import narrows
from prefetchshard.planning.packing import find_packing
from prefetchshard.sharding.batch_tree import BatchTree
from prefetchshard.sharding.leaf_sharding import rows_like, with_leading_axis
from prefetchshard.staging.layout import Layout

Shape = tuple[int, ...]
DType = np.dtype[Any]
Refusal = LeafTypeError | NarrowingError
MASK = -1
"""In place of a leaf's index: the row mask."""
OBJECT = np.dtype(object)


class Kind(enum.Enum):
    """How a leaf travels."""

    STAGED = "through the staging memory"
    DEVICE = "a jax.Array: from device to device"
    KEYS = "PRNG keys of examples: stacked before the transfer"
    HOST = "stays on the host"


class Leaf:
    """What is known of one leaf.

    Attributes:
        path: its place in the batch.
        kind: how it travels.
        shape: of the whole leaf on the host, `(rows, *example)` where it has rows; `()` for leaves that stay on the host.
        dtype: in the source.
        target: on the devices.
        has_rows: whether axis 0 is the rows of the batch.
        sharding: where it goes, or HOST; HOST before it is placed.
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

    def with_rows(self, rows: int | None) -> Leaf:
        """A copy of it with so many rows, where it has rows."""
        leaf = copy.copy(self)
        if leaf.has_rows and rows is not None and leaf.shape:
            leaf.shape = (rows, *leaf.shape[1:])
        return leaf


class HostPlan:
    """How batches of one signature lie on the host.

    Attributes:
        tree: the containers of the batch.
        leaves: in the order of the tree.
        rows: that it has room for, `batch_size` where it is made of examples; None where the leaves have no rows in common.
        staged: indices of the leaves in staging memory, in the order of the memory's views.
        layout: of the staging memory.
        is_made: the source or `collate` made the batch; else it is made of examples, which are its rows.
        is_plain: its leaves are NumPy arrays that only have to be copied.
        refusal: why no device can hold one of its leaves; raised unless the batch is left out.
        splits_rows: the sharding of a leaf splits its rows, so that it says which leaves have them.
        told: the same with other rows, where only the batches before tell them.
        placed: the plans made from it, by the rows that are placed.
    """

    def __init__(self, tree: BatchTree, leaves: list[Leaf], rows: int | None, *, is_made: bool) -> None:
        self.tree = tree
        self.leaves = leaves
        self.rows = rows
        self.is_made = is_made
        self.staged = [i for i, leaf in enumerate(leaves) if leaf.kind is Kind.STAGED]
        self.layout = Layout([(leaves[i].shape, leaves[i].target) for i in self.staged])
        self.refusal: Refusal | None = None
        self.splits_rows = False
        self.told: HostPlan | None = None
        self.placed: dict[int | None, Plan] = {}
        self.is_plain = len(self.staged) == len(leaves) > 0 and all(leaf.dtype == leaf.target for leaf in leaves)
        self._shapes = [(leaf.shape, leaf.dtype) for leaf in leaves]

    def is_plain_for(self, leaves: Sequence[Any]) -> bool:
        """Whether these leaves of a batch with this tree are NumPy arrays that only have to be copied."""
        if not self.is_plain:
            return False
        for leaf, (shape, dtype) in zip(leaves, self._shapes, strict=True):
            if type(leaf) is not np.ndarray or leaf.shape != shape or leaf.dtype != dtype:
                return False
        return True

    def with_rows_of(self, with_rows: Sequence[Leaf]) -> HostPlan:
        """The same where these of its leaves alone have rows."""
        other = copy.copy(self)
        other.leaves = [leaf.with_rows(None) for leaf in self.leaves]
        for leaf, before in zip(other.leaves, self.leaves, strict=True):
            leaf.has_rows = before in with_rows
        other.rows = with_rows[0].shape[0]
        other.placed = {}
        return other


class PutOrder:
    """The arrays of a batch that are put, in order, as lists of one length.

    Attributes:
        indices: of the leaf of each; MASK for the mask.
        shapes: in which it is put.
        shardings: where it goes.
        paths: for errors.
    """

    __slots__ = ("indices", "paths", "shapes", "shardings")

    def __init__(self) -> None:
        self.indices: list[int] = []
        self.shapes: list[Shape] = []
        self.shardings: list[Any] = []
        self.paths: list[str] = []


class Plan:
    """How batches of one signature are placed and put together.

    Attributes:
        tree: of the batch, without the mask.
        leaves: in the order of the tree, with their shardings.
        rows: global rows of a full batch; None where the leaves have no rows in common.
        staged: indices of the leaves in staging memory, in the order of the memory's views.
        layout: of the staging memory.
        pad: the padding policy, or None.
        put: the arrays that are put: staged leaves, then those on devices, then the mask.
        masks_on_host: the row mask stays on the host, as all leaves do.
        packing: of the small leaves into one buffer, where that is the better way; None where each is put by itself.
        nbytes: of one batch, over all devices once.
        spans_devices: whether an array of it lies on several devices.
        has_device_leaves: whether leaves of it are jax.Arrays already.
    """

    def __init__(self, host: HostPlan, leaves: list[Leaf], rows: int | None, microbatches: int | None, pad: Pad | None) -> None:
        self.tree = host.tree
        self.leaves = leaves
        self.rows = rows
        self.microbatches = microbatches
        self.pad = pad if rows is not None else None
        self.staged = [i for i, leaf in enumerate(leaves) if leaf.kind is Kind.STAGED]
        same = rows == host.rows and self.staged == host.staged
        self.layout = host.layout if same else Layout([(leaves[i].shape, leaves[i].target) for i in self.staged])
        put = [*self.staged, *(i for i, leaf in enumerate(leaves) if leaf.kind in (Kind.DEVICE, Kind.KEYS))]
        self.has_device_leaves = len(put) > len(self.staged)
        self.put = PutOrder()
        for i in put:
            self._add(i, leaves[i].shape, leaves[i].sharding, leaves[i].path, has_rows=leaves[i].has_rows)
        self.masks_on_host = False
        if self.pad is not None and rows is not None:
            self._add_mask(self.pad, rows)
        self.packing = find_packing(self.layout, self.put.shapes, self.put.shardings)
        self.nbytes = self.layout.nbytes + (rows or 0) * (MASK in self.put.indices)
        self.spans_devices = any(len(sharding.device_set) > 1 for sharding in self.put.shardings)

    def cut(self, shape: Shape, has_rows: bool) -> Shape:
        """The shape with the microbatch axis in front."""
        if self.microbatches is None or not has_rows:
            return shape
        return (self.microbatches, shape[0] // self.microbatches, *shape[1:])

    def _add(self, index: int, shape: Shape, sharding: Any, path: str, *, has_rows: bool) -> None:
        put = self.put
        put.indices.append(index)
        put.shapes.append(self.cut(shape, has_rows))
        put.shardings.append(with_leading_axis(sharding) if self.microbatches is not None and has_rows else sharding)
        put.paths.append(path)

    def _add_mask(self, pad: Pad, rows: int) -> None:
        placed = [leaf for leaf in self.leaves if leaf.sharding is not HOST]
        where = rows_like([leaf.sharding for leaf in placed], [leaf.shape for leaf in placed])
        self.masks_on_host = where is HOST
        if where is not HOST:
            self._add(MASK, (rows,), where, pad.mask_key, has_rows=True)

    def cut_on_host(self, passed: dict[int, Any]) -> None:
        """Cut the leaves that stayed on the host into the microbatches of the others, where they have a row for each."""
        for index, value in passed.items():
            if isinstance(value, np.ndarray) and (index == MASK or self.leaves[index].has_rows):
                array = cast("AnyArray", value)
                passed[index] = array.reshape(self.cut(array.shape, True))

    def assemble(self, placed: Sequence[Any], passed: dict[int, Any]) -> Any:
        """The batch as the consumer gets it, from the arrays in put order and the leaves that stayed on the host."""
        leaves: list[Any] = [None] * len(self.leaves)
        mask = None
        for index, array in zip(self.put.indices, placed, strict=True):
            if index == MASK:
                mask = array
            else:
                leaves[index] = array
        for index, value in passed.items():
            if index == MASK:
                mask = value
            else:
                leaves[index] = value
        batch = self.tree.unflatten(leaves)
        return batch if self.pad is None else _with_mask(batch, mask, self.pad)

    def spec(self) -> tuple[LeafSpec, ...]:
        """What a batch looks like on the devices."""
        specs: list[LeafSpec] = []
        put = self.put
        for index, shape, sharding, path in zip(put.indices, put.shapes, put.shardings, put.paths, strict=True):
            dtype = np.dtype(bool) if index == MASK else self.leaves[index].target
            specs.append(leaf_spec(path, shape, dtype, sharding))
        on_host = [(leaf, self.cut(leaf.shape, leaf.has_rows and bool(leaf.shape))) for leaf in self.leaves if leaf.kind is Kind.HOST]
        specs += [LeafSpec(leaf.path, shape, leaf.dtype, HOST, 0) for leaf, shape in on_host]
        if self.masks_on_host and self.pad is not None and self.rows is not None:
            specs.append(LeafSpec(self.pad.mask_key, self.cut((self.rows,), True), np.dtype(bool), HOST, 0))
        return tuple(specs)


def leaf_spec(path: str, shape: Shape, dtype: Any, sharding: jax.sharding.Sharding) -> LeafSpec:
    """The spec of an array under a sharding."""
    return LeafSpec(path, shape, dtype, sharding, math.prod(sharding.shard_shape(shape)) * dtype.itemsize)


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
