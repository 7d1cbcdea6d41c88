"""What goes wrong in a source, a transform or a transfer reaches the consumer as it is, after the good batches before it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import gc
import itertools
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import anyio
import anyio.lowlevel
import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding

import prefetchshard as ps
from fakes import SOURCES, STREAMS, Dataset, Examples, OpenSource, batch, factory, first, generator
from prefetchshard.base.faults import note, safe_to_raise
from prefetchshard.reading.open_batch import OpenBatch
from support import loader_threads, pairwise, wait_until


class KeywordsOnly(Exception):
    def __init__(self, *, code: int, where: str) -> None:
        super().__init__(code, where)
        self.code = code
        self.where = where


class Bare(BaseException):
    pass


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    code: int


class Falsy(ValueError):
    def __bool__(self) -> bool:
        return False

    def __len__(self) -> int:
        return 0


FAULTS: dict[str, Callable[[], BaseException]] = {
    "ValueError": lambda: ValueError("boom"),
    "OSError": lambda: OSError(5, "disk gone"),
    "KeyError": lambda: KeyError("k"),
    "IndexError": lambda: IndexError(9),
    "AttributeError": lambda: AttributeError("shape"),
    "CalledProcessError": lambda: subprocess.CalledProcessError(3, ["cmd"]),
    "UnicodeDecodeError": lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
    "keyword-only": lambda: KeywordsOnly(code=7, where="here"),
    "frozen": lambda: Frozen(7),
    "falsy": lambda: Falsy("boom"),
    "group": lambda: ExceptionGroup("several", [ValueError(1), OSError(2)]),
    "MemoryError": MemoryError,
    "AssertionError": AssertionError,
    "futures.CancelledError": concurrent.futures.CancelledError,
    "BaseException": lambda: Bare("boom"),
    "KeyboardInterrupt": KeyboardInterrupt,
    "SystemExit": lambda: SystemExit(3),
}


def trio_cancelled() -> BaseException:
    """A real one; it cannot be made by hand."""
    import trio

    found: list[BaseException] = []

    async def main() -> None:
        with trio.CancelScope() as scope:
            scope.cancel()
            try:
                await trio.lowlevel.checkpoint()
            except trio.Cancelled as error:
                found.append(error)
                raise

    trio.run(main)
    return found[0].with_traceback(None)


CONTROL_FLOW: dict[str, Callable[[], BaseException]] = {
    "StopIteration": lambda: StopIteration(7),
    "StopAsyncIteration": StopAsyncIteration,
    "GeneratorExit": GeneratorExit,
    "asyncio.CancelledError": asyncio.CancelledError,
    "trio.Cancelled": trio_cancelled,
}
MAKERS = {**FAULTS, **CONTROL_FLOW}
every_fault = pytest.mark.parametrize("fault", MAKERS)
ALONE = ("frozen", "falsy", "BaseException", "KeyboardInterrupt", "SystemExit", *CONTROL_FLOW)
BEHAVIOURS: dict[str, list[str]] = {"raised as it is": [name for name in FAULTS if name not in ALONE], **{name: [name] for name in ALONE}}
"""What the loader, or an event loop, does with a fault, and the faults that it does that with."""


def with_faults(names: str, *lists: Iterable[Any], without: tuple[str, ...] = ()) -> pytest.MarkDecorator:
    """Each behaviour with each value (of several lists: each two of these meet), the faults of a behaviour in turn, and each fault once."""
    turns = {name: itertools.cycle([fault for fault in faults if fault not in without]) for name, faults in BEHAVIOURS.items()}
    rows = pairwise([name for name, faults in BEHAVIOURS.items() if set(faults) - set(without)], *lists)
    table = [(next(turns[name]), *values) for name, *values in rows]
    met = {row[0] for row in table}
    left = [fault for fault in MAKERS if fault not in met and fault not in without]
    table += [(fault, *row[1:]) for fault, row in zip(left, itertools.cycle(table[:]), strict=False)]
    return pytest.mark.parametrize(f"fault, {names}", table)


def test_each_fault_has_a_behaviour() -> None:
    assert sorted(itertools.chain.from_iterable(BEHAVIOURS.values())) == sorted(MAKERS)


class Bomb:
    """An act that raises a certain error object at one item."""

    def __init__(self, at: int, error: BaseException) -> None:
        self.at = at
        self.error = error

    def __call__(self, i: int) -> None:
        if i == self.at:
            self.explode()

    def explode(self) -> None:
        raise self.error


def frames(error: BaseException) -> list[str]:
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def notes(error: BaseException) -> list[str]:
    return [text for text in getattr(error, "__notes__", ()) if text.startswith("prefetchshard: while ")]


def consume(iterator: Any) -> tuple[list[int], BaseException | None]:
    """The batches, and the error that ended them."""
    got: list[int] = []
    try:
        got.extend(map(first, iterator))  # what came before an error stays in it
    except BaseException as error:  # noqa: BLE001 - any kind is expected
        return got, error
    return got, None


def check(loader: ps.Loader, fault: BaseException, good: list[int], says: str) -> BaseException:
    """The law: good batches first, then that very object, every time, at once, with no thread left."""
    iterator = iter(loader)
    got, caught = consume(iterator)
    assert got == good
    assert caught is not None
    if isinstance(fault, tuple(type(make()) for make in CONTROL_FLOW.values())):
        assert isinstance(caught, RuntimeError)
        assert caught.__cause__ is fault
    else:
        assert caught is fault
    assert loader_threads() == []
    assert "explode" in frames(fault)
    if not isinstance(fault, Frozen):
        assert len(notes(caught)) == 1
        assert says in notes(caught)[0]
    length = len(frames(caught))
    for _ in range(3):
        again = consume(iterator)
        assert again == ([], caught)
        assert len(frames(caught)) == length
        assert len(notes(caught)) == (not isinstance(fault, Frozen))
    assert repr(iterator).startswith("<LoaderIterator failed")
    return caught


# --- every kind of source


@with_faults("kind", SOURCES)
def test_the_source_fails(kind: str, fault: str, S: NamedSharding) -> None:
    if (kind, fault) in [("iterator", "StopIteration"), ("iterable", "StopIteration"), ("async iterator", "StopAsyncIteration")]:
        pytest.skip("that is the end")
    error = MAKERS[fault]()
    loader = ps.prefetch(SOURCES[kind](6, Bomb(3, error)), S)
    check(loader, error, [0, 1, 2], "while reading batch 3 (epoch 0, batch 3 of the epoch)")


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("at", [0, 5])
def test_it_fails_at_the_first_or_at_the_last_batch(kind: str, at: int, S: NamedSharding) -> None:
    error = OSError(5, "disk gone")
    check(ps.prefetch(SOURCES[kind](6, Bomb(at, error)), S, depth=8), error, list(range(at)), f"batch {at} ")
    assert error.errno == 5


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("by_workers", [False, True])
def test_an_example_fails(kind: str, by_workers: bool, S: NamedSharding) -> None:
    """The source gives examples, here of eight columns; a batch is eight of them."""
    error = ValueError("boom")
    loader = ps.Loader(SOURCES[kind](40, Bomb(27, error)), S, batch_size=8, transform=(lambda row: row[:4]) if by_workers else None)
    got, caught = consume(value[:, 0] for value in iter(loader))
    assert (got, caught) == ([0, 8, 16], error)
    assert notes(error) == ["prefetchshard: while reading batch 3 (epoch 0, rows 24 to 31 of the epoch)"]


@with_faults("workers", [1, 4])
def test_a_row_of_a_dataset_fails(fault: str, workers: int, S: NamedSharding) -> None:
    error = MAKERS[fault]()
    loader = ps.Loader(Examples(64, Bomb(27, error)), S, batch_size=8, workers=workers)
    check(loader, error, [0, 8, 16], "while reading batch 3 (epoch 0, rows 2")


# --- every stage


def failing_transform(at: int, error: BaseException) -> Callable[[Any], Any]:
    bomb = Bomb(at, error)

    def transform(value: Any) -> Any:
        bomb(first(np.atleast_1d(value)))
        return value

    return transform


@with_faults("kind, workers", ["generator", "dataset", "async generator"], [1, 3])
def test_transform_fails(kind: str, workers: int, fault: str, S: NamedSharding) -> None:
    error = MAKERS[fault]()
    loader = ps.prefetch(SOURCES[kind](6), S, transform=failing_transform(3, error), workers=workers)
    check(loader, error, [0, 1, 2], "while transforming batch 3 ")


@pytest.mark.parametrize(
    "source", [np.arange(64, dtype=np.int32), Examples(64), [np.int32(i) for i in range(64)]], ids=["arrays", "dataset", "list"]
)
@pytest.mark.parametrize("workers", [1, 4])
def test_transform_of_a_row_fails(source: Any, workers: int, S: NamedSharding) -> None:
    error = KeyError("k")
    loader = ps.Loader(source, S, batch_size=8, transform=failing_transform(27, error), workers=workers)
    check(loader, error, [0, 8, 16], "while transforming batch 3 (epoch 0, rows 2")


@with_faults("kind", ["arrays", "dataset", "iterator"])
def test_collate_fails(kind: str, fault: str, S: NamedSharding) -> None:
    source: Any = {"arrays": np.arange(64, dtype=np.int32), "dataset": Examples(64), "iterator": iter(range(64))}[kind]
    error = MAKERS[fault]()
    bomb = Bomb(24, error)

    def collate(rows: Any) -> np.ndarray:
        bomb(int(rows[0]))
        return np.asarray(rows, np.int32)

    check(
        ps.Loader(source, S, batch_size=8, collate=collate),
        error,
        [0, 8, 16],
        "while collating batch 3 (epoch 0, rows 24 to 31 of the epoch)",
    )


def test_collate_fails_on_a_padded_batch_and_the_note_names_its_rows(R: NamedSharding) -> None:
    def collate(rows: Any) -> Any:
        if len(rows) < 4:
            raise ValueError("too few")
        return np.asarray(rows)

    iterator = iter(ps.Loader(list(np.arange(6, dtype=np.int32)), R, batch_size=4, collate=collate, remainder="pad"))
    next(iterator)
    with pytest.raises(ValueError, match="too few") as caught:
        next(iterator)
    assert notes(caught.value) == ["prefetchshard: while collating batch 1 (epoch 0, rows 4 to 5 of the epoch)"]


def test_a_transform_that_fails_on_a_dropped_remainder_ends_no_run_early(R: NamedSharding) -> None:
    """Whether it is seen depends on when the source ends; a run that goes on has all of its batches."""

    def transform(row: Any) -> Any:
        if row == 9:
            raise ValueError("row 9")
        return row

    for _ in range(20):
        got = 0
        try:
            for _ in ps.Loader(lambda: iter(np.arange(10, dtype=np.int32)), R, batch_size=4, transform=transform, epochs=3, workers=2):
                got += 1
        except ValueError:
            continue
        assert got == 6


def test_a_transform_that_failed_before_the_remainder_was_dropped_is_raised(R: NamedSharding, monkeypatch: pytest.MonkeyPatch) -> None:
    """The source says that it has ended once the failure is known."""
    known = threading.Event()
    fail = OpenBatch.fail

    def fail_and_tell(*args: Any) -> None:
        fail(*args)
        known.set()

    def source() -> Iterator[int]:
        yield from range(10)
        assert known.wait(30)

    def transform(row: int) -> np.int32:
        if row == 9:
            raise ValueError("row 9")
        return np.int32(row)

    monkeypatch.setattr(OpenBatch, "fail", fail_and_tell)
    iterator = iter(ps.Loader(source, R, batch_size=4, transform=transform, epochs=3, workers=2))
    assert [next(iterator).tolist() for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(ValueError, match="row 9"):
        next(iterator)


def test_what_transform_made_of_a_last_batch_is_blamed_on_it(R: NamedSharding) -> None:
    rows = [np.arange(4), np.arange(4)]
    seen: list[int] = []

    def transform(batch: Any) -> Any:
        seen.append(1)
        return batch if len(seen) < 2 else batch + 2**40

    iterator = iter(ps.Loader(iter(rows), R, transform=transform, workers=1))
    next(iterator)
    with pytest.raises(ps.NarrowingError) as caught:
        next(iterator)
    assert any("while batching batch 1" in note for note in notes(caught.value))


@every_fault
def test_device_transform_fails(fault: str, S: NamedSharding) -> None:
    if fault == "frozen":
        pytest.skip("contextlib, which JAX traces with, sets its traceback")
    error = MAKERS[fault]()
    bomb = Bomb(16, error)

    def trace(value: Any) -> Any:
        bomb(value.shape[0])
        return value + 1

    source = [np.full(16 if i == 3 else 8, i) for i in range(6)]
    # In the consumer's thread, where it runs over several devices, KeyboardInterrupt is Ctrl-C
    where: Any = SingleDeviceSharding(jax.devices()[0]) if fault == "KeyboardInterrupt" else S
    note = "while placing batch 3 (epoch 0, rows 24 to 39 of the epoch)"
    check(ps.prefetch(source, where, device_transform=trace), error, [1, 2, 3], note)


@with_faults("asked", ["next", "spec", "async"], without=("frozen", "KeyboardInterrupt"))
def test_what_the_consumers_own_thread_makes_fails(asked: str, fault: str, S: NamedSharding) -> None:
    """Rows that are split over the devices are gathered there by the thread that takes the batch."""
    error = MAKERS[fault]()
    bomb = Bomb(0, error)

    def trace(value: Any) -> Any:
        bomb(0)
        return value

    source = ps.OnDevice(np.arange(64, dtype=np.int32), sharding=S)
    loader = ps.Loader(source, S, batch_size=8, device_transform=trace)
    if asked == "spec":
        with pytest.raises(BaseException) as caught:  # noqa: PT011 - any kind
            loader.spec()
        assert caught.value is error or caught.value.__cause__ is error
        wait_until(lambda: loader_threads() == [])  # of the run that `spec` began, which nobody closes
    if asked == "async":

        async def main() -> None:
            async for _ in loader:
                pass

        with pytest.raises(BaseException) as caught:  # noqa: PT011 - any kind
            asyncio.run(main())
        assert caught.value is error or isinstance(caught.value, ps.SourceError)
        return
    check(loader, error, [], "while placing batch 0 (epoch 0, rows 0 to 7 of the epoch)")


@pytest.mark.parametrize("kind", ["list", "generator"])
@pytest.mark.parametrize(
    ("bad", "kind_of_error", "words"),
    [
        (np.array(["a"] * 8), ps.LeafTypeError, "cannot be put on a device"),
        (np.array([object()] * 8), ps.LeafTypeError, "cannot be put on a device"),
        (np.ones(7), ps.PlacementError, ""),
        (np.full(8, 2**40), ps.NarrowingError, ""),
    ],
    ids=["text", "objects", "rows", "wide"],
)
def test_a_batch_that_does_not_fit(kind: str, bad: Any, kind_of_error: type[Exception], words: str, S: NamedSharding) -> None:
    batches = [batch(0), batch(1), batch(2), bad, batch(4)]
    iterator = iter(ps.prefetch(batches if kind == "list" else (b for b in batches), S, remainder="error"))
    got, caught = consume(iterator)
    assert got == [0, 1, 2]
    assert isinstance(caught, kind_of_error | ps.BatchError)
    assert words in str(caught)
    assert len(notes(caught)) == 1
    assert "batch 3" in notes(caught)[0]
    assert consume(iterator) == ([], caught)
    assert loader_threads() == []


def test_a_deleted_array_in_the_third_batch(S: NamedSharding) -> None:
    arrays = [jax.device_put(batch(i), S) for i in range(5)]
    arrays[2].delete()
    iterator = iter(ps.prefetch(arrays, S))
    got, caught = consume(iterator)
    assert got == [0, 1]
    assert isinstance(caught, Exception)
    assert len(notes(caught)) == 1
    assert "batch 2" in notes(caught)[0]
    assert consume(iterator) == ([], caught)


@with_faults("kind", ["dataset", "iterable", "examples"])
def test_set_epoch_fails(kind: str, fault: str, S: NamedSharding) -> None:
    error = MAKERS[fault]()
    bomb = Bomb(1, error)
    source: Any = Examples(16) if kind == "examples" else SOURCES[kind](2)
    source.set_epoch = bomb
    loader = ps.Loader(source, S, epochs=3, batch_size=8 if kind == "examples" else None)
    check(loader, error, [0, 8] if kind == "examples" else [0, 1], "(epoch 1)")


@every_fault
def test_the_factory_fails(fault: str, S: NamedSharding) -> None:
    error = MAKERS[fault]()
    bomb = Bomb(1, error)

    def make(epoch: int) -> Any:
        bomb(epoch)
        return generator(2)

    check(ps.prefetch(make, S, epochs=3), error, [0, 1], "reading the source (epoch 1)")


@with_faults("kind", ["iterable", "async iterable"])
def test_iter_fails(kind: str, fault: str, S: NamedSharding) -> None:
    error = MAKERS[fault]()
    bomb = Bomb(0, error)

    class Source:
        def __iter__(self) -> Any:
            bomb(0)

    class AsyncSource:
        def __aiter__(self) -> Any:
            bomb(0)

    check(ps.prefetch(Source() if kind == "iterable" else AsyncSource(), S), error, [], "")


@with_faults("kind", ["iterator", "generator", "async generator"])
def test_closing_the_source_at_its_end_fails(kind: str, fault: str, S: NamedSharding) -> None:
    error = MAKERS[fault]()
    bomb = Bomb(0, error)

    class Source(OpenSource):
        def close(self) -> None:
            bomb(0)

    def source() -> Any:
        yield from generator(3)
        bomb(0)

    class AsyncSource:
        def __init__(self) -> None:
            self.items = OpenSource(3)

        def __aiter__(self) -> Any:
            return self

        async def __anext__(self) -> Any:
            if self.items.asked == 3:
                raise StopAsyncIteration
            return next(self.items)

        async def aclose(self) -> None:
            bomb(0)

    made: Any = {"iterator": lambda: Source(3), "generator": source, "async generator": AsyncSource}[kind]()
    check(ps.prefetch(made, S), error, [0, 1, 2], "")


# --- many workers


@pytest.mark.parametrize("repeat", range(50))
def test_batches_before_the_fault_come_whatever_the_workers_do(repeat: int, S: NamedSharding) -> None:
    """Workers that are ahead of the fault, and those that are behind it, change nothing about what comes."""
    at = repeat % 12
    error = ValueError(at)
    if repeat % 2:
        source: Any = Examples(96, Bomb(8 * at + repeat % 8, error))
        loader = ps.Loader(source, S, batch_size=8, workers=4)
        good = [8 * i for i in range(at)]
    else:
        loader = ps.prefetch(generator(12), S, transform=failing_transform(at, error), workers=4)
        good = list(range(at))
    got, caught = consume(iter(loader))
    assert got == good
    assert caught is error


def test_of_two_faults_the_earlier_one_comes(S: NamedSharding) -> None:
    late, early = ValueError("late"), ValueError("early")
    failed = asyncio.Event()

    class Source(Dataset):
        def __getitem__(self, i: int) -> np.ndarray:
            if i == 5:
                failed.set()
                raise late
            if i == 2:
                while not failed.is_set():
                    pass
                raise early
            return batch(i)

    got, caught = consume(iter(ps.prefetch(Source(8), S, workers=8)))
    assert (got, caught) == ([0, 1], early)


@pytest.mark.parametrize("depth", [1, 3])
def test_a_fault_does_not_wait_for_room(depth: int, S: NamedSharding) -> None:
    """Queues are full when it happens, and the consumer comes late."""
    error = ValueError("boom")
    iterator = iter(ps.prefetch(generator(9, Bomb(depth + 2, error)), S, depth=depth))
    got, caught = consume(iterator)
    assert (got, caught) == (list(range(depth + 2)), error)


class Model:
    """Something large in the training function, which the traceback of an error leads to."""


def for_loop(loader: ps.Loader) -> None:
    for _ in loader:
        pass


def next_loop(loader: ps.Loader) -> None:
    iterator = iter(loader)
    while True:
        next(iterator)


def async_loop(loader: ps.Loader) -> None:
    async def main() -> None:
        async for _ in loader:
            pass

    asyncio.run(main())


FAILING: dict[str, Callable[[Callable[[int], Any], NamedSharding], ps.Loader]] = {
    **{kind: lambda act, S, make=make: ps.prefetch(make(6, act), S) for kind, make in SOURCES.items()},
    "examples": lambda act, S: ps.Loader(Examples(64, lambda i: act(i // 8)), S, batch_size=8),
    "transform": lambda act, S: ps.prefetch(factory(6), S, transform=lambda value: (act(first(value)), value)[1]),
    "collate": lambda act, S: ps.Loader(Examples(64), S, batch_size=8, collate=lambda rows: (act(int(rows[0]) // 8), np.stack(rows))[1]),
    "device_transform": lambda act, S: ps.prefetch(
        [np.ones(8 * i + 8) for i in range(4)], S, device_transform=lambda value: (act(value.shape[0] // 8 - 1), value)[1]
    ),
}


@pytest.mark.parametrize("kind", FAILING)
@pytest.mark.parametrize("use", [for_loop, next_loop, ps.Loader.spec, async_loop])
def test_what_an_error_led_to_is_let_go(use: Callable[[ps.Loader], object], kind: str, S: NamedSharding) -> None:
    """Once the error and the iterator are dropped: nothing of the library holds the consumer's frames."""
    dead: list[weakref.ref[Any]] = []

    def act(i: int) -> None:
        if i == (0 if use is ps.Loader.spec else 2):
            raise ZeroDivisionError

    def train(loader: ps.Loader) -> None:
        model = Model()
        dead.append(weakref.ref(model))
        use(loader)

    kept = [FAILING[kind](act, S)]
    with contextlib.suppress(ZeroDivisionError):
        train(kept[0])
    if kind in ("iterator", "generator", "async generator", "async iterator"):
        kept.clear()  # a one-shot source keeps its only run
    wait_until(lambda: gc.collect() >= 0 and [ref() for ref in dead] == [None])


