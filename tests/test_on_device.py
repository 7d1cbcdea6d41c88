"""Arrays that stay on the devices are read as the same arrays in host memory are: order, values, remainder, positions, states."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import prefetchshard as ps
from consumers import Consume, batches, consumer, places
from prefetchshard.leaves.on_devices import is_small_float
from prefetchshard.on_device import store as on_device

P = PartitionSpec
ROWS = 50
X = np.random.default_rng(0).standard_normal((ROWS, 4, 6)).astype(np.float32)
Y = np.arange(ROWS, dtype=np.int32)

DTYPES = [np.dtype(name) for name in ("bool", "int8", "uint16", "int32", "float16", "float32", "complex64", "int64", "float64", ">i4")]
DTYPES += [np.dtype(getattr(ml_dtypes, name)) for name in ("bfloat16", "float8_e4m3fn", "int4", "uint4")]


def mesh_2d() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))


def random_bits(shape: tuple[int, ...], dtype: np.dtype[Any], seed: int) -> np.ndarray:
    """Values of every bit pattern, NaNs and negative zeros among them, where a dtype has room for it."""
    random = np.random.default_rng(seed)
    if dtype.kind == "b" or dtype.name in ("int4", "uint4"):
        return random.integers(0, 2 if dtype.kind == "b" else 8, shape).astype(dtype) * (-1 if dtype.name == "int4" else 1)
    if dtype.name == "int64":
        return random.integers(-(2**31), 2**31, shape)
    if dtype.name == "float64":
        return random.standard_normal(shape)
    return np.frombuffer(random.bytes(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape).copy()


def assert_same(one: Any, other: Any) -> None:
    """Two batches: containers, dtypes, shardings and bits."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for left, right in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert (left.shape, left.dtype) == (right.shape, right.dtype)
        assert left.sharding.is_equivalent_to(right.sharding, left.ndim)
        assert np.asarray(left).tobytes() == np.asarray(right).tobytes(), left.dtype


def both(arrays: Any, sharding: Any, store: Any = None, **options: Any) -> tuple[ps.Loader, ps.Loader]:
    """A loader of arrays in host memory, and one of the same arrays on the devices."""
    return ps.Loader(arrays, sharding, **options), ps.Loader(ps.OnDevice(arrays, store), sharding, **options)


def assert_alike(host: ps.Loader, device: ps.Loader, consume: Consume | None = None) -> None:
    """All batches of a run, with what is said of them."""
    consume = consume or consumer("sync")
    assert len(host) == len(device)
    assert dict(host.spec()) == dict(device.spec())
    ours, theirs = consume(host), consume(device)
    assert places(ours) == places(theirs)
    for one, other in zip(batches(ours), batches(theirs), strict=True):
        assert_same(one, other)
    assert host.state() == device.state()


# -- the same as from host memory


def placings() -> dict[str, tuple[Any, Any]]:
    """Where batches go, and where the arrays lie."""
    mesh = mesh_2d()
    rows, both_axes = NamedSharding(mesh, P("data")), NamedSharding(mesh, P(("data", "model")))
    columns = NamedSharding(mesh, P("data", None, "model"))
    auto = ps.make_mesh({"data": -1})
    explicit = jax.make_mesh((8,), ("data",))
    return {
        "default": (None, None),
        "whole": (rows, None),
        "rows split as those of batches": (rows, P("data")),
        "rows split over another axis": (rows, P("model")),
        "rows split over both": (rows, P(("data", "model"))),
        "rows of batches over both": (both_axes, P("data")),
        "both over both": (both_axes, both_axes),
        "columns of whole arrays": (columns, None),
        "columns of split ones": (columns, P(None, None, "model")),
        "rows and columns": (columns, P("data", None, "model")),
        "columns cut after the rows met": (columns, P("model")),
        "replicated batches": (NamedSharding(mesh, P()), P("data")),
        "one device": (SingleDeviceSharding(jax.devices()[3]), None),
        "rows that would be split over more devices": (SingleDeviceSharding(jax.devices()[3]), P("data")),
        "a mesh of one device": (NamedSharding(Mesh(np.array(jax.devices()[2:3]), ("data",)), P("data")), P("data")),
        "a mesh made by us": (NamedSharding(auto, P("data")), P("data")),
        "an explicit mesh": (NamedSharding(explicit, P("data")), P("data")),
        "an explicit mesh, whole": (NamedSharding(explicit, P("data")), None),
    }


