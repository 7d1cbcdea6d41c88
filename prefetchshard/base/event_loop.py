"""An event loop as other threads see it."""

from __future__ import annotations

import contextvars
import sys
import threading
from collections.abc import Callable
from typing import Any

import anyio.lowlevel


class HomeLoop:
    """The event loop in which an async source lives, and the way to call into it from another thread."""

    def __init__(self) -> None:
        token = anyio.lowlevel.current_token().native_token
        self.thread = threading.get_ident()
        self._token: Any = token
        self._is_asyncio = hasattr(token, "call_soon_threadsafe")

    def runs_here(self) -> bool:
        """Whether this thread is inside it."""
        try:
            if self._is_asyncio:
                return sys.modules["asyncio"].get_running_loop() is self._token
            return sys.modules["trio"].lowlevel.current_trio_token() is self._token
        except RuntimeError:  # no loop at all
            return False

    def is_same(self, other: HomeLoop) -> bool:
        """Whether both are one loop."""
        return self._token is other._token

    def call_soon(self, function: Callable[[], object]) -> bool:
        """Call it in the loop. False where the loop is closed. Never blocks."""
        try:
            if self._is_asyncio:
                self._token.call_soon_threadsafe(function)
            else:
                self._token.run_sync_soon(function)
        except RuntimeError:  # trio.RunFinishedError is one too
            return False
        return True

    def start(self, task: Callable[[], Any], keep: Callable[[Any], object], refused: Callable[[], object]) -> bool:
        """Run an async function as a task of the loop, with the context variables of this thread.

        Args:
            task: the function.
            keep: called in the loop with the task, in asyncio.
            refused: called in the loop where it is about to end, and takes no more tasks.
        """
        variables = contextvars.copy_context()

        def start() -> None:
            if self._is_asyncio:
                started = self._token.create_task(task(), context=variables)
                started._log_destroy_pending = False  # who closes the loop early need not hear of a task that is not theirs
                keep(started)
                return
            try:
                sys.modules["trio"].lowlevel.spawn_system_task(task, context=variables)
            except RuntimeError:  # the nursery is closed; what is raised here would be an internal error of trio
                refused()

        return self.call_soon(start)


def running_loop() -> HomeLoop | None:
    """The event loop that runs in this thread, if one does."""
    try:
        return HomeLoop()
    except RuntimeError:  # of which all the async libraries' errors are
        return None


def leave_event_loop() -> None:
    """A context that was copied in an event loop says in another thread that one runs there (sniffio)."""
    sniffio = sys.modules.get("sniffio")
    if sniffio is not None:
        sniffio.current_async_library_cvar.set(None)
