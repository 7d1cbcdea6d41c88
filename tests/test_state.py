"""A state comes back exactly, or not at all: round trips, damage, crashes, other settings."""

from __future__ import annotations

import json
import os
import random
import signal
import stat
import struct
import subprocess
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.extra.numpy as hnp
import ml_dtypes
import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prefetchshard.base.codec import pack_snapshot, unpack_snapshot
from prefetchshard.base.errors import StateError
from prefetchshard.base.position import StartPoint
from prefetchshard.resuming import loader_state as state_module
from prefetchshard.resuming.loader_state import Fingerprint, LoaderState

Ext = msgspec.msgpack.Ext
ARRAYS = Fingerprint(seed=7, shuffle=True, length=2**33, batch_size=10, remainder="drop", kind="arrays")
ITERATOR = Fingerprint(seed=0, shuffle=False, length=None, batch_size=None, remainder="error", kind="iterator")
BIG_SEED = Fingerprint(seed=2**255 + 1, shuffle=False, length=0, batch_size=1, remainder="pad", kind="dataset")
SNAPSHOT = {"rng": np.random.default_rng(3).bit_generator.state, "at": (1, [2, {3}]), "w": np.arange(6, dtype=">i2").reshape(2, 3)}
STATES = [
    LoaderState(fingerprint=ARRAYS),
    LoaderState(run=1, run_epoch=2, epoch=3, rows=2**33, batches=2**32, step=2**40, sample=bytes(range(8)), fingerprint=ARRAYS),
    LoaderState(resumes_by="snapshot", snapshot=pack_snapshot(SNAPSHOT), since_snapshot=5, fingerprint=ITERATOR),
    LoaderState(resumes_by="replay", rows=30, since_snapshot=30, sample=b"", snapshot=b"", fingerprint=BIG_SEED),
]


def exact(value: Any) -> Any:
    """A form that differs wherever two values differ in type, bits, order or shape."""
    kind = type(value)
    if isinstance(value, np.ndarray | np.generic) and not isinstance(value, np.str_ | np.bytes_):
        return kind, value.dtype.str, value.dtype.name, value.shape, value.tobytes()
    if kind is float:
        return kind, struct.pack("<d", value)
    if kind is complex:
        return kind, struct.pack("<dd", value.real, value.imag)
    if kind in (set, frozenset):
        return kind, frozenset(Counter(exact(item) for item in value).items())
    if isinstance(value, dict):
        return kind, tuple((exact(key), exact(item)) for key, item in value.items())
    if kind in (list, tuple):
        return kind, tuple(exact(item) for item in value)
    if isinstance(value, bytes | bytearray):
        return kind, bytes(value)
    if isinstance(value, str):  # a NumPy text would leave out zeros at its end
        return kind, str.__str__(value)
    return kind, value


def reseal(payload: bytes) -> bytes:
    return state_module._seal(payload)


def payload_of(state: LoaderState) -> bytes:
    return state.encode()[state_module._HEAD_BYTES :]


# --- round trips


@pytest.mark.parametrize("state", STATES)
def test_a_state_comes_back_from_bytes(state: LoaderState) -> None:
    data = state.encode()
    for form in (data, bytearray(data), memoryview(data), memoryview(data + data)[: len(data)]):
        back = LoaderState.decode(form)
        assert back == state
        assert type(back.fingerprint) is Fingerprint
    assert LoaderState.decode(data).encode() == data
    assert hash(LoaderState.decode(data)) == hash(state)


@pytest.mark.parametrize("state", STATES)
def test_a_state_comes_back_from_json(state: LoaderState) -> None:
    text = state.to_json()
    fields = json.loads(text)
    assert json.loads(json.dumps(fields)) == fields
    assert set(fields) == set(LoaderState.__struct_fields__)
    for form in (text, text.encode(), json.dumps(fields), json.dumps(fields, indent=2)):
        assert LoaderState.from_json(form) == state
    assert "\n" not in text


@pytest.mark.parametrize("state", STATES)
def test_a_state_comes_back_from_a_file(state: LoaderState, tmp_path: Path) -> None:
    state.save(tmp_path / "state")
    assert LoaderState.load(tmp_path / "state") == state
    assert LoaderState.load(str(tmp_path / "state")) == state
    assert os.listdir(tmp_path) == ["state"]


counts = st.integers(0, 2**63 - 1)
fingerprints = st.builds(
    Fingerprint,
    seed=st.integers(-(2**256) + 1, 2**256 - 1),
    shuffle=st.booleans(),
    length=st.none() | counts,
    batch_size=st.none() | st.integers(1, 2**63 - 1),
    remainder=st.sampled_from(["drop", "error", "pad"]),
    kind=st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=64).filter(str.isprintable),
)
states = st.builds(
    LoaderState,
    **dict.fromkeys(("run", "run_epoch", "epoch", "rows", "batches", "step", "since_snapshot"), counts),
    resumes_by=st.sampled_from(["index", "snapshot", "replay"]),
    snapshot=st.none() | st.binary(),
    sample=st.none() | st.binary(max_size=64),
    fingerprint=fingerprints,
)


