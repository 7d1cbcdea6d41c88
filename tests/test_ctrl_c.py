"""Ctrl-C in the consumer's thread: wherever it strikes, no batch is lost, nothing hangs, and what was begun can be ended."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from jax.sharding import NamedSharding

import prefetchshard as ps
from fakes import Gate, Iterable, OpenSource, batch, first, generator
from support import HANG_SECONDS, Interrupts, Thread, ended, interrupted_everywhere, no_threads, wait_until

ENDLESS = 10**9
STRIDE = 7
"""At each place of so many Ctrl-C strikes in what has very many; the slow tests strike at all of them."""


@pytest.mark.parametrize("taken", [0, 1])
@pytest.mark.parametrize("workers", [1, 3])
def test_an_interrupted_next_loses_no_batch(workers: int, taken: int, S: NamedSharding) -> None:
    """Wherever Ctrl-C strikes inside `next`: the batch is the next one again, and is not counted before it is handed out."""
    loader = ps.prefetch(Iterable(6), S, workers=workers)
    runs: list[ps.LoaderIterator] = []

    def prepare() -> None:
        for run in runs:
            run.close()
        runs[:] = [iter(loader)]
        for _ in range(taken):
            next(runs[0])
        wait_until(lambda: runs[0].stats().ready.ready >= 1)

    places = 0
    for _ in interrupted_everywhere(prepare, lambda: runs[0].__next__()):  # `next` itself looks for signals when it returns
        places += 1
        position = runs[0].position
        assert (0 if position is None else position.batches) == taken
        assert runs[0].stats().batches == taken
        assert [first(b) for b in runs[0]] == list(range(taken, 6))
        assert runs[0].stats().batches == 6
    assert places > 10


def test_ctrl_c_again_and_again_loses_no_batch(S: NamedSharding) -> None:
    made: list[int] = []
    got: list[Any] = []
    with Interrupts(0.002) as interrupts:

        def source() -> Iterator[Any]:
            while len(made) < 300 or interrupts.count <= 10:
                made.append(len(made))
                yield batch(made[-1])

        iterator = iter(ps.prefetch(source(), S))
        done = False
        while not done:
            try:
                for value in iterator:
                    got.append(value)
                    interrupts.armed = True  # again once there is a batch more: or, on a busy machine, it never comes to one
                interrupts.armed = False  # no call before it, so no Ctrl-C out of the `try`
                done = True
            except KeyboardInterrupt:
                pass
    assert [first(value) for value in got] == made
    assert interrupts.count > 10
    position = iterator.position
    assert position is not None
    assert position.step == len(made) - 1


def unless(error: type[BaseException], function: Callable[[], object]) -> None:
    """Calls it; the error is as it should be."""
    try:
        function()
    except error:
        pass


@pytest.mark.parametrize("stride", [STRIDE, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("one_shot", [False, True])
def test_an_interrupted_iter_leaves_no_run_behind(one_shot: bool, stride: int, S: NamedSharding) -> None:
    """The next `iter` reads everything, also of a one-shot source; nothing waits. Inside `threading` too, where threads are started."""
    loader: ps.Loader | None = None

    def prepare() -> None:
        nonlocal loader
        loader = ps.prefetch(OpenSource(3) if one_shot else Iterable(3), S, transform=lambda x: x, workers=1)

    places = 0

    def begin() -> object:
        return iter(loader)  # pyright: ignore[reportArgumentType]

    for _ in interrupted_everywhere(prepare, begin, threading.__file__, stride=stride):
        places += 1
        gc.collect(0)
        assert loader is not None
        assert [first(b) for b in loader] == [0, 1, 2]
        wait_until(no_threads)
    assert places * stride > 100


@pytest.mark.parametrize("one_shot", [False, True])
def test_closing_after_an_interrupted_iter_is_as_fast_as_ever(one_shot: bool, S: NamedSharding) -> None:
    """With real signals, which come inside calls into C too: KeyboardInterrupt comes itself, and closing has nothing to wait for."""
    interrupted, waits = 0, 0.0
    with Interrupts(0.0003) as interrupts:
        rounds = 0
        while rounds < 150 or (interrupted <= 10 and rounds < 15_000):  # more where the thread that sends the signals had to wait
            rounds += 1
            loader = ps.prefetch(OpenSource(ENDLESS) if one_shot else Iterable(ENDLESS), S, workers=1)
            interrupts.armed = True
            try:
                iter(loader)
            except KeyboardInterrupt:
                interrupted += 1
            interrupts.armed = False
            began = time.monotonic()
            loader.close()
            waits = max(waits, time.monotonic() - began)
            wait_until(no_threads)
    assert interrupted > 10
    assert waits < HANG_SECONDS  # of the 60 seconds for a thread that nobody can tell of


def test_an_interrupted_close_can_be_finished(S: NamedSharding) -> None:
    run: Any = None

    def prepare() -> None:
        nonlocal run
        run = iter(ps.prefetch(Iterable(30), S, transform=lambda x: x, workers=1))
        next(run)

    for _ in interrupted_everywhere(prepare, lambda: run.close()):
        run.close()
        assert run._consumer.run.has_ended
        assert ended(run)
        wait_until(no_threads)  # Python's own `join` does not know of one that Ctrl-C cut off (CPython 3.11 and 3.12)


@pytest.mark.parametrize("fails", [False, True])
def test_an_interrupted_end_is_an_end_still(fails: bool, S: NamedSharding) -> None:
    """Of the data, or by a fault."""
    run: Any = None

    def act(i: int) -> None:
        if i == 1:
            raise ZeroDivisionError

    def prepare() -> None:
        nonlocal run
        run = iter(ps.prefetch(Iterable(2, act) if fails else Iterable(1), S, workers=1))
        next(run)
        wait_until(lambda: run._consumer.run.has_ended)

    end = ZeroDivisionError if fails else StopIteration
    for _ in interrupted_everywhere(prepare, lambda: unless(end, lambda: run.__next__())):
        for _ in range(2):
            with pytest.raises(end):
                next(run)
        wait_until(no_threads)


def test_ctrl_c_while_it_closes(S: NamedSharding) -> None:
    """The next close finishes what the first began."""
    gate = Gate(1)
    iterator = iter(ps.prefetch(generator(ENDLESS, gate), S))
    assert gate.inside.wait(HANG_SECONDS)
    with Interrupts(0.05) as interrupts:

        def arm() -> None:  # not before it closes: Ctrl-C right before the call would leave the run as it was
            wait_until(lambda: iterator._consumer.outbox.cancelled)
            interrupts.armed = True

        arming = Thread(arm)
        with pytest.raises(KeyboardInterrupt):
            iterator.close()
        arming.returned()
    assert ended(iterator)
    gate.open()
    iterator.close()
    wait_until(no_threads)
