"""Page-locked memory made by CUDA's driver, which locks ordinary memory in place.

JAX's own page-locked memory comes from an arena that grows in ever larger pieces: a slot of 38 MB takes 40 ms, and now and then 700,
during which no transfer begins. The driver locks as much in 2 ms once it was written to; else in 17, and one thread at a time (one H200).
So memory is locked when its first batch is written.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import weakref
from typing import Any

import numpy as np

from prefetchshard.base.memory import AnyArray

_log = logging.getLogger(__name__)

_FOR_ALL_CONTEXTS = 1
_never_freed: list[mmap.mmap] = []  # what could not be unlocked: another use of its addresses would be taken for locked memory


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
        array: its bytes. Once nothing refers to them any more the memory is unlocked, then freed.

    Raises:
        MemoryError: there is not so much memory.
    """

    def __init__(self, driver: CudaDriver, nbytes: int) -> None:
        self._driver: CudaDriver | None = driver
        try:
            self._memory = mmap.mmap(-1, nbytes)
        except OSError as error:
            raise MemoryError(f"no {nbytes:,} bytes of memory: {error}") from error
        self._owner = _Owner(self._memory)
        self.array: AnyArray = np.asarray(self._owner)

    def lock(self) -> None:
        """Lock it, unless that was done. Where the driver refuses it stays ordinary memory, from which transfers take longer."""
        driver, self._driver = self._driver, None
        if driver is None:
            return
        address = self.array.__array_interface__["data"][0]
        try:
            driver.lock(address, self.array.nbytes)
        except DriverError as error:
            _log.warning("a slot of %s bytes stays ordinary memory, from which transfers take longer: %s", f"{self.array.nbytes:,}", error)
            return
        weakref.finalize(self._owner, _unlock, driver, self._memory, address).atexit = False


class _Owner:
    """Has NumPy's array interface, so that every view over the memory keeps it alive."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self.__array_interface__ = np.frombuffer(memory, np.uint8).__array_interface__


def _unlock(driver: CudaDriver, memory: mmap.mmap, address: int) -> None:
    try:
        driver.unlock(address)
    except DriverError:
        _never_freed.append(memory)
