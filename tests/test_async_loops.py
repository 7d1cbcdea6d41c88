"""In which event loop an async source is pulled: that of `async for`, one of its own under `for`, or the one that was chosen."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import numpy as np
import pytest
from jax.sharding import NamedSharding

import prefetchshard as ps
from consumers import BACKENDS
from prefetchshard.sources import asynchronous
from prefetchshard.sources import loops as loops_module
from support import HANG_SECONDS, Thread, loader_threads, no_threads, run_python, wait_until

COUNT = 6


def full(i: float) -> np.ndarray:
    return np.full(8, i, np.float32)


@pytest.fixture
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits looks at once whether the loop can make progress."""
    monkeypatch.setattr("prefetchshard.consumer.LOOK_SECONDS", 0.1)
    monkeypatch.setattr("prefetchshard.sources.loops.LOOK_SECONDS", 0.1)


@pytest.fixture
def quick_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that does not turn counts as blocked soon."""
    monkeypatch.setattr("prefetchshard.sources.asynchronous.TURN_SECONDS", 0.2)


def here() -> int:
    return id(anyio.lowlevel.current_token().native_token)


async def listed(source: Any) -> list[int]:
    return [int(np.asarray(batch)[0]) async for batch in source]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - what is waited for happens in threads
        await anyio.sleep(0.001)


class Loops:
    """A source that notes the loop of each item; can be iterated again."""

    def __init__(self, count: int = 3) -> None:
        self.count = count
        self.seen: list[int] = []
        self.ended: list[int] = []

    async def __aiter__(self) -> AsyncIterator[np.ndarray]:
        try:
            for i in range(self.count):
                self.seen.append(here())
                await anyio.lowlevel.checkpoint()
                yield full(i)
        finally:
            self.ended.append(here())
            await anyio.lowlevel.checkpoint()


# -- what this loop feeds


async def anyio_stream(epochs: int, size: int) -> tuple[Any, Any]:
    send, receive = anyio.create_memory_object_stream[Any](1)

    async def feed() -> None:
        async with send:
            for i in range(COUNT * size):
                await send.send(i if size > 1 else full(i))

    return (receive if epochs == 1 else None), feed


async def generator_over_a_queue(epochs: int, size: int) -> tuple[Any, Any]:
    """Bound in the way of the backend: `asyncio.Queue`, or a memory channel of trio."""
    put: Any
    get: Any
    if anyio.lowlevel.current_token().backend_class.__module__.endswith("asyncio"):
        queue: asyncio.Queue[Any] = asyncio.Queue(1)
        put, get = queue.put, queue.get
    else:
        import trio

        sending, receiving = trio.open_memory_channel[Any](1)
        put, get = sending.send, receiving.receive

    async def source() -> AsyncIterator[Any]:
        while (item := await get()) is not None:
            yield item

    async def feed() -> None:
        for _ in range(epochs):
            for i in range(COUNT * size):
                await put(i if size > 1 else full(i))
            await put(None)

    return (source() if epochs == 1 else source), feed


@pytest.mark.parametrize("size", [1, 8], ids=["batches", "examples"])
@pytest.mark.parametrize(("make", "epochs"), [(anyio_stream, 1), (generator_over_a_queue, 1), (generator_over_a_queue, 3)])
def test_what_this_loop_feeds_needs_no_mark(make: Any, epochs: int, size: int, S: NamedSharding, run: Any) -> None:
    async def main() -> None:
        source, feed = await make(epochs, size)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(feed)
            options: dict[str, Any] = {"batch_size": 8, "transform": np.float32} if size > 1 else {}
            async with ps.Loader(source, S, epochs=epochs, **options) as loader:
                assert await listed(loader) == [i * size for i in range(COUNT)] * epochs
        assert loader_threads() == []

    run(main)


def test_a_trio_channel_is_a_source(S: NamedSharding) -> None:
    import trio

    async def main() -> None:
        send, receive = trio.open_memory_channel[np.ndarray](0)
        async with trio.open_nursery() as nursery:

            async def feed() -> None:
                async with send:
                    for i in range(COUNT):
                        await send.send(full(i))

            nursery.start_soon(feed)
            with trio.fail_after(HANG_SECONDS):
                assert await listed(ps.prefetch(receive, S)) == list(range(COUNT))

    trio.run(main)


def test_breaking_off_and_going_on_over_a_stream(S: NamedSharding, run: Any) -> None:
    """A one-shot source has one run, which goes on; a wait that is cancelled loses nothing."""

    async def main() -> None:
        source, feed = await anyio_stream(1, 1)
        loader = ps.prefetch(source, S)
        got: list[int] = []
        with anyio.move_on_after(0.01):
            await anext(aiter(loader))
            raise AssertionError("nobody feeds it yet")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(feed)
            while len(got) < COUNT:
                async for batch in loader:
                    got.append(int(batch[0]))
                    with anyio.CancelScope() as scope:
                        scope.cancel()
                        got.append(int((await anext(aiter(loader)))[0]))
                    break
        assert got == list(range(COUNT))
        await loader.aclose()

    run(main)


# -- which loop it is


@pytest.mark.parametrize("form", ["iterable", "factory"])
def test_aiter_pulls_in_the_loop_where_it_is_called_and_iter_in_one_of_its_own(form: str, S: NamedSharding, run: Any) -> None:
    source = Loops()

    async def main() -> None:
        loader = ps.prefetch(source if form == "iterable" else lambda: source, S, epochs=2)
        for _ in range(2):
            source.seen.clear()
            source.ended.clear()
            assert await listed(loader) == [0, 1, 2] * 2
            assert set(source.seen) == set(source.ended) == {here()}
        source.seen.clear()
        assert [int(batch[0]) for batch in loader] == [0, 1, 2] * 2
        assert len(set(source.seen)) == 1
        assert here() not in source.seen

    run(main)
    assert [int(batch[0]) for batch in ps.prefetch(source, S)] == [0, 1, 2]


@pytest.mark.parametrize("form", ["iterable", "factory", "made by a factory", "generator"])
def test_a_loop_of_its_own_where_that_is_asked_for(form: str, S: NamedSharding, run: Any) -> None:
    source = Loops()
    forms: dict[str, Any] = {
        "iterable": lambda: ps.in_own_loop(source),
        "factory": lambda: ps.in_own_loop(lambda: source),
        "made by a factory": lambda: lambda: ps.in_own_loop(source),
        "generator": lambda: ps.in_own_loop(aiter(source)),
    }

    async def main() -> None:
        loader = ps.prefetch(forms[form](), S, epochs=1 if form == "generator" else 2)
        assert await listed(loader) == [0, 1, 2] * (1 if form == "generator" else 2)
        assert len(set(source.seen)) == 1
        assert here() not in source.seen

    run(main)
    assert no_threads()


@pytest.mark.parametrize("form", ["iterable", "factory"])
def test_the_loop_that_was_chosen_wherever_the_run_begins(form: str, S: NamedSharding, run: Any) -> None:
    source = Loops()

    async def main() -> None:
        loader = ps.prefetch(ps.from_this_loop(source if form == "iterable" else lambda: source), S, epochs=2)
        assert await anyio.to_thread.run_sync(lambda: [int(batch[0]) for batch in loader]) == [0, 1, 2] * 2
        assert await anyio.to_thread.run_sync(lambda: asyncio.run(listed(loader))) == [0, 1, 2] * 2
        assert set(source.seen) == {here()}

    run(main)


def test_what_can_be_marked(S: NamedSharding) -> None:
    for thing in ([1, 2], 3, None):
        with pytest.raises(ps.ConfigError, match=r"ps\.in_own_loop takes an async iterable, or a function"):
            ps.in_own_loop(thing)

    class Teller(Loops):
        told: list[int]

        def set_epoch(self, epoch: int) -> None:
            self.told.append(epoch)

    source = Teller(1)
    source.told = []
    for form in (ps.in_own_loop(source), lambda: ps.in_own_loop(source)):
        assert len(list(ps.prefetch(form, S, epochs=2))) == 2
    assert set(source.told) == {0, 1}
    assert len(source.told) >= 4


def test_a_look_at_the_spec_begins_the_run_in_its_loop(S: NamedSharding, run: Any) -> None:
    async def main() -> None:
        source = Loops()
        loader = ps.prefetch(source, S)
        assert (await loader.aspec())[""].shape == (8,)
        assert await listed(loader) == [0, 1, 2]
        assert source.seen == [here()] * 3
        loader = ps.prefetch(source := Loops(), S)
        assert loader.spec()[""].shape == (8,)
        assert await listed(loader) == [0, 1, 2]
        assert len(set(source.seen)) == 1
        assert here() not in source.seen
        stream, feed = await anyio_stream(1, 1)
        async with anyio.create_task_group() as tasks, ps.prefetch(stream, S) as loader:
            tasks.start_soon(feed)
            assert (await loader.aspec())[""].shape == (8,)
            assert await listed(loader) == list(range(COUNT))
        with pytest.raises(ps.BatchError, match="no batch"):
            await ps.prefetch(Loops(0), S).aspec()
        arrays = ps.Loader(np.zeros((16, 2)), S, batch_size=8)
        assert await arrays.aspec() == arrays.spec()

    run(main)


def test_a_run_is_resumed_in_the_running_loop(S: NamedSharding, run: Any) -> None:
    async def main() -> None:
        source = Loops(5)
        iterator = aiter(ps.prefetch(source, S))
        for _ in range(2):
            await anext(iterator)
        await iterator.aclose()
        source.seen.clear()
        assert await listed(ps.prefetch(source, S, state=iterator.state())) == [2, 3, 4]
        assert set(source.seen) == {here()}

    run(main)


def test_another_loop_later(S: NamedSharding, run: Any) -> None:
    """Each run has the loop in which it begins; one that began in a loop that is closed says so, as only that could go on."""
    loader, kept = ps.prefetch(Loops(), S), ps.prefetch(aiter(Loops(100)), S)
    for _ in range(2):
        assert run(listed, loader) == [0, 1, 2]

    async def one() -> None:
        async for _ in kept:
            break

    run(one)
    with pytest.raises(ps.SourceError, match="event loop|cancelled"):
        run(listed, kept)
    kept.close()


@pytest.mark.usefixtures("quick_looks")
def test_a_run_that_begins_while_the_loop_ends(S: NamedSharding, run: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The source's thread may come at any moment of that; neither the loop nor the run is harmed (on trio it was an internal error)."""
    kept: list[ps.LoaderIterator] = []
    for turns in [0, 1, 2, 5, 10, 20] * 4:

        async def main(turns: int = turns) -> None:
            kept.append(aiter(ps.prefetch(Loops(100), S)))
            for _ in range(turns):
                await anyio.lowlevel.checkpoint()

        run(main)
    for iterator in kept:
        with pytest.raises(ps.SourceError, match="event loop|cancelled"):
            list(iterator)
    assert not caplog.records


