"""On what the runs were made."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import sys
from typing import Any

from bench import measure
from bench.loaders import Entry


def header(job: dict[str, Any], entries: list[Entry], timeout: float) -> dict[str, Any]:
    """The first record of a report. The devices are asked for in a process of their own, so that this one takes no memory of theirs.

    Raises:
        RuntimeError: JAX finds no device.
    """
    found = measure.do({**job, "job": "probe"}, timeout)
    if "platform" not in found:
        raise RuntimeError(f"JAX does not start: {found['reason']}\n{found.get('log', '')}")
    return {
        "record": "header",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "bench", *sys.argv[1:]]),
        "platform": found["platform"],
        "device": found["device"],
        "devices": found["devices"],
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "processor": _processor(),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "jax": found["jax"],
        "numpy": found["numpy"],
        "versions": {entry.name: entry.version() for entry in entries if not entry.missing()},
        "missing": {entry.name: entry.missing() for entry in entries if entry.missing()},
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()
