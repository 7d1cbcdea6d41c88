"""64-bit leaves while x64 is off: what survives is narrowed, what does not is refused by leaf, row and value, on every way in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding

import prefetchshard as ps
from prefetchshard.leaves.converting import as_array
from prefetchshard.leaves.narrowing import canonical, store
from prefetchshard.reading.writing import Writer

ROWS = 16
WIDE = {"int64": "int32", "uint64": "uint32", "float64": "float32", "complex128": "complex64"}

GOOD: dict[str, list[Any]] = {
    "int64": [0, -1, 2**31 - 1, -(2**31)],
    "uint64": [0, 1, 2**32 - 1],
    "float64": [0.1, -0.0, np.nan, np.inf, -np.inf, 3.4028234e38, 1e-320, 16777217.0],
    "complex128": [0.1 + 0.2j, complex(np.nan, np.inf), complex(-np.inf, 1e-320), 3.4e38j],
}
BAD: dict[str, list[Any]] = {
    "int64": [2**31, -(2**31) - 1, 2**63 - 1, -(2**63), 2**40 + 5, 2**32],
    "uint64": [2**32, 2**63, 2**64 - 1],
    "float64": [1e300, -1e300, 3.5e38, 1.7976931348623157e308],
    "complex128": [1e300 + 0j, -1e300j, complex(np.inf, 1e300), complex(1e300, np.nan), complex(3.5e38, np.inf)],
}


def whole_batch(x: np.ndarray, where: Any, **options: Any) -> Any:
    return ps.prefetch([{"meta": {"x": x}}], where, **options)


def iterator_of_batches(x: np.ndarray, where: Any, **options: Any) -> Any:
    return ps.prefetch(iter([{"meta": {"x": x}}]), where, **options)


def transformed_batch(x: np.ndarray, where: Any, **options: Any) -> Any:
    return ps.prefetch(iter([{"meta": {"x": x}}]), where, transform=lambda batch: batch, **options)


def arrays(x: np.ndarray, where: Any, **options: Any) -> Any:
    return ps.Loader({"meta": {"x": x}}, where, batch_size=ROWS, **options)


def examples_of_arrays(x: np.ndarray, where: Any, **options: Any) -> Any:
    return ps.Loader({"meta": {"x": x}}, where, batch_size=ROWS, workers=3, transform=lambda example: example, **options)


def dataset(x: np.ndarray, where: Any, **options: Any) -> Any:
    return ps.Loader([{"meta": {"x": row}} for row in x], where, batch_size=ROWS, workers=3, **options)


def iterator(x: np.ndarray, where: Any, **options: Any) -> Any:
    return ps.Loader(({"meta": {"x": row}} for row in x), where, batch_size=ROWS, **options)


def transformed_iterator(x: np.ndarray, where: Any, **options: Any) -> Any:
    source = ({"meta": {"x": row}} for row in x)
    return ps.Loader(source, where, batch_size=ROWS, workers=3, transform=lambda example: example, **options)


def collated(x: np.ndarray, where: Any, **options: Any) -> Any:
    def collate(examples: list[Any]) -> Any:
        return {"meta": {"x": np.stack([example["meta"]["x"] for example in examples])}}

    return ps.Loader([{"meta": {"x": row}} for row in x], where, batch_size=ROWS, collate=collate, **options)


WAYS: list[Callable[..., Any]] = [
    whole_batch, iterator_of_batches, transformed_batch, arrays, examples_of_arrays, dataset, iterator, transformed_iterator, collated,
]  # fmt: skip
ways = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)


def filled(dtype: str, value: Any, at: tuple[int, ...], shape: tuple[int, ...] = (ROWS, 3)) -> np.ndarray:
    x = np.ones(shape, dtype)
    x[at] = value
    return x


@ways
def test_what_survives_is_narrowed(way: Callable[..., Any], S: NamedSharding) -> None:
    for dtype, values in GOOD.items():
        x = np.resize(np.array(values, dtype), (ROWS, 3))
        for order in ("=", ">"):
            (batch,) = way(x.astype(x.dtype.newbyteorder(order)), S)
            got = np.asarray(batch["meta"]["x"])
            assert got.dtype == WIDE[dtype]
            with np.errstate(under="ignore"):
                assert np.array_equal(got.view(np.uint8), x.astype(WIDE[dtype]).view(np.uint8))


@ways
@pytest.mark.parametrize("dtype", WIDE)
def test_what_does_not_is_refused(way: Callable[..., Any], dtype: str, S: NamedSharding) -> None:
    for row, value in zip([0, 7, ROWS - 1, 5, 9, 11], BAD[dtype], strict=False):
        x = filled(dtype, value, (row, 2))
        with pytest.raises(ps.NarrowingError) as caught:
            list(way(x, S))
        text = str(caught.value)
        assert f"leaf meta.x: row {row} of the batch, index [2]: the {dtype} value {x[row, 2]} does not fit {WIDE[dtype]}" in text
        assert "narrow='allow'" in text
        assert isinstance(caught.value, OverflowError)


@ways
def test_every_way_in_under_x64(way: Callable[..., Any], S: NamedSharding) -> None:
    with jax.enable_x64(True):
        for dtype in WIDE:
            for values in (GOOD[dtype], BAD[dtype]):
                x = np.resize(np.array(values, dtype), (ROWS, 3))
                for narrow in ("check", "error", "allow"):
                    (batch,) = way(x, S, narrow=narrow)
                    assert batch["meta"]["x"].dtype == dtype
                    assert np.array_equal(np.asarray(batch["meta"]["x"]).view(np.uint8), x.view(np.uint8))


@ways
def test_allowed_wraps_as_jax_does_and_in_silence(way: Callable[..., Any], S: NamedSharding) -> None:
    for dtype in WIDE:
        x = np.resize(np.array(BAD[dtype], dtype), (ROWS, 3))
        (batch,) = way(x, S, narrow="allow")
        with np.errstate(all="ignore"):
            assert np.array_equal(batch["meta"]["x"], x.astype(WIDE[dtype]), equal_nan=True)


@ways
def test_refused_whatever_they_hold(way: Callable[..., Any], S: NamedSharding) -> None:
    for dtype in WIDE:
        with pytest.raises(ps.NarrowingError, match=rf"leaf meta\.x: {dtype} would become {WIDE[dtype]} .*narrow='error'"):
            list(way(np.zeros((ROWS, 3), dtype), S, narrow="error"))
    (batch,) = way(np.zeros((ROWS, 3), np.int32), S, narrow="error")
    assert batch["meta"]["x"].dtype == np.int32


@ways
def test_what_stays_on_the_host_is_not_narrowed(way: Callable[..., Any]) -> None:
    x = filled("int64", 2**40, (3, 1))
    for where in (ps.HOST, lambda path, shape, dtype: ps.HOST):
        for narrow in ("check", "error"):
            (batch,) = way(x, where, narrow=narrow)
            assert np.asarray(batch["meta"]["x"]).dtype == np.int64
            assert np.array_equal(batch["meta"]["x"], x)


# --- which row it is


def test_the_row_is_that_of_the_batch_and_of_the_source(S: NamedSharding) -> None:
    x = filled("int64", 2**40, (37, 0), (48, 1))[:, 0]
    sources: list[Any] = [x, [int(value) for value in x]]
    for source in sources:
        for shuffle in (False, True):
            order = np.concatenate([np.asarray(b) for b in ps.Loader(np.arange(48), S, batch_size=ROWS, shuffle=shuffle, seed=3)])
            at = order.tolist().index(37)
            loader = iter(ps.Loader(source, S, batch_size=ROWS, shuffle=shuffle, seed=3, workers=3))
            for _ in range(at // ROWS):
                next(loader)
            with pytest.raises(ps.NarrowingError, match=f"row {at % ROWS} of the batch: ") as caught:
                next(loader)
            assert caught.value.row == at % ROWS
            assert "that is row 37 of the source" in caught.value.__notes__
            assert f"batch {at // ROWS} (epoch 0, " in "".join(caught.value.__notes__)


def test_good_batches_come_first(S: NamedSharding) -> None:
    loader = iter(ps.Loader(filled("float64", 1e300, (40, 0), (48, 2)), S, batch_size=8))
    assert [next(loader).shape for _ in range(5)] == [(8, 2)] * 5
    for _ in range(2):
        with pytest.raises(ps.NarrowingError, match="row 0 of the batch"):
            next(loader)


@pytest.mark.parametrize("reuses_buffers", [True, False])
@pytest.mark.parametrize("row", [0, 6])
@pytest.mark.parametrize("remainder", ["drop", "pad"])
def test_every_share_of_a_large_batch_is_looked_at(
    remainder: Any, row: int, reuses_buffers: bool, S: NamedSharding, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under "drop" the fault waits with its batch, which may be left out; else it ends the queue there."""
    shares: list[int] = []
    copy_share = Writer.copy_share

    def noted(self: Any, batch: Any, leaves: Any, first: int = 0, count: int = 1) -> None:
        shares.append(count)
        copy_share(self, batch, leaves, first, count)

    monkeypatch.setattr("prefetchshard.reading.batch_copying.cpu_count", lambda: 4)
    monkeypatch.setattr(Writer, "copy_share", noted)
    good = np.ones((8, 300_000), np.int64)
    bad = good.copy()
    bad[row, 17] = 2**40
    loader = iter(ps.prefetch(iter([good, good, bad, good]), S, workers=4, remainder=remainder, reuses_buffers=reuses_buffers))
    for _ in range(2):
        assert (np.asarray(jax.tree.leaves(next(loader))[0]) == 1).all()
    with pytest.raises(ps.NarrowingError, match=rf"row {row} of the batch, index \[17\]: the int64 value 1099511627776") as caught:
        next(loader)
    assert caught.value.row == row
    assert max(shares) > 1


