"""The transfer stage between its two queues: order, transfers on their way, faults, and how it is stopped; with no device at all."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from prefetchshard.base.clock import MONOTONIC
from prefetchshard.base.errors import SourceError
from prefetchshard.base.position import EpochEnd, Position, StartPoint
from prefetchshard.measuring.recorder import Recorder
from prefetchshard.measuring.timeline import BatchTimes
from prefetchshard.placing.placed_batch import PlacedBatch
from prefetchshard.placing.transfer_loops import TransferLimits, transfer
from prefetchshard.queues.bounded_queue import EMPTY, BoundedQueue
from support import HANG_SECONDS, wait_until


class Host:
    """A host batch, as far as the stage knows it."""

    def __init__(self, number: int) -> None:
        self.number = number
        after = StartPoint(step=number + 1, rows=8 * number + 8, batches=number + 1)
        self.position = Position(after, 8 * number, EpochEnd())
        self.times = BatchTimes(0, 8 * number)


class PendingTransfer:
    def __init__(self, host: Host) -> None:
        self.host = host


class Placer:
    """Stands for the devices: notes what is asked of it, and fails where it is told to."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.most_flying = 0
        self.flying = 0
        self.dispatch_fails: dict[int, BaseException] = {}
        self.wait_fails: dict[int, BaseException] = {}
        self.land_fails: dict[int, BaseException] = {}
        self.before_land: Callable[[int], object] = lambda number: None

    def dispatch(self, host: Host) -> PendingTransfer:
        self.log.append(f"dispatch {host.number}")
        if host.number in self.dispatch_fails:
            raise self.dispatch_fails[host.number]
        self.flying += 1
        self.most_flying = max(self.most_flying, self.flying)
        return PendingTransfer(host)

    def wait(self, flight: PendingTransfer) -> None:
        if not flight.host.times.ready_at:
            self.log.append(f"ready {flight.host.number}")
            flight.host.times.ready_at = 1.0
            if flight.host.number in self.wait_fails:
                raise self.wait_fails[flight.host.number]

    def land(self, flight: PendingTransfer) -> PlacedBatch:
        number = flight.host.number
        self.before_land(number)
        self.log.append(f"land {number}")
        self.flying -= 1
        if number in self.land_fails:
            raise self.land_fails[number]
        return PlacedBatch(number, flight.host.position, flight.host.times, 0, 8, tuple)


class Stage:
    """The stage, its two queues, and its thread."""

    def __init__(self, *, in_flight: int = 2, depth: int = 2, slots: int = 9) -> None:
        self.placer = Placer()
        self.inbox: BoundedQueue[Any] = BoundedQueue(slots, held_until_release=True)
        self.outbox: BoundedQueue[Any] = BoundedQueue(depth)
        self.pace = TransferLimits(in_flight)
        self.recorder = Recorder(MONOTONIC)
        self.thread: threading.Thread | None = None

    def start(self) -> Stage:
        placer: Any = self.placer
        self.thread = threading.Thread(target=lambda: transfer(self.inbox, placer, self.outbox, self.pace, self.recorder), daemon=True)
        self.thread.start()
        return self

    def send(self, *numbers: int) -> None:
        for number in numbers:
            assert self.inbox.put(Host(number))

    def take(self) -> list[int]:
        """All that come until it is over."""
        got: list[int] = []
        while not self.outbox.is_over():
            self.outbox.wait_ready(HANG_SECONDS)
            item = self.outbox.take_nowait()
            if item is not EMPTY:
                got.append(item.batch)
        return got

    def has_ended(self) -> bool:
        assert self.thread is not None
        self.thread.join(HANG_SECONDS)
        return not self.thread.is_alive()


def test_nothing_comes_of_nothing() -> None:
    stage = Stage().start()
    stage.inbox.end()
    assert stage.take() == []
    assert stage.outbox.failure is None
    assert stage.has_ended()


@pytest.mark.parametrize("in_flight", [1, 2, 4])
@pytest.mark.parametrize("depth", [1, 3])
def test_all_batches_come_in_order(in_flight: int, depth: int) -> None:
    stage = Stage(in_flight=in_flight, depth=depth, slots=20)
    stage.send(*range(5))
    stage.start()
    stage.send(*range(5, 20))
    stage.inbox.end()
    assert stage.take() == list(range(20))
    assert stage.outbox.failure is None
    assert stage.has_ended()
    assert stage.placer.most_flying <= in_flight
    assert stage.inbox.stats().held == 0
    assert stage.inbox.cancelled


def test_the_next_transfer_is_under_way_while_one_is_waited_for() -> None:
    stage = Stage()
    stage.placer.before_land = lambda number: wait_until(lambda: "dispatch 1" in stage.placer.log) if number == 0 else None
    stage.send(0, 1)
    stage.start()
    stage.inbox.end()
    assert stage.take() == [0, 1]
    assert stage.placer.log.index("dispatch 1") < stage.placer.log.index("land 0")


def test_a_lone_batch_is_not_kept_for_company() -> None:
    stage = Stage(in_flight=4).start()
    stage.send(0)
    assert stage.outbox.wait_ready(HANG_SECONDS)
    stage.inbox.end()
    assert stage.take() == [0]


def test_the_pace_may_change() -> None:
    stage = Stage(in_flight=4)
    stage.pace.in_flight = 1
    stage.send(*range(6))
    stage.start()
    stage.inbox.end()
    assert stage.take() == list(range(6))
    assert stage.placer.most_flying == 1


