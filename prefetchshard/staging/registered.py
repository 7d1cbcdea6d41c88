"""Page-locked memory made by CUDA's driver, which locks ordinary memory in place.

JAX's own page-locked memory comes from an arena that grows in ever larger pieces: a slot of 38 MB takes 40 ms, and now and then 700,
during which no transfer begins. The driver locks as much in 2 ms, beside the 8 that the system needs to give out the memory (one H200).
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import numpy as np

from prefetchshard.base.memory import AnyArray

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


class _Locked:
    """Locked memory with NumPy's array interface. It is unlocked, and then freed, with the last view over it."""

    def __init__(self, driver: CudaDriver, nbytes: int) -> None:
        self._driver = driver
        self._memory = mmap.mmap(-1, nbytes)
        self._address = 0
        view = np.frombuffer(self._memory, np.uint8)
        driver.lock(view.__array_interface__["data"][0], nbytes)
        self.__array_interface__ = view.__array_interface__
        self._address = view.__array_interface__["data"][0]

    def __del__(self) -> None:
        if self._address:
            try:
                self._driver.unlock(self._address)
            except DriverError:
                _never_freed.append(self._memory)


def locked_in_place(driver: CudaDriver, nbytes: int) -> AnyArray:
    """New page-locked memory.

    Raises:
        MemoryError: there is not so much memory, or the driver locks no more.
    """
    try:
        return np.asarray(_Locked(driver, nbytes))
    except (OSError, DriverError) as error:
        raise MemoryError(f"{nbytes:,} bytes of page-locked memory: {error}") from error
