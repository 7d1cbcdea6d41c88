"""Async sources: what they may do, in whichever event loop they are pulled; which one that is: `test_async_loops`."""

from __future__ import annotations

import asyncio
import contextvars
import math
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import prefetchshard as ps
from consumers import BACKENDS, Consume, consumer, joined, places
from support import loader_threads, no_threads, run_python, wait_until

PATIENCE_SECONDS = 30
sync = consumer("sync")


def full(i: float) -> np.ndarray:
    return np.full(8, i, np.float32)


def numbers(seen: Any) -> list[int]:
    return joined(seen, lambda batch: batch[:1]).astype(int).tolist()


async def until(condition: Callable[[], bool]) -> None:
    """Lets the loop run until it is so."""
    while not condition():  # noqa: ASYNC110 - what is waited for happens in threads
        await anyio.sleep(0.001)


async def listed(source: Any) -> list[int]:
    return [int(batch[0]) async for batch in source]


async def count(stop: float = math.inf) -> AsyncIterator[np.ndarray]:
    i = 0
    while i < stop:
        await anyio.lowlevel.checkpoint()
        yield full(i)
        i += 1


# -- in a loop of their own


class Class:
    """An async iterable, with an iterator that is a class."""

    def __init__(self, stop: int) -> None:
        self.stop = stop
        self.closed = 0

    def __aiter__(self) -> Any:
        owner = self

        class Iterator:
            i = -1

            def __aiter__(self) -> Any:
                return self

            async def __anext__(self) -> np.ndarray:
                self.i += 1
                if self.i == owner.stop:
                    raise StopAsyncIteration
                return full(self.i)

            async def aclose(self) -> None:
                owner.closed += 1

        return Iterator()


def test_every_kind_with_every_consumer(S: NamedSharding, consume: Consume) -> None:
    assert numbers(consume(ps.Loader(count(5), S))) == list(range(5))
    again = Class(4)
    loader = ps.Loader(again, S, epochs=2)
    assert numbers(consume(loader)) == numbers(consume(loader)) == [0, 1, 2, 3] * 2
    assert again.closed == 4
    assert numbers(consume(ps.Loader(lambda epoch: count(epoch + 1), S, epochs=3))) == [0, 0, 1, 0, 1, 2]
    examples = ps.Loader(
        lambda: (i async for i in count(19)), NamedSharding(S.mesh, jax.sharding.PartitionSpec()), batch_size=8, remainder="pad"
    )
    seen = consume(examples)
    assert places(seen) == [(0, 0, 1, 8, False), (0, 1, 2, 16, False), (0, 2, 3, 19, True)]


def test_one_loop_for_all_epochs_of_a_run(S: NamedSharding, consume: Consume) -> None:
    """What is bound to a loop, like a session or a lock, serves the next epoch too."""
    loops: list[Any] = []

    async def source() -> AsyncIterator[np.ndarray]:
        loops.append(anyio.lowlevel.current_token().native_token)
        yield full(0)

    consume(ps.Loader(source, S, epochs=3))
    assert len(loops) == 3
    assert len(set(map(id, loops))) == 1


def with_an_end(ends: list[str]) -> Callable[[], AsyncIterator[np.ndarray]]:
    """An endless source whose clean-up awaits."""

    async def source() -> AsyncIterator[np.ndarray]:
        try:
            while True:
                yield full(0)
        finally:
            ends.append("began")
            await anyio.lowlevel.checkpoint()
            ends.append("ended")

    return source


def test_the_finally_of_a_generator_runs_when_the_run_is_closed(S: NamedSharding, run: Any) -> None:
    ends: list[str] = []
    with ps.Loader(with_an_end(ends), S) as loader:
        next(iter(loader))
    assert ends == ["began", "ended"]
    ends.clear()

    async def main() -> None:
        iterator = aiter(ps.Loader(with_an_end(ends), S))
        await anext(iterator)
        await iterator.aclose()
        assert ends == ["began", "ended"]

    run(main)
    assert loader_threads() == []


def test_the_finally_of_a_generator_runs_when_the_loop_ends(S: NamedSharding, run: Any) -> None:
    """Of a run that nobody closed."""
    ends: list[str] = []

    async def main() -> ps.LoaderIterator[Any]:
        iterator = aiter(ps.Loader(with_an_end(ends), S))
        await anext(iterator)
        return iterator

    iterator = run(main)
    assert ends == ["began", "ended"]
    iterator.close()
    assert loader_threads() == []