def test_the_first_of_several_is_named(S: NamedSharding) -> None:
    x = np.ones((ROWS, 2, 2))
    x[5, 1, 0] = 1e300
    x[5, 1, 1] = x[6, 0, 0] = -1e300
    with pytest.raises(ps.NarrowingError, match=r"row 5 of the batch, index \[1, 0\]: the float64 value 1e\+300"):
        next(iter(ps.prefetch([x], S)))


def test_leaves_without_rows_have_an_index(S: NamedSharding, R: NamedSharding) -> None:
    batch = {"x": np.ones(8, np.float32), "table": np.array([[1, 2**40], [2, 3]])}
    with pytest.raises(ps.NarrowingError, match=r"leaf table: index \[0, 1\]: the int64 value 1099511627776") as caught:
        next(iter(ps.prefetch([batch], {"x": S, "table": R})))
    assert caught.value.row is None


def test_a_dropped_row_is_not_looked_at(S: NamedSharding) -> None:
    x = filled("int64", 2**40, (9, 0), (10, 1))
    for source in (x, iter(x), list(x)):
        assert len(list(ps.Loader(source, S, batch_size=8))) == 1
    for source in (x, iter(x), list(x)):
        with pytest.raises(ps.NarrowingError, match="row 1 of the batch"):
            list(ps.Loader(source, S, batch_size=8, remainder="pad"))


