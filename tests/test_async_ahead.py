"""Examples of async sources are pulled ahead in the event loop, as far as the present batch needs them."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple

import anyio
import anyio.lowlevel
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import prefetchshard as ps
from consumers import Consume, joined
from prefetchshard.leaves.copying import SMALL_BYTES, is_small
from prefetchshard.sources.asynchronous import OpenAsyncIterator
from prefetchshard.sources.iterables import END
from prefetchshard.sources.loops import Loops
from resumes import broken_off, take
from support import HANG_SECONDS, loader_threads, wait_until

SIZE = 8
LARGE = SMALL_BYTES // 4 + 1
"""Numbers of 4 bytes in an item that is not pulled past before it was written."""


def numbers(seen: Any) -> list[int]:
    return joined(seen).astype(int).tolist()


class Pair(NamedTuple):
    x: Any
    y: Any


class Own:
    """An array in the eyes of NumPy only."""

    def __init__(self) -> None:
        self.values = np.zeros(2, np.float32)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.values, dtype)


def fill(item: Any, i: int) -> Any:
    """Writes a number into all the memory of an item."""
    if isinstance(item, np.ndarray):
        item[...] = i
    elif isinstance(item, Own):
        item.values[...] = i
    elif isinstance(item, dict):
        for name, part in item.items():
            item[name] = fill(part, i)
    elif isinstance(item, (list, tuple)):
        for part in item:
            fill(part, i)
    else:
        return i
    return item


BUFFERS: dict[str, Callable[[], Any]] = {
    "array": lambda: np.zeros(3, np.float32),
    "dict": lambda: {"x": np.zeros(3, np.float32), "y": 0, "z": {"deep": np.zeros((), np.int32)}},
    "tuple": lambda: (np.zeros(3, np.float32), [np.zeros(2, np.float32)]),
    "named tuple": lambda: Pair(np.zeros(3, np.float32), np.zeros(2, np.float32)),
    "large": lambda: np.zeros(LARGE, np.float32),
    "not contiguous": lambda: np.zeros((64, 8), np.float32)[:, ::2],
    "its own class": lambda: {"x": Own(), "y": np.zeros(2, np.float32)},
}


async def overwriting(buffer: Any, count: int, turns: int = 0) -> AsyncIterator[Any]:
    """Makes every item in the same memory, and spoils that when it is asked for the next one."""
    for i in range(count):
        for _ in range(turns):
            await anyio.lowlevel.checkpoint()
        yield fill(buffer, i)
        fill(buffer, -1)


@pytest.mark.parametrize("turns", [0, 1])
@pytest.mark.parametrize("transforms", [False, True])
@pytest.mark.parametrize("kind", BUFFERS)
def test_a_source_may_overwrite_its_items(kind: str, transforms: bool, turns: int, R: NamedSharding, consume: Consume) -> None:
    source = overwriting(BUFFERS[kind](), 19, turns)
    options: dict[str, Any] = {"transform": lambda item: item, "workers": 2} if transforms else {}
    seen = consume(ps.Loader(source, R, batch_size=SIZE, remainder="keep", **options))
    assert [position.rows for _, position in seen] == [8, 16, 19]
    for batch, position in seen:
        for leaf in jax.tree.leaves(batch):
            rows = np.asarray(leaf).reshape(len(leaf), -1)
            assert (rows == np.arange((position.rows - 1) // SIZE * SIZE, position.rows)[:, None]).all()


# -- how far


class Counted:
    """Counts what is pulled; the items are made anew, or one that is large."""

    def __init__(self, item: Callable[[int], Any] = np.int32, stop: int = 1000) -> None:
        self.pulled = 0
        self.item = item
        self.stop = stop

    async def __aiter__(self) -> AsyncIterator[Any]:
        while self.pulled < self.stop:
            self.pulled += 1
            yield self.item(self.pulled - 1)


class Opened:
    """An iteration as the source's thread has it; counts the requests to its loop."""

    def __init__(self, source: Any, *, reuses_buffers: bool = True) -> None:
        self.loops = Loops([], reuses_buffers=reuses_buffers)
        self.items = OpenAsyncIterator(source, self.loops, None)
        self.requests = 0
        self._call_soon = self.items._home.call_soon
        self.items._home.call_soon = self._counted  # type: ignore[method-assign]

    def _counted(self, function: Any) -> bool:
        self.requests += getattr(function, "__name__", "") == "wanted"
        return self._call_soon(function)

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        self.items.close()
        self.loops.close()

    def batch(self, size: int) -> list[Any]:
        """So many items, as a batch of that size asks for them."""
        return [self.items.pull(size - row) for row in range(size)]


