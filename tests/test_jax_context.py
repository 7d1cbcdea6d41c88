"""The caller's JAX settings count, in all threads of a run, as they were at `iter()`."""

from __future__ import annotations

import contextlib
import contextvars
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import prefetchshard as ps
from consumers import Consume, batches, consumer
from prefetchshard.base.jax_context import JaxContext
from prefetchshard.base.older_mesh import older_mesh

P = PartitionSpec
sync = consumer("sync")
BIG = np.arange(16, dtype=np.int64) + 2**40


def settings() -> dict[str, Any]:
    names = (
        "enable_x64", "default_device", "default_matmul_precision", "numpy_dtype_promotion", "numpy_rank_promotion", "default_prng_impl",
        "debug_nans", "debug_infs", "disable_jit", "log_compiles", "check_tracer_leaks", "transfer_guard_host_to_device",
        "transfer_guard_device_to_device", "transfer_guard_device_to_host", "threefry_partitionable",
    )  # fmt: skip
    found = {name: getattr(jax.config, f"jax_{name}") for name in names}
    return {**found, "mesh": jax.sharding.get_abstract_mesh()}


CONTEXTS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "x64": lambda: jax.enable_x64(True),
    "default device": lambda: jax.default_device(jax.devices()[3]),
    "matmul precision": lambda: jax.default_matmul_precision("bfloat16"),
    "dtype promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "rank promotion": lambda: jax.numpy_rank_promotion("raise"),
    "prng": lambda: jax.default_prng_impl("rbg"),
    "nans": lambda: jax.debug_nans(True),
    "infs": lambda: jax.debug_infs(True),
    "no jit": jax.disable_jit,
    "guard": lambda: jax.transfer_guard("disallow"),
    "one guard": lambda: jax.transfer_guard_host_to_device("log"),
    "mesh": lambda: jax.set_mesh(jax.make_mesh((4, 2), ("a", "b"))),
    "leaks": lambda: jax.check_tracer_leaks(True),
}


class Watch:
    """Notes the settings in force where a source, a transform and a device transform run."""

    def __init__(self) -> None:
        self.seen: dict[str, dict[str, Any]] = {}
        self.threads: set[str] = set()

    def note(self, where: str) -> None:
        self.seen[where] = settings()
        self.threads.add(threading.current_thread().name)

    def source(self) -> Iterator[Any]:
        for row in range(8):
            self.note("source")
            yield np.float32(row)

    def transform(self, row: Any) -> Any:
        self.note("transform")
        return row

    def device_transform(self, batch: Any) -> Any:
        self.note("device_transform")
        return batch

    def loader(self, sharding: Any) -> ps.Loader:
        return ps.Loader(self.source(), sharding, batch_size=8, workers=1, transform=self.transform, device_transform=self.device_transform)


@pytest.mark.parametrize("name", CONTEXTS)
def test_what_is_in_force_at_iter_is_in_force_in_every_thread(name: str, S: NamedSharding) -> None:
    watch, before = Watch(), settings()
    loader = watch.loader(S)
    with CONTEXTS[name]():
        want = settings()
        iterator = iter(loader)
    assert want != before
    assert settings() == before, "and nowhere else"
    assert len(sync(iterator)) == 1
    assert set(watch.seen) == {"source", "transform", "device_transform"}
    assert all(seen == want for seen in watch.seen.values())
    assert len(watch.threads) == 3
    assert settings() == before


def test_what_changes_later_does_not_alter_a_run(S: NamedSharding) -> None:
    """Neither in this thread nor, by `jax.config.update`, in the whole process."""
    gate = threading.Event()
    seen: list[dict[str, Any]] = []

    def transform(row: Any) -> Any:
        assert gate.wait(30)
        seen.append(settings())
        return row

    before = settings()
    iterator = iter(ps.Loader(BIG.astype(np.float32), S, batch_size=8, transform=transform))
    changed = {"jax_enable_x64": True, "jax_default_device": jax.devices()[5], "jax_numpy_rank_promotion": "raise"}
    old = {name: getattr(jax.config, name) for name in changed}
    try:
        for name, value in changed.items():
            jax.config.update(name, value)
        with jax.set_mesh(jax.make_mesh((8,), ("other",))), jax.debug_nans(True):
            gate.set()
            got = batches(sync(iterator))
    finally:
        for name, value in old.items():
            jax.config.update(name, value)
    assert [batch.sharding.is_equivalent_to(S, 1) for batch in got] == [True, True]
    assert all(one == before for one in seen)


