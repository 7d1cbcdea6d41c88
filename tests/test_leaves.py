"""What a leaf may be, what is turned away by name, and the containers around them, which come back as they were."""

from __future__ import annotations

import array
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import pathlib
import re
import types
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import prefetchshard as ps
from prefetchshard.leaves.converting import as_array
from prefetchshard.leaves.copying import private_copy
from prefetchshard.leaves.on_host import pad_on_host, stack_on_host

ROWS = 8
X = np.arange(ROWS * 2, dtype=np.float32).reshape(ROWS, 2)


@dataclasses.dataclass
class Unregistered:
    x: Any


class Text(str):
    __slots__ = ()


class Colour(enum.Enum):
    RED = 1


RECORDS = np.array([(i, i / 2) for i in range(ROWS)], [("a", "i4"), ("b", "f8")])

ODD: dict[str, tuple[Any, str]] = {
    "str array": (np.array(["a"] * ROWS), r"dtype <U1 .*ps\.HOST"),
    "bytes array": (np.array([b"a"] * ROWS), r"dtype \|S1 .*ps\.HOST"),
    "object array": (np.array([1, None] * 4), r"dtype object .*ps\.HOST"),
    "any text": (np.array(["a"] * ROWS, np.dtypes.StringDType()), r"dtype StringDType\(\) .*ps\.HOST"),
    "dates": (np.zeros(ROWS, "M8[s]"), r"dtype datetime64\[s\] .*ps\.HOST"),
    "times": (np.zeros(ROWS, "m8[ns]"), r"dtype timedelta64\[ns\] .*ps\.HOST"),
    "structured": (RECORDS, r"dtype \[\('a'.*ps\.HOST"),
    "recarray": (RECORDS.view(np.recarray), r"dtype \(numpy\.record.*ps\.HOST"),
    "raw": (np.zeros(ROWS, "V4"), r"dtype \|V4 .*ps\.HOST"),
    "longdouble": (np.ones(ROWS, np.longdouble), r"dtype float128 .*ps\.HOST"),
    "clongdouble": (np.ones(ROWS, np.clongdouble), r"dtype complex256 .*ps\.HOST"),
    "float6": (np.ones(ROWS, ml_dtypes.float6_e2m3fn), r"dtype float6_e2m3fn .*ps\.HOST"),
    "masked": (np.ma.masked_array(np.ones(ROWS), [True] * ROWS), r"a masked array .*filled"),
    "masked, nothing masked": (np.ma.masked_array(np.ones(ROWS)), r"a masked array .*filled"),
    "str": ("some text", r"str 'some text' .*ps\.HOST"),
    "str subclass": (Text("some"), r"Text 'some' .*ps\.HOST"),
    "bytes": (b"raw", r"bytes b'raw' .*ps\.HOST"),
    "np.str_": (np.str_("a"), r"dtype <U1 .*ps\.HOST"),
    "np.datetime64": (np.datetime64("2020"), r"dtype datetime64\[Y\] .*ps\.HOST"),
    "np.longdouble": (np.longdouble(1), r"dtype float128 .*ps\.HOST"),
    "a record": (RECORDS[0], r"dtype \[\('a'.*ps\.HOST"),
    "bytearray": (bytearray(b"raw"), r"type builtins\.bytearray .*ps\.HOST"),
    "set": ({1, 2}, r"type builtins\.set .*register.*ps\.HOST"),
    "frozenset": (frozenset({1}), r"type builtins\.frozenset .*register.*ps\.HOST"),
    "dataclass": (Unregistered(X), r"Unregistered .*register.*ps\.HOST"),
    "namespace": (types.SimpleNamespace(x=X), r"types\.SimpleNamespace .*register"),
    "date": (datetime.date(2020, 1, 1), r"datetime\.date .*ps\.HOST"),
    "path": (pathlib.PurePosixPath("a"), r"PurePosixPath .*ps\.HOST"),
    "uuid": (uuid.UUID(int=1), r"uuid\.UUID .*ps\.HOST"),
    "decimal": (decimal.Decimal(1), r"decimal\.Decimal .*ps\.HOST"),
    "fraction": (fractions.Fraction(1, 2), r"fractions\.Fraction .*ps\.HOST"),
    "enum": (Colour.RED, r"Colour .*ps\.HOST"),
    "ellipsis": (..., r"ellipsis .*ps\.HOST"),
    "function": (len, r"builtin_function_or_method .*ps\.HOST"),
    "class": (int, r"type builtins\.type .*ps\.HOST"),
    "range": (range(3), r"type builtins\.range .*ps\.HOST"),
}
odd = pytest.mark.parametrize("kind", ODD)


def example_of(value: Any) -> Any:
    return value[0] if type(value) is np.ndarray and value.ndim else value


def refused(loader: Callable[[], Any], words: str) -> None:
    """Refused on the first batch, by path; and again when asked again."""
    with pytest.raises(ps.LeafTypeError, match=rf"leaf meta\.odd: .*{words}") as caught:
        next(iter(loader()))
    assert isinstance(caught.value, TypeError)


@odd
def test_odd_leaves_are_refused_by_name(kind: str, S: NamedSharding) -> None:
    value, words = ODD[kind]
    batch = {"x": X, "meta": {"odd": value}}
    for source in ([batch], iter([batch])):
        refused(lambda source=source: ps.prefetch(source, S), words)
    refused(lambda: ps.prefetch([batch], {"x": S, "meta": None}), words)
    refused(lambda: ps.prefetch([batch], lambda path, shape, dtype: S), words)
    refused(lambda: ps.prefetch(iter([X]), S, transform=lambda x: batch), words)
    refused(lambda: ps.Loader([X] * ROWS, S, batch_size=ROWS, collate=lambda xs: batch), words)
    if isinstance(value, np.ndarray) and value.ndim:
        refused(lambda: ps.Loader({"x": X, "meta": {"odd": value}}, S, batch_size=ROWS), words)


@odd
def test_odd_leaves_of_examples_are_refused_by_name(kind: str, S: NamedSharding) -> None:
    value, words = ODD[kind]
    value = example_of(value)
    if kind in ("object array", "any text"):
        return  # their examples are other objects
    example = {"x": X[0], "meta": {"odd": value}}
    for source in ([example] * ROWS, iter([example] * ROWS)):
        refused(lambda source=source: ps.Loader(source, S, batch_size=ROWS), words)
    refused(lambda: ps.Loader(range(ROWS), S, batch_size=ROWS, transform=lambda i: example), words)


