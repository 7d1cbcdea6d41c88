"""The async consumer on asyncio and trio: nothing is lost however it is cancelled, and the loop is never blocked."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import numpy as np
import pytest
from jax.sharding import NamedSharding

import prefetchshard as ps
from consumers import BACKENDS
from prefetchshard.queues.bounded_queue import QueueStats
from support import loader_threads, run_python

PATIENCE_SECONDS = 30


def full(i: float) -> np.ndarray:
    return np.full(8, i, np.float32)


class Gate:
    """A source that gives its next batch when the test says so, and tells how often it was asked."""

    def __init__(self, count: int = 1000) -> None:
        self.count = count
        self.asked = 0
        self.allowed = threading.Semaphore(0)
        self.waits = threading.Event()
        self.open = False

    def allow(self, count: int = 1) -> None:
        self.allowed.release(count)

    def __iter__(self) -> Iterator[np.ndarray]:
        for i in range(self.count):
            self.asked += 1
            self.waits.set()
            self.allowed.acquire()
            if self.open:
                return
            yield full(i)

    def give_up(self) -> None:
        self.open = True
        self.allowed.release()


async def until(condition: Callable[[], bool]) -> None:
    """Lets the loop run until it is so."""
    while not condition():  # noqa: ASYNC110 - what is waited for happens in threads
        await anyio.sleep(0.001)


def ready(iterator: ps.LoaderIterator) -> QueueStats:
    return iterator.stats().ready


async def take(iterator: ps.LoaderIterator, into: list[int]) -> None:
    into.append(int((await anext(iterator))[0]))


async def read(source: Any, into: list[int]) -> None:
    async for batch in source:
        into.append(int(batch[0]))  # noqa: PERF401 - what came before a cancellation counts


# -- order and ends


def test_batches_in_order_then_the_end_again_and_again(S: NamedSharding, run: Any) -> None:
    async def main() -> None:
        iterator = aiter(ps.Loader(map(full, range(20)), S))
        got = [int(batch[0]) async for batch in iterator]
        assert got == list(range(20))
        for _ in range(3):
            with pytest.raises(StopAsyncIteration):
                await anext(iterator)
        assert await anext(iterator, None) is None
        assert loader_threads() == []

    run(main)


def test_aiter_is_a_class_that_can_be_asked_in_both_ways(S: NamedSharding, run: Any) -> None:
    async def main() -> None:
        iterator = aiter(ps.Loader(map(full, range(6)), S))
        assert type(iterator) is ps.LoaderIterator
        assert iter(iterator) is iterator is aiter(iterator)
        got = [int((await anext(iterator))[0]), int(next(iterator)[0]), int((await anext(iterator))[0])]
        got += [int(batch[0]) for batch in iterator]
        assert got == list(range(6))

    run(main)


# -- a batch that is ready


def test_a_ready_batch_comes_without_a_thread(S: NamedSharding, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        loader = ps.Loader(map(full, range(4)), S, depth=4)
        iterator = aiter(loader)
        await until(lambda: ready(iterator).ready == 4)

        def fail(*_: Any, **__: Any) -> Any:
            pytest.fail("a thread was asked")

        with monkeypatch.context() as patch:
            patch.setattr(anyio.to_thread, "run_sync", fail)
            patch.setattr(threading.Thread, "start", fail)
            assert [int((await anext(iterator))[0]) for _ in range(4)] == [0, 1, 2, 3]
        await iterator.aclose()

    run(main)


def test_waiting_needs_no_thread_either(S: NamedSharding, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        gate = Gate()
        iterator = aiter(ps.Loader(gate, S))
        got: list[int] = []
        with monkeypatch.context() as patch:
            patch.setattr(anyio.to_thread, "run_sync", None)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(take, iterator, got)
                await until(lambda: ready(iterator).receivers_waiting == 1)
                gate.allow()
        assert got == [0]
        gate.give_up()
        await iterator.aclose()

    run(main)


def test_every_batch_is_a_checkpoint(S: NamedSharding, run: Any) -> None:
    """A loop over ready batches lets other tasks run, and can be cancelled, before it takes anything."""

    async def main() -> None:
        loader = ps.Loader(map(full, range(50)), S, depth=50)
        iterator = aiter(loader)
        await until(lambda: ready(iterator).ready == 50)
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await anyio.lowlevel.checkpoint()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(other)
            for i in range(10):
                assert int((await anext(iterator))[0]) == i
            assert turns >= 5
            tasks.cancel_scope.cancel()
        with anyio.CancelScope() as scope:
            scope.cancel()
            await anext(iterator)
        assert scope.cancelled_caught
        assert int((await anext(iterator))[0]) == 10, "the cancelled one took nothing"
        await iterator.aclose()

    run(main)


def test_the_loop_goes_on_while_the_source_blocks(S: NamedSharding, run: Any) -> None:
    async def main() -> None:
        gate = Gate()
        loader = ps.Loader(gate, S)
        iterator = aiter(loader)
        got: list[int] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(take, iterator, got)
            await until(lambda: ready(iterator).receivers_waiting == 1)
            for _ in range(100):  # a ticker goes on ticking
                await anyio.lowlevel.checkpoint()
            assert not got
            gate.allow()
        assert got == [0]
        gate.give_up()
        await loader.aclose()

    run(main)


# -- cancellation


def test_a_cancelled_wait_loses_nothing(S: NamedSharding, run: Any) -> None:
    async def main() -> None:
        gate = Gate()
        loader = ps.Loader(gate, S)
        iterator = aiter(loader)
        got: list[int] = []
        for i in range(5):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(take, iterator, got)
                await until(lambda: ready(iterator).receivers_waiting == 1)
                tasks.cancel_scope.cancel()
            assert ready(iterator).receivers_waiting == 0, "nobody is left waiting"
            gate.allow()
            await until(lambda: ready(iterator).ready == 1)
            await take(iterator, got)
            assert got == list(range(i + 1))
            assert iterator.position is not None
            assert iterator.position.step == i
        assert loader.stats().batches == 5
        gate.give_up()
        await loader.aclose()

    run(main)


@pytest.mark.parametrize("seed", range(3))
def test_cancelled_at_any_moment_in_any_order(seed: int, S: NamedSharding, run: Any) -> None:
    """Random turns of the loop lie between asking, a batch becoming ready, and the cancellation."""
    chance = random.Random(seed)

    async def main() -> None:
        gate = Gate()
        loader = ps.Loader(gate, S)
        iterator = aiter(loader)
        got: list[int] = []

        async def cancelled_after(scope: anyio.CancelScope, turns: int) -> None:
            for _ in range(turns):
                await anyio.lowlevel.checkpoint()
            scope.cancel()

        for _ in range(60):
            if chance.random() < 0.6:
                gate.allow()
            async with anyio.create_task_group() as tasks:
                for _ in range(chance.randrange(1, 3)):
                    tasks.start_soon(take, iterator, got)
                tasks.start_soon(cancelled_after, tasks.cancel_scope, chance.choice([0, 1, 2, 3, 5, 50]))
        gate.allow(5)
        for _ in range(5):
            await take(iterator, got)
        assert got == list(range(len(got)))
        assert (loader.stats().batches, iterator.position.step) == (len(got), len(got) - 1)  # type: ignore[union-attr]
        gate.give_up()
        await loader.aclose()

    run(main)


def test_timeouts_and_the_loop_goes_on(S: NamedSharding, run: Any) -> None:
    """The case as reported: `move_on_after` around `async for`, over and over."""

    async def main() -> None:
        gate = Gate(count=6)
        async with ps.Loader(iter(gate), S) as loader:
            got: list[int] = []
            for _ in range(4):
                with anyio.move_on_after(0.01):
                    await read(loader, got)
                gate.allow()
            gate.allow(2)
            await read(loader, got)
            assert got == list(range(6))

    run(main)


def test_native_cancellation_of_asyncio(S: NamedSharding) -> None:
    async def main() -> None:
        gate = Gate()
        iterator = aiter(ps.Loader(gate, S))
        for i in range(3):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(iterator), 0.005)
            task = asyncio.create_task(anext(iterator))  # type: ignore[arg-type]
            await until(lambda: ready(iterator).receivers_waiting == 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            gate.allow()
            assert int((await asyncio.wait_for(anext(iterator), PATIENCE_SECONDS))[0]) == i
        gate.give_up()
        await iterator.aclose()

    asyncio.run(main())


def test_a_cancelled_task_group_around_the_loop(S: NamedSharding, run: Any) -> None:
    async def main() -> None:
        gate = Gate()
        gate.allow(3)
        got: list[int] = []

        async def train(loader: ps.Loader) -> None:
            async with loader:
                await read(loader, got)

        loader = ps.Loader(gate, S)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(train, loader)
            await until(lambda: len(got) == 3)
            gate.open = True
            gate.allow()
            tasks.cancel_scope.cancel()
        assert loader._live() == []
        assert loader_threads() == []

    run(main)


# -- closing


def test_break_then_aclose_leaves_no_thread(S: NamedSharding, run: Any) -> None:
    async def main() -> None:
        loader = ps.Loader((full(i) for i in iter(int, 1)), S)
        async for _ in loader:
            break
        await loader.aclose()
        assert loader_threads() == []

    run(main)


def test_aclose_from_another_task_after_the_end_and_twice(S: NamedSharding, run: Any) -> None:
    async def main() -> None:
        iterator = aiter(ps.Loader([full(i) for i in range(3)], S))
        got: list[int] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(take, iterator, got)  # read in one task
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(iterator.aclose)  # close in another, and once more beside it
            tasks.start_soon(iterator.aclose)
        await iterator.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(iterator)
        ended = aiter(ps.Loader([full(0)], S))
        assert len([batch async for batch in ended]) == 1
        await ended.aclose()
        await ended.aclose()

    run(main)


def test_aclose_while_another_task_waits(S: NamedSharding, run: Any) -> None:
    async def main() -> None:
        gate = Gate()
        iterator = aiter(ps.Loader(gate, S))
        ends: list[str] = []

        async def wait() -> None:
            try:
                await anext(iterator)
            except StopAsyncIteration:
                ends.append("ended")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            tasks.start_soon(wait)
            await until(lambda: ready(iterator).receivers_waiting == 2)
            gate.give_up()
            await iterator.aclose()
        assert ends == ["ended", "ended"]

    run(main)


def test_aclose_closes_although_the_task_is_cancelled(S: NamedSharding, run: Any) -> None:
    async def main() -> None:
        closed: list[str] = []

        def source() -> Iterator[np.ndarray]:
            try:
                for i in iter(int, 1):
                    yield full(i)
            finally:
                closed.append("source")

        for close in ("iterator", "loader", "block"):
            loader = ps.Loader(source(), S)
            iterator = aiter(loader)
            with anyio.CancelScope() as scope:
                if close == "block":
                    async with loader:
                        await anext(iterator)
                        scope.cancel()
                        await anyio.sleep(PATIENCE_SECONDS)
                else:
                    try:
                        await anext(iterator)
                        scope.cancel()
                        await anyio.sleep(PATIENCE_SECONDS)
                    finally:
                        await (iterator if close == "iterator" else loader).aclose()
            assert loader._live() == []
            assert loader_threads() == []
        assert closed == ["source"] * 3

    run(main)


def test_the_loop_goes_on_while_a_run_is_closed(S: NamedSharding, run: Any) -> None:
    async def main() -> None:
        may_end = threading.Event()

        def source() -> Iterator[np.ndarray]:
            try:
                yield full(0)
                yield full(1)
            finally:
                assert may_end.wait(PATIENCE_SECONDS)

        iterator = aiter(ps.Loader(source(), S, depth=1))
        await anext(iterator)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(iterator.aclose)
            for _ in range(20):
                await anyio.lowlevel.checkpoint()
            may_end.set()
        assert loader_threads() == []

    run(main)


def test_aclosing_and_async_with(S: NamedSharding, run: Any) -> None:
    async def main() -> None:
        endless = [full(i) for i in range(100)]
        async with contextlib.aclosing(aiter(ps.Loader(endless, S))) as iterator:  # type: ignore[type-var]
            assert int((await anext(iterator))[0]) == 0  # type: ignore[call-overload]
        assert loader_threads() == []
        loader = ps.Loader(endless, S)
        async with loader as same:
            assert same is loader
            async for _ in loader:
                break
        assert loader_threads() == []
        with contextlib.suppress(KeyError):
            async with loader:
                async for _ in loader:
                    raise KeyError
        assert loader_threads() == []

    run(main)


def test_an_iterator_that_is_dropped_ends_by_itself(S: NamedSharding, run: Any) -> None:
    async def main() -> None:
        loader = ps.Loader([full(i) for i in range(1000)], S)

        async def drop() -> None:
            async for _ in loader:
                return

        await drop()
        assert loader._live() == []
        await until(lambda: not loader_threads())

    run(main)


def test_a_loop_that_ends_with_a_live_run_leaves_it_alone(S: NamedSharding, run: Any) -> None:
    """The run belongs to no loop: it may be read on in another one, or in none."""
    loader = ps.Loader([full(i) for i in range(6)], S)
    iterator = iter(loader)

    async def main() -> int:
        return int((await anext(iterator))[0])

    assert [run(main), run(main)] == [0, 1]
    assert int(next(iterator)[0]) == 2
    assert run(main) == 3
    iterator.close()


# -- several tasks


def test_tasks_that_share_an_iterator_share_its_batches(S: NamedSharding, run: Any) -> None:
    async def main() -> None:
        iterator = aiter(ps.Loader([full(i) for i in range(40)], S))
        got: list[list[int]] = [[], [], []]

        async def work(mine: list[int]) -> None:
            async for batch in iterator:
                mine.append(int(batch[0]))
                await anyio.lowlevel.checkpoint()

        async with anyio.create_task_group() as tasks:
            for mine in got:
                tasks.start_soon(work, mine)
        assert sorted(sum(got, [])) == list(range(40))
        assert all(mine == sorted(mine) for mine in got)

    run(main)


def test_a_thread_and_a_task_share_an_iterator(S: NamedSharding, run: Any) -> None:
    async def main() -> None:
        iterator = aiter(ps.Loader([full(i) for i in range(40)], S))
        mine: list[int] = []
        others: list[int] = []

        def work() -> None:
            others.extend([int(batch[0]) for batch in iterator])

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.to_thread.run_sync, work)
            await read(iterator, mine)
        assert sorted(mine + others) == list(range(40))

    run(main)


def test_two_loaders_side_by_side(S: NamedSharding, run: Any) -> None:
    async def main() -> None:
        got: dict[int, list[int]] = {0: [], 1: []}

        async def work(which: int) -> None:
            async with ps.Loader([full(i + 100 * which) for i in range(10)], S) as loader:
                await read(loader, got[which])

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(work, 0)
            tasks.start_soon(work, 1)
        assert got == {0: list(range(10)), 1: list(range(100, 110))}

    run(main)


# -- errors


def test_errors_come_as_they_do_in_a_for_loop(S: NamedSharding, run: Any) -> None:
    class Odd(Exception):
        def __init__(self, a: int, b: int) -> None:
            super().__init__(a, b)

    def source(error: BaseException) -> Iterator[np.ndarray]:
        yield full(0)
        yield full(1)
        raise error

    async def main() -> None:
        for error in (Odd(1, 2), KeyboardInterrupt(), SystemExit(3), MemoryError()):
            iterator = aiter(ps.Loader(source(error), S))
            assert [int((await anext(iterator))[0]) for _ in range(2)] == [0, 1]
            for _ in range(2):
                with pytest.raises(type(error)) as caught:
                    await anext(iterator)
                assert caught.value is error
            await iterator.aclose()

    run(main)


def test_a_sync_loop_inside_a_running_loop(S: NamedSharding, run: Any) -> None:
    """As in a notebook, over an async source too."""

    async def source() -> AsyncIterator[np.ndarray]:
        for i in range(3):
            await anyio.lowlevel.checkpoint()
            yield full(i)

    async def main() -> None:
        assert [int(batch[0]) for batch in ps.Loader([full(i) for i in range(3)], S)] == [0, 1, 2]
        assert [int(batch[0]) for batch in ps.Loader(source(), S)] == [0, 1, 2]
        assert [int(batch[0]) for batch in ps.Loader(source, S, epochs=2)] == [0, 1, 2] * 2
        with ps.Loader(source(), S) as loader:
            assert int(next(iter(loader))[0]) == 0

    run(main)


def test_hooks_may_run_a_loop_of_their_own(S: NamedSharding, run: Any) -> None:
    """The workers do not take themselves for the caller's event loop, in whose context they were made."""

    async def fetch(x: Any) -> Any:
        await anyio.lowlevel.checkpoint()
        return x + 1

    def transform(x: Any) -> Any:
        return anyio.run(fetch, x)

    async def main() -> None:
        got = [batch async for batch in ps.Loader(np.arange(16, dtype=np.int32), S, batch_size=8, transform=transform)]
        assert [int(batch[0]) for batch in got] == [1, 9]

    run(main)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_program_whose_wait_was_cancelled_ends(backend: str) -> None:
    """What is cancelled leaves nothing behind that would hold the process, although the source never gives another batch."""
    done = run_python(
        f"""
        import threading
        import anyio, numpy as np, prefetchshard as ps

        def source():
            yield np.ones(8)
            threading.Event().wait()

        async def main():
            iterator = aiter(ps.Loader(source()))
            await anext(iterator)
            for _ in range(3):
                with anyio.move_on_after(0.02) as scope:
                    await anext(iterator)
                assert scope.cancelled_caught
            print("cancelled", flush=True)

        anyio.run(main, backend={backend!r})
        """,
        timeout=120,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "cancelled\n", "")
