"""The staging ring for accelerators: slots in page-locked (pinned) host memory, which the devices read directly.

A transfer from pageable memory goes through a staging copy in the driver and reaches a tenth of the bus bandwidth. JAX can allocate
page-locked memory (`memory_kind="pinned_host"`). We write to it at its address, and `device_put` of a NumPy view over it reads what we
wrote. Where CUDA's driver is there it locks our own memory, which is faster to make (`registered.py`). Either takes from milliseconds to
hundreds of milliseconds, so slots are allocated once, and each is reused as soon as the transfer out of it is done.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from typing import Any

import numpy as np
from jax.sharding import SingleDeviceSharding

from prefetchshard.base.jax_types import block_until_ready, device_put
from prefetchshard.base.memory import AnyArray, Memory
from prefetchshard.staging.aliased import AliasedStaging
from prefetchshard.staging.layout import FreshStaging, Layout, Staging, StagingStats, views_of
from prefetchshard.staging.registered import CudaDriver, DriverError, Lockable

_log = logging.getLogger(__name__)

PROBE_BYTES = 8 << 20
LEAST_GAIN = 1.3
"""Page-locked memory is used if it makes `device_put` faster by this factor; measured: 4 and more if the runtime reads it directly."""

ROUND_BYTES = 1 << 16
"""Slot sizes are multiples of this, so that batches of varying length can share slots."""


_drivers: dict[Any, CudaDriver | None] = {}  # what locks memory, by device; None: JAX
_fast: dict[Any, bool] = {}  # what `puts_are_fast` found, by device
_reasons: dict[Any, list[str]] = {}  # and why, in words


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


def _driver_of(device: Any) -> CudaDriver | None:
    if device.platform == "gpu":
        try:
            return CudaDriver(device)
        except (OSError, AttributeError, TypeError, DriverError) as error:
            _note(device, f"page-locked memory is JAX's own: {error}")
    return None


def _memory_of(device: Any) -> str:
    return "page-locked memory of JAX" if _drivers.get(device) is None else "memory that CUDA's driver locks"


def _note(device: Any, reason: str) -> None:
    """For the log, and for who asks why."""
    _log.info("staging for %s: %s", device, reason)
    _reasons.setdefault(device, []).append(reason)


class _Slot:
    """Page-locked memory, with cached views of its last layout, as most batches have the same shape."""

    __slots__ = ("_layout", "_views", "lock", "memory")

    def __init__(self, device: Any, nbytes: int) -> None:
        driver = _drivers.get(device)
        if driver is None:
            self.memory = page_locked(device, nbytes)
            self.lock = _is_locked
        else:
            lockable = Lockable(driver, nbytes)
            self.memory = lockable.array
            self.lock = lockable.lock
        self._layout: Layout | None = None
        self._views: tuple[AnyArray, ...] = ()

    def views(self, layout: Layout) -> tuple[AnyArray, ...]:
        if self._layout is not layout:
            self._layout = layout
            self._views = views_of(self.memory, layout)
        return self._views


def _is_locked() -> None:
    pass


class _Lease:
    """A slot on loan. Its finaliser returns it to the ring if it was not released (a run that was closed)."""

    __slots__ = ("_back", "_slot", "slab", "views")

    def __init__(self, slot: _Slot, layout: Layout, back: queue.SimpleQueue[_Slot]) -> None:
        self._slot: _Slot | None = slot
        self._back = back
        self.views = slot.views(layout)
        self.slab: AnyArray | None = slot.memory[: layout.slab_bytes] if layout.slab_bytes else None

    def lock(self) -> None:
        if self._slot is not None:
            self._slot.lock()

    def release(self) -> None:
        slot, self._slot = self._slot, None
        self.views = ()
        self.slab = None
        if slot is not None:
            self._back.put(slot)

    def __del__(self) -> None:
        self.release()


class PinnedStaging:
    """A ring of page-locked slots.

    Args:
        device: one of the devices that read from it.
        capacity: number of slots.
    """

    def __init__(self, device: Any, capacity: int) -> None:
        self._device = device
        self._capacity = capacity
        self._lock = threading.Lock()  # guards _free and the counts; never taken by a slot's finaliser
        self._free: list[_Slot] = []  # least recently used first
        self._back: queue.SimpleQueue[_Slot] = queue.SimpleQueue()
        self._alive = 0
        self._made = 0
        self._reused = 0

    def lease(self, layout: Layout) -> Memory:
        need = -(-layout.slot_bytes // ROUND_BYTES) * ROUND_BYTES
        with self._lock:
            self._collect()
            # Prefer the slot released last: it may still be in the processor's cache.
            slot = next((one for one in reversed(self._free) if need <= one.memory.nbytes <= 2 * need), None)
            if slot is not None:
                self._free.remove(slot)
                self._reused += 1
            else:
                while self._free and self._alive >= self._capacity:  # the batches changed in size: free the oldest slot
                    self._free.pop(0)
                    self._alive -= 1
                self._alive += 1
                self._made += 1
        return _Lease(slot or _Slot(self._device, need), layout, self._back)

    def _collect(self) -> None:
        """Take back the slots released since the last call. The caller holds the lock."""
        while True:
            try:
                self._free.append(self._back.get_nowait())
            except queue.Empty:
                return

    def stats(self) -> StagingStats:
        with self._lock:
            self._collect()
            return StagingStats(self._made, self._reused, sum(slot.memory.nbytes for slot in self._free))


def puts_are_fast(device: Any) -> bool:
    """Whether this runtime reads page-locked memory directly; measured once per process, not derived from a version."""
    if device not in _fast:
        driver = _drivers[device] = _driver_of(device)
        fast = _is_fast(device)
        if driver is not None and not fast:
            _drivers[device] = None
            fast = _is_fast(device)
        _fast[device] = fast
    return _fast[device]


def _is_fast(device: Any) -> bool:
    try:
        return _measure(device)
    except Exception as error:  # noqa: BLE001 - a backend without such memory may raise anything
        _note(device, f"{_memory_of(device)} cannot be used: {error}")
        return False


def _measure(device: Any) -> bool:
    target = SingleDeviceSharding(device)
    slot, plain = _Slot(device, PROBE_BYTES), np.ones(PROBE_BYTES, np.uint8)
    locked = slot.memory
    locked[:] = 1
    slot.lock()
    if not bool((np.asarray(device_put(locked, target)) == 1).all()):
        _note(device, f"a transfer does not read what was written into {_memory_of(device)}")
        return False
    times = {True: 1e9, False: 1e9}
    for _ in range(4):
        for is_locked, memory in ((True, locked), (False, plain)):
            began = time.perf_counter()
            block_until_ready(device_put(memory, target))
            times[is_locked] = min(times[is_locked], time.perf_counter() - began)
    fast = times[False] > LEAST_GAIN * times[True]
    _note(
        device,
        f"a put of {PROBE_BYTES >> 20} MiB takes {1e3 * times[True]:.2f} ms from {_memory_of(device)}, "
        f"{1e3 * times[False]:.2f} ms from other: {'used' if fast else 'not used'}",
    )
    return fast


def choose_staging(device: Any, capacity: int) -> Staging:
    """The staging ring for batches that go to this kind of device."""
    if device.platform == "cpu":
        return AliasedStaging(capacity)
    return PinnedStaging(device, capacity) if puts_are_fast(device) else FreshStaging()


def explain_staging(device: Any) -> tuple[str, str]:
    """Which memory `choose_staging` takes for batches that go to this device, and why; both in words."""
    if device.platform == "cpu":
        return "aligned memory", "the CPU backend uses it where it lies, so that nothing is transferred"
    fast = puts_are_fast(device)
    kind = _memory_of(device) if fast else "new memory for each batch"
    return kind, "; ".join(_reasons.get(device, ()))
