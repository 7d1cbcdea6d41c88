"""How many CPUs this process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path

from prefetchshard.base.cgroups import ROOT, cpu_limit


def cpu_affinity() -> int:
    """The CPUs on which this process may run, at least 1. Where the system has no such rule, all of them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_quota(root: Path = ROOT) -> float:
    """The CPUs that this process may use: those on which it may run, or the quota of its control group where that is less.

    A container often sees all CPUs of its machine and may use few of them: what runs on more is stopped for the rest of each period.

    Args:
        root: of the file system that tells the quota.

    Returns:
        CPU seconds in a second, a whole number only where no quota is less.
    """
    return min(float(cpu_affinity()), cpu_limit(root))


def cpu_count() -> int:
    """`cpu_quota` as a number of threads: rounded up, at least 1."""
    return max(1, math.ceil(cpu_quota()))
