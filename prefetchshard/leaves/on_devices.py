"""Leaves that are on devices already."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

_jax: Any = jax


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
