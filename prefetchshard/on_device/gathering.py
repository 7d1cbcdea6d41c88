"""Gathers the rows of a batch by number from arrays on the devices, with one jitted function per mesh.

Each device makes its own part of the batch. If it holds all rows of an array, it gathers locally and nothing moves between devices. If
rows are split over devices, each device contributes the bits of its own rows and zeros for the others, and the sum is the batch. The
sum is over bits as integers, because a sum of floats drops the sign of zeros and changes NaNs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from prefetchshard.base.jax_types import as_jax_array, jit, psum, psum_scatter, reshape, zeros_like
from prefetchshard.leaves.on_devices import from_movable, is_small_float, to_movable
from prefetchshard.planning.plan import MASK, Plan
from prefetchshard.sharding.leaf_sharding import replicated_like
from prefetchshard.sharding.meshes import axis_names, is_on_cpu, mesh_of, row_split

_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_SMALL = ("int2", "uint2", "int4", "uint4")
"""Types of less than a byte; their values are widened to a byte."""


class Gather:
    """One jitted function for the leaves that go to one mesh, or to one device.

    Args:
        plan: the plan of the batches.
        members: which leaves, by position in the plan's put order.
        stored: for each leaf, the sharding of its array.

    Attributes:
        members: as given.
        numbers_at: the sharding of the row numbers: replicated over the devices.
    """

    def __init__(self, plan: Plan, members: list[int], stored: Sequence[Sharding]) -> None:
        self.members = members
        shardings = [plan.put.shardings[n] for n in members]
        self.numbers_at = replicated_like(shardings[0])
        indices = [plan.put.indices[n] for n in members]
        self._leaves = [index for index in indices if index != MASK]
        parts = [_Part(plan, n, None if plan.put.indices[n] == MASK else stored[plan.put.indices[n]]) for n in members]
        body = partial(_gather_parts, parts, plan.microbatches)
        if isinstance(self.numbers_at, NamedSharding):
            body = jax.shard_map(
                body,
                mesh=mesh_of(self.numbers_at),
                in_specs=(PartitionSpec(), *[_spec(stored[index]) for index in self._leaves]),
                out_specs=[_spec(sharding) for sharding in shardings],
                check_vma=False,
            )
        self._run: Callable[..., list[Any]] = jit(body, out_shardings=shardings)
        self._types = [part.type_after for part in parts]
        self._typed: Callable[[list[Any]], list[Any]] = jit(self._in_types, out_shardings=shardings)

    def __call__(self, numbers: Any, stores: Sequence[Any]) -> list[Any]:
        arrays = self._run(numbers, *(stores[index] for index in self._leaves))
        return arrays if not any(self._types) else self._typed(arrays)

    def _in_types(self, arrays: list[Any]) -> list[Any]:
        return [array if dtype is None else from_movable(array, dtype) for array, dtype in zip(arrays, self._types, strict=True)]


def _spec(sharding: Any) -> Any:
    return sharding.spec


def gathers_of(plan: Plan, stored: Sequence[Sharding]) -> list[Gather]:
    """The gathers of a plan, one for each mesh or single device.

    Args:
        plan: the plan of the batches.
        stored: for each leaf, the sharding of its array.
    """
    groups: dict[Any, list[int]] = {}
    for n, sharding in enumerate(plan.put.shardings):
        key = mesh_of(sharding) if isinstance(sharding, NamedSharding) else next(iter(sharding.device_set))
        groups.setdefault(key, []).append(n)
    return [Gather(plan, members, stored) for members in groups.values()]


class _Part:
    """Computes one device's part of a leaf, or of the mask, from the numbers of all rows of a batch and the device's part of the array.

    Args:
        plan: the plan of the batches.
        n: position in the put order.
        stored: the sharding of the array; None for the mask.

    Attributes:
        type_after: the dtype to which a second jitted function bitcasts the rows, which this one returns as integers; None: not needed.
            Padded small floats on the CPU backend need it: within one function XLA would select between rows and padding as floats.
    """

    def __init__(self, plan: Plan, n: int, stored: Sharding | None) -> None:
        self.is_mask = stored is None
        spec = _entries(plan.put.shardings[n])
        self._rows_axis = 0 if plan.microbatches is None else 1
        entries = [*spec, *[None] * (len(plan.put.shapes[n]) - len(spec))]
        self._row_names = axis_names(entries[self._rows_axis])
        self._example_entries = entries[self._rows_axis + 1 :]
        index = plan.put.indices[n]
        leaf = None if index == MASK else plan.leaves[index]
        self._padding = None if leaf is None else leaf.padding
        self.type_after: Any = None
        if leaf is not None and self._padding is not None and is_small_float(leaf.target) and is_on_cpu(plan.put.shardings[n]):
            self.type_after = leaf.target
        held = _entries(stored)
        self._store_names = axis_names(held[0]) if held and stored is not None and row_split(stored) > 1 else ()
        self._held = [axis_names(entry) for entry in held[1:]]

    def mask(self, numbers: Any) -> Any:
        return _own_piece(numbers, self._rows_axis, self._row_names) >= 0

    def rows(self, numbers: Any, array: Any) -> Any:
        """This device's part of the leaf."""
        padding = None if self._padding is None else to_movable(as_jax_array(self._padding))
        rows = self._rows(numbers, to_movable(array), padding)
        return rows if self.type_after is not None else from_movable(rows, array.dtype)

    def _rows(self, numbers: Any, array: Any, padding: Any) -> Any:
        mine = _own_piece(numbers, self._rows_axis, self._row_names)
        rows = self._collected(numbers, array) if self._store_names else jnp.take(array, jnp.maximum(mine, 0), axis=0, mode="clip")
        for axis, entry in enumerate(self._example_entries):
            names = axis_names(entry)
            if names and (axis >= len(self._held) or not self._held[axis]):
                rows = _own_piece(rows, self._rows_axis + 1 + axis, names)
        if padding is None:
            return rows
        return from_bits(_where(mine >= 0, to_bits(rows), to_bits(padding)), rows.dtype)

    def _collected(self, numbers: Any, array: Any) -> Any:
        """Rows from an array split over devices: each contributes the bits of its own rows and zeros for the others."""
        names, axis = self._store_names, self._rows_axis
        count = array.shape[0]
        there = numbers - jax.lax.axis_index(names) * count
        has = (there >= 0) & (there < count)
        bits = to_bits(jnp.take(array, jnp.clip(there, 0, count - 1), axis=0, mode="clip"))
        bits = _where(has, bits, zeros_like(bits))
        if names == self._row_names:
            bits = psum_scatter(bits, names, scatter_dimension=axis, tiled=True)
        else:
            bits = _own_piece(psum(bits, names), axis, self._row_names)
        return from_bits(bits, array.dtype)


