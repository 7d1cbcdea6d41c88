"""`python -m prefetchshard doctor`: every figure by a clock that a test moves, what is said, and what is said where something fails."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np
import pytest

import prefetchshard as ps
from prefetchshard.app import cli, doctor
from prefetchshard.app.doctor import examination, facts, measurements
from prefetchshard.app.doctor.advice import NOTHING, advice, suggestions
from prefetchshard.app.doctor.examination import examine
from prefetchshard.app.doctor.facts import Cpus, Devices, Failed, HostMemory, Interpreter, OptionalPackage, Versions, Ways, attempt, known
from prefetchshard.app.doctor.measurements import (
    Bus,
    CopyRate,
    Puts,
    SmallPut,
    bounded,
    measure_bus,
    measure_copies,
    measure_small_puts,
    summary,
    thread_counts,
)
from prefetchshard.app.doctor.report import Findings, Report
from prefetchshard.app.doctor.text import COLUMNS, text_of
from prefetchshard.base.cgroups import MemoryLimit
from prefetchshard.sharding.rules import resolve
from prefetchshard.staging.layout import FreshStaging, Layout, Views
from prefetchshard.streaming.copies import Copies, Finding
from prefetchshard.testing import ManualClock
from support import HANG_SECONDS, run_python

MIB = 1 << 20
NO_STREAMING = Finding(None, False, "llvmlite is not installed")


def fail(*_: object, **__: object) -> Any:
    raise RuntimeError("the driver\n  is   too old")


# ---------------------------------------------------------------------------------------------------- transfers, by the clock


class Device:
    """A GPU, as far as a put of a fake asks."""

    platform = "gpu"

    def __init__(self, number: int) -> None:
        self.number = number

    def __str__(self) -> str:
        return f"cuda:{self.number}"


class Memory(Views):
    """Notes what is done with it, in its staging."""

    def __init__(self, staging: Staging, memory: Any) -> None:
        super().__init__(memory.views, memory.slab)
        self._calls = staging.calls

    def lock(self) -> None:
        self._calls.append("lock")

    def release(self) -> None:
        super().release()
        self._calls.append("release")


class Staging(FreshStaging):
    """New memory, as real as that of the loader."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def lease(self, layout: Layout) -> Memory:
        return Memory(self, super().lease(layout))


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, clock: ManualClock) -> list[Device]:
    """Two of them: a put takes 8 ms (16 from plain memory) to the first, twice as long to the second, 10 ms to both at once.

    Nothing is put: the dispatch takes a millisecond, and the wait the rest; the first round of each takes a second more.
    """
    seen: set[Any] = set()

    def put(leaves: Any, shardings: Any) -> tuple[Any, bool]:
        clock.advance(0.001)
        return shardings[0], leaves[0].flags.owndata

    def wait(what: tuple[Any, bool]) -> object:
        where, is_plain = what
        clock.advance(0.009 if where == "both" else (0.015 if is_plain else 0.007) + where.number * (0.016 if is_plain else 0.008))
        clock.advance(0.0 if what in seen else 1.0)
        seen.add(what)
        return what

    monkeypatch.setattr(measurements, "put", put)
    monkeypatch.setattr(measurements, "block_until_ready", wait)
    monkeypatch.setattr(measurements, "SingleDeviceSharding", lambda device: device)
    monkeypatch.setattr(measurements, "Mesh", lambda devices, names: devices.shape)
    monkeypatch.setattr(measurements, "NamedSharding", lambda mesh, spec: "both" if mesh == (2,) else pytest.fail(f"{mesh}"))
    return [Device(0), Device(1)]


def test_a_rate_is_of_the_best_round_until_it_is_ready(gpus: list[Device], clock: ManualClock) -> None:
    staging = Staging()
    bus = measure_bus(gpus, staging, clock, None)
    first, second = bus.devices
    nbytes = 64 * MIB
    assert (first.device, first.put_bytes) == ("cuda:0", nbytes)
    assert first.plain_seconds == pytest.approx(0.016)
    assert first.staged_seconds == pytest.approx(0.008)
    assert first.plain_bytes_per_second == pytest.approx(nbytes / 0.016)
    assert first.staged_bytes_per_second == pytest.approx(nbytes / 0.008)
    assert first.ratio == pytest.approx(2.0)
    assert second.plain_seconds == pytest.approx(0.032)
    assert second.staged_seconds == pytest.approx(0.016)
    assert bus.together_bytes_per_second == pytest.approx(2 * nbytes / 0.010)
    assert bus.is_transferred
    assert staging.calls == ["lock", "release", "lock", "release"]


