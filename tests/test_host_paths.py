"""`host=` and None in a tree of shardings, from the loader to the batch; what cannot work is said where the loader is made."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import prefetchshard as ps
from consumers import Consume, batches

X = np.arange(32, dtype=np.float32).reshape(16, 2)
TEXT = np.array([f"row {i}" for i in range(16)])
COLUMNS = {"x": X, "text": TEXT, "meta": {"id": np.arange(16), "name": TEXT}}
EXAMPLES = [{"x": X[i], "text": f"row {i}", "meta": {"id": i, "name": f"row {i}"}} for i in range(16)]
HOST = ("text", "meta.name")


@pytest.mark.parametrize("where", ["none", "a sharding", "a tree"])
@pytest.mark.parametrize("kind", ["arrays", "dataset", "iterator", "batches", "an iterator of batches", "collate", "transform"])
def test_named_leaves_stay_on_the_host(kind: str, where: str, S: NamedSharding, consume: Consume) -> None:
    whole: list[dict[str, Any]] = [
        {"x": X[i : i + 8], "text": TEXT[i : i + 8].tolist(), "meta": {"id": np.arange(i, i + 8), "name": TEXT[i : i + 8]}} for i in (0, 8)
    ]
    sources: dict[str, tuple[Any, dict[str, Any]]] = {
        "arrays": (COLUMNS, {"batch_size": 8}),
        "dataset": (EXAMPLES, {"batch_size": 8}),
        "iterator": (iter(EXAMPLES), {"batch_size": 8}),
        "batches": (whole, {}),
        "an iterator of batches": (iter(whole), {}),
        "collate": (X, {"batch_size": 8, "collate": lambda rows: whole[int(rows[0, 0] // 16)]}),
        "transform": (range(16), {"batch_size": 8, "transform": lambda i: EXAMPLES[i]}),
    }
    source, options = sources[kind]
    sharding = {"none": None, "a sharding": S, "a tree": {"x": S, "text": ps.HOST, "meta": None}}[where]
    got = batches(consume(ps.Loader(source, sharding, host=HOST, **options)))
    assert len(got) == 2
    for i, batch in enumerate(got):
        assert np.array_equal(batch["x"], X[8 * i : 8 * i + 8])
        assert batch["x"].sharding.is_equivalent_to(S, 2)
        assert batch["meta"]["id"].sharding.is_equivalent_to(S, 1)
        for text in (batch["text"], batch["meta"]["name"]):
            assert not isinstance(text, jax.Array)
            assert list(text) == TEXT[8 * i : 8 * i + 8].tolist()


def test_the_rest_of_a_tree_beside_what_stays_on_the_host(S: NamedSharding) -> None:
    for sharding in ({"x": None, "text": ps.HOST, "meta": ps.HOST}, {"x": lambda *_: None, "text": ps.HOST, "meta": ps.HOST}):
        for source in (COLUMNS, EXAMPLES):
            (batch, _) = ps.Loader(source, sharding, batch_size=8)
            assert batch["x"].sharding.is_equivalent_to(S, 2)


def test_none_replicates_where_arrays_lie_on_the_devices(S: NamedSharding) -> None:
    P = PartitionSpec
    arrays = {"x": X, "y": X}
    want = list(ps.Loader(arrays, S, batch_size=8))
    for stored in (None, {"x": None, "y": P("data")}, {"x": None, "y": P()}):
        got = list(ps.Loader(ps.OnDevice(arrays, stored), S, batch_size=8))
        assert all(np.array_equal(a["x"], b["x"]) for a, b in zip(got, want, strict=True))
    with pytest.raises(ps.ConfigError, match=r"ps.OnDevice: leaf y is to stay on the host"):
        ps.Loader(ps.OnDevice(arrays), S, host=("y",), batch_size=8)


def test_a_path_that_no_leaf_has(S: NamedSharding) -> None:
    with pytest.raises(
        ps.ConfigError, match=r"host= names 'txet', .*did you mean 'text'.*its leaves are 'meta.id', 'meta.name', 'text', 'x'"
    ):
        ps.Loader(COLUMNS, S, host=("txet", "meta.name"), batch_size=8)
    for source, options in ((EXAMPLES, {"batch_size": 8}), (iter(EXAMPLES), {"batch_size": 8}), ([COLUMNS], {})):
        with pytest.raises(ps.ConfigError, match=r"host= names 'txet', .*did you mean 'text'"):
            list(ps.Loader(source, S, host=("txet", "meta.name"), **options))
    with pytest.raises(ps.ConfigError, match="sharding= has a rule for 'x'"):
        ps.Loader(COLUMNS, {"x": S, "text": ps.HOST, "meta": ps.HOST}, host="x", batch_size=8)


@pytest.mark.parametrize("function", ["collate", "transform"])
def test_a_function_decides_what_the_leaves_of_arrays_are(function: str, S: NamedSharding) -> None:
    def adds(batch: Any) -> Any:
        return {**batch, "z": batch["y"], "name": ["a"] * 8 if function == "collate" else "a"}

    def keeps_one(batch: Any) -> Any:
        return {"z": batch["y"]}

    for source in ({"y": np.arange(16)}, [{"y": i} for i in range(16)]):
        change = (
            adds if isinstance(source, dict) or function == "transform" else lambda rows: adds({"y": np.array([row["y"] for row in rows])})
        )
        for batch in ps.Loader(source, {"y": S, "z": S, "name": ps.HOST}, batch_size=8, **{function: change}):
            assert np.array_equal(batch["z"], batch["y"])
    for batch in ps.Loader({"y": np.arange(16), "more": np.arange(16)}, {"z": S}, batch_size=8, **{function: keeps_one}):
        assert set(batch) == {"z"}
    with pytest.raises(ps.PlacementError, match="sharding has no entry for 'z'"):
        list(ps.Loader({"y": np.arange(16)}, {"y": S}, batch_size=8, **{function: keeps_one}))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": 2**63}, r"batch_size=9223372036854775808: an integer from 1 to 9223372036854775807"),
        ({"batch_size": np.uint64(2**63)}, r"batch_size=.*an integer from 1"),
        ({"batch_size": ps.PerDevice(2**62)}, r"batch_size=PerDevice\(rows=4611686018427387904\): .* at most 9223372036854775807"),
        ({"workers": 20000}, r"workers=20000: an integer from 1 to 1024; 'auto' to choose"),
    ],
    ids=str,
)
def test_numbers_that_are_too_large(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ps.ConfigError, match=words):
        ps.Loader(X, **{"batch_size": 8, **options})


def test_numbers_that_may_be_large(S: NamedSharding) -> None:
    assert len(list(ps.Loader(X, S, batch_size=8, depth=2**70, snapshot_every=2**70, seed=2**200, shuffle=True))) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((5,), r"make_mesh\(5\): a size for each axis by name"),
        (("data",), r"make_mesh\('data'\): a size"),
        (([("data", 8)],), "a size for each axis by name"),
        ((None,), r"make_mesh\(None\)"),
        (({5: 8},), "the axis 5 of size 8 is no string"),
        (({"data": -1}, 5), r"make_mesh\(devices=5\): a list of devices"),
        (({"data": -1}, "cpu"), "a list of devices"),
        (({"data": -1}, [0, 1]), "a list of devices"),
    ],
    ids=str,
)
def test_what_is_no_mesh(arguments: Any, words: str) -> None:
    with pytest.raises(ps.ConfigError, match=words):
        ps.make_mesh(*arguments)
