"""Columns, tables and loaders of other libraries as sources, by what they look like; the real ones are in the tests marked `ecosystem`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from jax.sharding import NamedSharding

import prefetchshard as ps

X, Y = np.arange(32, dtype=np.float32).reshape(16, 2), np.arange(16)


class Column:
    """As h5py's and zarr's: an array by its behaviour."""

    shape, dtype = (16,), np.dtype(np.int64)

    def __len__(self) -> int:
        return 16

    def __getitem__(self, key: Any) -> Any:
        return Y[key]

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return Y


class Table:
    """As pandas' and polars': asked by name, it gives a column."""

    columns = ("a", "b")

    def __len__(self) -> int:
        return 16

    def __getitem__(self, name: Any) -> Any:
        return Column()

    def __dataframe__(self) -> Any:
        raise AssertionError


class Keyed:
    def keys(self) -> tuple[str, ...]:
        return ("a",)

    def __len__(self) -> int:
        return 1

    def __getitem__(self, key: Any) -> Any:
        return Y


@pytest.mark.parametrize("options", [{}, {"batch_size": 8}], ids=["whole", "rows"])
@pytest.mark.parametrize(
    ("source", "words"),
    [
        (Table(), r"Table, is a table: pass its columns.*source\.columns"),
        (Keyed(), r"Keyed, is asked by key, not by row.*source\.keys"),
        ((X, Column()), r"entry '\[1\]' is a .*Column, not a NumPy array.*np\.asarray"),
        ((Column(), Column()), r"entry '\[0\]' is a .*Column"),
        ({"x": X, "y": Column()}, r"entry 'y' is a .*Column"),
    ],
    ids=["table", "keyed", "tuple", "tuple of columns", "dict"],
)
def test_columns_and_tables_are_refused_with_the_way_out(source: Any, words: str, options: dict[str, Any]) -> None:
    with pytest.raises(ps.ConfigError, match=words):
        ps.Loader(source, **options)


# -- loaders like torch's


class Sampler:
    def __init__(self) -> None:
        self.told: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.told.append(epoch)


class DataLoader:
    def __init__(self, **parts: Any) -> None:
        self.num_workers = 0
        self.sampler = self.batch_sampler = self.dataset = None
        vars(self).update(parts)

    def __iter__(self) -> Iterator[Any]:
        yield np.zeros(8, np.float32)


DataLoader.__module__ = "torch.utils.data.dataloader"


def test_a_loader_that_batches_is_told_so() -> None:
    with pytest.raises(ps.ConfigError, match=r"DataLoader, batches already: leave batch_size out.*ps\.rebatch"):
        ps.Loader(DataLoader(batch_sampler=object()), batch_size=8)
    assert len(list(ps.Loader(DataLoader(), ps.HOST, batch_size=1))) == 1  # with batch_size=None it gives examples


@pytest.mark.parametrize("where", ["sampler", "batch_sampler", "inside the batch_sampler", "dataset"])
def test_the_sampler_of_a_loader_is_told_the_epoch(where: str, S: NamedSharding) -> None:
    sampler = Sampler()
    inner = type("BatchSampler", (), {"sampler": sampler})()
    loader = DataLoader(**({"batch_sampler": inner} if where.startswith("inside") else {where: sampler}))
    for form in (loader, lambda: loader):
        sampler.told.clear()
        batches = iter(ps.prefetch(form, S, epochs=3))
        next(batches)
        next(batches)
        state = batches.state()
        assert len(list(batches)) == 1
        assert sampler.told == [0, 1, 2]
        sampler.told.clear()
        assert len(list(ps.prefetch(form, S, epochs=3, state=state))) == 1
        assert sampler.told[-1] == 2


def test_a_number_that_was_set_by_hand_counts_on(S: NamedSharding) -> None:
    """Who makes a loader for each epoch calls `set_epoch` himself; the loader's own number is 0 each time."""

    class Seeded(Sampler):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            super().set_epoch(epoch)
            self.epoch = epoch

    sampler = Seeded()
    for epoch in (3, 7):
        sampler.set_epoch(epoch)
        sampler.told.clear()
        list(ps.prefetch(DataLoader(sampler=sampler), S, epochs=2))
        assert sampler.told == [epoch, epoch + 1]


# -- iterators that set themselves up where a loop begins


class SetUp:
    def __iter__(self) -> SetUp:
        self.left = iter([X[:8], X[8:]])
        return self

    def __next__(self) -> np.ndarray:
        return next(self.left)


