"""What becomes of live runs when the interpreter goes down, and in a forked child.

Their threads are stopped and joined before it finalises: a daemon thread that is inside JAX then aborts the process.
"""

from __future__ import annotations

import atexit
import os
import threading
import time

from prefetchshard.running.before_3_14 import consumers, wait_for_consumers, wait_outside_jax
from prefetchshard.running.closing import TRANSFER_SECONDS, Closable, close_runs, join
from prefetchshard.running.thread_group import THREAD_PREFIX, ending_threads

live: set[Closable] = set()
"""The runs that have begun and not ended. Each change is one call into C: a finaliser makes some."""

_held: set[int] = set()  # idents of the threads that are kept from going on
_exiting = False


def is_exiting() -> bool:
    """Whether the interpreter goes down: no run may begin any more."""
    return _exiting


def hold_daemons() -> None:
    """Once the interpreter goes down, what daemon threads are left come no further than this.

    Their runs were closed for them; they must neither take that for the end of the data, nor start another run.
    """
    while _exiting and threading.current_thread() is not threading.main_thread():
        _held.add(threading.get_ident())
        time.sleep(TRANSFER_SECONDS)


def close_all() -> None:
    """At exit. Threads that wait in a source may be left, what they would say is of no use any more; those that call JAX may not."""
    global _exiting
    _exiting = True
    try:
        close_runs(list(live), quietly=True)
        wait_for_consumers(_held)
    finally:  # Ctrl-C too
        deadline = time.monotonic() + TRANSFER_SECONDS
        join(ending_threads(), deadline)
        wait_outside_jax(THREAD_PREFIX, deadline)


def _forget_all() -> None:
    live.clear()
    consumers.clear()


# Registered after JAX's own clean-up (`thread_group` imports JAX), so run before it: the transfer threads have left JAX when it goes down.
atexit.register(close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)  # their threads are in the parent