def test_every_run_has_its_own(S: NamedSharding, consume: Consume) -> None:
    loader = ps.Loader({"x": BIG}, S, batch_size=8, device_transform=lambda b: {"x": b["x"], "y": b["x"] * 2.5})
    with jax.enable_x64(True):
        wide = iter(loader)
    with pytest.raises(ps.NarrowingError):
        consume(loader)
    got = batches(consume(wide))
    assert {(b["x"].dtype, b["y"].dtype) for b in got} == {(np.dtype(np.int64), np.dtype(np.float64))}
    assert np.array_equal(np.concatenate([b["x"] for b in got]), BIG)
    small = ps.Loader({"x": BIG - 2**40}, S, batch_size=8, device_transform=lambda b: {"x": b["x"], "y": b["x"] * 2.5})
    for _ in range(2):
        assert {(b["x"].dtype, b["y"].dtype) for b in batches(consume(small))} == {(np.dtype(np.int32), np.dtype(np.float32))}
        with jax.enable_x64(True):
            run = iter(small)
        assert {(b["x"].dtype, b["y"].dtype) for b in batches(consume(run))} == {(np.dtype(np.int64), np.dtype(np.float64))}


def test_the_case_as_reported(S: NamedSharding) -> None:
    with jax.enable_x64(True), jax.default_device(jax.devices()[3]), jax.set_mesh(S.mesh):
        batch = next(iter(ps.Loader([BIG[:8]], P("data"))))
        assert batch.dtype == np.int64
        assert int(batch[0]) == 2**40
        assert batch.sharding.is_equivalent_to(S, 1)
        assert next(iter(ps.Loader([np.arange(8)]))).devices() == {jax.devices()[3]}


def test_specs_are_worked_out_where_the_loader_is_made() -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        by_spec = ps.Loader({"x": np.ones((8, 2))}, P("data", "model"), batch_size=8)
    with jax.default_device(jax.devices()[6]):
        by_default = ps.Loader({"x": np.ones((8, 2))}, batch_size=8)
    with jax.default_device(jax.devices()[1]):
        assert next(iter(by_spec))["x"].sharding.is_equivalent_to(NamedSharding(mesh, P("data", "model")), 2)
        assert next(iter(by_default))["x"].devices() == {jax.devices()[6]}
    with pytest.raises(ps.ConfigError, match="mesh"):
        ps.Loader({"x": np.ones((8, 2))}, P("data", "model"), batch_size=8)


def test_the_default_device_of_device_transform_and_transform() -> None:
    """Arrays that a hook makes from nothing are where the caller's would be."""
    devices: list[Any] = []

    def transform(row: Any) -> Any:
        devices.append(jnp.ones(1).devices())
        return row

    with jax.default_device(jax.devices()[4]):
        sync(ps.Loader(np.ones((8, 2), np.float32), batch_size=8, transform=transform))
    assert {device for found in devices for device in found} == {jax.devices()[4]}


def test_strict_promotion_reaches_the_tracing(S: NamedSharding, consume: Consume) -> None:
    def mixed(batch: Any) -> Any:
        return batch["a"] + batch["b"]

    loader = ps.Loader({"a": np.ones(8, np.int32), "b": np.ones(8, np.float32)}, S, batch_size=8, device_transform=mixed)
    assert len(consume(loader)) == 1
    with jax.numpy_dtype_promotion("strict"):
        strict = iter(loader)
    with pytest.raises(Exception, match="promotion"):
        consume(strict)
    assert len(consume(loader)) == 1


def test_nans_are_found_where_they_arise_and_not_in_the_data(S: NamedSharding) -> None:
    source = {"x": np.array([np.nan] * 16, np.float32), "big": np.full((16, 1 << 12), np.inf, np.float32)}
    for made, options in ((source, {"batch_size": 8}), ([source], {}), (iter([source]), {"transform": lambda b: b})):
        with jax.debug_nans(True), jax.debug_infs(True):
            assert len(sync(ps.Loader(made, S, remainder="pad", **options))) in (1, 2)
            bad = iter(ps.Loader(list(range(8)), S, batch_size=8, device_transform=lambda x: jnp.log(-1.0 - x)))
        with pytest.raises(FloatingPointError, match="nan"):
            sync(bad)