@odd
def test_odd_leaves_stay_on_the_host_untouched(kind: str, S: NamedSharding) -> None:
    value, _ = ODD[kind]
    batch = {"x": X, "meta": {"odd": value}}
    wheres: list[Any] = [{"x": S, "meta": ps.HOST}, {"x": S, "meta": {"odd": ps.HOST}}]
    if jax.tree_util.all_leaves([value]):
        wheres.append(lambda path, shape, dtype: ps.HOST if path == "meta.odd" else S)
    for where in wheres:
        (kept,) = ps.prefetch([batch], where)
        assert kept["meta"]["odd"] is value
        for options in ({}, {"transform": lambda b: b}, {"remainder": "pad"}):
            (kept,) = ps.prefetch(iter([batch]), where, **options)
            assert same(kept["meta"]["odd"], value)


def same(got: Any, want: Any) -> bool:
    if isinstance(want, np.ndarray):
        return type(got) is type(want) and got.dtype == want.dtype and got.tolist() == want.tolist()
    if isinstance(want, Unregistered):
        return type(got) is Unregistered and np.array_equal(got.x, want.x)
    if isinstance(want, types.SimpleNamespace):
        return type(got) is type(want)
    return type(got) is type(want) and got == want


@odd
def test_odd_leaves_of_examples_are_stacked_on_the_host(kind: str, S: NamedSharding) -> None:
    value = example_of(ODD[kind][0])
    example = {"x": X[0], "meta": {"odd": value}}
    wheres: list[Any] = [{"x": S, "meta": ps.HOST}, {"x": S, "meta": {"odd": ps.HOST}}]
    if jax.tree_util.all_leaves([value]):
        wheres.append(lambda path, shape, dtype: ps.HOST if path == "meta.odd" else S)
    for where in wheres:
        full, last = ps.Loader([example] * (ROWS + 3), where, batch_size=ROWS, remainder="pad", workers=2)
        for batch in (full, last):
            assert isinstance(batch["meta"]["odd"], np.ndarray)
            assert len(batch["meta"]["odd"]) == ROWS
        assert last["mask"].tolist() == [True] * 3 + [False] * 5
        assert all(equal(row, value) for row in [*full["meta"]["odd"], *last["meta"]["odd"][:3]])


def equal(row: Any, value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return row.tolist() == value.tolist()
    return same(row, value) or row == value


# --- stacking on the host


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([1, 2, 3], "int64"),
        ([True, False], "bool"),
        ([0.5, 1.5], "float64"),
        ([1j, 2], object),
        (["a", "longer"], object),
        ([b"a\0", b"bc"], object),
        (["a\0", "b"], object),
        ([1, None], object),
        ([None, None], object),
        ([1, 2.5], object),
        ([True, 1], object),
        ([-1, 2**63], object),
        ([2**70, 1], object),
        ([[1], [1, 2]], object),
        ([["a", "b"], ["c", "d"]], object),
        ([[1, 2], [3, 4]], object),
        ([np.int8(1), np.int8(2)], "int8"),
        ([np.int8(1), np.int16(2)], object),
        ([np.datetime64("2020-01-01"), np.datetime64("2021-01-01")], "M8[D]"),
        ([np.ones(2), np.zeros(2)], "float64"),
        ([np.ones(2), np.zeros(3)], object),
        ([np.ones(2), np.ones(2, np.float32)], object),
        ([np.array(["a"]), np.array(["b"])], "<U1"),
        ([np.array("a"), np.array("b")], "<U1"),
    ],
    ids=str,
)
def test_stacking_changes_no_value(values: list[Any], dtype: Any) -> None:
    stacked = stack_on_host(values, "x")
    assert stacked.dtype == dtype
    assert len(stacked) == len(values)
    for got, want in zip(stacked, values, strict=True):
        assert np.array_equal(got, want)
        assert type(got) is type(want) or stacked.dtype != object
    assert len(stack_on_host(values, "x", 5)) == 5


def test_what_fills_up_on_the_host() -> None:
    assert stack_on_host([1], "", 3).tolist() == [1, 0, 0]
    assert stack_on_host([True], "", 3).tolist() == [True, False, False]
    assert stack_on_host(["a"], "", 3).tolist() == ["a", "", ""]
    assert stack_on_host([b"a"], "", 3).tolist() == [b"a", b"", b""]
    assert stack_on_host([["a"]], "", 3).tolist() == [["a"], None, None]
    assert stack_on_host([None], "", 3).tolist() == [None, None, None]
    assert stack_on_host([np.ones((1, 2))], "", 2).tolist() == [[[1, 1]], [[0, 0]]]
    masked = stack_on_host([np.ma.masked_array([1, 2], [True, False])], "", 2)
    assert masked.tolist() == [[None, 2], [None, None]]


class Pair(NamedTuple):
    a: Any
    b: Any


@pytest.mark.parametrize(
    ("values", "fill"),
    [
        ([1, 2], 0),
        (["a", "b"], ""),
        ([Text("a"), Text("b")], Text()),
        ([np.str_("a"), np.str_("b")], np.str_()),
        ([b"a", b"b"], b""),
        ([["a"], ["b", "c"]], None),
        ([None, "a"], None),
        ([np.array(["a", "bc"]), np.array(["d", "ef"])], ["", ""]),
        ([np.array(["a", None], object), np.array(["d", 1], object)], [None, None]),
        ([np.ma.masked_array([1, 2], [True, False]), np.ma.masked_array([3, 4])], [None, None]),
        ([RECORDS[0], RECORDS[1]], (0, 0.0)),
    ],
    ids=repr,
)
def test_what_is_stacked_is_filled_up_later(values: list[Any], fill: Any) -> None:
    stacked = stack_on_host(values, "x")
    whole = pad_on_host(stacked, 4)
    assert (type(whole), whole.dtype) == (type(stacked), stacked.dtype)
    assert whole.tolist() == [*stacked.tolist(), fill, fill]
    assert stacked.dtype != object or stacked.ndim > 1 or type(whole[-1]) is type(fill)
    assert pad_on_host(whole, 4) is whole


def test_containers_are_filled_up_place_by_place() -> None:
    values = [{"a": i, "b": Pair("x", (None, 2.0)), "c": ()} for i in range(2)]
    whole = pad_on_host(stack_on_host(values, "x"), 3)
    assert list(whole) == ["a", "b", "c"]
    assert whole["a"].tolist() == [0, 1, 0]
    assert type(whole["b"]) is Pair
    assert whole["b"].a.tolist() == ["x", "x", ""]
    assert [part.tolist() for part in whole["b"].b] == [[None, None, None], [2.0, 2.0, 0.0]]
    assert whole["c"] == ()


