"""A report as plain text of at most 100 columns: a sentence, and a line or more for each part."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from typing import TypeVar

from prefetchshard.app.doctor.facts import Cpus, Devices, Failed, HostMemory, Interpreter, Versions, Ways
from prefetchshard.app.doctor.measurements import Bus, HostCopies, Puts, SmallPut
from prefetchshard.app.doctor.report import Report, Suggestion

T = TypeVar("T")
COLUMNS = 100
NAME_COLUMNS = 14


def text_of(report: Report) -> str:
    """The whole report; ends with a line break."""
    return "".join(f"{line}\n" for line in _lines(report))


def _lines(report: Report) -> Iterator[str]:
    found = report.findings
    yield from _wrapped("", f"prefetchshard doctor: {report.verdict}", indent=2)
    yield ""
    yield from _part("also", lambda advice: list(advice), report.advice[1:])
    yield from _part("versions", _versions, found.versions)
    yield from _part("devices", _devices, found.devices)
    yield from _part("staging", _ways, found.ways)
    yield from _part("transfers", _bus, found.bus)
    yield from _part("small leaves", _small_puts, found.small_puts)
    yield from _part("host copies", _copies, found.copies)
    yield from _part("CPUs", _cpus, found.cpus)
    yield from _part("memory", _memory, found.memory)
    yield from _part("interpreter", _interpreter, found.interpreter)
    yield from _part("to begin with", _suggestions, report.suggestions)


def _part(name: str, words: Callable[[T], list[str]], found: T | Failed) -> Iterator[str]:
    """Its lines, the first one after its name."""
    lines = [f"failed: {found.failed}"] if isinstance(found, Failed) else words(found)
    for number, line in enumerate(lines):
        yield from _wrapped("" if number else name, line, indent=NAME_COLUMNS)


def _wrapped(name: str, line: str, indent: int) -> list[str]:
    return textwrap.wrap(line, COLUMNS, initial_indent=name.ljust(indent) if indent > 2 else "", subsequent_indent=" " * indent)


def _versions(found: Versions) -> list[str]:
    names = {"prefetchshard": found.prefetchshard, "Python": found.python, "jax": found.jax, "jaxlib": found.jaxlib, "numpy": found.numpy}
    lines = [", ".join(f"{name} {version or '(not installed)'}" for name, version in names.items())]
    for one in found.optional:
        if one.version is None:
            lines.append(f"no {one.name}: with prefetchshard[{one.extra}] {one.brings}")
        else:
            lines.append(f"{one.name} {one.version}: {one.brings}")
    return lines


def _devices(found: Devices) -> list[str]:
    memory = "" if found.memory_bytes is None else f", {gibibytes(found.memory_bytes)} for JAX in each"
    return [
        f"{found.count} x {found.kind} ({found.platform}){memory}; memory kinds: {', '.join(found.memory_kinds) or 'not told'}",
        f"{f'the mesh {found.mesh} is in force' if found.mesh else 'no mesh is in force'}; without sharding= batches go to {found.sharding}",
    ]


def _ways(found: Ways) -> list[str]:
    return [
        f"{found.memory}: {found.memory_reason or 'no reason is known'}",
        f"streaming copies {'on' if found.streams else 'off'}: {found.streams_reason}",
    ]


def _bus(found: Bus) -> list[str]:
    lines = [_puts(each, is_transferred=found.is_transferred) for each in found.devices]
    if found.together_bytes_per_second is not None:
        lines.append(f"all {len(found.devices)} at once: {rate(found.together_bytes_per_second)} from staging memory")
    return lines


def _puts(found: Puts, *, is_transferred: bool) -> str:
    size = f"{found.put_bytes >> 20} MiB to {found.device}"
    plain = f"{rate(found.plain_bytes_per_second)} from plain memory"
    if not is_transferred:
        return f"{size}: {plain}; from staging memory nothing is copied ({microseconds(found.staged_seconds)} us)"
    return f"{size}: {plain}, {rate(found.staged_bytes_per_second)} from staging memory ({found.ratio:.1f} times as fast)"


def _small_puts(found: tuple[SmallPut, ...]) -> list[str]:
    lines: list[str] = []
    for one in found:
        line = f"{one.leaves:2d} of {one.leaf_bytes >> 10} KiB: dispatched in {microseconds(one.dispatch_seconds)} us, ready in {microseconds(one.ready_seconds)} us"
        if one.packed_dispatch_seconds is not None and one.packed_ready_seconds is not None:
            line += (
                f"; as one buffer, as loaders send them: {microseconds(one.packed_dispatch_seconds)} us, "
                f"ready in {microseconds(one.packed_ready_seconds)} us"
            )
        lines.append(line)
    return lines


def _copies(found: HostCopies) -> list[str]:
    lines: list[str] = []
    for one in found.rates:
        streaming = one.streaming_bytes_per_second
        past = "" if streaming is None else f", {rate(streaming)} past the cache"
        lines.append(f"{_threads(one.threads)}: {rate(one.numpy_bytes_per_second)} by NumPy{past}")
    kind = "past the cache" if found.uses_streaming else "by NumPy"
    lines.append(f"{_threads(found.saturating_threads)} saturate{'s' if found.saturating_threads == 1 else ''} the memory {kind}")
    return lines


def _threads(count: int) -> str:
    return f"{count} thread{'' if count == 1 else 's'}"


def _cpus(found: Cpus) -> list[str]:
    return [f"{found.visible} visible, {found.affinity} in the affinity; this process may use {found.usable:g}"]


def _memory(found: HostMemory) -> list[str]:
    left = "how much is available is not known" if found.available_bytes is None else f"{gibibytes(found.available_bytes)} available"
    total = "" if found.total_bytes is None else f" of {gibibytes(found.total_bytes)}"
    limit = "no limit by a control group" if found.limit_bytes is None else f"{gibibytes(found.limit_bytes)} is the control group's limit"
    return [f"{left}{total}; {limit}"]


def _interpreter(found: Interpreter) -> list[str]:
    lock = "threads share the interpreter's lock" if found.has_lock else "no lock, so threads run Python side by side"
    built = "free-threaded build: " if found.is_free_threaded else ""
    return [f"{built}{lock}; switch interval {1e3 * found.switch_interval_seconds:g} ms"]


def _suggestions(found: tuple[Suggestion, ...]) -> list[str]:
    return [f"{one.source}: {one}: {one.reason}" for one in found]


def rate(bytes_per_second: float) -> str:
    """In decimal gigabytes a second."""
    return f"{bytes_per_second / 1e9:.1f} GB/s"


def gibibytes(nbytes: int) -> str:
    """In units of 2**30 bytes."""
    return f"{nbytes / (1 << 30):.1f} GiB"


def microseconds(seconds: float) -> str:
    """As a whole number."""
    return f"{1e6 * seconds:,.0f}"