def many(rows: int) -> dict[str, np.ndarray]:
    """So many small leaves that they travel together."""
    dtypes = [np.float32, np.float16, jnp.bfloat16, np.complex64, np.int32, np.uint8, bool, np.int8]
    leaves = {f"leaf{i}": np.ones((rows, 2), dtype) * np.arange(rows)[:, None].astype(dtype) for i, dtype in enumerate(dtypes)}
    leaves["leaf0"][1] = np.nan
    leaves["leaf1"][2] = np.inf
    return leaves


@pytest.mark.parametrize("name", [*CONTEXTS, "mesh of the batches"])
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_no_setting_changes_the_data_or_where_it_goes(name: str, kind: str) -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(getattr(jax.sharding.AxisType, kind),) * 2)
    sharding = NamedSharding(mesh, P("data"))
    source = many(20)
    made = ps.Loader(source, sharding, batch_size=8, remainder="pad", microbatches=2)
    with jax.set_mesh(mesh) if name == "mesh of the batches" else CONTEXTS[name]():
        got = batches(sync(made))
        spec = made.spec()
    for path, leaf in source.items():
        values = np.concatenate([np.asarray(batch[path]).reshape(8, 2) for batch in got])[:20]
        assert values.tobytes() == leaf.tobytes()
        assert all(batch[path].sharding.is_equivalent_to(NamedSharding(mesh, P(None, "data")), 3) for batch in got)
        assert spec[path].sharding.is_equivalent_to(NamedSharding(mesh, P(None, "data")), 3)


@pytest.mark.parametrize("name", CONTEXTS)
def test_no_setting_changes_arrays_that_are_on_devices(name: str, S: NamedSharding) -> None:
    x = np.arange(11, dtype=np.float32)
    x[[2, 9]] = np.nan, np.inf
    source = [{"x": jnp.asarray(part), "k": jax.random.split(jax.random.key(0), len(part))} for part in (x[:8], x[8:])]
    with CONTEXTS[name]():
        got = batches(sync(ps.Loader(source, S, remainder="pad", microbatches=1)))
    assert np.array_equal(np.concatenate([np.asarray(batch["x"]).reshape(8) for batch in got])[:11], x, equal_nan=True)
    assert [int(np.asarray(batch["mask"]).sum()) for batch in got] == [8, 3]


KEYS = [{"k": jax.random.key(i)} for i in range(11)]


@pytest.mark.parametrize("level", ["disallow", "log"])
def test_a_guard_against_implicit_transfers_lets_ours_through(level: str, S: NamedSharding, R: NamedSharding, consume: Consume) -> None:
    x = np.arange(11 * 3, dtype=np.float32).reshape(11, 3)
    on_devices = [jnp.asarray(x[:8]), jnp.asarray(x[8:])]
    cases: list[tuple[Any, Any, dict[str, Any]]] = [
        ({"x": x, "y": x[:, 0]}, S, {"batch_size": 8}),
        (({"x": row} for row in x), S, {"batch_size": 8, "transform": lambda e: e}),
        ([x[:8], x[8:]], S, {}),
        (on_devices, S, {}),
        (on_devices, R, {"microbatches": 1}),
        (KEYS, S, {"batch_size": 8}),
        ([{"s": 3, "x": x[:8]}, {"s": 4, "x": x[8:]}], {"s": None, "x": S}, {}),
        (
            {"x": x},
            S,
            {"batch_size": 8, "device_transform": lambda b, key: (b["x"] * np.arange(3) + jax.random.normal(key, (8, 3)), b["mask"])},
        ),
    ]
    for source, sharding, options in cases:
        with jax.transfer_guard(level):
            loader = ps.Loader(source, sharding, remainder="pad", **options)
            iterator = iter(loader)
            assert len(consume(iterator)) == 2
            assert loader.spec()