@pytest.mark.parametrize("reuses_buffers", [False, True])
def test_a_batch_is_one_request_and_nothing_is_pulled_beyond_it(reuses_buffers: bool) -> None:
    source = Counted()
    with Opened(source, reuses_buffers=reuses_buffers) as opened:
        for batch in range(4):
            assert opened.batch(5) == list(range(5 * batch, 5 * batch + 5))
            assert source.pulled == 5 * (batch + 1)
            assert opened.requests == batch + 1
        assert opened.items.pull() == 20
        assert source.pulled == 21


@pytest.mark.parametrize("item", [lambda _: np.zeros(LARGE, np.float32), lambda _: Own(), lambda _: jnp.zeros(2)])
def test_what_is_not_copied_in_the_loop_is_given_before_the_source_goes_on(item: Any) -> None:
    source = Counted(item)
    with Opened(source) as opened:
        for row in range(5):
            opened.items.pull(5 - row)
            assert source.pulled == opened.requests == row + 1
    source = Counted(item)
    with Opened(source, reuses_buffers=False) as opened:
        opened.batch(5)
        assert (source.pulled, opened.requests) == (5, 1)


def test_items_of_both_kinds_do_not_go_beyond_the_batch(S: NamedSharding) -> None:
    """What `next` was called for counts as delivered, as the source may go on at once."""
    called = most = 0

    def item(i: int) -> Any:
        nonlocal most
        most = max(most, i // SIZE + 1 - called)
        return Own() if i % SIZE == 3 else np.zeros(2, np.float32)

    source = Counted(item)
    with ps.Loader(source, S, batch_size=SIZE, read_ahead=1) as loader:
        iterator = iter(loader)
        for _ in range(20):
            wait_until(lambda called=called: source.pulled >= SIZE * (called + 1))
            called += 1
            next(iterator)
    assert most == 1


def test_an_item_is_copied_only_where_the_source_goes_on() -> None:
    made: list[Any] = []

    def item(i: int) -> Any:
        made.append(np.full(3, i))
        return made[-1]

    with Opened(Counted(item)) as opened:
        got = opened.batch(3)
    assert [a is b for a, b in zip(got, made, strict=True)] == [False, False, True]
    made.clear()
    with Opened(Counted(item), reuses_buffers=False) as opened:
        got = opened.batch(3)
    assert all(a is b for a, b in zip(got, made, strict=True))


def test_what_is_small() -> None:
    held = [1]
    held.append(held)  # type: ignore[arg-type]
    room = SMALL_BYTES // 2
    for value, small in (
        ({"x": np.zeros(100), "y": 1, "z": ["a", b"b", None, np.float32(1)]}, True),
        (Pair(np.zeros(3), (np.zeros(3),)), True),
        (np.zeros(room, np.uint8), True),
        ([np.zeros(room, np.uint8)] * 2, False),
        (b"x" * (SMALL_BYTES + 1), False),
        ("x" * (SMALL_BYTES + 1), False),
        ([0] * SMALL_BYTES, False),
        (np.array([None]), False),
        (np.zeros(3).view(np.recarray), False),
        (bytearray(3), False),
        ({"x": object()}, False),
        (held, False),
    ):
        assert is_small(value) is small, value


# -- what comes in between


def test_items_are_given_while_the_source_waits(S: NamedSharding, consume: Consume) -> None:
    """It goes on only when the first three of a batch were transformed."""
    seen: set[int] = set()

    def transform(i: Any) -> Any:
        seen.add(int(i))
        return i

    async def source() -> AsyncIterator[Any]:
        for i in range(2 * SIZE):
            if i % SIZE == 3:
                while not {i - 1, i - 2, i - 3} <= seen:  # noqa: ASYNC110 - what is waited for happens in threads
                    await anyio.sleep(0.001)
            yield np.int32(i)

    assert numbers(consume(ps.Loader(source(), S, batch_size=SIZE, transform=transform, workers=4))) == list(range(2 * SIZE))


def test_the_other_tasks_of_the_loop_have_their_turns(R: NamedSharding, run: Any) -> None:
    """The source never waits, and one batch would take it for seconds; it ends when another task has gone on."""
    size, turns, began = 1 << 22, 0, time.monotonic()

    async def source() -> AsyncIterator[Any]:
        enough = turns + 10  # the other task has had some before the source is asked at all
        while turns < enough:
            assert time.monotonic() - began < HANG_SECONDS, "nothing else had a turn"
            yield np.int32(0)

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await anyio.lowlevel.checkpoint()

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(other)
            rows = [len(batch) async for batch in ps.Loader(source(), R, batch_size=size, remainder="keep")]
            assert len(rows) == 1
            assert rows[0] < size
            tasks.cancel_scope.cancel()

    run(main)


def test_waiting_for_the_source_counts_as_its_time(S: NamedSharding) -> None:
    """The thread asks before the source sleeps, so it waits for as long, however busy the machine is."""

    async def source() -> AsyncIterator[Any]:
        for i in range(2 * SIZE):
            if i % SIZE == 0:
                await anyio.sleep(0.05)
            yield np.int32(i)

    iterator = iter(ps.Loader(source(), S, batch_size=SIZE))
    assert len(list(iterator)) == 2
    assert iterator.stats().source_seconds > 0.09


class Broken(Exception):
    pass


@pytest.mark.parametrize("transforms", [False, True])
@pytest.mark.parametrize("at", [8, 11, 15])
def test_an_error_inside_a_batch_comes_after_the_batches_before(at: int, transforms: bool, S: NamedSharding, consume: Consume) -> None:
    error = Broken("x")

    async def source() -> AsyncIterator[Any]:
        for i in range(at):
            yield np.int32(i)
        raise error

    iterator = iter(ps.Loader(source(), S, batch_size=SIZE, transform=(lambda i: i) if transforms else None))
    assert numbers(consume(iterator, 1)) == list(range(SIZE))
    with pytest.raises(Broken) as caught:
        consume(iterator)
    assert caught.value is error


def test_the_items_before_an_error_are_given_first() -> None:
    async def source() -> AsyncIterator[Any]:
        yield 0
        yield 1
        raise Broken

    with Opened(source()) as opened:
        assert [opened.items.pull(5), opened.items.pull(4)] == [0, 1]
        with pytest.raises(Broken):
            opened.items.pull(3)


def test_a_source_is_not_asked_again_after_its_error() -> None:
    class Source:
        asked = 0

        def __aiter__(self) -> Any:
            return self

        async def __anext__(self) -> Any:
            self.asked += 1
            if self.asked == 3:
                raise Broken
            return self.asked

    source = Source()
    with Opened(source) as opened, pytest.raises(Broken):
        opened.batch(5)
    assert source.asked == 3


@pytest.mark.parametrize(("remainder", "more"), [("drop", []), ("keep", [8, 9, 10]), ("pad", [8, 9, 10, 0, 0, 0, 0, 0])])
def test_an_end_inside_a_batch(remainder: Any, more: list[int], R: NamedSharding, consume: Consume) -> None:
    source = Counted(lambda i: {"x": np.int32(i)}, stop=11)
    seen = consume(ps.Loader(lambda: aiter(source), R, batch_size=SIZE, remainder=remainder))
    assert joined(seen, lambda batch: batch["x"]).tolist() == [*range(SIZE), *more]
    with Opened(Counted(stop=2)) as opened:
        assert opened.batch(2) == [0, 1]
        assert opened.items.pull(3) is END


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - what is waited for happens in threads
        await anyio.sleep(0.001)


async def close_it(iterator: Any) -> None:
    iterator.close()


async def cancel_it(iterator: Any) -> None:
    with anyio.CancelScope() as scope:
        scope.cancel()
        await anext(iterator)
    await iterator.aclose()


async def drop_it(iterator: Any) -> None:
    del iterator


CLOSES: dict[str, Callable[[Any], Awaitable[None]]] = {
    "close": close_it,
    "aclose": lambda iterator: iterator.aclose(),
    "cancel": cancel_it,
    "drop": drop_it,
}


@pytest.mark.parametrize("how", ["waiting", "endless"])
@pytest.mark.parametrize("close", CLOSES)
def test_closing_inside_a_batch(close: str, how: str, S: NamedSharding, run: Any) -> None:
    """The source waits there, or has more and more for a batch that is never full."""
    inside, ended = threading.Event(), threading.Event()

    async def source() -> AsyncIterator[Any]:
        i = 0
        try:
            while how == "endless" or i < SIZE + 3:
                yield np.int32(i)
                i += 1
                if i == SIZE + 3:
                    inside.set()
            await anyio.sleep_forever()
        finally:
            ended.set()

    async def main() -> None:
        size = SIZE if how == "waiting" else 1 << 22
        iterator = aiter(ps.Loader(source(), S, batch_size=size))
        if how == "waiting":
            assert np.asarray(await anext(iterator)).tolist() == list(range(SIZE))
        await until(inside.is_set)
        await CLOSES[close](iterator)
        del iterator
        await until(ended.is_set)
        await until(lambda: loader_threads() == [])

    run(main)


def test_closing_from_another_thread_inside_a_batch(S: NamedSharding) -> None:
    source = Counted(stop=10**9)
    iterator = iter(ps.Loader(source, S, batch_size=1 << 22))
    wait_until(lambda: source.pulled > 100)
    iterator.close()
    assert loader_threads() == []
    assert source.pulled < 1 << 22


# -- going on


@pytest.mark.parametrize("kind", ["dict", "large", "not contiguous"])
def test_a_run_that_is_broken_off_goes_on_exactly(kind: str, R: NamedSharding) -> None:
    """Whether an item was copied in the loop does not change its hash: the last one of a batch is not, also where the epoch ends there."""

    def make(state: ps.LoaderState | None = None) -> ps.Loader:
        buffer = BUFFERS[kind]()
        return ps.Loader(lambda: overwriting(buffer, 43), R, batch_size=SIZE, remainder="keep", epochs=2, state=state)

    whole = take(iter(make()))
    assert len(whole) == 12
    for cuts in ([1, 4, 2], [6, 1], [5, 5, 1]):
        assert broken_off(make, cuts, 12)[0] == whole


def test_going_on_asks_for_no_more_than_was_read_before(S: NamedSharding) -> None:
    """And then for what the batches that have a place need."""
    source = Counted(stop=3 * SIZE)
    loader = ps.Loader(lambda: aiter(source), S, batch_size=SIZE, read_ahead=1)
    iterator = iter(loader)
    next(iterator)
    next(iterator)
    state = iterator.state()
    iterator.close()
    again = Counted(stop=2 * SIZE - 1)
    with pytest.raises(ps.StateError, match=f"ended after {2 * SIZE - 1} examples"):
        next(iter(ps.Loader(lambda: aiter(again), S, batch_size=SIZE, state=state)))
    longer = Counted()
    resumed = iter(ps.Loader(lambda: aiter(longer), S, batch_size=SIZE, read_ahead=1, state=state))
    assert np.asarray(next(resumed)).tolist() == list(range(2 * SIZE, 3 * SIZE))
    assert longer.pulled <= 4 * SIZE
    resumed.close()


def test_going_on_where_the_epoch_ended_looks_at_one_item_more(R: NamedSharding) -> None:
    def make(source: Counted, state: ps.LoaderState | None = None) -> ps.Loader:
        return ps.Loader(lambda: aiter(source), R, batch_size=SIZE, remainder="keep", epochs=2, state=state)

    iterator = iter(make(Counted(stop=11)))
    assert [len(next(iterator)) for _ in range(2)] == [SIZE, 3]
    state = iterator.state()
    iterator.close()
    longer = Counted()
    with pytest.raises(ps.StateError, match="has more now"):
        next(iter(make(longer, state)))
    assert longer.pulled == 12
