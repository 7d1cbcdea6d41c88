"""The runs of a loader: how each ends, who may share it, and what the next one does."""

from __future__ import annotations

import asyncio
import itertools
import threading
from typing import Any

import numpy as np
import pytest
from jax.sharding import NamedSharding

import prefetchshard as ps
from fakes import SOURCES, Dataset, Iterable, OpenSource, first, generator
from prefetchshard.running.run import Run
from support import Thread, at_every_step, ended, no_threads, wait_until

every_source = pytest.mark.parametrize("kind", SOURCES)

# --- after the end


@every_source
def test_next_after_the_end(kind: str, S: NamedSharding) -> None:
    iterator = iter(ps.prefetch(SOURCES[kind](3), S))
    assert [first(b) for b in iterator] == [0, 1, 2]
    assert ended(iterator)
    assert [first(b) for b in iterator] == []
    iterator.close()
    assert ended(iterator)


def test_an_empty_source_ends_at_once(S: NamedSharding) -> None:
    for source in ([], iter([]), lambda: iter([]), Iterable(0), generator(0)):
        iterator = iter(ps.prefetch(source, S))
        assert list(iterator) == []
        assert ended(iterator)


@every_source
@pytest.mark.parametrize("consumers", [2, 5])
def test_threads_that_share_an_iterator_split_it(kind: str, consumers: int, S: NamedSharding) -> None:
    count = 60
    iterator = iter(ps.prefetch(SOURCES[kind](count), S))
    start = threading.Barrier(consumers)

    def consume() -> list[int]:
        start.wait()
        return [first(b) for b in iterator]

    threads = [Thread(consume) for _ in range(consumers)]
    parts = [thread.returned() for thread in threads]
    assert all(part == sorted(part) for part in parts)
    assert sorted(sum(parts, [])) == list(range(count))
    assert ended(iterator)
    assert no_threads()


def test_threads_that_share_an_iterator_all_hear_of_its_fault(S: NamedSharding) -> None:
    for repeat in range(20):
        error = ValueError(repeat)

        def act(i: int, error: ValueError = error) -> None:
            if i == 9:
                raise error

        iterator = iter(ps.prefetch(generator(20, act), S))
        taken: list[int] = []

        def consume(iterator: Any = iterator, taken: list[int] = taken) -> None:
            for b in iterator:
                taken.append(first(b))  # noqa: PERF401 - what came before the error is wanted

        threads = [Thread(consume) for _ in range(4)]
        assert [thread.raised() for thread in threads] == [error] * 4
        assert sorted(taken) == list(range(9))


def test_a_run_that_failed_and_is_closed_meanwhile_does_not_move_the_loader_on(S: NamedSharding) -> None:
    """Closing drops the failure; who asks for the next batch just then must not take that for the end of the data."""

    def act(i: int) -> None:
        if i == 2:
            raise ZeroDivisionError

    made: list[Any] = []

    def prepare() -> None:
        loader = ps.prefetch(Dataset(4, act), S, depth=4)
        iterator = iter(loader)
        assert [first(next(iterator)) for _ in range(2)] == [0, 1]
        wait_until(iterator._consumer.outbox.is_over)
        made[:] = [loader, iterator]

    def stop() -> bool:
        return made[1]._consumer.stop(0.0)

    places = 0
    for answer in at_every_step(prepare, stop, lambda: made[1].close()):
        places += 1
        state = made[0].state()
        assert answer
        assert (state.run, state.epoch, state.step, state.batches) == (0, 0, 2, 2)
    assert places > 20


# --- runs of a loader


def test_a_one_shot_source_has_one_run(S: NamedSharding) -> None:
    for source in (generator(6), OpenSource(6)):
        loader = ps.prefetch(source, S)
        run = iter(loader)
        assert iter(loader) is run
        assert aiter(loader) is run
        assert first(next(run)) == 0
        assert [first(b) for b in itertools.islice(loader, 2)] == [1, 2]
        assert [first(b) for b in loader] == [3, 4, 5]
        for use in (iter, aiter):
            with pytest.raises(ps.UsedUpError, match="one-shot"):
                use(loader)


