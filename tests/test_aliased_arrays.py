"""jax.Arrays over NumPy memory that the source writes again: the CPU backend does not copy what is aligned, so they would change with it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

import prefetchshard as ps
from consumers import Consume, batches, consumer
from prefetchshard.leaves.copying import are_unshared, private_copy
from prefetchshard.planning import array_copies
from support import aligned

ROWS, COUNT = 16, 6
sync = consumer("sync")


class Refilled:
    """One buffer, over which each item is a new jax.Array."""

    def __init__(self, place: Any = None, shape: tuple[int, ...] = (ROWS, 3), dtype: Any = np.float32, offset: int = 0) -> None:
        self.memory = aligned(shape, dtype, offset)
        self.place = place

    def array(self, i: int) -> Any:
        self.memory[...] = i
        return jax.device_put(self.memory, self.place)

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, i: int) -> Any:
        return {"x": self.array(i)}

    def generator(self) -> Iterator[Any]:
        for i in range(COUNT):
            yield self[i]
        self.memory[...] = -1

    async def asynchronous(self) -> AsyncIterator[Any]:
        for item in self.generator():
            yield item


def places(S: NamedSharding) -> dict[str, Any]:
    return {
        "split": S,
        "replicated": NamedSharding(S.mesh, PartitionSpec()),
        "one device": SingleDeviceSharding(jax.devices()[3]),
        "uncommitted": None,
        "host memory": S.with_memory_kind("unpinned_host"),
    }


PLACES = ["split", "replicated", "one device", "uncommitted", "host memory"]
SOURCES: dict[str, Callable[[Refilled], Any]] = {
    "generator": lambda refilled: refilled.generator(),
    "factory": lambda refilled: refilled.generator,
    "async": lambda refilled: refilled.asynchronous(),
    "async factory": lambda refilled: refilled.asynchronous,
    "dataset": lambda refilled: refilled,
}


def numbers(got: list[Any]) -> list[float]:
    """What each batch was filled with; every value of it counts."""
    found = [np.unique(np.real(np.asarray(batch["x"])).astype(np.float32)).tolist() for batch in got]
    assert all(len(values) == 1 for values in found), found
    return [value for (value,) in found]


def test_without_a_loader_they_change(S: NamedSharding) -> None:
    """The premise of this file."""
    kept = [item["x"] for item in Refilled(S).generator()]
    assert {float(array[0, 0]) for array in kept} == {-1.0}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", SOURCES)
def test_whole_batches_are_copied_before_the_source_goes_on(kind: str, place: str, S: NamedSharding) -> None:
    refilled = Refilled(places(S)[place])
    assert numbers(batches(sync(ps.prefetch(SOURCES[kind](refilled), S, workers=1)))) == list(range(COUNT))


def test_by_every_kind_of_consumer(S: NamedSharding, R: NamedSharding, consume: Consume) -> None:
    for place in (S, R):
        assert numbers(batches(consume(ps.prefetch(Refilled(place).generator(), S)))) == list(range(COUNT))


def passes(batch: Any) -> Any:
    return batch


def doubled(batch: Any) -> Any:
    assert isinstance(batch["x"], jax.Array)
    return {"x": batch["x"] + 0}


@pytest.mark.parametrize("place", ["split", "uncommitted"])
@pytest.mark.parametrize(
    "options",
    [{"microbatches": 2}, {"remainder": "pad"}, {"remainder": "pad", "microbatches": 2}, {"transform": passes}, {"transform": doubled}]
    + [{"device_transform": doubled}, {"sharding": ps.HOST}, {"sharding": ps.HOST, "transform": passes}],
    ids=["cut", "padded", "padded and cut", "passed", "transformed", "transformed there", "on the host", "passed, on the host"],
)
def test_whatever_becomes_of_them(options: dict[str, Any], place: str, S: NamedSharding) -> None:
    source = Refilled(places(S)[place]).generator()
    assert numbers(batches(sync(ps.prefetch(source, **{"sharding": S, **options})))) == list(range(COUNT))


@pytest.mark.parametrize("dtype", [np.int8, np.bool_, ml_dtypes.bfloat16, ml_dtypes.float8_e5m2, np.complex64])
@pytest.mark.parametrize("offset", [0, 4], ids=["aliased", "copied late"])
def test_of_every_type_and_wherever_they_lie(dtype: Any, offset: int, S: NamedSharding, R: NamedSharding) -> None:
    for place in (S, R):
        for rule in (S, R):
            source = Refilled(place, dtype=dtype, offset=offset).generator()
            want = [float(np.real(np.array(i).astype(dtype))) for i in range(COUNT)]
            assert numbers(list(ps.prefetch(source, rule))) == want


def test_values_keep_their_bits(S: NamedSharding, R: NamedSharding) -> None:
    bits = np.random.default_rng(0).integers(0, 256, (3, ROWS, 8), np.uint8)
    for dtype in (np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn):
        memory = aligned(bits.shape[1:], np.uint8)

        def source(memory: Any = memory, dtype: Any = dtype) -> Iterator[Any]:
            for some in bits:
                memory[...] = some
                yield jax.device_put(memory.view(dtype), R)

        for rule in (S, R):
            assert [np.asarray(batch).tobytes() for batch in ps.prefetch(source(), rule)] == [some.tobytes() for some in bits]


@pytest.mark.parametrize("options", [{}, {"transform": passes}, {"collate": lambda rows: {"x": np.stack([row["x"] for row in rows])}}])
@pytest.mark.parametrize("kind", ["generator", "async", "dataset"])
def test_examples(kind: str, options: dict[str, Any], S: NamedSharding) -> None:
    loader = ps.Loader(SOURCES[kind](Refilled(shape=(3,))), SingleDeviceSharding(jax.devices()[0]), batch_size=COUNT, workers=1, **options)
    (batch,) = loader
    assert np.asarray(batch["x"])[:, 0].tolist() == list(range(COUNT))


@pytest.mark.parametrize("rule", ["placed", "host"])
def test_functions_that_refill_a_buffer_over_a_list(rule: str, S: NamedSharding) -> None:
    """Nobody writes the items of a list; what a function makes of them is another matter."""
    where = S if rule == "placed" else ps.HOST
    refilled = Refilled(S)
    assert numbers(list(ps.prefetch(list(range(COUNT)), where, transform=lambda i: refilled[i], workers=1))) == list(range(COUNT))
    examples = list(range(2 * COUNT))
    loader = ps.Loader(examples, where, batch_size=2, collate=lambda some: refilled[some[0] // 2], workers=1)
    assert numbers(list(loader)) == list(range(COUNT))
    memory = np.zeros((ROWS, 3), np.float32)

    def fill(i: int) -> Any:
        memory[...] = i
        return {"x": memory}

    assert numbers(list(ps.prefetch(list(range(COUNT)), where, transform=fill, workers=1))) == list(range(COUNT))


@pytest.mark.parametrize("batch_size", [None, 4])
def test_keys_over_a_buffer(batch_size: int | None, S: NamedSharding) -> None:
    memory = aligned((2,) if batch_size else (ROWS, 2), np.uint32)

    def source() -> Iterator[Any]:
        for i in range(8):
            memory[...] = i
            yield {"key": jax.random.wrap_key_data(jax.device_put(memory)), "x": np.zeros(() if batch_size else ROWS, np.float32)}

    options: dict[str, Any] = {"batch_size": batch_size} if batch_size else {}
    where = SingleDeviceSharding(jax.devices()[0]) if batch_size else S
    got = [np.asarray(jax.random.key_data(batch["key"])) for batch in ps.Loader(source(), where, **options)]
    if batch_size:
        assert np.concatenate(got)[:, 0].tolist() == list(range(8))
    else:
        assert [np.unique(data).tolist() for data in got] == [[i] for i in range(8)]


def test_a_computation_that_still_reads_the_buffer_is_waited_for(S: NamedSharding) -> None:
    memory = aligned((ROWS, 256))

    @jax.jit
    def slow(x: Any) -> Any:
        return jax.lax.fori_loop(0, 400, lambda _, y: jnp.tanh(y @ jnp.ones((256, 256)) / 256) * 0 + x, x)

    def source() -> Iterator[Any]:
        for i in range(4):
            memory[...] = i
            yield {"x": slow(jax.device_put(memory))}
            memory[...] = -1

    assert numbers(list(ps.prefetch(source(), SingleDeviceSharding(jax.devices()[0])))) == [0, 1, 2, 3]


def test_donating_what_was_copied_hurts_nobody(S: NamedSharding) -> None:
    use_up = jax.jit(lambda batch: jax.tree.map(lambda leaf: leaf + 1, batch), donate_argnums=0)
    kept: list[Any] = []

    def source() -> Iterator[Any]:
        for i in range(4):
            kept.append(jax.device_put(aligned((ROWS, 3)), S) * 0 + i)
            yield {"x": kept[-1], "again": kept[-1]}

    for batch in ps.prefetch(source(), S):
        jax.block_until_ready(use_up(batch))
    assert [float(array[0, 0]) for array in kept] == [0, 1, 2, 3]


# -- what is not copied


def refuse(array: Any) -> Any:
    pytest.fail("copied")


def test_who_promises_not_to_write_again_pays_nothing(S: NamedSharding, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do the items of a list, and what JAX computed of its own constants."""
    monkeypatch.setattr(array_copies, "ArrayCopy", refuse)
    arrays = [{"x": jax.device_put(np.full((ROWS, 3), i, np.float32), S)} for i in range(COUNT)]
    assert numbers(list(ps.prefetch(iter(arrays), S, reuses_buffers=False))) == list(range(COUNT))
    assert numbers(list(ps.prefetch(arrays, S))) == list(range(COUNT))
    assert numbers(list(ps.prefetch(({"x": jnp.full((ROWS, 3), float(i))} for i in range(COUNT)), S))) == list(range(COUNT))
    with pytest.raises(BaseException, match="copied"):
        list(ps.prefetch(iter(arrays), S))


