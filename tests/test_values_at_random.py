"""Whatever the leaves, their memory, the source, the hooks and the mesh: every row arrives once, in order, with the values that it had."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import prefetchshard as ps
from support import aligned

pytestmark = pytest.mark.usefixtures("slow_sources")

DTYPES = ["bool", "int8", "uint16", "int32", "int64", "uint64", "float16", "float32", "float64", "complex64", "complex128", ">i4", ">f8"]
SMALL_DTYPES = [ml_dtypes.bfloat16, ml_dtypes.float8_e5m2, ml_dtypes.int4]


def plain(x: np.ndarray) -> np.ndarray:
    return x


def fortran(x: np.ndarray) -> np.ndarray:
    return np.asfortranarray(x)


def backwards(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x[::-1])[::-1] if x.ndim else x


def columns(x: np.ndarray) -> np.ndarray:
    wide = np.zeros((*x.shape, 2), x.dtype)
    wide[..., 1] = x
    return wide[..., 1]


def unaligned(x: np.ndarray) -> np.ndarray:
    made = aligned(x.shape, x.dtype, offset=1)
    made[...] = x
    return made


MEMORIES = [plain, fortran, backwards, columns, unaligned]
Rows = dict[str, np.ndarray]


@st.composite
def rows_of_leaves(draw: st.DrawFn) -> Rows:
    """Arrays `(rows, ...)`, among them the number of each row."""
    count = draw(st.integers(1, 40))
    rows: Rows = {"id": np.arange(count, dtype=np.int32)}
    for n in range(draw(st.integers(1, 3))):
        dtype = np.dtype(draw(st.sampled_from([*DTYPES, *SMALL_DTYPES])))
        shape = (count, *draw(st.lists(st.integers(0, 5), max_size=3)))
        values = (np.arange(np.prod(shape)) * 7 % 5).reshape(shape).astype(dtype)
        rows[f"leaf {n}"] = draw(st.sampled_from(MEMORIES))(values)
    return rows


def example(rows: Rows, row: int) -> Any:
    return {name: array[row] for name, array in rows.items()}


class Reusing:
    """Makes each example in the same memory, of which each thread has its own."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.local = threading.local()

    def __len__(self) -> int:
        return len(self.rows["id"])

    def __getitem__(self, row: int) -> Any:
        if not hasattr(self.local, "example"):
            self.local.example = {name: aligned(array.shape[1:], array.dtype) for name, array in self.rows.items()}
        for name, array in self.rows.items():
            self.local.example[name][...] = array[row]
        return self.local.example

    def __iter__(self) -> Iterator[Any]:
        return (self[row] for row in range(len(self)))


async def pulled(source: Reusing) -> AsyncIterator[Any]:
    for item in source:
        yield item


SOURCES: dict[str, Callable[[Rows], Any]] = {
    "arrays": lambda rows: rows,
    "list": lambda rows: [example(rows, row) for row in range(len(rows["id"]))],
    "dataset": Reusing,
    "iterable": lambda rows: lambda: iter(Reusing(rows)),
    "async": lambda rows: lambda: pulled(Reusing(rows)),
}


def distrust(item: Any) -> Any:
    """Changes what it gets, and returns what that was."""
    made = {name: np.array(leaf) for name, leaf in item.items()}
    for leaf in item.values():
        if isinstance(leaf, np.ndarray):
            leaf[...] = 1
    return made


def stack(examples: Any) -> Any:
    if isinstance(examples, dict):
        return distrust(examples)
    made = [distrust(item) for item in examples]
    return {name: np.stack([item[name] for item in made]) for name in made[0]}


def check(batch: Any, rows: Rows, ids: list[int]) -> None:
    got = np.asarray(batch["mask"]) if "mask" in batch else np.ones(len(batch["id"]), bool)
    here = np.asarray(batch["id"])[got].tolist()
    ids += here
    for name, array in rows.items():
        want = array[here]
        target = jax.dtypes.canonicalize_dtype(want.dtype.newbyteorder("="))
        assert batch[name].dtype == target
        assert np.array_equal(np.asarray(batch[name])[got], want.astype(target))


OPTIONS = st.fixed_dictionaries(
    {
        "remainder": st.sampled_from(["drop", "pad"]),
        "workers": st.sampled_from([1, 2, 5]),
        "depth": st.integers(1, 3) | st.just("auto"),
        "transform": st.sampled_from([None, distrust]),
        "collate": st.sampled_from([None, stack]),
        "epochs": st.integers(1, 2),
    }
)


@pytest.mark.parametrize("kind", SOURCES)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(rows=rows_of_leaves(), options=OPTIONS, devices=st.sampled_from([1, 2, 8]), size=st.integers(1, 2), shuffle=st.booleans())
def test_rows_arrive_as_they_were(kind: str, rows: Rows, options: dict[str, Any], devices: int, size: int, shuffle: bool) -> None:
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:devices]), ("data",)), PartitionSpec("data"))
    before = {name: array.copy() for name, array in rows.items()}
    shuffle = shuffle and kind in ("arrays", "list", "dataset")
    if len(rows["id"]) < devices * size:
        options = {**options, "remainder": "pad"}  # to drop all that there is is an error
    loader = ps.Loader(SOURCES[kind](rows), sharding, batch_size=devices * size, shuffle=shuffle, **options)
    batches = list(loader)  # all are kept, and looked at when nothing more is read
    ids: list[int] = []
    for batch in batches:
        check(batch, before, ids)
    count = len(rows["id"])
    each = count if options["remainder"] == "pad" else count // (devices * size) * devices * size
    assert len(ids) == options["epochs"] * each
    for epoch in range(options["epochs"]):
        some = ids[epoch * each : (epoch + 1) * each]
        assert len(set(some)) == each
        assert shuffle or some == list(range(each))
    assert all(np.array_equal(array, before[name]) for name, array in rows.items())


@pytest.mark.parametrize("kind", ["list", "dataset", "iterable", "async"])
@settings(max_examples=30, deadline=None, derandomize=True)
@given(rows=rows_of_leaves(), options=OPTIONS, devices=st.sampled_from([1, 2, 4]))
def test_batches_arrive_as_they_were(kind: str, rows: Rows, options: dict[str, Any], devices: int) -> None:
    """The same rows, as batches that the source makes: each leaf split along axis 0 over the devices."""
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:devices]), ("data",)), PartitionSpec("data"))
    batched = {name: np.stack([array] * devices, axis=1) for name, array in rows.items()}  # batch i: `devices` times row i
    del options["collate"]
    batches = list(ps.Loader(SOURCES[kind](batched), sharding, **options))
    assert len(batches) == options["epochs"] * len(rows["id"])
    for i, batch in enumerate(batches):
        for name, array in rows.items():
            want = np.stack([array[i % len(array)]] * devices)
            target = jax.dtypes.canonicalize_dtype(want.dtype.newbyteorder("="))
            assert batch[name].dtype == target
            assert np.array_equal(np.asarray(batch[name]), want.astype(target))