# --- scalars


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (3, "int32"), (-(2**31), "int32"), (True, "bool"), (0.1, "float32"), (1j, "complex64"), (float("inf"), "float32"),
        (np.int64(3), "int32"), (np.uint64(3), "uint32"), (np.float64(0.1), "float32"), (np.array(3), "int32"), (np.int8(3), "int8"),
        (np.float16(3), "float16"),
    ],
    ids=repr,
)  # fmt: skip
def test_scalars(value: Any, dtype: str, S: NamedSharding) -> None:
    (batch,) = ps.prefetch([{"x": np.ones(8, np.float32), "scalar": value}], S)
    assert batch["scalar"].shape == ()
    assert batch["scalar"].dtype == dtype
    assert batch["scalar"].sharding.is_fully_replicated
    assert batch["scalar"] == np.asarray(value).astype(dtype)
    for source in ([value] * 8, iter([value] * 8)):
        (batch,) = ps.Loader(source, S, batch_size=8)
        assert batch.dtype == dtype
        assert np.asarray(batch).tolist() == [np.asarray(value).astype(dtype).tolist()] * 8


@pytest.mark.parametrize(
    "value", [2**31, -(2**40), np.int64(2**40), np.uint64(2**63), 1e300, np.float64(-1e300), 1e300j, np.array(2**40)], ids=repr
)
def test_scalars_that_do_not_survive(value: Any, S: NamedSharding) -> None:
    with pytest.raises(ps.NarrowingError, match=r"leaf scalar: a scalar: the \w+ value"):
        next(iter(ps.prefetch([{"x": np.ones(8, np.float32), "scalar": value}], S)))
    for source in ([1, *[value] * 7], iter([np.asarray(value)] * 8)):
        with pytest.raises((ps.NarrowingError, ps.BatchError)):
            next(iter(ps.Loader(source, S, batch_size=8)))


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 2**64, 10**30])
def test_python_integers_beyond_64_bits(value: int, S: NamedSharding) -> None:
    fits = 0 <= value < 2**64
    for where in ({"x": S, "n": ps.HOST}, lambda path, shape, dtype: ps.HOST if path == "n" else S):
        (batch,) = ps.prefetch([{"x": np.ones(8), "n": value}], where)
        assert batch["n"] == value
        (batch,) = ps.Loader([{"x": 1.0, "n": value}] * 8, where, batch_size=8)
        assert batch["n"].tolist() == [value] * 8
    with jax.enable_x64(True):
        if fits:
            (batch,) = ps.prefetch([{"x": np.ones(8), "n": value}], S)
            assert int(batch["n"]) == value
        else:
            with pytest.raises(ps.NarrowingError, match=f"leaf n: the integer {value} has more than 64 bits"):
                next(iter(ps.prefetch([{"x": np.ones(8), "n": value}], S)))


