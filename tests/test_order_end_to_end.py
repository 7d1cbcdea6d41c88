"""Batches come in source order, each row once an epoch, whatever the source, the workers, the mesh and the consumer."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import prefetchshard as ps
from consumers import Consume, batches, consumer, joined, places, values
from prefetchshard.reading import row_dealer

P = PartitionSpec
ROWS = 50
X = np.arange(ROWS * 3, dtype=np.int32).reshape(ROWS, 3)
Y = np.arange(ROWS, dtype=np.float32)


def mesh_2d() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))


def examples() -> Iterator[dict[str, Any]]:
    for i in range(ROWS):
        yield {"x": X[i], "y": Y[i]}


async def async_examples() -> AsyncIterator[dict[str, Any]]:
    for example in examples():
        yield example


class Rows:
    """A dataset."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> dict[str, Any]:
        if not 0 <= row < ROWS:
            raise IndexError(row)
        return {"x": X[row], "y": Y[row]}


class ManyRows(Rows):
    """A dataset that is asked for many rows at once."""

    def __getitems__(self, rows: list[int]) -> list[dict[str, Any]]:
        return [self[row] for row in rows]


class Iterable:
    def __iter__(self) -> Iterator[dict[str, Any]]:
        return examples()


class AsyncIterable:
    def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        return async_examples()


SOURCES: dict[str, Callable[[], Any]] = {
    "arrays": lambda: {"x": X, "y": Y},
    "arrays that are not contiguous": lambda: {"x": np.asfortranarray(X), "y": Y.repeat(2)[::2]},
    "dataset": Rows,
    "dataset asked for many": ManyRows,
    "list": lambda: list(examples()),
    "iterable": Iterable,
    "generator": examples,
    "factory": lambda: examples,
    "factory of arrays": lambda: lambda: {"x": X, "y": Y},
    "factory of a dataset": lambda: Rows,
    "async iterable": AsyncIterable,
    "async generator": async_examples,
    "async factory": lambda: async_examples,
}
ONE_SHOT = ("generator", "async generator")


def cut(size: int) -> Iterator[dict[str, Any]]:
    for start in range(0, ROWS, size):
        yield {"x": X[start : start + size].copy(), "y": Y[start : start + size].copy()}


async def async_cut(size: int) -> AsyncIterator[dict[str, Any]]:
    for batch in cut(size):
        yield batch


class Batches:
    """A dataset of batches."""

    def __init__(self, size: int) -> None:
        self.batches = list(cut(size))

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Any:
        return self.batches[index]


WHOLE: dict[str, Callable[[int], Any]] = {
    "list of batches": lambda size: list(cut(size)),
    "dataset of batches": Batches,
    "generator of batches": cut,
    "factory of batches": lambda size: lambda: cut(size),
    "async generator of batches": async_cut,
}


@pytest.mark.parametrize("kind", SOURCES)
def test_rows_come_in_source_order(kind: str, S: NamedSharding, consume: Consume) -> None:
    loader = ps.Loader(SOURCES[kind](), S, batch_size=8, workers=3, remainder="pad")
    seen = consume(loader)
    assert [batch["x"].shape for batch, _ in seen] == [(8, 3)] * 7
    assert np.array_equal(joined(seen, lambda batch: batch["x"])[:ROWS], X)
    assert np.array_equal(joined(seen, lambda batch: batch["y"])[:ROWS], Y)
    assert joined(seen, lambda batch: batch["mask"]).tolist() == [True] * ROWS + [False] * 6
    assert places(seen) == [(0, i, i + 1, min(8 * (i + 1), ROWS), i == 6) for i in range(7)]
    assert (loader.stats().rows, loader.stats().padded_rows, loader.stats().dropped_rows) == (ROWS, 6, 0)


@pytest.mark.parametrize("transform", [None, lambda batch: batch], ids=["plain", "by workers"])
@pytest.mark.parametrize("kind", WHOLE)
def test_whole_batches_come_in_source_order(kind: str, transform: Any, S: NamedSharding, consume: Consume) -> None:
    loader = ps.Loader(WHOLE[kind](8), S, workers=3, transform=transform, remainder="pad")
    seen = consume(loader)
    assert np.array_equal(joined(seen, lambda batch: batch["x"])[:ROWS], X)
    assert places(seen) == [(0, i, i + 1, min(8 * (i + 1), ROWS), i == 6) for i in range(7)]
    assert (loader.stats().rows, loader.stats().padded_rows) == (ROWS, 6)


