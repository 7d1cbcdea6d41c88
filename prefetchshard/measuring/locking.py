"""How long a thread that could go on has to wait for the interpreter's lock.

Nothing in Python tells who waits for the lock. But a thread that sleeps for a known time sees when it goes on: right away where the lock is
free, and after `sys.getswitchinterval()` (5 ms) or more where another thread computes in Python and does not let go of it by itself. The
transfer thread looks, whenever it waits for readers or for the consumer. That it is woken in time tells less: who wakes it mostly waits itself
a moment later, so only a late awakening counts. The idea is that of `gilknocker` (https://github.com/milesgranger/gilknocker), whose thread is a native one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import msgspec

from prefetchshard.base.clock import Clock

PROBE_SECONDS = 0.002
"""How long the transfer thread sleeps before it first looks; then twice as long each time, so that a long wait burns no CPU time."""

MOST_PROBE_SECONDS = 2.0

LATE_SHARE = 0.6
"""Of the switch interval: later than that it was the lock. Systems wake a thread on a busy machine within some 3 ms."""


class Locking(msgspec.Struct, frozen=True):
    """What was seen of the interpreter's lock.

    Attributes:
        looks: how often a thread looked.
        waits: how often it had to wait for the lock.
        waited_seconds: these waits, summed.
    """

    looks: int = 0
    waits: int = 0
    waited_seconds: float = 0.0

    @property
    def share(self) -> float:
        """Of the looks those that had to wait, 0.0 to 1.0."""
        return self.waits / self.looks if self.looks else 0.0

    def __sub__(self, earlier: Locking) -> Locking:
        return Locking(self.looks - earlier.looks, self.waits - earlier.waits, self.waited_seconds - earlier.waited_seconds)


class LockProbes:
    """Counts the looks. Thread safety: one thread looks; any asks."""

    def __init__(self) -> None:
        self._looks = 0
        self._waits = 0
        self._waited_seconds = 0.0

    def look(self, late_seconds: float) -> None:
        """A thread that slept went on so much later than it could have."""
        self._looks += 1
        if late_seconds > LATE_SHARE * sys.getswitchinterval():
            self._waits += 1
            self._waited_seconds += late_seconds

    def woken(self, late_seconds: float) -> None:
        """A thread that was woken went on so much later; only a late one tells anything."""
        if late_seconds > LATE_SHARE * sys.getswitchinterval():
            self.look(late_seconds)

    def wait(self, wait_ready: Callable[[float], bool], is_over: Callable[[], bool], clock: Clock) -> bool:
        """Wait until something is ready, and look at each time that it takes longer. Returns False where nothing will come."""
        seconds = PROBE_SECONDS
        while True:
            began = clock()
            if wait_ready(seconds):
                return True
            if is_over():
                return False
            late = clock() - began - seconds
            if late >= 0:
                self.look(late)
            seconds = min(2 * seconds, MOST_PROBE_SECONDS)

    def now(self) -> Locking:
        return Locking(self._looks, self._waits, self._waited_seconds)
