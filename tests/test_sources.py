"""What may be a source, how each kind is read, and what is said of the others."""

from __future__ import annotations

import collections
import functools
import io
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

import prefetchshard as ps
from prefetchshard.sources import recognise

X = np.arange(16, dtype=np.float32).reshape(16, 1)
ROWS = [{"x": row} for row in X]
BATCHES = [{"x": X[:8]}, {"x": X[8:]}]


def read(source: Any, sharding: Any, **options: Any) -> list[float]:
    """All rows, in the order in which they came."""
    return [float(row) for batch in ps.Loader(source, sharding, **options) for row in np.asarray(batch["x"]).ravel()]


class Both(NamedTuple):
    x: Any
    y: Any


class Dataset:
    """Random access, and nothing else."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, row: int) -> Any:
        assert type(row) is int
        if not 0 <= row < len(self.items):
            raise IndexError(row)
        return self.items[row]


class File(Dataset):
    """As h5py's datasets are: arrays by behaviour only."""

    dtype = np.dtype(np.float32)
    shape = (16, 1)
    ndim = 2


class Many(Dataset):
    """As torch and Hugging Face ask for several at once."""

    def __init__(self, items: list[Any]) -> None:
        super().__init__(items)
        self.asked: list[list[int]] = []

    def __getitems__(self, rows: list[int]) -> list[Any]:
        assert all(type(row) is int for row in rows)
        self.asked.append(rows)
        return [self.items[row] for row in rows]


class Again:
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


class Once:
    """An iterator that is no generator."""

    def __init__(self, items: list[Any]) -> None:
        self.items = iter(items)

    def __iter__(self) -> Once:
        return self

    def __next__(self) -> Any:
        return next(self.items)


class NextOnly:
    def __init__(self, items: list[Any]) -> None:
        self.__next__ = None
        self.items = iter(items)

    def __next__(self) -> Any:  # type: ignore[no-redef]
        return next(self.items)


class AsyncAgain:
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    async def __aiter__(self) -> AsyncIterator[Any]:
        for item in self.items:
            yield item


class AsyncOnce:
    def __init__(self, items: list[Any]) -> None:
        self.items = iter(items)

    def __aiter__(self) -> AsyncOnce:
        return self

    async def __anext__(self) -> Any:
        for item in self.items:
            return item
        raise StopAsyncIteration


async def as_async_generator(items: list[Any]) -> AsyncIterator[Any]:
    for item in items:
        yield item