def test_containers_on_the_host_keep_their_form(S: NamedSharding) -> None:
    """A part that stays on the host is put together in a batch as the examples are, but for lists, which are values."""

    def example(i: int) -> Any:
        return {
            "x": np.float32(i),
            "meta": {"name": f"n{i}", "tags": ["t"] * i, "pair": Pair(i, (None, str(i))), 7: collections.OrderedDict(z=i, a=np.full(2, i))},
        }

    for source in ([example(i) for i in range(11)], (example(i) for i in range(11))):
        full, last = ps.Loader(source, {"x": S, "meta": ps.HOST}, batch_size=8, remainder="pad")
        meta = full["meta"]
        assert list(meta) == ["name", "tags", "pair", 7]
        assert meta["name"].tolist() == [f"n{i}" for i in range(8)]
        assert meta["tags"].tolist() == [["t"] * i for i in range(8)]
        assert type(meta["pair"]) is Pair
        assert meta["pair"].a.tolist() == list(range(8))
        assert meta["pair"].b[0].tolist() == [None] * 8
        assert meta["pair"].b[1].tolist() == [str(i) for i in range(8)]
        assert type(meta[7]) is collections.OrderedDict
        assert list(meta[7]) == ["z", "a"]
        assert meta[7]["a"].tolist() == [[i, i] for i in range(8)]
        assert last["meta"]["name"].tolist() == ["n8", "n9", "n10", "", "", "", "", ""]
        assert last["meta"][7]["a"].tolist() == [[8, 8], [9, 9], [10, 10]] + [[0, 0]] * 5


@pytest.mark.parametrize("second", [{"b": 1}, {"a": 1, "b": 2}, {}, None, [1], (1,), Pair(1, 2)], ids=str)
def test_containers_that_differ_in_form_are_refused(second: Any) -> None:
    for first in ({"a": 1}, (1, 2), Pair(1, (2,))):
        with pytest.raises(ps.BatchError, match=r"leaf meta.*differ in form.*\[value\]"):
            stack_on_host([first, second], "meta")


def test_none_stays_none_on_the_host(S: NamedSharding) -> None:
    where = {"x": S, "kept": ps.HOST}
    (batch,) = ps.prefetch([{"x": X, "kept": [None, {"a": None}]}], where)
    assert batch["kept"] == [None, {"a": None}]
    (batch,) = ps.prefetch([{"x": X, "kept": None}], where)
    assert batch["kept"] is None
    (batch,) = ps.Loader([{"x": 1.0, "kept": None if i % 2 else i} for i in range(8)], where, batch_size=8)
    assert batch["kept"].tolist() == [0, None, 2, None, 4, None, 6, None]


def test_lists_of_text_are_not_split(S: NamedSharding) -> None:
    names = ["ab", "cd"] * 4
    for source in ([{"x": X, "names": names}], iter([{"x": X, "names": names}])):
        (batch,) = ps.prefetch(source, {"x": S, "names": ps.HOST})
        assert batch["names"] == names
        assert type(batch["names"]) is list
    with pytest.raises(ps.LeafTypeError, match=r"leaf names\[0\]: str 'ab'"):
        next(iter(ps.prefetch([{"x": X, "names": names}], S)))


def test_a_callable_sees_shape_and_dtype_of_what_cannot_be_placed(S: NamedSharding) -> None:
    seen: dict[str, Any] = {}

    def where(path: str, shape: tuple[int, ...], dtype: Any) -> Any:
        seen[path] = (shape, dtype)
        return ps.HOST if dtype.kind in "USOT" else S

    batch = {"x": X, "u": np.array(["ab"] * 8), "t": "text", "o": np.array([None] * 8)}
    (kept,) = ps.prefetch([batch], where)
    assert seen == {"x": ((8, 2), np.float32), "u": ((8,), np.dtype("<U2")), "t": ((), np.dtype(object)), "o": ((8,), np.dtype(object))}
    assert (kept["u"] is batch["u"], kept["t"], kept["o"] is batch["o"]) == (True, "text", True)
    seen.clear()
    (kept,) = ps.Loader([{"x": X[0], "t": "text"}] * 8, where, batch_size=8)
    assert seen == {"x": ((8, 2), np.float32), "t": ((8,), np.dtype(object))}
    assert kept["t"].tolist() == ["text"] * 8


def test_scalars_under_a_callable_stay_what_they_are() -> None:
    for value in (3, 0.5, True, np.int8(1)):
        (kept,) = ps.prefetch([{"n": value}], lambda path, shape, dtype: ps.HOST)
        assert kept["n"] is value


def test_dicts_whose_keys_cannot_be_sorted(S: NamedSharding) -> None:
    with pytest.raises(ps.PlacementError, match=r"keys \[1, 'a'\].*ps\.HOST"):
        next(iter(ps.prefetch([{"x": [{1: X, "a": X}]}], S)))
    (batch,) = ps.prefetch(iter([{"x": X, "m": {1: 2, "a": 3}}]), {"x": S, "m": ps.HOST}, transform=lambda b: b)
    assert batch["m"] == {1: 2, "a": 3}


# --- containers


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Registered:
    x: Any
    y: Any
    name: str = dataclasses.field(metadata={"static": True}, default="static")


TREES: dict[str, Callable[[Any], Any]] = {
    "the leaf itself": lambda x: x,
    "dict": lambda x: {"z": x, "a": {"b": x}},
    "dict of integers": lambda x: {3: x, 1: x},
    "tuple": lambda x: (x, (x,)),
    "list": lambda x: [x, [x]],
    "named tuple": lambda x: Pair(x, Pair(x, None)),
    "ordered dict": lambda x: collections.OrderedDict(z=x, a=x),
    "default dict": lambda x: collections.defaultdict(list, z=x, a=x),
    "dataclass": lambda x: Registered(x, {"y": x}, "kept"),
    "None": lambda x: {"x": x, "none": None, "more": (None, [])},
    "partial": lambda x: {"f": jax.tree_util.Partial(max, x)},
    "deep": lambda x: {"a": [{"b": ({"c": [x]},)}]},
}


@pytest.mark.parametrize("kind", TREES)
def test_containers_come_back_as_they_were(kind: str, S: NamedSharding) -> None:
    make = TREES[kind]
    batch, example = make(X), make(X[0])
    want = jax.tree.structure(batch)
    loaders: list[Any] = [
        ps.prefetch([batch], S),
        ps.prefetch(iter([batch]), S, transform=lambda b: b),
        ps.prefetch([batch], S, device_transform=lambda b: b),
        ps.Loader([example] * 8, S, batch_size=8),
        ps.Loader(iter([example] * 8), S, batch_size=8, transform=lambda b: b),
        ps.Loader([example] * 8, S, batch_size=8, collate=lambda xs: jax.tree.map(lambda *parts: np.stack(parts), *xs)),
    ]
    if kind not in ("list", "deep", "None"):
        loaders.append(ps.Loader(make(X), S, batch_size=8))
    for loader in loaders:
        (got,) = loader
        assert jax.tree.structure(got) == want
        assert type(got) is type(batch) or isinstance(got, jax.Array)
        assert all(leaf.sharding.is_equivalent_to(S, leaf.ndim) for leaf in jax.tree.leaves(got))