def test_a_one_shot_source_after_close(S: NamedSharding) -> None:
    loader = ps.prefetch(generator(6), S)
    with loader:
        next(iter(loader))
    with pytest.raises(ps.UsedUpError, match=r"one-shot.*closed"):
        iter(loader)

    async def main() -> None:
        async for _ in loader:
            pass

    with pytest.raises(ps.UsedUpError, match="one-shot"):
        asyncio.run(main())


def test_two_threads_that_begin_a_one_shot_source_share_its_run(S: NamedSharding) -> None:
    for _ in range(10):
        loader = ps.prefetch(generator(6), S)
        start = threading.Barrier(4)

        def begin(loader: ps.Loader = loader, start: threading.Barrier = start) -> Any:
            start.wait()
            return iter(loader)

        threads = [Thread(begin) for _ in range(4)]
        assert len({id(thread.returned()) for thread in threads}) == 1
        assert [first(b) for b in loader] == list(range(6))


@pytest.mark.parametrize("kind", ["dataset", "iterable", "factory", "async iterable"])
def test_runs_of_one_loader_are_independent(kind: str, S: NamedSharding) -> None:
    loader = ps.prefetch(SOURCES[kind](6), S)
    assert [(first(a), first(b)) for a, b in zip(loader, loader, strict=True)] == [(i, i) for i in range(6)]
    one, two = iter(loader), iter(loader)
    assert [first(next(one)), first(next(two)), first(next(one))] == [0, 0, 1]
    one.close()
    assert ended(one)
    assert [first(b) for b in two] == [1, 2, 3, 4, 5]


def test_runs_may_begin_and_close_in_many_threads(S: NamedSharding) -> None:
    loader = ps.prefetch(Iterable(50), S)

    def work() -> None:
        for i in range(12):
            iterator = iter(loader)
            next(iterator)
            if i % 3 == 0:
                iterator.close()
            loader._live()
            repr(loader)
            if i % 5 == 0:
                loader.close()

    for thread in [Thread(work) for _ in range(4)]:
        error = thread.raised()
        assert error is None or isinstance(error, StopIteration), error  # another one closed its run
    loader.close()
    assert no_threads()


def test_closing_waits_for_the_threads_of_a_run_that_was_dropped(S: NamedSharding, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where their bodies have returned already, and another run has begun since."""
    leave, left = Run._thread_left, list[Run]()
    go_on = threading.Event()

    def leave_slowly(run: Run) -> None:
        leave(run)
        left.append(run)
        if run is left[0]:
            assert go_on.wait(30)

    monkeypatch.setattr(Run, "_thread_left", leave_slowly)
    loader = ps.prefetch(Iterable(50), S)
    first(next(iter(loader)))  # its iterator is held by nobody
    wait_until(lambda: left and left[0].has_ended)
    iter(loader)
    closing = Thread(loader.close)
    closing.join(0.1)
    go_on.set()
    closing.returned()
    left.clear()
    assert no_threads()


def test_a_run_that_was_broken_off_starts_over_and_one_that_ended_moves_on(S: NamedSharding) -> None:
    loader = ps.Loader(np.arange(32), S, batch_size=8, shuffle=True, seed=3)
    orders: list[list[int]] = []
    epochs: list[int] = []
    for count in (2, 1, 4, 4):
        run = iter(loader)
        orders.append([int(row) for b in itertools.islice(run, count) for row in np.asarray(b)])
        position = run.position
        assert position is not None
        epochs.append(position.epoch)
        if count == 4:
            assert ended(run)
        run.close()
    assert epochs == [0, 0, 0, 1]
    assert orders[0] == orders[2][:16]
    assert orders[1] == orders[2][:8]
    assert sorted(orders[2]) == sorted(orders[3]) == list(range(32))
    assert orders[2] != orders[3]