@pytest.mark.parametrize(("sharding", "store"), placings().values(), ids=placings())
def test_wherever_it_goes(sharding: Any, store: Any) -> None:
    arrays = {"a": X, "b": random_bits((ROWS, 2, 2), np.dtype(np.float32), 1)}
    assert_alike(*both(arrays, sharding, store, batch_size=16, shuffle=True, seed=7, remainder="pad", epochs=2))
    assert_alike(*both(arrays, sharding, store, batch_size=16, microbatches=2, remainder=ps.Pad(value=3)))


def test_leaves_with_shardings_of_their_own() -> None:
    mesh, other = mesh_2d(), Mesh(np.array(jax.devices()), ("all",))
    rows = NamedSharding(mesh, P("data"))
    arrays = {"x": X, "y": Y, "z": Y * 2, "one": Y + 1}
    sharding = {
        "x": rows,
        "y": NamedSharding(mesh, P()),
        "z": NamedSharding(other, P("all")),
        "one": SingleDeviceSharding(jax.devices()[5]),
    }
    assert_alike(*both(arrays, sharding, batch_size=16, remainder="pad", shuffle=True))
    assert_alike(*both(arrays, lambda path, shape, dtype: rows, batch_size=16))
    store = {
        "x": NamedSharding(mesh, P("data")),
        "y": None,
        "z": NamedSharding(other, P("all")),
        "one": SingleDeviceSharding(jax.devices()[5]),
    }
    store["y"] = NamedSharding(mesh, P())
    assert_alike(*both(arrays, sharding, store, batch_size=16, remainder="pad"))


class Pair(NamedTuple):
    x: Any
    y: Any


@pytest.mark.parametrize("wrap", [lambda x, y: x, lambda x, y: (x, y), Pair, lambda x, y: {"in": {"x": x}, "y": y}])
@pytest.mark.parametrize("remainder", ["drop", "pad"])
def test_whatever_container(S: NamedSharding, wrap: Any, remainder: Any) -> None:
    assert_alike(*both(wrap(X, Y), S, batch_size=8, remainder=remainder))


KINDS_OF_DTYPES = {
    "small floats": [dtype for dtype in DTYPES if is_small_float(dtype)],
    "small integers": [dtype for dtype in DTYPES if dtype.kind != "c" and not is_small_float(dtype) and dtype.itemsize <= 2],
    "wide": [dtype for dtype in DTYPES if dtype.kind == "c" or dtype.itemsize > 2],
}


def test_every_dtype_is_of_one_kind() -> None:
    assert sorted(map(str, itertools.chain(*KINDS_OF_DTYPES.values()))) == sorted(map(str, DTYPES))
    assert min(map(len, KINDS_OF_DTYPES.values())) > 2


