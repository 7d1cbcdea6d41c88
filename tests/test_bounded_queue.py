"""The hand-off between two stages: bounded, in the order of the reservations, and neither its end nor a failure can block."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefetchshard.queues.bounded_queue import EMPTY, BoundedQueue, Ticket
from support import HANG_SECONDS, Interrupts, Thread, at_every_step, interrupted_everywhere, wait_until


def new(capacity: int = 3, *items: Any, held: bool = False) -> BoundedQueue[Any]:
    queue: BoundedQueue[Any] = BoundedQueue(capacity, held_until_release=held)
    for item in items:
        assert queue.put(item)
    return queue


def reserve(queue: BoundedQueue[Any]) -> Ticket[Any]:
    ticket = queue.reserve()
    assert ticket is not None
    return ticket


def drain(queue: BoundedQueue[Any]) -> Iterator[Any]:
    while (item := queue.take_nowait()) is not EMPTY:
        yield item


# --- order


def test_items_come_in_the_order_of_the_reservations() -> None:
    queue = new()
    first, second, third = reserve(queue), reserve(queue), reserve(queue)
    third.send("c")
    assert queue.take_nowait() is EMPTY
    assert not queue.has_ready()
    assert queue.stats().ready == 1
    second.send("b")
    assert queue.take_nowait() is EMPTY
    first.send("a")
    assert list(drain(queue)) == ["a", "b", "c"]


def test_nothing_is_taken_by_looking() -> None:
    queue = new(2, "a", "b")
    assert queue.peek_nowait() == "a"
    assert queue.peek_nowait() == "a"
    assert list(drain(queue)) == ["a", "b"]
    assert queue.peek_nowait() is EMPTY


@pytest.mark.parametrize("item", [None, 0, False, (), EMPTY.__class__])
def test_any_object_may_be_an_item(item: Any) -> None:
    queue = new(1, item)
    assert queue.has_ready()
    assert queue.peek_nowait() is item
    assert queue.take_nowait() is item


def test_an_item_that_was_taken_and_not_used_is_the_next_again() -> None:
    queue = new(2, "a", "b")
    assert queue.take_nowait() == "a"
    assert queue.take_nowait() == "b"
    receiver = Thread(queue.wait_ready)
    wait_until(lambda: queue.stats().receivers_waiting == 1)
    queue.untake("b")
    assert receiver.returned() is True
    queue.untake("a")
    assert queue.stats().taken == 0
    assert list(drain(queue)) == ["a", "b"]


def test_a_withdrawn_place_leaves_no_gap() -> None:
    queue = new()
    first, second, third = reserve(queue), reserve(queue), reserve(queue)
    third.send("c")
    first.withdraw()
    assert queue.take_nowait() is EMPTY
    second.withdraw()
    assert queue.take_nowait() == "c"
    assert queue.stats().held == 0


def test_a_place_withdrawn_after_the_queue_was_cleared() -> None:
    queue = new()
    ticket = reserve(queue)
    queue.cancel()
    queue.clear()
    ticket.withdraw()
    assert queue.stats().held == 0


# --- bounds


def test_a_sender_waits_for_room() -> None:
    queue = new(2, "a", "b")
    sender = Thread(lambda: queue.put("c"))
    wait_until(lambda: queue.stats().senders_waiting == 1)
    assert queue.stats().held == 2
    assert queue.take_nowait() == "a"
    assert sender.returned() is True
    assert list(drain(queue)) == ["b", "c"]
    assert queue.stats().backpressure_seconds > 0


def test_what_is_reserved_counts_before_it_is_sent() -> None:
    queue = new(2)
    tickets = [reserve(queue), reserve(queue)]
    sender = Thread(queue.reserve)
    wait_until(lambda: queue.stats().senders_waiting == 1)
    tickets[1].withdraw()
    assert sender.returned() is not None
    assert queue.stats().held == 2


def test_a_place_is_held_until_it_is_released() -> None:
    queue = new(2, "a", "b", held=True)
    assert list(drain(queue)) == ["a", "b"]
    assert queue.stats().held == 2
    sender = Thread(lambda: queue.put("c"))
    wait_until(lambda: queue.stats().senders_waiting == 1)
    queue.release()
    assert sender.returned() is True
    assert queue.stats().held == 2
    queue.release()
    assert list(drain(queue)) == ["c"]
    queue.release()
    assert (queue.stats().held, queue.stats().taken) == (0, 3)


def test_putting_back_keeps_the_place() -> None:
    queue = new(1, "a", held=True)
    assert queue.take_nowait() == "a"
    queue.untake("a")
    assert queue.stats().held == 1
    assert queue.take_nowait() == "a"
    queue.release()
    assert queue.stats().held == 0


class Model:
    """What a queue is: a line of places, each empty, filled, or the end by a failure."""

    def __init__(self, capacity: int, held: bool) -> None:
        self.capacity = capacity
        self.held_until_release = held
        self.line: list[list[Any]] = []  # [kind, item, ticket]
        self.unreleased = 0
        self.refusing = False

    @property
    def held(self) -> int:
        return len(self.line) + self.unreleased


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 4),
    st.booleans(),
    st.lists(
        st.tuples(st.sampled_from(["reserve", "send", "withdraw", "fail", "take", "release", "untake"]), st.integers(0, 9)), max_size=60
    ),
)
def test_it_is_a_bounded_line(capacity: int, held: bool, steps: list[tuple[str, int]]) -> None:
    """Against a model in one thread: order, bound, and when it is over, after every step."""
    queue: BoundedQueue[Any] = BoundedQueue(capacity, held_until_release=held)
    model = Model(capacity, held)
    for number, (step, which) in enumerate(steps):
        apply(queue, model, step, which, number)
        head = model.line[0] if model.line else None
        assert queue.stats().held == model.held
        assert model.held <= capacity or step == "untake"
        assert queue.has_ready() == (head is not None and head[0] == "sent")
        assert queue.is_over() == (head is not None and head[0] == "failed")
        assert queue.stats().ready == sum(place[0] == "sent" for place in model.line)


def apply(queue: BoundedQueue[Any], model: Model, step: str, which: int, number: int) -> None:
    open_places = [place for place in model.line if place[0] == "open"]
    if step == "reserve" and (model.held < model.capacity or model.refusing):
        ticket = queue.reserve()
        assert (ticket is None) == model.refusing
        if ticket is not None:
            model.line.append(["open", None, ticket])
    elif step in ("send", "withdraw", "fail") and open_places:
        place = open_places[which % len(open_places)]
        settle(model, place, step, number)
    elif step == "take":
        want = model.line[0][1] if model.line and model.line[0][0] == "sent" else EMPTY
        assert queue.take_nowait() is want
        if want is not EMPTY:
            model.line.pop(0)
            model.unreleased += model.held_until_release
            if which % 3 == 0:
                queue.untake(want)
                model.line.insert(0, ["sent", want, None])
                model.unreleased -= model.held_until_release
    elif step == "release" and model.unreleased:
        queue.release()
        model.unreleased -= 1


def settle(model: Model, place: list[Any], step: str, number: int) -> None:
    ticket: Ticket[Any] = place[2]
    if step == "send":
        item = (number,)
        ticket.send(item)
        place[:] = ["sent", item, ticket]
    elif step == "withdraw":
        ticket.withdraw()
        model.line.remove(place)
    else:
        ticket.fail(ValueError(number))
        place[0] = "failed"
        model.refusing = True


# --- the end, and failures


def test_what_was_sent_before_the_end_still_comes() -> None:
    queue = new(3, "a")
    ticket = reserve(queue)
    queue.end()
    assert queue.reserve() is None
    assert not queue.put("x")
    assert not queue.is_over()
    assert queue.take_nowait() == "a"
    assert not queue.is_over()  # a place is open still
    ticket.send("b")
    assert queue.take_nowait() == "b"
    assert queue.is_over()
    assert not queue.wait_ready()
    assert queue.failure is None


def test_the_end_does_not_wait_for_room() -> None:
    queue = new(1, "a")
    failure = ValueError()
    queue.end(failure)
    assert queue.failure is None  # "a" comes first
    assert list(drain(queue)) == ["a"]
    assert queue.is_over()
    assert queue.failure is failure


def test_the_first_failure_is_kept() -> None:
    queue = new()
    first = ValueError(1)
    queue.end(first)
    queue.end(ValueError(2))
    queue.end()
    assert queue.failure is first


def test_a_failure_ends_the_queue_at_its_place() -> None:
    queue = new(4)
    first, second, third = reserve(queue), reserve(queue), reserve(queue)
    failure = ValueError()
    third.send("c")
    second.fail(failure)
    assert queue.reserve() is None
    assert not queue.is_over()
    assert queue.failure is None
    first.send("a")
    assert queue.take_nowait() == "a"
    assert queue.take_nowait() is EMPTY  # "c" came after the failure
    assert queue.is_over()
    assert queue.failure is failure
    assert not queue.wait_ready()


def test_of_two_failures_the_earlier_place_counts() -> None:
    queue = new()
    first, second = reserve(queue), reserve(queue)
    late, early = ValueError("late"), ValueError("early")
    second.fail(late)
    first.fail(early)
    assert queue.failure is early


def test_a_failing_place_lets_waiting_senders_go() -> None:
    queue = new(1)
    ticket = reserve(queue)
    sender = Thread(queue.reserve)
    wait_until(lambda: queue.stats().senders_waiting == 1)
    ticket.fail(ValueError())
    assert sender.returned() is None


def test_what_wakes_a_receiver() -> None:
    """An item, an end, a failure, a cancellation, a withdrawal that brings a ready item to the head."""

    def withdraw(queue: BoundedQueue[Any], ticket: Ticket[Any]) -> None:
        reserve(queue).send("behind")
        ticket.withdraw()

    changes: list[tuple[Callable[[BoundedQueue[Any], Ticket[Any]], object], bool]] = [
        (lambda queue, ticket: ticket.send("a"), True),
        (withdraw, True),
        (lambda queue, ticket: ticket.fail(ValueError()), False),
        (lambda queue, ticket: queue.cancel(), False),
        (lambda queue, ticket: (queue.end(), ticket.withdraw()), False),
        (lambda queue, ticket: (ticket.withdraw(), queue.end(ValueError())), False),
    ]
    for change, answer in changes:
        queue = new()
        ticket = reserve(queue)
        receivers = [Thread(queue.wait_ready), Thread(queue.wait_ready)]
        wait_until(lambda queue=queue: queue.stats().receivers_waiting == 2)
        change(queue, ticket)
        assert [receiver.returned() for receiver in receivers] == [answer, answer]
        assert queue.stats().receivers_waiting == 0
        assert queue.stats().starved_seconds > 0


def test_a_wait_with_a_limit() -> None:
    queue = new()
    assert not queue.wait_ready(0)
    assert not queue.wait_ready(0.02)
    assert not queue.is_over()
    queue.put("a")
    assert queue.wait_ready(0)


def test_a_receiver_that_cannot_go_on() -> None:
    """Whatever was sent and whatever the senders say: its failure comes next."""
    queue = new(3, "a", "b")
    sender = Thread(lambda: [queue.put(i) for i in range(3)])
    assert queue.take_nowait() == "a"
    failure = ValueError()
    queue.end(ValueError("of the senders"))
    queue.break_off(failure)
    sender.returned()
    assert queue.is_over()
    assert queue.failure is failure
    assert queue.take_nowait() is EMPTY
    assert queue.reserve() is None


def test_a_place_that_is_taken_while_the_receiver_breaks_off_comes_no_more() -> None:
    queue = new()
    failure = ValueError()

    def prepare() -> None:
        nonlocal queue
        queue = new(2, "a")

    for ticket in at_every_step(prepare, lambda: queue.reserve(), lambda: queue.break_off(failure)):
        assert queue.is_over()
        assert queue.failure is failure
        if ticket is not None:
            ticket.send("b")
        assert queue.take_nowait() is EMPTY


# --- bursts


def test_who_waits_is_left_waiting_while_a_burst_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A receiver until the queue is full, a sender until it holds one item. Not who has a time limit, and not where the queue ends."""
    monkeypatch.setattr("prefetchshard.queues.side.BURST_SECONDS", 2 * HANG_SECONDS)
    queue = new(3)
    queue.in_bursts = True
    receiver, limited = Thread(queue.wait_ready), Thread(lambda: queue.wait_ready(HANG_SECONDS))
    wait_until(lambda: queue.stats().receivers_waiting == 2)
    queue.put("a")
    assert limited.returned() is True
    queue.put("b")
    assert queue.stats().receivers_waiting == 1
    queue.put("c")
    assert receiver.returned() is True
    sender = Thread(lambda: queue.put("d"))
    wait_until(lambda: queue.stats().senders_waiting == 1)
    assert queue.take_nowait() == "a"
    assert queue.stats().senders_waiting == 1
    assert queue.take_nowait() == "b"
    assert sender.returned() is True
    assert list(drain(queue)) == ["c", "d"]
    receiver = Thread(queue.wait_ready)
    wait_until(lambda: queue.stats().receivers_waiting == 1)
    queue.end()
    assert receiver.returned() is False