@pytest.mark.parametrize("kind", [kind for kind in FAILING if kind != "device_transform"])  # raised beneath the iterator's own frames
@pytest.mark.parametrize("is_async", [False, True])
def test_an_error_that_is_kept_keeps_no_iterator(is_async: bool, kind: str, S: NamedSharding) -> None:
    """Nor does it need the garbage collector for that."""

    def act(i: int) -> None:
        if i == 2:
            raise ZeroDivisionError

    async def take_all(iterators: list[Any]) -> None:
        async for _ in iterators[0]:
            pass

    iterators: list[Any] = [iter(FAILING[kind](act, S))]
    dead = [weakref.ref(iterators[0]), weakref.ref(iterators[0]._consumer)]
    gc.disable()
    try:
        with pytest.raises(ZeroDivisionError) as kept:
            asyncio.run(take_all(iterators)) if is_async else list(iterators[0])
        iterators.clear()
        assert [ref() for ref in dead] == [None, None]
        assert kept.value.__traceback__ is not None
    finally:
        gc.enable()


def test_an_error_object_that_is_raised_again_keeps_one_note(S: NamedSharding) -> None:
    error = ValueError("boom")
    loader = ps.prefetch(Dataset(4, Bomb(2, error)), S)
    for _ in range(3):
        assert consume(iter(loader)) == ([0, 1], error)
        assert len(notes(error)) == 1