def test_references_do_not_tell_who_writes_the_memory_of_a_jax_array(S: NamedSharding) -> None:
    assert not are_unshared([jax.device_put(aligned((ROWS, 3)), S)])
    assert are_unshared([jnp.full((ROWS, 3), 1.0)])


# -- what a transform gets, and what stays on the host


def kinds(S: NamedSharding) -> Iterator[Any]:
    for place in places(S).values():
        yield jax.device_put(aligned((ROWS, 3)), place)
    yield jnp.full((ROWS,), 1.0)
    yield jax.device_put(jax.random.split(jax.random.key(0), ROWS), S)
    with jax.enable_x64(True):
        wide = jax.device_put(np.arange(ROWS) + 2**40, S)
    yield wide


def test_a_copy_is_of_the_same_kind(S: NamedSharding) -> None:
    for array in kinds(S):
        copy = private_copy({"x": [array]}, deep=True)["x"][0]
        assert (copy.dtype, copy.shape, copy.committed, copy.sharding) == (array.dtype, array.shape, array.committed, array.sharding)
        assert copy.sharding.memory_kind == array.sharding.memory_kind
        assert getattr(copy, "weak_type", None) == getattr(array, "weak_type", None)
        if not jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            assert np.asarray(copy).tobytes() == np.asarray(array).tobytes()


