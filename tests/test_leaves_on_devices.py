"""Leaves that are jax.Arrays over several devices: what these compute for a batch is dispatched by the thread that takes it.

Two threads that dispatch at once may let devices begin in different orders, and then they wait for each other for ever.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import prefetchshard as ps
from consumers import Consume
from consumers import batches as taken
from prefetchshard.placing import placer as stages
from prefetchshard.placing import transfer
from support import HANG_SECONDS, pairwise

ROWS = 16
DTYPES = [np.float32, np.int8, np.bool_, ml_dtypes.bfloat16]
Dispatches = list[str]


def values(rows: int, dtype: Any, batch: int) -> np.ndarray:
    return (np.arange(rows * 24).reshape(rows, 24) % 5 + batch).astype(dtype)


@pytest.fixture
def dispatches(monkeypatch: pytest.MonkeyPatch) -> Dispatches:
    """The names of the threads that had several devices compute."""
    seen: Dispatches = []

    def watched(function: Callable[..., Any], array_at: int) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            value = args[array_at]
            if isinstance(value, jax.Array) and len(value.sharding.device_set) > 1:
                moved = array_at == 0 and value.sharding.is_equivalent_to(args[1], value.ndim)
                kept = array_at == 3 and value.shape == args[2]
                if not moved and not kept:
                    seen.append(threading.current_thread().name)
            return function(*args)

        return call

    monkeypatch.setattr(transfer, "_moved", watched(transfer._moved, 0))
    monkeypatch.setattr(stages, "_device_leaf", watched(stages._device_leaf, 3))
    return seen


def batches(place: Any, dtype: Any, rows: list[int]) -> Iterator[dict[str, Any]]:
    for i, count in enumerate(rows):
        yield {"on": jax.device_put(values(count, dtype, i), place), "off": np.full(count, i, np.int32)}


@pytest.mark.parametrize("dtype", DTYPES)
def test_moved_to_another_sharding(dtype: Any, S: NamedSharding, R: NamedSharding, consume: Consume, dispatches: Dispatches) -> None:
    got = taken(consume(ps.prefetch(batches(R, dtype, [ROWS] * 4), S)))
    for i, batch in enumerate(got):
        assert batch["on"].sharding.is_equivalent_to(S, 2)
        assert np.asarray(batch["on"]).tobytes() == values(ROWS, dtype, i).tobytes()
        assert np.asarray(batch["off"]).tolist() == [i] * ROWS
    assert len(got) == len(dispatches) == 4
    assert not any(name.startswith("prefetchshard") for name in dispatches)


@pytest.mark.parametrize("dtype", DTYPES)
def test_padded(dtype: Any, S: NamedSharding, R: NamedSharding, consume: Consume, dispatches: Dispatches) -> None:
    got = taken(consume(ps.prefetch(batches(R, dtype, [ROWS, ROWS, 5]), S, remainder="pad")))
    assert [int(batch["mask"].sum()) for batch in got] == [ROWS, ROWS, 5]
    for i, batch in enumerate(got):
        count = int(batch["mask"].sum())
        assert batch["on"].shape == (ROWS, 24)
        assert np.asarray(batch["on"])[:count].tobytes() == values(count, dtype, i).tobytes()
        assert not np.asarray(batch["on"])[count:].any()
    assert dispatches
    assert not any(name.startswith("prefetchshard") for name in dispatches)


@pytest.mark.parametrize("dtype", DTYPES)
def test_cut_into_microbatches(dtype: Any, S: NamedSharding, consume: Consume, dispatches: Dispatches) -> None:
    got = taken(consume(ps.prefetch(batches(S, dtype, [ROWS] * 3), S, microbatches=2)))
    for i, batch in enumerate(got):
        assert batch["on"].shape == (2, ROWS // 2, 24)
        assert batch["on"].sharding.spec == PartitionSpec(None, "data")
        assert np.asarray(batch["on"]).tobytes() == values(ROWS, dtype, i).tobytes()
    assert dispatches
    assert not any(name.startswith("prefetchshard") for name in dispatches)


def test_keys(S: NamedSharding, R: NamedSharding, dispatches: Dispatches) -> None:
    keys = [jax.random.split(jax.random.key(i), ROWS) for i in range(3)]
    got = list(ps.prefetch(({"key": jax.device_put(key, R)} for key in keys), S))
    assert [jax.random.key_data(b["key"]).tolist() for b in got] == [jax.random.key_data(key).tolist() for key in keys]
    assert dispatches
    assert not any(name.startswith("prefetchshard") for name in dispatches)


def test_beside_a_device_transform_and_packed_leaves(S: NamedSharding, R: NamedSharding) -> None:
    """Its key is put with the leaves, and stays the last of them."""

    def source() -> Iterator[dict[str, Any]]:
        for i in range(4):
            small = {f"s{n}": np.full((ROWS, 2), 10 * i + n, np.int32) for n in range(6)}
            yield {"a": jax.device_put(values(ROWS, np.float32, i), R), **small, "z": jax.device_put(np.full(ROWS, i), R)}

    def transform(batch: Any, key: Any) -> Any:
        return {**batch, "drawn": jax.random.bits(key)}

    got = list(ps.prefetch(source(), S, device_transform=transform, seed=3))
    plain = list(ps.prefetch(({"x": np.zeros(ROWS)} for _ in range(4)), S, device_transform=transform, seed=3))
    for i, batch in enumerate(got):
        assert np.asarray(batch["a"]).tobytes() == values(ROWS, np.float32, i).tobytes()
        assert [np.unique(batch[f"s{n}"]).tolist() for n in range(6)] == [[10 * i + n] for n in range(6)]
        assert np.unique(batch["z"]).tolist() == [i]
    assert [int(batch["drawn"]) for batch in got] == [int(batch["drawn"]) for batch in plain]


def test_what_is_there_already_or_lies_on_one_device_is_put_ahead(S: NamedSharding, dispatches: Dispatches) -> None:
    one = SingleDeviceSharding(jax.devices()[0])
    for place in (S, one):
        iterator = iter(ps.prefetch(batches(place, np.float32, [ROWS] * 3), S))
        first = iterator._consumer.outbox
        assert first.wait_ready(HANG_SECONDS)
        placed = first.peek_nowait()
        assert isinstance(placed.batch, dict)  # made before anybody took it
        iterator.close()
    assert dispatches == []


def test_one_that_was_deleted_is_named(S: NamedSharding, R: NamedSharding) -> None:
    def source() -> Iterator[dict[str, Any]]:
        yield {"x": jax.device_put(np.ones((ROWS, 2)), R)}
        deleted = jax.device_put(np.ones((ROWS, 2)), R)
        deleted.delete()
        yield {"x": deleted}

    iterator = iter(ps.prefetch(source(), S))
    assert next(iterator)["x"].shape == (ROWS, 2)
    with pytest.raises(ps.PlacementError, match="leaf x: the jax.Array .* was deleted") as caught:
        next(iterator)
    assert any("batch 1" in note for note in caught.value.__notes__)


def test_what_the_consumer_donates_is_not_the_sources(S: NamedSharding, R: NamedSharding) -> None:
    own = [jax.device_put(values(ROWS, np.float32, i), place) for i, place in enumerate((R, S, R))]
    use_up = jax.jit(lambda batch: jax.tree.map(lambda leaf: leaf + 1, batch), donate_argnums=0)
    for i, batch in enumerate(ps.prefetch(({"x": array} for array in own), S)):
        jax.block_until_ready(use_up(batch))
        assert np.asarray(own[i]).tobytes() == values(ROWS, np.float32, i).tobytes()


# -- whatever the mesh, the memory, the type and the guard

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
MESHES = {"auto": ((8,), (AUTO,)), "explicit": ((8,), (EXPLICIT,)), "mixed": ((4, 2), (EXPLICIT, AUTO))}
OPTIONS: list[dict[str, Any]] = [{}, {"microbatches": 2}, {"remainder": "pad"}, {"remainder": "pad", "microbatches": 2}]


@pytest.mark.parametrize(
    ("mesh", "options", "place", "kind", "dtype", "reuses", "in_force"),
    pairwise(
        MESHES,
        OPTIONS,
        ["split", "replicated", "one device", "pinned_host", "unpinned_host"],
        [None, "pinned_host"],
        [np.float32, ml_dtypes.bfloat16, np.bool_],
        [True, False],
        [False, True],
    ),
    ids=str,
)
def test_wherever_they_lie_and_go(mesh: str, options: Any, place: str, kind: Any, dtype: Any, reuses: bool, in_force: bool) -> None:
    """With the bits that they had, to just the sharding that was asked for, and without tripping the caller's guard."""
    sizes, types = MESHES[mesh]
    there = Mesh(np.array(jax.devices()).reshape(sizes), ("data", "model")[: len(sizes)], axis_types=types)
    rule = NamedSharding(there, PartitionSpec("data"), memory_kind=kind)
    everywhere = NamedSharding(there, PartitionSpec())
    source = {
        "split": NamedSharding(there, PartitionSpec("data")),
        "replicated": everywhere,
        "one device": SingleDeviceSharding(jax.devices()[3]),
    }
    where = source.get(place) or everywhere.with_memory_kind(place)
    counts = [ROWS, ROWS, 8 if place == "split" else 6][: 3 if "remainder" in options else 2]
    given = [
        np.random.default_rng(n).integers(0, 2 if dtype is np.bool_ else 255, (n, 4, np.dtype(dtype).itemsize), np.uint8) for n in counts
    ]
    arrays = [bits.view(dtype)[..., 0] for bits in given]
    with jax.set_mesh(there) if in_force else contextlib.nullcontext(), jax.transfer_guard("disallow"):
        got = list(ps.prefetch((jax.device_put(array, where) for array in arrays), rule, reuses_buffers=reuses, **options))
    spec = PartitionSpec(None, "data") if "microbatches" in options else PartitionSpec("data")
    for batch, array in zip(got, arrays, strict=True):
        leaf = batch[0] if "remainder" in options else batch
        assert leaf.sharding == NamedSharding(there, spec, memory_kind=kind)
        assert leaf.shape == ((2, 8, 4) if "microbatches" in options else (ROWS, 4))
        flat = np.asarray(leaf).reshape(ROWS, 4)
        assert flat[: len(array)].tobytes() == array.tobytes()
        assert not flat[len(array) :].view(np.uint8).any()