def test_the_chain_of_an_error_stays(S: NamedSharding) -> None:
    """`raise ... from`, and what was being handled when it was raised."""

    def collate(rows: list[Any]) -> Any:
        try:
            raise KeyError("inner")
        except KeyError:
            raise ValueError("outer")  # noqa: B904 - that is the case

    _, caught = consume(iter(ps.Loader(Examples(8), S, batch_size=8, collate=collate)))
    assert isinstance(caught, ValueError)
    assert isinstance(caught.__context__, KeyError)
    assert not caught.__suppress_context__
    assert caught.__cause__ is None


@with_faults("library", ["asyncio", "trio"])
def test_async_consumers_get_it_too(fault: str, library: str, S: NamedSharding) -> None:
    error = MAKERS[fault]()
    got: list[int] = []
    caught: list[BaseException] = []

    async def main() -> None:
        iterator = aiter(ps.prefetch(factory(6, Bomb(3, error)), S))
        for _ in range(3):
            try:
                async for value in iterator:
                    got.append(first(value))  # noqa: PERF401 - what came before the error is wanted
            except BaseException as raised:  # noqa: BLE001 - any kind is expected
                caught.append(raised)

    anyio.run(main, backend=library)
    assert got == [0, 1, 2]
    assert len(caught) == 3
    assert caught[0] is caught[1] is caught[2]
    if fault in CONTROL_FLOW:
        assert isinstance(caught[0], RuntimeError)
        assert caught[0].__cause__ is error
    else:
        assert caught[0] is error
    assert loader_threads() == []


