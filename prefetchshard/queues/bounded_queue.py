"""The hand-off between two stages: bounded, in order, with several senders.

A sender first reserves a place, then makes the item, then sends it: the bound holds for what is being made too, and items arrive in
the order of the reservations, whoever is done first. Waiting moves nothing and moving waits for nothing, so a waiter can be given up
on and no item is lost. The end and a failure are fields, not items: neither can block on a full queue.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Generic, Literal, TypeAlias, TypeVar

import msgspec

from prefetchshard.base.clock import MONOTONIC, Clock
from prefetchshard.queues.side import Side

T = TypeVar("T")


class _Empty(enum.Enum):
    EMPTY = "EMPTY"


EMPTY: Final = _Empty.EMPTY
EmptyType: TypeAlias = Literal[_Empty.EMPTY]


def _never() -> bool:
    return False


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
        self.item: T | EmptyType = EMPTY
        self.failure: BaseException | None = None
        self.settled = False

    def send(self, item: T) -> None:
        """Fill the place."""
        self.item = item
        self.settled = True
        queue = self._queue
        queue.receivers.wake(burst_is_over=queue.held >= queue.capacity)

    def fail(self, failure: BaseException) -> None:
        """End the queue at this place: what was reserved before still comes, then the failure."""
        self.failure = failure
        self.settled = True
        self._queue.refuse()

    def withdraw(self) -> None:
        """Give the place back; the order goes on without it."""
        queue = self._queue
        try:
            queue.line.remove(self)
        except ValueError:  # cleared meanwhile
            return
        queue.senders.wake()
        queue.receivers.wake()


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
        senders: that wait for room; under their lock places are reserved.
        receivers: that wait for an item, event loops too; under their lock items are taken and released.
        line: the places in order. What looks at it may find that others emptied it.
        counted_by: a queue before this one, whose bound also holds for what waits here; see `CountedQueue`.
    """

    def __init__(self, capacity: int, *, held_until_release: bool = False, clock: Clock = MONOTONIC) -> None:
        self.capacity = capacity
        self.in_bursts = False
        self.cancelled = False
        # A lock each: a signal handler that interrupts a receiver while it holds its lock may close the run, and waits for the senders.
        self.senders = Side(clock)
        self.receivers = Side(clock)
        self._held_until_release = held_until_release
        self.line: deque[Ticket[T]] = deque()
        self.counted_by: CountedQueue[Any] | None = None
        self._unreleased = 0  # items that were taken and still hold their place
        self._taken = 0
        self._refusing = False
        self._ended = False
        self._failure: BaseException | None = None

    # -- sending

    def reserve(self, or_else: Callable[[], bool] = _never) -> Ticket[T] | None:
        """Wait for room and take a place. None: nothing more is wanted, or `or_else()`; who makes that true wakes `senders`."""
        while (ticket := self.reserve_nowait()) is None and not (self._refusing or or_else()):
            self.senders.wait_measured(lambda: self._refusing or self.has_room or or_else(), in_bursts=self.in_bursts)
        return ticket

    def wait_room(self, timeout_seconds: float | None = None) -> bool:
        """Wait until there may be room, or nothing more is wanted. False: the time ran out."""
        if not (self._refusing or self.has_room):
            self.senders.wait_measured(lambda: self._refusing or self.has_room, timeout_seconds, in_bursts=self.in_bursts)
        return self._refusing or self.has_room

    def reserve_nowait(self) -> Ticket[T] | None:
        """Take a place. None: there is no room, or nothing more is wanted."""
        ticket = Ticket(self)  # outside the lock: an allocation may run finalisers
        with self.senders.lock:
            if self._refusing or not self.has_room:
                return None
            self.line.append(ticket)
        return ticket

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
        """Grant no further place. Takes no lock."""
        self._refusing = True
        self.senders.wake()
        self.receivers.wake()

    # -- receiving

    def wait_ready(self, timeout_seconds: float | None = None) -> bool:
        """Wait until an item can be taken. False: none will come (see `is_over`), the time ran out, or another receiver was faster."""
        if not self.is_settled():
            self.receivers.wait_measured(self.is_settled, timeout_seconds, in_bursts=self.in_bursts)
        return self.has_ready()

    def take_nowait(self, only: T | EmptyType = EMPTY) -> T | EmptyType:
        """The next item in order, or EMPTY; `only` this one, where it is still the next."""
        item: T | EmptyType = EMPTY
        try:
            with self.receivers.lock:
                line = self.line
                head = _first(line)
                if head is None or head.item is EMPTY or self.cancelled or (only is not EMPTY and head.item is not only):
                    return EMPTY
                item = head.item  # no call, so no signal, comes between this and the end of the block
                if self._held_until_release:
                    self._unreleased += 1  # before the item leaves the line, or a sender would see room
                del line[0]
                self._taken += 1
            if not self._held_until_release:
                self.senders.wake(burst_is_over=self.held <= 1)
            if self.counted_by is not None:
                self.counted_by.senders.wake()
        except BaseException:  # Ctrl-C
            if item is not EMPTY:
                self.untake(item)
            raise
        head.item = EMPTY  # whoever sent it may keep the ticket
        return item

    def peek_nowait(self) -> T | EmptyType:
        """The next item in order, left where it is, or EMPTY."""
        head = _first(self.line)
        return EMPTY if head is None or self.cancelled else head.item

    def untake(self, item: T) -> None:
        """Put an item back that was taken and not used: it is the next one again."""
        ticket = Ticket(self)
        ticket.item = item
        ticket.settled = True
        with self.receivers.lock:
            self._taken -= 1
            self._unreleased -= self._held_until_release
            self.line.appendleft(ticket)
        self.receivers.wake()

    def break_off(self, failure: BaseException) -> None:
        """The receiver cannot go on: the failure comes next, and what was sent comes no more."""
        self._failure = failure
        self._ended = True
        self.line = deque(maxlen=0)  # keeps nothing: a sender may just be taking one more place
        self.refuse()

    def release(self) -> None:
        """What an item taken earlier held is free again."""
        with self.receivers.lock:
            self._unreleased -= 1
        self.senders.wake(burst_is_over=self.held <= 1)

    def cancel(self) -> None:
        """Nothing more is wanted: every waiter returns. Never blocks, takes no lock, drops nothing by itself."""
        self.cancelled = True
        self.refuse()

    def clear(self) -> None:
        """Drop what a queue that is over, or cancelled, still holds, its failure too. Takes no lock."""
        self._ended = True  # first: who finds the line empty must not wait
        line, self.line = self.line, deque(maxlen=0)  # as above
        self._failure = None
        for ticket in list(line):
            ticket.failure = None  # its traceback leads to the ticket

    # -- looking

    @property
    def held(self) -> int:
        """Items reserved and not yet released."""
        while True:
            taken = self._taken
            held = len(self.line) + self._unreleased
            # An item that was taken in between counts twice; a sender that saw no room for it would not be woken, as taking gives none
            if taken == self._taken:
                return held

    @property
    def has_room(self) -> bool:
        """Whether a place may be reserved."""
        return self.held < self.capacity

    def has_ready(self) -> bool:
        """Whether an item can be taken at once."""
        head = _first(self.line)
        return head is not None and head.item is not EMPTY and not self.cancelled

    def is_settled(self) -> bool:
        """Whether there is nothing to wait for: an item can be taken, or none will come."""
        ended = self._ended  # before the look at the line: the last place is reserved before the end is said
        head = _first(self.line)
        return self.cancelled or (ended if head is None else head.settled)

    def is_over(self) -> bool:
        """Whether nothing will come any more, whoever takes: it ended, failed or was cancelled."""
        ended = self._ended  # before the look at the line: the last item is sent before the end is said
        head = _first(self.line)
        return self.cancelled or (ended if head is None else head.failure is not None)

    @property
    def failure(self) -> BaseException | None:
        """Why it is over, where a failure ended it and everything before the failure was taken."""
        head = _first(self.line)
        return self._failure if head is None else head.failure

    def stats(self) -> QueueStats:
        """One look at the queue."""
        while True:
            taken, line, unreleased = self._taken, list(self.line), self._unreleased
            if taken == self._taken:  # as in `held`
                break
        return QueueStats(
            self.capacity,
            len(line) + unreleased,
            sum(ticket.item is not EMPTY for ticket in line),
            taken,
            self.senders.waiting,
            self.receivers.waiting,
            self.senders.waited_seconds,
            self.receivers.waited_seconds,
        )

    def __repr__(self) -> str:
        words = [word for word, so in (("cancelled", self.cancelled), ("ended", self._ended), ("failed", self.failure is not None)) if so]
        return f"<BoundedQueue {self.held} of {self.capacity}{''.join(', ' + word for word in words)}>"


class CountedQueue(BoundedQueue[T]):
    """A queue whose items count on after they left it, until they are taken from a queue further on.

    An item on its way from one queue to the other must have its place there before its place here is released: it may count twice for a
    moment, but never not at all.

    Args:
        capacity: as in `BoundedQueue`, which holds too.
        most: items that may be reserved here and not yet taken there.
        until: the other queue.
        clock: monotonic seconds.
    """

    def __init__(self, capacity: int, most: int, until: BoundedQueue[Any], *, clock: Clock = MONOTONIC) -> None:
        super().__init__(capacity, held_until_release=True, clock=clock)
        self._most = most
        self._until = until
        until.counted_by = self

    @property
    def has_room(self) -> bool:
        """Whether a place may be reserved."""
        held = self.held  # before the look there: what moves over meanwhile is counted here
        return held < self.capacity and held + len(self._until.line) < self._most


def _first(line: deque[Ticket[T]]) -> Ticket[T] | None:
    try:
        return line[0]
    except IndexError:
        return None
