"""Leaves reach their devices with the values that they had, and donating a result hurts nobody."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from prefetchshard.base.errors import PlacementError
from prefetchshard.leaves.on_devices import is_jax_array, is_key
from prefetchshard.placing.transfer import copy_in_place, put
from support import aligned

P = PartitionSpec


def named(*entries: Any, sizes: tuple[int, ...] = (8,), reverse: bool = False, explicit: bool = False) -> NamedSharding:
    names = ("data", "fsdp", "model")[: len(sizes)]
    if explicit:
        return NamedSharding(jax.make_mesh(sizes, names), P(*entries))
    devices = jax.devices()[:: -1 if reverse else 1]
    return NamedSharding(Mesh(np.array(devices).reshape(sizes), names), P(*entries))


def one(i: int) -> SingleDeviceSharding:
    return SingleDeviceSharding(jax.devices()[i])


PLACES = {
    "rows": named("data"),
    "rows over two axes": named(("data", "fsdp"), sizes=(2, 2, 2)),
    "rows and columns": named("data", "model", sizes=(2, 2, 2)),
    "columns": named(None, "data"),
    "replicated": named(),
    "explicit mesh": named("data", "fsdp", sizes=(4, 2), explicit=True),
    "devices in another order": named("data", reverse=True),
    "device 0": one(0),
    "device 3": one(3),
}
places = pytest.mark.parametrize("sharding", PLACES.values(), ids=PLACES)


@places
def test_numpy_leaves(sharding: Any) -> None:
    dtypes = ["float32", "int8", "bool", "bfloat16", "complex64"]
    each = [np.arange(64).reshape(8, 8).astype(jax.numpy.dtype(dtype)) for dtype in dtypes]
    leaves = [leaf for values in each for leaf in (values, values.T, values[::-1], values[:, :0])]
    for leaf, array in zip(leaves, put(leaves, [sharding] * len(leaves)), strict=True):
        assert array.sharding == sharding
        assert array.committed
        assert (array.dtype, array.shape) == (leaf.dtype, leaf.shape)
        assert np.array_equal(np.asarray(array), leaf)


@places
def test_the_same_as_device_put(sharding: Any) -> None:
    leaf = np.ones((8, 8), np.float32)
    (ours,), theirs = put([leaf], [sharding]), jax.device_put(leaf, sharding)
    assert ours.aval == theirs.aval
    assert jax.typeof(ours) == jax.typeof(theirs)
    assert ours.format == theirs.format


@pytest.mark.parametrize("leaf", [3, 1.5, True, np.float32(3), np.int8(3), np.array(3.0, np.float32)], ids=repr)
@pytest.mark.parametrize("sharding", [named(), one(3)], ids=["replicated", "device 3"])
def test_scalars(leaf: Any, sharding: Any) -> None:
    (array,) = put([leaf], [sharding])
    assert array.sharding == sharding
    assert (array.aval, array.weak_type) == (jax.device_put(leaf, sharding).aval, jax.device_put(leaf, sharding).weak_type)
    assert array == leaf


def test_memmaps_are_read(tmp_path: Any) -> None:
    leaf = np.memmap(tmp_path / "x", np.int32, "w+", shape=(8, 2))
    leaf[:] = np.arange(16).reshape(8, 2)
    assert np.array_equal(put([leaf], [named("data")])[0], np.arange(16).reshape(8, 2))


def test_x64_in_force() -> None:
    leaf = np.array([2**40] * 8)
    with jax.enable_x64(True):
        (array,) = put([leaf], [named("data")])
    assert array.dtype == np.int64
    assert np.asarray(array).tolist() == leaf.tolist()


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the CPU backend alone aliases NumPy memory")
@pytest.mark.parametrize("sharding", [named("data"), named(), one(0)], ids=["rows", "replicated", "device 0"])
def test_aligned_memory_is_not_copied_on_the_cpu(sharding: Any) -> None:
    leaf = aligned((64, 16))
    leaf[:] = 1
    (array,) = put([leaf], [sharding])
    pointers = {shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}
    assert leaf.ctypes.data in pointers
    assert all(leaf.ctypes.data <= pointer < leaf.ctypes.data + leaf.nbytes for pointer in pointers)


@pytest.mark.parametrize("guard", ["disallow", "log", "allow"])
def test_guards_against_implicit_transfers_do_not_trip(guard: str, capfd: pytest.CaptureFixture[str]) -> None:
    source = jax.device_put(np.ones(8, np.float32))
    with jax.transfer_guard(guard):
        arrays = put([np.ones(8, np.float32), 3, source], [named("data"), named(), named("data")])
    assert [np.asarray(array).sum() for array in arrays] == [8, 3, 8]
    assert "transfer" not in capfd.readouterr().err


def test_a_guard_against_every_transfer_trips() -> None:
    with jax.transfer_guard("disallow_explicit"), pytest.raises(Exception, match="Disallowed host-to-device"):
        put([np.ones(8, np.float32)], [named("data")])


def test_an_error_names_the_leaf() -> None:
    with pytest.raises(ValueError, match="evenly divide") as caught:
        put([np.ones(8), np.ones(7)], [named("data")] * 2, paths=["a", "b"])
    assert caught.value.__notes__ == ["leaf b"]
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        put([np.ones(8), np.ones(8)], [named("data")])


# --- leaves that are jax.Arrays


def pointers(array: Any) -> set[tuple[Any, int]]:
    data = jax.random.key_data(array) if is_key(array) else array
    return {(shard.device, shard.data.unsafe_buffer_pointer()) for shard in data.addressable_shards}


def numbers(array: Any) -> list[Any]:
    return np.asarray(jax.random.key_data(array) if is_key(array) else array).tolist()


def as_keys(count: int) -> Any:
    return jax.random.split(jax.random.key(7), (count, count))


@pytest.mark.parametrize("source", ["rows", "rows and columns", "replicated", "device 0"])
@pytest.mark.parametrize("kind", ["numbers", "keys"])
def test_donating_the_result_leaves_the_source_alone(kind: str, source: str) -> None:
    made = np.arange(64, dtype=np.float32).reshape(8, 8) if kind == "numbers" else as_keys(8)
    array = jax.device_put(made, PLACES[source])
    for sharding in PLACES.values():
        check_donation(array, sharding)


def check_donation(array: Any, sharding: Any) -> None:
    wanted = numbers(array)
    (placed,) = put([array], [sharding])
    assert placed.sharding.is_equivalent_to(sharding, 2)
    assert numbers(placed) == wanted
    assert not pointers(placed) & pointers(array)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        jax.block_until_ready(overwrite(placed))
    assert placed.is_deleted()
    assert not array.is_deleted()
    assert numbers(array) == wanted


@jax.jit
def _bits(x: Any) -> Any:
    return jax.random.wrap_key_data(jax.random.key_data(x) + 1)


overwrite = jax.jit(lambda x: _bits(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x + 1, donate_argnums=0)


def test_device_put_alone_would_share() -> None:
    """What the copy is for: without it the test above fails for these."""
    array = jax.device_put(np.ones((8, 8), np.float32), named("data"))
    assert jax.device_put(array, named("data")) is array
    single = jax.device_put(np.ones((8, 8), np.float32), one(0))
    assert pointers(jax.device_put(single, named())) & pointers(single)


def test_a_deleted_array_is_refused() -> None:
    array = jax.device_put(np.ones((8, 2), np.float32), named("data"))
    array.delete()
    with pytest.raises(PlacementError, match=r"leaf meta\.x: the jax\.Array of shape \(8, 2\) was deleted .*donated"):
        put([np.ones(8), array], [named("data")] * 2, paths=["label", "meta.x"])


def test_kinds_of_leaves() -> None:
    array, keys = jax.numpy.ones(2), jax.random.split(jax.random.key(0), 2)
    assert [is_jax_array(leaf) for leaf in (array, keys, np.ones(2), 3)] == [True, True, False, False]
    assert [is_key(leaf) for leaf in (array, keys, jax.random.PRNGKey(0), np.ones(2), 3)] == [False, True, False, False, False]


def test_copy_in_place_keeps_to_the_devices() -> None:
    array = jax.device_put(np.ones((8, 2), np.float32), named("data"))
    with jax.transfer_guard_host_to_device("disallow_explicit"), jax.transfer_guard_device_to_host("disallow_explicit"):
        copied = copy_in_place(array, named("data"))
    assert numbers(copied) == numbers(array)
