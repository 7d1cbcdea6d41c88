"""A waiter misses no change, and waking takes no lock, so that a finaliser or a signal handler may wake."""

from __future__ import annotations

import gc
import math
import signal
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from prefetchshard.base.waiters import Waiters
from prefetchshard.testing import ManualClock
from support import HANG_SECONDS, Interrupts, wait_until


class Flag:
    """A change, and the waiters for it."""

    def __init__(self) -> None:
        self.parking = Waiters()
        self.is_set = False

    def set(self) -> None:
        self.is_set = True
        self.parking.wake()

    def wait(self, timeout_seconds: float | None = None) -> bool:
        return self.parking.wait(lambda: self.is_set, timeout_seconds)


def start(function: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def joined(*threads: threading.Thread) -> bool:
    for thread in threads:
        thread.join(HANG_SECONDS)
    return not any(thread.is_alive() for thread in threads)


def test_no_wait_where_it_is_so_already() -> None:
    flag = Flag()
    flag.set()
    assert flag.wait()
    assert flag.wait(0)
    assert len(flag.parking) == 0


def test_one_wake_releases_every_waiter() -> None:
    flag = Flag()
    threads = [start(flag.wait) for _ in range(8)]
    wait_until(lambda: len(flag.parking) == 8)
    flag.set()
    assert joined(*threads)
    assert len(flag.parking) == 0


def test_a_wake_without_the_change_lets_nobody_go() -> None:
    flag = Flag()
    looks: list[bool] = []
    thread = start(lambda: flag.parking.wait(lambda: looks.append(flag.is_set) or flag.is_set))
    wait_until(lambda: len(flag.parking) == 1)
    before = len(looks)
    flag.parking.wake()
    wait_until(lambda: len(looks) > before and len(flag.parking) == 1)
    assert thread.is_alive()
    flag.set()
    assert joined(thread)


def test_a_change_between_the_look_and_the_parking_is_seen() -> None:
    """The window in which a wake-up could be lost: the change comes after the first look, before the waker is parked."""
    parking = Waiters()
    looks = 0

    def ready() -> bool:
        nonlocal looks
        looks += 1
        if looks == 1:
            parking.wake()  # nobody is parked yet, so this reaches nobody
            return False
        return True

    assert joined(start(lambda: parking.wait(ready)))
    assert looks == 2
    assert len(parking) == 0


def test_timeouts() -> None:
    flag = Flag()
    assert not flag.wait(0)
    assert not flag.wait(-1)
    began = time.monotonic()
    assert not flag.wait(0.05)
    assert time.monotonic() - began >= 0.05
    assert len(flag.parking) == 0


@pytest.mark.parametrize("timeout", [60.0, 1e12, math.inf])
def test_a_change_before_the_time_is_up(timeout: float) -> None:
    flag = Flag()
    answers: list[bool] = []
    thread = start(lambda: answers.append(flag.wait(timeout)))
    wait_until(lambda: len(flag.parking) == 1)
    flag.set()
    assert joined(thread)
    assert answers == [True]


def test_a_change_as_the_time_runs_out_counts() -> None:
    parking = Waiters()
    answers = iter([False, False, True])
    assert parking.wait(lambda: next(answers), 0.0)


def test_the_time_is_the_clocks() -> None:
    """However long it takes by other clocks; who moves it on wakes."""
    flag, clock = Flag(), ManualClock()
    answers: list[bool] = []
    thread = start(lambda: answers.append(flag.parking.wait(lambda: flag.is_set, 0.01, clock)))
    wait_until(lambda: len(flag.parking) == 1)
    thread.join(0.05)
    assert thread.is_alive()
    clock.advance(0.02)
    flag.parking.wake()
    assert joined(thread)
    assert answers == [False]


class Waker:
    def __init__(self) -> None:
        self.released = 0

    def release(self) -> None:
        self.released += 1


def test_other_wakers_are_released_once() -> None:
    parking = Waiters()
    first, second, gone = Waker(), Waker(), Waker()
    for waker in (first, gone, second):
        parking.park(waker)
    parking.leave(gone)
    parking.leave(gone)
    parking.wake()
    parking.wake()
    assert [waker.released for waker in (first, second, gone)] == [1, 1, 0]


def test_who_parks_while_it_wakes_is_not_woken_again_and_again() -> None:
    """`wake` is bounded: it may run in a finaliser."""
    parking = Waiters()

    class Stubborn(Waker):
        def release(self) -> None:
            super().release()
            parking.park(self)

    waker = Stubborn()
    parking.park(waker)
    parking.wake()
    assert waker.released == 1
    assert len(parking) == 1


def test_it_may_wake_inside_a_wake() -> None:
    flag = Flag()

    class Nested(Waker):
        def release(self) -> None:
            super().release()
            flag.set()

    threads = [start(flag.wait) for _ in range(2)]
    wait_until(lambda: len(flag.parking) == 2)
    nested = [Nested(), Nested()]
    for waker in nested:
        flag.parking.park(waker)
    flag.parking.wake()
    assert joined(*threads)
    assert [waker.released for waker in nested] == [1, 1]


def test_a_finaliser_may_wake() -> None:
    flag = Flag()

    class Dying:
        pass

    dying = Dying()
    dying.cycle = dying  # pyright: ignore[reportAttributeAccessIssue]
    weakref.finalize(dying, flag.set).atexit = False
    thread = start(flag.wait)
    wait_until(lambda: len(flag.parking) == 1)
    del dying
    gc.collect()
    assert joined(thread)


def test_a_signal_handler_may_wake_the_thread_that_it_interrupts() -> None:
    flag = Flag()
    old = signal.signal(signal.SIGUSR1, lambda *_: flag.set())
    try:
        threading.Timer(0.02, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR1)).start()
        assert flag.wait(HANG_SECONDS)
    finally:
        signal.signal(signal.SIGUSR1, old)


