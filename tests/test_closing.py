"""Closing is idempotent, allowed from anywhere, bounded whatever the source does, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import queue
import signal
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest
from jax.sharding import NamedSharding

import prefetchshard as ps
from fakes import SOURCES, Dataset, Examples, Gate, Iterable, OpenSource, async_generator, batch, factory, first, generator, nothing
from prefetchshard.queues.bounded_queue import BoundedQueue
from prefetchshard.reading.item_dealer import ItemDealer
from prefetchshard.reading.row_dealer import RowDealer
from prefetchshard.running import closing
from prefetchshard.running.run import Run
from prefetchshard.running.thread_group import GroupThread, ThreadGroup
from prefetchshard.sources.loops import LOOP_THREAD
from support import HANG_SECONDS, Thread, called_in, ended, handled_everywhere, loader_threads, no_threads, wait_until

ENDLESS = 10**9


@pytest.fixture
def graceful(monkeypatch: pytest.MonkeyPatch) -> None:
    """A source has all the time to come out by itself, so that it is closed in its own thread."""
    monkeypatch.setattr("prefetchshard.running.closing.GRACE_SECONDS", HANG_SECONDS)


def give_up_once(monkeypatch: pytest.MonkeyPatch, ready: Callable[[Run], bool]) -> None:
    """Closing gives no thread up before this is so, however busy the machine is: then, after the time that it gives a source."""
    close_source = Run.close_source

    def close_and_wait(run: Run) -> None:
        close_source(run)
        wait_until(lambda: ready(run))

    monkeypatch.setattr(Run, "close_source", close_and_wait)


def is_in_its_close(run: Run) -> bool:
    """Whether a thread closes the source from outside, or each thread that the source still has closes it or lets go of it."""
    inside = run._closing_in  # pyright: ignore[reportPrivateUsage]
    threads = [thread for thread in run.threads.in_source if thread.is_alive() and thread.name != LOOP_THREAD]
    closers = [thread for thread in threads if thread.name == "prefetchshard-closer"]
    return any(thread.ident in inside for thread in closers) or all(
        thread.ident in inside or (isinstance(thread, GroupThread) and thread.has_left) for thread in threads if thread not in closers
    )


every_source = pytest.mark.parametrize("kind", SOURCES)


def full(iterator: ps.LoaderIterator) -> bool:
    """Whether it has read as far ahead as it may."""
    stats = iterator.stats()
    return stats.ready.senders_waiting + stats.host.senders_waiting >= 2


def no_threads_collected() -> bool:
    """Of runs in cycles neither. To be asked again and again: a collection does nothing while another thread collects."""
    gc.collect()
    return no_threads()


def closed_in_time(close: Callable[[], object]) -> None:
    """The bound is one against hanging: what is looked at is what closing says, and what is left of the run."""
    began = time.monotonic()
    close()
    assert time.monotonic() - began < HANG_SECONDS


# --- nothing stays


def exhaust(loader: ps.Loader) -> None:
    for _ in loader:
        pass


def close_iterator(loader: ps.Loader) -> None:
    iterator = iter(loader)
    next(iterator)
    iterator.close()


def close_before_the_first(loader: ps.Loader) -> None:
    iter(loader).close()


def leave_the_with(loader: ps.Loader) -> None:
    with loader:
        for _ in loader:
            break


def close_the_loader(loader: ps.Loader) -> None:
    iterator = iter(loader)
    next(iterator)
    loader.close()
    assert ended(iterator)


def raise_in_the_loop(loader: ps.Loader) -> None:
    def train() -> None:
        with loader:
            for _ in loader:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()


def close_the_spec(loader: ps.Loader) -> None:
    loader.spec()
    loader.close()


def close_async(loader: ps.Loader) -> None:
    async def main() -> None:
        async with loader:
            async for _ in loader:
                break

    asyncio.run(main())


ENDS = [exhaust, close_iterator, close_before_the_first, leave_the_with, close_the_loader, raise_in_the_loop, close_the_spec, close_async]


@every_source
@pytest.mark.parametrize("end", ENDS)
def test_no_thread_is_left_when_it_returns(kind: str, end: Callable[[ps.Loader], None], S: NamedSharding) -> None:
    loader = ps.prefetch(SOURCES[kind](20), S, transform=lambda x: x)
    end(loader)
    assert no_threads()


def break_off(loader: ps.Loader) -> None:
    for _ in loader:
        break


def drop_iterator(loader: ps.Loader) -> None:
    iterator = iter(loader)
    next(iterator)


def drop_before_the_first(loader: ps.Loader) -> None:
    iter(loader)


def drop_in_a_cycle(loader: ps.Loader) -> None:
    cycle: list[Any] = [iter(loader)]
    next(cycle[0])
    cycle.append(cycle)


def drop_after_an_error(loader: ps.Loader) -> None:
    def train() -> None:
        for _ in loader:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()


def drop_spec(loader: ps.Loader) -> None:
    loader.spec()


def drop_full(loader: ps.Loader) -> None:
    iterator = iter(loader)
    next(iterator)
    wait_until(lambda: full(iterator))


def drop_at_the_end(loader: ps.Loader) -> None:
    """All threads have ended; batches are left that nobody took."""
    iterator = iter(loader)
    for _ in range(18):
        next(iterator)
    wait_until(lambda: iterator._consumer.run.has_ended)


DROPS = [break_off, drop_iterator, drop_before_the_first, drop_in_a_cycle, drop_after_an_error, drop_spec, drop_full, drop_at_the_end]


@every_source
@pytest.mark.parametrize("drop", DROPS)
def test_who_drops_it_stops_it(kind: str, drop: Callable[[ps.Loader], None], S: NamedSharding) -> None:
    """Without `close()`: the threads end by themselves, and let go of the source."""
    source = SOURCES[kind](20)
    loader = ps.prefetch(source, S)
    dead = [weakref.ref(loader)] if kind in ("factory", "async generator") else [weakref.ref(loader), weakref.ref(source)]
    drop(loader)
    del loader, source
    wait_until(no_threads_collected)
    wait_until(lambda: [ref() for ref in dead] == [None] * len(dead))


class Told(Examples):
    """Is told the epoch."""

    def set_epoch(self, epoch: int) -> None:
        pass


@pytest.mark.parametrize("makes", [Dataset, Told])
@pytest.mark.parametrize("when", ["before its threads run", "while its first item is dealt", "later"])
def test_a_dropped_run_lets_go_of_a_dataset_without_the_garbage_collector(
    when: str, makes: type[Dataset], S: NamedSharding, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However late its threads come: a cycle would hold the source until something collects it."""
    came, dropped = threading.Event(), threading.Event()

    def late(function: Any) -> Any:
        def wait(*args: Any) -> Any:
            came.set()
            dropped.wait(HANG_SECONDS)
            return function(*args)

        return wait

    if when == "before its threads run":
        monkeypatch.setattr(ThreadGroup, "_run", late(ThreadGroup._run))
    elif when == "while its first item is dealt":
        monkeypatch.setattr(RowDealer, "_begin", late(RowDealer._begin))
    source = makes(20)
    loader = ps.prefetch(source, S, workers=2, batch_size=8 if makes is Told else None)
    dead = weakref.ref(source)
    gc.collect()
    gc.disable()
    try:
        iterator = iter(loader)
        if when == "later":
            next(iterator)
            came.set()
        assert came.wait(HANG_SECONDS)
        del iterator, loader, source
        dropped.set()
        wait_until(no_threads)
        wait_until(lambda: dead() is None)
    finally:
        gc.enable()


