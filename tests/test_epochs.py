"""Epochs follow each other without a bubble, runs go on with their numbers, and a length is the number of batches."""

from __future__ import annotations

import itertools
import operator
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
import pytest
from jax.sharding import NamedSharding

import prefetchshard as ps
from consumers import Consume, batches, consumer, joined, places

sync = consumer("sync")


def full(i: float) -> np.ndarray:
    return np.full(8, i, np.float32)


def three() -> Iterator[np.ndarray]:
    yield from map(full, range(3))


async def three_async() -> AsyncIterator[np.ndarray]:
    for batch in three():
        yield batch


class Dataset:
    """A dataset of examples, or of batches."""

    def __init__(self, items: Any) -> None:
        self.items = items
        self.read: list[int] = []
        self.changed = threading.Condition()

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        with self.changed:
            self.read.append(index)
            self.changed.notify_all()
        return self.items[index]


class Iterable:
    def __init__(self, make: Callable[[], Iterator[Any]], length: int | None = None) -> None:
        self.make = make
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        return self.make()


class Sized(Iterable):
    def __len__(self) -> int:
        assert self.length is not None
        return self.length


AGAIN: dict[str, Callable[[], Any]] = {
    "list": lambda: list(three()),
    "iterable": lambda: Iterable(three),
    "factory": lambda: three,
    "async factory": lambda: three_async,
    "dataset": lambda: Dataset(list(three())),
}


# -- again and again


@pytest.mark.parametrize("kind", AGAIN)
def test_what_can_be_read_again_is(kind: str, S: NamedSharding, consume: Consume) -> None:
    loader = ps.Loader(AGAIN[kind](), S)
    for run in range(3):
        seen = consume(loader)
        assert joined(seen, lambda b: b[:1]).tolist() == [0, 1, 2]
        assert places(seen) == [(run, 3 * run + i, i + 1, 8 * (i + 1), i == 2) for i in range(3)]
        assert [p.run for _, p in seen] == [run] * 3


@pytest.mark.parametrize("kind", AGAIN)
def test_a_run_that_was_broken_off_starts_over(kind: str, S: NamedSharding) -> None:
    loader = ps.Loader(AGAIN[kind](), S)
    for _ in range(2):
        with loader:
            for batch in loader:
                assert batch[0] == 0
                break
    seen = sync(loader)
    assert joined(seen, lambda b: b[:1]).tolist() == [0, 1, 2]
    assert places(seen)[0] == (0, 0, 1, 8, False)


@pytest.mark.parametrize("kind", AGAIN)
def test_two_runs_of_one_loader_are_independent(kind: str, S: NamedSharding) -> None:
    loader = ps.Loader(AGAIN[kind](), S, epochs=2)
    pairs = [(float(a[0]), float(b[0])) for a, b in zip(loader, loader, strict=True)]
    assert pairs == [(i, i) for i in (0, 1, 2, 0, 1, 2)]
    assert places(sync(loader))[0] == (2, 6, 1, 8, False), "two runs from one place move the loader on by one"


@pytest.mark.parametrize("make", [three, three_async, lambda: iter(list(three())), lambda: map(full, range(3))])
def test_a_one_shot_source_has_one_run(make: Any, S: NamedSharding, consume: Consume) -> None:
    loader = ps.Loader(make(), S)
    iterator = iter(loader)
    assert len(consume(loader, 1)) == 1
    assert iter(loader) is iterator, "it goes on where it is"
    assert len(consume(loader)) == 2
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"one-shot.*exhausted"):
            consume(loader)
    with pytest.raises(RuntimeError, match=r"one-shot.*exhausted"):
        list(ps.Loader(make(), S).__class__.__iter__(loader))
    assert next(iterator, None) is None, "the iterator itself just has ended"


def test_a_one_shot_source_that_was_closed_is_used_up(S: NamedSharding) -> None:
    loader = ps.Loader(three(), S)
    with loader:
        next(iter(loader))
    with pytest.raises(ps.UsedUpError, match="one-shot"):
        iter(loader)


@pytest.mark.parametrize("epochs", [2, None])
@pytest.mark.parametrize("make", [three, three_async, lambda: iter([])])
def test_epochs_over_a_one_shot_source_are_refused(make: Any, epochs: int | None, S: NamedSharding) -> None:
    with pytest.raises(ps.ConfigError, match=rf"epochs={epochs} over a one-shot"):
        ps.Loader(make(), S, epochs=epochs)


