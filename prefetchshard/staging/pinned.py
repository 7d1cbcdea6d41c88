"""The staging ring for accelerators: slots in page-locked (pinned) host memory, which the devices read directly.

A transfer from pageable memory goes through a staging copy in the driver and reaches a tenth of the bus bandwidth. JAX can allocate
page-locked memory (`memory_kind="pinned_host"`). We write to it at its address, and `device_put` of a NumPy view over it reads what we
wrote. Allocating such memory takes from milliseconds to hundreds of milliseconds, so slots are allocated once, beside the first batches,
and each is reused as soon as the transfer out of it is done.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from jax.sharding import SingleDeviceSharding

from prefetchshard.base.jax_types import block_until_ready, device_put
from prefetchshard.base.memory import AnyArray, Memory
from prefetchshard.base.waiters import Waiters
from prefetchshard.staging.aliased import AliasedStaging
from prefetchshard.staging.layout import FreshStaging, Layout, Staging, StagingStats, aligned_bytes, views_of

_log = logging.getLogger(__name__)

PROBE_BYTES = 16 << 20
LEAST_GAIN = 1.3
"""Page-locked memory is used if it makes `device_put` faster by this factor; measured: 4 and more if the runtime reads it directly."""

ROUND_BYTES = 1 << 16
"""Slot sizes are multiples of this, so that batches of varying length can share slots."""


_fast: dict[Any, bool] = {}  # what `puts_are_fast` found, by device


class _PageLocked:
    """Page-locked memory with NumPy's array interface; a NumPy view over it keeps the JAX array that owns it alive."""

    def __init__(self, device: Any, nbytes: int) -> None:
        where = SingleDeviceSharding(device, memory_kind="pinned_host")
        self._owner = block_until_ready(device_put(np.zeros(nbytes, np.uint8), where))
        address = self._owner.addressable_shards[0].data.unsafe_buffer_pointer()
        self.__array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}


def page_locked(device: Any, nbytes: int) -> AnyArray:
    """New page-locked memory that the device reads directly."""
    return np.asarray(_PageLocked(device, nbytes))


class _Slot:
    """Memory for a batch, with cached views of its last layout, as most batches have the same shape.

    Attributes:
        memory: its bytes.
        is_page_locked: as the ring's own slots are.
    """

    __slots__ = ("_layout", "_views", "is_page_locked", "memory")

    def __init__(self, memory: AnyArray, *, is_page_locked: bool) -> None:
        self.memory = memory
        self.is_page_locked = is_page_locked
        self._layout: Layout | None = None
        self._views: tuple[AnyArray, ...] = ()

    def views(self, layout: Layout) -> tuple[AnyArray, ...]:
        if self._layout is not layout:
            self._layout = layout
            self._views = views_of(self.memory, layout)
        return self._views


class _Lease:
    """A slot on loan. Its finaliser returns it to the ring if it was not released (a run that was closed)."""

    __slots__ = ("_back", "_slot", "slab", "views")

    def __init__(self, slot: _Slot, layout: Layout, back: queue.SimpleQueue[_Slot]) -> None:
        self._slot: _Slot | None = slot
        self._back = back
        self.views = slot.views(layout)
        self.slab: AnyArray | None = slot.memory[: layout.slab_bytes] if layout.slab_bytes else None

    def release(self) -> None:
        slot, self._slot = self._slot, None
        self.views = ()
        self.slab = None
        if slot is not None:
            self._back.put(slot)

    def __del__(self) -> None:
        self.release()