def test_consumed_in_a_thread_after_aiter(S: NamedSharding, run: Any) -> None:
    async def main() -> None:
        stream, feed = await anyio_stream(1, 1)
        async with anyio.create_task_group() as tasks, ps.prefetch(stream, S) as loader:
            iterator = aiter(loader)
            tasks.start_soon(feed)
            assert await anyio.to_thread.run_sync(lambda: [int(batch[0]) for batch in iterator]) == list(range(COUNT))

    run(main)


# -- its clean-up


@pytest.mark.parametrize("leave", ["async with", "aclose", "break", "cancel", "end of the loop"])
def test_its_finally_runs_in_that_loop(leave: str, S: NamedSharding, run: Any) -> None:
    source = Loops(10**9)
    loops: list[int] = []

    async def main() -> None:
        loops.append(here())
        loader = ps.prefetch(source, S)
        if leave == "async with":
            async with loader:
                async for _ in loader:
                    break
            assert source.ended
        elif leave == "aclose":
            iterator = aiter(loader)
            await anext(iterator)
            await iterator.aclose()
            assert source.ended
        elif leave == "break":
            async for _ in loader:
                break
            await until(lambda: bool(source.ended))
        elif leave == "cancel":
            with anyio.CancelScope() as scope:
                async with contextlib.aclosing(aiter(loader)) as iterator:
                    async for _ in iterator:
                        scope.cancel()
            assert source.ended
        else:
            async for _ in loader:
                break

    run(main)
    wait_until(lambda: source.ended)
    assert source.ended == loops
    wait_until(no_threads)