@pytest.mark.parametrize("kind", [kind for kind in SOURCES if kind not in ONE_SHOT])
def test_two_epochs_have_each_row_twice(kind: str, S: NamedSharding) -> None:
    loader = ps.Loader(SOURCES[kind](), S, batch_size=8, workers=2, epochs=2)
    seen = consumer("sync")(loader)
    kept = ROWS - ROWS % 8
    assert np.array_equal(joined(seen, lambda batch: batch["y"]), np.concatenate([Y[:kept], Y[:kept]]))
    assert places(seen) == [(e, 6 * e + i, i + 1, 8 * (i + 1), i == 5) for e in range(2) for i in range(6)]
    assert (loader.stats().rows, loader.stats().dropped_rows) == (2 * kept, 2 * (ROWS - kept))


class OutOfTurn:
    """A dataset whose later rows are done before the earlier ones of a batch are."""

    def __init__(self, parts: int) -> None:
        self.done = [threading.Event() for _ in range(ROWS)]
        self.parts = parts

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> Any:
        # Of `parts` rows that are read at the same time, each by its worker, the last is done first.
        behind = row + 1
        if behind % self.parts and behind < ROWS // self.parts * self.parts:
            assert self.done[behind].wait(30)
        self.done[row].set()
        return X[row]


def test_workers_that_end_out_of_turn_keep_the_order(S: NamedSharding, consume: Consume, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_dealer, "LEAST_PART_SECONDS", 0.0)  # every batch is shared out among all workers, however cheap it is
    seen = consume(ps.Loader(OutOfTurn(8), S, batch_size=8, workers=8))
    assert np.array_equal(joined(seen), X[:48])


def test_batches_that_end_out_of_turn_keep_the_order(S: NamedSharding, consume: Consume) -> None:
    done = [threading.Event() for _ in range(6)]

    def transform(batch: Any) -> Any:
        i = int(batch["y"][0]) // 8
        if i % 2 == 0 and i < 6:
            assert done[i + 1].wait(30)  # each even one after the odd one behind it
        elif i < 6:
            done[i].set()
        return batch

    seen = consume(ps.Loader(cut(8), S, transform=transform, workers=2, remainder="drop"))
    assert np.array_equal(joined(seen, lambda batch: batch["x"]), X[:48])


@pytest.mark.parametrize("workers", [1, 2, 5, 8])
@pytest.mark.parametrize("kind", ["arrays", "dataset", "dataset asked for many", "generator"])
def test_neither_workers_nor_depth_change_a_batch(kind: str, workers: int, S: NamedSharding) -> None:
    for depth in (1, 7, "auto"):
        loader = ps.Loader(SOURCES[kind](), S, batch_size=16, workers=workers, depth=depth, transform=lambda e: {"z": e["x"] + 1})
        assert np.array_equal(joined(consumer("sync")(loader), lambda batch: batch["z"]), X[:48] + 1)


class Place(NamedTuple):
    devices: int
    sharding: Callable[[], Any]


PLACES: dict[str, Place] = {
    "one device": Place(1, lambda: jax.sharding.SingleDeviceSharding(jax.devices()[0])),
    "two devices": Place(2, lambda: Mesh(np.array(jax.devices()[:2]), ("data",))),
    "eight devices": Place(8, lambda: Mesh(np.array(jax.devices()), ("data",))),
    "devices in another order": Place(8, lambda: Mesh(np.array(jax.devices()[::-1]), ("data",))),
    "a model axis": Place(8, lambda: NamedSharding(mesh_2d(), P("data"))),
    "rows over both axes": Place(8, lambda: NamedSharding(mesh_2d(), P(("data", "model")))),
    "columns over the model axis": Place(
        8, lambda: {"x": NamedSharding(mesh_2d(), P("data", None)), "y": NamedSharding(mesh_2d(), P("data"))}
    ),
    "replicated": Place(8, lambda: NamedSharding(mesh_2d(), P())),
    "an explicit mesh": Place(8, lambda: NamedSharding(jax.make_mesh((4, 2), ("data", "model")), P("data"))),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ["arrays", "dataset", "generator"])
def test_the_mesh_changes_no_batch(kind: str, place: str) -> None:
    loader = ps.Loader(SOURCES[kind](), PLACES[place].sharding(), batch_size=8)
    seen = consumer("sync")(loader)
    assert np.array_equal(joined(seen, lambda batch: batch["x"]), X[:48])
    assert {len(batch["x"].devices()) for batch, _ in seen} == {PLACES[place].devices}