@settings(deadline=None)
@given(states)
def test_every_state_comes_back(state: LoaderState) -> None:
    assert LoaderState.decode(state.encode()) == state
    assert LoaderState.from_json(state.to_json()) == state


raw_arrays = st.builds(
    lambda dtype, shape, fill: np.frombuffer(fill * (int(np.prod(shape)) * dtype.itemsize), np.uint8).view(dtype).reshape(shape),
    st.sampled_from(
        [np.dtype(name) for name in ("<f4", ">f8", "<c16", "|u1", ">i8", "|S3", "<M8[ns]", ">m8[7D]", "|V5", "bfloat16", "float8_e5m2")]
    ),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=1, max_side=3),
    st.binary(min_size=1, max_size=1),
)
scalars = hnp.scalar_dtypes().flatmap(lambda dtype: hnp.from_dtype(dtype)).filter(lambda value: isinstance(value, np.generic))
text = st.text(st.characters(exclude_categories=()))
hashable_leaves = (
    st.none() | st.booleans() | st.integers() | st.integers(-(2**200), 2**200) | st.floats() | st.complex_numbers() | text | st.binary()
) | (scalars | st.sampled_from([np.bytes_(b"a\0"), np.str_("a\0"), np.str_(""), np.bytes_(b""), np.str_("\ud800"), np.bool_(True)]))
times = st.sampled_from(["M8[ns]", ">m8[s]"]).map(np.dtype).flatmap(hnp.from_dtype)  # NumPy raises where it compares years with picoseconds


def frozensets(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[frozenset[Any]]:
    """No two elements of one hash: Python would compare them, and NumPy raises where it compares np.float16(0) with 2**61 - 1."""
    return st.lists(inner, max_size=4, unique_by=hash).map(frozenset)


def pairs(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[list[tuple[Any, Any]]]:
    """Of a dict with any keys; as above."""
    keys = st.lists(st.deferred(lambda: hashables), max_size=4, unique_by=hash)
    return keys.flatmap(lambda some: st.tuples(*[inner] * len(some)).map(lambda items: list(zip(some, items, strict=True))))


hashables = st.recursive(
    hashable_leaves.filter(lambda value: not isinstance(value, (np.datetime64, np.timedelta64))) | times,
    lambda inner: st.lists(inner, max_size=4).map(tuple) | frozensets(inner),
    max_leaves=6,
)
leaves = (
    hashable_leaves
    | st.binary().map(bytearray)
    | raw_arrays
    | hnp.arrays(hnp.scalar_dtypes(), hnp.array_shapes(min_dims=0, min_side=0, max_side=3))
)
snapshots = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(text, inner, max_size=4)
        | pairs(inner).map(dict)
        | pairs(inner).map(OrderedDict)
        | frozensets(hashables).map(set)
        | frozensets(hashables)
    ),
    max_leaves=12,
)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(snapshots)
def test_every_snapshot_comes_back(value: Any) -> None:
    data = pack_snapshot(value)
    assert exact(unpack_snapshot(data)) == exact(value)
    assert pack_snapshot(unpack_snapshot(data)) == data


BASE = np.arange(24, dtype=np.float64).reshape(4, 6)


@pytest.mark.parametrize(
    "value",
    [BASE[::2, ::-3], BASE.T, BASE.astype(">f4"), np.array(5, "i1"), np.empty((0, 3), "<U4"), np.float16(-0.0), np.zeros((2, 0), "c8")]
    + [ml_dtypes.bfloat16(1.5), np.ones(3, ml_dtypes.float8_e4m3fn), np.ones((), ml_dtypes.int4), np.datetime64("2024-02-29", "s")]
    + [
        np.datetime64("NaT", "s"),
        np.timedelta64(3, "D"),
        np.void(b"\0ab"),
        np.array(["é", ""]),
        np.float32("nan"),
        np.broadcast_to(np.int8(1), (2, 2)),
    ],
    ids=repr,
)
def test_numpy_values_come_back(value: Any) -> None:
    back = unpack_snapshot(pack_snapshot({"x": value}))["x"]
    assert exact(back) == exact(value)
    if isinstance(value, np.ndarray):
        assert back.flags.writeable
        assert back.flags.owndata


@pytest.mark.parametrize("kind", [np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64])
def test_a_random_generator_goes_on(kind: Any) -> None:
    generator = np.random.Generator(kind(11))
    generator.integers(5, size=3, dtype=np.int32)
    data = pack_snapshot(generator.bit_generator.state)
    want = generator.random(8)
    other = np.random.Generator(kind(0))
    other.bit_generator.state = unpack_snapshot(data)
    assert np.array_equal(other.random(8), want)