@pytest.mark.parametrize("turns", range(5))
def test_the_finally_of_a_generator_begins_when_the_run_is_dropped(turns: int, S: NamedSharding, run: Any) -> None:
    """And it ends too, unless the loop ends at that very moment: asyncio then cancels the clean-up of plain generators as well."""
    ends: list[str] = []

    async def main() -> None:
        iterator = aiter(ps.Loader(with_an_end(ends), S))
        await anext(iterator)
        del iterator
        for _ in range(turns):
            await anyio.lowlevel.checkpoint()

    run(main)
    assert ends[0] == "began"
    wait_until(no_threads)


def test_the_finally_runs_where_the_source_waits(S: NamedSharding) -> None:
    waits, ended = threading.Event(), threading.Event()

    async def source() -> AsyncIterator[np.ndarray]:
        try:
            yield full(0)
            waits.set()
            await anyio.sleep_forever()
        finally:
            ended.set()

    with ps.Loader(source(), S) as loader:
        assert int(next(iter(loader))[0]) == 0
        assert waits.wait(PATIENCE_SECONDS)
    assert ended.is_set()


@pytest.mark.parametrize("where", ["own loop", "this loop", "the loop of aiter"])
def test_what_the_finally_awaits_is_not_cancelled_again(where: str, S: NamedSharding) -> None:
    """As with a task that asyncio cancels: a connection can be closed in peace."""
    ended: list[str] = []

    async def source() -> AsyncIterator[np.ndarray]:
        try:
            yield full(0)
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0)
            async with asyncio.timeout(PATIENCE_SECONDS):
                await asyncio.sleep(0.001)
            ended.append("ended")

    async def main() -> None:
        choose = {"own loop": ps.in_own_loop, "this loop": ps.from_this_loop}.get(where, lambda source: source)
        loader = ps.Loader(choose(source()), S)
        iterator = aiter(loader)
        await anext(iterator)
        await iterator.aclose()
        assert ended == ["ended"]

    asyncio.run(main())
    assert loader_threads() == []