@pytest.mark.parametrize("kind", TREES)
def test_the_mask_goes_into_mappings_and_beside_others(kind: str, S: NamedSharding) -> None:
    batch, example = TREES[kind](X), TREES[kind](X[0])
    sources: list[tuple[Any, Any]] = [([batch, TREES[kind](X[:3])], None), ([example] * 11, 8), (iter([example] * 11), 8)]
    for source, size in sources:
        for _, got in zip(range(2), ps.Loader(source, S, batch_size=size, remainder="pad"), strict=True):
            if isinstance(batch, dict):
                assert got["mask"].shape == (8,)
                assert type(got) is type(batch)
                del got["mask"]
            else:
                got, mask = got
                assert mask.shape == (8,)
            assert jax.tree.structure(got) == jax.tree.structure(batch)


def test_the_order_of_an_ordered_dict(S: NamedSharding) -> None:
    (batch,) = ps.prefetch([collections.OrderedDict(z=X, a=X + 1, m=X + 2)], S)
    assert list(batch) == ["z", "a", "m"]
    assert [float(leaf[0, 0]) for leaf in batch.values()] == [0, 1, 2]


class Careful:
    """A container that looks at what it is given, as libraries' containers do."""

    def __init__(self, x: Any, name: Any) -> None:
        if x.ndim != 2 or x.shape[0] != name.shape[0] or np.dtype(x.dtype).kind != "f":
            raise TypeError(f"wrong: {x!r}, {name!r}")
        self.x = x
        self.name = name


jax.tree_util.register_pytree_with_keys(
    Careful,
    lambda node: (((jax.tree_util.GetAttrKey("x"), node.x), (jax.tree_util.GetAttrKey("name"), node.name)), None),
    lambda _, children: Careful(*children),
)


def names_on_host(mesh: Mesh) -> Any:
    rows = NamedSharding(mesh, PartitionSpec("data"))
    return lambda path, shape, dtype: ps.HOST if path.endswith("name") else rows


CAREFUL_OPTIONS: list[dict[str, Any]] = [
    {},
    {"remainder": "pad"},
    {"transform": lambda node: node},
    {"device_transform": lambda node: node},
    {"device_transform": lambda node: Careful(node.x + 1, node.name)},
]


@pytest.mark.parametrize(
    "options", CAREFUL_OPTIONS, ids=["plain", "pad", "transform", "device_transform", "device_transform that makes one"]
)
def test_containers_that_look_at_what_they_hold(options: dict[str, Any], mesh: Mesh) -> None:
    node = Careful(X, np.array(list("abcdefgh")))
    for source in ([node] * 2, iter([node] * 2)):
        for batch in ps.prefetch(source, names_on_host(mesh), **options):
            got = batch[0] if "remainder" in options else batch
            assert type(got) is Careful
            assert isinstance(got.x, jax.Array)
            assert got.name.tolist() == list("abcdefgh")


@pytest.mark.parametrize("options", [CAREFUL_OPTIONS[i] for i in (0, 1, 3, 4)], ids=["plain", "pad", "device_transform", "made"])
def test_they_may_hold_arrays_as_a_source(options: dict[str, Any], mesh: Mesh) -> None:
    names = np.array([str(i) for i in range(20)])
    loader = ps.Loader(Careful(np.ones((20, 3), np.float32), names), names_on_host(mesh), batch_size=8, **options)
    got = [batch[0] if "remainder" in options else batch for batch in loader]
    assert [type(node) for node in got] == [Careful] * len(got)
    assert [node.name[0] for node in got[:2]] == ["0", "8"]


# --- structure


def test_batches_may_change_their_form(S: NamedSharding) -> None:
    """Each is placed as it is; a step that is compiled for the first is compiled again."""
    sources = [{"x": X}, {"x": X, "y": X}, (X, X), {"x": X.astype(np.int8)}, {"x": X[:, :1]}, {"x": np.ones((16, 2))}]
    for source in (sources, iter(sources)):
        got = list(ps.prefetch(source, S))
        assert [jax.tree.structure(batch) for batch in got] == [jax.tree.structure(batch) for batch in sources]
        assert [jax.tree.leaves(batch)[0].shape for batch in got] == [jax.tree.leaves(batch)[0].shape for batch in sources]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"y": X[0]}, r"lacks \['x'\] and has \['y'\]"),
        ({"x": X[0], "y": X[0]}, r"has \['y'\] beside"),
        ({"x": [X[0]]}, r"lacks \['x'\]"),
        ({"x": X[0][:1]}, r"leaf x: the example at row 5 has shape \(1,\), others of its batch have \(2,\)"),
        ({"x": X[0].astype(np.float64)}, r"leaf x: .* dtype float64, others of its batch have float32"),
        ({"x": X[0].astype(np.int8)}, r"leaf x: .* dtype int8, others of its batch have float32"),
        ({"x": 1}, r"leaf x: the example at row 5 has shape \(\)"),
    ],
    ids=str,
)
def test_examples_that_do_not_stack(other: Any, words: str, S: NamedSharding) -> None:
    """Whichever of them is read first."""
    examples = [{"x": X[0]}] * 5 + [other] + [{"x": X[0]}] * 2
    for workers in (1, 2, 8):
        for source in (examples, iter(examples)):
            with pytest.raises(ps.BatchError) as caught:
                next(iter(ps.Loader(source, S, batch_size=8, workers=workers)))
            assert workers > 1 or re.search(words, str(caught.value))
            assert "row" in str(caught.value)


def test_byte_order_does_not_matter_among_examples(S: NamedSharding) -> None:
    examples = [np.full(2, i, "<i4" if i % 2 else ">i4") for i in range(8)]
    (batch,) = ps.Loader(examples, S, batch_size=8)
    assert np.asarray(batch).tolist() == [[i, i] for i in range(8)]


# --- scalars, None and PRNG keys


def mixed() -> dict[str, Any]:
    return {"x": X, "step": 3, "lr": 0.1, "flag": True, "zero": np.array(5.0), "one": np.int8(1), "opt": None, "dev": jax.numpy.ones(())}


def test_scalars_and_none_in_a_batch(S: NamedSharding, R: NamedSharding) -> None:
    options: list[dict[str, Any]] = [{}, {"transform": lambda b: b}, {"remainder": "pad"}, {"device_transform": lambda b: b}]
    for some in options:
        for source in ([mixed()], iter([mixed()])):
            (batch,) = ps.prefetch(source, S, **some)
            assert batch["opt"] is None
            dtypes = {"step": "int32", "lr": "float32", "flag": "bool", "zero": "float32", "one": "int8", "dev": "float32"}
            for name, dtype in dtypes.items():
                assert (batch[name].shape, batch[name].dtype) == ((), dtype)
                assert batch[name].sharding.is_fully_replicated
                assert float(batch[name]) == float(np.asarray(mixed()[name], dtype))
            assert batch["x"].sharding.is_equivalent_to(S, 2)
    where = {"img": NamedSharding(S.mesh, PartitionSpec("data", None)), "lab": NamedSharding(S.mesh, PartitionSpec("data", None))}
    with pytest.raises(ps.PlacementError, match=r"leaf lab: shape \(8,\).*rank 1"):
        next(iter(ps.prefetch([{"img": X, "lab": np.ones(8)}], where)))
    (batch,) = ps.prefetch([{"x": np.ones(8), "y": np.ones(8)}], {"x": None, "y": PartitionSpec()})
    assert batch["x"].sharding.is_equivalent_to(S, 1)
    assert batch["y"].sharding.is_equivalent_to(R, 1)