def test_a_clean_up_that_lasts_is_waited_for(S: NamedSharding, run: Any) -> None:
    ended: list[str] = []

    async def source() -> AsyncIterator[np.ndarray]:
        try:
            while True:
                yield full(0)
                await anyio.lowlevel.checkpoint()
        finally:
            with anyio.CancelScope(shield=True):
                for _ in range(50):
                    await anyio.sleep(0.001)
            ended.append("ended")

    async def main() -> None:
        async with ps.prefetch(source(), S) as loader:
            async for _ in loader:
                break
        assert ended == ["ended"]

    run(main)


class Lasting:
    """A source whose clean-up needs turns of its loop, and ends once it may."""

    def __init__(self) -> None:
        self.began, self.may_end, self.ended = threading.Event(), threading.Event(), threading.Event()

    async def __aiter__(self) -> AsyncIterator[np.ndarray]:
        try:
            while True:
                yield full(0)
        finally:
            self.began.set()
            with anyio.CancelScope(shield=True):
                await until(self.may_end.is_set)
            self.ended.set()


@pytest.mark.parametrize("turns", range(5))
def test_closing_that_blocks_the_loop_does_not_wait_for_it(turns: int, S: NamedSharding, run: Any) -> None:
    """Whether the clean-up has begun or not: it goes on once the loop turns again, and nothing is said."""

    async def main() -> None:
        source = Lasting()
        with ps.prefetch(source, S) as loader:
            async for _ in loader:
                break
            for _ in range(turns):
                await anyio.lowlevel.checkpoint()
        assert no_threads()
        source.may_end.set()
        await until(source.ended.is_set)

    run(main)


