"""The calls that move a batch to its devices."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from prefetchshard.base.errors import PlacementError
from prefetchshard.base.jax_types import config, device_put, device_set, make_array_from_callback, wrap_key_data
from prefetchshard.base.memory import AnyArray
from prefetchshard.leaves.on_devices import from_movable, is_jax_array, is_key, to_movable
from prefetchshard.sharding.meshes import is_on_cpu

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jax.sharding import Sharding


def put(leaves: Sequence[Any], shardings: Sequence[Sharding], *, paths: Sequence[str] = ()) -> list[jax.Array]:
    """Dispatch the transfer of leaves to their devices; says nothing about when it is done.

    NumPy memory may be read after this returned, on the CPU backend for as long as an array over it lives. Leaves that are
    jax.Arrays are copied on their devices, so that donating a result leaves them alone.

    Args:
        leaves: NumPy arrays, jax.Arrays, Python or NumPy scalars.
        shardings: of each leaf; not HOST.
        paths: of each leaf, for the errors.

    Returns:
        A committed jax.Array for each leaf.

    Raises:
        PlacementError: a jax.Array leaf was deleted (donated) before.
    """
    placed: list[jax.Array] = []
    try:
        with explicit():
            for leaf, sharding in zip(leaves, shardings, strict=True):
                if type(leaf) is np.ndarray:  # `device_put` at two thirds of its cost, a leaf
                    placed.append(make_array_from_callback(leaf.shape, sharding, leaf.__getitem__))
                else:
                    placed.append(_put_other(leaf, sharding, paths[len(placed)] if paths else "?"))
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


def _put_other(leaf: Any, sharding: Sharding, path: str) -> jax.Array:
    if is_jax_array(leaf):
        _refuse_deleted(leaf, path)
        if leaf.is_fully_addressable and not sharding.is_fully_addressable:
            return _put_process_array(leaf, sharding)
        return copy_in_place(leaf, sharding)
    if sharding.is_fully_addressable:
        return device_put(leaf, sharding)
    return _put_numpy(np.asarray(leaf), sharding)  # `device_put` would compare the values of all processes


def _put_numpy(leaf: AnyArray, sharding: Sharding) -> jax.Array:
    return make_array_from_callback(leaf.shape, sharding, leaf.__getitem__)


def _put_process_array(array: jax.Array, sharding: Sharding) -> jax.Array:
    if not is_key(array):
        return _put_numpy(np.asarray(array), sharding)
    return wrap_key_data(_put_numpy(np.asarray(jax.random.key_data(array)), sharding), impl=jax.random.key_impl(array))


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
