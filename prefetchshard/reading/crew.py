"""The reader threads of a run: they come and go while it goes on, as a controller says."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias, TypeVar

from prefetchshard.base.clock import Clock
from prefetchshard.reading.controller import Bounds, Decision, Load

GLANCE_SECONDS = 0.005
"""The controller is asked at most so often."""

Body: TypeAlias = Callable[[], None]

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Control:
    """How the number of threads of a run is decided, and what follows from it.

    Args:
        decide: the policy.
        measure: what the run has done so far.
        bounds: how many threads there may be.
        resize: called for each new number before threads come, and after they were told to go.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        decide: Callable[[Load, int, Bounds], Decision | None],
        measure: Callable[[], Load],
        bounds: Callable[[], Bounds],
        resize: Callable[[], None],
        clock: Clock,
    ) -> None:
        self.decide = decide
        self.measure = measure
        self.bounds = bounds
        self.resize = resize
        self.clock = clock
        self.due_at = clock() + GLANCE_SECONDS
        self.lock = threading.Lock()  # held by the thread that looks; nobody waits for it


class Crew:
    """The reader threads of a run.

    It is one of them that looks, after a part, whether there should be more or fewer: they hold the source anyway, and nobody else may be
    the last to hold it. Whichever thread first sees that there are too many leaves, so those that wait go before those that work.

    Args:
        wanted: how many there are at the beginning.

    Attributes:
        wanted: how many there should be now.
        control: decides about that; None: it stays as it is. Set before the run begins.
        start: starts a thread with this name and body; False: nothing more is wanted. Set by the run.

    Thread safety: every method may be called from any thread.
    """

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self.control: Control | None = None
        self.start: Callable[[str, Body], bool] = lambda name, body: False
        self._lock = threading.Lock()  # guards _present
        self._present = set(range(wanted))  # numbers of threads, also of those that are about to start
        self._most: int | None = None  # once no more could be started
        self._mine = _Mine()

    def bodies(self, work: Callable[[int], None]) -> Sequence[tuple[str, Body]]:
        """What each of the first threads does: a name and a function."""
        return [_reader(number, work) for number in range(self.wanted)]

    # -- the threads

    def work(
        self,
        number: int,
        work: Callable[[Callable[[], T | None], Callable[[], object]], None],
        deal: Callable[[], T | None],
        hire: Callable[[int], None],
        recall: Callable[[int], None],
    ) -> None:
        """The body of a thread: do what is dealt out, until there is no more or this thread is one too many.

        Args:
            number: of the thread.
            work: does what its first argument deals out, until that is None, and calls its second one after each part.
            deal: the next part; None: there is no more, or this thread `is_dismissed`.
            hire: the body of one more thread, with its number.
            recall: wakes threads that wait for a part; called with how many of them are too many.
        """
        control = self.control
        assert control is not None
        self._mine.number = number
        try:
            work(lambda: None if self.is_dismissed() else deal(), lambda: self._look(control, hire, recall))
        finally:
            with self._lock:
                if not self._mine.is_dismissed:
                    self._present.discard(number)

    def is_dismissed(self) -> bool:
        """Whether this thread is one too many; from then on it is counted no more, and has to leave."""
        mine = self._mine
        if mine.is_dismissed or mine.number is None or len(self._present) <= self.wanted:
            return mine.is_dismissed
        with self._lock:
            if len(self._present) > self.wanted:
                self._present.discard(mine.number)
                mine.is_dismissed = True
        return mine.is_dismissed

    # -- more of them, or fewer

    def _look(self, control: Control, hire: Callable[[int], None], recall: Callable[[int], None]) -> None:
        if control.clock() < control.due_at or not control.lock.acquire(blocking=False):
            return
        try:
            control.due_at = control.clock() + GLANCE_SECONDS
            bounds = control.bounds()
            if self._most is not None:
                bounds = Bounds(min(bounds.for_work, self._most), min(bounds.most, self._most))
            decision = control.decide(control.measure(), self.wanted, bounds)
            if decision is not None and min(decision.workers, bounds.most) != self.wanted:
                self._become(min(decision.workers, bounds.most), decision.reason, control, hire, recall)
        finally:
            control.lock.release()

    def _become(self, workers: int, reason: str, control: Control, hire: Callable[[int], None], recall: Callable[[int], None]) -> None:
        before, self.wanted = self.wanted, workers
        _log.info("%d reader threads, %d before: %s", workers, before, reason)
        control.resize()
        if workers < before:
            recall(before - workers)
        else:
            self._hire(control, hire)

    def _hire(self, control: Control, hire: Callable[[int], None]) -> None:
        while (number := self._next_number()) is not None:
            try:
                if self.start(*_reader(number, hire)):
                    continue
            except RuntimeError as error:
                _log.info("no more threads can be started (%s): it stays at %d", error, number)
                self._most = max(1, len(self._present) - 1)
            with self._lock:
                self._present.discard(number)
            if self._most is not None:
                self.wanted = self._most
                control.resize()
            return

    def _next_number(self) -> int | None:
        """The number of one more thread; None where there are enough."""
        with self._lock:
            if len(self._present) >= self.wanted:
                return None
            number = next(number for number in range(self.wanted) if number not in self._present)
            self._present.add(number)
        return number


class _Mine(threading.local):
    """What each thread has for itself."""

    number: int | None = None
    is_dismissed = False


def _reader(number: int, work: Callable[[int], None]) -> tuple[str, Body]:
    return f"reader-{number}", partial(work, number)
