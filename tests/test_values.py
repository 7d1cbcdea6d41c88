"""Values arrive as they were: whatever a source, a transform, a collate or a consumer does to its own memory, nobody else's changes."""

from __future__ import annotations

import array
import collections
import dataclasses
import itertools
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import prefetchshard as ps
from prefetchshard.base.waiters import Waiters
from prefetchshard.reading.batch_copying import BatchCopying
from prefetchshard.reading.writing import Writer
from support import HANG_SECONDS, Thread, aligned, wait_until

P = PartitionSpec
LARGE = (8, 1 << 15)  # of float32: 1 MiB, staged in the ring
SMALL = (8, 3)  # CPU devices alias some of its shards, and not others

Make = Callable[[tuple[int, ...]], np.ndarray]


def named(*entries: Any, sizes: tuple[int, ...] = (8,)) -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices()).reshape(sizes), ("data", "model")[: len(sizes)]), P(*entries))


PLACES = {
    "rows": named("data"),
    "rows and columns": named("data", None, sizes=(4, 2)),
    "columns": named(None, "data"),
    "replicated": named(),
    "one device": SingleDeviceSharding(jax.devices()[0]),
    "another device": SingleDeviceSharding(jax.devices()[3]),
}
places = pytest.mark.parametrize("sharding", PLACES.values(), ids=PLACES)


def view_of_more(shape: tuple[int, ...]) -> np.ndarray:
    return aligned((shape[0] + 2, *shape[1:]))[2:]


def transposed(shape: tuple[int, ...]) -> np.ndarray:
    return aligned(shape[::-1]).T


def every_other_column(shape: tuple[int, ...]) -> np.ndarray:
    return aligned((*shape[:-1], 2 * shape[-1]))[..., ::2]


def big_endian(shape: tuple[int, ...]) -> np.ndarray:
    return np.empty(shape, ">f4")


def backwards(shape: tuple[int, ...]) -> np.ndarray:
    return aligned(shape)[::-1]


MEMORY: dict[str, Make] = {
    "aligned": aligned,
    "at byte 4": lambda shape: aligned(shape, offset=4),
    "at byte 1": lambda shape: aligned(shape, offset=1),
    "a view": view_of_more,
    "transposed": transposed,
    "columns": every_other_column,
    "backwards": backwards,
    "big-endian": big_endian,
    "float64": lambda shape: aligned(shape, np.float64),
    "int8": lambda shape: aligned(shape, np.int8),
}
memory = pytest.mark.parametrize("make", MEMORY.values(), ids=MEMORY)


def batches(count: int, make: Make, shape: tuple[int, ...]) -> Iterator[dict[str, np.ndarray]]:
    """Batch i is full of i; all in the same memory, which is overwritten with something else at the end."""
    buffer = make(shape)
    for i in range(count):
        buffer[...] = i
        yield {"x": buffer}
    buffer[...] = 99


def found(kept: list[Any]) -> list[list[float]]:
    """The different values in each batch."""
    return [np.unique(np.asarray(batch["x"]).astype(float)).tolist() for batch in kept]


def each(count: int) -> list[list[float]]:
    return [[float(i)] for i in range(count)]


# --- a source that yields the same memory again and again


@places
def test_reused_batches_under_every_sharding(sharding: Any) -> None:
    for shape, depth in itertools.product([LARGE, (8, 8), (8, 16)], [1, 4]):
        assert found(list(ps.prefetch(batches(6, aligned, shape), sharding, depth=depth))) == each(6)


@memory
def test_reused_batches_in_every_memory(make: Make, S: NamedSharding) -> None:
    for shape in (LARGE, SMALL, (8, 1)):
        assert found(list(ps.prefetch(batches(6, make, shape), S))) == each(6)


@memory
def test_reused_examples_in_every_memory(make: Make, R: NamedSharding) -> None:
    for rows in (2, 8):
        kept = list(ps.prefetch(batches(4 * rows, make, (5, 7)), R, batch_size=rows))
        values = [np.asarray(batch["x"]).astype(float) for batch in kept]
        assert [np.unique(example).tolist() for batch in values for example in batch] == each(4 * rows)