def _entries(sharding: Any) -> tuple[Any, ...]:
    return tuple(sharding.spec) if isinstance(sharding, NamedSharding) else ()


def _gather_parts(parts: list[_Part], microbatches: int | None, numbers: Any, *arrays: Any) -> list[Any]:
    if microbatches is not None:
        numbers = reshape(numbers, (microbatches, -1))
    left = iter(arrays)
    return [part.mask(numbers) if part.is_mask else part.rows(numbers, next(left)) for part in parts]


def _where(rows: Any, array: Any, other: Any) -> Any:
    return jnp.where(reshape(rows, (*rows.shape, *[1] * (array.ndim - rows.ndim))), array, other)


def _own_piece(whole: Any, axis: int, names: tuple[Any, ...]) -> Any:
    """This device's piece of an array whose axis is split over these mesh axes."""
    if not names:
        return whole
    size = whole.shape[axis] // math.prod(jax.lax.axis_size(name) for name in names)
    return jax.lax.dynamic_slice_in_dim(whole, jax.lax.axis_index(names) * size, size, axis)


def to_bits(array: Any) -> Any:
    """The bits of an array as integers that every backend can sum."""
    dtype = array.dtype
    if dtype.kind == "c":
        return to_bits(jnp.stack([jnp.real(array), jnp.imag(array)], axis=-1))
    if dtype.kind == "b" or dtype.name in _SMALL:
        return array.astype(np.int8 if dtype.name.startswith("int") else np.uint8)
    bits = jax.lax.bitcast_convert_type(array, _BITS[dtype.itemsize])
    return bits.astype(np.uint32) if dtype.itemsize == 2 else bits


def from_bits(bits: Any, dtype: np.dtype[Any]) -> Any:
    """The array with these bits; the inverse of `to_bits`."""
    if dtype.kind == "c":
        parts = from_bits(bits, np.dtype(np.float32 if dtype.itemsize == 8 else np.float64))
        return jax.lax.complex(parts[..., 0], parts[..., 1])
    if dtype.kind == "b" or dtype.name in _SMALL:
        return bits.astype(dtype)
    return jax.lax.bitcast_convert_type(bits.astype(_BITS[dtype.itemsize]), dtype)
