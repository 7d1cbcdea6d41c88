"""`microbatches=k`: leaves `(k, rows / k, ...)`, the same rows in the same order, each part placed as a whole batch would be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import prefetchshard as ps
from consumers import Consume, batches, consumer, places

P = PartitionSpec
sync = consumer("sync")
X = np.arange(64 * 3, dtype=np.float32).reshape(64, 3)
Y = np.arange(64, dtype=np.int32)


class Dataset:
    def __init__(self, items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


def examples() -> list[Any]:
    return [{"x": a, "y": b} for a, b in zip(X, Y, strict=True)]


def whole(size: int) -> list[Any]:
    return [{"x": X[i : i + size], "y": Y[i : i + size]} for i in range(0, 64, size)]


SOURCES: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "arrays": lambda: ({"x": X, "y": Y}, {"batch_size": 16}),
    "dataset": lambda: (Dataset(examples()), {"batch_size": 16, "transform": lambda e: e}),
    "iterator": lambda: (iter(examples()), {"batch_size": 16}),
    "collate": lambda: (iter(examples()), {"batch_size": 16, "collate": lambda es: jax.tree.map(lambda *leaves: np.stack(leaves), *es)}),
    "batches": lambda: (iter(whole(16)), {}),
    "dataset of batches": lambda: (Dataset(whole(16)), {"transform": lambda b: b}),
    "batches on devices": lambda: ([jax.tree.map(jnp.asarray, batch) for batch in whole(16)], {}),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_the_rows_are_those_of_the_batch(kind: str, S: NamedSharding, consume: Consume) -> None:
    source, options = SOURCES[kind]()
    seen = consume(ps.Loader(source, S, microbatches=2, **options))
    for i, batch in enumerate(batches(seen)):
        assert (batch["x"].shape, batch["y"].shape) == ((2, 8, 3), (2, 8))
        assert np.array_equal(batch["x"], X[16 * i : 16 * i + 16].reshape(2, 8, 3))
        assert np.array_equal(batch["y"], Y[16 * i : 16 * i + 16].reshape(2, 8))
    assert places(seen) == [(0, i, i + 1, 16 * i + 16, i == 3) for i in range(4)]


def meshes() -> dict[str, Any]:
    two = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    return {
        "rows": (NamedSharding(two, P("data")), P(None, "data")),
        "rows and columns": (NamedSharding(two, P("data", "model")), P(None, "data", "model")),
        "rows over two axes": (NamedSharding(two, P(("data", "model"))), P(None, ("data", "model"))),
        "columns": (NamedSharding(two, P(None, "model")), P(None, None, "model")),
        "replicated": (NamedSharding(two, P()), P()),
        "explicit": (NamedSharding(jax.make_mesh((4, 2), ("data", "model")), P("data")), P(None, "data")),
    }


@pytest.mark.parametrize("place", meshes())
def test_axis_0_is_not_cut_over_the_devices(place: str) -> None:
    sharding, spec = meshes()[place]
    source = np.arange(32 * 4, dtype=np.float32).reshape(32, 4)
    for made, options in ((source, {"batch_size": 16}), ([source[:16], source[16:]], {})):
        for batch in batches(sync(ps.Loader(made, sharding, microbatches=2, **options))):
            assert batch.shape == (2, 8, 4)
            assert batch.sharding.is_equivalent_to(NamedSharding(sharding.mesh, spec), 3)
    one = jax.sharding.SingleDeviceSharding(jax.devices()[2])
    for batch in batches(sync(ps.Loader(source, one, batch_size=16, microbatches=4))):
        assert batch.shape == (4, 4, 4)
        assert batch.sharding.is_equivalent_to(one, 3)


def test_k_of_one_adds_an_axis(S: NamedSharding) -> None:
    assert [b.shape for b in batches(sync(ps.Loader(Y, S, batch_size=16, microbatches=1)))] == [(1, 16)] * 4


@pytest.mark.parametrize("kind", ["arrays", "iterator", "batches"])
def test_the_mask_is_cut_as_the_rows_are(kind: str, S: NamedSharding) -> None:
    source: Any = {"arrays": {"y": Y[:21]}, "iterator": iter([{"y": y} for y in Y[:21]]), "batches": [{"y": Y[:16]}, {"y": Y[16:21]}]}[kind]
    options = {} if kind == "batches" else {"batch_size": 16}
    loader = ps.Loader(source, S, microbatches=2, remainder="pad", **options)
    full, last = batches(sync(loader))
    for batch in (full, last):
        assert (batch["mask"].shape, batch["mask"].dtype) == ((2, 8), bool)
        assert batch["mask"].sharding.is_equivalent_to(batch["y"].sharding, 2)
    assert np.asarray(full["mask"]).all()
    assert np.asarray(last["mask"]).reshape(-1).tolist() == [True] * 5 + [False] * 11
    assert np.asarray(last["y"]).reshape(-1).tolist() == [16, 17, 18, 19, 20, *[0] * 11]


def test_what_cannot_be_cut_is_refused_where_the_loader_is_made(S: NamedSharding) -> None:
    for source in (Y, Dataset(Y), iter(Y)):
        with pytest.raises(ps.ConfigError, match=r"microbatches=3.*batch_size=16"):
            ps.Loader(source, S, batch_size=16, microbatches=3)
        with pytest.raises(ps.ConfigError, match=r"4 microbatches has 4 rows.*cuts the rows into 8.*multiple of 32"):
            ps.Loader(source, S, batch_size=16, microbatches=4)


def test_whole_batches_that_cannot_be_cut_say_the_numbers(S: NamedSharding) -> None:
    with pytest.raises(ps.PlacementError, match=r"microbatches=3: 16 rows"):
        sync(ps.Loader(whole(16), S, microbatches=3))
    with pytest.raises(ps.PlacementError, match=r"multiple of 8"):
        sync(ps.Loader(whole(16), S, microbatches=4))
    with pytest.raises(ps.PlacementError, match="no rows in common"):
        sync(ps.Loader([{"a": np.ones(8), "b": np.ones(4)}], NamedSharding(S.mesh, P()), microbatches=2))


def test_leaves_without_rows_are_left_alone(S: NamedSharding, R: NamedSharding) -> None:
    batch = {"y": Y[:16], "scale": np.float32(2), "table": np.arange(5)}
    (got,) = batches(sync(ps.Loader([batch], {"y": S, "scale": None, "table": R}, microbatches=2, narrow="allow")))
    assert (got["y"].shape, got["scale"].shape, got["table"].shape) == ((2, 8), (), (5,))


def test_host_leaves_with_a_row_each_are_cut_too(S: NamedSharding) -> None:
    names = np.array([f"n{i}" for i in range(32)])
    for source in ({"y": Y[:32], "name": names}, iter([{"y": y, "name": str(n)} for y, n in zip(Y[:32], names, strict=True)])):
        loader = ps.Loader(source, {"y": S, "name": ps.HOST}, batch_size=16, microbatches=2, remainder="pad")
        got = batches(sync(loader))
        assert [np.asarray(b["name"]).shape for b in got] == [(2, 8)] * 2
        assert [name for b in got for name in np.asarray(b["name"]).reshape(-1)] == names.tolist()


def test_keys_are_cut(S: NamedSharding) -> None:
    keys = jax.random.split(jax.random.key(0), 16)
    for source, options in (([{"k": keys}], {}), (iter([{"k": k} for k in keys]), {"batch_size": 16})):
        (batch,) = batches(sync(ps.Loader(source, S, microbatches=2, **options)))
        assert batch["k"].shape == (2, 8)
        assert np.array_equal(jax.random.key_data(batch["k"]), jax.random.key_data(keys).reshape(2, 8, -1))


def test_spec_shows_the_microbatches(S: NamedSharding) -> None:
    loader = ps.Loader({"x": X, "y": Y}, S, batch_size=16, microbatches=2, remainder="pad")
    assert {path: leaf.shape for path, leaf in loader.spec().items()} == {"x": (2, 8, 3), "y": (2, 8), "mask": (2, 8)}
    assert loader.spec().bytes_per_device == 2 * 3 * 4 + 2 * 4 + 2


def test_accumulating_gradients_gives_the_gradient_of_the_whole_batch(S: NamedSharding) -> None:
    rng = np.random.default_rng(0)
    data = {"x": rng.normal(size=(32, 4)).astype(np.float32), "y": rng.normal(size=32).astype(np.float32)}
    weights = jnp.asarray(rng.normal(size=4).astype(np.float32))

    def loss(w: Any, batch: Any) -> Any:
        return ((batch["x"] @ w - batch["y"]) ** 2).sum()

    @jax.jit
    def accumulated(w: Any, batch: Any) -> Any:
        def add(total: Any, part: Any) -> Any:
            return total + jax.grad(loss)(w, part), None

        return jax.lax.scan(add, jnp.zeros_like(w), batch)[0]

    parts = batches(sync(ps.Loader(data, S, batch_size=16, microbatches=2)))
    wholes = batches(sync(ps.Loader(data, S, batch_size=16)))
    for cut, full in zip(parts, wholes, strict=True):
        assert np.allclose(accumulated(weights, cut), jax.grad(loss)(weights, full), rtol=1e-5)