def test_reused_memmap(tmp_path: Path, S: NamedSharding) -> None:
    def make(shape: tuple[int, ...]) -> np.ndarray:
        return np.memmap(tmp_path / "x", np.float32, "w+", shape=shape)

    assert found(list(ps.prefetch(batches(6, make, LARGE), S))) == each(6)


def test_reused_unaligned_and_large(S: NamedSharding) -> None:
    """JAX copies it, and does so after `device_put` has returned."""
    for i, batch in enumerate(ps.prefetch(batches(8, MEMORY["at byte 4"], (8, 500_000)), S)):
        assert found([batch]) == [[i]]


def test_all_shares_of_a_large_batch_are_copied_first(S: NamedSharding, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers help to copy it; the source is not asked for the next one before the last of them is done."""
    asked = threading.Event()
    shares: list[int] = []
    copy_share = Writer.copy_share

    def slowly(self: Any, assembly: Any, work: Any, first: int = 0, count: int = 1) -> None:
        shares.append(count)
        if first:
            asked.wait(0.05)
        copy_share(self, assembly, work, first, count)

    def source() -> Iterator[np.ndarray]:
        buffer = aligned((8, 500_000))
        for i in range(4):
            asked.set()
            buffer[...] = i
            asked.clear()
            yield buffer
        asked.set()
        buffer[...] = 99

    monkeypatch.setattr(Writer, "copy_share", slowly)
    kept = [{"x": batch} for batch in ps.prefetch(source(), S, workers=4)]
    assert found(kept) == each(4)
    assert max(shares) > 1 or (os.cpu_count() or 1) == 1


def test_the_last_share_wakes_who_waits_for_it(S: NamedSharding, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[Waiters] = []
    taken = threading.Semaphore(0)
    copy_share, wait = Writer.copy_share, BatchCopying._wait_until_read

    def late(self: Any, batch: Any, leaves: Any, first: int = 0, count: int = 1) -> None:
        if first:
            batches_before = len(waits)
            taken.release()
            wait_until(lambda: len(waits) > batches_before and len(waits[-1]))
        copy_share(self, batch, leaves, first, count)

    def noted(self: Any, batch: Any) -> None:
        assert taken.acquire(timeout=HANG_SECONDS)  # else it would copy the share itself, and wait for nobody
        waits.append(self._copied)
        wait(self, batch)

    monkeypatch.setattr("prefetchshard.reading.batch_copying.cpu_count", lambda: 2)
    monkeypatch.setattr(Writer, "copy_share", late)
    monkeypatch.setattr(BatchCopying, "_wait_until_read", noted)
    held = [np.full((8, 1 << 19), i, np.float32) for i in range(3)]
    kept = Thread(lambda: [{"x": batch} for batch in ps.prefetch(iter(held), S, workers=2)]).returned()
    assert found(kept) == each(3)
    assert len(waits) == 3


def as_iterable() -> Any:
    class Again:
        def __iter__(self) -> Iterator[Any]:
            return batches(6, aligned, LARGE)

    return Again()


def as_factory() -> Any:
    return lambda: batches(6, aligned, LARGE)


async def as_async() -> AsyncIterator[Any]:
    for batch in batches(6, aligned, LARGE):
        yield batch


def as_async_factory() -> Any:
    return as_async


def as_iterator() -> Any:
    return batches(6, aligned, LARGE)


SOURCES = [as_iterable, as_factory, as_async, as_async_factory, as_iterator]


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.__name__)
def test_every_kind_of_source_may_reuse(source: Any, S: NamedSharding) -> None:
    options: list[Any] = [{}, {"transform": lambda x: x}, {"workers": 1}, {"transform": dict, "workers": 4}]
    for some in options:
        assert found(list(ps.prefetch(source(), S, **some))) == each(6)


def stacked(examples: list[Any]) -> Any:
    return {"x": np.stack([example["x"] for example in examples])}


HOOKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "transform": {"transform": lambda x: x},
    "views": {"transform": lambda x: {"x": x["x"][..., ::-1]}},
    "collate": {"collate": stacked},
    "both": {"collate": stacked, "transform": lambda x: x},
}


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.__name__)
def test_every_kind_of_source_may_reuse_examples(source: Any, R: NamedSharding) -> None:
    for options, workers in itertools.product([*HOOKS.values(), {"remainder": "pad"}], [1, 4]):
        kept = list(ps.prefetch(source(), R, batch_size=2, workers=workers, **options))
        values = [[np.unique(example).tolist() for example in np.asarray(batch["x"])] for batch in kept]
        assert values == [[[0.0], [1.0]], [[2.0], [3.0]], [[4.0], [5.0]]]


@pytest.mark.parametrize("remainder", ["drop", "pad"])
def test_a_short_batch_that_is_held_back(remainder: str, R: NamedSharding) -> None:
    """Whether it is the last is known after the next pull, which overwrites it."""

    def source() -> Iterator[Any]:
        buffer = aligned(LARGE)
        for i, rows in enumerate([8, 8, 5, 8, 3]):
            buffer[...] = i
            yield {"x": buffer[:rows]}

    kept = list(ps.prefetch(source(), R, remainder=remainder))
    if remainder == "drop":
        assert found(kept) == each(4)
        assert [batch["x"].shape[0] for batch in kept] == [8, 8, 5, 8]
    else:
        assert [np.unique(np.asarray(b["x"])[np.asarray(b["mask"])]).tolist() for b in kept] == each(5)


def test_a_source_that_reuses_nothing(S: NamedSharding) -> None:
    source = [{"x": np.full(LARGE, i, np.float32)} for i in range(6)]
    for options in ({}, {"transform": lambda x: x}, {"workers": 1}):
        assert found(list(ps.prefetch(iter(source), S, reuses_buffers=False, **options))) == each(6)


def test_pulling_goes_on_meanwhile_where_nothing_is_reused(S: NamedSharding) -> None:
    """What `reuses_buffers=False` is for: the second is pulled while the first is still being transformed."""
    second = threading.Event()

    def source() -> Iterator[np.ndarray]:
        yield np.zeros(8, np.float32)
        second.set()
        yield np.ones(8, np.float32)

    def transform(batch: np.ndarray) -> np.ndarray:
        assert second.wait(HANG_SECONDS)
        return batch

    assert len(list(ps.prefetch(source(), S, reuses_buffers=False, transform=transform))) == 2


# --- what stays on the host


class Pair(NamedTuple):
    name: Any
    numbers: Any


@dataclasses.dataclass
class Record:
    numbers: Any


class Tensor:
    """Like a torch tensor: its memory can be had, and `clone` makes another."""

    def __init__(self, numbers: np.ndarray) -> None:
        self.numbers = numbers

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self.numbers

    def clone(self) -> Tensor:
        return Tensor(self.numbers.copy())

    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("torch refuses this for tensors with a gradient")


def in_objects(numbers: np.ndarray) -> np.ndarray:
    objects = np.empty(2, object)
    objects[0] = numbers
    objects[1] = "text"
    return objects


HOLDERS: dict[str, tuple[Callable[[np.ndarray], Any], Callable[[Any], Any]]] = {
    "an array": (lambda a: a, lambda v: v),
    "a list": (lambda a: ["text", a, None], lambda v: v[1]),
    "a tuple": (lambda a: ("text", a), lambda v: v[1]),
    "a dict": (lambda a: {"a": {"b": a}, 1: 2}, lambda v: v["a"]["b"]),
    "a named tuple": (lambda a: Pair("text", a), lambda v: v.numbers),
    "an ordered dict": (lambda a: collections.OrderedDict(b=1, a=a), lambda v: v["a"]),
    "a deque": (lambda a: collections.deque([a]), lambda v: v[0]),
    "a dataclass": (Record, lambda v: v.numbers),
    "a mapping": (lambda a: collections.UserDict(a=a), lambda v: v["a"]),
    "an array of objects": (in_objects, lambda v: v[0]),
    "a memory view": (memoryview, np.asarray),
    "a tensor": (Tensor, np.asarray),
}


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("options", [{}, {"transform": lambda x: x}], ids=["plain", "transform"])
def test_what_stays_on_the_host_is_kept_from_the_source(holder: str, options: dict[str, Any], S: NamedSharding) -> None:
    wrap, unwrap = HOLDERS[holder]

    def source() -> Iterator[Any]:
        numbers = np.empty(5)
        held = wrap(numbers)
        for i in range(6):
            numbers[:] = i
            yield {"x": np.zeros(8, np.float32), "kept": held}

    kept = [unwrap(batch["kept"]) for batch in ps.prefetch(source(), {"x": S, "kept": ps.HOST}, **options)]
    assert [np.unique(numbers).tolist() for numbers in kept] == each(6)


@pytest.mark.parametrize("holder", HOLDERS)
def test_so_are_examples(holder: str, R: NamedSharding) -> None:
    wrap, unwrap = HOLDERS[holder]

    def source() -> Iterator[Any]:
        numbers = np.empty(5)
        held = [wrap(numbers)]  # in a list: it is kept as it is
        for i in range(6):
            numbers[:] = i
            yield {"x": np.zeros(8, np.float32), "kept": held}

    loader = ps.prefetch(source(), {"x": R, "kept": ps.HOST}, batch_size=2)
    kept = [unwrap(value[0]) for batch in loader for value in batch["kept"]]
    assert [np.unique(numbers).tolist() for numbers in kept] == each(6)


def test_an_array_of_bytes_is_kept_too(S: NamedSharding) -> None:
    def source() -> Iterator[Any]:
        raw, numbers = bytearray(4), array.array("f", [0, 0])
        for i in range(3):
            raw[0] = i
            numbers[0] = i
            yield {"x": np.zeros(8, np.float32), "raw": raw, "numbers": numbers}

    kept = list(ps.prefetch(source(), {"x": S, "raw": ps.HOST, "numbers": ps.HOST}))
    assert [(batch["raw"][0], batch["numbers"][0]) for batch in kept] == [(0, 0.0), (1, 1.0), (2, 2.0)]


def test_what_cannot_be_copied_says_the_way_out(S: NamedSharding) -> None:
    lock = threading.Lock()
    source = [{"x": np.zeros(8, np.float32), "lock": lock}]
    where = {"x": S, "lock": ps.HOST}
    with pytest.raises(ps.SourceError, match="lock cannot be copied.*reuses_buffers=False"):
        next(iter(ps.prefetch(iter(source), where)))
    assert next(iter(ps.prefetch(iter(source), where, reuses_buffers=False)))["lock"] is lock
    assert next(iter(ps.prefetch(source, where)))["lock"] is lock  # a list keeps its items


# --- datasets that make every example in the same memory


class Scratch:
    """Each thread that asks has one buffer, which it gets every time."""

    def __init__(self, length: int, shape: tuple[int, ...]) -> None:
        self.length = length
        self.shape = shape
        self.local = threading.local()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, row: int) -> Any:
        if not hasattr(self.local, "buffer"):
            self.local.buffer = aligned(self.shape)
        self.local.buffer[...] = row
        return {"x": self.local.buffer}


@pytest.mark.parametrize("hooks", HOOKS)
def test_datasets_may_reuse(hooks: str, S: NamedSharding) -> None:
    for workers, shuffle in itertools.product([1, 3], [False, True]):
        loader = ps.Loader(Scratch(48, (40,)), S, batch_size=16, shuffle=shuffle, workers=workers, **HOOKS[hooks])
        rows = np.concatenate([np.asarray(batch["x"]) for batch in loader])
        assert np.all(rows == rows[:, :1])
        assert sorted(rows[:, 0].tolist()) == list(range(48))
        assert shuffle or rows[:, 0].tolist() == list(range(48))


@pytest.mark.parametrize("options", [{}, {"transform": lambda x: x}], ids=["plain", "transform"])
def test_datasets_of_batches_may_reuse(options: dict[str, Any], S: NamedSharding) -> None:
    assert found(list(ps.prefetch(Scratch(12, LARGE), S, workers=3, **options))) == each(12)


@pytest.mark.parametrize("random_access", [True, False], ids=["dataset", "iterator"])
def test_transforms_may_reuse(random_access: bool, S: NamedSharding) -> None:
    """The buffer into which a transform writes is free again as soon as it is called the next time."""
    local = threading.local()

    def transform(row: int) -> np.ndarray:
        if not hasattr(local, "buffer"):
            local.buffer = aligned((40,))
        local.buffer[:] = row
        return local.buffer

    source: Any = range(48) if random_access else iter(range(48))
    loader = ps.Loader(source, S, batch_size=16, transform=transform, workers=3)
    rows = np.concatenate([np.asarray(batch) for batch in loader])
    assert np.array_equal(rows, np.repeat(np.arange(48.0), 40).reshape(48, 40))


# --- transforms and collates that change what they get


def double(example: Any) -> Any:
    example["x"] *= 2
    return example


def double_all(examples: Any) -> Any:
    if isinstance(examples, dict):
        return double(examples)
    return {"x": np.stack([double(example)["x"] for example in examples])}


class Views:
    """A dataset whose examples are views of its own array."""

    def __init__(self, x: np.ndarray) -> None:
        self.x = x

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> Any:
        return {"x": self.x[row]}


class ManyViews(Views):
    def __getitems__(self, rows: list[int]) -> list[Any]:
        return [self[row] for row in rows]


class Again:
    """Can be iterated again, and yields views."""

    def __init__(self, x: np.ndarray) -> None:
        self.x = x

    def __iter__(self) -> Iterator[Any]:
        return ({"x": x} for x in self.x)


OWNERS: dict[str, Callable[[np.ndarray], Any]] = {
    "arrays": lambda x: {"x": x},
    "views": Views,
    "many views": ManyViews,
    "list": lambda x: [{"x": row} for row in x],
    "deque": lambda x: collections.deque({"x": row} for row in x),
    "iterable": Again,
    "factory": lambda x: lambda: Again(x),
    "factory of arrays": lambda x: lambda: {"x": x},
}


@pytest.mark.parametrize("owner", OWNERS)
@pytest.mark.parametrize("hook", [{"transform": double}, {"collate": double_all}], ids=["transform", "collate"])
def test_hooks_get_examples_of_their_own(owner: str, hook: dict[str, Any], S: NamedSharding) -> None:
    for reuses, shape in itertools.product([True, False], [(16, 3), (16, 3, 2)]):
        x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        before = x.copy()
        loader = ps.Loader(OWNERS[owner](x), S, batch_size=8, epochs=2, workers=2, reuses_buffers=reuses, **hook)
        rows = np.concatenate([np.asarray(batch["x"]) for batch in loader])
        assert np.array_equal(rows, np.concatenate([before, before]) * 2)
        assert np.array_equal(x, before)


@pytest.mark.parametrize("owner", ["views", "list", "iterable", "factory"])
def test_transforms_of_batches_get_batches_of_their_own(owner: str, S: NamedSharding) -> None:
    for reuses in (True, False):
        x = np.arange(4 * 16, dtype=np.float32).reshape(4, 16)
        before = x.copy()
        kept = list(ps.prefetch(OWNERS[owner](x), S, epochs=2, reuses_buffers=reuses, transform=double))
        assert np.array_equal([np.asarray(batch["x"]) for batch in kept], np.concatenate([before, before]) * 2)
        assert np.array_equal(x, before)


def test_lists_are_extended_in_a_copy(S: NamedSharding) -> None:
    """Ragged text is padded where it lies, and the next epoch must not find it so."""
    source = [{"tokens": list(range(n))} for n in range(1, 9)]

    def collate(examples: list[Any]) -> np.ndarray:
        for example in examples:
            example["tokens"] += [-1] * (9 - len(example["tokens"]))
        return np.array([example["tokens"] for example in examples])

    first, second = ps.Loader(source, S, batch_size=8, epochs=2, collate=collate)
    assert np.array_equal(first, second)
    assert [len(example["tokens"]) for example in source] == list(range(1, 9))


def test_records_and_objects_are_copied_for_a_transform() -> None:
    records = np.zeros(8, [("a", "i4")])
    ragged = np.empty(8, object)
    for i in range(8):
        records["a"][i] = i
        ragged[i] = np.arange(i + 1)

    def transform(example: Any) -> Any:
        example["record"]["a"] += 10
        example["ragged"][:] = -1
        return example

    (batch,) = ps.Loader({"record": records, "ragged": ragged}, ps.HOST, batch_size=8, transform=transform)
    assert batch["record"]["a"].tolist() == list(range(10, 18))
    assert [row.tolist() for row in batch["ragged"]] == [[-1] * (i + 1) for i in range(8)]
    assert records["a"].tolist() == list(range(8))
    assert [row.tolist() for row in ragged] == [list(range(i + 1)) for i in range(8)]


@pytest.mark.parametrize("tree", [{"x": 0, "y": 1}, (0, 1), Pair(0, 1)], ids=["dict", "tuple", "named tuple"])
def test_containers_reach_a_transform_as_they_are(tree: Any, R: NamedSharding) -> None:
    kinds = set()

    def transform(example: Any) -> Any:
        kinds.add(type(example))
        return example

    example = jax.tree.map(lambda i: np.full(3, i), tree)
    for source in ([example] * 2, iter([example] * 2), jax.tree.map(lambda a: np.stack([a, a]), example)):
        list(ps.Loader(source, R, batch_size=2, transform=transform))
    assert kinds == {type(tree)}


# --- donation


@jax.jit
def bits_plus_one(x: Any) -> Any:
    return jax.random.wrap_key_data(jax.random.key_data(x) + 1)


def plus_one(x: Any) -> Any:
    return bits_plus_one(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x + 1


step = jax.jit(lambda batch: jax.tree.map(plus_one, batch), donate_argnums=0)


@places
def test_donated_batches_leave_the_sources_arrays_alone(sharding: Any) -> None:
    for held in ("rows", "replicated", "one device"):
        source = [jax.device_put(np.full((8, 8), i, np.float32), PLACES[held]) for i in range(3)]
        for _ in range(2):
            assert [float(np.asarray(step(batch))[0, 0]) for batch in ps.prefetch(source, sharding)] == [1, 2, 3]
        assert not any(array.is_deleted() for array in source)
        assert [float(np.asarray(array)[7, 7]) for array in source] == [0, 1, 2]


def test_donated_keys_leave_the_sources_keys_alone(S: NamedSharding) -> None:
    keys = jax.device_put(jax.random.split(jax.random.key(0), 8), S)
    want = jax.random.key_data(keys).tolist()
    for _ in range(2):
        for batch in ps.prefetch([{"k": keys}], S):
            jax.block_until_ready(step(batch))
            assert batch["k"].is_deleted()
    assert jax.random.key_data(keys).tolist() == want


@places
def test_donated_batches_leave_numpy_memory_alone(sharding: Any) -> None:
    for shape in (LARGE, (8, 16)):
        source = [{"x": aligned(shape)} for _ in range(3)]
        for i, batch in enumerate(source):
            batch["x"][...] = i
        for _ in range(2):
            assert [float(np.asarray(step(batch)["x"])[0, 0]) for batch in ps.prefetch(source, sharding)] == [1, 2, 3]
        assert found(source) == each(3)


def test_a_transform_on_the_devices_leaves_the_source_alone(S: NamedSharding) -> None:
    """It donates its input where that fits."""
    source = [jax.device_put(np.full((8, 2), i, np.float32), S) for i in range(3)]
    for _ in range(2):
        assert [float(batch[0, 0]) for batch in ps.prefetch(source, S, device_transform=lambda x: x + 1)] == [1, 2, 3]
    assert [float(array[0, 0]) for array in source] == [0, 1, 2]


# --- a batch never changes, however its memory is used again


STEPS = 50


def array_source() -> Any:
    return ps.Loader({"x": np.repeat(np.arange(STEPS, dtype=np.float32), 8 * 4096).reshape(-1, 4096)}, named("data"), batch_size=8)


def batch_source() -> Any:
    return ps.prefetch(batches(STEPS, aligned, (8, 4096)), named("data"))


def dataset_source() -> Any:
    return ps.prefetch(Scratch(STEPS, (8, 4096)), named("data"), workers=2)


def example_source() -> Any:
    return ps.Loader(({"x": np.full(4096, i // 8, np.float32)} for i in range(8 * STEPS)), named("data"), batch_size=8)


@pytest.mark.parametrize("loader", [array_source, batch_source, dataset_source, example_source])
def test_kept_batches_stay_as_they_are(loader: Callable[[], Any]) -> None:
    assert found(list(loader())) == each(STEPS)


@pytest.mark.parametrize("loader", [array_source, batch_source, dataset_source, example_source])
def test_batches_dropped_at_once(loader: Callable[[], Any]) -> None:
    assert [found([batch])[0] for batch in loader()] == each(STEPS)


def pairs(count: int) -> Iterator[dict[str, np.ndarray]]:
    for i in range(count):
        yield {"x": np.full((8, 4096), i, np.float32), "y": np.full((8, 4096), i, np.float32), "z": np.full(8, i, np.int8)}


@pytest.mark.parametrize("leaf", ["x", "y", "z"])
def test_one_kept_leaf_stays_as_it_is(leaf: str, S: NamedSharding) -> None:
    kept = [{"x": batch[leaf]} for batch in ps.prefetch(pairs(STEPS), S)]
    assert found(kept) == each(STEPS)


VIEWS: dict[str, Callable[[Any], Any]] = {
    "a NumPy view": np.asarray,
    "views of the shards": lambda x: [np.asarray(shard.data) for shard in x.addressable_shards],
    "one shard": lambda x: x.addressable_shards[-1].data,
    "a DLPack import": lambda x: np.from_dlpack(x.addressable_shards[0].data),
    "forwarded by jit": jax.jit(lambda x: x),
    "donated to jit": jax.jit(lambda x: x, donate_argnums=0),
    "put again": lambda x: jax.device_put(x, x.sharding),
}


@pytest.mark.parametrize("view", VIEWS)
def test_whatever_is_kept_of_a_batch_stays_as_it_is(view: str) -> None:
    for place in ("rows", "replicated", "one device"):
        kept = [{"x": VIEWS[view](batch["x"])} for batch in ps.prefetch(pairs(24), PLACES[place])]
        assert found(kept) == each(24)


def test_steps_that_donate_run_on_while_memory_is_used_again(S: NamedSharding) -> None:
    results = [step(batch) for batch in ps.prefetch(batches(STEPS, aligned, (8, 4096)), S)]
    assert found(results) == [[float(i + 1)] for i in range(STEPS)]


def test_accumulated_over_a_run(S: NamedSharding) -> None:
    add = jax.jit(lambda total, batch: total + batch["x"], donate_argnums=(0, 1))
    total: Any = jax.device_put(np.zeros((8, 4096), np.float32), S)
    for batch in ps.prefetch(batches(STEPS, aligned, (8, 4096)), S):
        total = add(total, batch)
    assert np.unique(np.asarray(total)).tolist() == [sum(range(STEPS))]


# --- one after the other, whatever fails


def test_no_batch_is_left_out_before_a_fault_on_the_devices(S: NamedSharding) -> None:
    """The second cannot be transformed; the third, which was placed already, must not come in its place."""

    def transform(x: Any) -> Any:
        if x.shape[0] == 16:
            raise ValueError("sixteen")
        return x

    loader = iter(ps.prefetch([np.full(rows, rows, np.float32) for rows in (8, 16, 24, 32)], S, device_transform=transform, depth=4))
    assert next(loader).shape == (8,)
    for _ in range(2):
        with pytest.raises(ValueError, match="sixteen"):
            next(loader)
