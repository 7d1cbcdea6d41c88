"""How many reader threads a run has by itself: what the policy decides on simulated machines, and threads that come and go for real."""

from __future__ import annotations

import itertools
import logging
import random
import re
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from jax.sharding import NamedSharding

import prefetchshard as ps
from fakes import SOURCES, Dataset, Examples, first
from machines import Machine, Work, best_pace
from prefetchshard.base.jax_context import JaxContext
from prefetchshard.base.limits import MOST_WAITING
from prefetchshard.building import measured_load
from prefetchshard.building.choices import MOST_WHOLE
from prefetchshard.measuring.recorder import Recorder
from prefetchshard.reading.controller import Bounds, Controller, Decision, Load
from prefetchshard.reading.crew import Control, Crew
from prefetchshard.running.thread_group import GroupThread, ThreadGroup
from prefetchshard.testing import ManualClock
from support import loader_threads, no_threads, wait_until

SLEEPS = Work(sleeping=0.010)
COMPUTES = Work(computing=0.004)
PYTHON = Work(locked=0.002)
MIXED = Work(sleeping=0.010, computing=0.002)
FAST = Work(computing=0.0005)

STEADY: dict[str, tuple[Work, int]] = {
    "sleeps": (SLEEPS, 2),
    "computes on 2": (COMPUTES, 2),
    "computes on 16": (COMPUTES, 16),
    "Python": (PYTHON, 2),
    "Python on 16": (PYTHON, 16),
    "sleeps and computes": (MIXED, 2),
    "fast": (FAST, 2),
}
NEEDED = {"computes on 2": 2, "computes on 16": 16, "Python": 1, "Python on 16": 1, "fast": 2}

# --- the policy, on simulated machines


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 10))])
@pytest.mark.parametrize("name", STEADY)
def test_it_finds_the_best_number_within_50_batches(name: str, seed: int) -> None:
    work, cores = STEADY[name]
    machine = Machine(lambda _: work, cores=cores, seed=seed).run(170)
    assert best_pace(work, cores=cores) / machine.pace(50) >= (0.7 if name == "sleeps and computes" else 0.9)
    if name in NEEDED:
        assert machine.wanted <= 1.5 * NEEDED[name]
    late = [decision for batches, decision in machine.decisions if batches > 50]
    assert len(late) <= (12 if name == "sleeps and computes" else 4)  # it does not flap


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 5))])
@pytest.mark.parametrize("name", STEADY)
def test_a_slow_consumer_keeps_few_threads(name: str, seed: int) -> None:
    work, cores = STEADY[name]
    machine = Machine(lambda _: work, cores=cores, step=0.040, seed=seed).run(150)
    assert machine.pace(50) <= 0.040 / 0.95
    keeps_up = 16 * (work.sleeping + work.computing + work.locked) / 0.040
    assert machine.wanted <= max(1.5 * keeps_up + 1, 2)


@pytest.mark.parametrize(
    ("before", "after", "at", "needed"),
    [
        (SLEEPS, FAST, 60, 2),
        (FAST, SLEEPS, 300, 48),
        (SLEEPS, COMPUTES, 80, 2),
        (COMPUTES, SLEEPS, 60, 48),
        (SLEEPS, PYTHON, 80, 1),
        (PYTHON, SLEEPS, 60, 48),
    ],
)
def test_a_source_that_changes(before: Work, after: Work, at: int, needed: int) -> None:
    machine = Machine(lambda batch: before if batch < at else after).run(at + 200)
    assert best_pace(after, cores=2) / machine.pace(at + 60) >= 0.9
    machine.run_for(6.0)  # what did not pay is left alone for a while
    assert machine.wanted <= 1.5 * needed


def test_batches_that_take_seconds() -> None:
    """Each is one part; the threads wait, so there are soon as many as may be."""
    machine = Machine(lambda _: Work(sleeping=2.0), rows=1, most=16).run(50)
    assert machine.wanted == 16
    assert [batches for batches, _ in machine.decisions][-1] <= 20
    assert machine.most_seen <= 16


def test_it_waits_for_nobody_who_does_not_ask() -> None:
    """Where the consumer never waits, nothing changes once the threads are few enough."""
    machine = Machine(lambda _: SLEEPS, step=0.1).run(60)
    settled = len(machine.decisions)
    machine.run(150)
    assert len(machine.decisions) == settled


