"""Recognises leaves that are jax.Arrays, and converts them to forms that can be copied, computed on and moved."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding

from prefetchshard.base.jax_types import config, device_put, device_set, finfo, is_subdtype, wrap_key_data
from prefetchshard.base.memory import AnyArray

_ON_HOST = ("pinned_host", "unpinned_host")
"""Kinds of host memory that accelerators can reach."""


def is_jax_array(leaf: Any) -> bool:
    """Whether a leaf is a jax.Array, which includes typed PRNG keys."""
    return isinstance(leaf, jax.Array)


def is_traced(leaf: Any) -> bool:
    """Whether it stands for an array in a function that JAX traces, without values or a place."""
    return isinstance(leaf, Tracer)


def is_key(leaf: Any) -> bool:
    """Whether a leaf is an array of typed PRNG keys, which NumPy cannot hold."""
    return is_jax_array(leaf) and is_subdtype(leaf.dtype, jax.dtypes.prng_key)


def may_change(array: Any) -> bool:
    """Whether the values of an array may change: it may share the memory of a NumPy array.

    JAX cannot tell, as an array that was computed looks the same. One of a weak type was computed; it is waited for, since the
    computation may still read such memory.
    """
    sharding = array.sharding
    if array.is_deleted() or not (next(iter(device_set(sharding))).platform == "cpu" or sharding.memory_kind in _ON_HOST):
        return False
    if not is_key(array) and array.weak_type:
        array.block_until_ready()
        return False
    return True


def values_of(array: Any) -> AnyArray:
    """The values of an array in NumPy memory, which may be the array's own; waits for them."""
    # As in `explicit`: to JAX only `device_get` is a transfer that the user asked for. That takes seven times as long
    if config.jax_transfer_guard_device_to_host not in ("disallow", "log"):
        return np.asarray(array)
    with jax.transfer_guard_device_to_host("allow"):
        return np.asarray(array)


def private_array(array: Any) -> Any:
    """The array, or where it may change, a finished copy in the same places and of the same type."""
    if not may_change(array):
        return array
    if is_key(array):  # of which `device_put` keeps no sharding unless it is told one
        return wrap_key_data(private_array(jax.random.key_data(array)), impl=jax.random.key_impl(array))
    return device_put(array, may_alias=False).block_until_ready()


def computable(array: Any) -> Any:
    """The array where functions of our own can compute on it: in the devices' own memory, on a mesh without explicit axes.

    Nothing is copied for the mesh alone.
    """
    sharding = array.sharding
    kind = next(iter(device_set(sharding))).default_memory().kind
    if isinstance(sharding, NamedSharding) and any(axis != AxisType.Auto for axis in sharding.mesh.axis_types):
        mesh: Any = sharding.mesh
        return device_put(array, NamedSharding(Mesh(mesh.devices, mesh.axis_names), sharding.spec, memory_kind=kind))
    return array if sharding.memory_kind == kind else device_put(array, sharding.with_memory_kind(kind))


def is_small_float(dtype: Any) -> bool:
    """Whether the dtype is a float of 8 or 16 bits. The CPU backend moves these through float32, which changes the bits of NaNs."""
    return is_subdtype(dtype, np.floating) and finfo(dtype).bits in (8, 16)


def to_movable(array: Any) -> Any:
    """The array, with small floats bitcast to integers."""
    if not is_small_float(array.dtype):
        return array
    return jax.lax.bitcast_convert_type(array, np.uint8 if array.dtype.itemsize == 1 else np.uint16)


def from_movable(array: Any, dtype: Any) -> Any:
    """The inverse of `to_movable`, for an array of `dtype`."""
    return jax.lax.bitcast_convert_type(array, dtype) if is_small_float(dtype) else array
