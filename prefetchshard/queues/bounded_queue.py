"""The hand-off between two stages: bounded, in order, with several senders.

A sender first reserves a place, then makes the item, then sends it: the bound holds for what is being made too, and items arrive in
the order of the reservations, whoever is done first. Waiting moves nothing and moving waits for nothing, so a waiter can be given up
on and no item is lost. The end and a failure are fields, not items: neither can block on a full queue.
"""

from __future__ import annotations

import enum
import threading
from collections import deque
from typing import Final, Generic, Literal, TypeAlias, TypeVar

import msgspec

from prefetchshard.base.clock import MONOTONIC, Clock
from prefetchshard.base.waiters import Waiters

T = TypeVar("T")


class _Empty(enum.Enum):
    EMPTY = "EMPTY"


EMPTY: Final = _Empty.EMPTY
EmptyType: TypeAlias = Literal[_Empty.EMPTY]


BURST_SECONDS = 0.001
"""How long who waits may be left out in favour of a burst. Measured with `bench/handover.py` on two cores, alternating: 1.12 to 1.19 times the
loop by hand with bursts, 1.46 to 1.56 without."""


class QueueStats(msgspec.Struct, frozen=True):
    """One look at a queue.

    Attributes:
        capacity: items that may be reserved and not yet released.
        held: items reserved and not yet released; at `capacity` the senders are faster than the receiver.
        ready: items that could be taken now, at the head of the order or behind an item that is still being made.
        taken: items taken so far.
        senders_waiting: threads that wait for room.
        receivers_waiting: threads and event loops that wait for an item.
        backpressure_seconds: time that senders waited for room, summed over senders. High: the receiver is the slow one.
        starved_seconds: time that receivers waited for an item, summed over receivers. High: the senders are the slow ones.
    """

    capacity: int
    held: int
    ready: int
    taken: int
    senders_waiting: int
    receivers_waiting: int
    backpressure_seconds: float
    starved_seconds: float


class Ticket(Generic[T]):
    """A reserved place in the order. Exactly one of `send`, `fail` and `withdraw` is called, once."""

    __slots__ = ("_queue", "failure", "item", "settled")

    def __init__(self, queue: BoundedQueue[T]) -> None:
        self._queue = queue
        self.item: T | None = None
        self.failure: BaseException | None = None
        self.settled = False

    def send(self, item: T) -> None:
        """Fill the place."""
        self.item = item
        self.settled = True
        self._queue.tell_receivers()

    def fail(self, failure: BaseException) -> None:
        """End the queue at this place: what was reserved before still comes, then the failure."""
        self.failure = failure
        self.settled = True
        self._queue.refuse()

    def withdraw(self) -> None:
        """Give the place back; the order goes on without it."""
        self._queue.remove(self)


