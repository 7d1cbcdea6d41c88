"""How many batches are kept ready by themselves: what the policy decides in simulated loops, and loops for real."""

from __future__ import annotations

import logging
import math
import random
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

import prefetchshard as ps
from fakes import Examples, first
from prefetchshard.base.limits import Limits
from prefetchshard.building import choices, room
from prefetchshard.placing.depth import CALM_SECONDS, FIRST_DEPTH, MOST_DEPTH, Change, DepthController
from support import no_threads, wait_until

STEP = 0.010


class Loop:
    """A producer that makes one batch after the other, and a consumer that takes them. No real time.

    Args:
        make: seconds that a batch takes, by its number.
        most: places that memory allows.
        step: seconds that the consumer takes for a batch.
    """

    def __init__(self, make: Callable[[int], float], *, most: int = MOST_DEPTH, step: float = STEP) -> None:
        self.make, self.most, self.step = make, most, step
        self.controller = DepthController()
        self.depth = FIRST_DEPTH
        self.depths: list[int] = []
        self.reasons: list[str] = []
        self.number = 0
        self.made_at = 0.0  # when the producer goes on
        self.taken = deque[float]()  # when batches that were made are taken
        self.asks_at = 0.0  # when the consumer asks next
        self.stalls: list[tuple[float, float]] = []  # when, and for how long
        self.stalled, self.counted = 0.0, 0

    def run(self, batches: int) -> Loop:
        for _ in range(batches):
            ready_at = self.made_at + self.make(self.number)
            self.number += 1
            while self.taken and self.taken[0] <= ready_at:
                self.taken.popleft()
            while self.counted < len(self.stalls) and self.stalls[self.counted][0] <= ready_at:
                self.stalled += self.stalls[self.counted][1]
                self.counted += 1
            change = self.controller.decide(ready_at, self.stalled, len(self.taken), self.depth, lambda: self.most)
            if change is not None:
                self.depth = change.depth
                self.depths.append(change.depth)
                self.reasons.append(change.reason)
            while len(self.taken) >= self.depth:  # no room
                ready_at = max(ready_at, self.taken.popleft())
            taken_at = max(ready_at, self.asks_at)
            if taken_at > self.asks_at and self.number > 1:
                self.stalls.append((taken_at, taken_at - self.asks_at))
            self.taken.append(taken_at)
            self.asks_at = taken_at + self.step
            self.made_at = ready_at
        return self

    def waits(self, last: int) -> float:
        """The part of the time of about the last batches that was spent waiting."""
        since = self.asks_at - last * self.step
        return sum(took for at, took in self.stalls if at > since) / (last * self.step)


def pauses(every: int, seconds: float, usual: float = 0.002) -> Callable[[int], float]:
    return lambda number: seconds if number % every == every - 1 else usual


@pytest.mark.parametrize(
    ("every", "pause", "enough"),
    [(10, 0.040, 8), (20, 0.100, 32), (50, 0.200, 32)],
)
def test_pauses_are_evened_out(every: int, pause: float, enough: int) -> None:
    loop = Loop(pauses(every, pause)).run(20 * every)
    assert loop.depth == enough
    assert loop.depths == sorted(loop.depths)
    assert loop.waits(5 * every) < 0.01
    assert "times after all 2 places had been filled" in loop.reasons[0]


@pytest.mark.parametrize("seconds", [0.001, 0.009, 0.011, 0.050])
def test_what_takes_always_the_same_time_needs_no_depth(seconds: float) -> None:
    assert Loop(lambda _: seconds).run(20_000).depths == []


def test_a_single_pause_and_the_start_are_no_reason() -> None:
    loop = Loop(lambda number: 5.0 if number in (0, 300) else 0.002).run(600)
    assert loop.depths == []


def test_pauses_that_cost_less_than_a_hundredth_are_left_alone() -> None:
    assert Loop(pauses(400, 0.050)).run(5000).depths == []


def test_what_brings_nothing_is_undone_and_left_alone_for_longer_and_longer() -> None:
    """Each pause is far longer than all places together."""
    loop = Loop(pauses(30, 10.0)).run(30 * 100)
    assert set(loop.depths[::2]) == {8}
    assert set(loop.depths[1::2]) == {FIRST_DEPTH}
    assert "more brought nothing" in loop.reasons[1]
    assert 4 <= len(loop.depths) <= 10  # in 1,000 s, as it waits for 60, 120, 240 and 480 s