# --- cancelling


def test_cancelling_lets_everybody_go() -> None:
    full, empty = new(1, "a"), new(1)
    senders = [Thread(full.reserve) for _ in range(3)]
    receivers = [Thread(empty.wait_ready) for _ in range(3)]
    wait_until(lambda: full.stats().senders_waiting == 3 and empty.stats().receivers_waiting == 3)
    for queue in (full, empty):
        queue.cancel()
        queue.cancel()
    assert [sender.returned() for sender in senders] == [None] * 3
    assert [receiver.returned() for receiver in receivers] == [False] * 3
    assert full.take_nowait() is EMPTY
    assert full.peek_nowait() is EMPTY
    assert not full.has_ready()
    assert full.is_over()
    assert full.reserve() is None


def test_clearing_drops_the_items() -> None:
    class Item:
        pass

    item = Item()
    dead = weakref.ref(item)
    queue = new(2, item)
    ticket = reserve(queue)
    ticket.send(item)
    del item
    queue.cancel()
    queue.clear()
    del ticket
    assert dead() is None


def test_who_sent_an_item_does_not_keep_it() -> None:
    class Item:
        pass

    queue = new(1)
    ticket = reserve(queue)
    item = Item()
    dead = weakref.ref(item)
    ticket.send(item)
    del item
    queue.take_nowait()
    assert dead() is None


