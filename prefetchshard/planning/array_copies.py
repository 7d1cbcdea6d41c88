"""Copies in host memory of jax.Arrays whose own memory the source may overwrite.

The CPU backend does not copy NumPy memory that is aligned: an array that `jax.device_put` made there changes with it. Copying reads the
array and dispatches nothing, so the source's thread may do it; the transfer makes the array again (`placing/transfer.py`).
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from prefetchshard.base.jax_types import Index, Shape
from prefetchshard.base.memory import AnyArray
from prefetchshard.leaves.on_devices import is_key, may_change, values_of
from prefetchshard.staging.layout import aligned_bytes


class ArrayCopy:
    """The values of a jax.Array at one time, in host memory that nobody writes.

    Args:
        array: on devices of which this process can reach those that count; waited for.

    Attributes:
        shape: of the array.
        sharding: of the array.
        bits_shape: of the numbers; differs from `shape` for PRNG keys.
        bits_sharding: of the numbers.
        key_impl: of PRNG keys; else None.
    """

    __slots__ = ("_pieces", "bits_shape", "bits_sharding", "key_impl", "shape", "sharding")

    def __init__(self, array: Any) -> None:
        self.shape: Shape = array.shape
        self.sharding: Any = array.sharding
        self.key_impl: Any = jax.random.key_impl(array) if is_key(array) else None
        bits: Any = array if self.key_impl is None else jax.random.key_data(array)
        self.bits_shape: Shape = bits.shape
        self.bits_sharding: Any = bits.sharding
        self._pieces: dict[Any, AnyArray] = {}  # devices that hold the same part share one
        for shard in bits.addressable_shards:
            key = self._key(shard.index)
            if key not in self._pieces:
                self._pieces[key] = _copied(values_of(shard.data))

    def _key(self, index: Index) -> Any:
        return tuple(part.indices(size)[:2] for part, size in zip(index, self.bits_shape, strict=True))

    def piece(self, index: Index) -> AnyArray:
        """The numbers at an index that one of the array's devices holds."""
        return self._pieces[self._key(index)]

    @property
    def whole(self) -> AnyArray | None:
        """All numbers, where they are in one piece."""
        return next(iter(self._pieces.values())) if len(self._pieces) == 1 else None


def own(array: Any) -> Any:
    """The array, or where it may change, a copy of it."""
    return ArrayCopy(array) if may_change(array) else array


def _copied(part: AnyArray) -> AnyArray:
    copy = np.ndarray(part.shape, part.dtype, aligned_bytes(part.nbytes))
    np.copyto(copy, part)
    return copy