# --- the arithmetic itself


def bits(dtype: str) -> Any:
    width = np.dtype(dtype).itemsize
    return st.lists(st.binary(min_size=width, max_size=width), min_size=1, max_size=20).map(
        lambda parts: np.frombuffer(b"".join(parts), dtype)
    )


@pytest.mark.parametrize("dtype", WIDE)
@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_whatever_the_bits(dtype: str, data: st.DataObject) -> None:
    value = data.draw(bits(dtype))
    view = np.empty(value.shape, WIDE[dtype])
    with np.errstate(all="ignore"):
        narrowed = value.astype(view.dtype)
    parts = [(value.real, narrowed.real), (value.imag, narrowed.imag)] if value.dtype.kind == "c" else [(value, narrowed)]
    if value.dtype.kind in "iu":
        lost = narrowed.astype(dtype) != value
    else:
        lost = np.logical_or.reduce([np.isfinite(wide) & np.isinf(small) for wide, small in parts])
    if lost.any():
        with pytest.raises(ps.NarrowingError) as caught:
            store(view, value, path="x", policy="check")
        assert caught.value.row == int(np.argmax(lost))
    else:
        store(view, value, path="x", policy="check")
        assert np.array_equal(view, narrowed, equal_nan=True)


def memories(x: np.ndarray) -> Iterator[np.ndarray]:
    yield x
    yield x[::-1]
    yield np.asfortranarray(x)
    yield x.astype(x.dtype.newbyteorder())
    raw = np.empty(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape)
    raw[...] = x
    yield raw


@pytest.mark.parametrize("dtype", WIDE)
def test_whatever_the_memory_and_however_large(dtype: str) -> None:
    for shape in ((3, 2), (100, 300)):
        for at in ((0, 0), (1, 1), (shape[0] - 1, shape[1] - 1)):
            for value in memories(filled(dtype, BAD[dtype][0], at, shape)):
                row = int(np.nonzero(np.asarray(value) != 1)[0][0])
                with pytest.raises(ps.NarrowingError) as caught:
                    store(np.empty(shape, WIDE[dtype]), value, path="x", policy="check", row=100)
                assert caught.value.row == 100 + row


@pytest.mark.parametrize("x64", [False, True])
def test_dtypes_are_those_of_jax(x64: bool) -> None:
    names = ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
    names += ["float16", "float32", "float64", "complex64", "complex128", "bfloat16", "int4"]
    with jax.enable_x64(x64):
        for dtype in map(jax.numpy.dtype, names):
            for order in "<>":
                assert canonical(dtype.newbyteorder(order), x64) == jax.dtypes.canonicalize_dtype(dtype)
        for value in (1, 1.0, True, 1j):
            assert canonical(as_array(value).dtype, x64) == jax.numpy.asarray(value).dtype
