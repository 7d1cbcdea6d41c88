"""Shuts down live runs when the interpreter exits, and forgets them in a forked child.

Their threads are stopped and joined before the interpreter finalises: a daemon thread that is inside JAX then would abort the process.
"""

from __future__ import annotations

import atexit
import os
import threading
import time

from prefetchshard.running.before_3_14 import consumers, wait_for_consumers, wait_outside_jax
from prefetchshard.running.closing import EXIT, TRANSFER_SECONDS, Closable, close_runs, join
from prefetchshard.running.thread_group import THREAD_PREFIX, ending_threads

live: set[Closable] = set()
"""The runs that have begun and not ended. A finaliser may change it at any moment, so every change is a single (atomic) call into C."""

_held: set[int] = set()  # idents of the threads that `hold_daemons` blocks


def is_exiting() -> bool:
    """Whether the interpreter is exiting, so that no run may begin any more."""
    return EXIT.has_begun


def hold_daemons() -> None:
    """Block daemon threads that call this while the interpreter is exiting.

    Exit has closed their runs; they must neither mistake that for the end of the data nor start another run.
    """
    while EXIT.has_begun and threading.current_thread() is not threading.main_thread():
        _held.add(threading.get_ident())
        time.sleep(TRANSFER_SECONDS)


def close_all() -> None:
    """Close all runs at exit, without warnings. Threads blocked in a source may be left behind; threads that call JAX may not."""
    EXIT.has_begun = True
    try:
        close_runs(list(live), quietly=True)
        wait_for_consumers(_held)
    finally:  # Ctrl-C too
        deadline = time.monotonic() + TRANSFER_SECONDS
        join(ending_threads(), deadline)
        wait_outside_jax(THREAD_PREFIX, deadline)
        EXIT.is_over = True


def _forget_all() -> None:
    live.clear()
    consumers.clear()


# Registered after JAX's own clean-up (`thread_group` imports JAX), so it runs before that: no transfer thread is inside JAX by then.
atexit.register(close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)  # their threads exist only in the parent