class SetUpAsync:
    def __aiter__(self) -> SetUpAsync:
        self.left = iter([X[:8], X[8:]])
        return self

    async def __anext__(self) -> np.ndarray:
        try:
            return next(self.left)
        except StopIteration:
            raise StopAsyncIteration from None


@pytest.mark.parametrize("source", [SetUp, SetUp(), lambda: SetUp(), SetUpAsync, SetUpAsync(), lambda: SetUpAsync()], ids="ABCDEF")
def test_it_is_begun_as_a_for_loop_begins_it(source: Any, S: NamedSharding) -> None:
    assert np.concatenate([np.asarray(batch) for batch in ps.prefetch(source, S)]).tolist() == X.tolist()


# -- the real ones


@pytest.mark.ecosystem
def test_tensors_are_columns(S: NamedSharding) -> None:
    import torch

    x, y = torch.from_numpy(X), torch.arange(16)
    for source in ((x, y), {"x": x, "y": y}):
        batches = list(ps.Loader(source, S, batch_size=8))
        first = batches[0][0] if isinstance(source, tuple) else batches[0]["x"]
        assert len(batches) == 2
        assert np.asarray(first).tolist() == X[:8].tolist()
    assert [np.asarray(b).tolist() for b in ps.Loader(y, S, batch_size=8)] == [list(range(8)), list(range(8, 16))]
    (half,) = ps.Loader(torch.ones(8, dtype=torch.bfloat16), S, batch_size=8)
    assert str(half.dtype) == "bfloat16"
    (graded,) = ps.Loader(torch.ones(8, requires_grad=True), S, batch_size=8)
    assert np.asarray(graded).tolist() == [1] * 8
    with pytest.raises(ps.LeafTypeError, match="sparse"):
        ps.Loader(torch.eye(8).to_sparse(), S, batch_size=8)


@pytest.mark.ecosystem
def test_a_real_loader_and_its_sampler(S: NamedSharding) -> None:
    import torch

    class Shifted(torch.utils.data.Sampler[int]):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[int]:
            return iter(np.roll(np.arange(16), self.epoch).tolist())

        def __len__(self) -> int:
            return 16

    data = torch.utils.data.TensorDataset(torch.arange(16))
    loader = torch.utils.data.DataLoader(data, batch_size=8, sampler=Shifted())
    order = [int(b[0][0]) for b in ps.prefetch(loader, S, epochs=2)]
    assert order == [0, 8, 15, 7]
    with pytest.raises(ps.ConfigError, match="batches already"):
        ps.Loader(loader, S, batch_size=8)


@pytest.mark.ecosystem
def test_a_stream_with_a_shuffle_buffer_is_resumed_exactly(S: NamedSharding) -> None:
    import datasets

    def make(state: ps.LoaderState | None = None) -> ps.Loader[Any]:
        stream = datasets.Dataset.from_dict({"id": list(range(192))}).to_iterable_dataset(num_shards=4).shuffle(seed=3, buffer_size=32)
        return ps.Loader(stream, S, batch_size=16, state=state)

    def ids(loader: Any) -> list[int]:
        return [int(i) for batch in loader for i in np.asarray(batch["id"])]

    whole = ids(make())
    assert sorted(whole) == list(range(192))
    iterator = iter(make())
    head = [int(i) for _ in range(5) for i in np.asarray(next(iterator)["id"])]
    state = ps.LoaderState.decode(iterator.state().encode())
    iterator.close()
    assert state.resumes_by == "replay"
    assert head + ids(make(state)) == whole


@pytest.mark.ecosystem
@pytest.mark.parametrize("persistent", [False, True])
def test_leaving_a_loader_with_worker_processes_says_nothing(persistent: bool, S: NamedSharding) -> None:
    """Its own end takes half a second: that is no reason for a warning, nor to hide the error of the loop."""
    import torch

    data = torch.utils.data.TensorDataset(torch.arange(4096))
    source = torch.utils.data.DataLoader(data, 16, num_workers=2, multiprocessing_context="spawn", persistent_workers=persistent)

    def leave(by: Exception | None) -> None:
        with ps.prefetch(source, S) as loader:
            (first,) = next(iter(loader))
            assert np.asarray(first).tolist() == list(range(16))
            if by is not None:
                raise by

    leave(None)
    with pytest.raises(ZeroDivisionError) as caught:
        leave(ZeroDivisionError())
    assert not hasattr(caught.value, "__notes__")
