"""For any source, batch size, workers, depth, remainder, epochs, mesh and consumer: the rows of the source, in order, each once."""

from __future__ import annotations

import itertools
import math
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import prefetchshard as ps
from consumers import WAYS, Seen, consumer

P = PartitionSpec
FEW = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
MANY = settings(max_examples=1500, deadline=None, suppress_health_check=list(HealthCheck))


# -- places


def _mesh(*sizes: int) -> Mesh:
    return Mesh(np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes), ("data", "model")[: len(sizes)])


PLACES: dict[str, tuple[int, Callable[[], Any]]] = {
    "one": (1, lambda: NamedSharding(_mesh(1), P("data"))),
    "two": (2, lambda: _mesh(2)),
    "eight": (8, lambda: _mesh(8)),
    "model axis": (4, lambda: NamedSharding(_mesh(4, 2), P("data"))),
    "both axes": (8, lambda: NamedSharding(_mesh(4, 2), P(("data", "model")))),
    "explicit": (4, lambda: NamedSharding(jax.make_mesh((4, 2), ("data", "model")), P("data"))),
    "replicated": (1, lambda: NamedSharding(_mesh(8), P())),
    "device": (1, lambda: jax.sharding.SingleDeviceSharding(jax.devices()[5])),
    "host": (1, lambda: ps.HOST),
}


# -- sources: each says in what order its rows come

Tree = dict[str, np.ndarray]


def table(rows: int) -> Tree:
    """Leaves of several dtypes and shapes; from each row its number can be told."""
    i = np.arange(rows)
    return {
        "id": i.astype(np.int32),
        "x": (i[:, None] * 8 + np.arange(3)).astype(np.float32),
        "b": i % 2 == 0,
        "h": (i[:, None, None] * np.ones((1, 2, 2))).astype(np.float16),
    }


def row_of(tree: Tree, i: int) -> Any:
    return {name: leaf[i] for name, leaf in tree.items()}


def parts_of(tree: Tree, size: int) -> list[Tree]:
    rows = len(tree["id"])
    return [{name: leaf[start : start + size] for name, leaf in tree.items()} for start in range(0, rows, size)]


class Dataset:
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


class Many(Dataset):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self.items[index] for index in indices]


async def asynchronously(items: list[Any]) -> AsyncIterator[Any]:
    for item in items:
        yield item


def with_one_buffer(items: list[Any]) -> Iterator[Any]:
    """A source that overwrites what it yielded."""
    if items:
        buffer = jax.tree.map(np.array, items[0])
        for item in items:
            if jax.tree.map(np.shape, item) != jax.tree.map(np.shape, buffer):
                buffer = jax.tree.map(np.array, item)
            jax.tree.map(lambda into, leaf: np.copyto(into, leaf), buffer, item)
            yield buffer


OF_ITEMS: dict[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "dataset": Dataset,
    "many": Many,
    "generator": iter,
    "one buffer": with_one_buffer,
    "async generator": asynchronously,
    "factory": lambda items: lambda: iter(items),
    "factory of one buffer": lambda items: lambda: with_one_buffer(items),
    "factory of a dataset": lambda items: lambda: Dataset(items),
    "async factory": lambda items: lambda: asynchronously(items),
}
ONE_SHOT = ("generator", "one buffer", "async generator")
RANDOM_ACCESS = ("arrays", "list", "dataset", "many")


def identity(item: Any) -> Any:
    return item


def stack(examples: Any) -> Any:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *examples) if isinstance(examples, list) else examples


