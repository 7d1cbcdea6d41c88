"""How runs are closed: side by side, in bounded time whatever their sources do."""

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
"""How long a source may take to come out by itself before it is closed from outside."""
GIVE_UP_SECONDS = 1.5
"""How long a closing run waits for a source that does not return."""
TRANSFER_SECONDS = 60.0
"""How long it waits for the threads that never run the source's code: only for a transfer or a compilation."""

_log = logging.getLogger(__name__)


class Closable(Protocol):
    """A run, as it is closed."""

    threads: ThreadGroup

    def tell(self) -> bool:
        """Tell the threads to end. Whether the caller should wait for them: not twice, and not from one of them."""
        ...

    def close_source(self) -> None:
        """Close the source from outside where a thread is still inside it. Does not wait for that."""
        ...

    def finish(self) -> list[Warning]:
        """Drop what is left. What there is to say of how the source closed."""
        ...


def close_runs(runs: Sequence[Closable], *, quietly: bool = False) -> None:
    """Stop runs side by side, and wait until their threads have ended, in bounded time whatever their sources do.

    All are told first; a source that does not come out by itself is closed from outside; what stays is named and given up on.
    """
    waiting = [run for run in runs if run.tell()]
    began = time.monotonic()
    join((thread for run in waiting for thread in (*run.threads.in_source, *run.threads.beside_source)), began + GRACE_SECONDS)
    for run in waiting:
        run.close_source()
    join((thread for run in waiting for thread in run.threads.in_source), began + GIVE_UP_SECONDS)
    join((thread for run in waiting for thread in run.threads.beside_source), time.monotonic() + TRANSFER_SECONDS)
    found = [warning for run in waiting for warning in _finish(run)]
    for warning in () if quietly else found:
        warnings.warn(warning, stacklevel=3)


def join(threads: Iterable[threading.Thread], deadline: float) -> None:
    """Wait for them, those that never began left out."""
    for thread in threads:
        try:
            thread.join(max(0.0, deadline - time.monotonic()))
        except RuntimeError:  # it has not begun
            pass


def _finish(run: Closable) -> list[Warning]:
    left = [thread for thread in (*run.threads.in_source, *run.threads.beside_source) if thread.is_alive()]
    found = run.finish()
    if left:
        _log.debug("giving up on %s", ", ".join(thread.name for thread in left))
        found.insert(0, StuckThreadWarning("\n".join(map(_words, left))))
    return found


def _words(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)  # pyright: ignore[reportPrivateUsage] - documented; the only way to the stack
    stack = "" if frame is None else "".join(traceback.format_stack(frame)[-6:])
    return (
        f"thread {thread.name} is still inside the source's own code and was given up on; it ends when that code returns. "
        f"Give the source a close() that makes it return. Its stack:\n{stack}"
    )
