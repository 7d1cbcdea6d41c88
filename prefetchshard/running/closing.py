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
CLOSING_SECONDS = 10.0
"""How long closing waits for a source that is inside its own close: stopping worker processes may take seconds."""
EXIT_CLOSING_SECONDS = 3.0
"""The same where the interpreter exits."""
TRANSFER_SECONDS = 60.0
"""How long closing waits for the threads that never run the source's code: they can only be in a transfer or a compilation."""

_log = logging.getLogger(__name__)


class Exit:
    """How far the exit of the interpreter has come.

    Attributes:
        has_begun: all runs are being closed, without warnings, also those that the source of another one closes; no run may begin any more.
        is_over: they are closed, and nothing is left to do. What a destructor calls now may find any module emptied.
    """

    has_begun = False
    is_over = False


EXIT = Exit()


class Closable(Protocol):
    """The steps of closing a run."""

    threads: ThreadGroup

    def request_stop(self) -> bool:
        """Tell the threads to end. Returns whether to wait for them: False the second time, or in one of these threads."""
        ...

    def close_source(self) -> None:
        """Close the source from outside if a thread is still inside it. Does not wait for that."""
        ...

    def closing_threads(self) -> list[threading.Thread]:
        """The live threads that are inside the source's own close, or let go of the source."""
        ...

    def finish(self) -> list[Warning]:
        """Drop the batches that are left. Returns warnings about errors from closing the source."""
        ...


def close_runs(runs: Sequence[Closable], *, quietly: bool = False) -> None:
    """Stop runs concurrently, and wait until their threads have ended, in bounded time even if a source blocks.

    First all runs are told to end. A source that does not return by itself is closed from outside. A thread that then still does not
    end is abandoned, with a warning that names it; later where it is inside the source's own close. Where warnings are errors, one never
    takes the place of an exception that is on its way: it becomes a note of that.
    """
    waiting = [run for run in runs if run.request_stop()]
    if not waiting:  # nothing below may be touched then: see `Exit`
        return
    began = time.monotonic()
    join((thread for run in waiting for thread in (*run.threads.in_source, *run.threads.outside_source)), began + GRACE_SECONDS)
    for run in waiting:
        run.close_source()
    join((thread for run in waiting for thread in run.threads.in_source), began + GIVE_UP_SECONDS)
    _join_closing(waiting, began + (EXIT_CLOSING_SECONDS if quietly else CLOSING_SECONDS))
    join((thread for run in waiting for thread in run.threads.outside_source), time.monotonic() + TRANSFER_SECONDS)
    found = [warning for run in waiting for warning in _finish(run)]
    on_its_way = sys.exception()
    for warning in () if quietly or EXIT.has_begun else found:
        try:
            warnings.warn(warning, stacklevel=3)
        except Warning as error:
            if on_its_way is None:
                raise
            on_its_way.add_note(f"{type(error).__name__}: {error}")


def join(threads: Iterable[threading.Thread], deadline: float) -> None:
    """Join these threads; skip those that never began."""
    for thread in threads:
        try:
            thread.join(max(0.0, deadline - time.monotonic()))
        except RuntimeError:  # it never began
            pass


def _join_closing(runs: Iterable[Closable], deadline: float) -> None:
    """Join the threads that are inside the source's own close. What that lets go of the source has the time of grace again."""
    closed: list[Closable] = []
    for run in runs:
        while (threads := run.closing_threads()) and time.monotonic() < deadline:
            closed.append(run)
            join(threads, deadline)
    join((thread for run in closed for thread in run.threads.in_source), time.monotonic() + GRACE_SECONDS)


def _finish(run: Closable) -> list[Warning]:
    left = [thread for thread in (*run.threads.in_source, *run.threads.outside_source) if thread.is_alive()]
    closing = run.closing_threads()
    found = run.finish()
    if left:
        _log.debug("giving up on %s", ", ".join(thread.name for thread in left))
        found.insert(0, StuckThreadWarning("\n".join(_stuck_text(thread, closing) for thread in left)))
    return found


def _stuck_text(thread: threading.Thread, closing: list[threading.Thread]) -> str:
    frame = sys._current_frames().get(thread.ident or 0)  # pyright: ignore[reportPrivateUsage] - documented; the only way to the stack
    stack = "" if frame is None else "".join(traceback.format_stack(frame)[-6:])
    if thread in closing:
        where, advice = "the source's own close() or destructor", "Let that end sooner."
    elif closing:
        where, advice = "the source's own code", "The source's close() was called, and has not returned either."
    else:
        where, advice = "the source's own code", "Give the source a close() that makes it return."
    return f"thread {thread.name} is still inside {where} and was given up on; it ends when that returns. {advice} Its stack:\n{stack}"
