"""Memory that CUDA's driver locks, with a driver that only takes notes: what is locked is unlocked before it is freed, or kept."""

from __future__ import annotations

import functools
import gc
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from prefetchshard.base.position import EpochEnd
from prefetchshard.planning.host_batch import HostBatch
from prefetchshard.reading.open_batch import OpenBatch
from prefetchshard.staging import pinned, registered
from prefetchshard.staging.layout import FreshStaging, Layout
from prefetchshard.staging.pinned import PinnedStaging, choose_staging, explain_staging
from prefetchshard.staging.registered import CudaDriver, DriverError, Lockable
from support import Thread

PAGE = 1 << 16
LAYOUT = Layout([((64, 1024), np.dtype(np.float32)), ((64,), np.dtype(np.int32))])
SLOT = -(-LAYOUT.slot_bytes // pinned.ROUND_BYTES) * pinned.ROUND_BYTES


class Driver(CudaDriver):
    """Notes which addresses are locked."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.calls: list[str] = []
        self.refuses: set[str] = set()

    def lock(self, address: int, nbytes: int) -> None:
        self._note("lock")
        assert address not in self.locked
        self.locked[address] = nbytes

    def unlock(self, address: int) -> None:
        self._note("unlock")
        del self.locked[address]

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if call in self.refuses:
            raise DriverError(f"{call} failed with error 2")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    monkeypatch.setattr(registered, "_kept", registered._Kept())
    monkeypatch.setattr(registered, "_never_freed", [])
    yield Driver()
    gc.collect()


class Device:
    """A GPU, as far as its ring asks."""

    platform = "gpu"
    local_hardware_id = 0


DEVICE: Any = Device()


@pytest.fixture
def ring(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> PinnedStaging:
    """A ring over memory that this driver locks."""
    monkeypatch.setattr(pinned, "_drivers", {DEVICE: driver})
    monkeypatch.setattr(pinned, "_fast", {DEVICE: True})
    staging = choose_staging(DEVICE, 3)
    assert isinstance(staging, PinnedStaging)
    return staging


# -- memory


def test_memory_is_locked_once(driver: Driver) -> None:
    memory = Lockable(driver, PAGE)
    memory.array[:] = 7
    assert not driver.calls
    memory.lock()
    memory.lock()
    assert driver.calls == ["lock"]
    assert driver.locked == {memory.array.ctypes.data: PAGE}
    assert memory.array.ctypes.data % 4096 == 0
    assert (memory.array == 7).all()


def test_it_stays_locked_while_a_view_lives(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registered, "KEPT_BYTES", 0)
    memory = Lockable(driver, PAGE)
    memory.lock()
    view = memory.array[100:200].view(np.int32)
    del memory
    gc.collect()
    assert driver.calls == ["lock"]
    view[:] = 3
    del view
    gc.collect()
    assert driver.calls == ["lock", "unlock"]
    assert not driver.locked


def test_what_nobody_uses_any_more_is_used_again(driver: Driver) -> None:
    first = Lockable(driver, PAGE)
    first.lock()
    address = first.array.ctypes.data
    del first
    gc.collect()
    other_size, other_driver = Lockable(driver, 2 * PAGE), Lockable(Driver(), PAGE)
    assert address not in (other_size.array.ctypes.data, other_driver.array.ctypes.data)
    again = Lockable(driver, PAGE)
    assert again.array.ctypes.data == address
    again.lock()
    assert driver.calls == ["lock"]
    more = Lockable(driver, PAGE)
    assert more.array.ctypes.data != address
    del again
    gc.collect()
    assert Lockable(driver, PAGE).array.ctypes.data == address


def test_so_much_is_kept_and_no_more(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registered, "KEPT_BYTES", 3 * PAGE)
    memories = [Lockable(driver, PAGE) for _ in range(5)]
    for memory in memories:
        memory.lock()
    addresses = [memory.array.ctypes.data for memory in memories]
    del memory
    while memories:
        del memories[0]
    gc.collect()
    assert driver.calls == ["lock"] * 5 + ["unlock"] * 2
    assert list(driver.locked) == addresses[2:]


def test_what_was_never_locked_is_just_freed(driver: Driver) -> None:
    for _ in range(3):
        Lockable(driver, PAGE)
    gc.collect()
    assert not driver.calls
    assert registered._kept.take(driver, PAGE) is None


def test_where_the_driver_refuses_it_stays_ordinary_memory(driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
    driver.refuses.add("lock")
    memory = Lockable(driver, PAGE)
    memory.lock()
    memory.lock()
    memory.array[:] = 1
    assert driver.calls == ["lock"]
    assert "stays ordinary memory" in caplog.text
    del memory
    gc.collect()
    assert driver.calls == ["lock"]


def test_what_cannot_be_unlocked_is_never_freed(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the driver would take whatever comes to lie there for memory that it locked."""
    monkeypatch.setattr(registered, "KEPT_BYTES", 0)
    driver.refuses.add("unlock")
    memory = Lockable(driver, PAGE)
    memory.lock()
    del memory
    gc.collect()
    assert driver.calls == ["lock", "unlock"]
    assert len(registered._never_freed) == 1


def test_too_much_memory_is_a_memory_error(driver: Driver) -> None:
    with pytest.raises(MemoryError, match=f"no {1 << 60:,} bytes"):
        Lockable(driver, 1 << 60)


def test_a_finaliser_waits_for_no_lock(driver: Driver) -> None:
    """It may run in the thread that holds the lock."""
    memory = Lockable(driver, PAGE)
    memory.lock()
    with registered._kept._lock:
        del memory
        gc.collect()
    assert registered._kept.take(driver, PAGE) is not None


def test_many_threads_take_and_drop(driver: Driver) -> None:
    def use(seed: int) -> None:
        for size in np.random.default_rng(seed).integers(1, 4, 100).tolist():
            memory = Lockable(driver, size * PAGE)
            memory.array[:] = seed
            memory.lock()
            assert (memory.array == seed).all()
            assert memory.array.ctypes.data in driver.locked

    for thread in [Thread(functools.partial(use, seed)) for seed in range(4)]:
        thread.returned()
    gc.collect()
    assert driver.calls.count("lock") <= 4 * 2 * 3  # each thread has two at a time, of three sizes
    assert "unlock" not in driver.calls


# -- the ring


def test_slots_are_locked_when_their_first_batch_is_written(ring: PinnedStaging, driver: Driver) -> None:
    first, second = ring.lease(LAYOUT), ring.lease(LAYOUT)
    first.views[0][:] = 1
    assert not driver.calls
    first.lock()
    first.lock()
    assert driver.calls == ["lock"]
    first.release()
    first.lock()  # of a batch that was dropped meanwhile
    second.release()
    again = ring.lease(LAYOUT)
    again.lock()
    assert driver.calls == ["lock", "lock"]
    assert ring.stats().made == 2


def test_the_slots_of_a_ring_are_the_next_ones(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "_drivers", {DEVICE: driver})
    monkeypatch.setattr(pinned, "_fast", {DEVICE: True})
    for _ in range(3):
        staging = choose_staging(DEVICE, 3)
        leases = [staging.lease(LAYOUT) for _ in range(3)]
        for lease in leases:
            lease.views[1][:] = 5
            lease.lock()
            assert all(view.ctypes.data % 64 == 0 for view in lease.views)
        del staging, leases, lease
        gc.collect()
    assert driver.calls == ["lock"] * 3
    assert set(driver.locked.values()) == {SLOT}


def test_a_batch_is_locked_before_it_is_sent() -> None:
    order: list[str] = []

    class Memory:
        views = ()
        slab = None

        def lock(self) -> None:
            order.append("locked")

        def release(self) -> None:
            order.append("released")

    class Ticket:
        def send(self, host: HostBatch) -> None:
            order.append("sent")

    class Plan:
        rows = 8

    ticket: Any = Ticket()
    batch = OpenBatch(ticket, 0, 0, EpochEnd(None))
    plan: Any = Plan()
    batch.plan = plan
    batch.host.memory = Memory()
    batch.send()
    batch.send()
    assert order == ["locked", "sent"]


# -- which memory


def probed(monkeypatch: pytest.MonkeyPatch, driver: CudaDriver | None, fast: list[bool | Exception]) -> list[CudaDriver | None]:
    """With which driver each measurement was made, where they end so."""
    seen: list[CudaDriver | None] = []
    monkeypatch.setattr(pinned, "_drivers", {})
    monkeypatch.setattr(pinned, "_fast", {})
    monkeypatch.setattr(pinned, "_reasons", {})
    monkeypatch.setattr(pinned, "_driver_of", lambda device: driver)

    def measure(device: Any) -> bool:
        seen.append(pinned._drivers[device])
        found = fast[len(seen) - 1]
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(pinned, "_measure", measure)
    return seen


def test_the_driver_s_memory_is_used_where_it_is_fast(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = probed(monkeypatch, driver, [True])
    assert isinstance(choose_staging(DEVICE, 2), PinnedStaging)
    assert isinstance(choose_staging(DEVICE, 2), PinnedStaging)
    assert seen == [driver]


@pytest.mark.parametrize("why", [False, RuntimeError("no transfer")])
def test_else_jax_s_own_is_tried(why: Any, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = probed(monkeypatch, driver, [why, True])
    assert isinstance(choose_staging(DEVICE, 2), PinnedStaging)
    assert seen == [driver, None]
    assert pinned._drivers[DEVICE] is None


@pytest.mark.parametrize("why", [False, RuntimeError("no such memory")])
def test_and_else_ordinary_memory(why: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = probed(monkeypatch, None, [why])
    assert isinstance(choose_staging(DEVICE, 2), FreshStaging)
    assert seen == [None]


@pytest.mark.parametrize(
    ("fast", "memory", "reason"),
    [
        ([True], "memory that CUDA's driver locks", ""),
        ([False, True], "page-locked memory of JAX", ""),
        ([RuntimeError("bad"), True], "page-locked memory of JAX", "memory that CUDA's driver locks cannot be used: bad"),
        (
            [RuntimeError("bad"), ValueError("worse")],
            "new memory for each batch",
            "memory that CUDA's driver locks cannot be used: bad; page-locked memory of JAX cannot be used: worse",
        ),
    ],
)
def test_which_memory_it_is_and_why_can_be_asked(
    fast: list[bool | Exception], memory: str, reason: str, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    probed(monkeypatch, driver, fast)
    assert explain_staging(DEVICE) == (memory, reason)
    assert explain_staging(DEVICE) == (memory, reason)


def test_the_cpu_backend_needs_no_locked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cpu(Device):
        platform = "cpu"

    monkeypatch.setattr(pinned, "_fast", None)  # is not asked
    memory, reason = explain_staging(Cpu())
    assert memory == "aligned memory"
    assert "where it lies" in reason


def test_a_machine_without_the_driver(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    caplog.set_level(logging.INFO, "prefetchshard")
    monkeypatch.setattr(registered.ctypes, "CDLL", missing)
    assert pinned._driver_of(DEVICE) is None
    assert "JAX's own" in caplog.text
    assert "libcuda" in caplog.text


# -- the calls


class Library:
    """Stands for the driver's library: notes the calls, and answers what it is told to."""

    def __init__(self, answers: dict[str, int] | None = None, *, is_active: bool = True) -> None:
        self.answers = answers or {}
        self.calls: list[str] = []
        self._is_active = is_active

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if name == "cuDevicePrimaryCtxGetState":
                arguments[2]._obj.value = self._is_active
            return self.answers.get(name, 0)

        return call


def driver_over(library: Library, monkeypatch: pytest.MonkeyPatch) -> CudaDriver:
    monkeypatch.setattr(registered.ctypes, "CDLL", lambda name: library)
    return CudaDriver(DEVICE)


def test_each_call_is_made_in_the_context_of_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    driver = driver_over(library, monkeypatch)
    assert library.calls == ["cuDeviceGet", "cuDevicePrimaryCtxGetState", "cuDevicePrimaryCtxRetain"]
    library.calls.clear()
    driver.lock(4096, 4096)
    driver.unlock(4096)
    push, pop = "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2"
    assert library.calls == [push, "cuMemHostRegister_v2", pop, push, "cuMemHostUnregister", pop]


def test_the_context_is_left_where_a_call_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library({"cuMemHostRegister_v2": 2})
    driver = driver_over(library, monkeypatch)
    with pytest.raises(DriverError, match="cuMemHostRegister_v2 of CUDA's driver failed with error 2"):
        driver.lock(4096, 4096)
    assert library.calls[-1] == "cuCtxPopCurrent_v2"


@pytest.mark.parametrize("library", [Library(is_active=False), Library({"cuDeviceGet": 101})], ids=["another context", "no device"])
def test_a_driver_of_no_use(library: Library, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "prefetchshard")
    monkeypatch.setattr(registered.ctypes, "CDLL", lambda name: library)
    assert pinned._driver_of(DEVICE) is None
    assert "JAX's own" in caplog.text
    assert "cuDevicePrimaryCtxRetain" not in library.calls


def test_other_platforms_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registered.ctypes, "CDLL", lambda name: pytest.fail("loaded"))

    class Tpu(Device):
        platform = "tpu"

    assert pinned._driver_of(Tpu()) is None
