"""Rows of arrays arrive as they are, whatever the arrays' memory looks like, and nothing copies a whole source."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import prefetchshard as ps
from prefetchshard.sources.arrays import gather
from prefetchshard.streaming.copies import BY_NUMPY, ROW_LOOP_BYTES
from support import aligned

ROWS = 24

Make = Callable[[np.ndarray], np.ndarray]


def fortran(x: np.ndarray) -> np.ndarray:
    return np.asfortranarray(x)


def backwards(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x[::-1])[::-1]


def backwards_everywhere(x: np.ndarray) -> np.ndarray:
    flip = (slice(None, None, -1),) * x.ndim
    return np.ascontiguousarray(x[flip])[flip]


def columns(x: np.ndarray) -> np.ndarray:
    wide = np.zeros((*x.shape[:-1], x.shape[-1] + 3), x.dtype)
    wide[..., 1:-2] = x
    return wide[..., 1:-2]


def every_other_row(x: np.ndarray) -> np.ndarray:
    more = np.zeros((2 * len(x), *x.shape[1:]), x.dtype)
    more[::2] = x
    return more[::2]


def unaligned(x: np.ndarray) -> np.ndarray:
    made = aligned(x.shape, x.dtype, offset=1)
    made[...] = x
    return made


def byte_swapped(x: np.ndarray) -> np.ndarray:
    return x.astype(x.dtype.newbyteorder())


def read_only(x: np.ndarray) -> np.ndarray:
    x = x.copy()
    x.flags.writeable = False
    return x


def broadcast_in_columns(x: np.ndarray) -> np.ndarray:
    return np.broadcast_to(x[..., :1], x.shape)


MEMORY: dict[str, Make] = {
    "plain": np.array,
    "Fortran order": fortran,
    "backwards": backwards,
    "backwards everywhere": backwards_everywhere,
    "columns of a wider one": columns,
    "every other row": every_other_row,
    "unaligned": unaligned,
    "byte-swapped": byte_swapped,
    "read-only": read_only,
    "broadcast": broadcast_in_columns,
    "a subclass": lambda x: x.view(np.matrix) if x.ndim == 2 else x.view(np.recarray),
}
SHAPES = [(ROWS, 5), (ROWS, 3, 2), (ROWS, 1), (ROWS, ROW_LOOP_BYTES // 8 + 1)]


def ramp(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Every row differs from every other."""
    return (np.arange(np.prod(shape)) % 251).reshape(shape).astype(dtype)


def rows_of(loader: ps.Loader) -> Any:
    got = [np.asarray(batch) for batch in loader]
    return np.concatenate(got)


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("shuffle", [False, True], ids=["in order", "shuffled"])
def test_rows_from_every_memory(memory: str, shuffle: bool, S: NamedSharding) -> None:
    for shape in SHAPES:
        source = MEMORY[memory](ramp(shape, np.float32))
        want = np.asarray(source).astype("<f4")
        order = rows_of(ps.Loader(np.arange(ROWS), S, batch_size=8, shuffle=shuffle, seed=5))
        got = rows_of(ps.Loader(source, S, batch_size=8, shuffle=shuffle, seed=5))
        assert np.array_equal(got, want[order])
        assert sorted(order.tolist()) == list(range(ROWS))
        assert (order.tolist() == list(range(ROWS))) is not shuffle


DTYPES = [
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "float16", "float32", "complex64"),
    *(ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3b11fnuz, ml_dtypes.float8_e8m0fnu),
    *(ml_dtypes.int4, ml_dtypes.uint4, ml_dtypes.int2, ml_dtypes.float4_e2m1fn),
]


@pytest.mark.parametrize("dtype", [np.dtype(dtype) for dtype in DTYPES], ids=str)
def test_rows_of_every_dtype(dtype: np.dtype[Any], S: NamedSharding) -> None:
    x = (np.arange(ROWS * 6) % 2 + 1).reshape(ROWS, 6).astype(dtype)
    for memory, shuffle in (("plain", False), ("plain", True), ("Fortran order", True), ("backwards", False), ("unaligned", True)):
        (batch,) = ps.Loader(MEMORY[memory](x), S, batch_size=ROWS, shuffle=shuffle, seed=1)
        (order,) = ps.Loader(np.arange(ROWS), S, batch_size=ROWS, shuffle=shuffle, seed=1)
        assert batch.dtype == dtype
        assert np.array_equal(np.asarray(batch).view(np.uint8), x[np.asarray(order)].view(np.uint8))


