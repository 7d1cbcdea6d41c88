"""What only interpreters before 3.14 need. Remove this file when 3.14 is the oldest supported version (3.13 ends in October 2029).

During finalisation these interpreters kill a daemon thread as soon as it asks for the GIL, wherever it is; from 3.14 on such a thread
just hangs. If it is inside JAX, the kill aborts the process. So at exit we wait for threads that are inside JAX, which only their stack
frames can tell. `LastingThread` is needed only for CPython 3.11 and 3.12.

On removal: `LastingThread` becomes `threading.Thread`, and `at_exit` joins the threads that end soon and waits for no other.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Collection
from types import FrameType
from typing import Protocol

from prefetchshard.base.clock import MONOTONIC
from prefetchshard.base.waiters import Waiters

CONSUMER_SECONDS = 1.0
"""How long exit waits for daemon threads to ask for their next batch."""
STILL_SECONDS = 0.1
"""A daemon thread that has not moved for this long counts as waiting for something other than JAX."""
LOOK_SECONDS = 0.2
"""How long exit watches whether an abandoned source calls JAX."""
QUIET_SECONDS = 1.0
"""How long a source that does call JAX must be seen outside it."""
JOIN_SECONDS = 60.0
"""How long a thread may take to end after its body has returned."""

_OF_TREES = ("jax.tree", "jax._src.tree")
"""Modules of JAX that only call the functions they are given, and compute nothing."""


class LastingThread(threading.Thread):
    """A daemon thread that can be joined before it starts, and again after Ctrl-C interrupted a join.

    In CPython 3.11 and 3.12, `Thread.join` treats a thread as ended once a join was interrupted.

    Attributes:
        is_done: its body has returned, or will never run.
    """

    def __init__(self, name: str, body: Callable[[], None]) -> None:
        super().__init__(target=body, name=name, daemon=True)
        self.is_done = False
        self._done = Waiters()

    def run(self) -> None:
        try:
            super().run()
        finally:
            self.set_done()

    def set_done(self) -> None:
        self.is_done = True
        self._done.wake()

    def join(self, timeout: float | None = None) -> None:
        if self._done.wait(lambda: self.is_done, timeout) and self.ident is not None:
            super().join(JOIN_SECONDS)

    def is_alive(self) -> bool:
        return super().is_alive() and not self.is_done


class TakeTimes(Protocol):
    """Records when a consumer's thread takes batches."""

    last_next_at: float
    """When it last took a batch, in seconds of the run's clock."""


consumers: dict[int, tuple[TakeTimes, int | None]] = {}
"""For each thread that took batches, by ident: when, and the id of its CPU clock. The thread may have ended, and its ident be reused."""


def note_consumer(times: TakeTimes) -> None:
    """Record that this thread takes batches."""
    ident = threading.get_ident()
    known = consumers.get(ident)
    if known is None or known[0] is not times:
        # Called in the thread itself, as `pthread_getcpuclockid` of an ended thread may crash
        clock = time.pthread_getcpuclockid(ident) if sys.platform != "win32" and hasattr(time, "pthread_getcpuclockid") else None
        consumers[ident] = (times, clock)


def wait_for_consumers(held: Collection[int]) -> None:
    """Wait until daemon threads that take batches ask for their next one, where `hold_daemons` blocks them.

    A thread that drops a batch is inside JAX without a frame that shows it. So a thread that took a batch recently counts as inside JAX
    while its frame changes or it uses CPU time. A thread that does neither waits for something else, and exit does not wait for it.
    """
    began = time.monotonic()
    # No `items()`: that makes pairs, so CPython 3.11 may collect in between, and the Python code that then runs let another thread be added
    recent = {ident for ident in list(consumers) if MONOTONIC() - consumers[ident][0].last_next_at < CONSUMER_SECONDS}
    seen: dict[int, tuple[int, int, float]] = {}
    moved_at: dict[int, float] = {}
    while (now := time.monotonic()) - began < CONSUMER_SECONDS:
        expected = False
        frames = _frames()
        for ident in consumers.keys() & frames.keys():
            if ident in held or ident == threading.get_ident():
                continue
            frame = frames[ident]
            look = (id(frame), frame.f_lasti, _computed_seconds(consumers[ident][1]))
            if seen.get(ident) != look:
                seen[ident], moved_at[ident] = look, now
            expected |= _is_in_jax(frame) or (ident in recent and now - moved_at[ident] < STILL_SECONDS)
        frames.clear()
        if not expected:
            return
        time.sleep(0.002)


def wait_outside_jax(name_prefix: str, deadline: float) -> None:
    """Wait for threads with this name prefix that compute or compile with JAX; others may be abandoned in a source or transform.

    Only JAX's Python code has frames; a call of a compiled function, or the wait for another thread's compilation, has none. So a thread
    seen inside JAX counts as inside until it was not seen there for `QUIET_SECONDS`.
    """
    last_seen = time.monotonic() - QUIET_SECONDS + LOOK_SECONDS
    while (now := time.monotonic()) < deadline:
        left = [thread for thread in threading.enumerate() if thread.name.startswith(name_prefix)]
        if not left:
            return
        frames = _frames()
        if any(_is_in_jax(frames.get(thread.ident or 0)) for thread in left):
            last_seen = now
        elif now - last_seen > QUIET_SECONDS:
            return
        frames.clear()
        left[0].join(0.02)


def _computed_seconds(clock: int | None) -> float:
    try:
        return 0.0 if clock is None else time.clock_gettime(clock)
    except OSError:  # the thread has ended, and another one reuses its ident
        return 0.0


def _frames() -> dict[int, FrameType]:
    return sys._current_frames()  # pyright: ignore[reportPrivateUsage] - documented; the only way to a thread's stack


def _is_in_jax(frame: FrameType | None) -> bool:
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("jax.") and not name.startswith(_OF_TREES):
            return True
        frame = frame.f_back
    return False