@pytest.mark.parametrize("kind", KINDS_OF_DTYPES)
@pytest.mark.parametrize("store", [None, P("data")])
def test_bits_of_every_dtype(S: NamedSharding, kind: str, store: Any) -> None:
    """Not-a-numbers keep their bits, zeros their sign, also beside padding. The dtypes of a kind in one batch, to be compiled once."""
    dtypes = KINDS_OF_DTYPES[kind]

    def of_each(name: str, shape: tuple[int, ...], seed: int) -> dict[str, np.ndarray]:
        return {f"{name} of {dtype}": random_bits(shape, dtype, seed) for dtype in dtypes}

    x, z = of_each("x", (ROWS, 70), 0), of_each("z", (ROWS, 8), 1)
    arrays = {**x, "y": Y, **z}
    assert_alike(*both(arrays, S, store, batch_size=8, remainder="pad"))
    assert_alike(*both(arrays, S, store, batch_size=8, remainder=ps.Pad(value=1)))
    assert_alike(*both(arrays, S, store, batch_size=8, shuffle=True))
    columns = NamedSharding(mesh_2d(), P(None, "model"))
    assert_alike(*both(arrays, {**dict.fromkeys((*x, *z), columns), "y": None}, batch_size=8))
    assert_alike(*both(of_each("z", (4096, 8), 2), S, store, batch_size=512, remainder=ps.Pad(value=1)))


def test_four_bit_floats(S: NamedSharding) -> None:
    """They are no integers of eight bits."""
    arrays = (np.arange(ROWS * 8) % 7).reshape(ROWS, 8).astype(ml_dtypes.float4_e2m1fn)
    assert_alike(*both(arrays, S, batch_size=8))


def test_however_it_is_consumed(S: NamedSharding, consume: Consume) -> None:
    for store in (None, P("data")):
        assert_alike(*both({"x": X, "y": Y}, S, store, batch_size=8, epochs=2, shuffle=True), consume)


shapes = st.lists(st.integers(1, 4), max_size=2).map(tuple)


any_arrays = st.fixed_dictionaries(
    {
        "leaves": st.lists(st.tuples(st.sampled_from(DTYPES), shapes), min_size=1, max_size=4),
        "rows": st.integers(1, 40),
        "batch": st.sampled_from([1, 2, 3]),
        "remainder": st.sampled_from(["drop", "keep", "pad", ps.Pad(mask_key="valid", value=1)]),
        "shuffle": st.booleans(),
        "seed": st.integers(0, 2**40),
        "epochs": st.integers(1, 3),
        "microbatches": st.sampled_from([None, 1, 2]),
        "store": st.sampled_from([None, P("data"), P(("model", "data"))]),
        "split": st.sampled_from([P("data"), P("model"), P()]),
    }
)


def check_against_host_memory(
    leaves: Any, rows: int, batch: int, remainder: Any, shuffle: bool, seed: int, epochs: int, microbatches: Any, store: Any, split: Any
) -> None:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    size = 4 * batch
    if remainder == "drop":
        rows += size
    elif remainder == "keep":
        rows = 4 * rows
    arrays = {f"x{i}": random_bits((rows, *shape), dtype, i) for i, (dtype, shape) in enumerate(leaves)}
    options = {"batch_size": size, "remainder": remainder, "shuffle": shuffle, "seed": seed, "epochs": epochs}
    host, device = both(arrays, NamedSharding(mesh, split), store, microbatches=microbatches, **options)
    assert_alike(host, device)
    assert_alike(host, device)  # the next run


@settings(deadline=None, max_examples=12)
@given(any_arrays)
def test_as_from_host_memory(case: dict[str, Any]) -> None:
    check_against_host_memory(**case)


@pytest.mark.slow
@settings(deadline=None, max_examples=50)
@given(any_arrays)
def test_as_from_host_memory_often(case: dict[str, Any]) -> None:
    check_against_host_memory(**case)


@pytest.mark.parametrize("store", [None, P("data")])
@pytest.mark.parametrize("done", [0, 1, 5, 6, 7, 12])
def test_going_on_from_a_state(S: NamedSharding, store: Any, done: int) -> None:
    """Of the one from that of the other, both ways."""
    options: dict[str, Any] = {"batch_size": 8, "shuffle": True, "seed": 5, "epochs": 2, "remainder": "drop"}
    arrays = {"x": X, "y": Y}
    whole = list(ps.Loader(arrays, S, **options))
    for made in both(arrays, S, store, **options):
        iterator = iter(made)
        for _ in range(done):
            next(iterator)
        state = ps.LoaderState.decode(iterator.state().encode())
        iterator.close()
        for loader in both(arrays, S, store, state=state, **options):
            assert len(loader) == len(whole) - done
            for one, other in zip(loader, whole[done:], strict=True):
                assert_same(one, other)