def test_memory_bounds_it() -> None:
    loop = Loop(pauses(20, 0.100), most=5).run(400)
    assert loop.depths == [5]


def test_what_is_not_used_any_more_is_given_up() -> None:
    loop = Loop(lambda number: pauses(20, 0.100)(number) if number < 400 else 0.002).run(400)
    assert loop.depth == 32
    loop.run(round(6 * CALM_SECONDS / STEP))
    assert loop.depth == FIRST_DEPTH
    assert loop.depths[2:] == sorted(loop.depths[2:], reverse=True)
    assert all(re.fullmatch(r"never fewer than \d+ were ready in 60 s", reason) for reason in loop.reasons[2:])


def test_what_is_used_now_and_then_stays() -> None:
    loop = Loop(pauses(20, 0.100)).run(round(5 * CALM_SECONDS / STEP))
    assert loop.depths[:2] == [8, 32]
    assert loop.depth >= 10  # what the pauses need
    assert loop.waits(3000) < 0.01


def test_times_that_are_spread_out() -> None:
    chance = random.Random(0)
    loop = Loop(lambda _: chance.lognormvariate(-5.6, 1.2)).run(4000)
    assert loop.depth >= 8
    fixed = Loop(lambda _: chance.lognormvariate(-5.6, 1.2), most=FIRST_DEPTH).run(4000)
    assert loop.waits(2000) < 0.6 * fixed.waits(2000)


class Looks:
    """What a controller says when all places are filled, and after waits that used all of them up."""

    def __init__(self, depth: int) -> None:
        self.controller, self.depth = DepthController(), depth
        self.at = self.stalled = 0.0
        self.full()

    def full(self, seconds: float = 0.0) -> Change | None:
        self.at += seconds
        change = self.controller.decide(self.at, self.stalled, self.depth, self.depth, lambda: MOST_DEPTH)
        self.depth = self.depth if change is None else change.depth
        return change

    def wait(self, seconds: float, every: float) -> Change | None:
        """Places are filled, the loop waits, and they are filled again."""
        self.full()
        self.at, self.stalled = self.at + every, self.stalled + seconds
        self.controller.decide(self.at, self.stalled, 0, self.depth, lambda: MOST_DEPTH)
        return self.full()

    def waits(self, seconds: float, every: float) -> int:
        """The depth after two of them."""
        for _ in range(2):
            self.wait(seconds, every)
        return self.depth


def test_shorter_waits_pay_also_where_they_come_more_often() -> None:
    looks = Looks(FIRST_DEPTH)
    assert looks.waits(1.0, every=3.0) == 8
    assert looks.waits(0.5, every=1.5) == 32


def test_rarer_waits_pay_also_where_they_are_as_long() -> None:
    looks = Looks(FIRST_DEPTH)
    assert looks.waits(1.0, every=3.0) == 8
    assert looks.waits(1.0, every=6.0) == 32


def test_what_a_minute_did_not_refute_stays() -> None:
    looks = Looks(FIRST_DEPTH)
    assert looks.waits(1.0, every=3.0) == 8
    looks.wait(1.0, every=CALM_SECONDS)
    assert looks.waits(1.0, every=3.0) == 32, "it would have been undone"


def test_one_wait_a_minute_is_no_reason() -> None:
    looks = Looks(FIRST_DEPTH)
    for _ in range(20):
        looks.full(CALM_SECONDS)
        looks.wait(5.0, every=6.0)
    assert looks.depth == FIRST_DEPTH


def test_what_somebody_else_changed_is_not_judged() -> None:
    """Such as larger batches, of which fewer fit into memory."""
    looks = Looks(FIRST_DEPTH)
    assert looks.waits(1.0, every=3.0) == 8
    looks.depth = 5
    assert looks.waits(1.0, every=3.0) == 20


