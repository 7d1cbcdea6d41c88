"""The only calls that move data to devices."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from prefetchshard.base.errors import PlacementError
from prefetchshard.leaves.on_devices import from_movable, is_jax_array, is_key, to_movable
from prefetchshard.sharding.meshes import is_on_cpu

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jax.sharding import Sharding

_jax: Any = jax  # JAX leaves devices, and what is made of them, without a type


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
                    placed.append(_jax.make_array_from_callback(leaf.shape, sharding, leaf.__getitem__))
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
    guard = _jax.config.jax_transfer_guard_host_to_device
    return _jax.transfer_guard_host_to_device("allow") if guard in ("disallow", "log") else contextlib.nullcontext()


def _put_other(leaf: Any, sharding: Sharding, path: str) -> Any:
    if is_jax_array(leaf):
        _refuse_deleted(leaf, path)
        return copy_in_place(leaf, sharding)
    return _jax.device_put(leaf, sharding)


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