def loads(*, busy: float, cpu: float, stall: float, contended: float = 0.0, batches: int = 100, seconds: float = 1.0) -> list[Load]:
    """Two looks, a second apart."""
    before = Load(at=10.0, batches=1000, stall_seconds=0.0, busy_seconds=0.0, cpu_seconds=0.0, contended=contended, parts=0)
    after = Load(
        at=10.0 + seconds,
        batches=1000 + batches,
        stall_seconds=stall * seconds,
        busy_seconds=busy * seconds,
        cpu_seconds=cpu * seconds,
        contended=contended,
        parts=4 * batches,
    )
    return [before, after]


@pytest.mark.parametrize(
    ("load", "workers", "wanted", "words"),
    [
        ({"busy": 4.0, "cpu": 0.1, "stall": 0.95}, 4, 16, r"consumer waits 95 % .* they wait as well \(2 % of their time on a CPU\)"),
        ({"busy": 4.0, "cpu": 0.1, "stall": 0.2}, 4, 6, "they wait as well"),  # so many would keep up
        ({"busy": 4.0, "cpu": 3.9, "stall": 0.95}, 4, 8, r"they compute, on 3.9 of 8 CPUs"),
        ({"busy": 8.0, "cpu": 7.9, "stall": 0.95}, 8, None, ""),  # no more CPUs
        ({"busy": 4.0, "cpu": 1.0, "stall": 0.95, "contended": 0.7}, 4, 1, "the interpreter's lock 70 % of the time"),
        ({"busy": 0.9, "cpu": 0.9, "stall": 0.95}, 4, 2, r"only 0\.9 of them are busy"),
        ({"busy": 24.0, "cpu": 7.9, "stall": 0.95}, 24, 12, "all of 8 CPUs are busy"),
        ({"busy": 2.0, "cpu": 0.1, "stall": 0.005}, 8, 5, r"nobody waits for them, and 2\.0 are busy"),
        ({"busy": 2.0, "cpu": 0.1, "stall": 0.005}, 3, None, ""),
        ({"busy": 40.0, "cpu": 0.1, "stall": 0.9}, 40, 32, "no room"),
    ],
)
def test_what_it_decides_and_why(load: dict[str, Any], workers: int, wanted: int | None, words: str) -> None:
    before, after = loads(**load)
    controller = Controller(before)
    decision = controller.decide(after, workers, Bounds(8, 32))
    if wanted is None:
        assert decision is None
    else:
        assert decision is not None
        assert decision.workers == wanted
        assert re.search(words, decision.reason), decision.reason


# --- threads that come and go


