"""Starting threads where Ctrl-C may come.

`Thread.start` waits until the new thread runs. Ctrl-C in that wait leaves a thread of which nobody can tell whether it will begin, and
may raise `release unlocked lock` in place of KeyboardInterrupt (CPython 3.11 to 3.13). Signals reach the main thread only, so another
one starts the threads; to start that one is a single call into C, which is done or not done.
"""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable

from prefetchshard.base.waiters import Waiters


def run_uncut(function: Callable[[], object]) -> None:
    """Call it where no signal can cut it, and wait for it. It goes on where this wait is interrupted.

    Raises:
        RuntimeError: there can be no more threads.
        BaseException: what the function raised.
    """
    if threading.get_ident() != threading.main_thread().ident:  # `current_thread` would make a Thread of this one, for ever
        function()
        return
    outcome: list[BaseException | None] = []
    done = Waiters()

    def run() -> None:
        error: BaseException | None = None
        try:
            function()
        except BaseException as raised:  # noqa: BLE001 - the caller raises it
            error = raised
        outcome.append(error)
        done.wake()

    _thread.start_new_thread(run, ())
    done.wait(lambda: bool(outcome))
    error = outcome.pop()
    if error is not None:
        try:
            raise error
        finally:
            del error  # its traceback holds this frame