@pytest.mark.parametrize("store", [None, P("data")])
def test_device_transform_comes_after(S: NamedSharding, store: Any) -> None:
    def transform(batch: Any, key: Any) -> Any:
        noise = jax.random.uniform(key, batch["x"].shape)
        return {"x": batch["x"] * 2 + noise, "mask": batch["mask"], "n": batch["y"].sum()}

    assert_alike(*both({"x": X, "y": Y}, S, store, batch_size=16, remainder="pad", device_transform=transform, seed=3))


def test_under_x64_and_then_without(S: NamedSharding) -> None:
    arrays = {"i": np.arange(ROWS) * 2**20, "f": np.random.default_rng(0).random(ROWS)}
    host, device = both(arrays, S, batch_size=8)
    for x64 in (True, False, True):
        with jax.enable_x64(x64):
            assert dict(host.spec()) == dict(device.spec())
            for one, other in zip(host, device, strict=True):
                assert_same(one, other)


@pytest.mark.parametrize("store", [None, P("data")])
def test_under_settings_that_are_for_the_users_own_functions(S: NamedSharding, store: Any) -> None:
    with (
        jax.debug_nans(True),
        jax.numpy_rank_promotion("raise"),
        jax.numpy_dtype_promotion("strict"),
        jax.transfer_guard("disallow"),
        jax.default_device(jax.devices()[4]),
    ):
        loader = ps.Loader(ps.OnDevice({"x": X * np.nan, "y": Y}, store), S, batch_size=8, remainder="pad")
        found = list(loader)
    assert np.isnan(np.asarray(found[0]["x"])).all()
    assert np.array_equal(np.concatenate([np.asarray(batch["y"]) for batch in found])[:ROWS], Y)


# -- what stays, and what goes


def test_the_arrays_are_put_once(S: NamedSharding, monkeypatch: pytest.MonkeyPatch) -> None:
    puts: list[str] = []
    put = on_device._Place.put

    def counted(self: Any, leaf: Any, narrow: Any) -> Any:
        puts.append(self.path)
        return put(self, leaf, narrow)

    monkeypatch.setattr(on_device._Place, "put", counted)
    loader = ps.Loader(ps.OnDevice({"x": X, "y": Y}), S, batch_size=8)
    assert puts == []
    for _ in range(3):
        assert len(list(loader)) == 6
        loader.close()
    assert puts == ["x", "y"]


def test_the_host_sends_row_numbers_alone(S: NamedSharding) -> None:
    iterator = iter(ps.Loader(ps.OnDevice({"x": X, "y": Y}), S, batch_size=8))
    count = sum(1 for _ in iterator)
    assert iterator.stats().bytes == count * 8 * 4


def test_what_the_user_does_to_his_array_later_changes_nothing(S: NamedSharding) -> None:
    x = X.copy()
    loader = ps.Loader(ps.OnDevice(x), S, batch_size=8)
    first = list(loader)
    x[:] = -1
    for one, other in zip(first, loader, strict=True):
        assert_same(one, other)
    assert np.array_equal(np.asarray(first[0]), X[:8])


@pytest.mark.parametrize("store", [None, P("data")])
def test_donating_a_batch_leaves_the_arrays_alone(S: NamedSharding, store: Any) -> None:
    distrust = jax.jit(lambda batch: batch * 0 - 1, donate_argnums=0)
    loader = ps.Loader(ps.OnDevice(X[:48], store), S, batch_size=48, epochs=3)
    for batch in loader:
        assert np.array_equal(np.asarray(batch), X[:48])
        jax.block_until_ready(distrust(batch))