def test_a_finally_that_never_ends_is_cancelled_in_the_end(S: NamedSharding, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefetchshard.sources.asynchronous.CLOSE_SECONDS", 0.2)
    waits, ended = threading.Event(), threading.Event()

    async def source() -> AsyncIterator[np.ndarray]:
        try:
            yield full(0)
            waits.set()
            await asyncio.sleep(3600)
        finally:
            try:
                await asyncio.sleep(3600)
            finally:
                ended.set()

    with ps.Loader(source(), S) as loader:
        next(iter(loader))
        assert waits.wait(PATIENCE_SECONDS)
    assert ended.wait(PATIENCE_SECONDS)


def test_a_source_with_a_task_group_and_a_scope_of_its_own(S: NamedSharding, consume: Consume) -> None:
    """They belong to the task that entered them, so every item is pulled in the same one."""

    async def source() -> AsyncIterator[np.ndarray]:
        send, receive = anyio.create_memory_object_stream[int](0)

        async def fill() -> None:
            async with send:
                for i in range(6):
                    await send.send(i)

        async with receive, anyio.create_task_group() as tasks:
            tasks.start_soon(fill)
            with anyio.CancelScope():
                async for i in receive:
                    yield full(i)

    assert numbers(consume(ps.Loader(source(), S))) == list(range(6))
    with ps.Loader(source(), S) as loader:
        assert numbers(consume(loader, 2)) == [0, 1]


def test_its_background_tasks_go_on_while_the_queues_are_full(S: NamedSharding) -> None:
    beats = 0

    async def source() -> AsyncIterator[np.ndarray]:
        async def beat() -> None:
            nonlocal beats
            while True:
                beats += 1
                await anyio.sleep(0.001)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(beat)
            async for batch in count():
                yield batch
            tasks.cancel_scope.cancel()

    with ps.Loader(source(), S, depth=1) as loader:
        iterator = iter(loader)
        next(iterator)
        while not iterator.stats().host.senders_waiting:  # the source is not asked any more
            threading.Event().wait(0.001)
        before = beats
        deadline = threading.Event()
        for _ in range(PATIENCE_SECONDS * 1000):
            if beats > before + 5:
                break
            deadline.wait(0.001)
        assert beats > before + 5


class Broken(Exception):
    pass


def test_what_it_raises_comes_after_the_good_batches(S: NamedSharding, consume: Consume) -> None:
    for error in (Broken("x"), KeyboardInterrupt(), SystemExit(4), RuntimeError("async generator")):

        async def source(error: BaseException = error) -> AsyncIterator[np.ndarray]:
            yield full(0)
            yield full(1)
            raise error

        iterator = iter(ps.Loader(source(), S))
        assert numbers(consume(iterator, 2)) == [0, 1]
        for _ in range(2):
            with pytest.raises(type(error)) as caught:
                consume(iterator)
            assert caught.value is error


def test_what_aiter_and_aclose_raise(S: NamedSharding, consume: Consume) -> None:
    class BadAiter:
        def __aiter__(self) -> Any:
            raise Broken("aiter")

    class BadClose(Class):
        def __aiter__(self) -> Any:
            iterator = super().__aiter__()

            async def aclose() -> None:
                raise Broken("aclose")

            iterator.aclose = aclose
            return iterator

    with pytest.raises(Broken, match="aiter"):
        consume(ps.Loader(BadAiter(), S))
    iterator = iter(ps.Loader(BadClose(2), S))
    assert numbers(consume(iterator, 2)) == [0, 1]
    with pytest.raises(Broken, match="aclose"):
        consume(iterator)


@pytest.mark.parametrize("error", [asyncio.CancelledError, GeneratorExit])
def test_a_cancellation_of_its_own_is_no_end(error: type[BaseException], S: NamedSharding, consume: Consume) -> None:
    class Source(Class):
        def __aiter__(self) -> Any:
            iterator = super().__aiter__()
            step = type(iterator).__anext__

            async def fail(me: Any) -> Any:
                if me.i == 1:
                    raise error
                return await step(me)

            type(iterator).__anext__ = fail
            return iterator

    iterator = iter(ps.Loader(Source(9), S))
    assert numbers(consume(iterator, 2)) == [0, 1]
    with pytest.raises(ps.SourceError, match="async source"):
        consume(iterator)


def test_a_stop_iteration_inside_is_no_end(S: NamedSharding, consume: Consume) -> None:
    async def source() -> AsyncIterator[np.ndarray]:
        yield full(0)
        next(iter(()))

    with pytest.raises(RuntimeError, match="StopIteration"):
        consume(ps.Loader(source(), S))


marker: contextvars.ContextVar[str] = contextvars.ContextVar("marker", default="unset")


def test_the_callers_context_is_in_force_inside(S: NamedSharding, consume: Consume) -> None:
    seen: list[tuple[str, Any]] = []

    async def source() -> AsyncIterator[np.ndarray]:
        seen.append((marker.get(), jnp.arange(2.0).dtype))
        yield full(0)

    token = marker.set("mine")
    with jax.enable_x64(True):
        iterator = iter(ps.Loader(source(), S))
    marker.reset(token)
    consume(iterator)
    assert seen == [("mine", np.float64)]


@pytest.mark.usefixtures("impatient")
def test_a_source_that_does_not_let_go_is_given_up_on(S: NamedSharding) -> None:
    waits, may_end = threading.Event(), threading.Event()

    def stuck_here() -> None:
        waits.set()
        may_end.wait(PATIENCE_SECONDS)

    async def source() -> AsyncIterator[np.ndarray]:
        yield full(0)
        stuck_here()  # blocks its loop
        yield full(1)

    loader = ps.Loader(source(), S)
    assert int(next(iter(loader))[0]) == 0
    assert waits.wait(PATIENCE_SECONDS)
    with pytest.warns(ps.StuckThreadWarning, match="in stuck_here"):
        loader.close()
    may_end.set()


def test_no_loop_can_be_started(S: NamedSharding, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("too many open files")

    loader = ps.Loader(count(3), S)
    with monkeypatch.context() as patch:
        patch.setattr("prefetchshard.sources.asynchronous.anyio.run", fail)
        with pytest.raises(ps.SourceError, match="no event loop"):
            list(loader)


# -- in this loop


def test_an_asyncio_queue_that_this_loop_feeds(S: NamedSharding) -> None:
    async def main() -> None:
        queue: asyncio.Queue[int | None] = asyncio.Queue(maxsize=2)

        async def feed() -> None:
            for i in range(10):
                await queue.put(i)
            await queue.put(None)

        async def source() -> AsyncIterator[np.ndarray]:
            while (i := await queue.get()) is not None:
                yield full(i)

        feeding = asyncio.create_task(feed())
        async with ps.Loader(ps.from_this_loop(source()), S) as loader:
            assert await listed(loader) == list(range(10))
        await feeding

    asyncio.run(main())


def test_a_stream_that_this_loop_feeds(S: NamedSharding, run: Any) -> None:
    async def main() -> None:
        send, receive = anyio.create_memory_object_stream[np.ndarray](1)

        async def feed() -> None:
            async with send:
                for i in range(10):
                    await send.send(full(i))

        async with receive, anyio.create_task_group() as tasks:
            tasks.start_soon(feed)
            async with ps.Loader(ps.from_this_loop(receive), S) as loader:
                assert await listed(loader) == list(range(10))
        assert loader_threads() == []

    run(main)


def test_rows_that_this_loop_feeds_and_workers_transform(S: NamedSharding, run: Any) -> None:
    async def main() -> None:
        send, receive = anyio.create_memory_object_stream[int](1)

        async def feed() -> None:
            async with send:
                for i in range(19):
                    await send.send(i)

        async with receive, anyio.create_task_group() as tasks:
            tasks.start_soon(feed)
            loader = ps.Loader(
                ps.from_this_loop(receive), S, batch_size=8, workers=2, transform=lambda i: {"x": np.float32(i)}, remainder="pad"
            )
            got = [batch async for batch in loader]
        assert np.concatenate([batch["x"] for batch in got]).tolist() == [*range(19), *[0] * 5]

    run(main)


def test_consumed_in_a_thread_while_this_loop_feeds(S: NamedSharding, run: Any) -> None:
    async def main() -> None:
        send, receive = anyio.create_memory_object_stream[np.ndarray](1)
        loader = ps.Loader(ps.from_this_loop(receive), S)
        async with receive, anyio.create_task_group() as tasks:

            async def consume_in_thread() -> None:
                got.extend(await anyio.to_thread.run_sync(lambda: [int(batch[0]) for batch in loader]))

            got: list[int] = []
            tasks.start_soon(consume_in_thread)
            async with send:
                for i in range(5):
                    await send.send(full(i))
        assert got == list(range(5))

    run(main)


def test_a_for_loop_in_this_thread_is_refused(S: NamedSharding, run: Any) -> None:
    async def main() -> None:
        for ask in (list, lambda loader: next(iter(loader)), lambda loader: loader.spec()):
            async with ps.Loader(ps.from_this_loop(count(3)), S) as loader:
                with pytest.raises(RuntimeError, match=r"from_this_loop.*async for"):
                    ask(loader)
                assert await listed(loader) == [0, 1, 2], "and nothing is lost by it"

    run(main)


def test_asking_for_the_end_of_the_epoch_does_not_block_this_loop(S: NamedSharding, run: Any) -> None:
    async def main() -> None:
        send, receive = anyio.create_memory_object_stream[np.ndarray](1)
        async with send, receive, ps.Loader(ps.from_this_loop(receive), S) as loader:
            iterator = aiter(loader)
            await send.send(full(0))
            await anext(iterator)
            position = iterator.position
            assert position is not None
            assert not position.end_is_known
            with pytest.raises(RuntimeError, match="end_is_known"):
                _ = position.ends_epoch
            await send.send(full(1))
            await until(lambda: position.end_is_known)
            assert position.ends_epoch is False

    run(main)


def test_closing_while_it_waits(S: NamedSharding, run: Any) -> None:
    async def main() -> None:
        for close in ("aclose", "close", "forget"):
            ended: list[str] = []

            async def source(ended: list[str] = ended) -> AsyncIterator[np.ndarray]:
                try:
                    yield full(0)
                    await anyio.sleep_forever()
                finally:
                    ended.append("ended")

            loader = ps.Loader(ps.from_this_loop(source()), S)
            async for _ in loader:
                if close == "aclose":
                    await loader.aclose()
                    assert ended == ["ended"], "its clean-up has run"
                elif close == "close":
                    loader.close()  # blocks this loop, so the clean-up comes after it
                break
            del loader
            await until(lambda ended=ended: ended == ["ended"])
            await until(lambda: loader_threads() == [])

    run(main)


def test_this_loop_is_not_harmed_by_what_the_source_does(S: NamedSharding, run: Any) -> None:
    """On trio an exception in a system task would end the whole program."""

    class BadClose(Class):
        def __aiter__(self) -> Any:
            iterator = super().__aiter__()

            async def aclose() -> None:
                raise Broken("aclose")

            iterator.aclose = aclose
            return iterator

    class BadAiter:
        def __aiter__(self) -> Any:
            raise Broken("aiter")

    async def fails() -> AsyncIterator[np.ndarray]:
        yield full(0)
        raise Broken("item")

    async def main() -> None:
        for source, words in ((BadClose(2), "aclose"), (BadAiter(), "aiter"), (fails(), "item")):
            iterator = aiter(ps.Loader(ps.from_this_loop(source), S))
            with pytest.raises(Broken, match=words):
                await listed(iterator)
            await iterator.aclose()
        broken_off = aiter(ps.Loader(ps.from_this_loop(BadClose(10)), S))
        await anext(broken_off)
        await broken_off.aclose()
        for _ in range(20):
            await anyio.lowlevel.checkpoint()

    run(main)


def test_many_epochs_of_one_iterable_in_this_loop(S: NamedSharding, run: Any) -> None:
    async def main() -> None:
        source = Class(3)
        loader = ps.Loader(ps.from_this_loop(source), S, epochs=2)
        for _ in range(2):
            assert await listed(loader) == [0, 1, 2] * 2
        assert source.closed == 4
        with pytest.raises(ps.ConfigError, match="one-shot"):
            ps.Loader(ps.from_this_loop(count(1)), S, epochs=2)

    run(main)


def test_it_is_told_the_epoch(S: NamedSharding, run: Any) -> None:
    class Teller(Class):
        told: list[int]

        def set_epoch(self, epoch: int) -> None:
            self.told.append(epoch)

    async def main() -> None:
        source = Teller(1)
        source.told = []
        assert await listed(ps.Loader(ps.from_this_loop(source), S, epochs=3)) == [0, 0, 0]
        assert source.told == [0, 1, 2]

    run(main)


def test_context_variables_reach_it(S: NamedSharding, run: Any) -> None:
    seen: list[str] = []

    async def source() -> AsyncIterator[np.ndarray]:
        seen.append(marker.get())
        yield full(0)

    async def main() -> None:
        marker.set("mine")
        assert await listed(ps.Loader(ps.from_this_loop(source()), S)) == [0]

    run(main)
    assert seen == ["mine"]


def test_the_loop_ends_while_a_run_is_live(S: NamedSharding, run: Any) -> None:
    runs: list[ps.LoaderIterator] = []
    ended: list[str] = []

    async def source() -> AsyncIterator[np.ndarray]:
        try:
            yield full(0)
            await anyio.sleep_forever()
        finally:
            ended.append("ended")

    async def main() -> None:
        runs.append(aiter(ps.Loader(ps.from_this_loop(source()), S)))
        await anext(runs[0])

    run(main)
    assert ended == ["ended"]
    with pytest.raises(ps.SourceError, match="async source"):
        next(runs[0])
    runs[0].close()


def test_the_loop_is_closed_before_it_is_asked(S: NamedSharding, run: Any) -> None:
    async def main() -> ps.Loader:
        return ps.Loader(ps.from_this_loop(Class(3)), S)

    loader = run(main)
    with pytest.raises(ps.SourceError, match="event loop"):
        list(loader)


def test_a_program_that_is_interrupted_ends() -> None:
    """Ctrl-C while the loop waits for a batch that does not come, on both backends."""
    for backend in BACKENDS:
        done = run_python(
            f"""
            import os, signal, threading
            import anyio, numpy as np, prefetchshard as ps

            async def source():
                yield np.ones(8)
                await anyio.sleep_forever()

            async def main():
                async with ps.Loader(ps.from_this_loop(source())) as loader:
                    async for batch in loader:
                        print("batch", flush=True)
                        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()

            try:
                anyio.run(main, backend={backend!r})
            except KeyboardInterrupt:
                print("interrupted")
            """,
            timeout=120,
        )
        assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["batch", "interrupted"], "")
