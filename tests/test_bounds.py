"""Never more batches pulled and not delivered than `ahead`, under all timings; nothing grows; waiting costs nothing."""

from __future__ import annotations

import gc
import itertools
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from jax.sharding import NamedSharding

import prefetchshard as ps
from fakes import SOURCES, Examples, Gate, Iterable, async_generator, batch, first, generator
from prefetchshard.measuring.recorder import RECENT
from prefetchshard.queues.bounded_queue import EMPTY
from support import Interrupts, loader_threads, pairwise, wait_until

ENDLESS = 10**9


class Counter:
    """An act that counts what is pulled against what was delivered; both may be looked at from any thread."""

    def __init__(self, rows: int = 1) -> None:
        self.rows = rows
        self.pulled = 0
        self.delivered = 0
        self.most = 0
        self.pause: Callable[[], object] = lambda: None
        self._lock = threading.Lock()

    def __call__(self, i: int) -> None:
        with self._lock:
            self.pulled = max(self.pulled, i // self.rows + 1)
            self.most = max(self.most, self.outstanding)
        self.pause()

    @property
    def outstanding(self) -> int:
        return self.pulled - self.delivered

    def take(self, iterator: Any) -> None:
        next(iterator)
        with self._lock:
            self.delivered += 1


def at_rest(iterator: ps.LoaderIterator) -> bool:
    """Whether all threads wait for room: nothing more is read until a batch is taken."""
    stats, again = iterator.stats(), iterator.stats()
    if (stats.ready, stats.host) != (again.ready, again.host):  # a look at both queues is not one look
        return False
    if not all(queue.senders_waiting >= 1 and queue.held == queue.capacity for queue in (stats.ready, stats.host)):
        return False
    places = list(iterator._consumer.run._inbox._queue.line)
    return all(place.item is not EMPTY for place in places)  # one worker may wait for room while another has yet to read


def loaders(kind: str, counter: Counter, S: NamedSharding, **options: Any) -> ps.Loader:
    if kind == "examples":
        counter.rows = 8
        return ps.Loader(Examples(ENDLESS, counter), S, batch_size=8, **options)
    if kind == "examples of an iterator":
        counter.rows = 8
        return ps.Loader((np.int32(counter(i) or i) for i in range(ENDLESS)), S, batch_size=8, **options)
    if kind == "examples of an async generator":
        counter.rows = 8
        return ps.Loader(async_generator(ENDLESS, counter, np.int32), S, batch_size=8, **options)
    return ps.prefetch(SOURCES[kind](ENDLESS, counter), S, **options)


KINDS = [*SOURCES, "examples", "examples of an iterator", "examples of an async generator"]


@pytest.mark.parametrize(("kind", "depth", "workers", "transforms"), pairwise(KINDS, [1, 2, 5], [1, 3], [False, True]))
def test_it_reads_ahead_as_far_as_it_says(kind: str, depth: int, workers: int, transforms: bool, S: NamedSharding) -> None:
    """A consumer that is slow finds the same number of batches ahead every time, and it is within the bound."""
    counter = Counter()
    loader = loaders(kind, counter, S, depth=depth, workers=workers, transform=(lambda x: x) if transforms else None)
    iterator = iter(loader)
    counter.take(iterator)
    ahead = loader.spec().ahead
    found: set[int] = set()
    for _ in range(4):
        wait_until(lambda: at_rest(iterator))
        found.add(counter.outstanding)
        counter.take(iterator)
    iterator.close()
    assert len(found) == 1
    assert depth < found.pop() <= ahead
    assert counter.most <= ahead
    assert ahead <= depth + 5 + 2 * workers  # small


@pytest.mark.parametrize("kind", KINDS)
def test_no_timing_exceeds_the_bound(kind: str, S: NamedSharding) -> None:
    """Now the source is the slow one, now the consumer."""
    counter, dice = Counter(), random.Random(7)
    counter.pause = lambda: time.sleep(0.002) if dice.random() < 0.2 else None
    loader = loaders(kind, counter, S, workers=3, transform=lambda x: x)
    ahead = loader.spec().ahead
    iterator = iter(loader)
    for _ in range(60):
        if dice.random() < 0.2:
            time.sleep(0.003)
        counter.take(iterator)
        assert counter.outstanding <= ahead
    iterator.close()
    assert counter.most <= ahead


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_read_before_a_run_begins(kind: str, S: NamedSharding) -> None:
    counter = Counter()
    loader = loaders(kind, counter, S)
    repr(loader)
    loader.close()
    assert counter.pulled == 0
    iterator = iter(loader)
    wait_until(lambda: at_rest(iterator))
    assert 0 < counter.pulled <= loader.spec().ahead
    iterator.close()


class Asked:
    """An act that counts what the source was asked for; what `next` was called for counts as delivered, as the source may go on at once."""

    def __init__(self) -> None:
        self.items = 0
        self.delivered = 0
        self.most = 0
        self._lock = threading.Lock()

    def __call__(self, i: int) -> None:
        with self._lock:
            self.items += 1
            self.most = max(self.most, -(-self.items // self.rows) - self.delivered)

    rows = 1

    @property
    def ahead(self) -> float:
        return self.items / self.rows - self.delivered

    def take(self, iterator: Any) -> None:
        with self._lock:
            self.delivered += 1
        next(iterator)


def waits_for_room(iterator: ps.LoaderIterator) -> bool:
    stats = iterator.stats()
    return stats.host.senders_waiting > 0 and stats.ready.ready + stats.host.ready == stats.ready.held + stats.host.held


@pytest.mark.parametrize(("kind", "n", "transforms", "consume"), pairwise(KINDS, [1, 2, 3], [False, True], ["spec", "next"]))
def test_it_reads_ahead_just_as_far_as_it_is_allowed(kind: str, n: int, transforms: bool, consume: str, S: NamedSharding) -> None:
    """Neither more nor less, however deep the queues are: what a curriculum or an actor does now is in the n-th batch after this one."""
    asked = Asked()
    loader = loaders(
        kind, asked, S, read_ahead=n, depth=4, workers=3, remainder="keep", transform=(lambda x: x) if transforms else None
    )  # fmt: skip
    if consume == "spec":
        loader.spec()
    iterator = iter(loader)
    for _ in range(5):
        wait_until(lambda: asked.ahead == n)
        wait_until(lambda: waits_for_room(iterator))
        assert asked.ahead == n
        asked.take(iterator)
    assert loader.spec().ahead == n
    iterator.close()
    assert asked.most <= n


@pytest.mark.parametrize("kind", KINDS)
def test_no_timing_exceeds_what_is_allowed(kind: str, S: NamedSharding) -> None:
    asked, dice = Asked(), random.Random(5)
    iterator = iter(loaders(kind, asked, S, read_ahead=2, workers=3, remainder="keep"))
    for _ in range(150):
        if dice.random() < 0.1:
            time.sleep(0.001)
        asked.take(iterator)
    iterator.close()
    assert asked.most <= 2


@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize(("rows", "batch_size", "remainder"), [(5, None, "keep"), (32, 8, "drop"), (35, 8, "drop"), (35, 8, "pad")])
def test_a_bound_on_reading_ahead_loses_nothing(rows: int, batch_size: int | None, remainder: Any, n: int, S: NamedSharding) -> None:
    """Over the ends of epochs too, where the source is asked once more to learn that it has ended."""
    make = (lambda: generator(rows)) if batch_size is None else (lambda: iter(range(rows)))
    loader = ps.Loader(make, S, batch_size=batch_size, remainder=remainder, epochs=3, read_ahead=n)
    size = 1 if batch_size is None else 8
    assert len(list(loader)) == 3 * (rows // size + (remainder == "pad" and rows % size > 0))
    iterator = iter(loader)
    next(iterator)
    assert iterator.position is not None
    assert not iterator.position.ends_epoch
    iterator.close()


def test_arrays_keep_to_it_too(S: NamedSharding) -> None:
    loader = ps.Loader(np.zeros((800, 2), np.float32), S, batch_size=8, read_ahead=2, depth=4)
    assert loader.spec().ahead == 2
    iterator = iter(loader)
    for _ in range(4):
        wait_until(lambda: waits_for_room(iterator) and iterator.stats().ready.ready == 2)  # on its way a batch may count twice
        stats = iterator.stats()
        assert stats.host.held + stats.ready.held == 2
        next(iterator)
    iterator.close()


def test_ctrl_c_does_not_lose_a_place(S: NamedSharding) -> None:
    """With the least that is allowed: one place that is lost would hold the run up for ever."""

    def rows() -> Iterator[int]:
        for i in itertools.count():
            if i >= 400 and interrupts.count > 5:  # who sends them may have had no turn for long
                return
            yield from range(8 * i, 8 * i + 8)

    with Interrupts(0.0005) as interrupts:
        iterator = iter(ps.Loader(rows(), S, batch_size=8, read_ahead=1))
        got: list[Any] = []
        done = False
        while not done:
            try:
                for value in iterator:
                    got.append(value)
                    interrupts.armed = True
                interrupts.armed = False
                done = True
            except KeyboardInterrupt:
                pass
    assert len(got) >= 400
    assert [first(value) for value in got] == list(range(0, len(got) * 8, 8))
    assert interrupts.count > 5


def test_where_one_batch_ahead_is_too_few(S: NamedSharding) -> None:
    with pytest.raises(ps.ConfigError, match=r"^read_ahead=1: .*read_ahead=2"):
        ps.prefetch(generator(3), S, remainder="error", read_ahead=1)
    assert len(list(ps.prefetch(generator(3), S, remainder="error", read_ahead=2))) == 3
    sizes = (16, 8, 16)
    assert len(list(ps.prefetch((np.zeros(size) for size in sizes), S, remainder="error", read_ahead=2))) == 3


def test_two_runs_have_a_bound_each(S: NamedSharding) -> None:
    source = Iterable(ENDLESS)
    loader = ps.prefetch(source, S)
    ahead = loader.spec().ahead  # the first of the two
    iterators = [iter(loader), iter(loader)]
    for iterator in iterators:
        wait_until(lambda iterator=iterator: at_rest(iterator))
    assert [items.asked <= ahead for items in source.given] == [True, True]
    loader.close()


def test_a_failure_and_a_drop_stop_the_reading(S: NamedSharding) -> None:
    counter = Counter()

    def transform(value: Any) -> Any:
        if value[0] == 2:
            raise ZeroDivisionError
        return value

    iterator = iter(ps.prefetch(generator(ENDLESS, counter), S, transform=transform, workers=2))
    wait_until(lambda: iterator._consumer.outbox.stats().ready == 2)
    wait_until(lambda: not any(thread.name.startswith("prefetchshard-source") for thread in loader_threads()))
    assert counter.pulled <= 20
    iterator.close()


# --- nothing grows


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads the resident memory from /proc")
@pytest.mark.parametrize("kind", ["iterator", "dataset", "async generator", "arrays"])
def test_memory_does_not_grow(kind: str, S: NamedSharding) -> None:
    """300 steps of 2 MiB, 600 MiB in all."""
    rows = np.ones((256, 2048), np.float32)

    async def pulled() -> Any:
        while True:
            yield rows.copy()

    class Many:
        def __len__(self) -> int:
            return ENDLESS

        def __getitem__(self, i: int) -> Any:
            return rows.copy()

    source: Any = {"iterator": (rows.copy() for _ in range(ENDLESS)), "dataset": Many(), "async generator": pulled(), "arrays": rows}[kind]
    whole: dict[str, Any] = {"batch_size": 256, "epochs": None, "shuffle": True} if kind == "arrays" else {}
    iterator = iter(ps.Loader(source, S, **whole))
    for _ in range(60):
        next(iterator)
    gc.collect()
    before = resident_bytes()
    for _ in range(300):
        next(iterator)
    gc.collect()
    grown = resident_bytes() - before
    iterator.close()
    assert grown < 64 << 20


def stays_below(count: Callable[[], int], bound: int) -> None:
    """Waits until it is: what is under way, or was about to end, goes; what piles up stays."""
    wait_until(lambda: count() < bound)


def objects() -> int:
    gc.collect()
    return len(gc.get_objects())


@pytest.mark.parametrize("kind", KINDS)
def test_no_objects_pile_up(kind: str, S: NamedSharding) -> None:
    """One object a step would be 300."""
    iterator = iter(loaders(kind, Counter(), S, workers=2, transform=lambda x: x))

    def objects_after(steps: int) -> int:
        for _ in range(steps):
            next(iterator)
        wait_until(lambda: at_rest(iterator))
        return objects()

    objects_after(RECENT)  # the times of so many batches are kept
    before = objects_after(10)
    objects_after(300)
    stays_below(objects, before + 200)
    iterator.close()


def test_runs_do_not_pile_up(S: NamedSharding) -> None:
    """Of a run there are far more objects than ten."""
    loader = ps.prefetch(Iterable(50), S)

    def objects_after(runs: int) -> int:
        for i in range(runs):
            iterator = iter(loader)
            next(iterator)
            if i % 2:
                iterator.close()
        del iterator
        loader.close()
        return objects()

    objects_after(5)
    before = objects_after(1)
    objects_after(30)
    stays_below(lambda: objects_after(1), before + 300)  # the next run forgets those whose threads had not ended yet


# --- waiting costs nothing


def cpu_seconds(threads: list[threading.Thread]) -> float:
    """What they have used of the CPU so far; a thread that waits, and wakes up for nothing, uses none at all."""
    return sum(time.clock_gettime(time.pthread_getcpuclockid(thread.ident)) for thread in threads if thread.ident is not None)


@pytest.mark.skipif(not hasattr(time, "pthread_getcpuclockid"), reason="asks for the CPU time of single threads")
@pytest.mark.parametrize("state", ["full", "starved", "consumer waits", "async source waits"])
def test_waiting_threads_burn_no_cpu(state: str, S: NamedSharding) -> None:
    gate = Gate(1)

    async def asleep() -> Any:
        import asyncio

        yield batch(0)
        await asyncio.Event().wait()

    source: Any = asleep() if state == "async source waits" else generator(ENDLESS, Gate(-1) if state == "full" else gate)
    iterator = iter(ps.prefetch(source, S, transform=lambda x: x, workers=4))
    next(iterator)
    consumer = threading.Thread(target=lambda: next(iterator, None))
    if state == "full":
        wait_until(lambda: at_rest(iterator))
    if state == "consumer waits":
        consumer.start()
        wait_until(lambda: iterator.stats().ready.receivers_waiting == 1)
    threads = [*loader_threads(), consumer]

    def is_still() -> bool:
        before = cpu_seconds(threads)
        time.sleep(0.2)  # longer than any thread may sleep between two looks
        return cpu_seconds(threads) == before

    wait_until(is_still)
    gate.open()
    iterator.close()
    if state == "consumer waits":
        consumer.join()


def test_a_small_batch_does_not_loosen_the_bound_for_large_ones(S: NamedSharding) -> None:
    large, small = np.zeros((8, 1 << 17), np.uint8), np.zeros((8, 1 << 10), np.uint8)
    loader = ps.prefetch([large, small, *[large] * 20], S, host_memory="3MiB")
    iterator = iter(loader)
    next(iterator)
    ahead = loader.spec().ahead
    for _ in range(4):
        wait_until(lambda: at_rest(iterator))
        assert iterator.stats().host.capacity <= 3
        assert loader.spec().ahead <= ahead
        next(iterator)
    iterator.close()