@pytest.mark.parametrize("depth", [2, "auto"])
@pytest.mark.parametrize("workers", ["auto", 2])
def test_what_a_run_measured_goes_without_the_garbage_collector(workers: Any, depth: Any, S: NamedSharding) -> None:
    """Where it is off, as in some training loops, each run would leave its queues and the times of its last batches."""
    loader = ps.Loader(Examples(80), S, batch_size=8, workers=workers, depth=depth)
    gc.collect()
    gc.disable()
    try:
        iterator = iter(loader)
        next(iterator)
        dead = weakref.ref(iterator._consumer.outbox)
        iterator.close()
        del iterator, loader
        wait_until(lambda: dead() is None)
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", ["dataset", "iterable"])
@pytest.mark.parametrize("drop", [d for d in DROPS if d is not drop_spec])
def test_a_loader_that_is_kept_keeps_no_dropped_run(kind: str, drop: Callable[[ps.Loader], None], S: NamedSharding) -> None:
    loader = ps.prefetch(SOURCES[kind](20), S)
    drop(loader)
    wait_until(no_threads_collected)
    assert [first(b) for b in loader] == list(range(20))


@pytest.mark.parametrize("how", ["close", "drop", "drop at the end", "end", "fail"])
def test_queued_batches_die(how: str, S: NamedSharding) -> None:
    """Also where the loader lives on."""

    def act(i: int) -> None:
        if how == "fail" and i == 5:
            raise ZeroDivisionError

    loader = ps.prefetch(Dataset(3 if "end" in how else 20, act), S, workers=2)
    iterator = iter(loader)
    refs = [weakref.ref(next(iterator))]
    wait_until(lambda: iterator.stats().ready.ready >= 2)
    peeked: Any = iterator._consumer.outbox.peek_nowait()
    refs.append(weakref.ref(peeked.batch))
    del peeked
    if how == "close":
        iterator.close()
    elif how == "fail":
        with pytest.raises(ZeroDivisionError):
            exhaust(iterator)  # pyright: ignore[reportArgumentType]
    elif how == "end":
        exhaust(iterator)  # pyright: ignore[reportArgumentType]
    else:
        wait_until(lambda: how == "drop" or iterator._consumer.run.has_ended)
        del iterator
        wait_until(no_threads)
    gc.collect()
    assert [ref() for ref in refs] == [None, None]
    assert isinstance(loader, ps.Loader)


