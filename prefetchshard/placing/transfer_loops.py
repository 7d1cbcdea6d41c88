"""The transfer stage: moves host batches to the devices, and passes on the batches whose transfer is done."""

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
    """The queue of host batches, in order; see `Sequencer`."""

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
        in_flight: most transfers pending at once; lowered when a batch is so large that fewer fit into memory.
        waits_apart: whether one thread dispatches transfers and another waits for them, so that no wait delays the next dispatch.
            False on the CPU backend: a transfer there is done when its dispatch returns, and a second thread only adds a hand-over.
    """

    __slots__ = ("in_flight", "waits_apart")

    def __init__(self, in_flight: int, *, waits_apart: bool) -> None:
        self.in_flight = in_flight
        self.waits_apart = waits_apart


def transfer_bodies(inbox: Inbox, placer: Placer, outbox: ReadyQueue, limits: TransferLimits) -> list[tuple[str, Callable[[], None]]]:
    """The threads that call JAX: a name and a body for each."""
    if not limits.waits_apart:
        return [("transfer", lambda: transfer(inbox, placer, outbox, limits))]
    pending_queue: PendingQueue = BoundedQueue(limits.in_flight, held_until_release=True)
    return [
        ("dispatch", lambda: dispatch(inbox, placer, pending_queue, limits)),
        ("transfer", lambda: complete(pending_queue, placer, inbox, outbox)),
    ]


def dispatch(inbox: Inbox, placer: Placer, pending_queue: PendingQueue, limits: TransferLimits) -> None:
    """Dispatch the transfer of each host batch.

    Args:
        inbox: host batches, in order.
        placer: calls JAX.
        pending_queue: gets the dispatched transfers.
        limits: how many transfers may be pending.
    """
    failure: BaseException | None = None
    try:
        while True:
            pending_queue.capacity = limits.in_flight
            ticket = pending_queue.reserve()
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
    except BaseException as error:  # noqa: BLE001 - a thread has no caller: the queue carries the error to the consumer
        failure = error
        inbox.refuse()
    pending_queue.end(failure)
    del failure  # its traceback holds this frame


def complete(pending_queue: PendingQueue, placer: Placer, inbox: Inbox, outbox: ReadyQueue) -> None:
    """Wait for each dispatched transfer, and pass its batch on.

    Args:
        pending_queue: dispatched transfers, in order.
        placer: calls JAX.
        inbox: where the host batches came from; each place in it is released when the transfer is done.
        outbox: gets the placed batches.
    """
    failure: BaseException | None = None
    try:
        while pending_queue.wait_ready() and not outbox.cancelled:
            pending = pending_queue.take_nowait()
            if pending is EMPTY:
                continue
            placed = _land(placer, pending)
            pending_queue.release()
            if not _pass_on(placed, inbox, outbox):
                break
        failure = pending_queue.failure
    except BaseException as error:  # noqa: BLE001 - as above
        failure = error
    pending_queue.cancel()
    inbox.cancel()
    outbox.end(failure)
    pending_queue.clear()
    inbox.clear()  # the outbox alone keeps the failure
    del failure  # as above


def transfer(inbox: Inbox, placer: Placer, outbox: ReadyQueue, limits: TransferLimits) -> None:
    """Dispatch transfers and wait for them in one thread, until the inbox is over or the outbox is cancelled.

    Args:
        inbox: host batches, in order; each place in it is released when the transfer is done.
        placer: calls JAX.
        outbox: gets the placed batches.
        limits: how many transfers may be pending.
    """
    pending: deque[PendingTransfer] = deque()
    failure: BaseException | None = None
    try:
        while not outbox.cancelled:
            if len(pending) < limits.in_flight and (inbox.has_ready() or not pending):
                if not pending and not inbox.wait_ready():
                    break
                host = inbox.take_nowait()
                if host is not EMPTY:
                    pending.append(_dispatch(placer, host))
            elif not _deliver(placer, pending, inbox, outbox):
                break
        failure = inbox.failure
    except BaseException as error:  # noqa: BLE001 - a thread has no caller: the queue carries the error to the consumer
        failure = error
    try:
        while pending and not outbox.cancelled:  # dispatched before the failure, so delivered before it
            if not _deliver(placer, pending, inbox, outbox):
                break
    except BaseException as error:  # noqa: BLE001 - as above; this batch comes before the one that failed above
        failure = error
    inbox.cancel()
    outbox.end(failure)
    inbox.clear()  # the outbox alone keeps the failure
    del failure  # its traceback holds this frame


def _dispatch(placer: Placer, host: HostBatch) -> PendingTransfer:
    try:
        return placer.dispatch(host)
    except BaseException as error:  # noqa: BLE001 - raised again
        raise noted(error, host)  # noqa: B904 - it is that error, or has it as its cause


def _deliver(placer: Placer, pending: deque[PendingTransfer], inbox: Inbox, outbox: ReadyQueue) -> bool:
    try:
        placed = _land(placer, pending.popleft())
    except BaseException:
        pending.clear()  # batches keep their order: none may be delivered after one that failed
        raise
    return _pass_on(placed, inbox, outbox)


def _land(placer: Placer, pending: PendingTransfer) -> PlacedBatch:
    try:
        return placer.land(pending)
    except BaseException as error:  # noqa: BLE001 - raised again
        raise noted(error, pending.host)  # noqa: B904 - it is that error, or has it as its cause


def _pass_on(placed: PlacedBatch, inbox: Inbox, outbox: ReadyQueue) -> bool:
    """Give the batch's place on the host back, and send it. False: nothing more is wanted."""
    if outbox.counted_by is None:
        inbox.release()
        return outbox.put(placed)
    ticket = outbox.reserve()  # first, so that it never counts as delivered in between
    inbox.release()
    if ticket is not None:
        ticket.send(placed)
    return ticket is not None
