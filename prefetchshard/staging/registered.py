"""Page-locked memory made by CUDA's driver, which locks ordinary memory in place.

JAX's own page-locked memory comes from an arena that grows in ever larger pieces: a slot of 38 MB takes 40 ms, and now and then 700,
during which no transfer begins. The driver locks as much in 2 ms once it was written to; else in 17, and one thread at a time (one H200).
So memory is locked when its first batch is written.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import queue
import threading
import weakref
from typing import Any

import numpy as np

from prefetchshard.base.memory import AnyArray

_log = logging.getLogger(__name__)

_FOR_ALL_CONTEXTS = 1
_never_freed: list[mmap.mmap] = []  # what could not be unlocked: another use of its addresses would be taken for locked memory

KEPT_BYTES = 1 << 30
"""So much memory that nobody uses any more stays locked, for the next loader of the process: its first batch comes in 20 ms rather than 80."""


class DriverError(RuntimeError):
    """CUDA's driver cannot be used here, or refused a call; the text says which."""


class CudaDriver:
    """The few calls of CUDA's driver that lock memory.

    Args:
        device: a GPU that JAX has begun to use.

    Raises:
        OSError: there is no such driver.
        DriverError: as above.

    Thread safety: any thread may call any method.
    """

    def __init__(self, device: Any) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        number, handle = ctypes.c_int(), ctypes.c_int(device.local_hardware_id)
        self._call("cuDeviceGet", ctypes.byref(number), handle)
        flags, is_active = ctypes.c_uint(), ctypes.c_int()
        self._call("cuDevicePrimaryCtxGetState", number, ctypes.byref(flags), ctypes.byref(is_active))
        if not is_active.value:
            raise DriverError(f"JAX uses another context than the primary one of GPU {device.local_hardware_id}")
        self._context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), number)

    def lock(self, address: int, nbytes: int) -> None:
        """Lock memory in place.

        Raises:
            DriverError: the driver refused.
        """
        self._call_in_context("cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_uint(_FOR_ALL_CONTEXTS))

    def unlock(self, address: int) -> None:
        """Undo `lock`.

        Raises:
            DriverError: the driver refused.
        """
        self._call_in_context("cuMemHostUnregister", ctypes.c_void_p(address))

    def _call_in_context(self, name: str, *arguments: Any) -> None:
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            self._call(name, *arguments)
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _call(self, name: str, *arguments: Any) -> None:
        result = getattr(self._library, name)(*arguments)
        if result:
            raise DriverError(f"{name} of CUDA's driver failed with error {result}")


class Lockable:
    """Ordinary memory, aligned to pages, that can be locked.

    Args:
        driver: locks it.
        nbytes: its size.

    Attributes:
        array: its bytes. Once nothing refers to them any more the memory is kept for another one of its size, or unlocked and freed.

    Raises:
        MemoryError: there is not so much memory.
    """

    def __init__(self, driver: CudaDriver, nbytes: int) -> None:
        self._driver = driver
        kept = _kept.take(driver, nbytes)
        self._is_locked = kept is not None
        self._owner = _Owner(_map(nbytes) if kept is None else kept)
        self.array: AnyArray = np.asarray(self._owner)
        if self._is_locked:
            self._keep_afterwards()

    def lock(self) -> None:
        """Lock it, unless that was done. Where the driver refuses it stays ordinary memory, from which transfers take longer."""
        if self._is_locked:
            return
        self._is_locked = True
        try:
            self._driver.lock(_address_of(self._owner.memory), self.array.nbytes)
        except DriverError as error:
            _log.warning("a slot of %s bytes stays ordinary memory, from which transfers take longer: %s", f"{self.array.nbytes:,}", error)
        else:
            self._keep_afterwards()

    def _keep_afterwards(self) -> None:
        weakref.finalize(self._owner, _kept.put, self._driver, self._owner.memory).atexit = False


class _Owner:
    """Has NumPy's array interface, so that every view over the memory keeps it alive."""

    def __init__(self, memory: mmap.mmap) -> None:
        self.memory = memory
        self.__array_interface__ = np.frombuffer(memory, np.uint8).__array_interface__


class _Kept:
    """Locked memory that nobody uses. `put` is called by finalisers, inside any allocation, so it waits for no lock."""

    def __init__(self) -> None:
        self._unused: queue.SimpleQueue[tuple[CudaDriver, mmap.mmap]] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards _free
        self._free: list[tuple[CudaDriver, mmap.mmap]] = []  # kept longest first

    def put(self, driver: CudaDriver, memory: mmap.mmap) -> None:
        """Keep it; unlock and free what was kept longest where that makes too much."""
        self._unused.put((driver, memory))
        if self._lock.acquire(blocking=False):  # else who holds it, which may be this thread, does it
            try:
                self._collect()
            finally:
                self._lock.release()

    def take(self, driver: CudaDriver, nbytes: int) -> mmap.mmap | None:
        """Memory of just this size, if there is some."""
        with self._lock:
            self._collect()
            for i, (locked_by, memory) in enumerate(self._free):
                if locked_by is driver and len(memory) == nbytes:
                    del self._free[i]
                    return memory
        return None

    def _collect(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._free.append(self._unused.get_nowait())
        while sum(len(memory) for _, memory in self._free) > KEPT_BYTES:
            driver, memory = self._free.pop(0)
            try:
                driver.unlock(_address_of(memory))
            except DriverError:
                _never_freed.append(memory)


_kept = _Kept()


def _map(nbytes: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, nbytes)
    except OSError as error:
        raise MemoryError(f"no {nbytes:,} bytes of memory: {error}") from error


def _address_of(memory: mmap.mmap) -> int:
    return np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
