"""Sums over the raw bits of each row, exact and the same on the host and on the devices."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

_jax: Any = jax
_jnp: Any = jnp

Array = NDArray[Any]
Sums = NDArray[np.uint32]

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}
HALVES = ("int4", "uint4")  # a byte each on the host, half of one on some devices


def host_sums(leaf: Array, *, lead: int = 1) -> Sums:
    """The sum of each row, `(rows,)`, of a leaf `(rows, *example)`.

    Each value counts with a factor of its own, so that values that changed places show.

    Args:
        leaf: in the dtype that it has on the devices.
        lead: how many axes in front make the rows.
    """
    bits = _host_bits(np.ascontiguousarray(leaf)).reshape(*leaf.shape[:lead], -1).astype(np.uint32)
    return (bits * _factors(bits.shape[-1])).sum(axis=-1, dtype=np.uint32)


def _host_bits(leaf: Array) -> Array:
    if leaf.dtype.name in HALVES:
        return leaf.astype(np.int8).view(np.uint8)
    if leaf.dtype.kind == "c":
        return leaf[..., None].view(np.uint32)  # real, imaginary
    return leaf.view(UNSIGNED[leaf.dtype.itemsize])


def _factors(count: int) -> Sums:
    return np.arange(count, dtype=np.uint32) * np.uint32(2) + np.uint32(1)


def _sums_of(leaf: Any, lead: int) -> Any:
    bits = _device_bits(leaf).astype(np.uint32)
    shape = bits.shape[lead:]
    factors = _factors(math.prod(shape)).reshape(shape)
    return _jnp.sum(bits * factors, axis=tuple(range(lead, bits.ndim)), dtype=np.uint32)


def _device_bits(leaf: Any) -> Any:
    dtype = leaf.dtype
    if dtype.name in HALVES:
        return _jax.lax.bitcast_convert_type(leaf.astype(np.int8), np.uint8)
    if dtype.kind == "b":
        return leaf.astype(np.uint8)
    if dtype.kind == "c":
        parts = _jnp.stack([_jnp.real(leaf), _jnp.imag(leaf)], axis=-1)
        return _jax.lax.bitcast_convert_type(parts, np.uint32)
    return _jax.lax.bitcast_convert_type(leaf, UNSIGNED[dtype.itemsize])


device_sums = _jax.jit(_sums_of, static_argnames="lead")
"""The same sums of a leaf on the devices, made there: `device_sums(leaf, lead=1)`."""
