"""Recognises leaves that are jax.Arrays, and converts them to a form whose bits no transfer changes."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from prefetchshard.base.jax_types import finfo, is_subdtype


def is_jax_array(leaf: Any) -> bool:
    """Whether a leaf is a jax.Array, which includes typed PRNG keys."""
    return isinstance(leaf, jax.Array)


def is_key(leaf: Any) -> bool:
    """Whether a leaf is an array of typed PRNG keys, which NumPy cannot hold."""
    return is_jax_array(leaf) and is_subdtype(leaf.dtype, jax.dtypes.prng_key)


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
