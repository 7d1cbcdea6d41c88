"""The staging ring of the CPU backend.

The CPU backend of JAX aliases aligned NumPy memory for as long as any array over it lives, and copies other memory only after the call
has returned. So a batch keeps its staging memory until its last reference dies; a weak reference to the buffer under the array
detects that, and the memory returns to the ring.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import weakref
from typing import Any

import numpy as np

from prefetchshard.base.memory import AnyArray, Memory
from prefetchshard.staging.layout import Layout, Shape, StagingStats, Views, aligned_bytes, aligned_slab

SIZES_KEPT = 16
"""The number of buffer sizes for which free buffers are kept; batches of varying length (bucketed text) have a few."""


class _Loan(weakref.ref[Any]):
    """A weak reference to a buffer on loan; holds the memory to reuse once the buffer dies."""

    __slots__ = ("memory", "same_size")
    memory: AnyArray
    same_size: int  # number of leaves of this size in its batch


class AliasedStaging:
    """The ring for the CPU backend: a batch keeps its memory until the last reference to it dies.

    Args:
        capacity: number of batches for which free buffers are kept; memory that returns beyond that is freed.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._lock = threading.Lock()  # guards _free, _lent and the counts; never taken by the weak references' callbacks
        self._free: dict[int, list[AnyArray]] = {}
        self._lent: dict[int, _Loan] = {}  # by id: a weak reference hashes like its referent, and a buffer is unhashable
        # A callback may run in any thread and inside any allocation, so it only calls `put`, which is reentrant.
        self._back: queue.SimpleQueue[_Loan] = queue.SimpleQueue()
        self._made = 0
        self._reused = 0

    def lease(self, layout: Layout) -> Memory:
        slab, start = aligned_slab(layout.slab_bytes)
        views = [
            self._large(shape, dtype, size, layout) if offset is None else np.ndarray(shape, dtype, slab, start + offset)
            for shape, dtype, size, offset in layout.leaves
        ]
        return Views(tuple(views), slab[start : start + layout.slab_bytes])

    def _large(self, shape: Shape, dtype: np.dtype[Any], size: int, layout: Layout) -> AnyArray:
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
        loan.same_size = layout.count_by_size[size]
        with self._lock:
            self._lent[id(loan)] = loan
        return np.ndarray(shape, dtype, buffer)  # pyright: ignore[reportCallIssue, reportArgumentType] - a ctypes array exports a buffer

    def _collect(self) -> None:
        """Take back the memory of buffers that died since the last call. The caller holds the lock."""
        while True:
            try:
                loan = self._back.get_nowait()
            except queue.Empty:
                return
            self._lent.pop(id(loan), None)
            size = loan.memory.nbytes
            free = self._free.pop(size, [])
            if len(free) < self._capacity * loan.same_size:
                free.append(loan.memory)
            self._free[size] = free  # last in the dict: most recently used
            while len(self._free) > SIZES_KEPT:
                del self._free[next(iter(self._free))]

    def stats(self) -> StagingStats:
        with self._lock:
            self._collect()
            return StagingStats(self._made, self._reused, sum(size * len(free) for size, free in self._free.items()))