def test_it_is_left_alone_for_ten_minutes_at_most() -> None:
    looks = Looks(FIRST_DEPTH)
    undone_at, quiet = None, []
    while len(quiet) < 7:
        before = looks.depth
        looks.wait(1.0, every=3.0)
        if looks.depth < before:
            undone_at = looks.at
        elif looks.depth > before and undone_at is not None:
            quiet.append(looks.at - undone_at)
    assert quiet == pytest.approx([60, 120, 240, 480, 600, 600, 600], abs=10)


@pytest.mark.parametrize(("least", "depth"), [(0, 32), (1, 32), (2, 31), (20, 22), (32, 16)])
def test_half_of_what_was_never_used_is_given_up(least: int, depth: int) -> None:
    looks = Looks(32)
    looks.controller.decide(1.0, 0.0, least, 32, lambda: MOST_DEPTH)
    change = looks.full(CALM_SECONDS)
    assert (looks.depth, change is None) == (depth, depth == 32)


# --- loops for real


class Pausing:
    """Batches of eight rows; now and then one waits until the loop has used up what is ready."""

    def __init__(self) -> None:
        self.iterator: Any = None
        self.loop_waits = threading.Event()

    def __call__(self) -> Iterator[Any]:
        for number in range(10_000):
            if number % 100 == 99:
                wait_until(lambda: self.iterator is None or self.iterator.stats().ready.receivers_waiting > 0)
            yield np.full(8, number, np.int32)


def run_with_pauses(loader: ps.Loader[Any], source: Pausing, batches: int) -> int:
    source.iterator = iterator = iter(loader)
    try:
        for number in range(batches):
            if number % 100 == 12:  # all places are filled, so that nothing can be made ahead
                wait_until(
                    lambda: iterator.stats().ready.senders_waiting > 0 or iterator.stats().ready.held >= iterator.stats().ready.capacity
                )
            assert first(next(iterator)) == number
        return iterator.stats().ready.capacity
    finally:
        source.iterator = None
        iterator.close()


def test_it_grows_while_a_loop_goes_on(S: NamedSharding, caplog: Any) -> None:
    source = Pausing()
    loader = ps.prefetch(source, S, depth="auto")
    assert loader.spec().ahead >= MOST_DEPTH
    with caplog.at_level(logging.INFO, "prefetchshard.building.room"):
        run_with_pauses(loader, source, 600)
    assert any("times after all 2 places had been filled" in record.getMessage() for record in caplog.records)
    assert no_threads()


class Script:
    """Decides for five places at the tenth batch."""

    def __init__(self) -> None:
        self.asked = 0

    def decide(self, at: float, stalled: float, ready: int, depth: int, most: Callable[[], int]) -> Change | None:
        self.asked += 1
        assert 0 <= ready <= depth <= most() <= MOST_DEPTH
        return Change(5, "the script") if self.asked == 10 else None


def test_what_was_decided_is_in_force_and_the_next_run_begins_with_it(S: NamedSharding, monkeypatch: Any) -> None:
    monkeypatch.setattr(room, "DepthController", Script)
    loader = ps.prefetch(lambda: iter(np.arange(8 * 60, dtype=np.int32).reshape(60, 8)), S, depth="auto")
    iterator = iter(loader)
    for i in range(20):
        assert first(next(iterator)) == 8 * i
    assert iterator.stats().ready.capacity == 5
    wait_until(lambda: iterator.stats().ready.ready == 5)
    assert [first(batch) for batch in iterator] == list(range(160, 480, 8))
    again = iter(loader)
    assert again.stats().ready.capacity == 5
    again.close()
    assert no_threads()


class Dice:
    """Decides at random."""

    def __init__(self) -> None:
        self.dice = random.Random(3)

    def decide(self, at: float, stalled: float, ready: int, depth: int, most: Callable[[], int]) -> Change | None:
        target = self.dice.randint(1, most())
        return Change(target, "the dice") if target != depth and self.dice.random() < 0.3 else None