KINDS: dict[str, tuple[str, Callable[[list[Any]], Any]]] = {
    "list": ("dataset", list),
    "deque": ("dataset", collections.deque),
    "dataset": ("dataset", Dataset),
    "many": ("dataset", Many),
    "iterable": ("iterator", Again),
    "generator": ("iterator", lambda items: (item for item in items)),
    "iterator": ("iterator", Once),
    "map": ("iterator", lambda items: map(dict, items)),
    "dict values": ("iterator", lambda items: dict(enumerate(items)).values()),
    "async iterable": ("async iterator", AsyncAgain),
    "async iterator": ("async iterator", AsyncOnce),
    "async generator": ("async iterator", as_async_generator),
    "factory of a list": ("factory", lambda items: lambda: items),
    "factory of a dataset": ("factory", lambda items: lambda: Many(items)),
    "factory of an iterable": ("factory", lambda items: lambda: Again(items)),
    "factory of a generator": ("factory", lambda items: lambda: (item for item in items)),
    "factory of an async generator": ("factory", lambda items: lambda: as_async_generator(items)),
    "async generator function": ("factory", lambda items: functools.partial(as_async_generator, items)),
    "a bound method": ("factory", lambda items: Again(items).__iter__),
    "a class": ("factory", lambda items: type("Made", (Again,), {"__init__": lambda self: Again.__init__(self, items)})),
}


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_as_batches_and_as_examples(name: str, R: NamedSharding) -> None:
    kind, make = KINDS[name]
    assert recognise(make(BATCHES), batched=False).kind == kind
    assert read(make(BATCHES), R) == X.ravel().tolist()
    for size in (1, 4, 5):
        assert read(make(ROWS), R, batch_size=size) == X[: 16 // size * size].ravel().tolist()
    assert read(make(ROWS), R, batch_size=4, transform=lambda row: {"x": row["x"] + 1}) == (X + 1).ravel().tolist()


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_for_two_epochs(name: str, R: NamedSharding) -> None:
    _, make = KINDS[name]
    source = make(BATCHES)
    if hasattr(source, "__next__") or hasattr(source, "__anext__"):
        with pytest.raises(ps.ConfigError, match=r"epochs=2 over a one-shot iterator.*function that makes a new one"):
            ps.prefetch(source, R, epochs=2)
    else:
        assert read(source, R, epochs=2) == [*X.ravel().tolist()] * 2


ARRAYS: dict[str, Any] = {
    "an array": X,
    "a dict": {"x": X},
    "a tuple": (X,),
    "a named tuple": Both(X, X),
    "deeper": {"a": {"x": X}, "b": (X, {"c": X})},
    "with None": {"x": X, "none": None},
    "a default dict": collections.defaultdict(list, x=X),
    "text": {"x": X, "name": np.array(["a"] * 16)},
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_are_recognised(name: str) -> None:
    tree = ARRAYS[name]
    assert recognise(tree, batched=True).kind == "arrays"
    assert recognise(tree, batched=True).length == 16
    with pytest.raises(ps.ConfigError, match=r"arrays, and without batch_size.*batch_size=.*\[batch\]"):
        ps.prefetch(tree, ps.HOST)
    with pytest.raises(ps.ConfigError, match="without batch_size"):
        next(iter(ps.prefetch(lambda: tree, ps.HOST)))
    (batch,) = ps.prefetch([tree], ps.HOST)
    assert jax.tree.structure(batch) == jax.tree.structure(tree)


@pytest.mark.parametrize("name", [name for name in ARRAYS if name != "with None"])
def test_factories_of_arrays(name: str) -> None:
    tree = ARRAYS[name]
    got = list(ps.Loader(lambda: tree, ps.HOST, batch_size=8))
    want = list(ps.Loader(tree, ps.HOST, batch_size=8))
    assert len(got) == 2
    assert jax.tree.structure(got) == jax.tree.structure(want)
    assert [leaf.tolist() for leaf in jax.tree.leaves(got)] == [leaf.tolist() for leaf in jax.tree.leaves(want)]


@pytest.mark.parametrize("source", [range(16), collections.deque(range(16)), list(range(16)), tuple(range(16)), np.arange(16)], ids=repr)
def test_numbers_are_examples(source: Any, R: NamedSharding) -> None:
    assert [np.asarray(batch).tolist() for batch in ps.Loader(source, R, batch_size=8)] == [[*range(8)], [*range(8, 16)]]


def test_arrays_by_behaviour_are_datasets(R: NamedSharding) -> None:
    assert recognise(File(list(X)), batched=True).kind == "dataset"
    assert np.array_equal(np.concatenate([np.asarray(b) for b in ps.Loader(File(list(X)), R, batch_size=4, workers=2)]), X)


class TorchLike:
    """torch's base class of all datasets has a `__getitem__`, also where they can only be iterated."""

    def __getitem__(self, row: int) -> Any:
        raise NotImplementedError


class IterableDataset(TorchLike):
    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[Any]:
        return iter(BATCHES)


IterableDataset.__module__ = "torch.utils.data.dataset"


def test_torch_datasets_that_can_only_be_iterated(R: NamedSharding) -> None:
    class Mine(IterableDataset):
        pass

    assert read(Mine(), R, epochs=2) == [*X.ravel().tolist()] * 2
    assert len(ps.prefetch(Mine(), R)) == 2


# --- what is no source


class Table:
    """As a data frame is: has a length, and its items are columns."""

    def __len__(self) -> int:
        return 16

    def keys(self) -> list[str]:
        return ["x"]

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __getitem__(self, key: str) -> Any:
        return {"x": X}[key]


REFUSED: dict[str, tuple[Any, str]] = {
    "None": (None, r"the source is None"),
    "str": ("data.tfrecord", r"a str is not a source .*open the file"),
    "bytes": (b"data", r"a bytes is not a source .*open the file"),
    "bytearray": (bytearray(b"data"), r"a bytearray is not a source"),
    "int": (5, r"builtins\.int is no source: it has none of __getitem__"),
    "object": (object(), r"builtins\.object is no source"),
    "jax.Array": (jax.numpy.ones(16), r"a jax\.Array.*np\.asarray\(source\).*list of batches"),
    "mapping of jax.Arrays": ({"x": jax.numpy.ones(16)}, r"entry 'x' is a jaxlib.*not a NumPy array.*np\.asarray"),
    "tuple of jax.Arrays": ((jax.numpy.ones(16),), r"entry '\[0\]' is a jaxlib.*np\.asarray"),
    "mapping of lists": ({"x": [1, 2], "y": [1, 2]}, r"entry 'x' is a list.*every entry an array.*list of examples"),
    "mapping of both": ({"x": X, "y": {"z": [1, 2]}}, r"entry 'y\.z' is a list"),
    "mapping of scalars": ({"x": X, "n": 3}, r"entry 'n' is a builtins\.int"),
    "mapping of text": ({"x": "abc"}, r"entry 'x' is a builtins\.str"),
    "mapping of functions": ({"x": len}, r"entry 'x' is a builtins\.builtin_function_or_method"),
    "mapping of datasets": ({"train": Dataset(ROWS)}, r"entry 'train' is a .*Dataset"),
    "empty mapping": ({}, r"mapping of type dict without arrays"),
    "unknown mapping": (collections.UserDict(x=X), r"mapping of type UserDict.*dict\(source\)"),
    "mixed keys": ({1: X, "a": X}, r"cannot take the source apart.*keys of one type"),
    "differing sizes": ({"x": X, "y": X[:3]}, r"differ in their leading size: \{'x': 16, 'y': 3\}"),
    "differing sizes in a tuple": ((X, X[:3]), r"differ in their leading size.*list for separate items"),
    "no axis": (np.array(3.0), r"\(the source\) has no axis of rows"),
    "an entry without axis": ({"x": X, "y": np.array(3.0)}, r"array y has no axis of rows"),
    "a table": (Table(), r"Table, is asked by key, not by row.*np\.asarray\(source\[key\]\).*list of examples"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_source_says_the_way_out(name: str, S: NamedSharding) -> None:
    source, words = REFUSED[name]
    for size in (None, 8):
        with pytest.raises(ps.ConfigError, match=words):
            ps.Loader(source, S, batch_size=size)
        if source is not None:
            with pytest.raises(ps.ConfigError, match=words):
                next(iter(ps.Loader(lambda: source, S, batch_size=size)))


def test_what_a_factory_must_not_return(S: NamedSharding) -> None:
    async def wrong() -> Any:
        return BATCHES

    with pytest.raises(ps.SourceError, match=r"factory .*nothing.* returned None for epoch 0"):
        next(iter(ps.prefetch(nothing, S)))
    with pytest.raises(ps.ConfigError, match="async function; make it an async generator"):
        next(iter(ps.prefetch(lambda: wrong(), S)))
    with pytest.raises(ps.ConfigError, match="returned something callable"):
        next(iter(ps.prefetch(lambda: nothing, S)))


def nothing() -> None:
    pass


def test_files_are_iterators(S: NamedSharding) -> None:
    lines = io.StringIO("".join(f"{i}\n" for i in range(16)))
    assert [np.asarray(batch).tolist() for batch in ps.Loader(lines, S, batch_size=8, transform=int)] == [[*range(8)], [*range(8, 16)]]


# --- datasets


def test_several_are_asked_for_at_once(R: NamedSharding) -> None:
    for workers, shuffle in ((1, False), (3, False), (2, True)):
        source = Many(ROWS)
        got = read(source, R, batch_size=8, workers=workers, shuffle=shuffle)
        assert sorted(got) == X.ravel().tolist()
        assert sorted(row for rows in source.asked for row in rows) == [*range(16)]
        assert len(source.asked) <= 2 * workers


@pytest.mark.parametrize("wrong", [lambda rows: rows[:-1], lambda rows: [*rows, *rows], lambda rows: []], ids=["fewer", "more", "none"])
def test_another_number_than_asked_for(wrong: Any, R: NamedSharding) -> None:
    class Wrong(Many):
        def __getitems__(self, rows: list[int]) -> list[Any]:
            return wrong(super().__getitems__(rows))

    with pytest.raises(ps.SourceError, match=r"Wrong\.__getitems__ was asked for \d rows and returned \d+"):
        read(Wrong(ROWS), R, batch_size=8)


def test_many_may_come_as_any_iterable(R: NamedSharding) -> None:
    class Lazy(Many):
        def __getitems__(self, rows: list[int]) -> Any:
            return iter(super().__getitems__(rows))

    assert read(Lazy(ROWS), R, batch_size=8) == X.ravel().tolist()


def test_an_index_error_inside_the_length_is_an_error(R: NamedSharding) -> None:
    """The old protocol of iteration would take it for the end."""

    class Short(Dataset):
        def __len__(self) -> int:
            return 18

    for size in (None, 2, 9):
        with pytest.raises(IndexError) as caught:
            list(ps.Loader(Short(ROWS if size else BATCHES * 8), R, batch_size=size, workers=2))
        assert any(note.startswith("prefetchshard: while reading batch") for note in caught.value.__notes__)
        with pytest.raises(IndexError):
            list(ps.Loader(lambda size=size: Short(ROWS if size else BATCHES * 8), R, batch_size=size))


def test_stop_iteration_inside_a_dataset_is_an_error(R: NamedSharding) -> None:
    class Stops(Dataset):
        def __getitem__(self, row: int) -> Any:
            if row == 5:
                raise StopIteration
            return super().__getitem__(row)

    for source in (Stops(ROWS), lambda: Stops(ROWS)):
        with pytest.raises(ps.SourceError, match="raised StopIteration") as caught:
            read(source, R, batch_size=4)
        assert isinstance(caught.value.__cause__, StopIteration)


def test_one_worker_asks_from_one_thread(R: NamedSharding) -> None:
    class Whose(Dataset):
        threads: set[int] = set()

        def __getitem__(self, row: int) -> Any:
            self.threads.add(threading.get_ident())
            return super().__getitem__(row)

    assert read(Whose(ROWS), R, batch_size=4, workers=1) == X.ravel().tolist()
    assert len(Whose.threads) == 1
    assert threading.get_ident() not in Whose.threads


# --- epochs


class Told:
    """Writes down what it is told and asked, and whether it is told while it is being asked."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.epoch: int | None = None
        self.log: list[tuple[int, int]] = []
        self.inside = 0
        self.disturbed = False
        self.lock = threading.Lock()

    def set_epoch(self, epoch: int) -> None:
        self.disturbed |= self.inside > 0
        self.epoch = epoch

    def item(self, row: int) -> Any:
        with self.lock:
            self.inside += 1
        epoch = self.epoch
        assert epoch is not None
        self.log.append((epoch, row))
        with self.lock:
            self.inside -= 1
        return {"x": np.float32([epoch * 100 + row])}


class ToldDataset(Told):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, row: int) -> Any:
        return self.item(row)


class ToldIterable(Told):
    def __iter__(self) -> Iterator[Any]:
        return (self.item(row) for row in range(16))


class ToldAsync(Told):
    async def __aiter__(self) -> AsyncIterator[Any]:
        for row in range(16):
            yield self.item(row)


@pytest.mark.parametrize("kind", [ToldDataset, ToldIterable, ToldAsync])
@pytest.mark.parametrize("options", [{}, {"transform": lambda x: x}, {"workers": 4}, {"remainder": "pad"}], ids=" ".join)
def test_sources_are_told_the_epoch_before_it_begins(kind: type[Told], options: dict[str, Any], R: NamedSharding) -> None:
    source = kind("told")
    loader = ps.Loader(source, R, batch_size=3, epochs=3, **options)
    rows = [float(x) for batch in loader for x in np.asarray(batch["x"])[np.asarray(batch.get("mask", [True] * 3))].ravel()]
    each = 16 if "remainder" in options else 15
    assert rows == [100 * epoch + row for epoch in range(3) for row in range(each)]
    assert not source.disturbed
    assert [float(next(iter(loader))["x"][0, 0])] == [300.0]  # the next run goes on counting


def test_it_is_not_told_while_it_is_still_read(R: NamedSharding) -> None:
    class Slow(ToldDataset):
        """The last row of an epoch takes its time, and would see it if it were told meanwhile."""

        told = threading.Event()

        def set_epoch(self, epoch: int) -> None:
            super().set_epoch(epoch)
            self.told.set()

        def item(self, row: int) -> Any:
            if row == 15:
                self.told.clear()
                with self.lock:
                    self.inside += 1
                self.told.wait(0.05)
                with self.lock:
                    self.inside -= 1
            return super().item(row)

    source = Slow("slow")
    for size in (1, 8):
        assert len(list(ps.Loader(source, R, batch_size=size, epochs=3, workers=4))) == 48 // size
    assert not source.disturbed


def test_it_is_told_of_an_epoch_that_nothing_is_read_of(R: NamedSharding) -> None:
    class Empty(ToldDataset):
        def __len__(self) -> int:
            return 0

    source = Empty("empty")
    assert list(ps.Loader(source, R, batch_size=2, epochs=3)) == []
    assert source.epoch == 2


def test_factories_get_the_epoch(R: NamedSharding) -> None:
    told: list[Any] = []

    def by_name(epoch: int) -> Any:
        told.append(epoch)
        return [{"x": np.full((1, 1), epoch)}]

    def by_keyword(size: int = 1, *, epoch: int = -1) -> Any:
        return by_name(epoch)

    async def in_async(epoch: int) -> AsyncIterator[Any]:
        for batch in by_name(epoch):
            yield batch

    class Called:
        def __call__(self, epoch: int) -> Any:
            return by_name(epoch)

    factories: list[Any] = [by_name, by_keyword, in_async, Called(), functools.partial(by_keyword, 2), lambda epoch: iter(by_name(epoch))]
    for factory in factories:
        told.clear()
        loader = ps.prefetch(factory, R, epochs=2)
        assert read_values(loader) == [0, 1]
        assert read_values(loader) == [2, 3]
        assert told == [0, 1, 2, 3]


def read_values(loader: ps.Loader) -> list[float]:
    return [float(batch["x"][0, 0]) for batch in loader]


@pytest.mark.parametrize("kind", [ToldDataset, ToldIterable, ToldAsync])
def test_what_factories_return_is_told_too(kind: type[Told], R: NamedSharding) -> None:
    source = kind("told")
    assert read(lambda: source, R, batch_size=8, epochs=2) == [100.0 * epoch + row for epoch in range(2) for row in range(16)]


def test_factories_may_change_what_they_return(R: NamedSharding) -> None:
    def factory(epoch: int) -> Any:
        return [ROWS, iter(ROWS), {"x": X}, Dataset(ROWS), as_async_generator(ROWS), lambda: ROWS][epoch]

    loader = iter(ps.Loader(factory, R, batch_size=16, epochs=6))
    for _ in range(5):
        assert np.array_equal(next(loader)["x"], X)
    with pytest.raises(ps.ConfigError, match="returned something callable"):
        next(loader)


# --- what is said about them


def test_what_needs_random_access_says_so(S: NamedSharding) -> None:
    for name, (kind, make) in KINDS.items():
        if kind == "dataset":
            continue
        with pytest.raises(ps.ConfigError, match=f"shuffle=True needs random access .*source is an? {re.escape(kind)}"):
            ps.Loader(make(ROWS), S, batch_size=8, shuffle=True)
        assert kind in repr(ps.Loader(make(ROWS), S, batch_size=8)), name


def test_closing_a_source_that_was_given_or_opened(R: NamedSharding) -> None:
    """What is given one-shot, and what the loader opened itself, is closed; what it was opened from is not."""

    class Closable(Once):
        closed = False

        def close(self) -> None:
            self.closed = True

    class Opens:
        closed = False

        def __init__(self) -> None:
            self.opened: list[Closable] = []

        def __iter__(self) -> Iterator[Any]:
            self.opened.append(Closable(BATCHES))
            return self.opened[-1]

        def close(self) -> None:
            self.closed = True

    given, opens = Closable(BATCHES), Opens()
    assert read(given, R) == X.ravel().tolist()
    assert given.closed
    assert read(opens, R, epochs=2) == [*X.ravel().tolist()] * 2
    assert [opened.closed for opened in opens.opened] == [True, True]
    assert not opens.closed