def test_an_empty_source_gives_an_empty_loop(S: NamedSharding, consume: Consume) -> None:
    for source, options in (([], {}), (lambda: iter(()), {}), (Dataset([]), {"batch_size": 8}), (np.zeros((0, 2)), {"batch_size": 8})):
        loader = ps.Loader(source, S, epochs=3, **options)
        assert consume(loader) == consume(loader) == []
        assert loader.stats().batches == 0


# -- factories


def test_a_factory_is_told_the_epoch(S: NamedSharding, consume: Consume) -> None:
    told: list[int] = []

    def make(epoch: int) -> Iterator[np.ndarray]:
        told.append(epoch)
        return iter([full(10 * epoch), full(10 * epoch + 1)])

    loader = ps.Loader(make, S, epochs=2)
    assert joined(consume(loader), lambda b: b[:1]).tolist() == [0, 1, 10, 11]
    assert joined(consume(loader), lambda b: b[:1]).tolist() == [20, 21, 30, 31]
    assert told == [0, 1, 2, 3]


def test_factories_of_every_sort(S: NamedSharding) -> None:
    class Named:
        def __call__(self, *, epoch: int) -> list[np.ndarray]:
            return [full(epoch)]

        def method(self, epoch: int) -> Iterator[np.ndarray]:
            return iter([full(epoch)])

    class Made(Iterable):
        def __init__(self, epoch: int) -> None:
            super().__init__(lambda: iter([full(epoch)]))

    async def asynchronous(epoch: int) -> AsyncIterator[np.ndarray]:
        yield full(epoch)

    for factory in (
        Named(),
        Named().method,
        Made,
        asynchronous,
        lambda epoch: [full(epoch)],
        lambda **known: [full(known.get("epoch", 7))],
    ):
        got = joined(sync(ps.Loader(factory, S, epochs=2)), lambda b: b[:1]).tolist()
        assert got == ([7, 7] if factory.__class__.__name__ == "function" and factory.__code__.co_flags & 8 else [0, 1])


def test_a_factory_that_gives_nothing_says_so(S: NamedSharding) -> None:
    def forgot() -> None:
        three()

    with pytest.raises(ps.SourceError, match=r"forgot.*returned None for epoch 0"):
        sync(ps.Loader(forgot, S))
    with pytest.raises(ps.ConfigError, match="callable"):
        sync(ps.Loader(lambda: lambda: three(), S))


def test_a_factory_whose_iterator_was_used_up_says_so(S: NamedSharding) -> None:
    """The same iterator again would make a silently shorter run."""
    once = three()
    iterator = iter(ps.Loader(lambda: once, S, epochs=2))
    assert len(sync(iterator, 3)) == 3
    with pytest.raises(ps.UsedUpError, match="the same"):
        next(iterator)
    again = iter(list(three()))
    loader = ps.Loader(Iterable(lambda: again), S)
    assert len(sync(loader)) == 3
    with pytest.raises(ps.UsedUpError, match="the same"):
        sync(loader)


class Tells(Dataset):
    def __init__(self, items: Any) -> None:
        super().__init__(items)
        self.told: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.told.append(epoch)


def test_a_source_that_wants_to_know_is_told_before_each_epoch(S: NamedSharding, consume: Consume) -> None:
    class Teller(Iterable):
        told: list[int]

        def set_epoch(self, epoch: int) -> None:
            self.told.append(epoch)

        def __iter__(self) -> Iterator[Any]:
            return iter([full(self.told[-1])])

    source = Teller(three)
    source.told = []
    loader = ps.Loader(source, S, epochs=2)
    assert joined(consume(loader), lambda b: b[:1]).tolist() == [0, 1]
    assert joined(consume(loader), lambda b: b[:1]).tolist() == [2, 3]
    assert source.told == [0, 1, 2, 3]

    class Shifts(Tells):
        def __getitem__(self, index: int) -> Any:
            return self.items[index] + 100 * self.told[-1]

    dataset = Shifts(np.arange(16, dtype=np.float32))
    seen = consume(ps.Loader(dataset, S, batch_size=8, workers=4, epochs=3))
    assert joined(seen).tolist() == [100.0 * e + i for e in range(3) for i in range(16)], "none is read under the number of another epoch"


# -- no bubble, no end