def test_scalars_of_examples_become_rows(S: NamedSharding) -> None:
    example = {**mixed(), "x": X[0]}
    for options in ({}, {"transform": lambda b: b}):
        for source in ([example] * 11, iter([example] * 11)):
            full, last = ps.Loader(source, S, batch_size=8, remainder="pad", **options)
            for batch in (full, last):
                assert batch["opt"] is None
                assert {name: batch[name].shape for name in ("step", "lr", "flag", "zero", "one", "dev")} == dict.fromkeys(
                    ("step", "lr", "flag", "zero", "one", "dev"), (8,)
                )
            assert np.asarray(last["step"]).tolist() == [3] * 3 + [0] * 5
            assert np.asarray(last["flag"]).tolist() == [True] * 3 + [False] * 5


NOTHING = pytest.mark.parametrize("nothing", [{}, None, (), [], {"a": None}, [[], {}]], ids=repr)


@NOTHING
def test_an_example_or_a_batch_without_a_leaf_is_an_error(nothing: Any, S: NamedSharding) -> None:
    async def stream() -> Any:
        for item in [{"x": X}] * 3 + [nothing]:
            yield item

    batches = [{"x": X}] * 3 + [nothing]
    for source in (batches, iter(batches), lambda: iter(batches), stream):
        loader = iter(ps.prefetch(source, S, reuses_buffers=False))
        assert len([next(loader) for _ in range(3)]) == 3
        with pytest.raises(ps.SourceError, match=r"the source gave no leaves for batch 3 of the epoch: it is .*`return`"):
            next(loader)
    examples = [{"x": X[0]}] * 11 + [nothing] * 5
    for source in (examples, iter(examples)):
        with pytest.raises(ps.SourceError, match="no leaves for the example at row 11: it is"):
            list(ps.Loader(source, S, batch_size=8, workers=1))
    rows = [{"x": X[0]}] * 15 + [nothing]
    with pytest.raises(ps.SourceError, match="the example at row 15"):
        list(ps.Loader(rows, S, batch_size=16, shuffle=True, workers=1))


@NOTHING
def test_a_function_that_returns_nothing_is_named(nothing: Any, S: NamedSharding) -> None:
    columns = {"x": np.ones((16, 2), np.float32)}

    def at_row_3(example: Any) -> Any:
        return nothing if example["x"][0] == 3 else example

    numbered = {"x": np.arange(16, dtype=np.float32)[:, None]}
    for source in (numbered, [{"x": row} for row in numbered["x"]], iter([{"x": row} for row in numbered["x"]])):
        with pytest.raises(ps.SourceError, match=r"transform returned .* for the example at row 3\b.*return"):
            list(ps.Loader(source, S, batch_size=8, transform=at_row_3, workers=1))
    for source in (columns, [{"x": X[0]}] * 16, iter([{"x": X[0]}] * 16)):
        with pytest.raises(ps.SourceError, match=r"collate returned .*return"):
            list(ps.Loader(source, S, batch_size=8, collate=lambda _: nothing))
    for source in ([columns] * 2, iter([columns] * 2)):
        with pytest.raises(ps.SourceError, match=r"transform returned .* for batch 0\b.*return"):
            list(ps.prefetch(source, S, transform=lambda _: nothing))


def test_entries_that_are_none_stay(S: NamedSharding) -> None:
    for source in ([{"x": X, "y": None}], iter([{"x": X, "y": None}])):
        (batch,) = ps.prefetch(source, S)
        assert batch["y"] is None
    (batch,) = ps.Loader([{"x": X[0], "y": None}] * 8, S, batch_size=8)
    assert batch["y"] is None


# --- mappings that JAX does not know


class Encoding(collections.UserDict[str, Any]):
    """As the result of a tokenizer."""


class Lazy(Mapping[str, Any]):
    def __init__(self, **values: Any) -> None:
        self._values = values

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


MAPPINGS = pytest.mark.parametrize(
    "kind",
    [Encoding, Lazy, collections.Counter, lambda **values: types.MappingProxyType(values)],
    ids=["UserDict", "Mapping", "dict", "proxy"],
)


@MAPPINGS
def test_any_mapping_is_a_dict(kind: Any, S: NamedSharding, R: NamedSharding) -> None:
    def check(got: Any, x: Any = X) -> None:
        assert type(got) is dict
        assert type(got["below"]) is dict
        assert set(got) >= {"x", "below"}
        assert np.array_equal(got["x"], x)
        assert np.array_equal(got["below"]["y"], x)

    batch = kind(x=X, below=kind(y=X))
    for where in (S, None, {"x": S, "below": None}, {"x": S, "below": {"y": R}}, lambda path, shape, dtype: S):
        for source in ([batch] * 2, [{"x": X, "below": {"y": X}}, batch]):
            for got in ps.prefetch(source, where):
                check(got)
    for source in (iter([batch]), lambda: iter([batch])):
        (got,) = ps.prefetch(source, S, reuses_buffers=False)
        check(got)
    (got,) = ps.prefetch([X], S, transform=lambda _: batch)
    check(got)
    examples = [kind(x=row, below=kind(y=row)) for row in X]
    (got,) = ps.Loader(examples, S, batch_size=ROWS, remainder="pad")
    check(got)
    assert got["mask"].all()
    (got,) = ps.Loader({"x": X}, {"x": S, "below": S}, batch_size=ROWS, collate=lambda b: kind(x=b["x"], below=kind(y=b["x"])))
    check(got)
    (got,) = ps.Loader(range(ROWS), S, batch_size=ROWS, transform=lambda i: examples[i])
    check(got)


@MAPPINGS
def test_a_mapping_that_stays_on_the_host_stays_what_it_is(kind: Any, S: NamedSharding) -> None:
    below = kind(y=X)
    for options in ({"sharding": {"x": S, "below": ps.HOST}}, {"sharding": S, "host": "below"}):
        (got,) = ps.prefetch([kind(x=X, below=below)], **options)
        assert got["below"] is below


def test_a_registered_mapping_stays_what_it_is(S: NamedSharding) -> None:
    for batch in (collections.OrderedDict(b=X, a=X), collections.defaultdict(list, a=X)):
        (got,) = ps.prefetch([batch], S)
        assert type(got) is type(batch)


# --- lists of numbers