@pytest.mark.parametrize("dtype", ["int64", "uint64", "float64", "complex128"])
@pytest.mark.parametrize("x64", [False, True])
def test_rows_of_64_bits(dtype: str, x64: bool, S: NamedSharding) -> None:
    x = ramp((ROWS, 5), dtype)
    with jax.enable_x64(x64):
        for memory, shuffle in (("plain", True), ("byte-swapped", True), ("Fortran order", False), ("unaligned", True)):
            (batch,) = ps.Loader(MEMORY[memory](x), S, batch_size=ROWS, shuffle=shuffle)
            (order,) = ps.Loader(np.arange(ROWS), S, batch_size=ROWS, shuffle=shuffle)
            assert batch.dtype == jax.dtypes.canonicalize_dtype(dtype)
            assert np.array_equal(batch, x[np.asarray(order)])


@pytest.mark.parametrize("shape", [(ROWS,), (ROWS, 0), (ROWS, 3, 0), (ROWS, 0, 3), (ROWS, 1, 1, 1, 1)], ids=str)
def test_odd_shapes(shape: tuple[int, ...], S: NamedSharding) -> None:
    for shuffle in (False, True):
        got = [
            batch.shape
            for batch in ps.Loader({"x": np.zeros(shape, np.float32)}, S, batch_size=8, shuffle=shuffle)
            for batch in [batch["x"]]
        ]
        assert got == [(8, *shape[1:])] * 3


def test_no_rows(S: NamedSharding) -> None:
    for remainder in ("drop", "pad", "error"):
        assert list(ps.Loader({"x": np.zeros((0, 3))}, S, batch_size=8, remainder=remainder)) == []
    with pytest.raises(ps.ConfigError, match="fewer than a batch"):
        ps.Loader({"x": np.zeros((0, 3))}, S, batch_size=8, epochs=None)


def test_memmaps(tmp_path: Path, S: NamedSharding) -> None:
    x = np.memmap(tmp_path / "x", np.float32, "w+", shape=(ROWS, 6))
    x[:] = ramp((ROWS, 6), np.float32)
    x.flush()
    for mode in ("r", "c", "r+"):
        again = np.memmap(tmp_path / "x", np.float32, mode, shape=(ROWS, 6))
        for source in (again, again[:, 1:4], again[::-1], again.T.copy().T):
            for shuffle in (False, True):
                order = rows_of(ps.Loader(np.arange(ROWS), S, batch_size=8, shuffle=shuffle))
                assert np.array_equal(rows_of(ps.Loader(source, S, batch_size=8, shuffle=shuffle)), np.asarray(source)[order])


def test_saved_arrays_with_their_file(tmp_path: Path, S: NamedSharding) -> None:
    np.savez(tmp_path / "x.npz", image=ramp((ROWS, 3), np.uint8), label=np.arange(ROWS))
    with np.load(tmp_path / "x.npz") as file:
        batch = next(iter(ps.Loader(dict(file), S, batch_size=8)))
    assert np.array_equal(batch["label"], np.arange(8))


class Both(NamedTuple):
    x: Any
    y: Any