@pytest.mark.parametrize("kind", ["stream", "dataset", "arrays"])
def test_the_next_epoch_is_read_before_this_one_is_consumed(kind: str, S: NamedSharding) -> None:
    """Shown by state: nothing is taken at all, and still the source is asked for rows of epoch 1."""
    entered = threading.Event()
    rows = itertools.count(1)

    def stream(epoch: int) -> Iterator[np.ndarray]:
        if epoch == 1:
            entered.set()
        yield full(epoch)

    class Watched(Tells):
        def set_epoch(self, epoch: int) -> None:
            super().set_epoch(epoch)
            if epoch == 1:
                entered.set()

    def ninth_row(row: Any) -> Any:
        if next(rows) == 9:
            entered.set()
        return row

    source, options = {
        "stream": (stream, {}),
        "dataset": (Watched(list(np.arange(8))), {"batch_size": 8, "narrow": "allow"}),
        "arrays": (np.arange(8, dtype=np.int32), {"batch_size": 8, "transform": ninth_row}),
    }[kind]
    with ps.Loader(source, S, epochs=5, depth=1, **options) as loader:
        iterator = iter(loader)
        assert entered.wait(30)
        assert iterator.stats().batches == 0


@pytest.mark.parametrize("kind", AGAIN)
def test_epochs_for_ever(kind: str, S: NamedSharding, consume: Consume) -> None:
    with ps.Loader(AGAIN[kind](), S, epochs=None) as loader:
        seen = consume(loader, 20)
        assert joined(seen, lambda b: b[:1]).tolist() == [i % 3 for i in range(20)]
        assert places(seen) == [(i // 3, i, i % 3 + 1, 8 * (i % 3 + 1), i % 3 == 2) for i in range(20)]


@pytest.mark.parametrize(
    ("source", "options"),
    [
        ([], {}),
        (lambda: iter(()), {}),
        (lambda epoch: iter([full(0)] * (1 - epoch)), {}),
        (Dataset([]), {"batch_size": 8}),
        (np.arange(0), {"batch_size": 8}),
    ],
)
def test_an_empty_epoch_among_endless_ones_is_an_error(source: Any, options: dict[str, Any], S: NamedSharding) -> None:
    with pytest.raises(ps.ConfigError, match="epochs=None"):
        sync(ps.Loader(source, S, epochs=None, **options))


def test_memory_does_not_grow_with_the_epochs(S: NamedSharding) -> None:
    """A position that was handed out is let go of, over streams of whole batches too."""
    with ps.Loader(three, S, epochs=None) as loader:
        iterator = iter(loader)
        seen = []
        for _ in range(300):
            next(iterator)
            position = iterator.position
            assert position is not None
            seen.append(weakref.ref(position._end))  # pyright: ignore[reportPrivateUsage] - what waits to hear whether the epoch has ended
            del position
        assert sum(reference() is not None for reference in seen) < 30


# -- how many


@pytest.mark.parametrize(
    ("rows", "size", "remainder", "want"),
    [
        (42, 16, "drop", 2),
        (42, 16, "pad", 3),
        (48, 16, "drop", 3),
        (48, 16, "pad", 3),
        (48, 16, "error", 3),
        (42, 14, "keep", 3),
        (42, 40, "keep", 2),
        (2, 16, "keep", 1),
        (5, 16, "pad", 1),
        (0, 16, "pad", 0),
        (0, 16, "drop", 0),
    ],
)
def test_the_length_is_the_number_of_batches(rows: int, size: int, remainder: Any, want: int, R: NamedSharding) -> None:
    sources: list[tuple[Any, dict[str, Any]]] = [
        (np.zeros((rows, 1)), {}),
        (Dataset(np.zeros((rows, 1))), {}),
        (Sized(lambda: iter(np.zeros((rows, 1))), rows), {}),
        (list(np.zeros((rows, 1))), {"shuffle": True}),
    ]
    for source, options in sources:
        for epochs in (1, 3):
            loader = ps.Loader(source, R, batch_size=size, remainder=remainder, epochs=epochs, **options)
            for _ in range(2):
                assert len(loader) == epochs * want == len(list(loader))


def test_the_length_over_batches_of_the_sources_own(S: NamedSharding) -> None:
    for source in (list(three()), tuple(three()) + (), Dataset(list(three())), Sized(three, 3)):
        if isinstance(source, tuple):
            continue  # a tuple of arrays is columns
        for epochs in (1, 2):
            loader = ps.Loader(source, S, epochs=epochs)
            assert len(loader) == 3 * epochs == len(list(loader)) == len(loader)


def test_the_length_of_an_async_source_that_has_one(S: NamedSharding) -> None:
    class Sized:
        def __len__(self) -> int:
            return 3

        def __aiter__(self) -> AsyncIterator[np.ndarray]:
            return three_async()

    loader = ps.Loader(Sized(), S, epochs=2)
    assert len(loader) == 6 == len(list(loader))


def test_the_length_of_a_list_of_batches_whose_last_is_short(S: NamedSharding) -> None:
    short = [np.zeros(16), np.zeros(16), np.zeros(8)]
    for remainder in ("auto", "drop", "pad"):
        for options in ({}, {"epochs": 3}, {"shuffle": True, "epochs": 7}, {"shuffle": True, "seed": 4, "epochs": 7}):
            loader = ps.Loader(short, S, remainder=remainder, **options)
            for _ in range(2):
                assert len(loader) == len(list(loader))
    assert len(ps.Loader(short, S)) == 3
    assert len(ps.Loader(short, S, remainder="drop")) == 2
    assert len(ps.Loader([np.zeros(8), np.zeros(3)], S, remainder="drop")) == 1


def test_the_length_is_told_at_once(S: NamedSharding) -> None:
    """Also over more epochs than anybody could count."""
    many = 10**9
    short = [np.zeros(16), np.zeros(16), np.zeros(8)]
    rows = np.zeros((20, 1))
    assert len(ps.Loader(rows, S, batch_size=8, epochs=many)) == 2 * many
    assert len(ps.Loader(rows, S, batch_size=8, epochs=many, shuffle=True, remainder="pad")) == 3 * many
    assert len(ps.Loader(Sized(lambda: iter(rows), 20), S, batch_size=8, epochs=many)) == 2 * many
    assert len(ps.Loader(short, S, epochs=many, shuffle=True)) == 3 * many
    assert len(ps.Loader(short, S, epochs=many, remainder="drop")) == 2 * many
    assert len(ps.Loader(short[:2], S, epochs=many, remainder="drop", shuffle=True)) == 2 * many
    with pytest.raises(TypeError, match=f"{many} shuffled epochs of batches of different sizes"):
        len(ps.Loader(short, S, epochs=many, remainder="drop", shuffle=True))
    iterator = iter(ps.Loader(rows, S, batch_size=8, epochs=many))
    next(iterator)
    assert len(ps.Loader(rows, S, batch_size=8, epochs=many, state=iterator.state())) == 2 * many - 1
    iterator.close()


@pytest.mark.parametrize(
    ("source", "options"),
    [
        (three, {}),
        (Iterable(three), {}),
        (three_async, {}),
        (list(three()), {"epochs": None}),
        (np.zeros(16), {"batch_size": 8, "epochs": None}),
    ],
)
def test_where_no_length_is_known_there_is_none(source: Any, options: dict[str, Any], S: NamedSharding) -> None:
    loader = ps.Loader(source, S, **options)
    with pytest.raises(TypeError):
        len(loader)
    assert operator.length_hint(loader, 17) == 17
    if options.get("epochs", 1) is not None:
        assert len(list(loader)) == 3


def test_a_generator_has_no_length_and_can_be_listed(S: NamedSharding) -> None:
    loader = ps.Loader(three(), S)
    assert operator.length_hint(loader) == 0
    assert len(list(loader)) == 3


def test_a_loader_is_true_however_short_it_is(S: NamedSharding) -> None:
    """`if loader:` asks whether there is one."""
    assert bool(ps.Loader(np.zeros((0, 1)), S, batch_size=8))
    assert bool(ps.Loader(three, S))


# -- hooks and epochs


def test_positions_count_over_runs(S: NamedSharding, consume: Consume) -> None:
    loader = ps.Loader(np.arange(20, dtype=np.int32), S, batch_size=8, epochs=2, remainder="pad")
    first, second = consume(loader), consume(loader)
    want = [(e, 3 * e + i, i + 1, min(8 * i + 8, 20), i == 2) for e in range(4) for i in range(3)]
    assert places(first) + places(second) == want
    assert [p.run for _, p in first + second] == [0] * 6 + [1] * 6
    assert [p.first_row for _, p in first] == [0, 8, 16] * 2
    assert len(batches(first)) == 6