def test_a_consumer_that_is_away_bounds_what_is_placed() -> None:
    stage = Stage(in_flight=2, depth=2)
    stage.send(*range(9))
    stage.start()
    wait_until(lambda: stage.outbox.stats().senders_waiting == 1)
    wait_until(lambda: "land 2" in stage.placer.log)
    dispatched = [line for line in stage.placer.log if line.startswith("dispatch")]
    assert len(dispatched) <= 2 + 1 + 2
    assert stage.inbox.stats().held >= 9 - 3
    stage.inbox.end()
    assert stage.take() == list(range(9))


# --- faults


@pytest.mark.parametrize("at", [0, 1, 4])
@pytest.mark.parametrize("where", ["dispatch", "land", "before"])
def test_good_batches_come_before_a_fault(where: str, at: int) -> None:
    stage, error = Stage(), ValueError("boom")
    if where == "before":
        stage.send(*range(at))
        ticket = stage.inbox.reserve()
        assert ticket is not None
        ticket.fail(error)
    else:
        (stage.placer.dispatch_fails if where == "dispatch" else stage.placer.land_fails)[at] = error
        stage.send(*range(8))
    stage.start()
    assert stage.take() == list(range(at))
    assert stage.outbox.failure is error
    assert stage.has_ended()
    assert stage.inbox.reserve() is None
    if where != "before":
        assert error.__notes__ == [f"prefetchshard: while placing batch {at} (epoch 0, rows {8 * at} to {8 * at + 7} of the epoch)"]


def test_of_two_faults_the_earlier_batch_counts() -> None:
    stage, early, late = Stage(in_flight=3), ValueError("early"), ValueError("late")
    stage.placer.land_fails[1] = early
    stage.placer.dispatch_fails[2] = late
    stage.send(0, 1, 2, 3)
    stage.start()
    assert stage.take() == [0]
    assert stage.outbox.failure is early
    assert stage.has_ended()


def test_a_fault_waits_for_the_consumer_as_the_batches_before_it_do() -> None:
    stage, error = Stage(depth=1), ValueError("boom")
    stage.placer.dispatch_fails[3] = error
    stage.send(0, 1, 2, 3)
    stage.start()
    wait_until(lambda: stage.outbox.stats().senders_waiting == 1)
    assert stage.outbox.failure is None
    assert stage.take() == [0, 1, 2]
    assert stage.outbox.failure is error


@pytest.mark.parametrize("error", [StopIteration(), GeneratorExit(), StopAsyncIteration()])
@pytest.mark.parametrize("where", ["dispatch", "land"])
def test_what_reads_as_control_flow_comes_as_a_source_error(where: str, error: BaseException) -> None:
    stage = Stage()
    (stage.placer.dispatch_fails if where == "dispatch" else stage.placer.land_fails)[1] = error
    stage.send(0, 1)
    stage.start()
    assert stage.take() == [0]
    failure = stage.outbox.failure
    assert isinstance(failure, SourceError)
    assert failure.__cause__ is error
    assert len(failure.__notes__) == 1


# --- stopping


def cancel(stage: Stage) -> None:
    stage.outbox.cancel()
    stage.inbox.cancel()


def test_it_stops_while_it_waits_for_a_batch() -> None:
    stage = Stage().start()
    wait_until(lambda: stage.inbox.stats().receivers_waiting == 1)
    cancel(stage)
    assert stage.has_ended()


def test_it_stops_while_it_waits_for_room() -> None:
    stage = Stage()
    stage.send(*range(9))
    stage.start()
    wait_until(lambda: stage.outbox.stats().senders_waiting == 1)
    cancel(stage)
    assert stage.has_ended()
    assert stage.placer.log.count("land 5") == 0


def test_it_stops_after_the_transfer_that_it_waits_for() -> None:
    stage, landing, go = Stage(), threading.Event(), threading.Event()

    def wait(number: int) -> None:
        landing.set()
        go.wait()

    stage.placer.before_land = wait
    stage.send(*range(4))
    stage.start()
    landing.wait(HANG_SECONDS)
    cancel(stage)
    go.set()
    assert stage.has_ended()
    assert [line for line in stage.placer.log if line.startswith("land")] == ["land 0"]


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("slots", [1, 2, 3, 6])
def test_small_batches_are_read_in_bursts_and_none_is_forgotten(slots: int, depth: int) -> None:
    """Who sends is woken late, but always: also while the consumer takes nothing, and where it takes one at a time."""
    stage = Stage(in_flight=2, depth=depth, slots=slots)
    stage.inbox.in_bursts = stage.outbox.in_bursts = True
    count = 40
    sender = threading.Thread(target=lambda: (stage.send(*range(count)), stage.inbox.end()), daemon=True)
    sender.start()
    stage.start()
    got: list[int] = []
    for _ in range(count // 2):
        wait_until(lambda: is_full(stage) or stage.inbox.is_over())  # the consumer is at its step
        stage.outbox.wait_ready(HANG_SECONDS)
        item = stage.outbox.take_nowait()
        assert item is not EMPTY
        got.append(item.batch)
    got += stage.take()  # now it is the fast one
    assert got == list(range(count))
    assert stage.has_ended()


def is_full(stage: Stage) -> bool:
    host, ready = stage.inbox.stats(), stage.outbox.stats()
    return host.held == host.capacity and ready.held == ready.capacity