@st.composite
def loaders(draw: Any) -> tuple[str, dict[str, Any]]:
    """What to make a loader of, and what is expected of it. Whole batches that stay on the host are not among them: nobody looks inside."""
    split, place = PLACES[name := draw(st.sampled_from(sorted(PLACES)))]
    size = split * draw(st.integers(1, 3))
    rows = draw(st.integers(0, 4 * size + 3))
    by_rows = name == "host" or draw(st.booleans())
    kind = draw(st.sampled_from(["arrays", *OF_ITEMS] if by_rows else sorted(OF_ITEMS)))
    remainder = draw(st.sampled_from(["drop", "keep", "pad", "error"]))
    shuffle = kind in RANDOM_ACCESS and draw(st.booleans())
    if remainder == "error" or (not by_rows and (shuffle or rows < size)):
        rows -= rows % size  # of whole batches the first tells what is short, so it has to be a full one
    if remainder == "keep":
        rows -= rows % split  # the last batch is to fit its sharding
    if remainder == "drop" and by_rows and 0 < rows < size:
        rows += size  # else there is no batch, which is an error
    options: dict[str, Any] = {
        "remainder": remainder,
        "workers": draw(st.integers(1, 8)),
        "depth": draw(st.integers(1, 7) | st.just("auto")),
        "epochs": 1 if kind in ONE_SHOT else draw(st.integers(1, 3)),
    }
    if by_rows:
        options["batch_size"] = size
    if draw(st.booleans()):
        options["transform"] = identity
    if by_rows and name != "host" and draw(st.booleans()):
        options["collate"] = stack
    if draw(st.integers(0, 3)) == 0 and name != "host":
        options["device_transform"] = identity
    if shuffle:
        options |= {"shuffle": True, "seed": draw(st.integers(0, 2**40))}
    if "one buffer" not in kind:
        options["reuses_buffers"] = draw(st.booleans())
    tree = table(rows)
    items = [row_of(tree, i) for i in range(rows)] if by_rows else parts_of(tree, size)
    source = tree if kind == "arrays" else OF_ITEMS[kind](items)
    return draw(st.sampled_from(WAYS)), {"source": source, "sharding": place(), "rows": rows, "size": size, "options": options}


def check(way: str, case: dict[str, Any]) -> None:
    rows, size, options = case["rows"], case["size"], case["options"]
    loader = ps.Loader(case["source"], case["sharding"], **options)
    epochs, remainder = options["epochs"], options["remainder"]
    seen = consumer(way)(loader)
    full, short = divmod(rows, size)
    check_rows(seen, table(rows), options, size)
    assert len(seen) == (full + (1 if short and remainder in ("pad", "keep") else 0)) * epochs
    assert loader.stats().dropped_rows == (short if remainder == "drop" else 0) * epochs
    assert loader.stats().padded_rows == (size - short if short and remainder == "pad" else 0) * epochs
    assert loader.stats().rows + loader.stats().dropped_rows == rows * epochs
    assert [position.step for _, position in seen] == list(range(len(seen)))
    for _, group in itertools.groupby(seen, key=lambda pair: pair[1].epoch):
        positions = [position for _, position in group]
        assert [p.batches for p in positions] == list(range(1, len(positions) + 1))
        assert [p.ends_epoch for p in positions] == [False] * (len(positions) - 1) + [True]
        assert [p.first_row for p in positions] == [0, *[p.rows for p in positions[:-1]]]


def check_rows(seen: Seen, tree: Tree, options: dict[str, Any], size: int) -> None:
    """The rows of each epoch, leaf by leaf, are those of the source: in its order, or in one of their own."""
    rows = len(tree["id"])
    orders: list[tuple[int, ...]] = []
    for _, group in itertools.groupby(seen, key=lambda pair: pair[1].epoch):
        taken: dict[str, list[np.ndarray]] = {name: [] for name in tree}
        for batch, position in group:
            mask = np.asarray(batch["mask"]) if options["remainder"] == "pad" else slice(None)
            for name, leaf in tree.items():
                values = np.asarray(batch[name])
                assert values.dtype == leaf.dtype
                taken[name].append(values[mask])
                if options["remainder"] == "pad":
                    assert not np.any(values[~mask])
            assert len(taken["id"][-1]) == position.rows - position.first_row
        whole = {name: np.concatenate(parts) for name, parts in taken.items()}
        order = whole["id"].astype(int)
        orders.append(tuple(order.tolist()))
        assert len(set(orders[-1])) == len(orders[-1])
        assert all(np.array_equal(whole[name], leaf[order]) for name, leaf in tree.items())
        if not options.get("shuffle"):
            assert order.tolist() == list(range(len(order)))
        assert rows - len(order) < max(size, 1)
    if options.get("shuffle") and "batch_size" in options and rows >= 20:
        assert len(set(orders)) == len(orders), "each epoch has an order of its own"


@FEW
@given(loaders())
def test_the_rows_of_the_source_in_order_each_once(case: tuple[str, dict[str, Any]]) -> None:
    check(*case)


@pytest.mark.slow
@MANY
@given(loaders())
def test_the_rows_of_the_source_in_order_each_once_many_times(case: tuple[str, dict[str, Any]]) -> None:
    check(*case)