def test_the_standard_random_goes_on() -> None:
    generator = random.Random(4)
    data = pack_snapshot(generator.getstate())
    want = generator.random()
    generator.setstate(unpack_snapshot(data))
    assert generator.random() == want


def test_a_snapshot_is_taken_now() -> None:
    source = {"i": [1], "a": np.zeros(2)}
    data = pack_snapshot(source)
    source["i"].append(2)
    source["a"][:] = 9
    assert exact(unpack_snapshot(data)) == exact({"i": [1], "a": np.zeros(2)})
    unpack_snapshot(data)["i"].append(3)
    assert unpack_snapshot(data)["i"] == [1]


def test_equal_sets_are_equal_bytes() -> None:
    one, other = {0, 2**61 - 1}, {2**61 - 1, 0}  # their hashes collide, so the order is that of insertion
    assert list(one) != list(other)
    assert pack_snapshot(one) == pack_snapshot(other)
    assert pack_snapshot({"b", "a", ("c", 1)}) == pack_snapshot({("c", 1), "a", "b"})


def test_a_list_that_looks_like_a_container_stays_a_list() -> None:
    for value in ([bytearray()], [2**70, 1], [1j], ["\ud800", "x"], [bytearray(b"\x10")], [[bytearray()]], [()], [[]]):
        assert exact(unpack_snapshot(pack_snapshot(value))) == exact(value)


# --- what cannot be kept


class Custom:
    pass


class MyDict(dict[str, int]):
    pass


class MyFloat(np.float64):
    pass


@pytest.mark.parametrize(
    ("value", "place", "what"),
    [
        (Custom(), "state: ", "test_state.Custom cannot be kept"),
        ({"rng": (1, Custom())}, "['rng'][1]: ", "Custom"),
        ({"rng": [print]}, "['rng'][0]: ", "builtin_function_or_method"),
        ({("a", 1): {b"k": MyDict()}}, "[('a', 1)][b'k']: ", "MyDict"),
        ({"s": {1, (2, Ext)}}, "['s'] (an element)[1]: ", "type"),
        ({Custom(): 1}, " (a key): ", "Custom"),
        ([deque()], "[0]: ", "collections.deque"),
        ([MyFloat(1)], "[0]: ", "MyFloat"),
        ({"a": np.array([None])}, "['a']: ", "dtype object"),
        ({"a": np.zeros(2, "i4,f4")}, "['a']: ", "dtype"),
        ({"a": np.zeros(2, "i4,f4")[0]}, "['a']: ", "dtype"),
        ({"a": np.array(["x"], np.dtypes.StringDType())}, "['a']: ", "StringDType"),
        ({"a": np.zeros(2, "V0")}, "['a']: ", "dtype"),
        ({"a": np.ma.array([1])}, "['a']: ", "MaskedArray"),
        ({"a": np.zeros(1, np.dtype(ml_dtypes.bfloat16).newbyteorder(">"))}, "['a']: ", "dtype"),
        ({"a": Ext(5, b"")}, "['a']: ", "Ext"),
        ({"a": memoryview(b"")}, "['a']: ", "memoryview"),
        ({"a": {2**20000: Custom()}}, "['a'][<a very large value>]: ", "Custom"),
    ],
)
def test_what_cannot_be_kept_is_named_with_its_place(value: Any, place: str, what: str) -> None:
    with pytest.raises(StateError) as caught:
        pack_snapshot(value)
    assert type(caught.value) is StateError
    assert place in str(caught.value)
    assert what in str(caught.value)


def nested(levels: int, wrap: Any) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = wrap(value)
    return value


WRAPS = [lambda x: [x], lambda x: (x,), lambda x: {"k": x}, lambda x: {1: x}, lambda x: frozenset([x]), lambda x: {(1, x): 2}]


@pytest.mark.parametrize("wrap", WRAPS[:5])
def test_sixty_four_levels_are_kept_and_more_are_refused(wrap: Any) -> None:
    assert exact(unpack_snapshot(pack_snapshot(nested(64, wrap)))) == exact(nested(64, wrap))
    for levels in (65, 66, 500):
        with pytest.raises(StateError, match="more than 64 levels deep"):
            pack_snapshot(nested(levels, wrap))


def test_an_array_at_the_deepest_level_is_kept() -> None:
    value = nested(63, WRAPS[0])
    inner = value
    while type(inner[0]) is list:
        inner = inner[0]
    inner[0] = [np.arange(3), np.int8(1), 2**100]
    assert exact(unpack_snapshot(pack_snapshot(value))) == exact(value)


def test_what_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append({"again": loop})
    with pytest.raises(StateError, match="does it contain itself") as caught:
        pack_snapshot(loop)
    assert len(str(caught.value)) < 400


