"""What can be looked up: versions, devices, CPUs, memory, and what the loader would choose here."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax
import msgspec

from prefetchshard import __version__
from prefetchshard.base.cgroups import ROOT, memory_limit, physical_bytes
from prefetchshard.base.cpus import cpu_affinity, cpu_quota
from prefetchshard.base.device_memory import memory_told
from prefetchshard.base.jax_context import mesh_in_force
from prefetchshard.base.jax_types import config
from prefetchshard.sharding.meshes import mesh_text
from prefetchshard.sharding.rules import ShardingRules
from prefetchshard.staging.layout import Staging
from prefetchshard.staging.pinned import PinnedStaging, explain_staging
from prefetchshard.streaming.copies import Finding

T = TypeVar("T")
MOST_LETTERS = 400
"""Of what an error says: some of JAX's fill a page."""

OPTIONAL = (
    ("llvmlite", "native", "large copies go past the processor's cache where that is faster"),
    ("cloudpickle", "processes", "worker processes also take lambdas and what a notebook defines"),
    ("rich", "live", "ps.live shows a loop, the demo its progress"),
)


class Failed(msgspec.Struct, frozen=True):
    """Stands for what could not be looked up or measured.

    Attributes:
        failed: why, in one line.
    """

    failed: str


class UnknownError(Exception):
    """What a part needs was not found out; the text says what that is."""


def known(value: T | Failed, name: str = "") -> T:
    """The value.

    Args:
        value: or why there is none.
        name: of what has a line of its own, which says why; else this one says it.

    Raises:
        UnknownError: it could not be found out.
    """
    if isinstance(value, Failed):
        raise UnknownError(f"needs {name}" if name else value.failed)
    return value


def attempt(look: Callable[[], T]) -> T | Failed:
    """What `look` returns, or why it raised."""
    try:
        return look()
    except UnknownError as missing:
        return Failed(str(missing))
    except Exception as error:  # noqa: BLE001 - a driver or a backend may raise anything, and the rest is still worth knowing
        return Failed(f"{type(error).__name__}: {' '.join(str(error).split())}"[:MOST_LETTERS].removesuffix(": "))


class OptionalPackage(msgspec.Struct, frozen=True):
    """A package that the library uses where it is installed.

    Attributes:
        name: of the package.
        version: None where it is not installed.
        extra: of prefetchshard that brings it.
        brings: what it is good for.
    """

    name: str
    version: str | None
    extra: str
    brings: str


class Versions(msgspec.Struct, frozen=True):
    """Versions of what works together; None where a package is not installed."""

    prefetchshard: str
    python: str
    jax: str | None
    jaxlib: str | None
    numpy: str | None
    optional: tuple[OptionalPackage, ...]


def versions() -> Versions:
    """As they are installed. Imports none of the optional packages."""
    return Versions(
        prefetchshard=__version__,
        python=platform.python_version(),
        jax=_version("jax"),
        jaxlib=_version("jaxlib"),
        numpy=_version("numpy"),
        optional=tuple([OptionalPackage(name, _version(name), extra, brings) for name, extra, brings in OPTIONAL]),
    )


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


class Interpreter(msgspec.Struct, frozen=True):
    """How threads share the interpreter.

    Attributes:
        switch_interval_seconds: after which a thread that waits for the interpreter's lock asks for it.
        is_free_threaded: it was built to run without that lock.
        has_lock: there is one now.
    """

    switch_interval_seconds: float
    is_free_threaded: bool
    has_lock: bool


def interpreter() -> Interpreter:
    """Of this process."""
    is_free_threaded = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
    asked: Any = getattr(sys, "_is_gil_enabled", None)  # since Python 3.13
    return Interpreter(sys.getswitchinterval(), is_free_threaded, True if asked is None else bool(asked()))


class Cpus(msgspec.Struct, frozen=True):
    """How many CPUs there are, and how many of them this process may use.

    Attributes:
        visible: of the machine.
        affinity: on which this process may run.
        usable: that it may use: the quota of its control group where that is less.
    """

    visible: int
    affinity: int
    usable: float


def cpus(root: Path = ROOT) -> Cpus:
    """Of this process.

    Args:
        root: of the file system that tells the quota.
    """
    return Cpus(os.cpu_count() or 1, cpu_affinity(), cpu_quota(root))