def test_cancel_and_clear_take_no_lock() -> None:
    """A finaliser may run while its own thread holds the lock."""
    queue = new(2, "a")
    with queue.receivers.lock, queue.senders.lock:
        queue.cancel()
        queue.clear()
        assert queue.is_over()
        assert queue.stats().held == 0
    assert queue.take_nowait() is EMPTY


def test_a_finaliser_may_cancel_while_its_thread_is_inside_the_queue() -> None:
    """A garbage collection may come with any allocation, also of the threads that hold the lock."""
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            queue = new(4)

            class Dying:
                pass

            dying: Any = Dying()
            dying.cycle = dying
            weakref.finalize(dying, queue.cancel).atexit = False
            del dying
            while queue.put([[]]) and queue.stats().taken < 300:
                queue.take_nowait()

    old = gc.get_threshold()
    gc.freeze()  # only what is made here is looked through
    gc.set_threshold(7)
    try:
        threads = [Thread(churn) for _ in range(2)]
        for _ in range(30):
            gc.collect()
        stop.set()
        for thread in threads:
            thread.returned()
    finally:
        gc.set_threshold(*old)
        gc.unfreeze()


def test_a_cleared_queue_is_over_however_it_ended() -> None:
    queue = new(2)
    ticket = queue.reserve()
    assert ticket is not None
    ticket.fail(ValueError("at its place"))
    queue.clear()
    assert queue.is_over()
    assert not queue.wait_ready()
    assert queue.failure is None