def test_a_guard_against_all_transfers_is_heeded(S: NamedSharding) -> None:
    with jax.transfer_guard_host_to_device("disallow_explicit"):
        iterator = iter(ps.Loader(np.ones((8, 2)), S, batch_size=8))
    with pytest.raises(Exception, match="Disallowed"):
        sync(iterator)


def test_implicit_transfers_of_a_hook_are_the_hooks_own(S: NamedSharding) -> None:
    def careless(row: Any) -> Any:
        return jnp.sin(np.float32(row))

    with jax.transfer_guard("disallow"):
        iterator = iter(ps.Loader(np.ones(8, np.float32), S, batch_size=8, transform=careless))
    with pytest.raises(Exception, match="Disallowed"):
        sync(iterator)


def test_without_jit_the_batches_are_the_same(S: NamedSharding) -> None:
    source = {"x": np.arange(32, dtype=np.float32).reshape(16, 2), "id": np.arange(16, dtype=np.int32)}

    def double(batch: Any) -> Any:
        return {"x": batch["x"] * 2, "id": batch["id"]}

    with jax.disable_jit():
        got = batches(sync(ps.Loader(source, S, batch_size=8, device_transform=double, microbatches=1)))
    assert np.array_equal(np.concatenate([b["x"].reshape(8, 2) for b in got]), source["x"] * 2)


marker: contextvars.ContextVar[str] = contextvars.ContextVar("marker", default="unset")


def test_context_variables_are_those_at_iter(S: NamedSharding, consume: Consume) -> None:
    seen: list[str] = []

    def source() -> Iterator[Any]:
        for row in range(8):
            seen.append(marker.get())
            yield np.float32(row)

    def transform(row: Any) -> Any:
        seen.append(marker.get())
        marker.set("of a worker")
        return row

    def device_transform(batch: Any) -> Any:
        seen.append(marker.get())
        return batch

    loader = ps.Loader(source(), S, batch_size=8, workers=1, transform=transform, device_transform=device_transform)
    token = marker.set("mine")
    iterator = iter(loader)
    marker.set("later")
    consume(iterator)
    marker.reset(token)
    assert [one for one in seen if one != "of a worker"] == ["mine"] * 10
    assert seen.count("of a worker") == 7, "a worker keeps what it set, to itself"
    assert marker.get() == "unset"


def test_numpys_error_state_is_one_of_them(S: NamedSharding) -> None:
    """It does not make our own conversions fail, and reaches hooks."""
    with np.errstate(all="raise"):
        raising = iter(ps.Loader(np.zeros(8), S, batch_size=8, transform=lambda row: np.float32(1) / np.float32(row)))
        source = {"f": np.full(16, 1e-300), "i": np.arange(16)}
        assert len(sync(ps.Loader(source, S, batch_size=8))) == 2
        assert len(sync(ps.Loader({"f": np.full(16, 1e300)}, S, batch_size=8, narrow="allow"))) == 2
    with pytest.raises(FloatingPointError):
        sync(raising)


def test_a_run_that_spec_started_is_not_taken_over_under_other_settings(S: NamedSharding) -> None:
    loader = ps.Loader([BIG - 2**40, BIG - 2**40], S)
    assert loader.spec()[""].dtype == np.int32
    with jax.enable_x64(True):
        assert loader.spec()[""].dtype == np.int64
        got = batches(sync(loader))
        assert [batch.dtype for batch in got] == [np.int64] * 2
    assert [batch.dtype for batch in batches(sync(loader))] == [np.int32] * 2
    assert loader.spec()[""].dtype == np.int32


def test_spec_of_arrays_follows_x64(S: NamedSharding) -> None:
    loader = ps.Loader({"x": np.zeros(16), "y": np.zeros(16, np.int8)}, S, batch_size=8)
    assert {path: leaf.dtype for path, leaf in loader.spec().items()} == {"x": np.float32, "y": np.int8}
    with jax.enable_x64(True):
        assert {path: leaf.dtype for path, leaf in loader.spec().items()} == {"x": np.float64, "y": np.int8}
        assert next(iter(loader))["x"].dtype == np.float64


