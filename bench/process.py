"""CPU time and memory of a process and of those it started, from /proc; where there is none, of the process alone."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")


def descendants(pid: int) -> Iterator[int]:
    """The processes that `pid` started, and those that they did."""
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield int(child)
                yield from descendants(int(child))


def cpu_seconds() -> float:
    """Of this process and its descendants, living and waited for."""
    total = sum(os.times()[:4])
    for pid in descendants(os.getpid()):
        with suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += sum(map(int, fields[11:13])) / TICKS
    return total


def forget_peak() -> None:
    """From here on `peak_bytes` tells of later memory only, where the system can do that."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def resident_bytes() -> int:
    """What this process has in memory now."""
    return _status("VmRSS") or peak_bytes()


def peak_bytes() -> int:
    """The most that this process had in memory."""
    unit = 1 if sys.platform == "darwin" else 1024
    return _status("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _status(field: str) -> int:
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field):
                return int(line.split()[1]) * 1024
    return 0


def proportional_bytes(pid: int) -> int:
    """Memory of a process, shared pages counted by their share: what forked workers really add."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0