# --- Ctrl-C


@pytest.mark.parametrize("held", [False, True])
def test_an_interrupted_take_loses_nothing(held: bool) -> None:
    """Wherever Ctrl-C strikes: the item is there still, it holds its place, and who waited for room hears of the next room."""
    queue = new()
    sender: list[Thread] = []

    def prepare() -> None:
        nonlocal queue
        queue = new(1, "a", held=held)
        sender[:] = [Thread(lambda: queue.put("b"))]
        wait_until(lambda: queue.stats().senders_waiting == 1)

    places = 0
    for _ in interrupted_everywhere(prepare, lambda: queue.take_nowait()):
        places += 1
        assert queue.take_nowait() == "a"
        if held:
            queue.release()
        assert sender[0].returned() is True
        assert queue.take_nowait() == "b"
        assert queue.stats().taken == 2
        assert queue.stats().held == held
    assert places >= 2


def test_ctrl_c_again_and_again_under_load() -> None:
    count, sent = 20_000, 0
    queue = new(2)
    got: list[Any] = []
    done = False

    def send() -> None:
        nonlocal sent
        while sent < count or interrupts.count <= 10:  # who sends them may have had no turn for long
            queue.put(sent)
            sent += 1
        queue.end()

    with Interrupts(0.0003) as interrupts:
        sender = Thread(send)
        while not done:
            taking = iter(queue.take_nowait, None)
            try:
                interrupts.armed = True
                for item in taking:
                    if item is not EMPTY:
                        got.append(item)
                    elif not queue.wait_ready():
                        interrupts.armed = False  # outside of the `try` it would end the session
                        done = True
                        break
            except KeyboardInterrupt:
                pass
    sender.returned()
    assert got == list(range(sent))
    assert interrupts.count > 10
    assert queue.stats().held == 0


# --- several threads