def test_a_nearly_full_stack_is_no_other_error() -> None:
    value = nested(60, WRAPS[0])
    data = pack_snapshot(value)
    seen = set()

    def deeper(left: int) -> None:
        if left:
            return deeper(left - 1)
        for use in (lambda: pack_snapshot(value), lambda: unpack_snapshot(data)):
            try:
                use()
            except StateError as error:
                seen.add("recursion" in str(error))
        return None

    for left in range(600, 900, 10):
        try:
            deeper(left)
        except RecursionError:  # the stack was full before ours was called
            break
    assert seen == {True}


# --- damage


def mutate(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        at = rng.randrange(len(changed) + 1)
        how = rng.randrange(6)
        if how == 0 and at < len(changed):
            changed[at] ^= 1 << rng.randrange(8)
        elif how == 1:
            del changed[at:]
        elif how == 2:
            changed[at:at] = rng.randbytes(rng.choice((1, 2, 9)))
        elif how == 3:
            del changed[at : at + rng.choice((1, 3))]
        elif how == 4:
            source = rng.randrange(len(changed) + 1)
            changed[at:at] = changed[source : source + rng.randrange(20)]
        elif at < len(changed):
            changed[at] = rng.choice(
                (0x80, 0x90, 0xC0, 0xC1, 0xC4, 0xC6, 0xC7, 0xC9, 0xCB, 0xCF, 0xD3, 0xD4, 0xD6, 0xD9, 0xDB, 0xDD, 0xDF, 0xFF)
            )
    return bytes(changed)


@pytest.mark.parametrize("state", STATES)
def test_no_damage_passes(state: LoaderState) -> None:
    rng, data = random.Random(1), state.encode()
    for _ in range(10_000):
        changed = mutate(data, rng)
        if changed != data:
            with pytest.raises(StateError):
                LoaderState.decode(changed)
    for bit in range(len(data) * 8):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(StateError):
            LoaderState.decode(changed)
    for length in range(len(data)):
        with pytest.raises(StateError):
            LoaderState.decode(data[:length])


@pytest.mark.parametrize("state", STATES)
def test_odd_content_under_a_right_checksum_is_a_state_or_refused(state: LoaderState) -> None:
    rng, payload, kept, refused = random.Random(2), payload_of(state), 0, 0
    for _ in range(10_000):
        try:
            odd = LoaderState.decode(reseal(mutate(payload, rng)))
        except StateError:
            refused += 1
            continue
        kept += 1
        assert LoaderState.decode(odd.encode()) == odd
        assert LoaderState.from_json(odd.to_json()) == odd
    assert kept > 50
    assert refused > 1000


def test_odd_snapshots_are_a_value_or_refused() -> None:
    rng, kept, refused = random.Random(3), 0, 0
    values = [SNAPSHOT, {(1, 2**80): {b"k": 1j}}, [np.float32(1), np.str_("a"), np.bytes_(b"b"), OrderedDict(a=bytearray(b"c")), "\ud800"]]
    for data in map(pack_snapshot, values):
        for _ in range(5_000):
            try:
                odd = unpack_snapshot(mutate(data, rng))
            except StateError:
                refused += 1
                continue
            kept += 1
            assert exact(unpack_snapshot(pack_snapshot(odd))) == exact(odd)
    assert kept > 1000
    assert refused > 1000


names = st.sampled_from(
    ["<f4", "|O", "O", "<U0", "|V0", "|S0", "a5", "f4,i4", "(2,3)f4", "<M8[q]", "float8", "int0", "uint64x", "T", "<c99", "|b3"]
)
names |= st.sampled_from(
    ["|S99999999999999999999", "<U536870912", "<U4294967295", "bfloat16", "<M8[0s]", "<M8[s", "=i4", "U", "S", "int128", "<V4"]
)
names |= st.from_regex(r"[<>|=]?[a-zA-Z][0-9]{0,3}(\[[a-z0-9]*\])?", fullmatch=True) | st.text(max_size=4)
heads = st.integers(14, 24).map(lambda code: Ext(code, b""))
atoms = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.binary(max_size=20) | names
atoms |= st.builds(Ext, st.integers(-128, 127), st.binary(max_size=17)) | st.just(Ext(-1, bytes(4)))
arrays = st.tuples(
    st.sampled_from([Ext(21, b""), Ext(22, b"")]),
    names,
    st.lists(st.integers(-1, 3) | st.integers(0, 2**64 - 1), max_size=3) | atoms,
    st.binary(max_size=24) | atoms,
)
keys = st.integers(0, 9) | st.text(max_size=2) | st.binary(max_size=2) | st.none() | st.booleans()
trees = st.recursive(
    atoms | arrays.map(list) | arrays.map(lambda parts: [parts[0], parts[1], parts[3]]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.builds(lambda head, items: [head, *items], heads, st.lists(inner, max_size=4))
        | st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=10,
)


def check_an_odd_tree(tree: Any) -> None:
    data = msgspec.msgpack.encode(tree)
    try:
        value = unpack_snapshot(data)
    except StateError:
        return
    assert exact(unpack_snapshot(pack_snapshot(value))) == exact(value)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(trees)
def test_odd_trees_are_a_value_or_refused(tree: Any) -> None:
    check_an_odd_tree(tree)


@pytest.mark.slow
@settings(max_examples=1500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(trees)
def test_many_odd_trees_are_a_value_or_refused(tree: Any) -> None:
    check_an_odd_tree(tree)


@pytest.mark.parametrize(
    "payload",
    [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xc9\xff\xff\xff\xff\x01", b"\xdb\xff\xff\xff\xffa"]
    + [
        b"\x91" * 300 + b"\xc0",
        b"\x91" * 200_000 + b"\xc0",
        b"\x81\xa1k" * 100_000 + b"\xc0",
        b"\x81" * 1000,
        b"\xc1",
        b"\xd6\xff\0\0\0\0",
        b"",
    ]
    + [b"\x81\x90\x01", b"\x81\x80\x01", b"\xa1\xff", b"\xd4\x7f\0", b"\xd4\x02\0", b"\xd4\x04\xff", b"\x81\xd4\x03\0\x01"],
)
def test_claimed_sizes_depth_and_unknown_marks_are_refused(payload: bytes) -> None:
    with pytest.raises(StateError):
        unpack_snapshot(payload)
    with pytest.raises(StateError):
        LoaderState.decode(reseal(payload))
    with pytest.raises(StateError):
        LoaderState.decode(reseal(b"\x9c\x01" + payload * 2))


@pytest.mark.parametrize(
    ("name", "shape", "data"),
    [("<U0", [2**40], b""), ("|V0", [2**62], b""), ("|O", [1], bytes(8)), ("<f4", [2**62, 0], b""), ("<f4", [2**64 - 1] * 2, b"")]
    + [("<f4", [-1], bytes(4)), ("<f4", [1] * 99, bytes(4)), ("<f4", [2], bytes(4)), ("<f4", [True], bytes(4)), ("<f4", 1, bytes(4))]
    + [("<f4", [4], "text"), (5, [1], b"1"), ("a5", [1], bytes(5)), ("<f4", {"a": 1}, bytes(4)), ("<U4294967295", [1], b"")],
)
def test_arrays_that_lie_are_refused(name: Any, shape: Any, data: Any) -> None:
    with pytest.raises(StateError):
        unpack_snapshot(msgspec.msgpack.encode([Ext(21, b""), name, shape, data]))


def test_a_bytes_scalar_is_never_made_from_a_number() -> None:
    with pytest.raises(StateError):
        unpack_snapshot(msgspec.msgpack.encode([Ext(22, b""), "S", 10**15]))


@pytest.mark.parametrize(
    "data", [b"", b"\0", b"PFS", b"PFSt", b"PFSt" + bytes(8), b"\x80\x04K\x01.", b'{"junk": 1}', b"\x93NUMPY" + bytes(90)]
)
def test_foreign_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(StateError):
        LoaderState.decode(data)
    with pytest.raises(StateError):
        unpack_snapshot(data + b"\xc1")


@pytest.mark.parametrize("data", [None, "text", 5, {"junk": 1}, [b"x"]])
def test_what_is_no_bytes_is_refused(data: Any) -> None:
    with pytest.raises(StateError, match="read from bytes"):
        LoaderState.decode(data)
    with pytest.raises(StateError):
        unpack_snapshot(data)


def wire(version: Any, *values: Any, of: int = 1) -> bytes:
    """A sealed state of this version in which the first values of the start point are replaced."""
    _, start, fingerprint = msgspec.msgpack.decode(payload_of(STATES[of]))
    start = [*values, *start[len(values) :]]
    return reseal(msgspec.msgpack.encode([version, *start, fingerprint] if version == 1 else [version, start, fingerprint]))


@pytest.mark.parametrize("values", [(2, -1), (2, True), (2, 2**63), (2, 1.0), (2, "0"), (2, None), (0,), (-1,), (True,), (None,), ("1",)])
def test_odd_numbers_on_the_wire_are_refused(values: tuple[Any, ...]) -> None:
    assert LoaderState.decode(wire(2)) == STATES[1]
    with pytest.raises(StateError):
        LoaderState.decode(wire(*values))


@pytest.mark.parametrize(
    "whole", [[2], [2, []], [2, [], []], [2, None, []], [2, [0] * 12, []], [1], [1, []], [1, *[0] * 11, []], [2, [0] * 12, [], 1]]
)
def test_parts_that_lack_are_refused(whole: list[Any]) -> None:
    with pytest.raises(StateError, match="damaged|needed|Expected"):
        LoaderState.decode(reseal(msgspec.msgpack.encode(whole)))


def test_text_on_the_wire_is_no_snapshot() -> None:
    _, whole, fingerprint = msgspec.msgpack.decode(payload_of(STATES[1]))
    at = StartPoint.__struct_fields__.index("snapshot")
    assert (
        LoaderState.decode(reseal(msgspec.msgpack.encode([2, [*whole[:at], b"YQ==", *whole[at + 1 :]], fingerprint]))).snapshot == b"YQ=="
    )
    with pytest.raises(StateError, match="snapshot"):
        LoaderState.decode(reseal(msgspec.msgpack.encode([2, [*whole[:at], "YQ==", *whole[at + 1 :]], fingerprint])))


FORMAT_1 = bytes.fromhex(
    "504653748edf58a1b37404d59e0101020328051108c0a67265706c6179c000c410000102030405060708090a0b0c0d0e0f9607c2c008a3706164a86974657261746f72"
)
FORMAT_1_JSON = """{"version": 1, "run": 1, "run_epoch": 2, "epoch": 3, "rows": 40, "batches": 5, "step": 17, "last_rows": 8, "batch_rows": null, "resumes_by": "replay", "snapshot": null, "since_snapshot": 0, "sample": "AAECAwQFBgcICQoLDA0ODw==", "fingerprint": {"seed": 7, "shuffle": false, "length": null, "batch_size": 8, "remainder": "pad", "kind": "iterator"}}"""


@pytest.mark.parametrize(
    "read", [lambda: LoaderState.decode(FORMAT_1), lambda: LoaderState.from_json(FORMAT_1_JSON)], ids=["bytes", "json"]
)
def test_format_1_is_still_read(read: Callable[[], LoaderState]) -> None:
    """All of it but the sample, which was of the batch as it was placed, and is now of the items that were pulled."""
    state = read()
    assert (state.version, state.sample, state.resumes_by) == (2, None, "replay")
    assert (state.run, state.run_epoch, state.epoch, state.rows, state.batches, state.step, state.last_rows) == (1, 2, 3, 40, 5, 17, 8)
    assert state.fingerprint == Fingerprint(seed=7, shuffle=False, length=None, batch_size=8, remainder="pad", kind="iterator")
    assert LoaderState.decode(state.encode()) == state


@pytest.mark.parametrize("number", range(len(STATES)))
def test_format_1_holds_the_same_values(number: int) -> None:
    assert LoaderState.decode(wire(1, of=number)) == msgspec.structs.replace(STATES[number], sample=None)


def test_a_newer_version_is_named() -> None:
    message = "written by a newer prefetchshard: version 3, this one reads up to 2"
    newer = reseal(msgspec.msgpack.encode([3, {"all": "else"}, Ext(22, b""), "may differ"]))
    for read in (
        lambda: LoaderState.decode(wire(3)),
        lambda: LoaderState.from_json('{"version": 3, "other": 1}'),
        lambda: LoaderState.decode(wire(2**64 - 1)),
    ):
        with pytest.raises(StateError, match="written by a newer prefetchshard"):
            read()
    with pytest.raises(StateError, match=message):
        LoaderState.decode(wire(3))
    with pytest.raises(StateError, match=message):
        LoaderState(version=3, fingerprint=ARRAYS)
    with pytest.raises(StateError):
        LoaderState.decode(newer)


@pytest.mark.parametrize(
    "change",
    [{"rows": -1}, {"rows": 1.5}, {"rows": True}, {"rows": 2**63}, {"rows": "1"}, {"rows": None}, {"resumes_by": "luck"}, {"junk": 1}]
    + [
        {"fingerprint": None},
        {"fingerprint": {"seed": 1}},
        {"snapshot": "?"},
        {"snapshot": 5},
        {"sample": "A" * 400},
        {"version": 0},
        {"version": None},
    ],
)
def test_odd_json_is_refused(change: dict[str, Any]) -> None:
    fields = json.loads(STATES[1].to_json())
    assert LoaderState.from_json(json.dumps(fields)) == STATES[1]
    with pytest.raises(StateError):
        LoaderState.from_json(json.dumps(fields | change))


def test_json_without_a_field_is_refused() -> None:
    fields = json.loads(STATES[1].to_json())
    for name in LoaderState.__struct_fields__:
        fewer = {key: value for key, value in fields.items() if key != name}
        with pytest.raises(StateError, match=f"lacks {name}"):
            LoaderState.from_json(json.dumps(fewer))


@pytest.mark.parametrize("text", ["", "{", "null", "[]", "5", '"x"', "\ud800", b"\xff", "[" * 100_000, '{"junk": 1}', None, 5])
def test_what_is_no_state_in_json_is_refused(text: Any) -> None:
    with pytest.raises(StateError):
        LoaderState.from_json(text)


def test_damaged_json_is_a_state_or_refused() -> None:
    rng, data = random.Random(5), STATES[2].to_json().encode()
    for _ in range(3_000):
        try:
            odd = LoaderState.from_json(mutate(data, rng))
        except StateError:
            continue
        assert LoaderState.decode(odd.encode()) == odd


@pytest.mark.parametrize("name", ["run", "run_epoch", "epoch", "rows", "batches", "step", "since_snapshot"])
def test_a_count_is_checked_by_constructor_and_replace(name: str) -> None:
    for bad in (-1, True, 1.0, 2**63, None, "1", np.int64(1), 2**20000):
        with pytest.raises(StateError, match=name):
            LoaderState(**{"fingerprint": ARRAYS, name: bad})
        with pytest.raises(StateError, match=name):
            msgspec.structs.replace(STATES[0], **{name: bad})


@pytest.mark.parametrize(
    "change",
    [{"resumes_by": "luck"}, {"snapshot": "text"}, {"snapshot": {}}, {"sample": bytes(65)}, {"fingerprint": None}],
)
def test_the_rest_is_checked_by_constructor_and_replace(change: dict[str, Any]) -> None:
    (name,) = change
    with pytest.raises(StateError, match=name):
        LoaderState(**{"fingerprint": ARRAYS, **change})
    with pytest.raises(StateError, match=name):
        msgspec.structs.replace(STATES[0], **change)


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1.0},
        {"seed": True},
        {"seed": 2**256},
        {"shuffle": 1},
        {"length": -1},
        {"length": True},
        {"batch_size": 0},
        {"batch_size": 2.0},
    ]
    + [{"remainder": "auto"}, {"remainder": None}, {"kind": ""}, {"kind": "a\nb"}, {"kind": "x" * 65}, {"kind": "\ud800"}, {"kind": None}],
)
def test_a_fingerprint_checks(change: dict[str, Any]) -> None:
    (name,) = change
    with pytest.raises(StateError, match=name):
        msgspec.structs.replace(ARRAYS, **change)


# --- files


OLD, NEW = STATES[0], STATES[2]


@pytest.mark.parametrize("call", ["open", "fsync", "replace"])
@pytest.mark.parametrize("error", [OSError("full"), KeyboardInterrupt()])
@pytest.mark.parametrize("before", [True, False])
def test_a_save_that_fails_leaves_what_was_there(
    call: str, error: BaseException, before: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state"
    if before:
        OLD.save(path)

    def fail(*_: object, **__: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(*((state_module, "open") if call == "open" else (os, call)), fail, raising=False)
        with pytest.raises(type(error)):
            NEW.save(path)
    assert os.listdir(tmp_path) == (["state"] if before else [])
    assert not before or LoaderState.load(path) == OLD


def test_the_file_is_whole_and_flushed_before_it_takes_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, calls = tmp_path / "state", []
    real_fsync, real_replace = os.fsync, os.replace

    def fsync(descriptor: int) -> None:
        status = os.fstat(descriptor)
        calls.append("fsync folder" if stat.S_ISDIR(status.st_mode) else f"fsync {status.st_size}")
        real_fsync(descriptor)

    def replace(source: str, target: str) -> None:
        assert LoaderState.load(source) == NEW
        assert os.path.dirname(source) == os.path.dirname(target)
        calls.append("replace")
        real_replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    NEW.save(path)
    assert calls == [f"fsync {len(NEW.encode())}", "replace", "fsync folder"]


def test_a_folder_that_cannot_be_synced_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError("as on Windows")

    monkeypatch.setattr(os, "open", refuse)
    NEW.save(tmp_path / "state")
    assert LoaderState.load(tmp_path / "state") == NEW


def test_a_link_stays_and_rights_are_the_usual_ones(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there" / "state")
    OLD.save(tmp_path / "link")
    NEW.save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert LoaderState.load(tmp_path / "there" / "state") == NEW
    (tmp_path / "plain").touch()
    assert (tmp_path / "there" / "state").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_plain_name_and_a_long_one_are_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("state", "n" * 255):
        NEW.save(name)
        assert LoaderState.load(name) == NEW


def test_load_says_which_file_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "the-state"
    with pytest.raises(FileNotFoundError):
        LoaderState.load(path)
    with pytest.raises(FileNotFoundError):
        NEW.save(tmp_path / "no-folder" / "state")
    path.write_bytes(NEW.encode()[:-1])
    with pytest.raises(StateError, match=r"the-state: the state is damaged: its checksum does not match"):
        LoaderState.load(path)
    path.write_bytes(b"")
    with pytest.raises(StateError, match="the-state: the state is empty"):
        LoaderState.load(path)
    path.write_bytes(b"\x93NUMPY")
    with pytest.raises(StateError, match="the-state: not a prefetchshard state"):
        LoaderState.load(path)


SAVE_FOR_EVER = """
import itertools, sys
from prefetchshard.base.codec import pack_snapshot
from prefetchshard.resuming.loader_state import Fingerprint, LoaderState
base = Fingerprint(seed=0, shuffle=False, length=None, batch_size=None, remainder="drop", kind="iterator")
snapshot = pack_snapshot(bytes(2_000_000))
for step in itertools.count(1):
    LoaderState(step=step, snapshot=snapshot, fingerprint=base).save(sys.argv[1])
    print(step, flush=True)
"""


def test_a_killed_process_leaves_a_whole_state(tmp_path: Path) -> None:
    path, rng = tmp_path / "state", random.Random(6)
    root = Path(state_module.__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": str(root)}
    for _ in range(4):
        command = [sys.executable, "-c", SAVE_FOR_EVER, str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
            assert process.stdout is not None
            for _ in range(3):
                assert process.stdout.readline()
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(rng.uniform(0.001, 0.03))
            process.send_signal(signal.SIGKILL)
            done = [3, *map(int, process.stdout.read().split())][-1]
        state = LoaderState.load(path)
        assert done <= state.step <= done + 1
        assert unpack_snapshot(state.snapshot or b"") == bytes(2_000_000)


# --- other settings


def test_a_loader_of_the_same_settings_fits() -> None:
    STATES[0].check(ARRAYS)
    STATES[2].check(ITERATOR)
    STATES[0].check(msgspec.structs.replace(ARRAYS, length=None))
    STATES[2].check(msgspec.structs.replace(ITERATOR, length=5))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"seed": 8}, "seed: the state has 7, this loader 8"),
        ({"shuffle": False}, "shuffle: the state has True, this loader False"),
        ({"length": 5}, "length: the state has 8589934592, this loader 5"),
        ({"remainder": "pad"}, "remainder: the state has 'drop', this loader 'pad'"),
        ({"kind": "dataset"}, "kind: the state has 'arrays', this loader 'dataset'"),
        ({"batch_size": None}, "batch_size: the state has 10, this loader None"),
        ({"batch_size": 20}, "batch_size: the state has 10, this loader 20; state.rebatch(20) goes on with another batch size"),
        ({"seed": 8, "kind": "dataset"}, "seed: the state has 7, this loader 8; kind: the state has 'arrays', this loader 'dataset'"),
    ],
)
def test_each_field_that_differs_is_named_with_both_values(change: dict[str, Any], text: str) -> None:
    with pytest.raises(StateError) as caught:
        STATES[0].check(msgspec.structs.replace(ARRAYS, **change))
    assert str(caught.value) == f"the state does not fit this loader: {text}"


def test_rebatch_is_only_offered_where_it_works() -> None:
    state = LoaderState(resumes_by="snapshot", fingerprint=ARRAYS)
    with pytest.raises(StateError) as caught:
        state.check(msgspec.structs.replace(ARRAYS, batch_size=20))
    assert "rebatch" not in str(caught.value)


@pytest.mark.parametrize("resumes_by", ["index", "replay"])
def test_rebatch_keeps_the_place(resumes_by: Any) -> None:
    state = LoaderState(
        run=1, epoch=2, rows=30, batches=3, step=13, since_snapshot=30, sample=b"x", resumes_by=resumes_by, fingerprint=ARRAYS
    )
    other = state.rebatch(20)
    other.check(msgspec.structs.replace(ARRAYS, batch_size=20))
    assert other == msgspec.structs.replace(state, sample=None, fingerprint=msgspec.structs.replace(ARRAYS, batch_size=20))
    assert (other.rows, other.batches, other.step, state.sample) == (30, 3, 13, b"x")
    assert LoaderState.decode(other.encode()) == other


def test_rebatch_says_why_it_cannot() -> None:
    with pytest.raises(StateError, match="the source makes the batches"):
        STATES[2].rebatch(20)
    with pytest.raises(StateError, match="the source's own state"):
        LoaderState(resumes_by="snapshot", fingerprint=ARRAYS).rebatch(20)


# --- size


def test_a_state_is_small() -> None:
    assert len(STATES[1].encode()) < 120
    largest = dict.fromkeys(("run", "run_epoch", "epoch", "rows", "batches", "step", "since_snapshot"), 2**63 - 1)
    fingerprint = msgspec.structs.replace(ARRAYS, length=2**63 - 1, batch_size=2**63 - 1, seed=2**64 - 1)
    assert len(LoaderState(**largest, sample=bytes(16), fingerprint=fingerprint).encode()) < 200


def test_a_state_is_shown_in_one_line_however_large_the_source_s_own_is() -> None:
    assert repr(STATES[0]) == (
        "LoaderState(run=0, run_epoch=0, epoch=0, rows=0, batches=0, step=0, last_rows=0, batch_rows=None, resumes_by='index', "
        f"snapshot=None, since_snapshot=0, sample=None, version=2, fingerprint={ARRAYS!r})"
    )
    large = msgspec.structs.replace(STATES[2], snapshot=bytes(2_000_000), sample=b"\x01")
    assert "snapshot=<2,000,000 bytes>" in repr(large)
    assert r"sample=b'\x01'" in repr(large)
    assert len(repr(large)) < 500
