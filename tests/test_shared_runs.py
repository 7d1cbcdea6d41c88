"""Threads and tasks that share a run whose batches are made by whoever takes them: each batch goes to one of them, and counts once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import prefetchshard as ps
from consumers import BACKENDS
from support import Thread, called_in, ended, interrupted_everywhere, no_threads, wait_until

ROWS = 16
Make = Callable[..., ps.Loader]


def rows(count: int) -> np.ndarray:
    return np.repeat(np.arange(count, dtype=np.int32), ROWS)


def number(batch: Any) -> int:
    return int(np.asarray(batch)[0])


def transformed(count: int, S: NamedSharding, **options: Any) -> ps.Loader:
    return ps.Loader(rows(count), S, batch_size=ROWS, device_transform=lambda batch: batch + 0, **options)


def gathered(count: int, S: NamedSharding, **options: Any) -> ps.Loader:
    return ps.Loader(ps.OnDevice(rows(count), sharding=S), S, batch_size=ROWS, **options)


def moved(count: int, S: NamedSharding, **options: Any) -> ps.Loader:
    everywhere = NamedSharding(S.mesh, PartitionSpec())
    return ps.prefetch([jax.device_put(batch, everywhere) for batch in rows(count).reshape(count, ROWS)], S, **options)


LATE: dict[str, Make] = {"device_transform": transformed, "OnDevice": gathered, "jax.Arrays": moved}
every_kind = pytest.mark.parametrize("make", LATE.values(), ids=LATE)


def take_all(iterator: Iterator[Any]) -> list[int]:
    return [number(batch) for batch in iterator]


@every_kind
@pytest.mark.parametrize("threads", [2, 4])
def test_each_batch_goes_to_one_thread_and_counts_once(make: Make, threads: int, S: NamedSharding) -> None:
    for repeat in range(8):
        count = 2 + repeat % 4
        loader = make(count, S)
        iterator = iter(loader)
        start = threading.Barrier(threads)

        def consume(iterator: Any = iterator, start: threading.Barrier = start) -> list[int]:
            start.wait()
            return take_all(iterator)

        parts = [thread.returned() for thread in [Thread(consume) for _ in range(threads)]]
        assert sorted(sum(parts, [])) == list(range(count))
        assert all(part == sorted(part) for part in parts)
        assert iterator.position is not None
        assert (iterator.position.step, iterator.position.batches) == (count - 1, count)
        assert (iterator.stats().batches, iterator.stats().rows) == (count, count * ROWS)
        assert (iterator.state().step, iterator.state().run, loader.state().step) == (count, 1, count)
        assert ended(iterator)


@every_kind
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_thread_and_tasks_share_them(make: Make, backend: str, S: NamedSharding) -> None:
    got: list[int] = []

    async def main() -> None:
        iterator = aiter(make(9, S))

        async def work() -> None:
            async for batch in iterator:
                got.append(number(batch))
                await anyio.lowlevel.checkpoint()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.to_thread.run_sync, lambda: got.extend(take_all(iter(iterator))))
            tasks.start_soon(work)
            tasks.start_soon(work)
        assert iterator.state().step == 9

    def iter(iterator: Any) -> Iterator[Any]:
        while (batch := next(iterator, None)) is not None:
            yield batch

    anyio.run(main, backend=backend)
    assert sorted(got) == list(range(9))


@every_kind
def test_a_fault_comes_once_after_all_good_batches(make: Make, S: NamedSharding, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever thread was making the batch: all of them hear of it, and it is not made a second time."""
    for threads in (2, 4):
        iterator: Any = iter(make(6, S, depth=6))
        wait_until(lambda it=iterator: it.stats().ready.ready == 6)
        bad = [ticket.item for ticket in iterator._consumer.outbox.line][3]
        calls: list[str] = []

        def fail(calls: list[str] = calls) -> Any:
            calls.append("made")
            raise ZeroDivisionError

        bad.finish = fail
        got: list[int] = []

        def consume(iterator: Any = iterator, got: list[int] = got) -> None:
            for batch in iterator:
                got.append(number(batch))  # noqa: PERF401 - what came before the error is wanted

        raised = [thread.raised() for thread in [Thread(consume) for _ in range(threads)]]
        assert [type(error) for error in raised] == [ZeroDivisionError] * threads
        assert len(set(map(id, raised))) == 1
        assert (sorted(got), calls, iterator.state().step) == ([0, 1, 2], ["made"], 3)