def test_contexts_compare_by_what_they_hold() -> None:
    here = JaxContext()
    assert here == JaxContext()
    assert here.is_in_force()
    assert hash(here) == hash(JaxContext())
    for make in CONTEXTS.values():
        with make():
            there = JaxContext()
            assert there.is_in_force()
            assert not here.is_in_force()
            assert there != here
        with there.in_force():
            assert JaxContext() == there
            with here.in_force():
                assert JaxContext() == here
        assert JaxContext() == here


def test_threads_of_others_see_nothing_of_it(S: NamedSharding) -> None:
    """A thread that runs while the workers do, and one that starts after, have what they had."""
    inside, go_on = threading.Event(), threading.Event()

    def transform(row: Any) -> Any:
        inside.set()
        assert go_on.wait(30)
        return row

    before = settings()
    found: list[dict[str, Any]] = []
    with jax.enable_x64(True), jax.default_device(jax.devices()[2]):
        iterator = iter(ps.Loader(np.ones(8), S, batch_size=8, transform=transform))
    assert inside.wait(30)
    for _ in range(2):
        other = threading.Thread(target=lambda: found.append(settings()))
        other.start()
        other.join()
        go_on.set()
        sync(iterator)
    assert found == [before, before]


# --- the older `with mesh:`


@contextlib.contextmanager
def with_mesh(mesh: jax.sharding.Mesh) -> Iterator[None]:
    """As `with mesh:`, of which JAX warns."""
    with warnings.catch_warnings(action="ignore"):
        mesh.__enter__()
    try:
        yield
    finally:
        mesh.__exit__(None, None, None)


def test_the_mesh_of_a_with_block_counts_as_that_of_set_mesh(consume: Consume) -> None:
    two = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    rows, over_all = NamedSharding(two, P("data")), NamedSharding(two, P(("data", "model")))
    x = np.zeros((16, 2), np.float32)
    cases: list[tuple[Any, NamedSharding]] = [
        (P("data"), rows), (None, over_all), ({"x": P("data")}, rows), ({"x": None}, over_all), (lambda *_: P("data"), rows),
        (lambda *_: None, over_all),
    ]  # fmt: skip
    for where, want in cases:
        with with_mesh(two):
            loader = ps.Loader({"x": x}, where, batch_size=8)
        for batch in batches(consume(loader)):
            assert batch["x"].sharding == want
    with with_mesh(two):
        assert ps.Loader({"x": x}, P("data"), batch_size=ps.PerDevice(2)).spec()["x"].shape == (8, 2)
        assert next(iter(ps.Loader(ps.OnDevice({"x": x}), P("data"), batch_size=8)))["x"].sharding == rows
    one = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    with with_mesh(two), jax.set_mesh(one):
        assert ps.Loader({"x": x}, P("data"), batch_size=8).spec()["x"].sharding == NamedSharding(one, P("data"))
    with jax.set_mesh(one), with_mesh(two):
        assert ps.Loader({"x": x}, P("data"), batch_size=8).spec()["x"].sharding == NamedSharding(one, P("data"))
    with with_mesh(one), with_mesh(two):
        assert ps.Loader({"x": x}, P("data"), batch_size=8).spec()["x"].sharding == rows
    assert ps.Loader({"x": x}, P("data"), batch_size=8).spec()["x"].sharding == NamedSharding(one, P("data"))


def test_the_mesh_of_a_with_block_is_in_force_in_every_thread() -> None:
    two = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    seen: dict[str, Any] = {}

    def note(name: str, value: Any) -> Any:
        seen[name] = older_mesh()
        return value

    def constrained(batch: Any) -> Any:
        return note("device_transform", jax.lax.with_sharding_constraint(batch, P("model")))

    before = JaxContext()
    with with_mesh(two):
        inside = JaxContext()
        loader = ps.Loader((note("source", row) for row in np.zeros((8, 2), np.float32)), P("data"), batch_size=8,
                           transform=lambda row: note("transform", row), device_transform=constrained)  # fmt: skip
        iterator = iter(loader)
    (batch,) = iterator
    assert seen == dict.fromkeys(("source", "transform", "device_transform"), two)
    assert batch.sharding.is_equivalent_to(NamedSharding(two, P("model")), 2)
    assert inside != before
    assert JaxContext() == before
    assert not inside.is_in_force()
    with with_mesh(two), before.in_force():
        assert older_mesh() is None
    assert older_mesh() is None
