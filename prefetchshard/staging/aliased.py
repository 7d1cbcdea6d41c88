"""The staging ring: host memory that the workers write and the devices read, made once and used again.

On the CPU backend JAX aliases aligned NumPy memory for as long as any array over it lives (its copies are made after the call
returned), so memory is given away with the batch. It comes back when the last reference has died: a weak reference to the buffer
under the array says so. On accelerators a slot may be written again as soon as the transfer out of it is ready.
"""

from __future__ import annotations

import ctypes
import math
import queue
import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from prefetchshard.base.memory import AnyArray, Memory

ALIGNMENT = 64
"""Bytes: JAX aliases (CPU) memory that begins at a multiple of this, and copies other memory a second time."""

SMALL_BYTES = 1 << 16
"""Leaves below this are cheaper to allocate anew than to track."""

PAGE_BYTES = 4096
"""Large leaves of one slot begin at a multiple of this."""

SIZES_KEPT = 16
"""Free buffers are kept for so many sizes; batches of varying length (bucketed text) have a few."""

Shape = tuple[int, ...]


class Layout:
    """How the leaves of a batch lie in staging memory, worked out once for all batches of a plan.

    Args:
        leaves: shape and dtype of each.

    Attributes:
        leaves: shape, dtype, bytes, and the offset in the slab of small leaves; None for a leaf with memory of its own.
        slab_bytes: of all small leaves together.
        offsets: of every leaf where the whole batch is one piece of memory, the slab first.
        slot_bytes: of that piece.
        nbytes: of the leaves alone.
        alike: how many leaves with memory of their own there are of each size in bytes.
    """

    __slots__ = ("alike", "leaves", "nbytes", "offsets", "slab_bytes", "slot_bytes")

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
        self.alike = Counter(size for _, _, size, offset in self.leaves if offset is None)
        self.offsets: list[int] = []
        end = self.slab_bytes
        for _, _, size, offset in self.leaves:
            self.offsets.append(end if offset is None else offset)
            if offset is None:
                end += -(-size // PAGE_BYTES) * PAGE_BYTES
        self.slot_bytes = end


class StagingStats(msgspec.Struct, frozen=True):
    """Attributes:
    made: buffers allocated so far. Steady while batches go on: the ring is reused.
    reused: buffers that were used again.
    free_bytes: held for reuse now.
    """

    made: int
    reused: int
    free_bytes: int


class Staging(Protocol):
    """Memory for batches. Thread safety: `lease` may be called from any thread."""

    def lease(self, layout: Layout) -> Memory:
        """Memory for one batch: a writable, aligned view a leaf. Never waits: what bounds it is the queue's reservation."""
        ...

    def stats(self) -> StagingStats: ...


class _Views:
    """Memory that nobody writes again."""

    __slots__ = ("slab", "views")

    def __init__(self, views: tuple[AnyArray, ...], slab: AnyArray | None) -> None:
        self.views = views
        self.slab = slab

    def release(self) -> None:
        self.views = ()
        self.slab = None


class _Loan(weakref.ref[Any]):
    """Watches a buffer that was given away; brings its memory back."""

    __slots__ = ("alike", "memory")
    memory: AnyArray
    alike: int  # leaves of this size in its batch


def aligned_bytes(nbytes: int) -> AnyArray:
    """Fresh memory that begins at a multiple of `ALIGNMENT`."""
    raw, start = aligned_slab(nbytes)
    return raw[start : start + nbytes]


def aligned_slab(nbytes: int) -> tuple[AnyArray, int]:
    """Fresh memory, and where in it `nbytes` begin at a multiple of `ALIGNMENT`."""
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    return raw, -raw.__array_interface__["data"][0] % ALIGNMENT


def nbytes_of(shape: Shape, dtype: np.dtype[Any]) -> int:
    return math.prod(shape) * dtype.itemsize


def views_of(memory: AnyArray, layout: Layout) -> tuple[AnyArray, ...]:
    """The leaves of a batch in one piece of memory of `layout.slot_bytes`."""
    return tuple([np.ndarray(leaf[0], leaf[1], memory, offset) for leaf, offset in zip(layout.leaves, layout.offsets, strict=True)])


class AliasedStaging:
    """The ring for the CPU backend: memory goes away with the batch and comes back when its last reference has died.

    Args:
        capacity: batches for which free buffers are kept; beyond it returned memory is freed.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._lock = threading.Lock()  # guards _free, _lent and the counts; never taken by the weak references' callbacks
        self._free: dict[int, list[AnyArray]] = {}
        self._lent: dict[int, _Loan] = {}  # by id: a weak reference hashes as what it refers to, and a buffer does not
        # A callback may run in any thread and inside any allocation, so all it does is this reentrant put.
        self._back: queue.SimpleQueue[_Loan] = queue.SimpleQueue()
        self._made = 0
        self._reused = 0

    def lease(self, layout: Layout) -> Memory:
        slab, start = aligned_slab(layout.slab_bytes)
        views = [
            self._large(shape, dtype, size, layout.alike[size]) if offset is None else np.ndarray(shape, dtype, slab, start + offset)
            for shape, dtype, size, offset in layout.leaves
        ]
        return _Views(tuple(views), slab[start : start + layout.slab_bytes])

    def _large(self, shape: Shape, dtype: np.dtype[Any], size: int, alike: int) -> AnyArray:
        with self._lock:
            self._collect()
            free = self._free.get(size)
            memory = free.pop() if free else None
            if memory is None:
                self._made += 1
            else:
                self._reused += 1
        if memory is None:
            memory = aligned_bytes(size)
        buffer = (ctypes.c_uint8 * size).from_buffer(memory)  # pyright: ignore[reportArgumentType] - an ndarray exports a buffer
        loan = _Loan(buffer, self._back.put)
        loan.memory = memory
        loan.alike = alike
        with self._lock:
            self._lent[id(loan)] = loan
        return np.ndarray(shape, dtype, buffer)  # pyright: ignore[reportCallIssue, reportArgumentType] - a ctypes array exports a buffer

    def _collect(self) -> None:
        """Take back what died since the last call. The caller holds the lock."""
        while True:
            try:
                loan = self._back.get_nowait()
            except queue.Empty:
                return
            self._lent.pop(id(loan), None)
            size = loan.memory.nbytes
            free = self._free.pop(size, [])
            if len(free) < self._capacity * loan.alike:
                free.append(loan.memory)
            self._free[size] = free  # last in the dict: most recently used
            while len(self._free) > SIZES_KEPT:
                del self._free[next(iter(self._free))]

    def stats(self) -> StagingStats:
        with self._lock:
            self._collect()
            return StagingStats(self._made, self._reused, sum(size * len(free) for size, free in self._free.items()))


class FreshStaging:
    """New memory for every batch: right on every backend, and what is left where nothing better is known."""

    def __init__(self) -> None:
        self._made = 0

    def lease(self, layout: Layout) -> Memory:
        self._made += 1
        memory = aligned_bytes(layout.slot_bytes)
        return _Views(views_of(memory, layout), memory[: layout.slab_bytes])

    def stats(self) -> StagingStats:
        return StagingStats(self._made, 0, 0)