def test_an_interrupted_wait_leaves_nothing_behind() -> None:
    flag = Flag()
    with Interrupts(0.01) as interrupts:
        for _ in range(3):
            interrupts.armed = True
            try:
                flag.wait()
            except KeyboardInterrupt:
                pass
        assert interrupts.count == 3
    assert len(flag.parking) == 0


def test_a_signal_that_does_not_end_the_blocking_is_answered_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Ctrl-C that strikes right before the lock blocks; here another thread gets it, which is the same to the one that waits."""
    monkeypatch.setattr("prefetchshard.base.waiters.SIGNAL_SECONDS", 1.0)
    flag, answered, in_time = Flag(), threading.Event(), list[bool]()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    old = signal.signal(signal.SIGUSR1, lambda *_: answered.set())

    def strike() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
        wait_until(lambda: len(flag.parking))
        time.sleep(0.05)  # until it blocks; without that the test proves less, but holds
        signal.raise_signal(signal.SIGUSR1)
        in_time.append(answered.wait(HANG_SECONDS))
        flag.set()

    thread = threading.Thread(target=strike)
    try:
        thread.start()
        assert flag.wait()
        assert in_time == [True]
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, old)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_no_wake_up_is_lost_under_load() -> None:
    """Two threads that hand a turn to and fro: one lost wake-up would stop both."""
    turn, rounds = 0, 5_000
    parking = Waiters()
    ended = [False, False]

    def is_mine(me: int) -> bool:
        return turn % 2 == me

    def play(me: int) -> None:
        nonlocal turn
        for _ in range(rounds):
            parking.wait(lambda: is_mine(me))
            turn += 1
            parking.wake()
        ended[me] = True

    threads = start(lambda: play(0)), start(lambda: play(1))
    while not all(ended):
        before = turn
        wait_until(lambda: turn != before or all(ended))  # noqa: B023 - called in this round only
    assert joined(*threads)
    assert turn == 2 * rounds
    assert len(parking) == 0