@pytest.mark.parametrize("kind", ["iterator", "dataset"])
def test_whatever_it_decides_nothing_is_lost_and_no_bound_exceeded(kind: str, S: NamedSharding, monkeypatch: Any) -> None:
    monkeypatch.setattr(room, "DepthController", Dice)
    pulled = taken = most = 0

    def batches() -> Iterator[Any]:
        nonlocal pulled, most
        for number in range(400):
            pulled += 1
            most = max(most, pulled - taken)
            yield np.full(8, number, np.int32)

    if kind == "iterator":
        loader = ps.prefetch(batches, S, depth="auto", device_memory=4 * 20)
    else:
        loader = ps.Loader(Examples(8 * 400), S, batch_size=8, depth="auto", device_memory=4 * 20, workers=3)
    ahead = loader.spec().ahead
    iterator = iter(loader)
    for number in range(400):
        assert first(next(iterator)) == (number if kind == "iterator" else 8 * number)
        taken += 1
        assert iterator.stats().ready.held <= 20
    with pytest.raises(StopIteration):
        next(iterator)
    assert most <= ahead + 1  # one is taken before it is counted here
    assert no_threads()


def ahead(S: NamedSharding, depth: int | str, **bound: Any) -> int:
    """The bound on batches of 8 rows of 4 bytes, which take 4 bytes on each of 8 devices."""
    with ps.prefetch(lambda: iter(np.zeros((60, 8), np.int32)), S, depth=depth, **bound) as loader:
        return loader.spec().ahead


@pytest.mark.parametrize(("bound", "most"), [({"device_memory": 6 * 4}, 4), ({"read_ahead": 3}, 3)])
def test_bounds_hold_for_it(S: NamedSharding, bound: dict[str, Any], most: int) -> None:
    assert ahead(S, "auto", **bound) == ahead(S, most, **bound)
    source = Pausing()
    assert run_with_pauses(ps.prefetch(source, S, depth="auto", **bound), source, 600) <= most


@pytest.mark.parametrize(
    ("memory", "most"), [(16 * 4 * 5, 5), (16 * 4 * 6 - 1, 5), (1, FIRST_DEPTH), (16 * 4 * 32, 32), (math.inf, MOST_DEPTH)]
)
def test_a_sixteenth_of_the_memory_is_the_most(memory: float, most: int, S: NamedSharding, monkeypatch: Any) -> None:
    monkeypatch.setattr(choices, "memory_bytes", lambda device: memory)
    assert ahead(S, "auto") == ahead(S, most)
    source = Pausing()
    assert run_with_pauses(ps.prefetch(source, S, depth="auto"), source, 300) <= most


def test_places_can_be_filled_also_where_read_ahead_bounds_them(S: NamedSharding, monkeypatch: Any) -> None:
    """Else nobody could see whether they paid, or were not used any more: a batch that finds no place shows that all are filled."""
    filled: set[int] = set()

    class Greedy:
        def decide(self, at: float, stalled: float, ready: int, depth: int, most: Callable[[], int]) -> Change | None:
            if ready == depth:
                filled.add(depth)
            return Change(most(), "it may") if most() != depth else None

    monkeypatch.setattr(room, "DepthController", Greedy)
    loader = ps.prefetch(lambda: iter(np.arange(8 * 60, dtype=np.int32).reshape(60, 8)), S, depth="auto", read_ahead=5)
    iterator = iter(loader)
    for i in range(20):
        assert first(next(iterator)) == 8 * i
    wait_until(lambda: 4 in filled)
    assert iterator.stats().ready.capacity == 4
    assert [first(batch) for batch in iterator] == list(range(160, 480, 8))


def test_what_was_decided_is_told_to_all_parts_of_a_run(monkeypatch: Any) -> None:
    """No more than there may be, the bounds of both queues and of transfers, what warms up; and who waits for room on the host looks."""
    asked: list[int] = []

    class Greedy:
        def decide(self, at: float, stalled: float, ready: int, depth: int, most: Callable[[], int]) -> Change | None:
            asked.append(most())
            return Change(5, "it may")

    monkeypatch.setattr(room, "DepthController", Greedy)
    woken: list[int] = []
    parts: Any = SimpleNamespace(
        limits=SimpleNamespace(of=lambda workers, depth: Limits(min(depth, 7), 2, workers)),
        crew=SimpleNamespace(wanted=4),
        host=SimpleNamespace(capacity=0, senders=SimpleNamespace(wake=lambda: woken.append(parts.host.capacity))),
        ready=SimpleNamespace(capacity=2, held=0),
        transfers=SimpleNamespace(in_flight=0),
        recorder=SimpleNamespace(clock=lambda: 0.0, stall_seconds=0.0, warm_up=0, batches=1),
    )
    made = room.Room(parts.limits, parts.crew, 2, parts.host, parts.ready, parts.transfers, parts.recorder)
    made.watch()
    assert (asked, made.depth) == ([7], 5)
    assert (parts.host.capacity, parts.ready.capacity, parts.transfers.in_flight, parts.recorder.warm_up) == (4, 5, 2, 11)
    assert woken == [4], "after there was room"


