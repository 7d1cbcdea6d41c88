"""What every staging ring has in common: how a batch lies in its memory, and new memory where nothing can be reused.

A staging ring is host memory that the workers write and the devices read, allocated once and reused.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from prefetchshard.base.memory import AnyArray, Memory

ALIGNMENT = 64
"""Bytes: JAX aliases memory that begins at a multiple of this (CPU backend), and makes a second copy of other memory."""

SMALL_BYTES = 1 << 16
"""Leaves below this size are cheaper to allocate anew than to track."""

PAGE_BYTES = 4096
"""Each large leaf in a slot begins at a multiple of this."""

Shape = tuple[int, ...]


class Layout:
    """The layout of a batch's leaves in staging memory, computed once for all batches of a plan.

    Args:
        leaves: shape and dtype of each.

    Attributes:
        leaves: of each leaf the shape, dtype, bytes, and offset in the slab, which holds all small leaves; None for a large leaf.
        slab_bytes: size of the slab.
        offsets: of each leaf, if the whole batch is one slot: the slab first, then the large leaves.
        slot_bytes: size of such a slot.
        nbytes: total size of the leaves, without padding.
        count_by_size: the number of large leaves of each size in bytes.
    """

    __slots__ = ("count_by_size", "leaves", "nbytes", "offsets", "slab_bytes", "slot_bytes")

    def __init__(self, leaves: Sequence[tuple[Shape, np.dtype[Any]]]) -> None:
        self.leaves: list[tuple[Shape, np.dtype[Any], int, int | None]] = []
        self.slab_bytes = 0
        for shape, dtype in leaves:
            size = nbytes_of(shape, dtype)
            small = size < SMALL_BYTES
            self.leaves.append((shape, dtype, size, self.slab_bytes if small else None))
            if small:
                self.slab_bytes += -(-size // ALIGNMENT) * ALIGNMENT
        self.nbytes = sum(size for _, _, size, _ in self.leaves)
        self.count_by_size = Counter(size for _, _, size, offset in self.leaves if offset is None)
        self.offsets: list[int] = []
        end = self.slab_bytes
        for _, _, size, offset in self.leaves:
            self.offsets.append(end if offset is None else offset)
            if offset is None:
                end += -(-size // PAGE_BYTES) * PAGE_BYTES
        self.slot_bytes = end


class StagingStats(msgspec.Struct, frozen=True):
    """The counts of a staging ring.

    Attributes:
        made: buffers allocated so far; constant once the ring is filled.
        reused: how often a buffer was reused so far.
        free_bytes: bytes held for reuse now.
    """

    made: int
    reused: int
    free_bytes: int


class Staging(Protocol):
    """Allocates memory for batches. Thread safety: `lease` may be called from any thread."""

    def lease(self, layout: Layout) -> Memory:
        """Memory for one batch: a writable, aligned view per leaf. Never waits: the queue's reservations bound the batches in memory."""
        ...

    def stats(self) -> StagingStats: ...


class Views:
    """Memory that the ring does not take back on release."""

    __slots__ = ("slab", "views")

    def __init__(self, views: tuple[AnyArray, ...], slab: AnyArray | None) -> None:
        self.views = views
        self.slab = slab

    def lock(self) -> None:
        pass

    def release(self) -> None:
        self.views = ()
        self.slab = None


def aligned_bytes(nbytes: int) -> AnyArray:
    """New memory that begins at a multiple of `ALIGNMENT`."""
    raw, start = aligned_slab(nbytes)
    return raw[start : start + nbytes]


def aligned_slab(nbytes: int) -> tuple[AnyArray, int]:
    """New memory, and the offset in it of `nbytes` aligned bytes."""
    try:
        raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    except ValueError as error:  # more than any address space
        raise MemoryError(f"an array of {nbytes:,} bytes cannot be") from error
    return raw, -raw.__array_interface__["data"][0] % ALIGNMENT


def nbytes_of(shape: Shape, dtype: np.dtype[Any]) -> int:
    return math.prod(shape) * dtype.itemsize


def views_of(memory: AnyArray, layout: Layout) -> tuple[AnyArray, ...]:
    """Views of a batch's leaves in a slot of `layout.slot_bytes`."""
    return tuple([np.ndarray(leaf[0], leaf[1], memory, offset) for leaf, offset in zip(layout.leaves, layout.offsets, strict=True)])


class FreshStaging:
    """Allocates new memory for every batch: correct on every backend; used if page-locked memory is no faster."""

    def __init__(self) -> None:
        self._made = 0

    def lease(self, layout: Layout) -> Memory:
        self._made += 1
        memory = aligned_bytes(layout.slot_bytes)
        return Views(views_of(memory, layout), memory[: layout.slab_bytes])

    def stats(self) -> StagingStats:
        return StagingStats(self._made, 0, 0)
