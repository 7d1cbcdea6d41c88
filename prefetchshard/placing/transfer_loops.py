"""The transfer stage: takes host batches, puts them on the devices, and hands on what is ready."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol, TypeAlias

from prefetchshard.placing.placed_batch import PlacedBatch
from prefetchshard.placing.placer import PendingTransfer, Placer, noted
from prefetchshard.planning.host_batch import HostBatch
from prefetchshard.queues.bounded_queue import EMPTY, BoundedQueue, EmptyType

ReadyQueue: TypeAlias = BoundedQueue[PlacedBatch]
PendingQueue: TypeAlias = BoundedQueue[PendingTransfer]


class Inbox(Protocol):
    """Where host batches come from, in order; see `Sequencer`."""

    def wait_ready(self) -> bool: ...
    def has_ready(self) -> bool: ...
    def take_nowait(self) -> HostBatch | EmptyType: ...
    def is_over(self) -> bool: ...
    @property
    def failure(self) -> BaseException | None: ...
    def release(self) -> None: ...
    def refuse(self) -> None: ...
    def cancel(self) -> None: ...
    def clear(self) -> None: ...


class TransferLimits:
    """How transfers are made.

    Attributes:
        in_flight: transfers that may be on their way at once; what a batch takes may show that it must be fewer.
        waits_apart: whether one thread dispatches transfers and another waits for them, so that no wait delays the next dispatch. Not
            where a transfer is done when its dispatch returns (the CPU backend): there a second thread is only one more hand-over.
    """

    __slots__ = ("in_flight", "waits_apart")

    def __init__(self, in_flight: int, *, waits_apart: bool) -> None:
        self.in_flight = in_flight
        self.waits_apart = waits_apart


def transfer_bodies(inbox: Inbox, placer: Placer, outbox: ReadyQueue, pace: TransferLimits) -> list[tuple[str, Callable[[], None]]]:
    """What the threads that call JAX do: a name and a function each."""
    if not pace.waits_apart:
        return [("transfer", lambda: transfer(inbox, placer, outbox, pace))]
    flights: PendingQueue = BoundedQueue(pace.in_flight, held_until_release=True)
    return [
        ("dispatch", lambda: dispatch(inbox, placer, flights, pace)),
        ("transfer", lambda: land(flights, placer, inbox, outbox)),
    ]


def dispatch(inbox: Inbox, placer: Placer, flights: PendingQueue, pace: TransferLimits) -> None:
    """Dispatch the transfer of each host batch as it comes.

    Args:
        inbox: host batches, in order.
        placer: does what has to do with devices.
        flights: transfers on their way.
        pace: how many may be on their way at once.
    """
    failure: BaseException | None = None
    try:
        while True:
            flights.capacity = pace.in_flight
            ticket = flights.reserve()
            if ticket is None:
                break
            try:
                host = inbox.take_nowait() if inbox.wait_ready() else EMPTY
                pending = None if host is EMPTY else _dispatch(placer, host)
            except BaseException:
                ticket.withdraw()
                raise
            if pending is not None:
                ticket.send(pending)
                continue
            ticket.withdraw()
            if inbox.is_over():
                break
        failure = inbox.failure
    except BaseException as error:  # noqa: BLE001 - a thread has no caller: the queue is the way out
        failure = error
        inbox.refuse()
    flights.end(failure)
    del failure  # its traceback holds this frame


def land(flights: PendingQueue, placer: Placer, inbox: Inbox, outbox: ReadyQueue) -> None:
    """Wait for each transfer, and hand on what is ready.

    Args:
        flights: transfers on their way, in order.
        placer: does what has to do with devices.
        inbox: where the host batches came from; their places are released when their transfers are ready.
        outbox: ready batches.
    """
    failure: BaseException | None = None
    try:
        while flights.wait_ready() and not outbox.cancelled:
            flight = flights.take_nowait()
            if flight is EMPTY:
                continue
            placed = _land(placer, flight, inbox)
            flights.release()
            if not outbox.put(placed):
                break
        failure = flights.failure
    except BaseException as error:  # noqa: BLE001 - as above
        failure = error
    flights.cancel()
    inbox.cancel()
    outbox.end(failure)
    flights.clear()
    inbox.clear()  # a failure is where it will be taken, and nowhere else
    del failure  # as above


def transfer(inbox: Inbox, placer: Placer, outbox: ReadyQueue, pace: TransferLimits) -> None:
    """Move batches from the host to the devices until there are no more, or none is wanted.

    Args:
        inbox: host batches, in order; their places are released when their transfers are ready.
        placer: does what has to do with devices.
        outbox: ready batches.
        pace: how many transfers may be on their way at once.
    """
    flying: deque[PendingTransfer] = deque()
    failure: BaseException | None = None
    try:
        while not outbox.cancelled:
            if len(flying) < pace.in_flight and (inbox.has_ready() or not flying):
                if not flying and not inbox.wait_ready():
                    break
                host = inbox.take_nowait()
                if host is not EMPTY:
                    flying.append(_dispatch(placer, host))
            elif not _deliver(placer, flying, inbox, outbox):
                break
        failure = inbox.failure
    except BaseException as error:  # noqa: BLE001 - a thread has no caller: the queue is the way out
        failure = error
    try:
        while flying and not outbox.cancelled:  # placed before the fault
            if not _deliver(placer, flying, inbox, outbox):
                break
    except BaseException as error:  # noqa: BLE001 - as above; it comes first
        failure = error
    inbox.cancel()
    outbox.end(failure)
    inbox.clear()  # a failure is where it will be taken, and nowhere else
    del failure  # its traceback holds this frame


def _dispatch(placer: Placer, host: HostBatch) -> PendingTransfer:
    try:
        return placer.dispatch(host)
    except BaseException as error:  # noqa: BLE001 - raised again
        raise noted(error, host)  # noqa: B904 - it is that error, or has it as its cause


def _deliver(placer: Placer, flying: deque[PendingTransfer], inbox: Inbox, outbox: ReadyQueue) -> bool:
    try:
        placed = _land(placer, flying.popleft(), inbox)
    except BaseException:
        flying.clear()  # none of them may come without this one
        raise
    return outbox.put(placed)


def _land(placer: Placer, flight: PendingTransfer, inbox: Inbox) -> PlacedBatch:
    try:
        placed = placer.land(flight)
    except BaseException as error:  # noqa: BLE001 - raised again
        raise noted(error, flight.host)  # noqa: B904 - it is that error, or has it as its cause
    inbox.release()
    return placed