class HostMemory(msgspec.Struct, frozen=True):
    """The memory of this machine.

    Attributes:
        total_bytes: of the machine; None where it does not tell.
        available_bytes: what can still be taken, after the control group's limit too; None where neither tells.
        limit_bytes: of the control group with the least left; None where it has no limit.
    """

    total_bytes: int | None
    available_bytes: int | None
    limit_bytes: int | None


def host_memory(root: Path = ROOT) -> HostMemory:
    """As it is now.

    Args:
        root: of the file system that tells it.
    """
    try:
        text = (root / "proc/meminfo").read_text()
    except OSError:
        text = ""
    found = {name: int(kibibytes) << 10 for name, kibibytes in re.findall(r"^(MemTotal|MemAvailable): +(\d+) kB$", text, re.MULTILINE)}
    limit = memory_limit(root)
    left = [found.get("MemAvailable"), None if limit is None else limit.available_bytes]
    return HostMemory(
        total_bytes=found.get("MemTotal", physical_bytes()),
        available_bytes=min([nbytes for nbytes in left if nbytes is not None], default=None),
        limit_bytes=None if limit is None else limit.limit_bytes,
    )


class Devices(msgspec.Struct, frozen=True):
    """The devices that JAX found, and where a loader without `sharding` puts its batches.

    Attributes:
        platform: "cpu", "gpu", "tpu", ...
        kind: the vendor's name for the first one.
        count: those of this process.
        memory_bytes: what JAX may take of the memory of each; None where the backend does not tell.
        memory_kinds: where an array can lie, the default first.
        mesh: that is in force, as `jax.set_mesh` does; None where there is none.
        sharding: of a loader that is not told one.
        asked_for: JAX's setting of platforms, if it is set.
        has_idle_gpu: the system has an NVIDIA GPU and JAX uses none.
    """

    platform: str
    kind: str
    count: int
    memory_bytes: int | None
    memory_kinds: tuple[str, ...]
    mesh: str | None
    sharding: str
    asked_for: str | None
    has_idle_gpu: bool


def devices(found: list[Any], rules: ShardingRules, root: Path = ROOT) -> Devices:
    """What there is to say of the devices.

    Args:
        found: devices of one kind, at least one.
        rules: of a loader without `sharding`.
        root: of the file system in which the devices of drivers are.
    """
    first = found[0]
    mesh = mesh_in_force()
    return Devices(
        platform=first.platform,
        kind=getattr(first, "device_kind", "?"),
        count=len(found),
        memory_bytes=memory_told(first).get("bytes_limit"),
        memory_kinds=_memory_kinds(first),
        mesh=None if mesh is None else mesh_text(mesh),
        sharding=str(rules),
        asked_for=getattr(config, "jax_platforms", None) or None,
        has_idle_gpu=first.platform == "cpu" and (root / "dev/nvidiactl").exists(),
    )


def _memory_kinds(device: Any) -> tuple[str, ...]:
    default = attempt(lambda: [str(device.default_memory().kind)])
    others = attempt(lambda: [str(memory.kind) for memory in device.addressable_memories()])
    known = [kind for kinds in (default, others) if not isinstance(kinds, Failed) for kind in kinds]
    return tuple(dict.fromkeys(known))


class Ways(msgspec.Struct, frozen=True):
    """How batches go to the devices here.

    Attributes:
        memory: in which batches are made.
        memory_reason: why in that.
        is_page_locked: the devices read it directly.
        streams: large copies into it go past the processor's cache.
        streams_reason: why, or why not.
    """

    memory: str
    memory_reason: str
    is_page_locked: bool
    streams: bool
    streams_reason: str


def ways(device: Any, staging: Staging, streaming: Finding) -> Ways:
    """What the library chose here.

    Args:
        device: the first that gets batches.
        staging: chosen for it.
        streaming: what was found out about copies past the cache.
    """
    memory, reason = explain_staging(device)
    return Ways(memory, reason, isinstance(staging, PinnedStaging), streaming.is_faster, streaming.reason)


def jax_devices() -> list[Any]:
    """The devices of this process.

    Raises:
        RuntimeError: JAX's backend does not start.
    """
    return list(jax.local_devices())  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType] - JAX has no type for them