def test_functions_get_what_the_source_made(S: NamedSharding) -> None:
    given = list(kinds(S))
    seen: list[Any] = []

    def look(item: Any) -> Any:
        seen.append(item)
        return np.zeros(ROWS, np.float32)

    assert len(list(ps.prefetch(iter(given), S, transform=look, workers=1))) == len(given)
    assert [(a.dtype, a.committed, a.sharding) for a in seen] == [(a.dtype, a.committed, a.sharding) for a in given]
    (kept,) = ps.prefetch(iter([{"x": given[0], "wide": given[-1]}]), ps.HOST)
    assert (kept["x"].sharding, kept["wide"].dtype, int(np.asarray(kept["wide"])[1])) == (given[0].sharding, np.int64, 2**40 + 1)


def test_one_that_was_deleted_is_named(S: NamedSharding) -> None:
    deleted = jax.device_put(np.ones((ROWS, 2), np.float32), S)
    deleted.delete()
    for options in ({}, {"transform": passes}):
        with pytest.raises(ps.PlacementError, match="leaf x: the jax.Array .* was deleted"):
            list(ps.prefetch(iter([{"x": deleted}]), S, **options))


def test_the_guards_of_the_caller_are_not_tripped(S: NamedSharding, R: NamedSharding) -> None:
    with jax.transfer_guard("disallow"):
        got = [list(ps.prefetch(Refilled(R).generator(), S, **options)) for options in ({}, {"transform": passes})]
        (batch,) = ps.Loader(Refilled(shape=(3,)).generator(), SingleDeviceSharding(jax.devices()[0]), batch_size=COUNT)
    assert [numbers(some) for some in got] == [list(range(COUNT))] * 2
    assert np.asarray(batch["x"])[:, 0].tolist() == list(range(COUNT))
