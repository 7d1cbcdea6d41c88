"""Many small leaves travel as one buffer: forced on CPU devices, where it is not done otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import prefetchshard as ps
from prefetchshard.planning import packing

ROWS = 16
DTYPES = [
    np.bool_, np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.float16, np.float32, np.complex64,
    ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.int4, ml_dtypes.uint4,
]  # fmt: skip
SHAPES = [(), (3,), (2, 5)]


def over(count: int) -> Any:
    return NamedSharding(Mesh(np.array(jax.devices()[:count]), ("data",)), P("data"))


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[packing.Packing]]:
    """Those that were made; each test has to make one."""
    found: list[packing.Packing] = []
    find = packing.find_packing

    def noted(*args: Any) -> Any:
        made = find(*args)
        found.extend([] if made is None else [made])
        return made

    monkeypatch.setattr(packing, "LEAST_LEAVES", {"cpu": 2})
    monkeypatch.setattr("prefetchshard.planning.plan.find_packing", noted)
    yield found
    assert found


def batch(step: int) -> dict[str, Any]:
    random = np.random.default_rng(step)
    return {
        f"{np.dtype(dtype).name}{len(shape)}": random.integers(0, 8, (ROWS, *shape)).astype(dtype) for dtype in DTYPES for shape in SHAPES
    }


def same(got: Any, want: Any, sharding: Any) -> None:
    assert list(got) == sorted(want)
    for name, value in want.items():
        assert got[name].dtype == value.dtype
        assert got[name].committed
        assert got[name].sharding.is_equivalent_to(sharding, value.ndim)
        assert np.asarray(got[name]).astype(np.complex64).tolist() == value.astype(np.complex64).tolist()


@pytest.mark.parametrize("count", [1, 8])
def test_all_dtypes_and_shapes(count: int, made: list[packing.Packing]) -> None:
    batches = [batch(step) for step in range(40)]
    got = list(ps.prefetch(iter(batches), over(count)))  # kept, so that memory that is used again would show
    for values, want in zip(got, batches, strict=True):
        same(values, want, over(count))
    assert len(made) == 1


def refilled() -> Iterator[Any]:
    values = batch(0)
    for step in range(60):
        for leaf in values.values():
            leaf[:] = np.full(leaf.shape, step % 7).astype(leaf.dtype)
        yield values


@pytest.mark.parametrize("count", [1, 8])
def test_a_source_that_uses_its_memory_again(count: int) -> None:
    got = list(ps.prefetch(refilled(), over(count), reuses_buffers=True, workers=2))
    for step, values in enumerate(got):
        assert all((np.asarray(leaf).astype(np.complex64) == step % 7).all() for name, leaf in values.items() if "bool" not in name)


def mixed() -> Iterator[Any]:
    """Leaves that are packed between a large one, one that lies on a device, one that stays on the host, and a key."""
    for step in range(12):
        yield {
            "a": np.full((ROWS, 2), step, np.int32),
            "b": np.full((ROWS, 1 << 12), step, np.float32),
            "c": jnp.full((ROWS, 2), step, jnp.int32),
            "d": [str(step)] * ROWS,
            "e": np.full((ROWS,), step, np.int8),
            "k": jax.random.key(step),
        }


@pytest.mark.parametrize("count", [1, 8])
def test_among_other_leaves(count: int) -> None:
    sharding = {name: over(count) for name in "abce"} | {"d": ps.HOST, "k": NamedSharding(over(count).mesh, P())}
    for step, values in enumerate(ps.prefetch(mixed(), sharding)):
        assert all((np.asarray(values[name]) == step).all() for name in "abce")
        assert values["d"] == [str(step)] * ROWS
        assert np.array_equal(jax.random.key_data(values["k"]), jax.random.key_data(jax.random.key(step)))


@pytest.mark.parametrize("count", [1, 8])
def test_with_a_device_transform_that_draws(count: int) -> None:
    def noisy(values: Any, *, key: jax.Array) -> Any:
        return {**values, "noise": jax.random.uniform(key, (ROWS,))}

    batches = [{"a": np.full((ROWS, 2), step, np.int32), "b": np.full((ROWS,), step, np.float32)} for step in range(6)]
    got = [jax.device_get(values) for values in ps.prefetch(iter(batches), over(count), device_transform=noisy, seed=3)]
    again = [jax.device_get(values) for values in ps.prefetch(iter(batches), over(count), device_transform=noisy, seed=3)]
    assert [values["noise"].tolist() for values in got] == [values["noise"].tolist() for values in again]
    assert len({values["noise"].tobytes() for values in got}) == 6
    assert all((values["a"] == step).all() and (values["b"] == step).all() for step, values in enumerate(got))


def test_under_a_transfer_guard() -> None:
    with jax.transfer_guard("disallow"):
        got = list(ps.prefetch([batch(0), batch(1)], SingleDeviceSharding(jax.devices()[0])))
    same(got[1], batch(1), over(1))


def test_a_result_may_be_donated() -> None:
    take = jax.jit(lambda values: jax.tree.map(lambda leaf: leaf + 1, values), donate_argnums=0)
    batches = [{"a": np.full((ROWS, 2), step, np.int32), "b": np.full((ROWS,), step, np.float32)} for step in range(20)]
    for step, values in enumerate(ps.prefetch(iter(batches), over(1))):
        after = take(values)
        assert (np.asarray(after["a"]) == step + 1).all()
        assert (np.asarray(after["b"]) == step + 1).all()