def test_dropping_the_loader_lets_go_of_the_arrays(S: NamedSharding) -> None:
    source = ps.OnDevice({"x": X})
    loader = ps.Loader(source, S, batch_size=8)
    iterator = iter(loader)
    next(iterator)
    rows = loader._factory.specs._device_rows
    assert rows is not None
    stored = weakref.ref(rows[1]._stores[0])
    del rows
    iterator.close()
    gc.collect()
    assert stored() is not None
    del loader, iterator
    gc.collect()
    assert stored() is None


def test_a_jax_array_that_is_there_is_used_as_it_is(S: NamedSharding, R: NamedSharding) -> None:
    there = jax.device_put(X, R)
    loader = ps.Loader(ps.OnDevice(there), S, batch_size=8, shuffle=True)
    host = ps.Loader(X, S, batch_size=8, shuffle=True)
    assert_alike(host, loader)
    rows = loader._factory.specs._device_rows
    assert rows is not None
    assert rows[1]._stores[0] is there


@pytest.mark.parametrize("store", [None, P("data")])
def test_a_jax_array_that_is_elsewhere_is_moved(S: NamedSharding, store: Any) -> None:
    arrays = {"x": jnp.asarray(X), "y": Y}
    device = ps.Loader(ps.OnDevice(arrays, store), S, batch_size=8, remainder="pad")
    assert_alike(ps.Loader({"x": X, "y": Y}, S, batch_size=8, remainder="pad"), device)
    assert np.array_equal(np.asarray(arrays["x"]), X)


# -- who dispatches


def test_rows_that_are_split_are_gathered_by_the_thread_that_takes_the_batch(S: NamedSharding, monkeypatch: pytest.MonkeyPatch) -> None:
    """Collectives must reach all devices in one order, so the thread that dispatches the step dispatches them."""
    threads: list[str] = []
    gather = on_device.DeviceRows.__call__

    def noted(self: Any, numbers: Any) -> Any:
        threads.append(threading.current_thread().name)
        return gather(self, numbers)

    monkeypatch.setattr(on_device.DeviceRows, "__call__", noted)
    list(ps.Loader(ps.OnDevice(X, P("data")), S, batch_size=8))
    assert set(threads) == {threading.current_thread().name}
    list(ps.Loader(ps.OnDevice(X), S, batch_size=8))  # on the CPU backend alone: it may hang where two threads dispatch
    assert set(threads) == {threading.current_thread().name}
    threads.clear()
    list(ps.Loader(ps.OnDevice(X), SingleDeviceSharding(jax.devices()[0]), batch_size=8))
    assert threads
    assert all(name.startswith("prefetchshard-") for name in threads)


