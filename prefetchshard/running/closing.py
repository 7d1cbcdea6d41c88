"""Closes runs concurrently, in bounded time even if a source blocks."""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterable, Sequence
from typing import Protocol

from prefetchshard.base.errors import StuckThreadWarning
from prefetchshard.running.thread_group import ThreadGroup

GRACE_SECONDS = 0.25
"""How long a source may take to return by itself before it is closed from outside."""
GIVE_UP_SECONDS = 1.5
"""How long closing waits for a source that does not return, before it abandons the thread."""
TRANSFER_SECONDS = 60.0
"""How long closing waits for the threads that never run the source's code: they can only be in a transfer or a compilation."""

_log = logging.getLogger(__name__)


class Closable(Protocol):
    """The steps of closing a run."""

    threads: ThreadGroup

    def request_stop(self) -> bool:
        """Tell the threads to end. Returns whether to wait for them: False the second time, or in one of these threads."""
        ...

    def close_source(self) -> None:
        """Close the source from outside if a thread is still inside it. Does not wait for that."""
        ...

    def finish(self) -> list[Warning]:
        """Drop the batches that are left. Returns warnings about errors from closing the source."""
        ...


def close_runs(runs: Sequence[Closable], *, quietly: bool = False) -> None:
    """Stop runs concurrently, and wait until their threads have ended, in bounded time even if a source blocks.

    First all runs are told to end. A source that does not return by itself is closed from outside. A thread that then still does not
    end is abandoned, with a warning that names it.
    """
    waiting = [run for run in runs if run.request_stop()]
    began = time.monotonic()
    join((thread for run in waiting for thread in (*run.threads.in_source, *run.threads.outside_source)), began + GRACE_SECONDS)
    for run in waiting:
        run.close_source()
    join((thread for run in waiting for thread in run.threads.in_source), began + GIVE_UP_SECONDS)
    join((thread for run in waiting for thread in run.threads.outside_source), time.monotonic() + TRANSFER_SECONDS)
    found = [warning for run in waiting for warning in _finish(run)]
    for warning in () if quietly else found:
        warnings.warn(warning, stacklevel=3)


def join(threads: Iterable[threading.Thread], deadline: float) -> None:
    """Join these threads; skip those that never began."""
    for thread in threads:
        try:
            thread.join(max(0.0, deadline - time.monotonic()))
        except RuntimeError:  # it never began
            pass


def _finish(run: Closable) -> list[Warning]:
    left = [thread for thread in (*run.threads.in_source, *run.threads.outside_source) if thread.is_alive()]
    found = run.finish()
    if left:
        _log.debug("giving up on %s", ", ".join(thread.name for thread in left))
        found.insert(0, StuckThreadWarning("\n".join(map(_stuck_text, left))))
    return found


def _stuck_text(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)  # pyright: ignore[reportPrivateUsage] - documented; the only way to the stack
    stack = "" if frame is None else "".join(traceback.format_stack(frame)[-6:])
    return (
        f"thread {thread.name} is still inside the source's own code and was given up on; it ends when that code returns. "
        f"Give the source a close() that makes it return. Its stack:\n{stack}"
    )
