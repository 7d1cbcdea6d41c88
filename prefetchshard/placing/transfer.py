"""The only calls that move data to devices."""

from __future__ import annotations

import contextlib
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from prefetchshard.base.batches import AnyArray
from prefetchshard.base.errors import PlacementError
from prefetchshard.base.jax_types import config, device_put, device_set, make_array_from_callback, wrap_key_data
from prefetchshard.leaves.on_devices import from_movable, is_jax_array, is_key, to_movable
from prefetchshard.sharding.meshes import is_on_cpu, row_slices

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jax.sharding import Sharding

Shape = tuple[int, ...]


def put(
    leaves: Sequence[Any], shardings: Sequence[Sharding], *, paths: Sequence[str] = (), shapes: Sequence[Shape] | None = None
) -> list[jax.Array]:
    """Dispatch the transfer of leaves to their devices; says nothing about when it is done.

    NumPy memory may be read after this returned, on the CPU backend for as long as an array over it lives. Leaves that are
    jax.Arrays are copied on their devices, so that donating a result leaves them alone.

    Args:
        leaves: NumPy arrays, jax.Arrays, Python or NumPy scalars.
        shardings: of each leaf; not HOST.
        paths: of each leaf, for the errors.
        shapes: global shapes, where a leaf holds just the rows of this process, in order (see `row_slices`); else each leaf is whole.

    Returns:
        A committed jax.Array for each leaf.

    Raises:
        PlacementError: a jax.Array leaf was deleted (donated) before.
    """
    placed: list[jax.Array] = []
    whole: Sequence[Shape | None] = [None] * len(leaves) if shapes is None else shapes
    try:
        with explicit():
            for leaf, sharding, shape in zip(leaves, shardings, whole, strict=True):
                if type(leaf) is np.ndarray:
                    placed.append(_put_numpy(leaf, sharding, shape))
                else:
                    placed.append(_put_other(leaf, sharding, shape, paths[len(placed)] if paths else "?"))
    except Exception as error:
        if paths and len(placed) < len(paths):
            error.add_note(f"leaf {paths[len(placed)] or '(the batch itself)'}")
        raise
    return placed


def explicit() -> contextlib.AbstractContextManager[Any]:
    """For calls that may move data to devices."""
    # To JAX only `device_put` is a transfer that the user asked for; ours are, whatever call makes them
    guard = config.jax_transfer_guard_host_to_device
    return jax.transfer_guard_host_to_device("allow") if guard in ("disallow", "log") else contextlib.nullcontext()


def _put_numpy(leaf: AnyArray, sharding: Sharding, shape: Shape | None) -> jax.Array:
    # For arrays of one process this is `device_put` at two thirds of its cost, a leaf
    if shape is None or shape == leaf.shape:
        return make_array_from_callback(leaf.shape, sharding, leaf.__getitem__)
    return make_array_from_callback(shape, sharding, _ProcessRows(leaf, sharding, shape).__getitem__)


class _ProcessRows:
    """The rows of this process, found by their place in the global array."""

    def __init__(self, leaf: Any, sharding: Sharding, shape: Shape) -> None:
        held = row_slices(sharding, shape[0], len(shape))
        sizes = [stop - start for start, stop in held]
        if sum(sizes) != leaf.shape[0]:
            raise PlacementError(f"this process holds {sum(sizes)} of {shape[0]} rows, the leaf has {leaf.shape[0]}")
        self._leaf = leaf
        self._rows = shape[0]
        self._begins = {start: begin for (start, _), begin in zip(held, accumulate(sizes, initial=0), strict=False)}

    def __getitem__(self, index: tuple[slice, ...]) -> Any:
        start, stop, _ = index[0].indices(self._rows)
        begin = self._begins[start]
        return self._leaf[(slice(begin, begin + stop - start), *index[1:])]


def _put_other(leaf: Any, sharding: Sharding, shape: Shape | None, path: str) -> jax.Array:
    if is_jax_array(leaf):
        _refuse_deleted(leaf, path)
        if leaf.is_fully_addressable and not sharding.is_fully_addressable:
            return _put_process_array(leaf, sharding, shape)
        return copy_in_place(leaf, sharding)
    if sharding.is_fully_addressable:
        return device_put(leaf, sharding)
    return _put_numpy(np.asarray(leaf), sharding, shape)  # `device_put` would compare the values of all processes


def _put_process_array(array: jax.Array, sharding: Sharding, shape: Shape | None) -> jax.Array:
    if not is_key(array):
        return _put_numpy(np.asarray(array), sharding, shape)
    bits = np.asarray(jax.random.key_data(array))
    placed = _put_numpy(bits, sharding, None if shape is None else (*shape, *bits.shape[array.ndim :]))
    return wrap_key_data(placed, impl=jax.random.key_impl(array))


def copy_in_place(array: jax.Array, sharding: Sharding) -> jax.Array:
    """A jax.Array placed as asked that shares no memory with the one given, made on the devices."""
    here = array.sharding
    moved = array if here.is_equivalent_to(sharding, array.ndim) else _moved(array, sharding)
    if device_set(here).isdisjoint(device_set(sharding)):
        return moved
    return device_put(moved, sharding, may_alias=False)  # to where it is already: the one case in which JAX heeds this


def _moved(array: jax.Array, there: Sharding) -> jax.Array:
    if not is_on_cpu(there) or is_key(array):
        return device_put(array, there)
    return from_movable(device_put(to_movable(array), there), array.dtype)


def _refuse_deleted(array: jax.Array, path: str) -> None:
    if array.is_deleted():
        raise PlacementError(
            f"leaf {path or '(the batch itself)'}: the jax.Array of shape {array.shape} was deleted before it was placed, most likely donated "
            f"to a jitted function: let the source yield NumPy arrays, or new jax.Arrays"
        )
