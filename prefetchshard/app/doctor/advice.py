"""What follows from the findings: what could be mended, and arguments to begin with."""

from __future__ import annotations

import math
from collections.abc import Iterator

from prefetchshard.app.doctor.facts import Cpus, Devices, Failed, HostMemory, Versions
from prefetchshard.app.doctor.measurements import Bus, HostCopies
from prefetchshard.app.doctor.report import Findings, Suggestion
from prefetchshard.building.choices import MOST_AT_WORK

NOTHING = "nothing to mend"
CPUS_PER_DEVICE = 4
"""With so many readers a training step hides the input on one H100 (images, 36.8 MiB a batch)."""

COPY_MARGIN = 1.3
"""Readers do more than copy. On one H100 eight threads gathered rows at 62 GB/s, and through the loader it was 45.5."""

LEAST_MEMORY_BYTES = 2 << 30
WAITING_THREADS = (16, 64)
"""For a source that waits, the fewest and the most to begin with: guesses, as only the storage knows."""


def advice(findings: Findings) -> tuple[str, ...]:
    """What could be mended on this machine, in sentences; what matters most comes first."""
    return tuple(_sentences(findings))


def _sentences(findings: Findings) -> Iterator[str]:
    devices = findings.devices
    if isinstance(devices, Failed):
        yield f"JAX's devices cannot be used: {devices.failed}"
    elif devices.has_idle_gpu:
        why = f"JAX_PLATFORMS={devices.asked_for}" if devices.asked_for else "install JAX with CUDA, such as jax[cuda13]"
        yield f"there is an NVIDIA GPU, but JAX runs on the CPU: {why}"
    elif devices.platform != "cpu" and not isinstance(findings.ways, Failed) and not findings.ways.is_page_locked:
        yield f"transfers do not read page-locked memory, so they take longer: {findings.ways.memory_reason or 'no reason is known'}"
    yield from _too_few_cpus(findings)
    yield from _without_streaming(findings)
    if isinstance(findings.memory, HostMemory) and (findings.memory.available_bytes or math.inf) < LEAST_MEMORY_BYTES:
        yield "less than 2 GiB of host memory is available: bound the batches there with host_memory="
    if isinstance(devices, Devices) and devices.platform == "cpu" and not devices.has_idle_gpu:
        why = f" (JAX_PLATFORMS={devices.asked_for})" if devices.asked_for else ""
        yield f"no accelerator: JAX runs on the CPU{why}"


def _too_few_cpus(findings: Findings) -> Iterator[str]:
    cpus, devices = findings.cpus, findings.devices
    if isinstance(cpus, Failed) or cpus.usable >= cpus.visible:
        return
    accelerators = devices.count if isinstance(devices, Devices) and devices.platform != "cpu" else 1
    if cpus.usable < CPUS_PER_DEVICE * accelerators:
        bound = "a quota" if cpus.usable < cpus.affinity else "an affinity"
        yield f"this process has {bound} of {cpus.usable:g} of {cpus.visible} CPUs: give it {CPUS_PER_DEVICE} or more a device"


def _without_streaming(findings: Findings) -> Iterator[str]:
    versions, devices = findings.versions, findings.devices
    if isinstance(versions, Versions) and any(one.name == "llvmlite" and one.version is None for one in versions.optional):
        if isinstance(devices, Devices) and devices.platform != "cpu":
            yield "install prefetchshard[native]: copies use half the CPU"
        else:
            yield "install prefetchshard[native]: large copies may be faster"


def suggestions(findings: Findings) -> tuple[Suggestion, ...]:
    """Arguments to begin with, for three kinds of source; none where the number of CPUs is not known."""
    if isinstance(findings.cpus, Failed):
        return ()
    cpus = max(1, math.ceil(findings.cpus.usable))
    return (_for_arrays(findings, cpus), _for_waiting(cpus), _for_python(findings, cpus))


def _for_arrays(findings: Findings, cpus: int) -> Suggestion:
    copies, bus = findings.copies, findings.bus
    if isinstance(copies, Failed):
        workers, reason = cpus, "one for each CPU; how fast they copy is not known"
    else:
        workers, reason = _enough_threads(copies, None if isinstance(bus, Failed) else bus)
    if workers == 1 and cpus > 1:
        workers, reason = 2, f"while one waits the other copies; {reason}"
    if workers > MOST_AT_WORK:
        workers, reason = MOST_AT_WORK, "more threads wait for each other"
    return Suggestion("arrays", workers, False, 2, reason)


def _enough_threads(copies: HostCopies, bus: Bus | None) -> tuple[int, str]:
    """The fewest that fill the bus, else that copy nearly as fast as any number does."""
    if bus is not None and bus.is_transferred:
        rate = bus.together_bytes_per_second or bus.devices[0].staged_bytes_per_second
        enough = [one.threads for one in copies.rates if copies.used(one) >= COPY_MARGIN * rate]
        if enough:
            return min(enough), f"so many fill the bus, at {rate / 1e9:.3g} GB/s"
    return copies.saturating_threads, f"more do not copy faster than {copies.best_bytes_per_second / 1e9:.3g} GB/s"


def _for_waiting(cpus: int) -> Suggestion:
    least, most = WAITING_THREADS
    workers = min(most, max(least, 4 * cpus))
    return Suggestion("files, network", workers, False, 4, "a wait takes no CPU; as many reads at once as the storage likes")


def _for_python(findings: Findings, cpus: int) -> Suggestion:
    interpreter = findings.interpreter
    if not isinstance(interpreter, Failed) and not interpreter.has_lock:
        return Suggestion("Python functions", cpus, False, 2, "this interpreter has no lock, so threads run Python side by side")
    if isinstance(findings.cpus, Cpus) and cpus == 1:
        return Suggestion("Python functions", 1, False, 2, "there is one CPU, which processes would share")
    processes = cpus - cpus // 8
    left = ", and some CPU is left to write what they make" if processes < cpus else ""
    return Suggestion("Python functions", processes, True, 2, f"each has an interpreter of its own{left}")
