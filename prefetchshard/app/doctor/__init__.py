"""`python -m prefetchshard doctor`: what a user of the loader must know of a machine, measured in some seconds.

It looks up versions, devices, CPUs with their quota, memory and the interpreter, and measures transfers and copies with the parts that a
loader works with: its staging ring, its `put`, its copies. The first line says what matters most. What fails is said in its line.
"""

from __future__ import annotations

import sys

import msgspec

from prefetchshard.app.doctor.examination import examine
from prefetchshard.app.doctor.facts import Failed
from prefetchshard.app.doctor.text import text_of


def run(*, as_json: bool) -> int:
    """Examine this machine, and write what was found to the standard output.

    Args:
        as_json: as one JSON object; else as text.

    Returns:
        The exit code: 0, or 1 where JAX's devices cannot be used.
    """
    try:
        report = examine(tell=_tell)
    finally:
        _tell("")
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n" if as_json else text_of(report))
    return 1 if isinstance(report.findings.devices, Failed) else 0


def _tell(what: str) -> None:
    """In place of what was told before; nothing takes that away."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{what}")
        sys.stderr.flush()
