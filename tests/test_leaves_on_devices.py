"""Leaves that are jax.Arrays over several devices: what these compute for a batch is dispatched by the thread that takes it.

Two threads that dispatch at once may let devices begin in different orders, and then they wait for each other for ever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

import prefetchshard as ps
from consumers import Consume
from consumers import batches as taken
from prefetchshard.placing import placer as stages
from prefetchshard.placing import transfer

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
        assert first.wait_ready(10)
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