class Level(enum.IntEnum):
    LOW = 1


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([1] * 5, np.int32), ([1.5, 2], np.float32), ([True, False], bool), ([[1, 2], [3, 4]], np.int32), ([1j], np.complex64),
        ([[[0.5]]], np.float32), ([Level.LOW, 2], np.int32), ([2**31], None),
    ],
    ids=str,
)  # fmt: skip
def test_a_list_of_numbers_is_one_array(values: list[Any], dtype: Any, S: NamedSharding) -> None:
    if dtype is None:
        with pytest.raises(ps.NarrowingError, match="leaf ids: .*2147483648"):
            list(ps.Loader([{"ids": values}] * 8, S, batch_size=8))
        return
    want = np.array([values] * 8)
    example = {"ids": values, "x": X[0]}
    for source in ([example] * 8, iter([example] * 8)):
        for options in ({}, {"transform": lambda e: e}, {"remainder": "pad"}):
            if options and not isinstance(source, list):
                source = iter([example] * 8)
            (got,) = ps.Loader(source, S, batch_size=8, **options)
            assert (got["ids"].shape, got["ids"].dtype) == (want.shape, dtype)
            assert np.array_equal(got["ids"], want)
    batch = {"ids": [values] * 8, "x": X}
    for source in ([batch] * 2, iter([batch] * 2)):
        for got in ps.prefetch(source, {"ids": S, "x": None}):
            assert (got["ids"].shape, got["ids"].dtype) == (want.shape, dtype)
    (got,) = ps.Loader([X[0]] * 8, S, batch_size=8, collate=lambda _: batch)
    assert np.array_equal(got["ids"], want)
    (got,) = ps.prefetch([X], S, transform=lambda _: batch)
    assert np.array_equal(got["ids"], want)


def test_lists_of_other_things_and_tuples_stay_containers(S: NamedSharding) -> None:
    (got,) = ps.Loader([{"pair": [X[0], 3], "both": (1, 2)}] * 8, S, batch_size=8)
    assert (type(got["pair"]), type(got["both"])) == (list, tuple)
    assert [leaf.shape for leaf in (*got["pair"], *got["both"])] == [(8, 2), (8,), (8,), (8,)]
    (got,) = ps.Loader([[np.float32(1), np.float64(2)]] * 8, S, batch_size=8)
    assert [(leaf.shape, leaf.dtype) for leaf in got] == [((8,), np.float32)] * 2
    for batch in ps.prefetch([[X, X], [X, X]], S):
        assert [leaf.shape for leaf in batch] == [(8, 2), (8, 2)]
    (got,) = ps.prefetch([{"t": ["a"] * 8, "x": X}], {"t": ps.HOST, "x": S})
    assert got["t"] == ["a"] * 8
    ids = [[1, 2], [3]] * 4
    for options in ({"sharding": {"t": ps.HOST, "x": S}}, {"sharding": S, "host": ["t"]}):
        (got,) = ps.prefetch([{"t": ids, "x": X}], **options)
        assert got["t"] == ids


def test_a_structure_that_was_seen_does_not_hide_a_list_of_numbers(S: NamedSharding) -> None:
    got = list(ps.prefetch([{"a": [X, X]}, {"a": [1.5] * 8}, {"a": [X, X]}, {"a": X}, {"a": [1] * 8}], S))
    assert [jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), batch["a"]) for batch in got] == [
        [((8, 2), np.float32)] * 2, ((8,), np.float32), [((8, 2), np.float32)] * 2, ((8, 2), np.float32), ((8,), np.int32)
    ]  # fmt: skip


def test_lists_under_a_list_of_rules(S: NamedSharding, R: NamedSharding) -> None:
    (got,) = ps.prefetch([{"a": [X, X]}], {"a": [S, R]})
    assert got["a"][1].sharding.is_fully_replicated
    (got,) = ps.prefetch([{"a": [1, 2], "x": X}], {"a": [R, R], "x": S})
    assert [leaf.shape for leaf in got["a"]] == [(), ()]


def test_ragged_lists_of_examples(S: NamedSharding) -> None:
    examples = [{"ids": [1] * (5 if row == 3 else 7)} for row in range(8)]
    for source in (examples, iter(examples)):
        with pytest.raises(ps.BatchError, match=r"^leaf ids: the example at row 3 has shape \(5,\), others .* \(7,\); .*collate"):
            list(ps.Loader(source, S, batch_size=8, workers=1))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([[1, 2], [3]] * 4, r"\[0\] has shape \(2,\), \[1\] has shape \(1,\)"),
        ([1, [2]] * 4, r"\[0\] has shape \(\), \[1\] has shape \(1,\)"),
        ([[[1], [2, 3]]] * 8, r"in \[0\], \[0\] has shape \(1,\), \[1\] has shape \(2,\)"),
        ([[1], []] * 4, r"\[0\] has shape \(1,\), \[1\] has shape \(0,\)"),
    ],
    ids=str,
)
def test_a_list_that_is_ragged(values: Any, words: str, S: NamedSharding) -> None:
    for source in ([{"ids": values}], iter([{"ids": values}])):
        with pytest.raises(ps.BatchError, match=f"^leaf ids: the list is ragged: {words}; .*collate"):
            list(ps.prefetch(source, S))
    with pytest.raises(ps.BatchError, match=f"^leaf ids: the list is ragged: {words}; .*collate"):
        list(ps.Loader([{"ids": values}] * 8, S, batch_size=8))


@pytest.mark.parametrize("values", [[2**70] * 8, [2**63, *[-1] * 7]], ids=["70 bits", "no common type"])
def test_integers_of_a_list_that_no_type_holds(values: Any, S: NamedSharding) -> None:
    with pytest.raises(ps.NarrowingError, match="leaf ids: no type of 64 bits holds all integers"):
        list(ps.prefetch([{"ids": values}], S))


# --- what holds itself


def holding_itself(kind: str) -> Any:
    whole: Any
    if kind == "list":
        whole = [X]
        whole.append(whole)
    elif kind == "in a tuple":
        whole = {"x": X}
        whole["below"] = (whole, X)
    else:
        whole = {"dict": dict, "OrderedDict": collections.OrderedDict, "UserDict": collections.UserDict}[kind](x=X)
        whole["below"] = whole
    return whole


@pytest.mark.parametrize("kind", ["dict", "list", "in a tuple", "OrderedDict", "UserDict"])
def test_a_container_that_holds_itself_is_said(kind: str, S: NamedSharding) -> None:
    odd = holding_itself(kind)
    for source in ([odd] * 8, iter([odd] * 8), lambda: iter([odd] * 8)):
        for options in ({}, {"batch_size": 8}):
            with pytest.raises(ps.BatchError, match="holds itself: "):
                list(ps.Loader(source, S, reuses_buffers=False, **options))
    for function in ("transform", "collate"):
        with pytest.raises(ps.BatchError, match="holds itself: "):
            list(ps.Loader([X[0]] * 8, S, batch_size=8, **{function: lambda _: odd}))
    with pytest.raises(ps.BatchError, match="holds itself: "):
        list(ps.prefetch([{"x": X, "odd": odd}, {"x": X, "odd": odd}], {"x": S, "odd": None}))
    if kind in ("dict", "in a tuple", "OrderedDict"):
        with pytest.raises(ps.BatchError, match="holds itself: "):
            list(ps.prefetch(iter([odd]), S, transform=lambda b: b))
        for source in (lambda: odd, lambda: ps.OnDevice(odd)):
            with pytest.raises(ps.ConfigError, match="holds itself: "):
                ps.Loader(source(), S, batch_size=8)
    (kept,) = ps.prefetch([{"x": X, "odd": odd}], S, host="odd")
    assert kept["odd"] is odd