@pytest.mark.usefixtures("quick_turns")
def test_waiting_for_a_clean_up_ends_where_another_thread_blocks_the_loop(S: NamedSharding, run: Any) -> None:
    async def main() -> None:
        source = Lasting()
        iterator = aiter(ps.prefetch(source, S))
        await anext(iterator)
        closing = threading.Thread(target=iterator.close)
        closing.start()
        await until(source.began.is_set)
        closing.join(HANG_SECONDS)
        assert not closing.is_alive()
        source.may_end.set()
        await until(source.ended.is_set)

    run(main)


# -- what cannot work says so


def test_blocking_the_loop_that_pulls_is_refused(S: NamedSharding, run: Any) -> None:
    async def main() -> None:
        loader = ps.prefetch(aiter(Loops()), S)
        iterator = aiter(loader)
        for use in (lambda: next(iterator), lambda: list(loader), loader.spec):
            with pytest.raises(RuntimeError, match=r"`aiter` began the run.*async for.*ps\.in_own_loop"):
                use()
        assert await listed(iterator) == [0, 1, 2], "and nothing is lost by it"

    run(main)


@pytest.mark.usefixtures("quick_looks")
def test_blocking_it_over_a_factory_is_refused_as_soon_as_that_is_known(S: NamedSharding, run: Any) -> None:
    async def main() -> None:
        may_make = threading.Event()

        def make() -> Any:
            may_make.wait()
            return Loops()

        async with ps.prefetch(make, S) as loader:
            iterator = aiter(loader)
            threading.Timer(0.05, may_make.set).start()
            with pytest.raises(RuntimeError, match="async for"):
                next(iterator)
            assert await listed(iterator) == [0, 1, 2]

    run(main)


async def for_in_the_loop(loader: ps.Loader) -> Any:
    return list(loader)


async def spec_in_the_loop(loader: ps.Loader) -> Any:
    return loader.spec()


async def async_for_over_iter(loader: ps.Loader) -> Any:
    return await listed(iter(loader))


async def for_in_a_thread(loader: ps.Loader) -> Any:
    return await anyio.to_thread.run_sync(list, loader)