# -- one seed, one order


def order(rows: int, place: str, **options: Any) -> list[int]:
    loader = ps.Loader({"id": np.arange(rows, dtype=np.int32)}, PLACES[place][1](), shuffle=True, remainder="pad", **options)
    return [
        int(i)
        for batch, _ in consumer("sync")(loader)
        for i, valid in zip(batch["id"].tolist(), batch["mask"].tolist(), strict=True)
        if valid
    ]


def check_order(rows: int, seed: int, epochs: int, settings_of_two: list[tuple[str, int, int]]) -> None:
    first, *others = [
        order(rows, place, seed=seed, epochs=epochs, batch_size=PLACES[place][0] * times, workers=workers)
        for place, times, workers in settings_of_two
    ]
    assert sorted(first) == sorted(list(range(rows)) * epochs)
    assert all(other == first for other in others)


ORDERS = {
    "rows": st.integers(0, 70),
    "seed": st.integers(0, 2**70),
    "epochs": st.integers(1, 3),
    "settings_of_two": st.lists(
        st.tuples(st.sampled_from([name for name in sorted(PLACES) if name != "host"]), st.integers(1, 3), st.integers(1, 8)),
        min_size=2,
        max_size=2,
    ),
}


@settings(FEW, max_examples=25)
@given(**ORDERS)
def test_one_seed_one_order(rows: int, seed: int, epochs: int, settings_of_two: Any) -> None:
    check_order(rows, seed, epochs, settings_of_two)


@pytest.mark.slow
@settings(MANY, max_examples=500)
@given(**ORDERS)
def test_one_seed_one_order_many_times(rows: int, seed: int, epochs: int, settings_of_two: Any) -> None:
    check_order(rows, seed, epochs, settings_of_two)


# -- whole batches of any sizes


def check_wholes(sizes: list[int], remainder: Any, workers: int, epochs: int, way: str, by_workers: bool, kind: str) -> None:
    """Rows may be dropped or padded only at the end of an epoch, by the measure of the first batch, and only where that is asked for."""
    ends = list(itertools.accumulate(sizes))
    tree = table(ends[-1] if ends else 0)
    items = [{name: leaf[end - n : end] for name, leaf in tree.items()} for end, n in zip(ends, sizes, strict=True)]
    options = {"remainder": remainder, "workers": workers, "epochs": epochs, "transform": identity if by_workers else None}
    loader = ps.Loader(OF_ITEMS[kind](items), NamedSharding(_mesh(8), P()), **options)
    short = bool(sizes) and sizes[-1] < sizes[0]
    if remainder == "error" and short:
        with pytest.raises(ps.BatchError, match="last batch"):
            consumer(way)(loader)
        return
    seen = consumer(way)(loader)
    kept = sizes[:-1] if short and remainder == "drop" else sizes
    filled = [*sizes[:-1], max(sizes[-1], sizes[0])] if remainder == "pad" and sizes else kept
    assert [len(batch["id"]) for batch, _ in seen] == filled * epochs
    check_rows(seen, tree, options, sizes[-1] + 1 if sizes else 1)
    stats = loader.stats()
    assert (stats.rows, stats.dropped_rows) == (sum(kept) * epochs, (sum(sizes) - sum(kept)) * epochs)
    assert stats.padded_rows == (sum(filled) - sum(kept)) * epochs
    assert [p.ends_epoch for _, p in seen] == ([False] * (len(kept) - 1) + [True] if kept else []) * epochs


WHOLES = {
    "sizes": st.lists(st.integers(1, 5), max_size=7),
    "remainder": st.sampled_from(["auto", "drop", "keep", "pad", "error"]),
    "workers": st.integers(1, 8),
    "epochs": st.integers(1, 3),
    "way": st.sampled_from(WAYS),
    "by_workers": st.booleans(),
    "kind": st.sampled_from([kind for kind in sorted(OF_ITEMS) if kind not in ONE_SHOT]),
}


@settings(FEW, max_examples=50)
@given(**WHOLES)
def test_batches_of_any_sizes(**case: Any) -> None:
    check_wholes(**case)


@pytest.mark.slow
@settings(MANY, max_examples=1000)
@given(**WHOLES)
def test_batches_of_any_sizes_many_times(**case: Any) -> None:
    check_wholes(**case)