@pytest.mark.parametrize("value", [1.0, 2, True, 1j])
@pytest.mark.parametrize("reuses", [True, False])
def test_padding_keeps_the_type_so_the_step_compiles_once(value: Any, reuses: bool, S: NamedSharding) -> None:
    step = jax.jit(lambda batch: batch["w"].sum())
    full = [{"w": jnp.full((n,), value)} for n in (ROWS, ROWS, 8)]
    got = list(ps.prefetch(iter(full), S, remainder=ps.Pad(value=1), reuses_buffers=reuses))
    assert [batch["w"].weak_type for batch in got] == [batch["w"].weak_type for batch in full]
    assert [complex(step(batch)) for batch in got] == [ROWS * complex(value)] * 2 + [8 * complex(value) + 8]
    assert step._cache_size() == 1


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("reuses", [True, False])
def test_64_bits_survive_or_are_refused(options: Any, reuses: bool, S: NamedSharding, R: NamedSharding) -> None:
    """As those of NumPy arrays do: JAX would move them in 32 bits, without a word."""
    with jax.enable_x64(True):
        wide = {name: jax.device_put(values, S) for name, values in WIDE.items()}
        examples = [{"x": jax.device_put(value)} for value in WIDE["large"]]
    for rule in (S, R):
        for name, leaf in wide.items():

            def load(leaf: Any = leaf, rule: Any = rule, **more: Any) -> list[Any]:
                return list(ps.prefetch(iter([{"x": leaf}]), rule, reuses_buffers=reuses, **options, **more))

            if name.startswith("small"):
                assert np.asarray(load()[0]["x"]).ravel().tolist() == WIDE[name].tolist()
            else:
                with pytest.raises(ps.NarrowingError, match="leaf x: row 0 of the batch"):
                    load()
                assert np.asarray(load(narrow="allow")[0]["x"]).dtype.itemsize == 4
            with pytest.raises(ps.NarrowingError, match="narrow='error'"):
                load(narrow="error")
            with jax.enable_x64(True):
                assert np.asarray(load()[0]["x"]).ravel().tolist() == WIDE[name].tolist()
    with pytest.raises(ps.NarrowingError, match="leaf x: row 0 of the batch"):
        list(ps.Loader(examples, S, batch_size=ROWS, workers=1))


WIDE = {"small": np.arange(ROWS), "small floats": np.arange(ROWS) / 2, "large": np.arange(ROWS) + 2**40, "huge": np.full(ROWS, 1e300)}