@pytest.mark.parametrize(
    ("fault", "where", "library"),
    pairwise(["ValueError", "BaseException", "KeyboardInterrupt", "SystemExit", *CONTROL_FLOW], ["item", "aclose"], ["asyncio", "trio"]),
)
def test_a_source_in_the_callers_loop_fails(where: str, fault: str, library: str, S: NamedSharding) -> None:  # noqa: C901 - one program, told in order
    """Only the loader fails; the loop, which is not ours, goes on."""
    error = MAKERS[fault]()
    bomb = Bomb(2, error)

    class Source:
        def __init__(self) -> None:
            self.asked = 0

        def __aiter__(self) -> Any:
            return self

        async def __anext__(self) -> Any:
            self.asked += 1
            if self.asked == 3:
                if where == "aclose":
                    raise StopAsyncIteration
                bomb(2)
            await anyio.lowlevel.checkpoint()
            return batch(self.asked - 1)

        async def aclose(self) -> None:
            if where == "aclose":
                bomb(2)

    got: list[int] = []
    caught: list[BaseException] = []

    async def main() -> str:
        iterator = aiter(ps.prefetch(ps.from_this_loop(Source()), S))
        for _ in range(2):
            try:
                async for value in iterator:
                    got.append(first(value))  # noqa: PERF401 - what came before the error is wanted
            except BaseException as raised:  # noqa: BLE001 - any kind is expected
                caught.append(raised)
        await anyio.sleep(0.01)
        return "went on"

    assert anyio.run(main, backend=library) == "went on"
    assert got == [0, 1]
    if where == "item" and fault in ("StopAsyncIteration",):
        assert caught == []  # that is the end
        return
    assert len(caught) == 2
    assert caught[0] is caught[1]
    if fault in CONTROL_FLOW:
        assert isinstance(caught[0], RuntimeError)
        assert caught[0].__cause__ is error
    else:
        assert caught[0] is error
    assert loader_threads() == []