class PinnedStaging:
    """A ring of page-locked slots, which are made beside the first batches.

    Making one takes long (40 ms for 38 MB, which are read in 5), and first it has to be found out whether such memory is of any use
    here. Until its slot is there a batch gets ordinary memory, from which its transfer takes longer.

    Args:
        device: one of the devices that read from it.
        capacity: number of slots.

    Attributes:
        capacity: as above; may be lowered at any time.
    """

    def __init__(self, device: Any, capacity: int) -> None:
        self.capacity = capacity
        self._device = device
        self._is_of_use = _fast.get(device)
        self._lock = threading.Lock()  # guards _free, _wanted and the counts; never taken by a slot's finaliser
        self._free: list[_Slot] = []  # least recently used first
        self._back: queue.SimpleQueue[_Slot] = queue.SimpleQueue()
        self._wanted = 0  # bytes of the largest slot that was not there; 0: none
        self._being_made = 0
        self._alive = 0  # page-locked slots, those being made among them
        self._ordinary = 0  # on loan
        self._made = 0
        self._reused = 0
        self._changed = Waiters()

    def lease(self, layout: Layout) -> Memory:
        need = -(-layout.slot_bytes // ROUND_BYTES) * ROUND_BYTES
        while True:
            with self._lock:
                slot = self._take_free(need)
                room = self._make_room()
                if slot is not None or room >= 1 or not self._being_made:
                    # With the last place all others are taken, so that nobody waits for this batch; and else none would ever be free
                    is_made_here = slot is None and room <= 1 and self._is_of_use is True
                    self._count(slot, need, is_made_here=is_made_here)
                    break
            self._changed.wait(lambda: not self._being_made)
        if is_made_here:
            slot = self._new_slot(need)
        elif slot is None:
            slot = _Slot(aligned_bytes(need), is_page_locked=False)
            self._changed.wake()
        return _Lease(slot, layout, self._back)

    def _take_free(self, need: int) -> _Slot | None:
        """The caller holds the lock, here and in the next ones."""
        self._collect()
        # Prefer the slot released last: it may still be in the processor's cache.
        slot = next((one for one in reversed(self._free) if need <= one.memory.nbytes <= 2 * need), None)
        if slot is not None:
            self._free.remove(slot)
        return slot

    def _make_room(self) -> int:
        """The places that are left; where there are none, as the batches changed in size, the oldest free slots go."""
        while self._free and self._alive + self._ordinary >= self.capacity:
            self._free.pop(0)
            self._alive -= 1
        return self.capacity - self._alive - self._ordinary

    def _count(self, slot: _Slot | None, need: int, *, is_made_here: bool) -> None:
        self._made += slot is None
        self._reused += slot is not None
        if is_made_here:
            self._alive += 1
            self._being_made += 1
        elif slot is None:
            self._ordinary += 1
            self._wanted = max(self._wanted, need)

    def _collect(self) -> None:
        """Take back the slots released since the last call."""
        while True:
            try:
                slot = self._back.get_nowait()
            except queue.Empty:
                return
            if slot.is_page_locked:
                self._free.append(slot)
            else:
                self._ordinary -= 1

    def _new_slot(self, need: int) -> _Slot:
        is_made = False
        try:
            memory = page_locked(self._device, need)
            is_made = True
        finally:
            with self._lock:
                self._being_made -= 1
                self._alive -= not is_made
            self._changed.wake()
        return _Slot(memory, is_page_locked=True)

    # -- beside the first batches

    def make_slots(self, is_over: Callable[[], bool]) -> None:
        """The body of a thread: make the slots that are asked for, until `is_over()`; who makes that true calls `wake`."""
        if self._is_of_use is None:
            self._is_of_use = puts_are_fast(self._device)
        while self._is_of_use and not is_over():
            with self._lock:
                need, self._wanted = self._wanted, 0
                self._collect()
                if need and self._make_room() < 1:
                    need = 0  # who leases next makes it, or asks again
                if need:
                    self._alive += 1
                    self._being_made += 1
            if need:
                slot = self._new_slot(need)
                with self._lock:
                    self._made += 1
                self._back.put(slot)
                del slot
            else:
                self._changed.wait(lambda: bool(self._wanted) or is_over())

    def wake(self) -> None:
        """Let the thread look again whether it is over. Takes no lock."""
        self._changed.wake()

    def stats(self) -> StagingStats:
        with self._lock:
            self._collect()
            return StagingStats(self._made, self._reused, sum(slot.memory.nbytes for slot in self._free))


def puts_are_fast(device: Any) -> bool:
    """Whether this runtime reads page-locked memory directly; measured once per process, not derived from a version."""
    if device not in _fast:
        try:
            _fast[device] = _measure(device)
        except Exception as error:  # noqa: BLE001 - a backend without such memory may raise anything
            _log.info("no page-locked staging on %s: %s", device, error)
            _fast[device] = False
    return _fast[device]


def _measure(device: Any) -> bool:
    target = SingleDeviceSharding(device)
    locked, plain = page_locked(device, PROBE_BYTES), np.ones(PROBE_BYTES, np.uint8)
    locked[:] = 1
    if not bool((np.asarray(device_put(locked, target)) == 1).all()):
        _log.info("no page-locked staging on %s: a transfer does not read what was written into such memory", device)
        return False
    times = {True: 1e9, False: 1e9}
    for _ in range(4):
        for is_locked, memory in ((True, locked), (False, plain)):
            began = time.perf_counter()
            block_until_ready(device_put(memory, target))
            times[is_locked] = min(times[is_locked], time.perf_counter() - began)
    fast = times[False] > LEAST_GAIN * times[True]
    _log.info(
        "page-locked staging on %s: a put of %d MiB takes %.2f ms from page-locked memory, %.2f ms from other: %s",
        device,
        PROBE_BYTES >> 20,
        1e3 * times[True],
        1e3 * times[False],
        "used" if fast else "not used",
    )
    return fast


def choose_staging(device: Any, capacity: int) -> Staging:
    """The staging ring for batches that go to this kind of device."""
    if device.platform == "cpu":
        return AliasedStaging(capacity)
    return FreshStaging() if _fast.get(device) is False else PinnedStaging(device, capacity)
