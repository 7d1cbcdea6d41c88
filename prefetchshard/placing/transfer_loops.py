"""The transfer stage: moves host batches to the devices, and passes on the batches whose transfer is done."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol, TypeAlias

from prefetchshard.measuring.recorder import Recorder
from prefetchshard.placing.placed_batch import PlacedBatch
from prefetchshard.placing.placer import PendingTransfer, Placer, noted
from prefetchshard.planning.host_batch import HostBatch
from prefetchshard.queues.bounded_queue import EMPTY, BoundedQueue, EmptyType

ReadyQueue: TypeAlias = BoundedQueue[PlacedBatch]


class Inbox(Protocol):
    """The queue of host batches, in order; see `Sequencer`."""

    def wait_ready(self, timeout_seconds: float | None = None) -> bool: ...
    def has_ready(self) -> bool: ...
    def take_nowait(self) -> HostBatch | EmptyType: ...
    def is_over(self) -> bool: ...
    @property
    def failure(self) -> BaseException | None: ...
    def release(self) -> None: ...
    def cancel(self) -> None: ...
    def clear(self) -> None: ...


class TransferLimits:
    """How transfers are made.

    Attributes:
        in_flight: most transfers pending at once; lowered when a batch is so large that fewer fit into memory.
        watch: called for each batch that is ready, before it waits for room, which it may change; None: nobody watches.
    """

    __slots__ = ("in_flight", "watch")

    def __init__(self, in_flight: int) -> None:
        self.in_flight = in_flight
        self.watch: Callable[[], None] | None = None


def transfer(inbox: Inbox, placer: Placer, outbox: ReadyQueue, limits: TransferLimits, recorder: Recorder) -> None:
    """The body of the thread that calls JAX: dispatches transfers and waits for them, until the inbox is over or the outbox is cancelled.

    One thread: with a second one that waits, so that no wait delays the next dispatch, images were as fast on one H200 (8 workers: 30 and
    29 GB/s), slower on two (16 workers: 42 and 37 GB/s), and small batches were a seventh slower for the hand-over.

    Args:
        inbox: host batches, in order; each place in it is released when the transfer is done.
        placer: calls JAX.
        outbox: gets the placed batches.
        limits: how many transfers may be pending.
        recorder: gets what was seen of the interpreter's lock.
    """
    pending: deque[PendingTransfer] = deque()
    failure: BaseException | None = None
    try:
        while not outbox.cancelled:
            if len(pending) < limits.in_flight and (inbox.has_ready() or not pending):
                host = inbox.take_nowait() if inbox.has_ready() else _wait_for_input(inbox, recorder)
                if host is None:
                    break
                if host is not EMPTY:
                    pending.append(_dispatch(placer, host))
            elif not _deliver(placer, pending, inbox, outbox, limits, recorder):
                break
        failure = inbox.failure
    except BaseException as error:  # noqa: BLE001 - a thread has no caller: the queue carries the error to the consumer
        failure = error
    try:
        while pending and not outbox.cancelled:  # dispatched before the failure, so delivered before it
            if not _deliver(placer, pending, inbox, outbox, limits, recorder):
                break
    except BaseException as error:  # noqa: BLE001 - as above; this batch comes before the one that failed above
        failure = error
    inbox.cancel()
    outbox.end(failure)
    inbox.clear()  # the outbox alone keeps the failure
    del failure  # its traceback holds this frame


def _wait_for_input(inbox: Inbox, recorder: Recorder) -> HostBatch | EmptyType | None:
    """Wait for the next host batch, and see meanwhile whether the interpreter's lock is free. None: none will come."""
    if not recorder.locking.wait(inbox.wait_ready, inbox.is_over, recorder.clock):
        return None
    host = inbox.take_nowait()
    if host is not EMPTY and (parts := host.times.parts):
        recorder.locking.woken(recorder.clock() - parts[-1].ended_at)
    return host


def _dispatch(placer: Placer, host: HostBatch) -> PendingTransfer:
    try:
        return placer.dispatch(host)
    except BaseException as error:  # noqa: BLE001 - raised again
        raise noted(error, host)  # noqa: B904 - it is that error, or has it as its cause


def _deliver(
    placer: Placer, pending: deque[PendingTransfer], inbox: Inbox, outbox: ReadyQueue, limits: TransferLimits, recorder: Recorder
) -> bool:
    try:
        placed = _land(placer, pending.popleft())
        if limits.watch is not None:
            limits.watch()
        if not outbox.has_room:
            _wait_for_others(placer, pending)
            _wait_for_room(outbox, recorder)
    except BaseException:
        pending.clear()  # batches keep their order: none may be delivered after one that failed
        raise
    return _pass_on(placed, inbox, outbox)


def _land(placer: Placer, pending: PendingTransfer) -> PlacedBatch:
    try:
        placer.wait(pending)
        return placer.land(pending)
    except BaseException as error:  # noqa: BLE001 - raised again
        raise noted(error, pending.host)  # noqa: B904 - it is that error, or has it as its cause


def _wait_for_others(placer: Placer, pending: deque[PendingTransfer]) -> None:
    """Wait for what is on its way before there is a wait for room, or the transfers would seem to take as long as the consumer's step."""
    for flight in pending:
        try:
            placer.wait(flight)
        except Exception:  # noqa: BLE001 - raised again when its turn comes
            return


def _wait_for_room(outbox: ReadyQueue, recorder: Recorder) -> None:
    """Wait until the consumer takes a batch, and see meanwhile whether the interpreter's lock is free."""
    recorder.locking.wait(outbox.wait_room, lambda: False, recorder.clock)


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
