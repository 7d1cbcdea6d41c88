"""Runs a job in a process of its own, with a limit of time, and watches what its worker processes take."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.process import descendants, proportional_bytes

REPOSITORY = Path(__file__).absolute().parent.parent
GLANCE_SECONDS = 0.25
LEAVING_SECONDS = 15.0  # after the result, for the process to end


def do(job: dict[str, Any], timeout: float) -> dict[str, Any]:
    """Runs `bench.child`.

    Args:
        job: what to do; JSON.
        timeout: seconds after which it is given up.

    Returns:
        The result of the job, with "exit_code" and "workers_peak_bytes"; "status" is "failed" where there is none.
    """
    with tempfile.TemporaryDirectory(prefix="bench") as folder:
        result, log = Path(folder, "result.json"), Path(folder, "log.txt")
        with log.open("w") as output:
            child = subprocess.Popen(
                [sys.executable, "-m", "bench.child", json.dumps({**job, "timeout": timeout}), str(result)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_environment(),
                start_new_session=True,
            )
        try:
            workers_peak = _watch(child, result, timeout)
        finally:
            _end(child)
        return _report(child, result, log, timeout) | {"workers_peak_bytes": workers_peak}


def _environment() -> dict[str, str]:
    """Of the child: it finds this package, takes no more than half of a GPU's memory, and is not talked over by TensorFlow."""
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}
    return {**quiet, **os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def _watch(child: subprocess.Popen[bytes], result: Path, timeout: float) -> int:
    """Waits for the child, at most so long. Returns the most memory that its own children had together."""
    peak = 0
    deadline = time.monotonic() + timeout
    leaving = False
    while time.monotonic() < deadline:
        with suppress(subprocess.TimeoutExpired):
            child.wait(GLANCE_SECONDS)
            break
        peak = max(peak, sum(map(proportional_bytes, descendants(child.pid))))
        if not leaving and result.exists():
            leaving = True
            deadline = min(deadline, time.monotonic() + LEAVING_SECONDS)
    return peak


def _end(child: subprocess.Popen[bytes]) -> None:
    """Ends the child's process group, which is its own: also workers that it left behind."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _report(child: subprocess.Popen[bytes], result: Path, log: Path, timeout: float) -> dict[str, Any]:
    said = log.read_text(errors="replace").strip()
    report: dict[str, Any] = {"exit_code": child.returncode}
    try:
        report |= json.loads(result.read_text())
    except (OSError, ValueError):
        late = child.returncode == -signal.SIGKILL
        reason = f"no result within {timeout:.0f} s" if late else f"ended with exit code {child.returncode}"
        report |= {"status": "failed", "reason": reason}
    if report.get("status") in ("failed", "wrong"):
        report["log"] = said[-4000:]
    return report