def test_one_thread_waits_while_another_makes_the_batch(S: NamedSharding) -> None:
    """The last one too: nobody hears of the end, and the run is not closed, while a batch is being made."""
    started, go_on = threading.Event(), threading.Event()

    def slow(batch: Any) -> Any:
        started.set()
        assert go_on.wait(30)
        return batch + 0

    iterator = iter(ps.Loader(rows(1), S, batch_size=ROWS, device_transform=slow))
    maker = Thread(lambda: take_all(iterator))
    assert started.wait(30)
    other = Thread(lambda: take_all(iterator))
    wait_until(lambda: "_finish" in called_in(other.ident or 0))
    assert iterator.state().step == 0
    go_on.set()
    assert sorted(maker.returned() + other.returned()) == [0]
    assert iterator.state().step == 1


class AfterTaking:
    """Stops a thread between taking a batch and counting it: the run's clock is read there."""

    def __init__(self, iterator: Any) -> None:
        self.consumer = iterator._consumer
        self.clock = self.consumer.clock
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.error: BaseException | None = None
        self.thread = 0
        self.consumer.clock = self.read

    def read(self) -> float:
        if threading.get_ident() == self.thread and self.consumer.outbox.stats().taken > self.consumer.run.recorder.batches:
            self.thread = 0
            self.reached.set()
            assert self.go_on.wait(30)
            if self.error is not None:
                raise self.error
        return self.clock()


@pytest.mark.parametrize("make", [*LATE.values(), lambda count, S: ps.Loader(rows(count), S, batch_size=ROWS)], ids=[*LATE, "plain"])
@pytest.mark.parametrize("error", [None, KeyboardInterrupt], ids=["counted", "Ctrl-C"])
def test_the_end_waits_until_what_was_taken_is_counted(make: Make, error: Any, S: NamedSharding) -> None:
    """What Ctrl-C makes a thread put back goes to the one that saw the end."""
    loader = make(3, S)
    iterator = iter(loader)
    assert [number(next(iterator)), number(next(iterator))] == [0, 1]
    window = AfterTaking(iterator)
    window.error = error

    def first() -> list[int]:
        window.thread = threading.get_ident()
        return [number(next(iterator))]

    one = Thread(first)
    assert window.reached.wait(30)
    two = Thread(lambda: take_all(iterator))
    wait_until(lambda: "_wait_until_counted" in called_in(two.ident or 0))
    assert iterator.state().batches == 2
    window.go_on.set()
    if error is None:
        assert (one.returned(), two.returned()) == ([2], [])
    else:
        assert isinstance(one.raised(), KeyboardInterrupt)
        assert two.returned() == [2]
    assert (iterator.state().step, iterator.stats().batches, loader.state().step) == (3, 3, 3)
    assert no_threads()


def test_the_end_waits_only_so_long(S: NamedSharding, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a signal handler that struck between taking and counting, and waits itself for the thread that saw the end."""
    monkeypatch.setattr("prefetchshard.consumer.COUNTING_SECONDS", 0.01)
    iterator = iter(ps.Loader(rows(1), S, batch_size=ROWS))
    window = AfterTaking(iterator)

    def first() -> list[int]:
        window.thread = threading.get_ident()
        return [number(next(iterator))]

    one = Thread(first)
    assert window.reached.wait(30)
    assert Thread(lambda: take_all(iterator)).returned() == []
    window.go_on.set()
    assert one.returned() == [0]


@every_kind
def test_ctrl_c_anywhere_in_making_and_taking_one_loses_nothing(make: Make, S: NamedSharding) -> None:
    loader = make(3, S)
    assert take_all(iter(loader)) == [0, 1, 2]  # compiled
    runs: list[Any] = []

    def prepare() -> None:
        for run in runs:
            run.close()
        runs[:] = [iter(loader)]
        wait_until(lambda: runs[0].stats().ready.ready >= 1)

    places = 0
    for _ in interrupted_everywhere(prepare, lambda: runs[0].__next__()):
        places += 1
        assert runs[0].stats().batches == 0
        assert take_all(runs[0]) == [0, 1, 2]
        assert runs[0].stats().batches == 3
    assert places > 20


def test_a_batch_made_by_looking_is_taken_once(S: NamedSharding) -> None:
    """`spec()` in one thread while others take: the first batch is made once."""
    made: list[int] = []

    def transform(batch: Any) -> Any:
        made.append(1)
        return {"x": jnp.asarray(batch), "y": batch * 2}

    loader = ps.Loader(rows(4), S, batch_size=ROWS, device_transform=transform)
    assert sorted(loader.spec()) == ["x", "y"]
    iterator = iter(loader)
    parts = [thread.returned() for thread in [Thread(lambda: [number(batch["x"]) for batch in iterator]) for _ in range(3)]]
    assert sorted(sum(parts, [])) == [0, 1, 2, 3]
    assert made == [1]