def test_a_put_to_all_devices_gives_each_its_part(clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(arrays: Any) -> Any:
        (array,) = arrays
        assert {(shard.device, shard.data.shape) for shard in array.addressable_shards} == {(device, (1, MIB)) for device in jax.devices()}
        assert (np.asarray(array) == 1).all()
        clock.advance(0.5)
        return arrays

    monkeypatch.setattr(measurements, "block_until_ready", wait)
    rate = measurements._measure_together(jax.devices(), Staging(), clock, MIB)
    assert rate == pytest.approx(jax.device_count() * MIB / 0.5)


def test_one_device_has_no_others(gpus: list[Device], clock: ManualClock) -> None:
    bus = measure_bus(gpus[:1], Staging(), clock, None)
    assert len(bus.devices) == 1
    assert bus.together_bytes_per_second is None


def test_little_memory_makes_puts_small(gpus: list[Device], clock: ManualClock) -> None:
    bus = measure_bus(gpus, Staging(), clock, 2 * 8 * 3 * MIB + 5)
    assert {each.put_bytes for each in bus.devices} == {3 * MIB}
    assert bus.devices[0].staged_bytes_per_second == pytest.approx(3 * MIB / 0.008)


@pytest.mark.parametrize(
    ("available", "want"), [(None, 64), (1 << 50, 64), (512 * MIB, 64), (512 * MIB - 1, 63), (9 * MIB, 1), (0, 1), (80 * MIB, 10)]
)
def test_an_array_takes_an_eighth_of_what_is_left(available: int | None, want: int) -> None:
    assert bounded(64 * MIB, available) == want * MIB


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="looks at the CPU backend")
def test_the_cpu_backend_takes_what_lies_there(clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurements, "block_until_ready", lambda arrays: (clock.advance(0.5), jax.block_until_ready(arrays))[1])
    bus = measure_bus(jax.devices(), Staging(), clock, 80 * MIB * 8)
    assert not bus.is_transferred
    assert [(each.device, each.put_bytes, each.plain_seconds, each.ratio) for each in bus.devices] == [
        (str(jax.devices()[0]), 64 * MIB, 0.5, 1.0)
    ]
    assert bus.together_bytes_per_second is None