def test_the_wait_for_the_first_batch_is_not_among_the_waits(S: NamedSharding, monkeypatch: Any) -> None:
    """Else two waits of a millisecond after a start of a minute would be a reason for more, and more would seem to pay."""
    seen: list[float] = []

    class Listener:
        def decide(self, at: float, stalled: float, *_: object) -> None:
            seen.append(stalled)

    monkeypatch.setattr(room, "DepthController", Listener)
    asked = threading.Event()

    def batches() -> Iterator[Any]:
        asked.wait(30)
        for number in range(20):
            yield np.full(8, number, np.int32)

    iterator = iter(ps.prefetch(batches, S, depth="auto"))
    threading.Timer(0.2, asked.set).start()
    assert first(next(iterator)) == 0
    wait_until(lambda: iterator.stats().ready.ready == FIRST_DEPTH)
    assert [first(batch) for batch in iterator] == list(range(1, 20))
    assert seen
    assert seen[0] > 0.1


def test_a_wait_is_looked_at_when_it_is_counted(monkeypatch: Any) -> None:
    """A fast source fills all places again before the consumer, which is woken, has taken one: its wait is in no figure yet."""
    looks: list[tuple[int, float]] = []

    class Listener:
        def decide(self, at: float, stalled: float, ready: int, *_: object) -> None:
            looks.append((ready, stalled))

    monkeypatch.setattr(room, "DepthController", Listener)
    ready = SimpleNamespace(capacity=2, held=0)
    recorder = SimpleNamespace(clock=lambda: 0.0, stall_seconds=0.0, batches=5)
    parts: Any = (None, None, 2, None, ready, None, recorder)
    made = room.Room(*parts)
    for held in (0, 1, 2, 2):
        ready.held = held
        made.watch()
    assert looks == [(0, 0.0), (1, 0.0)]
    recorder.batches, recorder.stall_seconds = 6, 1.0
    made.watch()
    made.watch()
    assert looks[2:] == [(2, 1.0), (2, 1.0)]


def test_what_a_device_has(S: NamedSharding) -> None:
    class Device:
        platform = "gpu"

        def memory_stats(self) -> Any:
            return {"bytes_limit": 1000}

    assert choices.memory_bytes(Device()) == 1000
    device: Any = next(iter(S.device_set))
    assert 1 << 26 < choices.memory_bytes(device) < 1 << 50  # the CPU backend: the host's


@pytest.mark.parametrize(
    ("limit", "physical", "expected"),
    [(None, 1000, 1000), (600, 1000, 600), (2000, 1000, 1000), (600, None, 600), (None, None, math.inf)],
)
def test_the_host_has_what_its_group_may_use(limit: int | None, physical: int | None, expected: float, monkeypatch: Any) -> None:
    monkeypatch.setattr(choices, "memory_limit", lambda: None if limit is None else SimpleNamespace(limit_bytes=limit))
    monkeypatch.setattr(choices, "physical_bytes", lambda: physical)
    monkeypatch.setattr(choices, "host_bytes", choices.host_bytes.__wrapped__)
    for stats in (None, {}, {"bytes_limit": -1}):
        device = SimpleNamespace(memory_stats=lambda stats=stats: stats, platform="cpu")
        assert choices.memory_bytes(device) == expected / len(jax.local_devices(backend="cpu")), "they share it"


def test_a_device_whose_memory_nobody_tells_is_no_error(monkeypatch: Any) -> None:
    """As JAX raises of a device of another process."""

    def refuse() -> Any:
        raise RuntimeError("INVALID_ARGUMENT: MemoryStats is only supported for addressable devices")

    monkeypatch.setattr(choices, "host_bytes", lambda: 800.0)
    assert choices.memory_bytes(SimpleNamespace(memory_stats=refuse, platform="cpu")) == 800 / len(jax.local_devices(backend="cpu"))