def test_a_batch_that_is_nested_too_deep_is_said(S: NamedSharding) -> None:
    deep: Any = X
    for _ in range(2000):
        deep = [deep]
    for source in ([deep], iter([deep])):
        with pytest.raises(ps.BatchError, match="nested more than"):
            list(ps.prefetch(source, S))


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_keys_are_kept_bit_for_bit(impl: str, S: NamedSharding) -> None:
    keys = jax.random.split(jax.random.key(7, impl=impl), 8)
    want = np.asarray(jax.random.key_data(keys))
    for options in ({}, {"transform": lambda b: b}, {"remainder": "pad"}, {"device_transform": lambda b: b}):
        for source in ([{"k": keys, "x": X}], iter([{"k": keys, "x": X}])):
            (batch,) = ps.prefetch(source, S, **options)
            assert batch["k"].dtype == keys.dtype
            assert batch["k"].sharding.is_equivalent_to(S, 1)
            assert np.array_equal(jax.random.key_data(batch["k"]), want)
    (batch,) = ps.prefetch([{"k": keys[0], "x": X}], S)
    assert batch["k"].sharding.is_fully_replicated


def test_keys_of_examples_and_short_batches(S: NamedSharding) -> None:
    keys = jax.random.split(jax.random.key(7), 11)
    want = np.asarray(jax.random.key_data(keys))
    sources: list[tuple[Any, Any]] = [
        ([{"k": keys[i], "x": X[0]} for i in range(11)], 8),
        (({"k": keys[i], "x": X[0]} for i in range(11)), 8),
        ([{"k": keys[:8], "x": X}, {"k": keys[8:], "x": X[:3]}], None),
    ]
    for source, size in sources:
        full, last = ps.Loader(source, S, batch_size=size, remainder="pad")
        assert np.array_equal(jax.random.key_data(full["k"]), want[:8])
        assert np.array_equal(np.asarray(jax.random.key_data(last["k"]))[:3], want[8:])
        assert jax.random.uniform(last["k"][7]).shape == ()  # padding is a key that works
        assert last["mask"].tolist() == [True] * 3 + [False] * 5


@pytest.mark.parametrize(
    "other", [jax.random.PRNGKey(0), jax.random.key(0, impl="rbg"), jax.random.split(jax.random.key(0)), np.float32(0), "text"], ids=str
)
def test_keys_among_what_are_none(other: Any, S: NamedSharding) -> None:
    examples = [{"k": jax.random.key(0)}] * 7
    for workers in (1, 8):
        for source in ([*examples, {"k": other}], iter([{"k": other}, *examples])):
            with pytest.raises((ps.BatchError, ps.LeafTypeError), match="leaf k"):
                next(iter(ps.Loader(source, S, batch_size=8, workers=workers)))


def test_old_keys_are_numbers(S: NamedSharding) -> None:
    keys = jax.random.split(jax.random.PRNGKey(0), 8)
    (batch,) = ps.Loader([{"k": key} for key in keys], S, batch_size=8)
    assert np.array_equal(batch["k"], keys)


# --- ducks


class OldArray:
    def __array__(self) -> np.ndarray:
        return X


class NewArray:
    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return X


class Interface:
    __array_interface__ = X.__array_interface__


class DLPack:
    def __dlpack__(self, **options: Any) -> Any:
        return X.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return X.__dlpack_device__()


DUCKS: dict[str, Callable[[], Any]] = {
    "__array__": OldArray,
    "__array__ of NumPy 2": NewArray,
    "__array_interface__": Interface,
    "__dlpack__": DLPack,
    "memoryview": lambda: memoryview(X),
    "a cast view": lambda: memoryview(X.tobytes()).cast("f", (8, 2)),
    "a jax.Array": lambda: jax.numpy.asarray(X),
    "a matrix": lambda: X.view(np.matrix),
    "an array": lambda: X,
}


@pytest.mark.parametrize("kind", DUCKS)
def test_ducks(kind: str, S: NamedSharding) -> None:
    for source in ([{"x": DUCKS[kind]()}], iter([{"x": DUCKS[kind]()}])):
        (batch,) = ps.prefetch(source, S)
        assert batch["x"].dtype == np.float32
        assert np.array_equal(batch["x"], X)
    for source in ([DUCKS[kind]()] * 8, iter([DUCKS[kind]()] * 8)):
        (batch,) = ps.Loader(source, S, batch_size=8)
        assert np.array_equal(batch, np.stack([X] * 8))


def test_arrays_of_the_standard_library(S: NamedSharding) -> None:
    for code in "bBhHiIfd":
        made = array.array(code, range(8))
        (batch,) = ps.prefetch([made], S)
        assert np.asarray(batch).tolist() == list(range(8))


def test_memory_of_a_duck_may_be_overwritten(S: NamedSharding) -> None:
    def source() -> Iterator[Any]:
        numbers = array.array("f", [0] * 8)
        for i in range(5):
            for j in range(8):
                numbers[j] = i
            yield numbers

    for options in ({}, {"transform": lambda x: x}):
        assert [np.unique(np.asarray(batch)).tolist() for batch in ps.prefetch(source(), S, **options)] == [[i] for i in range(5)]


def failing(error: Exception) -> Any:
    class Failing:
        def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
            raise error

    return Failing()


def test_ducks_that_fail_are_named(S: NamedSharding) -> None:
    with pytest.raises(ps.LeafTypeError, match="leaf x: .*Failing, of which NumPy makes no array") as caught:
        next(iter(ps.prefetch([{"x": failing(ValueError("ragged"))}], S)))
    assert str(caught.value.__cause__) == "ragged"
    error = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError) as other:
        next(iter(ps.prefetch([{"x": failing(error)}], S)))
    assert other.value is error
    assert "leaf x" in error.__notes__


def test_deleted_arrays_are_refused(S: NamedSharding) -> None:
    gone = jax.device_put(X, S)
    gone.delete()
    with pytest.raises(ps.PlacementError, match=r"leaf x: the jax\.Array .* was deleted"):
        next(iter(ps.prefetch([{"x": gone}], S)))
    with pytest.raises(ps.PlacementError, match=r"leaf x: the jax\.Array .* was deleted"):
        next(iter(ps.Loader([{"x": gone}] * 8, S, batch_size=8)))


