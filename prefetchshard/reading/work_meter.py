"""How busy reader threads are, and how much of that on a CPU; also of the parts that they are in the middle of."""

from __future__ import annotations

import threading
import time

from prefetchshard.base.clock import Clock

SCHEDULING = "/proc/thread-self/schedstat"
"""Of this thread, where there is such a file: nanoseconds on a CPU, and nanoseconds in which it could run and had none."""

LOOK_SECONDS = 0.02
"""A thread looks into it at most so often: that takes some microseconds."""


def queued_seconds() -> float:
    """For how long this thread has waited for a CPU so far; 0 where nobody counts that."""
    try:
        with open(SCHEDULING, "rb") as file:
            return int(file.read().split()[1]) * 1e-9
    except (OSError, IndexError, ValueError):
        return 0.0


class _Hand:
    """One thread.

    Attributes:
        began_at: when it began its part; None where it has none.
        cpu_clock: the id of its CPU clock; None where there is no such thing.
        cpu_from: what that said when it came.
        looked_at: when it looked for how long it had waited for a CPU.
        queued: what it found then, seconds.
    """

    __slots__ = ("began_at", "cpu_clock", "cpu_from", "looked_at", "queued")

    def __init__(self, now: float) -> None:
        self.looked_at = now
        self.queued = queued_seconds()
        self.began_at: float | None = None
        self.cpu_from = time.thread_time()
        self.cpu_clock: int | None = None
        if hasattr(time, "pthread_getcpuclockid"):
            self.cpu_clock = time.pthread_getcpuclockid(threading.get_ident())


class WorkMeter:
    """Adds up what the reader threads of a run do.

    Args:
        clock: monotonic seconds.

    Thread safety: `enter`, `begin`, `end` and `leave` by each thread for itself; `sums` from any thread.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()  # guards all that follows
        self._hands: dict[int, _Hand] = {}
        self._busy_seconds = 0.0
        self._cpu_seconds = 0.0
        self._queued_seconds = 0.0
        self._parts = 0

    def enter(self) -> None:
        with self._lock:
            self._hands[threading.get_ident()] = _Hand(self._clock())

    def begin(self) -> None:
        """A part begins."""
        self._hands[threading.get_ident()].began_at = self._clock()

    def end(self) -> None:
        hand, now = self._hands[threading.get_ident()], self._clock()
        queued = hand.queued
        if now - hand.looked_at > LOOK_SECONDS:
            hand.queued, hand.looked_at = queued_seconds(), now
        with self._lock:
            began_at, hand.began_at = hand.began_at, None
            if began_at is not None:
                self._busy_seconds += now - began_at
            self._queued_seconds += hand.queued - queued
            self._parts += 1

    def leave(self) -> None:
        with self._lock:
            hand = self._hands.pop(threading.get_ident())
            self._cpu_seconds += time.thread_time() - hand.cpu_from

    def sums(self) -> tuple[float, float, float, int]:
        """Busy seconds, CPU seconds, seconds of waiting for a CPU, parts that are done."""
        with self._lock:  # a thread whose CPU clock is read must not end meanwhile
            now, busy, cpu = self._clock(), self._busy_seconds, self._cpu_seconds
            for hand in self._hands.values():
                busy += 0.0 if hand.began_at is None else now - hand.began_at
                if hand.cpu_clock is not None:
                    cpu += time.clock_gettime(hand.cpu_clock) - hand.cpu_from
            return busy, cpu, self._queued_seconds, self._parts