# -- shuffle


def order_of(source: Any, sharding: Any, **options: Any) -> list[list[int]]:
    """The rows of each epoch in the order in which they came."""
    options = {"batch_size": 8, "shuffle": True, "seed": 7, "remainder": "pad", **options}
    loader = ps.Loader(source, sharding, **options)
    epochs: dict[int, list[int]] = {}
    for batch, position in consumer(options.pop("way", "sync"))(loader):
        rows = np.asarray(batch["y"])[np.asarray(batch["mask"])]
        epochs.setdefault(position.epoch, []).extend(rows.astype(int).tolist())
    return list(epochs.values())


@pytest.mark.parametrize("kind", ["arrays", "dataset", "dataset asked for many", "list"])
def test_shuffle_is_a_permutation_of_each_epoch(kind: str, S: NamedSharding) -> None:
    first, second, third = order_of(SOURCES[kind](), S, epochs=3)
    assert sorted(first) == sorted(second) == sorted(third) == list(range(ROWS))
    assert first != second != third != first
    assert list(range(ROWS)) not in (first, second, third)


def test_one_seed_has_one_order_whatever_reads_it() -> None:
    want = order_of(SOURCES["arrays"](), PLACES["one device"].sharding(), epochs=2)
    for kind in ("arrays", "dataset", "dataset asked for many", "list"):
        for place in ("one device", "two devices", "eight devices", "a model axis"):
            for workers, size in ((1, 8), (3, 16), (8, 24)):
                assert order_of(SOURCES[kind](), PLACES[place].sharding(), epochs=2, workers=workers, batch_size=size) == want


def test_another_seed_has_another_order(S: NamedSharding) -> None:
    orders = [order_of(SOURCES["arrays"](), S, seed=seed)[0] for seed in (0, 1, 2**32, 2**32 + 1, 2**70)]
    assert len({tuple(order) for order in orders}) == len(orders)


def test_a_second_run_goes_on_with_the_epochs(S: NamedSharding) -> None:
    together = order_of(SOURCES["dataset"](), S, epochs=4)
    loader = ps.Loader(SOURCES["dataset"](), S, batch_size=8, shuffle=True, seed=7, epochs=2, remainder="pad")
    apart: dict[int, list[int]] = {}
    for _ in range(2):
        for batch, position in consumer("sync")(loader):
            apart.setdefault(position.epoch, []).extend(np.asarray(batch["y"])[np.asarray(batch["mask"])].astype(int).tolist())
    assert list(apart) == [0, 1, 2, 3]
    assert list(apart.values()) == together


def test_shuffled_batches_of_the_sources_own(S: NamedSharding) -> None:
    seen = consumer("sync")(ps.Loader(list(cut(8))[:6], S, shuffle=True, seed=1, epochs=2))
    starts = [int(batch["y"][0]) // 8 for batch, _ in seen]
    assert sorted(starts[:6]) == sorted(starts[6:]) == list(range(6))
    assert starts[:6] != starts[6:]
    assert all(np.array_equal(batch["x"], X[8 * i : 8 * i + 8]) for (batch, _), i in zip(seen, starts, strict=True))


@pytest.mark.parametrize("kind", ["generator", "iterable", "factory", "async iterable"])
def test_shuffle_without_random_access_is_refused(kind: str, S: NamedSharding) -> None:
    with pytest.raises(ps.ConfigError, match=r"shuffle=True needs random access"):
        ps.Loader(SOURCES[kind](), S, batch_size=8, shuffle=True)


# -- every shape of batch


class Point(NamedTuple):
    x: Any
    y: Any


@pytest.mark.parametrize(
    "source",
    [X, (X, Y), Point(X, Y), {"a": {"b": X}, "c": (Y, X)}],
    ids=["one array", "tuple", "namedtuple", "nested"],
)
def test_containers_come_back_as_they_were(source: Any, S: NamedSharding, consume: Consume) -> None:
    seen = consume(ps.Loader(source, S, batch_size=16))
    assert {jax.tree.structure(batch) for batch in batches(seen)} == {jax.tree.structure(source)}
    whole = jax.tree.map(lambda *parts: np.concatenate(parts), *[values(batch) for batch in batches(seen)])
    assert jax.tree.all(jax.tree.map(np.array_equal, whole, jax.tree.map(lambda leaf: leaf[:48], source)))