def test_the_memory_of_the_host_is_looked_up_once(monkeypatch: Any) -> None:
    """It takes more than half as long as the rest of making a loader."""
    choices.host_bytes()
    monkeypatch.setattr(choices, "memory_limit", lambda: pytest.fail("looked up again"))
    ps.Loader(np.zeros((8, 2), np.float32), batch_size=8)


def test_values_order_and_state_are_the_same(S: NamedSharding) -> None:
    data = {"x": np.arange(800).reshape(400, 2)}
    loader = ps.Loader(data, S, batch_size=8, depth="auto", shuffle=True, seed=3)
    other = ps.Loader(data, S, batch_size=8, shuffle=True, seed=3)
    iterator = iter(loader)
    got = [np.asarray(next(iterator)["x"]) for _ in range(20)]
    state = iterator.state()
    iterator.close()
    rest = [np.asarray(batch["x"]) for batch in ps.Loader(data, S, batch_size=8, depth="auto", shuffle=True, seed=3, state=state)]
    assert np.array_equal(np.stack([*got, *rest]), np.stack([np.asarray(batch["x"]) for batch in other]))


@pytest.mark.parametrize(
    ("settings", "could"),
    [
        ({}, True),
        ({"depth": 31}, True),
        ({"depth": 32}, False),
        ({"depth": 64}, False),
        ({"depth": "auto"}, False),
        ({"read_ahead": 2}, False),
        ({"read_ahead": 3}, False),  # two ready, and one that waits for its place
        ({"read_ahead": 4}, True),
        ({"device_memory": 4 * 4}, False),  # two ready, two on their way
        ({"device_memory": 5 * 4}, True),
    ],
)
def test_advice_knows_whether_the_depth_could_grow(settings: dict[str, Any], could: bool, S: NamedSharding) -> None:
    loader = ps.Loader(np.arange(64, dtype=np.int32), S, batch_size=8, **settings)
    list(loader)
    assert loader.stats().setup.depth_could_grow == could


@pytest.mark.parametrize(("memory", "could"), [(16 * 4 * 2, False), (16 * 4 * 3, True)])
def test_advice_knows_whether_there_is_memory(memory: int, could: bool, S: NamedSharding, monkeypatch: Any) -> None:
    monkeypatch.setattr(choices, "memory_bytes", lambda device: memory)
    loader = ps.Loader(np.arange(64, dtype=np.int32), S, batch_size=8)
    list(loader)
    assert loader.stats().setup.depth_could_grow == could


def test_advice_knows_that_it_stays_two_for_arrays_on_the_devices(S: NamedSharding) -> None:
    loader = ps.Loader(ps.OnDevice({"x": np.arange(64, dtype=np.int32)}), S, batch_size=8)
    list(loader)
    assert not loader.stats().setup.depth_could_grow


def test_it_is_two_for_arrays_on_the_devices(S: NamedSharding) -> None:
    loader = ps.Loader(ps.OnDevice({"x": np.arange(64, dtype=np.int32)}), S, batch_size=8, depth="auto")
    fixed = ps.Loader(ps.OnDevice({"x": np.arange(64, dtype=np.int32)}), S, batch_size=8)
    assert loader.spec().ahead == fixed.spec().ahead
    fixed.close()
    iterator = iter(loader)
    assert iterator.stats().ready.capacity == FIRST_DEPTH
    assert len(list(iterator)) == 8


@pytest.mark.parametrize("depth", ["Auto", "", 0, -1, 2.0, True, None, np.array([2, 4]), np.array("auto")])
def test_anything_else_is_refused(depth: Any) -> None:
    with pytest.raises(ps.ConfigError, match=r"depth=.*an integer, at least 1; 'auto' to follow the run"):
        ps.Loader(np.zeros((8, 2)), batch_size=8, depth=depth)


def test_an_array_is_no_number_of_workers() -> None:
    with pytest.raises(ps.ConfigError, match=r"workers=.*'auto' to choose"):
        ps.Loader(np.zeros((8, 2)), batch_size=8, workers=cast("int", np.array([2, 4])))