@pytest.mark.usefixtures("quick_looks")
@pytest.mark.parametrize("use", [for_in_the_loop, spec_in_the_loop, async_for_over_iter, for_in_a_thread])
def test_a_stream_of_this_loop_in_a_loop_of_its_own(use: Callable[[ps.Loader], Awaitable[Any]], S: NamedSharding, run: Any) -> None:
    """It waits for ever, so after some seconds a warning (an error here) says why."""

    async def main() -> None:
        send, receive = anyio.create_memory_object_stream[np.ndarray](1)
        async with send, receive, ps.prefetch(receive, S) as loader:
            with pytest.raises(ps.PrefetchWarning, match=r"a loop of its own, as the run was begun by `iter`.*from_this_loop.*in_own_loop"):
                await use(loader)

    run(main)


@pytest.mark.usefixtures("quick_looks")
def test_what_was_chosen_and_waits_is_only_logged(S: NamedSharding, run: Any, caplog: pytest.LogCaptureFixture) -> None:
    """It may be slow; a warning would be an error where warnings are errors."""

    async def main() -> None:
        gate = threading.Event()

        async def source() -> AsyncIterator[np.ndarray]:
            while not gate.is_set():  # noqa: ASYNC110 - set by another loop
                await anyio.sleep(0.001)
            yield full(7)

        async with ps.prefetch(ps.in_own_loop(source), S) as loader, anyio.create_task_group() as tasks:

            async def open_late() -> None:
                await until(lambda: bool(caplog.records))
                gate.set()

            tasks.start_soon(open_late)
            assert await listed(loader) == [7]

    with caplog.at_level(logging.WARNING):
        run(main)
    (record,) = caplog.records
    assert "ps.from_this_loop" in record.getMessage()


@pytest.mark.usefixtures("quick_looks")
def test_a_source_that_is_only_slow_is_left_in_peace(S: NamedSharding, caplog: pytest.LogCaptureFixture) -> None:
    """Without another event loop there is nothing else that it could wait for; in the running loop neither."""
    looks = 0

    async def source() -> AsyncIterator[np.ndarray]:
        nonlocal looks
        for _ in range(5):
            looks += 1
            await anyio.sleep(0.1)
        yield full(3)

    assert [int(batch[0]) for batch in ps.prefetch(source, S)] == [3]
    assert asyncio.run(listed(ps.prefetch(source, S))) == [3]
    assert not caplog.records
    assert looks == 10


def begun_in_a_loop(source: Any, S: NamedSharding) -> tuple[asyncio.AbstractEventLoop, ps.LoaderIterator]:
    """An iterator that has given a batch, and the loop in which its source is pulled, which does not run any more."""
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda *_: None)

    async def begin() -> ps.LoaderIterator:
        iterator = aiter(ps.prefetch(source, S))
        await anext(iterator)
        return iterator

    return loop, loop.run_until_complete(begin())


def end_loop(loop: asyncio.AbstractEventLoop) -> None:
    """As `asyncio.run` does it."""
    if not loop.is_closed():
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0.01))
        loop.close()


async def one_and_then_nothing() -> AsyncIterator[np.ndarray]:
    yield full(0)
    await asyncio.sleep(3600)


@pytest.mark.usefixtures("quick_looks", "quick_turns")
@pytest.mark.parametrize("consumer", ["thread", "another loop"])
@pytest.mark.parametrize("state", ["stopped", "blocked", "closed"])
def test_the_loop_that_pulls_does_not_run(state: str, consumer: str, S: NamedSharding) -> None:
    loop, iterator = begun_in_a_loop(one_and_then_nothing(), S)
    let_go = threading.Event()

    async def block() -> None:
        let_go.wait()

    blocking = Thread(lambda: loop.run_until_complete(block())) if state == "blocked" else None
    if state == "closed":
        loop.close()
    error = (ps.SourceError, "was closed") if state == "closed" else (ps.PrefetchWarning, r"does not run: .*ps\.in_own_loop")
    with pytest.raises(error[0], match=error[1]):
        asyncio.run(listed(iterator)) if consumer == "another loop" else next(iterator)
    let_go.set()
    if blocking is not None:
        blocking.returned()
    iterator.close()
    end_loop(loop)
    wait_until(no_threads)


