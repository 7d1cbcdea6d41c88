"""The only calls that move data to devices."""

from __future__ import annotations

import contextlib
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from prefetchshard.base.errors import PlacementError
from prefetchshard.sharding.meshes import is_on_cpu, row_slices

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jax.sharding import Sharding

Shape = tuple[int, ...]

_jax: Any = jax  # JAX leaves devices, and what is made of them, without a type


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
    guard = _jax.config.jax_transfer_guard_host_to_device
    return _jax.transfer_guard_host_to_device("allow") if guard in ("disallow", "log") else contextlib.nullcontext()


def _put_numpy(leaf: Any, sharding: Sharding, shape: Shape | None) -> Any:
    # For arrays of one process this is `device_put` at two thirds of its cost, a leaf
    if shape is None or shape == leaf.shape:
        return _jax.make_array_from_callback(leaf.shape, sharding, leaf.__getitem__)
    return _jax.make_array_from_callback(shape, sharding, _ProcessRows(leaf, sharding, shape).__getitem__)


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


def _put_other(leaf: Any, sharding: Sharding, shape: Shape | None, path: str) -> Any:
    if is_jax_array(leaf):
        _refuse_deleted(leaf, path)
        if leaf.is_fully_addressable and not sharding.is_fully_addressable:
            return _put_process_array(leaf, sharding, shape)
        return copy_in_place(leaf, sharding)
    if sharding.is_fully_addressable:
        return _jax.device_put(leaf, sharding)
    return _put_numpy(np.asarray(leaf), sharding, shape)  # `device_put` would compare the values of all processes


def _put_process_array(array: Any, sharding: Sharding, shape: Shape | None) -> Any:
    if not is_key(array):
        return _put_numpy(np.asarray(array), sharding, shape)
    bits = np.asarray(_jax.random.key_data(array))
    placed = _put_numpy(bits, sharding, None if shape is None else (*shape, *bits.shape[array.ndim :]))
    return _jax.random.wrap_key_data(placed, impl=_jax.random.key_impl(array))


def copy_in_place(array: Any, sharding: Sharding) -> Any:
    """A jax.Array placed as asked that shares no memory with the one given, made on the devices."""
    here: Any = array.sharding
    there: Any = sharding
    moved = array if here.is_equivalent_to(there, array.ndim) else _moved(array, there)
    if here.device_set.isdisjoint(there.device_set):
        return moved
    return _jax.device_put(moved, there, may_alias=False)  # to where it is already: the one case in which JAX heeds this


def _moved(array: Any, there: Any) -> Any:
    if not is_on_cpu(there) or is_key(array):
        return _jax.device_put(array, there)
    return from_movable(_jax.device_put(to_movable(array), there), array.dtype)


def _refuse_deleted(array: Any, path: str) -> None:
    if array.is_deleted():
        raise PlacementError(
            f"leaf {path or '(the batch itself)'}: the jax.Array of shape {array.shape} was deleted before it was placed, most likely donated "
            f"to a jitted function: let the source yield NumPy arrays, or new jax.Arrays"
        )


def is_jax_array(leaf: Any) -> bool:
    """Whether a leaf is on devices already, typed PRNG keys included."""
    return isinstance(leaf, jax.Array)


def is_key(leaf: Any) -> bool:
    """Whether a leaf is an array of typed PRNG keys, which NumPy cannot hold."""
    return is_jax_array(leaf) and _jax.dtypes.issubdtype(leaf.dtype, _jax.dtypes.prng_key)


def is_small_float(dtype: Any) -> bool:
    """Whether the CPU backend moves numbers of this type by way of larger ones, which changes the bits of what is not a number."""
    return bool(_jax.dtypes.issubdtype(dtype, np.floating)) and _jax.numpy.finfo(dtype).bits in (8, 16)


def to_movable(array: Any) -> Any:
    """An array, small floats as the integers of the same bits."""
    if not is_small_float(array.dtype):
        return array
    return _jax.lax.bitcast_convert_type(array, np.uint8 if array.dtype.itemsize == 1 else np.uint16)


def from_movable(array: Any, dtype: Any) -> Any:
    """What `to_movable` was given, from what it gave."""
    return _jax.lax.bitcast_convert_type(array, dtype) if is_small_float(dtype) else array