def test_spec_gets_it_and_the_loop_too(S: NamedSharding) -> None:
    error = ValueError("boom")
    loader = ps.prefetch(generator(3, Bomb(0, error)), S)
    lengths: set[int] = set()
    for _ in range(3):
        with pytest.raises(ValueError, match="boom") as caught:
            loader.spec()
        assert caught.value is error
        lengths.add(len(frames(error)))
    assert len(lengths) == 1
    assert consume(iter(loader)) == ([], error)


def test_the_iterator_after_an_error_is_no_live_one(S: NamedSharding) -> None:
    loader = ps.prefetch(generator(3, Bomb(1, ValueError("boom"))), S)
    assert consume(iter(loader))[0] == [0]
    with pytest.raises(ps.UsedUpError, match="one-shot"):
        iter(loader)


def test_a_run_that_failed_starts_over(S: NamedSharding) -> None:
    """Over a source that can be read again."""
    error = ValueError("boom")
    bomb = Bomb(2, error)
    loader = ps.prefetch(Dataset(4, bomb), S)
    assert consume(iter(loader)) == ([0, 1], error)
    bomb.at = -1
    assert consume(iter(loader)) == ([0, 1, 2, 3], None)


# --- the words


def test_notes_say_where() -> None:
    from prefetchshard.base.position import EpochEnd, Position, StartPoint

    position = Position(StartPoint(epoch=2, step=8, rows=24, batches=3), 16, EpochEnd())
    assert notes(note(ValueError(), "reading", position)) == ["prefetchshard: while reading batch 7 (epoch 2, rows 16 to 23 of the epoch)"]
    assert notes(note(ValueError(), "reading", position, (18, 20))) == [
        "prefetchshard: while reading batch 7 (epoch 2, rows 18 to 19 of the epoch)"
    ]
    whole = Position(StartPoint(epoch=2, step=8, batches=3), 0, EpochEnd())
    assert notes(note(ValueError(), "placing", whole)) == ["prefetchshard: while placing batch 7 (epoch 2, batch 2 of the epoch)"]


def test_a_second_note_is_not_added() -> None:
    error = note(note(ValueError(), "reading", None), "placing", None)
    assert notes(error) == ["prefetchshard: while reading"]


def test_an_error_that_takes_no_note_is_kept() -> None:
    for odd in (Frozen(1), ValueError()):
        if isinstance(odd, ValueError):
            odd.__notes__ = 3  # pyright: ignore[reportAttributeAccessIssue]
        assert note(odd, "reading", None) is odd


@pytest.mark.parametrize("name", CONTROL_FLOW)
def test_control_flow_gets_a_stand_in(name: str) -> None:
    error = CONTROL_FLOW[name]()
    shown = safe_to_raise(error, "transforming")
    assert isinstance(shown, ps.SourceError)
    assert isinstance(shown, RuntimeError)
    assert shown.__cause__ is error
    assert type(error).__name__ in str(shown)
    assert safe_to_raise(shown, "placing") is shown


def test_without_trio_nothing_is_asked_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    error = ValueError()
    monkeypatch.delitem(sys.modules, "trio")
    assert safe_to_raise(error, "reading") is error