def test_the_cost_of_small_leaves_is_the_median(clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    shapes: set[Any] = set()

    def put(leaves: Any, shardings: Any) -> int:
        counts.append(len(leaves))
        shapes.update(
            (leaf.shape, leaf.dtype.name, sharding.shard_shape(leaf.shape)) for leaf, sharding in zip(leaves, shardings, strict=True)
        )
        clock.advance(1e-6 * len(leaves) * (100 if len(counts) % 31 < 10 else 1))  # a third of them takes long, the first one too
        return len(leaves)

    monkeypatch.setattr("prefetchshard.planning.packing.LEAST_LEAVES", {})
    monkeypatch.setattr(measurements, "put", put)
    monkeypatch.setattr(measurements, "block_until_ready", lambda count: clock.advance(3e-6))
    staging = Staging()
    found = measure_small_puts(resolve(None), staging, clock)
    assert [one.leaves for one in found] == [1, 10, 40]
    assert [one.dispatch_seconds for one in found] == pytest.approx([1e-6, 10e-6, 40e-6], rel=1e-3)
    assert [one.ready_seconds for one in found] == pytest.approx([4e-6, 13e-6, 43e-6], rel=1e-3)
    assert {one.leaf_bytes for one in found} == {4096}
    assert {one.packed_ready_seconds for one in found} == {None}
    assert sorted(set(counts)) == [1, 10, 40]
    assert shapes == {((64, 16), "int32", (64 // jax.device_count(), 16))}
    assert staging.calls == ["lock", "release"] * 3


def test_where_leaves_are_packed_that_is_measured_too(clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefetchshard.planning.packing.LEAST_LEAVES", {jax.default_backend(): 8})
    put, sent = measurements.put, set[int]()

    def noted(leaves: Any, shardings: Any) -> Any:
        sent.add(len(leaves))
        clock.advance(1e-6 * len(leaves))
        return put(leaves, shardings)

    def wait(arrays: Any) -> None:
        assert [int(array[0, 0]) for array in arrays] == list(range(len(arrays)))  # as batches come, one by one and packed
        clock.advance(5e-6)

    monkeypatch.setattr(measurements, "put", noted)
    monkeypatch.setattr(measurements, "block_until_ready", wait)
    monkeypatch.setattr(measurements, "SMALL_ROUNDS", 3)
    one, ten, forty = measure_small_puts(resolve(None), Staging(), clock)
    assert (one.packed_dispatch_seconds, one.packed_ready_seconds) == (None, None)
    for found, leaves in ((ten, 10), (forty, 40)):
        assert found.ready_seconds == pytest.approx((leaves + 5) * 1e-6, rel=1e-3)
        assert found.packed_dispatch_seconds == pytest.approx(1e-6, rel=1e-3)
        assert found.packed_ready_seconds == pytest.approx(6e-6, rel=1e-3)
    assert sent == {1, 10, 40}


# -------------------------------------------------------------------------------------------------------------- host copies


def test_copies_are_cut_into_shares_and_timed_together(clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four threads whose copies take 2 s each, one after the other, take 8 s together; those past the cache half as long."""
    seen: list[tuple[bool, int, str]] = []
    lock = threading.Lock()

    def copy(self: Copies, view: Any, value: Any) -> None:
        with lock:
            clock.advance(1.0 if self.copy_rows else 2.0)
            seen.append((self.copy_rows is not None, value.nbytes, threading.current_thread().name))

    monkeypatch.setattr(Copies, "copy", copy)
    found = measure_copies(Finding(lambda *_: None, True, "used"), 4, clock, 32 * MIB)
    assert found.copied_bytes == 4 * MIB
    assert [one.threads for one in found.rates] == [1, 2, 4]
    assert [one.numpy_bytes_per_second for one in found.rates] == pytest.approx([4 * MIB / 2, 4 * MIB / 4, 4 * MIB / 8])
    assert [one.streaming_bytes_per_second for one in found.rates] == pytest.approx([4 * MIB / 1, 4 * MIB / 2, 4 * MIB / 4])
    assert (found.uses_streaming, found.best_bytes_per_second, found.saturating_threads) == (True, 4 * MIB, 1)
    assert seen[:4] == [(False, MIB, name) for _, _, name in seen[:4]]  # the memory is written to first, by as many as there will be
    assert len({name for _, _, name in seen[:4]}) == 4
    assert all(name.startswith("prefetchshard-doctor") for _, _, name in seen)
    assert len(seen) == 4 + 2 * 3 * (1 + 2 + 4)


def test_without_streaming_copies_numpy_is_measured_alone(clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Copies, "copy", lambda self, view, value: clock.advance(0.25))
    found = measure_copies(NO_STREAMING, 1, clock, 8 * MIB)
    assert found.rates == (CopyRate(1, 4 * MIB, None),)
    assert not found.uses_streaming


def test_a_copy_that_fails_leaves_no_thread(monkeypatch: pytest.MonkeyPatch, clock: ManualClock) -> None:
    monkeypatch.setattr(Copies, "copy", fail)
    with pytest.raises(RuntimeError, match="too old"):
        measure_copies(NO_STREAMING, 4, clock, 8 * MIB)


def test_where_no_more_threads_can_be_the_others_do_not_wait(monkeypatch: pytest.MonkeyPatch, clock: ManualClock) -> None:
    start = threading.Thread.start

    def start_two(self: threading.Thread) -> None:
        if self.name.endswith("_2"):
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", start_two)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        measure_copies(NO_STREAMING, 4, clock, 8 * MIB)


@pytest.mark.parametrize(
    ("cpus", "want"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (4, [1, 2, 4]), (12, [1, 2, 4, 8, 12]), (16, [1, 2, 4, 8, 16])]
)
def test_the_numbers_of_threads(cpus: int, want: list[int]) -> None:
    assert thread_counts(cpus) == want


@pytest.mark.parametrize(("uses_streaming", "best", "threads"), [(False, 21e9, 8), (True, 60e9, 16)])
def test_the_fewest_threads_that_nearly_reach_the_best(uses_streaming: bool, best: float, threads: int) -> None:
    numpy, streaming = (5e9, 10e9, 18e9, 20e9, 21e9), (9e9, 17e9, 30e9, 50e9, 60e9)
    rates = [CopyRate(1 << i, *each) for i, each in enumerate(zip(numpy, streaming, strict=True))]
    found = summary(MIB, rates, uses_streaming=uses_streaming)
    assert (found.best_bytes_per_second, found.saturating_threads) == (best, threads)


# ------------------------------------------------------------------------------------------------------------------- facts


def test_what_raises_is_told_in_one_line() -> None:
    assert attempt(fail) == Failed("RuntimeError: the driver is too old")
    assert attempt(lambda: known(Failed("no"), "the devices")) == Failed("needs the devices")
    assert attempt(lambda: 5) == 5
    assert attempt(lambda: known(5, "five")) == 5

    def bare() -> None:
        raise NotImplementedError

    assert attempt(bare) == Failed("NotImplementedError")


def test_versions_are_those_that_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    version = importlib.metadata.version

    def without(name: str) -> str:
        if name == "llvmlite":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", without)
    found = facts.versions()
    assert (found.prefetchshard, found.jax, found.numpy) == (ps.__version__, jax.__version__, np.__version__)
    assert found.python == ".".join(map(str, sys.version_info[:3]))
    optional = {one.name: (one.version is not None, one.extra) for one in found.optional}
    assert optional["llvmlite"] == (False, "native")
    assert optional["cloudpickle"][1] == "processes"


def test_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    assert facts.interpreter().switch_interval_seconds == sys.getswitchinterval()
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    assert not facts.interpreter().has_lock
    monkeypatch.delattr(sys, "_is_gil_enabled")
    assert facts.interpreter().has_lock


def test_memory_that_the_system_tells(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text("MemTotal:       1000 kB\nMemFree: 3 kB\nMemAvailable:    600 kB\n")
    assert facts.host_memory(tmp_path) == HostMemory(1000 << 10, 600 << 10, None)


def test_memory_that_a_group_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "memory_limit", lambda root: MemoryLimit(500 << 10, 100 << 10))
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text("MemTotal:       1000 kB\nMemAvailable:    600 kB\n")
    assert facts.host_memory(tmp_path) == HostMemory(1000 << 10, 100 << 10, 500 << 10)


def test_memory_where_there_are_no_such_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sysconf", lambda name: {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}[name])
    assert facts.host_memory(tmp_path) == HostMemory(4_096_000, None, None)
    monkeypatch.delattr(os, "sysconf")
    assert facts.host_memory(tmp_path) == HostMemory(None, None, None)


def test_devices_that_tell_little() -> None:
    class Odd(Device):
        memory_stats = default_memory = fail

        def addressable_memories(self) -> list[Any]:
            return []

    found = facts.devices([Odd(0)], resolve(None))
    assert (found.platform, found.kind, found.count) == ("gpu", "?", 1)
    assert (found.memory_bytes, found.memory_kinds, found.has_idle_gpu) == (None, (), False)


def test_devices_and_the_mesh_in_force(tmp_path: Path) -> None:
    with jax.set_mesh(ps.make_mesh({"data": -1})):
        found = facts.devices(jax.devices(), resolve(None), tmp_path)
    assert (found.platform, found.count, found.mesh) == (jax.devices()[0].platform, jax.device_count(), f"{{'data': {jax.device_count()}}}")
    assert found.sharding.startswith("P('data')")
    assert found.memory_kinds[0] == jax.devices()[0].default_memory().kind
    assert facts.devices(jax.devices(), resolve(None), tmp_path).mesh is None


@pytest.mark.parametrize(("platform", "is_idle"), [("cpu", True), ("gpu", False)])
def test_a_gpu_that_jax_does_not_use(platform: str, is_idle: bool, tmp_path: Path) -> None:
    device = Device(0)
    device.platform = platform
    assert not facts.devices([device], resolve(None), tmp_path).has_idle_gpu
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidiactl").touch()
    assert facts.devices([device], resolve(None), tmp_path).has_idle_gpu == is_idle


# -------------------------------------------------------------------------------------------------------- what follows

OPTIONAL = tuple(OptionalPackage(name, "1.0", extra, brings) for name, extra, brings in facts.OPTIONAL)
GPU = Devices("gpu", "NVIDIA H200", 2, 105 << 30, ("device", "pinned_host"), None, "P('data') on the mesh {'data': 2}", None, False)
CPU = msgspec.structs.replace(GPU, platform="cpu", kind="cpu", count=8, memory_bytes=None)
NICE = Findings(
    versions=Versions("0.1.0", "3.12.1", "0.11.2", "0.11.2", "2.4.6", OPTIONAL),
    interpreter=Interpreter(0.005, False, True),
    cpus=Cpus(32, 32, 32.0),
    memory=HostMemory(1 << 40, 1 << 39, None),
    devices=GPU,
    ways=Ways("memory that CUDA's driver locks", "a put of 8 MiB takes 0.20 ms from it, 1.50 ms from other: used", True, True, "used"),
    bus=Bus(True, tuple(Puts(f"cuda:{i}", 64 * MIB, 0.008, 8e9, 0.0013, 50e9, 6.2) for i in range(2)), 80e9),
    small_puts=(SmallPut(1, 4096, 5e-5, 1e-4, None, None), SmallPut(40, 4096, 1.5e-3, 2.6e-3, 2e-4, 6.7e-4)),
    copies=summary(1 << 30, [CopyRate(n, 5e9 * n, 9e9 * n) for n in (1, 2, 4, 8, 16, 32)], uses_streaming=True),
)
NOT_MEASURED = Failed("needs the devices")


def changed(**parts: Any) -> Findings:
    """What a machine with nothing to mend would say, but for these parts."""
    return msgspec.structs.replace(NICE, **parts)


def without_llvmlite() -> Versions:
    assert isinstance(NICE.versions, Versions)
    optional = (msgspec.structs.replace(OPTIONAL[0], version=None), *OPTIONAL[1:])
    return msgspec.structs.replace(NICE.versions, optional=optional)


SLOW = Ways("new memory for each batch", "memory that CUDA's driver locks cannot be used: no", False, False, "no")
VERDICTS = {
    "nothing": (NICE, ()),
    "no JAX": (changed(devices=Failed("RuntimeError: no backend")), ("JAX's devices cannot be used: RuntimeError: no backend",)),
    "idle GPU": (
        changed(devices=msgspec.structs.replace(CPU, has_idle_gpu=True)),
        ("an NVIDIA GPU, but JAX runs on the CPU: install JAX with",),
    ),
    "asked for": (changed(devices=msgspec.structs.replace(CPU, has_idle_gpu=True, asked_for="cpu")), ("on the CPU: JAX_PLATFORMS=cpu",)),
    "slow": (changed(ways=SLOW), ("transfers do not read page-locked memory, so they take longer: memory that CUDA",)),
    "quota": (changed(cpus=Cpus(64, 64, 2.0)), ("this process has a quota of 2 of 64 CPUs: give it 4 or more a device",)),
    "affinity": (changed(cpus=Cpus(64, 3, 3.0)), ("an affinity of 3 of 64 CPUs",)),
    "enough of them": (changed(cpus=Cpus(64, 64, 8.0)), ()),
    "all there are": (changed(cpus=Cpus(2, 2, 2.0)), ()),
    "no llvmlite": (changed(versions=without_llvmlite()), ("install prefetchshard[native]: copies use half the CPU",)),
    "memory": (changed(memory=HostMemory(1 << 40, 1 << 30, 1 << 31)), ("less than 2 GiB of host memory",)),
    "unknown memory": (changed(memory=HostMemory(None, None, None)), ()),
    "CPU": (changed(devices=CPU), ("no accelerator: JAX runs on the CPU",)),
    "several": (
        changed(devices=CPU, cpus=Cpus(64, 64, 2.0), versions=without_llvmlite()),
        ("2 of 64 CPUs", "large copies may be faster", "no accelerator"),
    ),
}


@pytest.mark.parametrize("case", VERDICTS)
def test_what_matters_most_comes_first(case: str) -> None:
    findings, said = VERDICTS[case]
    found = advice(findings)
    assert len(found) == len(said)
    for sentence, part in zip(found, said, strict=True):
        assert part in sentence


def arrays(findings: Findings) -> tuple[int, str]:
    first = suggestions(findings)[0]
    assert (first.source, first.in_processes, first.depth) == ("arrays", False, 2)
    return first.workers, first.reason


def test_readers_of_arrays_fill_the_bus() -> None:
    assert arrays(NICE) == (16, "so many fill the bus, at 80 GB/s")
    one = Bus(True, NICE.bus.devices[:1], None)  # pyright: ignore[reportAttributeAccessIssue]
    assert arrays(changed(bus=one)) == (8, "so many fill the bus, at 50 GB/s")


def test_where_copies_are_slower_than_the_bus_they_decide() -> None:
    slow = summary(1 << 30, [CopyRate(1, 5e9, None), CopyRate(2, 9.9e9, None), CopyRate(4, 10e9, None)], uses_streaming=False)
    assert arrays(changed(copies=slow)) == (2, "more do not copy faster than 10 GB/s")
    assert arrays(changed(copies=slow, bus=NOT_MEASURED))[0] == 2
    assert arrays(changed(copies=NOT_MEASURED, cpus=Cpus(64, 64, 5.5))) == (6, "one for each CPU; how fast they copy is not known")


@pytest.mark.parametrize(("cpus", "want"), [(1.0, 1), (1.5, 2), (2.0, 2)])
def test_one_reader_has_another_beside_it(cpus: float, want: int) -> None:
    copies = summary(1 << 30, [CopyRate(1, 20e9, None), CopyRate(2, 20e9, None)], uses_streaming=False)
    workers, reason = arrays(changed(copies=copies, bus=NOT_MEASURED, cpus=Cpus(4, 4, cpus)))
    assert workers == want
    assert "more do not copy faster than 20 GB/s" in reason


def test_readers_of_arrays_are_no_more_than_help() -> None:
    much = summary(1 << 30, [CopyRate(n, 1e9 * n, None) for n in (1, 32)], uses_streaming=False)
    assert arrays(changed(copies=much)) == (16, "more threads wait for each other")


@pytest.mark.parametrize(("cpus", "want"), [(1, 16), (2, 16), (8, 32), (64, 64)])
def test_readers_that_wait(cpus: int, want: int) -> None:
    found = suggestions(changed(cpus=Cpus(64, 64, float(cpus))))[1]
    assert (found.source, found.workers, found.in_processes) == ("files, network", want, False)


@pytest.mark.parametrize(("cpus", "want"), [(1.0, "1"), (1.5, "ps.Processes(2)"), (4.0, "ps.Processes(4)"), (16.0, "ps.Processes(14)")])
def test_python_functions(cpus: float, want: str) -> None:
    found = suggestions(changed(cpus=Cpus(64, 64, cpus)))[2]
    assert str(found) == f"workers={want}, depth=2"


def test_an_interpreter_without_a_lock_needs_no_processes() -> None:
    found = suggestions(changed(interpreter=Interpreter(0.005, True, False)))[2]
    assert str(found) == "workers=32, depth=2"


def test_without_cpus_there_is_nothing_to_suggest() -> None:
    assert suggestions(changed(cpus=Failed("no"))) == ()


def test_what_is_suggested_is_accepted_by_a_loader() -> None:
    for one in suggestions(changed(cpus=Cpus(2, 2, 2.0))):
        workers = ps.Processes(one.workers) if one.in_processes else one.workers
        ps.Loader(np.zeros((64, 2)), batch_size=8, workers=workers, depth=one.depth).close()


# ------------------------------------------------------------------------------------------------------------ what is said


def report(findings: Findings) -> Report:
    found = advice(findings)
    return Report(
        verdict=found[0] if found else NOTHING, advice=found, findings=findings, suggestions=suggestions(findings), took_seconds=5.0
    )


def failed_everywhere() -> Findings:
    return Findings(**{name: Failed("RuntimeError: " + "long_" * 60 + " and why" * 20) for name in Findings.__struct_fields__})


CASES: dict[str, Callable[[], Findings]] = {case: (lambda findings=findings: findings) for case, (findings, _) in VERDICTS.items()}
CASES["failed everywhere"] = failed_everywhere


@pytest.mark.parametrize("case", CASES)
def test_lines_fit(case: str) -> None:
    lines = text_of(report(CASES[case]())).splitlines()
    assert not [line for line in lines if len(line) > COLUMNS or line != line.rstrip()]
    assert lines[0].startswith("prefetchshard doctor: ")


def test_the_text_has_the_figures() -> None:
    text = " ".join(text_of(report(NICE)).split())
    for said in (
        "prefetchshard doctor: nothing to mend",
        "2 x NVIDIA H200 (gpu), 105.0 GiB for JAX in each; memory kinds: device, pinned_host",
        "no mesh is in force; without sharding= batches go to P('data') on the mesh {'data': 2}",
        "memory that CUDA's driver locks: a put of 8 MiB",
        "64 MiB to cuda:1: 8.0 GB/s from plain memory, 50.0 GB/s from staging memory (6.2 times as fast)",
        "all 2 at once: 80.0 GB/s",
        "1 of 4 KiB: dispatched in 50 us, ready in 100 us",
        "40 of 4 KiB: dispatched in 1,500 us, ready in 2,600 us; as one buffer, as loaders send them: 200 us, ready in 670 us",
        "4 threads: 20.0 GB/s by NumPy, 36.0 GB/s past the cache",
        "32 threads saturate the memory past the cache",
        "32 visible, 32 in the affinity; this process may use 32",
        "512.0 GiB available of 1024.0 GiB; no limit by a control group",
        "threads share the interpreter's lock; switch interval 5 ms",
        "arrays: workers=16, depth=2: so many fill the bus, at 80 GB/s",
        "Python functions: workers=ps.Processes(28), depth=2: each has an interpreter of its own",
    ):
        assert said in text


def test_the_text_says_what_is_missing() -> None:
    text = " ".join(text_of(report(changed(versions=without_llvmlite()))).split())
    assert "no llvmlite: with prefetchshard[native] large copies go past the processor's cache" in text


def test_more_than_one_sentence_follows_below() -> None:
    findings, _ = VERDICTS["several"]
    lines = text_of(report(findings)).splitlines()
    assert "2 of 64 CPUs" in lines[0]
    assert lines[2].startswith("also          install prefetchshard[native]")


def test_json_has_the_same_facts() -> None:
    found = json.loads(msgspec.json.encode(report(NICE)))
    assert found == json.loads(json.dumps(msgspec.to_builtins(report(NICE))))
    assert set(found["findings"]) == set(Findings.__struct_fields__)
    assert found["findings"]["bus"]["together_bytes_per_second"] == 80e9
    assert found["findings"]["interpreter"]["switch_interval_seconds"] == 0.005
    assert found["suggestions"][2] == {**found["suggestions"][2], "workers": 28, "in_processes": True}
    failed = json.loads(msgspec.json.encode(report(failed_everywhere())))
    assert all(set(part) == {"failed"} for part in failed["findings"].values())


# ------------------------------------------------------------------------------------------------------------ all together


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measures little."""
    monkeypatch.setattr(measurements, "PUT_BYTES", MIB)
    monkeypatch.setattr(measurements, "COPY_BYTES", MIB)
    monkeypatch.setattr(measurements, "SMALL_ROUNDS", 2)


@pytest.mark.usefixtures("quick")
def test_an_examination_finds_all_of_it() -> None:
    told: list[str] = []
    found = examine(tell=told.append)
    assert not [part for part in msgspec.structs.asdict(found.findings).values() if isinstance(part, Failed)]
    assert told[0] == "starting JAX"
    assert len(told) == 4
    assert 0 < found.took_seconds < HANG_SECONDS
    assert isinstance(found.findings.devices, Devices)
    assert found.findings.devices.count == jax.device_count()


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("broken", "parts"),
    [
        ("measure_bus", {"bus"}),
        ("measure_small_puts", {"small_puts"}),
        ("measure_copies", {"copies"}),
        ("find_streaming", {"ways", "copies"}),
        ("choose_staging", {"ways", "bus", "small_puts"}),
        ("resolve", {"devices", "small_puts"}),
        ("facts.cpus", {"cpus", "copies"}),
        ("facts.host_memory", {"memory"}),
        ("facts.versions", {"versions"}),
        ("facts.interpreter", {"interpreter"}),
        ("facts.ways", {"ways"}),
        ("facts.devices", {"devices"}),
        ("facts.jax_devices", {"devices", "ways", "bus", "small_puts"}),
    ],
)
def test_what_fails_is_said_in_its_line(
    broken: str, parts: set[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(examination, broken, fail) if "." not in broken else monkeypatch.setattr(facts, broken.partition(".")[2], fail)
    found = examine()
    failed = {name for name, part in msgspec.structs.asdict(found.findings).items() if isinstance(part, Failed)}
    assert failed == parts
    text = text_of(found)
    assert "RuntimeError: the driver is too old" in text
    assert text.count("failed: ") == len(parts)
    monkeypatch.setattr(doctor, "examine", lambda tell: found)
    assert doctor.run(as_json=False) == ("devices" in parts)
    assert capsys.readouterr() == (text, "")


def test_what_is_looked_at_is_told_to_a_terminal_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def examine(tell: Callable[[str], object]) -> Report:
        tell("measuring transfers")
        return report(NICE)

    monkeypatch.setattr(doctor, "examine", examine)
    assert doctor.run(as_json=True) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert json.loads(out)["verdict"] == NOTHING
    assert out.endswith("}\n")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    doctor.run(as_json=True)
    assert capsys.readouterr().err == "\r\x1b[Kmeasuring transfers\r\x1b[K"


def test_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "as the user set it")
    monkeypatch.setattr(doctor, "run", lambda as_json: asked.append(as_json) or 0)
    assert cli.main(["doctor"]) == 0
    assert cli.main(["doctor", "--json"]) == 0
    assert asked == [False, True]
    assert os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "as the user set it"
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE")
    assert cli.main(["doctor"]) == 0
    assert os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"  # else it would take most of a GPU on which a training runs


@pytest.mark.parametrize("arguments", [(), ("--json",)], ids=["text", "json"])
def test_the_command_as_a_user_runs_it(arguments: tuple[str, ...]) -> None:
    program = """
        import sys, threading
        from prefetchshard.app.cli import main

        code = main(["doctor", *sys.argv[1:]])
        assert threading.enumerate() == [threading.main_thread()], threading.enumerate()
        sys.exit(code)
    """
    done = run_python(program, args=arguments)
    assert (done.returncode, done.stderr) == (0, "")
    if not arguments:
        lines = done.stdout.splitlines()
        assert lines[0].startswith("prefetchshard doctor: ")
        assert not [line for line in lines if len(line) > COLUMNS]
        assert "failed:" not in done.stdout
        return
    found = json.loads(done.stdout)
    findings = found["findings"]
    assert findings["devices"]["count"] == jax.device_count()
    assert findings["versions"]["jax"] == jax.__version__
    assert findings["bus"]["devices"][0]["plain_bytes_per_second"] > 0
    assert [one["leaves"] for one in findings["small_puts"]] == [1, 10, 40]
    assert findings["copies"]["rates"][0]["threads"] == 1
    assert len(findings["copies"]["rates"]) == len(thread_counts(math.ceil(findings["cpus"]["usable"])))
    assert [one["source"] for one in found["suggestions"]] == ["arrays", "files, network", "Python functions"]
    assert 0 < found["took_seconds"] < 100


def test_where_jax_does_not_start_that_is_the_verdict() -> None:
    done = run_python(
        "import sys; from prefetchshard.app.cli import main; sys.exit(main(['doctor']))", env={"JAX_PLATFORMS": "no_such_platform"}
    )
    assert done.returncode == 1
    assert done.stdout.startswith("prefetchshard doctor: JAX's devices cannot be used: ")
    assert "Traceback" not in done.stdout + done.stderr
