"""What only interpreters before 3.14 need. Remove this file when 3.14 is the oldest one supported (3.13 ends in October 2029).

They end a daemon thread in the middle of whatever it is in, as soon as it asks for the interpreter's lock after the program's end; from
3.14 on such a thread just stops. One that is inside JAX then aborts the process. So the end of the program looks at frames, the only
thing that tells whether a thread is inside JAX, and waits for it. `LastingThread` is for CPython 3.11 and 3.12 alone.

When this goes: `LastingThread` becomes `threading.Thread`, and `at_exit` joins the threads that end soon and waits for no other.
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
"""How long the end of the program waits for daemon threads to come to their next batch."""
STILL_SECONDS = 0.1
"""How long one of them must have stood at one place to count as one that waits for something else."""
LOOK_SECONDS = 0.2
"""How long the end of the program looks whether a source that was given up on calls JAX."""
QUIET_SECONDS = 1.0
"""How long one that does must have stayed away from JAX."""
JOIN_SECONDS = 60.0
"""How long a thread whose body has ended may take to be gone."""

_OF_TREES = ("jax.tree", "jax._src.tree")
"""Modules of JAX that call back what they are given, and compute nothing."""


class LastingThread(threading.Thread):
    """A daemon thread that can be waited for also after Ctrl-C, and before it began.

    An interrupted `join` takes the thread for ended from then on (CPython 3.11 and 3.12).

    Attributes:
        is_done: its body has ended, or will never begin.
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


class Taking(Protocol):
    """What a consumer's thread adds to."""

    last_next_at: float
    """When it took a batch last, in seconds of the run's clock."""


consumers: dict[int, tuple[Taking, int | None]] = {}
"""The threads that took batches, by ident, which may be that of a thread that has ended; and the clock of what each computes."""


def note_consumer(taking: Taking) -> None:
    """This thread takes a batch."""
    ident = threading.get_ident()
    known = consumers.get(ident)
    if known is None or known[0] is not taking:
        # Asked for here, as asking for that of a thread that has ended may crash
        clock = time.pthread_getcpuclockid(ident) if sys.platform != "win32" and hasattr(time, "pthread_getcpuclockid") else None
        consumers[ident] = (taking, clock)


def wait_for_consumers(held: Collection[int]) -> None:
    """Daemon threads that take batches may be inside JAX where they drop one: each comes to its next batch first, and is held there.

    That has no frames. So it counts as inside JAX while it moves or computes, where it took a batch of late; one that stands still waits
    for something else, and nobody waits for it.
    """
    began = time.monotonic()
    recent = {ident for ident, (taking, _) in list(consumers.items()) if MONOTONIC() - taking.last_next_at < CONSUMER_SECONDS}
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
    """A source or a transform may be given up on where it does not return, but not where it computes with JAX, or compiles.

    Frames tell it, so only what JAX does in Python: a thread counts as inside JAX until it was not seen there for `QUIET_SECONDS`, as
    the calls of compiled functions, and waiting for another thread's compilation, have no frames.
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
    except OSError:  # that thread has ended, and another one has its ident
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