class BoundedQueue(Generic[T]):
    """A bounded hand-off that keeps the order of reservation.

    Args:
        capacity: places; a place is free again when its item is taken, or, with `held_until_release`, when `release()` is called.
        held_until_release: what the items hold (memory of the staging ring) outlives their being taken.
        clock: monotonic seconds.

    Thread safety: senders that need an order among them reserve one at a time; everything else may be called from any thread.
    `cancel` and `clear` take no lock and may be called from a finaliser or a signal handler. Ctrl-C in the middle of `take_nowait` loses
    no item.

    Attributes:
        cancelled: nothing more is wanted; set by `cancel` alone.
        in_bursts: the items are small, so that taking turns for the interpreter's lock costs more than making them. Who waits is then left
            waiting for up to `BURST_SECONDS`, unless the queue is full or holds one item at most. May be set at any time.
        senders: that wait for room.
        receivers: that wait for an item, event loops too.
    """

    def __init__(self, capacity: int, *, held_until_release: bool = False, clock: Clock = MONOTONIC) -> None:
        self.capacity = capacity
        self.in_bursts = False
        self.senders = Waiters()
        self.receivers = Waiters()
        self._lazy_senders = Waiters()
        self._lazy_receivers = Waiters()
        self._held_until_release = held_until_release
        self._clock = clock
        # Two locks: a signal handler that interrupts a receiver while it holds its lock may close the run, and waits for the senders.
        self._sending = threading.Lock()  # guards who reserves, and _backpressure_seconds
        self._receiving = threading.Lock()  # guards who takes, _unreleased, _taken and _starved_seconds
        self._line: deque[Ticket[T]] = deque()
        self._unreleased = 0  # items that were taken and still hold their place
        self._taken = 0
        self._backpressure_seconds = 0.0
        self._starved_seconds = 0.0
        self._ended = False
        self._refusing = False
        self.cancelled = False
        self._broken = False
        self._failure: BaseException | None = None

    # -- sending

    def reserve(self) -> Ticket[T] | None:
        """Wait for room and take a place. None: nothing more is wanted."""
        while not self._refusing:
            if self._has_room():
                ticket = Ticket(self)  # outside the lock: an allocation may run finalisers
                with self._sending:
                    if self._has_room() and not self._refusing:
                        self._line.append(ticket)
                        return ticket
            began = self._clock()
            if not (self.in_bursts and self._lazy_senders.wait(self._can_reserve, BURST_SECONDS)):
                self.senders.wait(self._can_reserve)
            waited = self._clock() - began
            with self._sending:
                self._backpressure_seconds += waited
        return None

    def put(self, item: T) -> bool:
        """Reserve and send. False: nothing more is wanted, and the item was not taken over."""
        ticket = self.reserve()
        if ticket is None:
            return False
        ticket.send(item)
        return True

    def end(self, failure: BaseException | None = None) -> None:
        """Nothing more comes after what is reserved already; then the failure, if there is one. Never blocks."""
        if self._failure is None and not self.cancelled:
            self._failure = failure
        self._ended = True
        self.refuse()

    def refuse(self) -> None:
        """Grant no further place."""
        self._refusing = True
        self._wake_all()

    def remove(self, ticket: Ticket[T]) -> None:
        """Take a reserved place out of the order."""
        try:
            self._line.remove(ticket)
        except ValueError:  # cleared meanwhile
            return
        self._wake_all()

    # -- receiving

    def wait_ready(self, timeout_seconds: float | None = None) -> bool:
        """Wait until an item can be taken. False: none will come (see `is_over`), the time ran out, or another receiver was faster."""
        if not self._settled():
            began = self._clock()
            if not (self.in_bursts and timeout_seconds is None and self._lazy_receivers.wait(self._settled, BURST_SECONDS)):
                self.receivers.wait(self._settled, timeout_seconds, self._clock)
            waited = self._clock() - began
            with self._receiving:
                self._starved_seconds += waited
        return self.has_ready()

    def take_nowait(self) -> T | EmptyType:
        """The next item in order, or EMPTY."""
        ticket: Ticket[T] | None = None
        try:
            with self._receiving:
                line = self._line
                head = _takeable(line)
                if head is None or self.cancelled or self._broken:
                    return EMPTY
                ticket = head  # no call, so no signal, comes between this and the end of the block
                if self._held_until_release:
                    self._unreleased += 1  # before the item leaves the line, or a sender would see room
                del line[0]
                self._taken += 1
            if not self._held_until_release:
                self._tell_senders()
        except BaseException:  # Ctrl-C
            if ticket is not None:
                self._put_back(ticket)
            raise
        item, ticket.item = ticket.item, None  # whoever sent it may keep the ticket
        return item  # pyright: ignore[reportReturnType] - a settled ticket without failure holds an item

    def peek_nowait(self) -> T | EmptyType:
        """The next item in order, left where it is, or EMPTY."""
        head = _takeable(self._line)
        return EMPTY if head is None or self.cancelled or self._broken else head.item  # pyright: ignore[reportReturnType] - as above

    def untake(self, item: T) -> None:
        """Put an item back that was taken and not used: it is the next one again."""
        ticket = Ticket(self)
        ticket.item = item
        ticket.settled = True
        self._put_back(ticket)

    def _put_back(self, ticket: Ticket[T]) -> None:
        with self._receiving:
            self._taken -= 1
            self._unreleased -= self._held_until_release
            self._line.appendleft(ticket)
        self._wake_all()

    def break_off(self, failure: BaseException) -> None:
        """The receiver cannot go on: the failure comes next, and what was sent comes no more."""
        self._failure = failure
        self._ended = True
        self._broken = True
        self._line = deque()
        self.refuse()

    def forget_failure(self) -> None:
        """Whoever took the failure keeps it; its traceback, once it was raised there, leads to the receiver."""
        self._failure = None

    def release(self) -> None:
        """What an item taken earlier held is free again."""
        with self._receiving:
            self._unreleased -= 1
        self._tell_senders()

    def cancel(self) -> None:
        """Nothing more is wanted: every waiter returns. Never blocks, takes no lock, drops nothing by itself."""
        self.cancelled = True
        self._refusing = True
        self._wake_all()

    def clear(self) -> None:
        """Drop what a cancelled queue still holds. Takes no lock."""
        line, self._line = self._line, deque()
        self._failure = None
        for ticket in list(line):
            ticket.failure = None  # its traceback leads to the ticket

    # -- waking

    def tell_receivers(self) -> None:
        """An item was sent."""
        self.receivers.wake()
        if self._lazy_receivers.parked and len(self._line) + self._unreleased >= self.capacity:
            self._lazy_receivers.wake()

    def _tell_senders(self) -> None:
        self.senders.wake()
        if self._lazy_senders.parked and len(self._line) + self._unreleased <= 1:
            self._lazy_senders.wake()

    def _wake_all(self) -> None:
        """Takes no lock."""
        for waiters in (self.senders, self._lazy_senders, self.receivers, self._lazy_receivers):
            waiters.wake()

    # -- looking

    def has_ready(self) -> bool:
        """Whether an item can be taken at once."""
        return not self.cancelled and not self._broken and _takeable(self._line) is not None

    def is_over(self) -> bool:
        """Whether nothing will come any more, whoever takes: it ended, failed or was cancelled."""
        if self._broken:  # a sender may just have taken one more place
            return True
        ended = self._ended  # before the look at the line: the last item is sent before the end is said
        try:
            head = self._line[0]
        except IndexError:
            return ended or self.cancelled
        return (head.settled and head.failure is not None) or self.cancelled

    @property
    def failure(self) -> BaseException | None:
        """Why it is over, where a failure ended it and everything before the failure was taken."""
        if self._broken:
            return self._failure
        try:
            head = self._line[0]
        except IndexError:
            return self._failure if self._ended else None
        return head.failure if head.settled else None

    def stats(self) -> QueueStats:
        """One look at the queue."""
        line = list(self._line)
        ready = sum(1 for ticket in line if ticket.settled and ticket.failure is None)
        return QueueStats(
            self.capacity,
            len(line) + self._unreleased,
            ready,
            self._taken,
            len(self.senders) + len(self._lazy_senders),
            len(self.receivers) + len(self._lazy_receivers),
            self._backpressure_seconds,
            self._starved_seconds,
        )

    def _has_room(self) -> bool:
        return len(self._line) + self._unreleased < self.capacity

    def _can_reserve(self) -> bool:
        return self._refusing or self._has_room()

    def _settled(self) -> bool:
        if self.cancelled or self._broken:
            return True
        try:
            return self._line[0].settled
        except IndexError:
            return self._ended

    def __repr__(self) -> str:
        words = [word for word, so in (("cancelled", self.cancelled), ("ended", self._ended), ("failed", self.failure is not None)) if so]
        return f"<BoundedQueue {len(self._line) + self._unreleased} of {self.capacity}{''.join(', ' + word for word in words)}>"


def _takeable(line: deque[Ticket[T]]) -> Ticket[T] | None:
    """The head of the line, where it has an item."""
    try:
        head = line[0]
    except IndexError:
        return None
    return head if head.settled and head.failure is None else None
