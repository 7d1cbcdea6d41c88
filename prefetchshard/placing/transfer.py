"""The calls that move a batch to its devices."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from prefetchshard.base.jax_types import config, device_put, device_set, make_array_from_callback, wrap_key_data
from prefetchshard.base.memory import AnyArray
from prefetchshard.leaves.converting import deleted
from prefetchshard.leaves.on_devices import computable, from_movable, is_jax_array, is_key, is_small_float, to_movable
from prefetchshard.planning.array_copies import ArrayCopy
from prefetchshard.sharding.meshes import is_on_cpu

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jax.sharding import Sharding


def put(leaves: Sequence[Any], shardings: Sequence[Sharding], *, paths: Sequence[str] = ()) -> list[jax.Array]:
    """Dispatch the transfer of leaves to their devices; says nothing about when it is done.

    NumPy memory may be read after this returned, on the CPU backend for as long as an array over it lives. Leaves that are
    jax.Arrays are copied on their devices, so that donating a result leaves them alone, unless they are `Owned`.

    Args:
        leaves: NumPy arrays, jax.Arrays, `Owned` ones, copies of them, Python or NumPy scalars.
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


class Owned:
    """A jax.Array that nobody else refers to."""

    __slots__ = ("array",)

    def __init__(self, array: Any) -> None:
        self.array = array


def made_again(copy: ArrayCopy, sharding: Any = None) -> Any:
    """The array of a copy, by its own sharding or by an equivalent one. The copy's memory becomes the array's."""
    bits = make_array_from_callback(copy.bits_shape, copy.bits_sharding if sharding is None else sharding, copy.piece)
    return bits if copy.key_impl is None else wrap_key_data(bits, impl=copy.key_impl)


def _put_other(leaf: Any, sharding: Sharding, path: str) -> jax.Array:
    if type(leaf) is Owned:
        return _placed_own(leaf.array, sharding)
    if type(leaf) is ArrayCopy:
        return made_again(leaf, sharding) if leaf.key_impl is None else _placed_own(made_again(leaf), sharding)
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


def _placed_own(array: jax.Array, sharding: Sharding) -> jax.Array:
    if array.sharding.is_equivalent_to(sharding, array.ndim):
        return array if array.sharding == sharding else device_put(array, sharding)
    return _moved(array, sharding)


def _moved(array: jax.Array, there: Sharding) -> jax.Array:
    if not is_on_cpu(there) or not is_small_float(array.dtype):
        return device_put(array, there)
    bits = device_put(to_movable(computable(array)), there)
    return device_put(from_movable(computable(bits), array.dtype), there)


def _refuse_deleted(array: jax.Array, path: str) -> None:
    if array.is_deleted():
        raise deleted(array, path)