class Dice:
    """A policy that says any number."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.said: list[int] = []
        self.is_lock_bound = False

    def decide(self, load: Load, workers: int, bounds: Bounds) -> Decision | None:
        del load
        wanted = self.chance.randint(1, min(12, bounds.most))
        if wanted == workers:
            return None
        self.said.append(wanted)
        return Decision(wanted, "the dice")


class Script(Dice):
    """A policy that says these numbers, and then the last one for ever."""

    def __init__(self, *numbers: int) -> None:
        super().__init__(0)
        self.numbers = list(numbers)

    def decide(self, load: Load, workers: int, bounds: Bounds) -> Decision | None:
        del load, bounds
        wanted = self.numbers.pop(0) if len(self.numbers) > 1 else self.numbers[0]
        return None if wanted == workers else Decision(wanted, "the script")


@pytest.fixture
def decided_by(monkeypatch: pytest.MonkeyPatch) -> Callable[[Dice], Dice]:
    """Makes a policy that of all runs from now on, which ask it after each part."""
    monkeypatch.setattr("prefetchshard.reading.crew.GLANCE_SECONDS", -1.0)

    def use(policy: Dice) -> Dice:
        monkeypatch.setattr("prefetchshard.building.run_factory.Controller", lambda start: policy)
        return policy

    return use


def readers() -> list[threading.Thread]:
    return [thread for thread in loader_threads() if "reader-" in thread.name]


LOADERS: dict[str, Callable[[NamedSharding], tuple[ps.Loader, list[int]]]] = {
    "examples": lambda S: (ps.Loader(Examples(320), S, batch_size=8, epochs=2), 2 * list(range(0, 320, 8))),
    "collated examples": lambda S: (ps.Loader(Examples(320), S, batch_size=8, collate=np.stack), list(range(0, 320, 8))),
    "arrays": lambda S: (ps.Loader(np.arange(640, dtype=np.int32), S, batch_size=8, epochs=2), 2 * list(range(0, 640, 8))),
    "transformed arrays": lambda S: (
        ps.Loader(np.arange(320, dtype=np.int32), S, batch_size=8, transform=lambda x: x + 1),
        list(range(1, 321, 8)),
    ),
    "batches": lambda S: (ps.prefetch(SOURCES["dataset"](80), S, epochs=2), 2 * list(range(80))),
    "transformed items": lambda S: (
        ps.Loader(iter(range(640)), S, batch_size=8, transform=lambda row: np.int32(row)),
        list(range(0, 640, 8)),
    ),
    "transformed batches": lambda S: (ps.prefetch(SOURCES["generator"](120), S, transform=lambda x: x + 1), list(range(1, 121))),
    "collated items of an async generator": lambda S: (
        ps.Loader(SOURCES["async generator"](40), S, batch_size=8, collate=lambda some: np.stack([one[0] for one in some])),
        list(range(0, 40, 8)),
    ),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", LOADERS)
def test_neither_order_nor_values_depend_on_who_reads(kind: str, seed: int, S: NamedSharding, decided_by: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("prefetchshard.building.choices.cpu_count", lambda: 6)
    dice = decided_by(Dice(seed))
    loader, wanted = LOADERS[kind](S)
    got = list(loader)
    assert [first(batch) for batch in got] == wanted
    if kind not in ("batches", "transformed batches"):
        assert all(np.array_equal(np.diff(np.asarray(batch)), np.ones(7)) for batch in got)
    assert dice.said
    assert no_threads()


def test_shuffled_epochs_that_the_dataset_is_told(S: NamedSharding, decided_by: Any) -> None:
    """An epoch is told when no thread reads the one before, whoever comes and goes."""

    class Told(Examples):
        epoch = -1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __getitem__(self, i: int) -> Any:
            return np.array([i, self.epoch], np.int32)

    decided_by(Dice(5))
    options: dict[str, Any] = {"batch_size": 8, "shuffle": True, "seed": 3, "epochs": 4}
    got = np.concatenate([np.asarray(batch) for batch in ps.Loader(Told(80), S, **options)])
    alone = np.concatenate([np.asarray(batch) for batch in ps.Loader(Told(80), S, workers=1, **options)])
    assert np.array_equal(got, alone)
    assert np.array_equal(got[:, 1], np.repeat(np.arange(4), 80))


@pytest.mark.parametrize("kind", LOADERS)
def test_closing_while_threads_come_and_go(kind: str, S: NamedSharding, decided_by: Any) -> None:
    for seed in range(8):
        decided_by(Dice(seed))
        iterator = iter(LOADERS[kind](S)[0])
        for _ in range(seed % 4):
            next(iterator)
        iterator.close()
        assert no_threads()


def test_a_run_that_is_dropped_while_threads_come_and_go(S: NamedSharding, decided_by: Any) -> None:
    for seed in range(5):
        decided_by(Dice(seed))
        iterator = iter(LOADERS["examples"](S)[0])
        next(iterator)
        del iterator
        wait_until(no_threads)


def test_who_is_added_after_the_refusal_never_begins() -> None:
    ran: list[int] = []
    group = ThreadGroup(JaxContext(), [], may_begin=lambda: True, on_fault=lambda _: None, on_leave=lambda: None)
    gate = threading.Event()
    group.add("first", lambda: gate.wait() and None)
    group.start()
    group.refuse()
    group.add("late", lambda: ran.append(1))
    gate.set()
    for thread in group.in_source:
        thread.join()
    assert group.has_ended
    assert not ran


def test_refusing_while_threads_are_added() -> None:
    """Each that is added runs to its end or never begins, and all of them are known to who joins."""
    for _ in range(30):
        begun = threading.Semaphore(0)
        group = ThreadGroup(JaxContext(), [], may_begin=lambda: True, on_fault=lambda _: None, on_leave=lambda: None)
        gate = threading.Event()
        group.add("first", lambda: gate.wait() and None)  # noqa: B023 - called in this round only
        group.start()
        adder = threading.Thread(target=lambda: [group.add(f"more-{i}", begun.release) for i in range(5)])  # noqa: B023 - as above
        adder.start()
        group.refuse()
        adder.join()
        gate.set()
        for thread in group.in_source:
            thread.join()
        assert group.has_ended
        assert group.is_gone


def test_no_more_threads_can_be_started(S: NamedSharding, decided_by: Any, monkeypatch: Any, caplog: Any) -> None:
    """It goes on with those that there are, and does not ask again."""
    start, tried = GroupThread.start, list[str]()

    def limited(thread: GroupThread) -> None:
        tried.append(thread.name)
        if len(readers()) >= 6:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(GroupThread, "start", limited)
    decided_by(Script(9))
    with caplog.at_level(logging.INFO, "prefetchshard.reading.crew"):
        iterator = iter(ps.Loader(Examples(10**6), S, batch_size=8))
        for i in range(60):
            assert first(next(iterator)) == 8 * i
        assert 4 <= iterator.stats().workers <= 6
        iterator.close()
    assert any("no more threads can be started" in record.getMessage() for record in caplog.records)
    assert no_threads()


class Open:
    """A dataset that counts how many of it are open, in all threads."""

    now = 0
    made = 0
    _lock = threading.Lock()

    def __init__(self) -> None:
        with self._lock:
            Open.now += 1
            Open.made += 1
        self.is_open = True

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, row: int) -> Any:
        assert self.is_open
        time.sleep(0.0005)
        return np.int32(row)

    def close(self) -> None:
        assert self.is_open
        self.is_open = False
        with self._lock:
            Open.now -= 1


def test_a_thread_that_leaves_closes_its_dataset(S: NamedSharding, decided_by: Any) -> None:
    Open.now = Open.made = 0
    decided_by(Script(8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 1))
    iterator = iter(ps.Loader(ps.per_worker(Open), S, batch_size=8))
    seen = 0

    def is_alone() -> bool:
        nonlocal seen
        assert first(next(iterator)) == 8 * seen
        seen += 1
        return Open.made > 4 and Open.now == 1 and len(readers()) == 1

    wait_until(is_alone)
    assert iterator.stats().workers == 1
    iterator.close()
    assert Open.now == 0


@pytest.mark.parametrize("kind", ["examples", "items", "batches"])
def test_threads_that_wait_leave_too(kind: str, S: NamedSharding, decided_by: Any) -> None:
    """Nobody takes a batch, so all that is to be read is read, and those that are too many wait for room or for work."""
    decided_by(Script(6, 6, 1))
    sources: dict[str, Callable[[], ps.Loader]] = {
        "examples": lambda: ps.Loader(Examples(10**6), S, batch_size=8),
        "items": lambda: ps.Loader((np.int32(i) for i in range(10**6)), S, batch_size=8, transform=lambda row: row),
        "batches": lambda: ps.prefetch(Dataset(10**6), S),
    }
    iterator = iter(sources[kind]())
    numbers = itertools.count(0, 1 if kind == "batches" else 8)
    while iterator.stats().workers != 1:
        assert first(next(iterator)) == next(numbers)
    wait_until(lambda: len(readers()) == 1)
    for _ in range(30):
        assert first(next(iterator)) == next(numbers)
    iterator.close()


def test_one_that_is_stuck_does_not_keep_the_others(S: NamedSharding, decided_by: Any) -> None:
    decided_by(Script(6, 6, 2))
    inside, opened = threading.Event(), threading.Event()

    def stick(row: int) -> None:
        if row == 800:
            inside.set()
            opened.wait()

    iterator = iter(ps.Loader(Examples(10**6, stick), S, batch_size=8))
    for _ in range(96):
        next(iterator)
    assert inside.wait(30)
    assert iterator.stats().workers == 2
    wait_until(lambda: len(readers()) == 2)
    opened.set()
    for _ in range(40):
        next(iterator)
    iterator.close()


def test_a_fault_while_threads_come_and_go(S: NamedSharding, decided_by: Any) -> None:
    def fail(row: int) -> None:
        if row == 170:
            raise ValueError("row 170")

    decided_by(Dice(11))
    iterator = iter(ps.Loader(Examples(400, fail), S, batch_size=8))
    assert [first(next(iterator)) for _ in range(21)] == list(range(0, 168, 8))
    with pytest.raises(ValueError, match="row 170"):
        next(iterator)


# --- what the loader says and keeps to


def test_a_dataset_that_sleeps_gets_more_threads(S: NamedSharding, caplog: Any) -> None:
    with caplog.at_level(logging.INFO, "prefetchshard.reading.crew"):
        iterator = iter(ps.Loader(Examples(10**6, lambda _: time.sleep(0.01)), S, batch_size=16))
        seen = 0

        def has_grown() -> bool:
            nonlocal seen
            assert first(next(iterator)) == 16 * seen
            seen += 1
            return iterator.stats().workers >= 12

        wait_until(has_grown)
        assert len(readers()) <= MOST_WAITING
        iterator.close()
    lines = [record.getMessage() for record in caplog.records]
    assert lines
    assert all(" reader threads, " in line and ": " in line for line in lines)


def test_a_number_that_was_asked_for_stays(S: NamedSharding, decided_by: Any) -> None:
    dice = decided_by(Dice(0))
    iterator = iter(ps.Loader(Examples(10**6), S, batch_size=8, workers=3))
    for _ in range(50):
        next(iterator)
    assert len(readers()) == iterator.stats().workers == 3
    iterator.close()
    assert not dice.said


def test_a_stream_that_is_only_copied_is_left_as_it_is(S: NamedSharding, decided_by: Any) -> None:
    dice = decided_by(Dice(0))
    assert len(list(ps.prefetch(SOURCES["generator"](50), S))) == 50
    assert not dice.said


@pytest.mark.parametrize("options", [{}, {"read_ahead": 3}, {"host_memory": 3 * 32}])
@pytest.mark.parametrize("kind", ["dataset", "generator"])
def test_the_bound_holds_with_any_number_of_threads(kind: str, options: dict[str, Any], S: NamedSharding, decided_by: Any) -> None:
    """Also the one that was told before any of them came."""
    pulled = delivered = most = 0
    lock = threading.Lock()

    def act(i: int) -> None:
        nonlocal pulled, most
        with lock:
            pulled = max(pulled, i + 1)
            most = max(most, pulled - delivered)

    decided_by(Dice(2))
    loader = ps.prefetch(SOURCES[kind](10**6, act), S, transform=lambda x: x, remainder="keep", **options)
    iterator = iter(loader)
    ahead = loader.spec().ahead if options else None
    first_ahead = loader.spec().ahead
    assert ahead in (None, first_ahead)
    for _ in range(150):
        with lock:
            delivered += 1
        next(iterator)
    assert loader.spec().ahead == first_ahead
    iterator.close()
    assert most <= first_ahead <= options.get("read_ahead", 7 + MOST_WHOLE)


def test_the_next_run_begins_with_what_the_last_one_found(S: NamedSharding, decided_by: Any) -> None:
    decided_by(Script(9))
    loader = ps.Loader(Examples(320), S, batch_size=8)
    assert len(list(loader)) == 40
    iterator = iter(loader)
    assert iterator.stats().workers == 9
    iterator.close()


def test_memory_bounds_the_threads(S: NamedSharding) -> None:
    """With room for three batches on the host, more than three threads that each need one have nothing to do."""
    iterator = iter(ps.prefetch(Dataset(10**6, lambda _: time.sleep(0.005)), S, host_memory=3 * 32))
    for _ in range(80):
        next(iterator)
    assert iterator.stats().workers <= 3
    iterator.close()


# -- parts of it by themselves


def test_a_decision_beyond_what_there_may_be_is_kept_to_that() -> None:
    """What is asked for again although there may be no more of it changes nothing."""
    clock, told = ManualClock(), []
    crew = Crew(4)
    crew.start = lambda name, body: True
    answers = [Decision(8, "more"), Decision(8, "more"), Decision(2, "fewer")]
    bounds = [Bounds(6, 6), Bounds(6, 6), Bounds(6, 6)]
    crew.control = Control(lambda *_: answers.pop(0), lambda: None, lambda: bounds.pop(0), lambda: told.append(crew.wanted), clock)  # pyright: ignore[reportArgumentType]

    def work(deal: Any, part_done: Any) -> None:
        for _ in range(3):
            clock.advance(1.0)
            part_done()

    crew.work(0, work, lambda: None, lambda number: None, lambda too_many: None)
    assert told == [6, 2]
    assert not answers


def test_the_first_looks_at_the_lock_weigh_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that had to wait among the first is not most of what is known, and one that had not does not hide the others."""
    clock = ManualClock()
    waits = iter([1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0])
    monkeypatch.setattr(measured_load, "time", SimpleNamespace(sleep=lambda _: clock.advance(next(waits))))
    monkeypatch.setattr(measured_load, "queued_seconds", lambda: 0.0)

    class Waiters(list[Any]):
        waited_seconds = 0.0

    queue: Any = SimpleNamespace(receivers=Waiters())
    measure = measured_load.measure_of(Recorder(clock), queue, queue)
    found = [measure().contended for _ in range(7)]
    assert found == pytest.approx([1, 1 / 2, 2 / 3, 2 / 4, 3 / 5, 3 / 5 * 0.8, 3 / 5 * 0.8 * 0.8])
