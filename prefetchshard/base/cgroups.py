"""How much memory the machine has, and what Linux's control groups (cgroups, versions 1 and 2) allow this process. A container is such a group, and may lie in others.

A limit holds for a group and for all groups in it, so the smallest one on the way up counts. Elsewhere there are no such limits.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import msgspec

ROOT = Path("/")
UNLIMITED_BYTES = 1 << 60
"""Version 1 has no word for "no limit", but a number of about 2**63."""


def cpu_limit(root: Path = ROOT) -> float:
    """The CPU seconds that this process may use in a second, after its group and the groups around it; infinite where nothing limits it.

    Args:
        root: of the file system that says so.
    """
    return min((_cpus_of(folder) for folder in _folders("cpu", root)), default=math.inf)


class MemoryLimit(msgspec.Struct, frozen=True):
    """The bound on a group's memory.

    Attributes:
        limit_bytes: what the group may take.
        available_bytes: what it may still take, with what the system would give back of its file cache.
    """

    limit_bytes: int
    available_bytes: int


def memory_limit(root: Path = ROOT) -> MemoryLimit | None:
    """The bound on memory of which least is left, of this process's group and the groups around it; None where there is none.

    Args:
        root: as for `cpu_limit`.
    """
    found = [limit for folder in _folders("memory", root) if (limit := _memory_of(folder)) is not None]
    return min(found, key=lambda limit: limit.available_bytes, default=None)


def physical_bytes() -> int | None:
    """Memory of the machine; None where the system does not tell."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def _cpus_of(folder: Path) -> float:
    words = _text(folder / "cpu.max").split()
    if not words:  # version 1
        words = [*_text(folder / "cpu.cfs_quota_us").split(), *_text(folder / "cpu.cfs_period_us").split()]
    quota, period = [_number(word) for word in words] if len(words) == 2 else (None, None)
    return quota / period if quota is not None and quota > 0 and period else math.inf


def _memory_of(folder: Path) -> MemoryLimit | None:
    for limit_name, usage_name, cache_name in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, usage = _number(_text(folder / limit_name)), _number(_text(folder / usage_name))
        if limit is not None and usage is not None and limit < UNLIMITED_BYTES:
            cache = re.search(rf"^{cache_name} (\d+)$", _text(folder / "memory.stat"), re.MULTILINE)
            return MemoryLimit(limit, max(0, limit - max(0, usage - int(cache[1] if cache else 0))))
    return None


def _folders(controller: str, root: Path) -> Iterator[Path]:
    """Where the limits of this process's groups are, for one controller: its own group, and those around it."""
    mounts = list(_mounts(root))
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        names = {controller} if controller in controllers.split(",") else set[str]() if controllers else {"cgroup2"}
        for mount, mounted, kinds in mounts:
            if names & kinds:
                # A container may see the path that its group has outside of it, while its own group is all that is mounted
                is_below = PurePosixPath(group).is_relative_to(mounted) and ".." not in group.split("/")
                below = PurePosixPath(group).relative_to(mounted) if is_below else PurePosixPath()
                yield from (mount / part for part in (below, *below.parents))


def _mounts(root: Path) -> Iterator[tuple[Path, str, set[str]]]:
    """Each mounted tree of groups: where it is, which group lies there, and its controllers ("cgroup2": those of version 2)."""
    for line in _text(root / "proc/self/mountinfo").splitlines():
        where, _, what = line.partition(" - ")
        fields, kind = where.split(" "), what.split(" ")
        if len(fields) < 5 or len(kind) < 3 or kind[0] not in ("cgroup", "cgroup2"):
            continue
        mounted, mount = (re.sub(r"\\(\d{3})", lambda found: chr(int(found[1], 8)), field) for field in fields[3:5])
        yield root / mount.lstrip("/"), mounted, {"cgroup2"} if kind[0] == "cgroup2" else set(kind[2].split(","))


def _number(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:  # "max", or nothing
        return None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""