def test_what_is_shared_and_what_is_copied() -> None:
    """`as_array` shares the memory where that can be; `own` never does."""
    for make in DUCKS.values():
        duck = make()
        if not isinstance(duck, jax.Array):
            assert np.shares_memory(as_array(duck), as_array(duck))
    held = {"a": [X, (X,)], "t": "text", "n": None, "i": 3}
    owned = private_copy(held)
    assert jax.tree.structure(owned) == jax.tree.structure(held)
    assert not np.shares_memory(owned["a"][0], X)
    assert np.array_equal(owned["a"][1][0], X)
    read_only = X.copy()
    read_only.flags.writeable = False
    assert private_copy(read_only).flags.writeable
    assert private_copy(jax.numpy.ones(2)) is not None


# --- torch


@pytest.mark.ecosystem
class TestTorch:
    def place(self, leaf: Any, where: Any, **options: Any) -> Any:
        (batch,) = ps.prefetch(iter([{"x": leaf}]), where, **options)
        return batch["x"]

    @pytest.mark.parametrize(
        "name", ["float32", "float16", "bfloat16", "int8", "uint8", "int16", "int32", "int64", "bool", "complex64", "float64", "uint16"]
    )
    def test_dtypes(self, name: str, S: NamedSharding) -> None:
        torch = pytest.importorskip("torch")
        tensor = (torch.arange(16) % 2).reshape(8, 2).to(getattr(torch, name))
        want = jax.dtypes.canonicalize_dtype(jax.numpy.dtype(name))
        for leaf in (tensor, tensor.T.contiguous().T, tensor[:, ::2], tensor.flip(0), torch.nn.Parameter(tensor, requires_grad=False)):
            got = self.place(leaf, S)
            assert got.dtype == want
            assert np.asarray(got).astype(np.complex64).tolist() == leaf.to(torch.complex64).tolist()
        (batch,) = ps.Loader([{"x": row} for row in tensor], S, batch_size=8)
        assert batch["x"].dtype == want

    @pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"])
    def test_small_floats_keep_their_bits(self, name: str, S: NamedSharding) -> None:
        torch = pytest.importorskip("torch")
        if not hasattr(torch, name):
            pytest.skip(f"this torch has no {name}")
        bits = torch.arange(16, dtype=torch.uint8).reshape(8, 2)
        got = self.place(bits.view(getattr(torch, name)), S)
        assert got.dtype == name
        assert np.array_equal(np.asarray(got).view(np.uint8), bits.numpy())

    def test_bfloat16_keeps_its_bits(self, S: NamedSharding) -> None:
        torch = pytest.importorskip("torch")
        bits = (torch.arange(16, dtype=torch.int16) * 4099).reshape(8, 2)
        for leaf in (
            bits.view(torch.bfloat16),
            bits.view(torch.bfloat16)[::2].repeat_interleave(2, 0),
            bits.T.contiguous().T.view(torch.bfloat16),
        ):
            assert np.array_equal(np.asarray(self.place(leaf, S)).view(np.int16), leaf.view(torch.int16).numpy())

    def test_scalars(self, S: NamedSharding) -> None:
        torch = pytest.importorskip("torch")
        for tensor in (torch.tensor(3.0), torch.tensor(3.0, dtype=torch.bfloat16), torch.tensor(3)):
            got = self.place(tensor, S)
            assert got.shape == ()
            assert float(got) == 3

    def test_gradients_and_lazy_bits(self, S: NamedSharding) -> None:
        torch = pytest.importorskip("torch")
        leaf = torch.ones(8, requires_grad=True)
        for tensor in (leaf, leaf * 2, torch.nn.Parameter(torch.ones(8))):
            for options in ({}, {"transform": lambda batch: batch}):
                assert np.array_equal(self.place(tensor, S, **options), tensor.detach().numpy())
        conjugate = torch.complex(torch.ones(8), torch.ones(8)).conj()
        assert np.asarray(self.place(conjugate, S)).tolist() == [1 - 1j] * 8
        assert np.asarray(self.place(conjugate.imag, S)).tolist() == [-1.0] * 8

    @pytest.mark.parametrize("shared", [False, True])
    def test_shared_memory_is_copied(self, shared: bool, S: NamedSharding) -> None:
        torch = pytest.importorskip("torch")

        def source() -> Iterator[Any]:
            tensor = torch.empty(8, 64, dtype=torch.bfloat16)
            if shared:
                tensor.share_memory_()
            for i in range(5):
                tensor.fill_(i)
                yield {"x": tensor, "kept": tensor}
            tensor.zero_()

        for options in ({}, {"transform": lambda batch: batch}):
            batches = list(ps.prefetch(source(), {"x": S, "kept": ps.HOST}, **options))
            assert [np.unique(np.asarray(batch["x"], np.float32)).tolist() for batch in batches] == [[i] for i in range(5)]
            assert [batch["kept"].unique().tolist() for batch in batches] == [[i] for i in range(5)]

    def test_what_is_refused(self, S: NamedSharding) -> None:
        torch = pytest.importorskip("torch")
        sparse = torch.eye(8).to_sparse()
        with pytest.raises(ps.LeafTypeError, match=r"leaf x: a sparse or quantized torch tensor .*to_dense"):
            self.place(sparse, S)
        with pytest.warns(UserWarning, match="experimental"):
            halves = torch.ones(8, dtype=torch.complex32)
        with pytest.raises(ps.LeafTypeError, match=r"leaf x: dtype torch\.complex32"):
            self.place(halves, S)

    def test_subclasses(self, S: NamedSharding) -> None:
        torch = pytest.importorskip("torch")

        class Image(torch.Tensor):
            pass

        image = torch.ones(8, 2, dtype=torch.bfloat16).as_subclass(Image)
        got = self.place(image, S)
        assert got.dtype == jax.numpy.bfloat16

    def test_on_the_host(self) -> None:
        torch = pytest.importorskip("torch")
        tensor = torch.ones(8)
        (batch,) = ps.prefetch([{"x": tensor}], ps.HOST)
        assert batch["x"] is tensor
        (batch,) = ps.Loader([{"x": tensor}] * 8, ps.HOST, batch_size=8)
        assert batch["x"].dtype == object


@pytest.mark.ecosystem
def test_tensorflow_tensors(S: NamedSharding) -> None:
    tf: Any = pytest.importorskip("tensorflow")
    for dtype in (tf.float32, tf.bfloat16, tf.int32, tf.bool):
        tensor = tf.cast(tf.reshape(tf.range(16), (8, 2)) % 2, dtype)
        (batch,) = ps.prefetch([{"x": tensor}], S)
        assert batch["x"].dtype == dtype.name
        assert np.asarray(batch["x"]).astype(np.float32).tolist() == tensor.numpy().astype(np.float32).tolist()