def test_trees_of_arrays(S: NamedSharding) -> None:
    x, y = ramp((ROWS, 3), np.float32), np.arange(ROWS)
    for tree in ({"b": x, "a": {"y": y}}, (x, y), Both(x, (y,)), {"x": x, "y": y, "nothing": None}, {"one": {"more": {"level": x}}}):
        for transform in (None, lambda example: example):
            batches = list(ps.Loader(tree, S, batch_size=8, transform=transform))
            assert jax.tree.structure(batches[0]) == jax.tree.structure(tree)
            got = jax.tree.map(lambda *parts: np.concatenate(parts), *batches)
            assert jax.tree.all(jax.tree.map(np.array_equal, got, tree))


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_many_workers_fill_one_batch(workers: int, S: NamedSharding, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefetchshard.reading.row_dealer.PART_BYTES", 64)
    x = ramp((ROWS * 4, 5), np.float32)
    name = np.array([f"row {i}" for i in range(len(x))])
    masked = np.ma.masked_array(np.arange(len(x)), np.arange(len(x)) % 3 == 0)
    for shuffle in (False, True):
        where = {"x": S, "name": ps.HOST, "masked": ps.HOST}
        loader = ps.Loader({"x": x, "name": name, "masked": masked}, where, batch_size=32, shuffle=shuffle, workers=workers)
        for batch in loader:
            rows = [int(text.split()[1]) for text in batch["name"]]
            assert np.array_equal(batch["x"], x[rows])
            assert batch["masked"].tolist() == masked[rows].tolist()


# --- what stays on the host


HOST_ARRAYS = {
    "text": np.array([f"row {i}" for i in range(ROWS)]),
    "bytes": np.array([b"%d" % i for i in range(ROWS)]),
    "any text": np.array([f"row {i}" for i in range(ROWS)], np.dtypes.StringDType()),
    "objects": np.array([None if i % 5 == 0 else (i,) for i in range(ROWS)] + [None], object)[:-1],
    "dates": np.datetime64("2020-01-01") + np.arange(ROWS),
    "times": np.arange(ROWS).astype("m8[s]"),
    "records": np.array([(i, i / 2) for i in range(ROWS)], [("a", "i4"), ("b", "f8")]),
    "a recarray": np.array([(i, i / 2) for i in range(ROWS)], [("a", "i4"), ("b", "f8")]).view(np.recarray),
    "long floats": np.arange(ROWS).astype(np.longdouble) / 3,
    "masked": np.ma.masked_array(np.arange(ROWS), np.arange(ROWS) % 3 == 0, fill_value=7),
    "64 bits": np.arange(ROWS) + 2**40,
    "big-endian": np.arange(ROWS).astype(">i8"),
    "rows of rows": np.arange(ROWS * 4).reshape(ROWS, 2, 2) + 2**40,
    "small floats": np.arange(ROWS).astype(ml_dtypes.float6_e2m3fn),
}


@pytest.mark.parametrize("kind", HOST_ARRAYS)
def test_rows_that_stay_on_the_host(kind: str, S: NamedSharding) -> None:
    kept, x = HOST_ARRAYS[kind], np.arange(ROWS)
    for shuffle in (False, True):
        for where in ({"x": S, "kept": ps.HOST}, lambda path, shape, dtype: ps.HOST if path == "kept" else S):
            for batch in ps.Loader({"x": x, "kept": kept}, where, batch_size=8, shuffle=shuffle):
                want = kept[np.asarray(batch["x"])]
                assert type(batch["kept"]) is type(want)
                assert batch["kept"].dtype == want.dtype
                assert batch["kept"].tolist() == want.tolist()
                assert not np.shares_memory(batch["kept"], kept)


@pytest.mark.parametrize("kind", HOST_ARRAYS)
def test_they_are_padded(kind: str, S: NamedSharding) -> None:
    kept = HOST_ARRAYS[kind]
    *_, batch = ps.Loader({"x": np.arange(ROWS), "kept": kept}, {"x": S, "kept": ps.HOST}, batch_size=16, remainder="pad")
    assert batch["mask"].tolist() == [True] * 8 + [False] * 8
    assert batch["kept"][:8].tolist() == kept[16:].tolist()
    assert batch["kept"].dtype == kept.dtype
    blank = batch["kept"][8:].tolist()
    assert blank == [blank[0]] * 8


@pytest.mark.parametrize("transform", [None, lambda example: example], ids=["gathered", "examples"])
def test_containers_that_stay_on_the_host(transform: Any, S: NamedSharding) -> None:
    source = {"x": np.arange(ROWS), "kept": {"text": HOST_ARRAYS["text"], "both": Both(HOST_ARRAYS["dates"], (HOST_ARRAYS["64 bits"],))}}
    for batch in ps.Loader(source, {"x": S, "kept": ps.HOST}, batch_size=8, shuffle=True, transform=transform):
        rows = np.asarray(batch["x"])
        assert jax.tree.structure(batch) == jax.tree.structure(source)
        for got, want in zip(jax.tree.leaves(batch["kept"]), jax.tree.leaves(source["kept"]), strict=True):
            assert got.tolist() == want[rows].tolist()
    everything = next(iter(ps.Loader(source, ps.HOST, batch_size=8, transform=transform)))
    assert jax.tree.structure(everything) == jax.tree.structure(source)
    assert all(isinstance(leaf, np.ndarray) and len(leaf) == 8 for leaf in jax.tree.leaves(everything))


def test_the_mask_stays_on_the_host_with_everything_else() -> None:
    for device_transform in (None, lambda batch: batch):
        loader = ps.Loader({"x": np.arange(10)}, ps.HOST, batch_size=8, remainder="pad", device_transform=device_transform)
        masks = [batch["mask"] for batch in loader]
        assert [type(mask) for mask in masks] == [np.ndarray] * 2
        assert [mask.tolist() for mask in masks] == [[True] * 8, [True] * 2 + [False] * 6]
    spec = ps.Loader({"x": np.arange(10)}, ps.HOST, batch_size=8, remainder="pad").spec()
    assert (spec["mask"].shape, spec["mask"].sharding, spec.bytes_per_device) == ((8,), ps.HOST, 0)


# --- nothing copies a whole source


def peak(work: Callable[[], object]) -> int:
    """The most bytes that were allocated at once."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


BIG = {
    "plain": lambda: np.zeros((1 << 15, 128), np.float32),
    "Fortran order": lambda: np.zeros((128, 1 << 15), np.float32).T,
    "columns": lambda: np.zeros((1 << 15, 256), np.float32)[:, ::2],
    "backwards": lambda: np.zeros((1 << 15, 128), np.float32)[::-1],
    "unaligned": lambda: np.zeros((1 << 24) + 1, np.uint8)[1:].view(np.float32).reshape(1 << 15, 128),
    "big-endian": lambda: np.zeros((1 << 15, 128), ">f4"),
    "float64": lambda: np.zeros((1 << 15, 64), np.float64),
    "large rows": lambda: np.zeros((64, 1 << 16), np.float32)[:, ::-1],
    "text": lambda: np.zeros((1 << 15, 16), "U8")[:, ::-1],
    "records": lambda: np.zeros(1 << 20, [("a", "f4"), ("b", "f8"), ("c", "i4")])[::-1],
}


@pytest.mark.parametrize("kind", BIG)
@pytest.mark.parametrize("shuffle", [False, True], ids=["in order", "shuffled"])
def test_no_source_is_copied_whole(kind: str, shuffle: bool, S: NamedSharding) -> None:
    source = {"x": BIG[kind]()}
    assert source["x"].nbytes == 1 << 24
    where = S if source["x"].dtype.kind == "f" else ps.HOST

    def run() -> None:
        for transform in (None, lambda example: example):
            with ps.Loader(source, where, batch_size=8, shuffle=shuffle, depth=1, workers=2, transform=transform) as loader:
                batches = iter(loader)
                for _ in range(3):
                    next(batches)

    row = source["x"][:1].nbytes
    assert peak(run) < 3_000_000 + 8 * 16 * row


def test_a_column_of_a_memmap_is_not_read_whole(tmp_path: Path, S: NamedSharding) -> None:
    np.zeros((1 << 12, 1 << 12), np.float32).tofile(tmp_path / "x")
    column = np.memmap(tmp_path / "x", np.float32, "r", shape=(1 << 12, 1 << 12))[:, 5:6]

    def run() -> None:
        with ps.Loader(column, S, batch_size=8, shuffle=True) as loader:
            next(iter(loader))

    assert peak(run) < 1_000_000


def test_gathering_in_order_makes_no_copy_between() -> None:
    source = np.ones((1 << 12, 1 << 10), np.float32)
    view = np.empty((1 << 10, 1 << 10), np.float32)
    for rows in (slice(5, 5 + len(view)), np.arange(len(view))[::-1]):
        assert peak(lambda rows=rows: gather(source, rows, view, path="", policy="check", first_row=0, copies=BY_NUMPY)) < 100_000


@pytest.mark.parametrize("spec", [("data",), (None, "data"), ("data", None, "data")[:2]], ids=str)
def test_every_way_to_cut_them(spec: tuple[Any, ...], mesh: Any) -> None:
    x = ramp((ROWS, 16, 2), np.float32)
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    got = rows_of(ps.Loader(x, sharding, batch_size=8))
    assert np.array_equal(got, x)