@pytest.mark.parametrize("store", [None, P(None, None, "model")])
def test_whole_rows_are_gathered_without_a_collective(store: Any) -> None:
    sharding = NamedSharding(mesh_2d(), P("data", None, "model"))
    loader = ps.Loader(
        ps.OnDevice({"x": X, "y": Y}, store and {"x": store, "y": P()}), {"x": sharding, "y": None}, batch_size=8, remainder="pad"
    )
    next(iter(loader))
    rows = loader._factory.specs._device_rows
    assert rows is not None
    (gather,) = rows[1]._gathers
    numbers = jax.device_put(np.zeros(8, np.int32), gather.numbers_at)
    text: str = gather._run.lower(numbers, *rows[1]._stores).compile().as_text()
    assert not [word for word in ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter") if word in text]


@pytest.mark.parametrize("store", [None, P("data")])
def test_a_fault_of_device_transform_comes_each_time_and_hangs_nothing(S: NamedSharding, store: Any) -> None:
    def wrong(batch: Any) -> Any:
        raise KeyError("no such leaf")

    with ps.Loader(ps.OnDevice(X, store), S, batch_size=8, device_transform=wrong) as loader:
        iterator = iter(loader)
        for _ in range(2):
            with pytest.raises(KeyError, match="no such leaf") as caught:
                next(iterator)
        assert any("placing batch 0" in note for note in caught.value.__notes__)


# -- memory


def test_too_much_for_the_devices_is_told_with_numbers(S: NamedSharding, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is put; the bytes of each device count."""
    need = X.nbytes + Y.nbytes
    monkeypatch.setattr(on_device, "free_bytes", lambda device: need)
    with pytest.raises(ps.ConfigError, match=rf"the arrays take {need:,} bytes on .*batches of .*{need:,} bytes are free"):
        ps.Loader(ps.OnDevice({"x": X, "y": Y}), S, batch_size=8)
    assert len(list(ps.Loader(ps.OnDevice({"x": X, "y": Y}, P("data")), S, batch_size=8))) == 6
    monkeypatch.setattr(on_device, "free_bytes", lambda device: 10 * need)
    assert len(list(ps.Loader(ps.OnDevice({"x": X, "y": Y}), S, batch_size=8))) == 6


def test_what_a_backend_says_of_its_memory() -> None:
    class Device:
        def __init__(self, stats: Any) -> None:
            self.stats = stats

        def memory_stats(self) -> Any:
            return self.stats

    assert on_device.free_bytes(Device({"bytes_limit": 100, "bytes_in_use": 30})) == 70
    assert on_device.free_bytes(Device({"bytes_limit": 100})) == 100
    assert on_device.free_bytes(Device({})) is None
    assert on_device.free_bytes(Device({"bytes_limit": -1})) is None
    assert on_device.free_bytes(Device(None)) is None


def test_bounds_on_batches_hold_as_for_other_sources(S: NamedSharding) -> None:
    per_device = X[:1].nbytes  # 8 rows over 8 devices
    with pytest.raises(ps.ConfigError, match="device_memory"):
        ps.Loader(ps.OnDevice(X), S, batch_size=8, device_memory=per_device)
    assert len(list(ps.Loader(ps.OnDevice(X), S, batch_size=8, device_memory=2 * per_device, host_memory=32))) == 6
    with pytest.raises(ps.ConfigError, match="host_memory=31"):
        ps.Loader(ps.OnDevice(X), S, batch_size=8, host_memory=31)


# -- narrowing


@pytest.mark.parametrize("store", [None, P("data")])
def test_a_value_that_does_not_survive_is_told_where_the_arrays_are_put(S: NamedSharding, store: Any) -> None:
    """Leaf and row of the arrays, once, whatever batch it would be in."""
    y = np.arange(ROWS)
    y[43] = 2**40
    loader = ps.Loader(ps.OnDevice({"x": X, "y": y}, store), S, batch_size=8, shuffle=True)
    with pytest.raises(ps.NarrowingError, match=r"leaf y: row 43 of the arrays.*1099511627776"):
        iter(loader)
    with pytest.raises(ps.NarrowingError, match="narrow='error'"):
        ps.Loader(ps.OnDevice({"x": X, "y": Y.astype(np.int64)}, store), S, batch_size=8, narrow="error")
    wrapped = next(iter(ps.Loader(ps.OnDevice(y, store), S, batch_size=8, narrow="allow")))
    assert wrapped.dtype == np.int32


# -- what it refuses


class Duck:
    pass


def wrong_arrays() -> Iterator[tuple[Any, str]]:
    yield {"x": X, "name": np.array(["a"] * ROWS)}, "array name .*dtype <U1.* cannot be held by a device"
    yield {"x": X, "o": np.array([None] * ROWS)}, "array o .*dtype object"
    yield {"x": X, "m": np.ma.MaskedArray(Y, mask=Y > 3)}, "array m .MaskedArray"
    yield {"x": X, "y": Y[:5]}, "differ in their leading size"
    yield {"x": X, "n": 3}, "entry 'n'"
    yield [X], "takes a NumPy array or a jax.Array"
    yield iter([X]), "takes a NumPy array or a jax.Array"
    yield Duck(), "takes a NumPy array or a jax.Array"
    yield {"k": jax.random.split(jax.random.key(0), ROWS)}, "jax.random.key_data"
    yield np.float32(3), "takes a NumPy array"


@pytest.mark.parametrize(("arrays", "words"), list(wrong_arrays()))
def test_what_is_no_array_is_refused_where_it_is_made(arrays: Any, words: str) -> None:
    with pytest.raises(ps.ConfigError, match=words):
        ps.OnDevice(arrays)


def test_host_functions_are_refused(S: NamedSharding) -> None:
    for name in ("transform", "collate"):
        options: dict[str, Any] = {name: lambda x: x}
        with pytest.raises(ps.ConfigError, match=f"{name} runs on the host.*device_transform"):
            ps.Loader(ps.OnDevice(X), S, batch_size=8, **options)


def test_host_leaves_are_refused(S: NamedSharding) -> None:
    with pytest.raises(ps.ConfigError, match=r"leaf y is to stay on the host \(ps.HOST\)"):
        ps.Loader(ps.OnDevice({"x": X, "y": Y}), {"x": S, "y": ps.HOST}, batch_size=8)
    with pytest.raises(ps.ConfigError, match="ps.HOST is no sharding for it"):
        ps.Loader(ps.OnDevice({"x": X, "y": Y}, {"x": S, "y": ps.HOST}), S, batch_size=8)


def test_shardings_that_do_not_go_together_are_refused(S: NamedSharding) -> None:
    mesh = mesh_2d()
    rows, some = NamedSharding(mesh, P("data", None, "model")), NamedSharding(Mesh(np.array(jax.devices()[:4]), ("data",)), P("data"))
    for store in (S, some, SingleDeviceSharding(jax.devices()[0])):
        with pytest.raises(ps.ConfigError, match="both must be of one mesh"):
            ps.Loader(ps.OnDevice(X, store), rows, batch_size=8)
    with pytest.raises(ps.ConfigError, match="axis 2 is split over 'data' where the array lies, and over 'model' in the batch"):
        ps.Loader(ps.OnDevice(X[:, :, :4], P(None, None, "data")), rows, batch_size=8)
    with pytest.raises(ps.ConfigError, match="names the axis 'date'"):
        ps.Loader(ps.OnDevice(X, P("date")), rows, batch_size=8)


def test_from_a_factory_it_is_refused(S: NamedSharding) -> None:
    with pytest.raises(ps.ConfigError, match=r"returned ps.OnDevice"):
        list(ps.Loader(lambda: ps.OnDevice(X), S, batch_size=8))


def test_a_64_bit_jax_array_while_x64_is_off_is_refused(S: NamedSharding) -> None:
    with jax.enable_x64(True):
        wide = jnp.arange(ROWS, dtype=np.int64)
    with pytest.raises(ps.ConfigError, match="is a jax.Array of int64"):
        iter(ps.Loader(ps.OnDevice(wide), S, batch_size=8))
    with jax.enable_x64(True):
        assert next(iter(ps.Loader(ps.OnDevice(wide), S, batch_size=8))).dtype == np.int64


def test_fewer_rows_than_a_batch_for_ever(S: NamedSharding) -> None:
    for epochs in (1, None):
        with pytest.raises(ps.ConfigError, match="its 4 rows are fewer than batch_size=8"):
            ps.Loader(ps.OnDevice(X[:4]), S, batch_size=8, epochs=epochs)
    with pytest.raises(ps.ConfigError, match="epochs=None"):
        ps.Loader(ps.OnDevice(X[:0]), S, batch_size=8, epochs=None)
    assert list(ps.Loader(ps.OnDevice(X[:0], P("data")), S, batch_size=8, remainder="pad")) == []


def test_a_name_that_the_mask_would_take(S: NamedSharding) -> None:
    with pytest.raises(ps.ConfigError, match="row mask under 'mask'"):
        ps.Loader(ps.OnDevice({"mask": X}), S, batch_size=8, remainder="pad")