@pytest.mark.usefixtures("quick_looks", "quick_turns")
@pytest.mark.parametrize("state", ["stopped", "closed"])
def test_a_loop_that_runs_at_first_is_looked_at_again(state: str, S: NamedSharding) -> None:
    """It turned when somebody looked, and was stopped or closed after that: who waits would wait for ever."""
    loop, iterator = begun_in_a_loop(one_and_then_nothing(), S)
    loops = iterator._consumer.run.loops
    assert loops is not None
    consumer = Thread(lambda: next(iterator))
    loop.run_until_complete(until(lambda: loops._look is not None and loops._look.is_answered))
    if state == "closed":
        loop.close()
    assert isinstance(consumer.raised(), ps.SourceError if state == "closed" else ps.PrefetchWarning)
    iterator.close()
    end_loop(loop)
    wait_until(no_threads)


@pytest.mark.usefixtures("quick_looks")
def test_a_closed_loop_is_an_error_of_the_source_however_late_its_thread_comes(S: NamedSharding, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits looks again meanwhile, and has nothing to say that would take the place of the error."""
    loop, iterator = begun_in_a_loop(Loops(100), S)
    loop.close()
    looks: list[object] = []
    complaint, wait = loops_module.Loops.complaint, asynchronous._Pump._wait

    def look(self: Any) -> str | None:
        looks.append(self._look)
        return complaint(self)

    def late(self: Any, cancelled: Any) -> None:
        wait(self, cancelled)
        if self._over:
            seen = len(looks)
            wait_until(lambda: len(looks) >= seen + 3)

    monkeypatch.setattr(loops_module.Loops, "complaint", look)
    monkeypatch.setattr(asynchronous._Pump, "_wait", late)
    with pytest.raises(ps.SourceError, match="closed"):
        list(iterator)
    wait_until(no_threads)


def test_what_an_asyncio_library_says_under_trio_names_the_way_out(S: NamedSharding) -> None:
    async def source() -> AsyncIterator[np.ndarray]:
        await asyncio.sleep(0.001)
        yield full(0)

    with pytest.raises(RuntimeError, match="no running event loop") as caught:
        anyio.run(listed, ps.prefetch(source, S), backend="trio")
    assert any("ps.in_own_loop" in note for note in caught.value.__notes__)
    assert anyio.run(listed, ps.prefetch(ps.in_own_loop(source), S), backend="trio") == [0]


# -- however the program ends

PROGRAM = """
import asyncio, os, signal, threading
import anyio, numpy as np
import prefetchshard as ps

BACKEND = {backend!r}

async def source():
    try:
        yield np.ones(8)
        await anyio.sleep_forever()
    finally:
        print("finally", flush=True)

async def left_by_break():
    async for batch in ps.prefetch(source()): break

kept = []
async def left_at_module_level():
    kept.append(aiter(ps.prefetch(source())))
    await anext(kept[0])

async def interrupted():
    async with ps.prefetch(source()) as loader:
        async for batch in loader: threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()

async def cancelled():
    with anyio.CancelScope() as scope:
        async for batch in ps.prefetch(source()): scope.cancel()

for main in (left_by_break, left_at_module_level, interrupted, cancelled):
    try:
        anyio.run(main, backend=BACKEND)
    except KeyboardInterrupt:
        print("interrupted")
    print(main.__name__, flush=True)

if BACKEND == "asyncio":
    async def stops():
        async for batch in ps.prefetch(source()): loop.stop()
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda *_: None)  # asyncio says that the task is pending still
    task = loop.create_task(stops())
    loop.run_forever()
    loop.close()
    source = None
    print("closed", flush=True)
    import sys; sys.stdout = None  # whether the interpreter comes to the last `finally` is its business
"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_program_ends_however_its_loops_did(backend: str) -> None:
    done = run_python(PROGRAM.replace("{backend!r}", repr(backend)))
    words = "finally left_by_break finally left_at_module_level finally interrupted interrupted finally cancelled".split()
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, words + ["closed"] * (backend == "asyncio"), "")