def test_the_finaliser_takes_no_lock_and_waits_for_nobody(S: NamedSharding, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs wherever an allocation happens: also in a thread that holds the queue's lock."""
    gate = Gate(3)
    loader = ps.prefetch(generator(ENDLESS, gate), S)
    cycle: list[Any] = [iter(loader), loader]
    cycle.append(cycle)
    assert gate.inside.wait(HANG_SECONDS)
    run = cycle[0]._consumer.run
    for waits in ("close_runs", "join"):
        monkeypatch.setattr(f"prefetchshard.running.closing.{waits}", lambda *_, **__: pytest.fail("it waits"))
    gc.disable()
    try:
        del loader, cycle
        ring = run._inbox._queue  # pyright: ignore[reportPrivateUsage]
        with run.outbox.receivers.lock, run.outbox.senders.lock, ring.receivers.lock, ring.senders.lock:
            Thread(gc.collect).returned()  # in another thread, which would wait for the locks
            assert run.outbox.cancelled
    finally:
        gc.enable()
    assert loader_threads()  # the source is blocked still
    gate.open()
    wait_until(no_threads)


def test_garbage_may_be_collected_in_any_thread(S: NamedSharding) -> None:
    """Collections all the time, in threads of other runs too, that finalise dropped runs: nobody waits for anybody."""
    gc.freeze()
    old = gc.get_threshold()
    gc.set_threshold(5)
    try:
        for i in range(20):
            cycle: list[Any] = [iter(ps.prefetch(factory(50), S, transform=lambda x: x))]
            cycle.append(cycle)
            next(cycle[0])
            if i % 4 == 0:
                exhaust(ps.prefetch(factory(4), S))
    finally:
        gc.set_threshold(*old)
        gc.unfreeze()
    del cycle
    wait_until(no_threads_collected)


# --- who may close, and when


@every_source
def test_closing_again_does_nothing(kind: str, S: NamedSharding) -> None:
    loader = ps.prefetch(SOURCES[kind](20), S)
    iterator = iter(loader)
    next(iterator)
    for _ in range(3):
        iterator.close()
        loader.close()
        assert no_threads()
    assert ended(iterator)


def test_closing_what_never_ran(S: NamedSharding) -> None:
    source = OpenSource(3)
    loader = ps.prefetch(source, S)
    loader.close()
    with loader:
        pass
    assert source.closed == 0
    assert [first(b) for b in loader] == [0, 1, 2]


@every_source
def test_many_threads_close_at_once(kind: str, S: NamedSharding) -> None:
    loader = ps.prefetch(SOURCES[kind](ENDLESS), S)
    iterator = iter(loader)
    next(iterator)
    start = threading.Barrier(8)

    def close() -> list[threading.Thread]:
        start.wait()
        (iterator if threading.get_ident() % 2 else loader).close()
        return loader_threads()

    closers = [Thread(close) for _ in range(8)]
    assert [closer.returned() for closer in closers] == [[]] * 8
    assert ended(iterator)


@every_source
def test_the_source_may_close(kind: str, S: NamedSharding) -> None:
    """From inside: of the source, where that is how it says that it is done."""
    runs: list[ps.LoaderIterator] = []
    started = threading.Event()

    def act(i: int) -> None:
        if i == 3:
            started.wait(HANG_SECONDS)
            runs[0].close()

    loader = ps.prefetch(SOURCES[kind](ENDLESS, act), S)
    runs.append(iter(loader))
    started.set()
    got = [first(b) for b in runs[0]]
    assert got == list(range(len(got)))
    assert len(got) <= 3
    assert ended(runs[0])
    wait_until(no_threads)
    runs.clear()


@pytest.mark.parametrize("kind", ["generator", "dataset", "async generator"])
@pytest.mark.parametrize("whole_loader", [False, True])
def test_a_transform_may_close(kind: str, whole_loader: bool, S: NamedSharding) -> None:
    runs: list[Any] = []
    started = threading.Event()

    def transform(value: Any) -> Any:
        if first(value) == 3:
            started.wait(HANG_SECONDS)
            runs[whole_loader].close()
        return value

    loader = ps.prefetch(SOURCES[kind](ENDLESS), S, transform=transform, workers=2)
    runs[:] = [iter(loader), loader]
    got: list[Any] = []
    started.set()
    closed_in_time(lambda: got.extend(runs[0]))
    assert len(got) <= 3
    wait_until(no_threads)
    runs.clear()


def test_the_sources_own_close_may_close_the_loader(S: NamedSharding) -> None:
    runs: list[Any] = []

    class Owner(OpenSource):
        def close(self) -> None:
            super().close()
            runs[0].close()

    source = Owner(ENDLESS)
    runs.append(ps.prefetch(source, S))
    iterator = iter(runs[0])
    next(iterator)
    closed_in_time(iterator.close)
    assert source.closed == 1
    assert no_threads()
    runs.clear()


def test_a_device_transform_may_close(S: NamedSharding) -> None:
    runs: list[Any] = []
    started = threading.Event()

    def trace(value: Any) -> Any:
        started.wait(HANG_SECONDS)
        runs[0].close()
        return value

    runs.append(ps.prefetch(generator(ENDLESS), S, device_transform=trace))
    iterator = iter(runs[0])
    started.set()
    assert list(iterator) == []
    wait_until(no_threads)
    runs.clear()


def test_a_signal_handler_may_close_while_its_thread_closes(S: NamedSharding, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefetchshard.running.closing.GIVE_UP_SECONDS", 2.0)  # twice, one inside the other
    gate = Gate(2)
    iterator = iter(ps.prefetch(generator(ENDLESS, gate), S))
    gate.inside.wait(HANG_SECONDS)
    handled = threading.Event()

    def handler(*_: object) -> None:
        iterator.close()
        handled.set()
        gate.open()

    closing = threading.get_ident()

    def send() -> None:
        wait_until(lambda: "join" in called_in(closing))
        signal.pthread_kill(closing, signal.SIGUSR1)

    old = signal.signal(signal.SIGUSR1, handler)
    try:
        sender = Thread(send)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ps.StuckThreadWarning)
            closed_in_time(iterator.close)
        sender.returned()
    finally:
        signal.signal(signal.SIGUSR1, old)
    assert handled.is_set()
    wait_until(no_threads)


def test_a_signal_handler_may_close_while_its_thread_takes_a_batch(S: NamedSharding) -> None:
    """Wherever in `next` it strikes, also where that holds the queue's lock: at once, and every thread ends meanwhile."""
    runs: list[ps.LoaderIterator] = []
    left: list[int] = []

    def prepare() -> None:
        runs[:] = [iter(ps.prefetch(Iterable(ENDLESS), S, transform=lambda x: x, workers=1, depth=1))]
        wait_until(
            lambda: len(runs[0]._consumer.outbox.senders) == 1
        )  # not among those that a burst leaves waiting, who wake by themselves

    def close() -> None:
        began = time.monotonic()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            runs[0].close()
        assert time.monotonic() - began < HANG_SECONDS
        left.append(len(loader_threads()))

    places = 0
    for _ in handled_everywhere(prepare, lambda: unless_ended(runs[0]), close):
        places += 1
        assert ended(runs[0])
    assert places > 10
    assert left == [0] * places


def unless_ended(iterator: ps.LoaderIterator) -> None:
    try:
        iterator.__next__()
    except StopIteration:
        pass


def test_a_finaliser_of_the_users_may_close_in_a_thread_of_the_run(S: NamedSharding) -> None:
    """A trainer with `__del__` that closes its loader, found by a collection in one of the loader's own threads."""

    class Trainer:
        def __init__(self, iterator: ps.LoaderIterator) -> None:
            self.iterator = iterator
            self.cycle = self

        def __del__(self) -> None:
            self.iterator.close()

    collect = threading.Event()
    collected = threading.Event()

    def act(i: int) -> None:
        if i == 3:
            collect.wait(HANG_SECONDS)
            gc.collect()
            collected.set()

    iterator = iter(ps.prefetch(generator(ENDLESS, act), S))
    gc.disable()
    try:
        trainer = Trainer(iterator)
        del trainer
        collect.set()
        assert collected.wait(HANG_SECONDS)
    finally:
        gc.enable()
    assert len(list(iterator)) <= 3
    wait_until(no_threads)


@every_source
def test_a_consumer_that_waits_ends_when_another_thread_closes(kind: str, S: NamedSharding) -> None:
    gate = Gate(2)
    iterator = iter(ps.prefetch(SOURCES[kind](ENDLESS, gate), S, workers=1))
    assert [first(next(iterator)), first(next(iterator))] == [0, 1]
    consumer = Thread(lambda: next(iterator))
    wait_until(lambda: iterator.stats().ready.receivers_waiting == 1)
    closer = Thread(iterator.close)
    assert isinstance(consumer.raised(), StopIteration)
    gate.open()
    closer.returned()
    assert no_threads()


def test_it_does_not_wait_for_the_closer(S: NamedSharding, monkeypatch: pytest.MonkeyPatch) -> None:
    """The source is stuck, so closing takes its time; the consumer ends at once."""
    monkeypatch.setattr("prefetchshard.running.closing.GIVE_UP_SECONDS", 10 * HANG_SECONDS)
    gate = Gate(1)
    iterator = iter(ps.prefetch(generator(ENDLESS, gate), S))
    next(iterator)
    consumer = Thread(lambda: exhaust(iterator))  # pyright: ignore[reportArgumentType]
    wait_until(lambda: iterator.stats().ready.receivers_waiting == 1)
    closer = Thread(iterator.close)
    consumer.returned()
    assert closer.is_alive()
    gate.open()
    closer.returned()
    assert no_threads()


# --- sources that block


def test_a_blocked_source_is_closed_from_outside(S: NamedSharding, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that waits inside the source comes out, and `close` returns soon."""
    monkeypatch.setattr("prefetchshard.running.closing.GIVE_UP_SECONDS", 2 * HANG_SECONDS)

    class Blocks:
        def __init__(self) -> None:
            self.gate = threading.Event()
            self.asked = 0
            sources.append(self)
            self.closed = 0

        def __iter__(self) -> Iterator[Any]:
            return self

        def __next__(self) -> Any:
            self.asked += 1
            if self.asked > 1:
                self.gate.wait()
                raise StopIteration
            return np.ones(8)

        def close(self) -> None:
            self.closed += 1
            self.gate.set()

    sources: list[Blocks] = []
    for loader in (ps.prefetch(Blocks(), S), ps.prefetch(Blocks, S)):
        iterator = iter(loader)
        next(iterator)
        closed_in_time(iterator.close)
        assert no_threads()
        assert ended(iterator)
        iterator.close()
    assert [source.closed for source in sources] == [1, 1]


def stuck_here(gate: Gate, i: int) -> None:
    gate(i)


@pytest.mark.usefixtures("impatient")
@every_source
def test_a_source_that_stays_blocked_is_named_and_given_up_on(kind: str, S: NamedSharding, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(2)
    loader = ps.prefetch(SOURCES[kind](ENDLESS, lambda i: stuck_here(gate, i)), S, workers=1)
    iterator = iter(loader)
    assert gate.inside.wait(HANG_SECONDS)
    with pytest.warns(ps.StuckThreadWarning, match="thread prefetchshard-") as caught:
        closed_in_time(iterator.close)
    assert any("in stuck_here" in str(warning.message) for warning in caught)
    assert all(warning.filename == __file__ for warning in caught)
    assert not [t for t in loader_threads() if t.name in ("prefetchshard-transfer", "prefetchshard-dispatch")]
    for patience in ("GRACE_SECONDS", "GIVE_UP_SECONDS"):
        monkeypatch.setattr(f"prefetchshard.running.closing.{patience}", 2 * HANG_SECONDS)
    closed_in_time(iterator.close)  # says nothing, waits for nothing
    closed_in_time(loader.close)
    assert ended(iterator)
    gate.open()
    wait_until(no_threads)


STUCK: dict[str, Callable[[Callable[[int], Any], NamedSharding], ps.Loader]] = {
    "transform of a stream": lambda act, S: ps.prefetch(generator(9), S, transform=lambda x: (act(first(x)), x)[1], workers=2),
    "transform of a dataset": lambda act, S: ps.prefetch(Dataset(9), S, transform=lambda x: (act(first(x)), x)[1], workers=2),
    "transform of arrays": lambda act, S: ps.Loader(
        np.arange(72), S, batch_size=8, transform=lambda x: (act(int(x) // 8), x)[1], workers=2
    ),
    "collate": lambda act, S: ps.Loader(Examples(72), S, batch_size=8, collate=lambda x: (act(int(x[0]) // 8), np.stack(x))[1], workers=2),
    "a row of a dataset": lambda act, S: ps.Loader(Examples(72, lambda i: act(i // 8)), S, batch_size=8, workers=2),
    "the factory": lambda act, S: ps.prefetch(lambda epoch: (act(epoch), generator(2))[1], S, epochs=9),
    "a leaf": lambda act, S: ps.prefetch((Slow(i, act) for i in range(9)), S),
}


class Slow:
    """A leaf whose conversion may block; memory of the batch is taken before."""

    def __init__(self, i: int, act: Callable[[int], Any]) -> None:
        self.i = i
        self.act = act

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        self.act(self.i)
        return batch(self.i)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("where", STUCK)
def test_other_code_of_the_users_that_is_stuck(where: str, S: NamedSharding) -> None:
    gate = Gate(2)
    iterator = iter(STUCK[where](lambda i: stuck_here(gate, i), S))
    assert gate.inside.wait(HANG_SECONDS)
    with pytest.warns(ps.StuckThreadWarning, match="in stuck_here"):
        closed_in_time(iterator.close)
    assert ended(iterator)
    gate.open()
    wait_until(no_threads)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("kind", ["dataset", "iterable"])
def test_set_epoch_that_is_stuck(kind: str, S: NamedSharding) -> None:
    gate = Gate(1)
    source = SOURCES[kind](2)
    source.set_epoch = lambda epoch: stuck_here(gate, epoch)
    iterator = iter(ps.prefetch(source, S, epochs=3, workers=2))
    assert gate.inside.wait(HANG_SECONDS)
    with pytest.warns(ps.StuckThreadWarning, match="in stuck_here"):
        closed_in_time(iterator.close)
    gate.open()
    wait_until(no_threads)


@pytest.mark.usefixtures("impatient")
def test_many_stuck_threads_are_named_in_one_go(S: NamedSharding) -> None:
    gate = threading.Event()
    inside = threading.Barrier(5)

    class Stuck(Dataset):
        def __getitem__(self, i: int) -> Any:
            inside.wait(HANG_SECONDS)
            gate.wait()

    iterator = iter(ps.prefetch(Stuck(9), S, workers=4))
    inside.wait(HANG_SECONDS)
    with pytest.warns(ps.StuckThreadWarning) as caught:
        closed_in_time(iterator.close)
    assert len(caught) == 1
    assert all(f"prefetchshard-reader-{i}" in str(caught[0].message) for i in range(4))
    gate.set()
    wait_until(no_threads)


@pytest.mark.usefixtures("impatient")
def test_several_stuck_runs_are_closed_side_by_side(S: NamedSharding) -> None:
    gate = Gate(1)
    stuck: list[int] = []
    loader = ps.prefetch(Iterable(ENDLESS, lambda i: (stuck.append(i), gate(i)) if i == 1 else None), S)
    iterators = [iter(loader) for _ in range(4)]
    for iterator in iterators:
        next(iterator)
    wait_until(lambda: len(stuck) == 4)
    with pytest.warns(ps.StuckThreadWarning):
        closed_in_time(loader.close)
    assert all(ended(iterator) for iterator in iterators)
    gate.open()
    wait_until(no_threads)


@pytest.mark.usefixtures("impatient")
def test_where_warnings_are_errors_it_is_closed_all_the_same(S: NamedSharding) -> None:
    gate = Gate(2)
    loader = ps.prefetch(generator(ENDLESS, gate), S)
    iterator = iter(loader)
    gate.inside.wait(HANG_SECONDS)
    with pytest.raises(ps.StuckThreadWarning):
        loader.close()
    loader.close()
    assert ended(iterator)
    assert iterator.stats().ready.held == 0
    gate.open()
    wait_until(no_threads)


@pytest.mark.usefixtures("impatient")
def test_an_error_comes_before_the_word_of_a_stuck_thread(S: NamedSharding) -> None:
    """A transform fails while the source is blocked, and warnings are errors: the fault must not be lost."""
    gate = Gate(4)

    def transform(value: Any) -> Any:
        if first(value) == 2:
            gate.inside.wait(HANG_SECONDS)
            raise ZeroDivisionError
        return value

    iterator = iter(ps.prefetch(generator(ENDLESS, gate), S, transform=transform, workers=2))
    assert [first(next(iterator)), first(next(iterator))] == [0, 1]
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            next(iterator)
    gate.open()
    wait_until(no_threads)


@pytest.mark.usefixtures("impatient")
def test_memory_of_a_stuck_thread_is_not_used_again(S: NamedSharding) -> None:
    """What it writes when it comes out at last reaches nobody."""
    release, entered = threading.Event(), threading.Event()
    opened: list[int] = []

    class Leaf:
        """Its batch is opened by the other leaf before this one is asked for."""

        def __array__(self, *_: Any, **__: Any) -> np.ndarray:
            entered.set()
            release.wait()
            return np.full(1 << 15, 777, np.int32)

    def examples() -> Iterator[Any]:
        opened.append(1)
        for i in range(64):
            yield {"a": np.full(1 << 15, i, np.int32), "b": Leaf() if opened == [1] and i == 12 else np.full(1 << 15, i, np.int32)}

    loader = ps.Loader(examples, S, batch_size=8)
    first_run = iter(loader)
    kept = [next(first_run)]
    entered.wait(HANG_SECONDS)
    with pytest.warns(ps.StuckThreadWarning):
        first_run.close()
    assert iter(loader)._consumer.factory is first_run._consumer.factory  # pyright: ignore[reportPrivateUsage] - one ring for both
    second: list[Any] = []
    for i, value in enumerate(loader):
        second.append(value)
        if i == 2:
            release.set()
    wait_until(no_threads)
    assert len(second) == 8
    for i, value in enumerate(second):
        assert np.asarray(value["a"])[:, 0].tolist() == list(range(8 * i, 8 * i + 8))
        assert np.asarray(value["b"])[:, -1].tolist() == list(range(8 * i, 8 * i + 8))
    assert np.asarray(kept[0]["b"])[:, 0].tolist() == list(range(8))


# --- the sources' own closing


@pytest.mark.usefixtures("graceful")
def test_a_one_shot_iterator_is_closed_once_in_its_own_thread(S: NamedSharding) -> None:
    for use in (exhaust, leave_the_with, close_iterator):
        source = OpenSource(20)
        use(ps.prefetch(source, S))
        assert source.closed == 1
        assert source.closed_in == "prefetchshard-source"


@pytest.mark.usefixtures("graceful")
def test_iterators_that_we_opened_are_closed_and_the_users_source_is_not(S: NamedSharding) -> None:
    for use in (exhaust, leave_the_with, close_iterator):
        source = Iterable(20)
        loader = ps.prefetch(source, S, epochs=2)
        use(loader)
        assert [items.closed for items in source.given] == [1] * (2 if use is exhaust else 1)
        assert source.closed == 0
        dataset = Dataset(20)
        use(ps.prefetch(dataset, S))
        assert dataset.closed == 0


@pytest.mark.usefixtures("graceful")
@pytest.mark.parametrize("use", [exhaust, leave_the_with, close_iterator, break_off])
def test_a_generator_cleans_up_in_its_own_thread(use: Callable[[ps.Loader], None], S: NamedSharding) -> None:
    said: list[tuple[str, str]] = []

    def source() -> Iterator[Any]:
        began = threading.current_thread().name
        try:
            yield from generator(20)
        finally:
            said.append((began, threading.current_thread().name))

    use(ps.prefetch(source(), S))
    wait_until(lambda: said)
    assert said == [("prefetchshard-source", "prefetchshard-source")]
    wait_until(no_threads)


@pytest.mark.usefixtures("impatient")
def test_a_blocked_generator_cleans_up_when_it_comes_out(S: NamedSharding) -> None:
    gate = Gate(2)
    said: list[str] = []

    def source() -> Iterator[Any]:
        try:
            yield from generator(20, gate)
        finally:
            said.append(threading.current_thread().name)

    iterator = iter(ps.prefetch(source(), S))
    gate.inside.wait(HANG_SECONDS)
    with pytest.warns(ps.StuckThreadWarning):
        iterator.close()
    assert said == []
    gate.open()
    wait_until(no_threads)
    assert said == ["prefetchshard-source"]


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("blocked", [False, True])
def test_a_close_that_blocks(blocked: bool, S: NamedSharding, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the source's own thread, and from outside."""
    gate = Gate(2)
    inside, may_end = threading.Event(), threading.Event()
    give_up_once(monkeypatch, lambda _: inside.is_set())

    class Source(OpenSource):
        def close(self) -> None:
            inside.set()
            may_end.wait()

    source = Source(ENDLESS, gate if blocked else nothing)
    iterator = iter(ps.prefetch(source, S))
    if blocked:
        gate.inside.wait(HANG_SECONDS)
    else:
        wait_until(lambda: source.asked > 0)  # else nothing was opened, and nothing is closed
    name = "prefetchshard-closer" if blocked else "prefetchshard-source"
    with pytest.warns(ps.StuckThreadWarning, match=f"thread {name} .*") as caught:
        closed_in_time(iterator.close)
    assert "in close" in str(caught[0].message)
    assert ended(iterator)
    may_end.set()
    gate.open()
    wait_until(no_threads)


class Lasting:
    """What its sources do when they are closed or dropped lasts until closing has given up on whatever is not inside a close."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gave_up = threading.Event()
        self.ended = 0
        join = closing._join_closing  # pyright: ignore[reportPrivateUsage] - tells when it comes to those inside a close

        def tell(*args: Any) -> None:
            self.gave_up.set()
            monkeypatch.setattr(closing, "GRACE_SECONDS", HANG_SECONDS)  # what comes out of the close may be slow to end
            join(*args)

        monkeypatch.setattr(closing, "_join_closing", tell)
        give_up_once(monkeypatch, is_in_its_close)
        for name, seconds in (("GRACE_SECONDS", 0.05), ("GIVE_UP_SECONDS", 0.1), ("CLOSING_SECONDS", HANG_SECONDS)):
            monkeypatch.setattr(closing, name, seconds)

    def last(self) -> None:
        assert self.gave_up.wait(HANG_SECONDS)
        self.ended += 1


def lasting_close(lasting: Lasting) -> Any:
    class Source(OpenSource):
        def close(self) -> None:
            lasting.last()

    return Source(ENDLESS)


def lasting_close_from_outside(lasting: Lasting) -> Any:
    gate = Gate(1)

    class Source(OpenSource):
        def close(self) -> None:
            lasting.last()
            gate.open()

    return Source(ENDLESS, gate)


def lasting_finally(lasting: Lasting) -> Any:
    try:
        yield from generator(ENDLESS)
    finally:
        lasting.last()


def lasting_destructor(lasting: Lasting) -> Any:
    class Items(OpenSource):
        def __del__(self) -> None:
            lasting.last()

    return lambda: Items(ENDLESS)


async def lasting_async_finally(lasting: Lasting) -> Any:
    try:
        async for item in async_generator(ENDLESS):
            yield item
    finally:
        lasting.last()  # blocks its loop


async def lasting_await(lasting: Lasting) -> Any:
    try:
        async for item in async_generator(ENDLESS):
            yield item
    finally:
        while not lasting.gave_up.is_set():  # noqa: ASYNC110 - set by a thread
            await asyncio.sleep(0.001)
        lasting.ended += 1


LASTING = [lasting_close, lasting_close_from_outside, lasting_finally, lasting_destructor, lasting_async_finally, lasting_await]


@pytest.mark.parametrize("transforms", [False, True])
@pytest.mark.parametrize("make", LASTING)
def test_a_source_inside_its_own_close_is_waited_for(
    make: Callable[[Lasting], Any], transforms: bool, S: NamedSharding, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when it stops worker processes: nothing is given up on, and nothing is said (warnings are errors here)."""
    lasting = Lasting(monkeypatch)
    with ps.prefetch(make(lasting), S, transform=(lambda x: x) if transforms else None) as loader:
        for _ in loader:
            break
    assert lasting.ended == 1
    assert no_threads()


def test_a_destructor_that_lasts_in_the_thread_that_closes_from_outside(S: NamedSharding, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was slow to find that there is nothing to close, so it is the last to let go of the source."""
    lasting = Lasting(monkeypatch)
    gate = Gate(1)
    destroyed_in: list[str] = []

    class Items(OpenSource):
        def __del__(self) -> None:
            lasting.last()
            time.sleep(0.3)  # still inside when closing looks
            destroyed_in.append(threading.current_thread().name)

    def slow(dealer: ItemDealer) -> None:
        items = dealer._items  # pyright: ignore[reportPrivateUsage]
        gate.open()
        wait_until(lambda: "prefetchshard-source" not in [thread.name for thread in loader_threads()])
        del items

    monkeypatch.setattr(ItemDealer, "close_from_outside", slow)
    with ps.prefetch(lambda: Items(ENDLESS, gate), S) as loader:
        for _ in loader:
            break
        assert gate.inside.wait(HANG_SECONDS)
    assert destroyed_in == ["prefetchshard-closer"]
    assert no_threads()


def test_who_closes_is_never_the_last_to_hold_the_source(S: NamedSharding, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is slow to tell the threads: the source's own are gone before, and have run the source's destructor."""
    destroyed_in: list[str] = []
    its_own = ("prefetchshard-source", "prefetchshard-reader")

    class Items(OpenSource):
        def __del__(self) -> None:
            destroyed_in.append(threading.current_thread().name)

    class Jobs(queue.SimpleQueue[Any]):
        def put(self, item: Any, *args: Any) -> None:
            if threading.current_thread() is threading.main_thread():
                wait_until(lambda: not any(thread.name.startswith(its_own) for thread in loader_threads()))
            super().put(item, *args)

    monkeypatch.setattr(queue, "SimpleQueue", Jobs)
    iterator = iter(ps.prefetch(lambda: Items(ENDLESS), S))
    next(iterator)
    iterator.close()
    assert [name.startswith(its_own) for name in destroyed_in] == [True]
    assert no_threads()


def test_a_source_that_blocks_after_closing_found_nobody_in_it(S: NamedSharding, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread comes late: it is about to ask for an item while it is looked at, and must not ask any more."""
    looked = threading.Event()
    close_from_outside, reserve = ItemDealer.close_from_outside, BoundedQueue.reserve
    gate = Gate(1)

    def look(dealer: ItemDealer) -> None:
        close_from_outside(dealer)
        looked.set()

    def late(queue: Any) -> Any:
        place = reserve(queue)
        if threading.current_thread().name == "prefetchshard-source" and is_late:
            has_come.set()
            looked.wait(HANG_SECONDS)
        return place

    class Source(OpenSource):
        def __next__(self) -> Any:
            nonlocal is_late
            is_late = self.asked == 0
            return super().__next__()

        def close(self) -> None:
            super().close()
            gate.open()

    has_come, is_late = threading.Event(), False
    monkeypatch.setattr(ItemDealer, "close_from_outside", look)
    monkeypatch.setattr(BoundedQueue, "reserve", late)
    monkeypatch.setattr(closing, "GIVE_UP_SECONDS", 5.0)
    source = Source(ENDLESS, gate)
    iterator = iter(ps.prefetch(source, S))
    next(iterator)
    assert has_come.wait(HANG_SECONDS)
    iterator.close()
    assert (source.asked, source.closed) == (1, 1)
    assert no_threads()


def test_datasets_of_workers_inside_their_close_are_waited_for(S: NamedSharding, monkeypatch: pytest.MonkeyPatch) -> None:
    lasting = Lasting(monkeypatch)
    closed: list[int] = []

    class Dataset:
        def __len__(self) -> int:
            return 1 << 20

        def __getitem__(self, row: int) -> Any:
            return np.float32(row)

        def close(self) -> None:
            lasting.last()
            closed.append(threading.get_ident())

    with ps.Loader(ps.per_worker(Dataset), S, batch_size=16, workers=3) as loader:
        for _ in loader:
            break
    assert len(set(closed)) == len(closed) > 0
    assert no_threads()


def with_statement(loader: ps.Loader) -> None:
    with loader:
        next(iter(loader))
        raise ZeroDivisionError


def with_closing(loader: ps.Loader) -> None:
    with contextlib.closing(iter(loader)) as iterator:
        next(iterator)
        raise ZeroDivisionError


def try_finally(loader: ps.Loader) -> None:
    iterator = iter(loader)
    try:
        next(iterator)
        raise ZeroDivisionError
    finally:
        iterator.close()


def async_with(loader: ps.Loader) -> None:
    async def main() -> None:
        async with loader:
            await anext(aiter(loader))
            raise ZeroDivisionError

    asyncio.run(main())


def async_closing(loader: ps.Loader) -> None:
    async def main() -> None:
        async with contextlib.aclosing(aiter(loader)) as iterator:
            await anext(iterator)
            raise ZeroDivisionError

    asyncio.run(main())


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("where", ["pull", "close"])
@pytest.mark.parametrize("use", [with_statement, with_closing, try_finally, async_with, async_closing])
def test_no_warning_takes_the_place_of_an_exception(
    use: Callable[[ps.Loader], None], where: str, S: NamedSharding, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where warnings are errors, as here, what the body raised comes, with a note of the warning."""
    gate, inside = Gate(1 if where == "pull" else -1), threading.Event()
    give_up_once(monkeypatch, lambda _: inside.is_set())

    class Source(OpenSource):
        def close(self) -> None:
            inside.set()
            gate.opened.wait()

    with pytest.raises(ZeroDivisionError) as caught:
        use(ps.prefetch(Source(ENDLESS, gate), S))
    (note,) = caught.value.__notes__
    assert note.startswith("StuckThreadWarning: thread prefetchshard-")
    assert "inside the source's own close() or destructor" in note
    assert "Give the source a close()" not in note
    gate.open()
    wait_until(no_threads)


@pytest.mark.parametrize("error", [OSError(5, "disk gone"), KeyboardInterrupt(), StopIteration(1)])
@pytest.mark.parametrize("blocked", [False, True])
def test_a_close_that_fails_is_told(blocked: bool, error: BaseException, S: NamedSharding) -> None:
    """Nobody is there any more to whom it could be raised."""
    gate = Gate(2)

    class Source(OpenSource):
        def close(self) -> None:
            gate.open()
            raise error

    source = Source(ENDLESS, gate if blocked else nothing)
    iterator = iter(ps.prefetch(source, S))
    if blocked:
        gate.inside.wait(HANG_SECONDS)
    else:
        wait_until(lambda: source.asked > 0)  # else nothing was opened, and nothing is closed
    with pytest.warns(ps.PrefetchWarning, match=f"closing the source raised {type(error).__name__}") as caught:
        closed_in_time(iterator.close)
    assert len(caught) == 1
    assert not isinstance(caught[0].message, ps.StuckThreadWarning)
    iterator.close()
    assert ended(iterator)
    assert no_threads()


def test_what_was_opened_for_an_epoch_is_closed_with_it(S: NamedSharding) -> None:
    """Before the next epoch's is opened: files and connections do not pile up."""
    opened: list[OpenSource] = []
    most = 0

    def make() -> OpenSource:
        nonlocal most
        opened.append(OpenSource(3))
        most = max(most, sum(items.closed == 0 for items in opened))
        return opened[-1]

    assert len(list(ps.prefetch(make, S, epochs=6))) == 18
    assert most == 1
    assert [items.closed for items in opened] == [1] * 6


# --- async sources


@pytest.mark.parametrize("end", [exhaust, leave_the_with, close_iterator, break_off, drop_in_a_cycle])
def test_an_async_generator_cleans_up_in_its_own_loop(end: Callable[[ps.Loader], None], S: NamedSharding) -> None:
    said: list[str] = []

    async def source() -> Any:
        began = asyncio.get_running_loop()
        try:
            for i in range(20):
                await asyncio.sleep(0)
                yield batch(i)
        finally:
            await asyncio.sleep(0)
            said.append("same" if asyncio.get_running_loop() is began else "other")

    end(ps.prefetch(source(), S))
    wait_until(no_threads_collected)
    assert said == ["same"]


def test_an_async_source_that_waits_for_ever(S: NamedSharding) -> None:
    waits = threading.Event()

    async def source() -> Any:
        yield batch(0)
        waits.set()
        await asyncio.sleep(1e6)

    iterator = iter(ps.prefetch(source(), S))
    next(iterator)
    waits.wait(HANG_SECONDS)
    closed_in_time(iterator.close)
    assert no_threads()


@pytest.mark.usefixtures("impatient")
def test_an_async_source_that_will_not_be_cancelled(S: NamedSharding) -> None:
    waits = threading.Event()
    loops: list[asyncio.AbstractEventLoop] = []
    release: list[asyncio.Event] = []

    async def source() -> Any:
        yield batch(0)
        loops.append(asyncio.get_running_loop())
        release.append(asyncio.Event())
        waits.set()
        while not release[0].is_set():
            try:
                await release[0].wait()
            except asyncio.CancelledError:
                pass

    iterator = iter(ps.prefetch(source(), S))
    next(iterator)
    waits.wait(HANG_SECONDS)
    with pytest.warns(ps.StuckThreadWarning):
        closed_in_time(iterator.close)
    loops[0].call_soon_threadsafe(release[0].set)
    wait_until(no_threads)


# --- too few threads


@pytest.mark.parametrize("fails_at", [0, 1, 2])
def test_a_thread_that_cannot_be_started(fails_at: int, S: NamedSharding, monkeypatch: pytest.MonkeyPatch) -> None:
    from prefetchshard.running.at_exit import live

    earlier = set(live)
    start, asked = threading.Thread.start, itertools.count()

    def limited(self: threading.Thread) -> None:
        if self.name.startswith("prefetchshard") and next(asked) == fails_at:
            raise RuntimeError("can't start new thread")
        start(self)

    loader = ps.prefetch(Iterable(3), S, transform=lambda x: x, workers=1)
    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        iter(loader)
    monkeypatch.undo()
    wait_until(no_threads)
    loader.close()
    assert [first(b) for b in loader] == [0, 1, 2]
    gc.collect()
    wait_until(lambda: live <= earlier)


def test_a_fault_of_the_library_itself_does_not_hang(S: NamedSharding, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever ends a thread reaches the consumer."""
    from prefetchshard.reading import item_dealer, row_dealer

    error = AssertionError("a bug")

    def broken(*_: Any) -> None:
        raise error

    monkeypatch.setattr(item_dealer.ItemDealer, "_read", broken)
    monkeypatch.setattr(row_dealer.RowDealer, "_work", broken)
    for source in (generator(5), Dataset(5)):
        with pytest.raises(AssertionError, match="a bug"):
            next(iter(ps.prefetch(source, S)))
        assert no_threads()


def test_async_closers(S: NamedSharding) -> None:
    """`aclose` from several tasks, twice, and of an iterator that another task waits for."""
    gate = Gate(2)

    async def main() -> None:
        iterator = aiter(ps.prefetch(generator(ENDLESS, gate), S))
        await anext(iterator)
        await anext(iterator)
        ends: list[str] = []

        async def wait() -> None:
            async for _ in iterator:
                pass
            ends.append("ended")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            while not iterator.stats().ready.receivers_waiting:
                await anyio.lowlevel.checkpoint()
            gate.open()
            tasks.start_soon(iterator.aclose)
            tasks.start_soon(iterator.aclose)
        assert ends == ["ended"]
        await iterator.aclose()

    for backend in ("asyncio", "trio"):
        gate.opened.clear()
        anyio.run(main, backend=backend)
        assert no_threads()