@pytest.mark.parametrize(("senders", "receivers", "capacity"), [(1, 1, 1), (4, 1, 3), (4, 3, 2), (1, 4, 1)])
def test_nothing_is_lost_or_doubled_under_load(senders: int, receivers: int, capacity: int) -> None:
    """One lost wake-up would stop it; the order of the reservations is the order of the numbers."""
    count = 5_000
    queue: BoundedQueue[int] = BoundedQueue(capacity)
    numbers = iter(range(count))
    one_at_a_time = threading.Lock()
    most = 0

    def send() -> None:
        nonlocal most
        while True:
            with one_at_a_time:
                number = next(numbers, None)
                ticket = None if number is None else reserve(queue)
            if number is None or ticket is None:
                return
            most = max(most, queue.stats().held)
            if random.random() < 0.02:
                threading.Event().wait(0)
            ticket.send(number)

    def receive() -> list[int]:
        got: list[int] = []
        while not queue.is_over():
            queue.wait_ready()
            item = queue.take_nowait()
            if item is not EMPTY:
                got.append(item)
        return got

    sending, receiving = [Thread(send) for _ in range(senders)], [Thread(receive) for _ in range(receivers)]
    for thread in sending:
        thread.returned()
    queue.end()
    got = [thread.returned() for thread in receiving]
    assert all(numbers == sorted(numbers) for numbers in got)
    assert sorted(sum(got, [])) == list(range(count))
    assert most <= capacity
    assert queue.stats().held == 0


class Scene:
    """A queue that is looked at while others act."""

    def __init__(self, *items: Any) -> None:
        self.items = items
        self.queue = new(2)

    def prepare(self) -> None:
        self.queue = new(2, *self.items)

    def send_the_last(self) -> None:
        self.queue.put("last")
        self.queue.end()


def test_the_last_item_is_not_lost_to_the_end() -> None:
    """A receiver that looks while the last item is sent and the end is said does not take it for the end."""
    scene = Scene()
    looks = list(at_every_step(scene.prepare, lambda: scene.queue.is_over(), scene.send_the_last))
    assert len(looks) > 10
    assert not any(looks)


@pytest.mark.parametrize("look", [BoundedQueue.is_settled, BoundedQueue.is_over])
def test_an_item_in_the_making_is_not_lost_to_the_end(look: Callable[[Any], object]) -> None:
    """A receiver that looks while the last place is reserved and the end is said waits for the item that is made there."""
    scene = Scene()

    def reserve_the_last() -> None:
        reserve(scene.queue)
        scene.queue.end()

    looks = list(at_every_step(scene.prepare, lambda: look(scene.queue), reserve_the_last))
    assert len(looks) > 10
    assert not any(looks)


def test_it_is_not_over_because_another_receiver_took_the_item() -> None:
    scene = Scene("a")
    looks = list(at_every_step(scene.prepare, lambda: scene.queue.is_over(), lambda: scene.queue.take_nowait()))
    assert len(looks) > 10
    assert not any(looks)


@pytest.mark.parametrize(("capacity", "has_room"), [(1, False), (2, True)])
def test_an_item_that_keeps_its_place_counts_once_while_it_is_taken(capacity: int, has_room: bool) -> None:
    """A sender that found no room by counting it twice would not be woken: taking the item gives none."""
    queue = new()

    def prepare() -> None:
        nonlocal queue
        queue = new(capacity, "a", held=True)

    looks = list(at_every_step(prepare, lambda: queue.has_room, lambda: queue.take_nowait()))
    assert len(looks) > 10
    assert set(looks) == {has_room}
    told = list(at_every_step(prepare, lambda: queue.stats(), lambda: queue.take_nowait()))
    assert {(stats.held, stats.taken) for stats in told} == {(1, 0), (1, 1)}


@pytest.mark.parametrize("look", [BoundedQueue.has_ready, BoundedQueue.peek_nowait, BoundedQueue.stats, repr])
@pytest.mark.parametrize("act", [BoundedQueue.take_nowait, BoundedQueue.cancel, BoundedQueue.clear, BoundedQueue.end])
def test_looks_bear_what_others_do_meanwhile(look: Callable[[Any], object], act: Callable[[Any], object]) -> None:
    scene = Scene("a")
    assert list(at_every_step(scene.prepare, lambda: look(scene.queue), lambda: act(scene.queue)))


def test_what_another_receiver_takes_meanwhile_is_not_seen_as_an_item() -> None:
    scene = Scene("a")
    looks = list(at_every_step(scene.prepare, lambda: scene.queue.peek_nowait(), lambda: scene.queue.take_nowait()))
    assert set(looks) == {"a", EMPTY}


def test_its_words() -> None:
    queue = new(2, "a")
    assert repr(queue) == "<BoundedQueue 1 of 2>"
    queue.end(ValueError())
    queue.take_nowait()
    queue.cancel()
    assert repr(queue) == "<BoundedQueue 0 of 2, cancelled, ended, failed>"
