"""Every form of `sharding=`, over every kind of batch."""

from __future__ import annotations

import collections
import dataclasses
import functools
import sys
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from prefetchshard.base.config import HOST
from prefetchshard.base.errors import ConfigError, PlacementError
from prefetchshard.sharding.batch_tree import BatchTree
from prefetchshard.sharding.leaf_sharding import rows_like
from prefetchshard.sharding.rules import ShardingRules, resolve

P = PartitionSpec
DEVICES = jax.devices()
ONE = Mesh(np.array(DEVICES), ("data",))
TWO = Mesh(np.array(DEVICES).reshape(4, 2), ("data", "model"))
THREE = Mesh(np.array(DEVICES).reshape(2, 2, 2), ("data", "fsdp", "model"))
EXPLICIT = jax.make_mesh((4, 2), ("data", "model"))
ROWS = NamedSharding(ONE, P("data"))
WHOLE = NamedSharding(ONE, P())
TWO_ROWS = NamedSharding(TWO, P("data"))


class Pair(NamedTuple):
    a: Any
    b: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Sample:
    x: Any
    y: Any


@jax.tree_util.register_pytree_with_keys_class
class Strict:
    """A container that takes nothing but arrays, as some libraries' modules do."""

    def __init__(self, array: Any, tag: str) -> None:
        if not isinstance(array, np.ndarray | jax.Array | NamedSharding):
            raise TypeError(f"Strict holds arrays, not {array!r}")
        self.array = array
        self.tag = tag

    def tree_flatten_with_keys(self) -> tuple[Any, str]:
        return ((jax.tree_util.GetAttrKey("array"), self.array),), self.tag

    @classmethod
    def tree_unflatten(cls, tag: str, children: Any) -> Strict:
        return cls(children[0], tag)


def place(sharding: Any, batch: Any) -> dict[str, Any]:
    """Path to where it goes."""
    return placed_by(resolve(sharding), batch)


def placed_by(rules: ShardingRules, batch: Any) -> dict[str, Any]:
    leaves, structure = rules.flatten(batch)
    shapes = [np.shape(leaf) if isinstance(leaf, np.ndarray) else () for leaf in leaves]
    dtypes = [np.asarray(leaf).dtype if isinstance(leaf, np.ndarray | int | float) else np.dtype(object) for leaf in leaves]
    return dict(zip(structure.paths, rules.shardings(structure, shapes, dtypes), strict=True))


def rows(*shape: int) -> np.ndarray:
    return np.zeros((8, *shape), np.float32)


# --- forms of one rule


def test_a_sharding_is_for_every_leaf() -> None:
    image = NamedSharding(TWO, P("data", None, None, "model"))
    got = place(image, {"image": rows(2, 2, 4), "label": rows(), "step": 3, "none": None})
    assert got == {"image": image, "label": NamedSharding(TWO, P("data")), "step": NamedSharding(TWO, P())}


@pytest.mark.parametrize("mesh", [ONE, TWO, THREE, EXPLICIT], ids=lambda mesh: str(dict(mesh.shape)))
def test_a_sharding_keeps_its_mesh_and_memory(mesh: Mesh) -> None:
    rule = NamedSharding(mesh, P("data", mesh.axis_names[-1] if mesh is not ONE else None), memory_kind="pinned_host")
    got = place(rule, {"x": rows(2), "n": rows()})
    assert got == {"x": rule, "n": NamedSharding(mesh, P("data"), memory_kind="pinned_host")}


def test_one_device() -> None:
    device = SingleDeviceSharding(DEVICES[3])
    assert place(device, {"x": np.zeros(7), "n": 3}) == {"x": device, "n": device}


def test_a_mesh_of_one_axis() -> None:
    assert place(ONE, {"x": rows(2), "n": 3}) == {"x": ROWS, "n": WHOLE}
    with pytest.raises(ConfigError, match=r"mesh \{'data': 4, 'model': 2\} does not say which .* pass NamedSharding\(mesh"):
        resolve(TWO)


def test_a_spec_takes_the_mesh_in_force_where_the_loader_is_made() -> None:
    with jax.set_mesh(TWO):
        rules = resolve(P("data", "model"))
        whole = resolve({"x": None})
    assert placed_by(rules, {"x": rows(2), "n": 3}) == {"x": NamedSharding(TWO, P("data", "model")), "n": NamedSharding(TWO, P())}
    assert placed_by(whole, {"x": rows(2)}) == {"x": NamedSharding(TWO, P(("data", "model")))}


def test_a_spec_of_one_axis_makes_its_mesh() -> None:
    over_all = Mesh(np.array(DEVICES), ("batch",))
    assert place(P("batch"), {"x": rows(2)}) == {"x": NamedSharding(over_all, P("batch"))}
    assert place(P(None, "batch"), {"x": rows(8)}) == {"x": NamedSharding(over_all, P(None, "batch"))}
    assert place(P(), {"x": rows(8)}) == {"x": WHOLE}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (P("data", "model"), "names 2 mesh axes, but no mesh is in force: .*set_mesh"),
        (P("data", "data"), "uses the axis 'data' .* twice"),
        (P(P.UNCONSTRAINED), "UNCONSTRAINED cannot place data"),
    ],
)
def test_a_spec_that_finds_no_mesh(spec: PartitionSpec, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(spec)


def test_a_spec_that_the_mesh_in_force_does_not_know() -> None:
    with jax.set_mesh(TWO), pytest.raises(ConfigError, match=r"sharding at 'x': P\('modle'\) names .* did you mean 'model'"):
        resolve({"x": P("modle")})


def test_host_keeps_everything_whole() -> None:
    batch = {"ids": ["a", "b"], "more": {"x": rows()}}
    leaves, structure = resolve(HOST).flatten(batch)
    assert leaves == [batch]
    assert leaves[0] is batch
    assert structure.unflatten([3]) == 3
    assert place(HOST, batch) == {"": HOST}


# --- nothing said


def test_nothing_said_means_rows_over_all_devices() -> None:
    assert place(None, {"x": rows(2), "n": 3}) == {"x": ROWS, "n": WHOLE}
    assert place(None, rows()) == {"": ROWS}
    assert place(None, 3) == {"": WHOLE}  # nobody wrote a rule for it


def test_nothing_said_under_a_mesh() -> None:
    with jax.set_mesh(TWO):
        assert place(None, {"x": rows(2)}) == {"x": NamedSharding(TWO, P(("data", "model")))}
    with jax.set_mesh(ONE):
        assert place(None, {"x": rows(2)}) == {"x": ROWS}


def test_the_default_device_comes_first() -> None:
    with jax.default_device(DEVICES[3]), jax.set_mesh(TWO):
        rules = resolve(None)
    assert placed_by(rules, {"x": np.zeros(7), "n": 3}) == dict.fromkeys(("x", "n"), SingleDeviceSharding(DEVICES[3]))
    with jax.default_device(DEVICES[0].platform):
        assert place(None, {"x": np.zeros(7)}) == {"x": SingleDeviceSharding(DEVICES[0])}


# --- trees of rules


def test_a_prefix_tree() -> None:
    model = NamedSharding(TWO, P("data", "model"))
    sharding = {"image": model, "meta": HOST, "parts": NamedSharding(TWO, P("data")), "whole": None}
    batch = {"image": rows(2), "meta": [["a"], object()], "parts": (rows(), [rows(3), 5]), "whole": {"w": rows()}}
    rules = resolve(sharding)
    leaves, structure = rules.flatten(batch)
    assert structure.paths == ("image", "meta", "parts[0]", "parts[1][0]", "parts[1][1]", "whole.w")
    assert structure.named == (True, True, False, False, False, False)
    assert leaves[1] is batch["meta"]
    half = NamedSharding(TWO, P("data"))
    assert list(placed_by(rules, batch).values()) == [
        model,
        HOST,
        half,
        half,
        NamedSharding(TWO, P()),
        NamedSharding(TWO, P(("data", "model"))),
    ]
    assert structure.unflatten(range(6)) == {"image": 0, "meta": 1, "parts": (2, [3, 4]), "whole": {"w": 5}}


def test_none_and_bare_specs_in_a_tree_go_where_the_others_are() -> None:
    model = NamedSharding(TWO, P("data", "model"))
    got = place({"a": model, "b": P("model"), "c": None, "d": P()}, {"a": rows(2), "b": rows(), "c": rows(), "d": rows()})
    assert got == {
        "a": model,
        "b": NamedSharding(TWO, P("model")),
        "c": NamedSharding(TWO, P(("data", "model"))),
        "d": NamedSharding(TWO, P()),
    }
    device = SingleDeviceSharding(DEVICES[2])
    assert place([device, None], [rows(), rows()]) == {"[0]": device, "[1]": device}
    assert place([ONE, None], [rows(), rows()]) == {"[0]": ROWS, "[1]": ROWS}
    assert place([WHOLE, None], [rows(), rows()]) == {"[0]": WHOLE, "[1]": ROWS}
    assert place([HOST, None], [rows(), rows()]) == {"[0]": HOST, "[1]": ROWS}
    over_all = NamedSharding(Mesh(np.array(DEVICES), ("batch",)), P("batch"))
    assert place([P("batch"), None], [rows(), rows()]) == {"[0]": over_all, "[1]": over_all}
    with jax.default_device(DEVICES[3]):
        assert place([HOST, None], [rows(), rows()]) == {"[0]": HOST, "[1]": SingleDeviceSharding(DEVICES[3])}
        assert place([ROWS, None], [rows(), rows()]) == {"[0]": ROWS, "[1]": ROWS}
    with jax.set_mesh(ONE):
        assert place([model, P("data"), None], [rows(2), rows(), rows()]) == {
            "[0]": model,
            "[1]": ROWS,
            "[2]": NamedSharding(TWO, P(("data", "model"))),
        }


def test_none_beside_rules_over_different_devices() -> None:
    here, there = SingleDeviceSharding(DEVICES[0]), SingleDeviceSharding(DEVICES[1])
    assert place([here, there], [rows(), rows()]) == {"[0]": here, "[1]": there}
    with pytest.raises(ConfigError, match="rules over different devices, so that None"):
        resolve([here, there, None])


def test_a_leaf_that_is_named_must_fit() -> None:
    with pytest.raises(PlacementError, match="lab: .*rank 1"):
        place({"img": NamedSharding(ONE, P("data", None)), "lab": NamedSharding(ONE, P("data", None))}, {"img": rows(4), "lab": rows()})
    with pytest.raises(PlacementError, match="the batch itself.*rank 1"):
        place(NamedSharding(ONE, P("data", None)), rows())
    assert place({"lab": NamedSharding(ONE, P("data", None))}, {"lab": {"x": rows()}}) == {"lab.x": ROWS}


def test_errors_come_where_the_rows_do_not_divide() -> None:
    with pytest.raises(
        PlacementError, match=r"leaf meta\.x: shape \(63, 2\) .*axis 0 \(63\) must be a multiple of 8 \('data'\).*remainder='pad'"
    ):
        place(ROWS, {"meta": {"x": np.zeros((63, 2))}})
    with pytest.raises(PlacementError, match=r"must be a multiple of 4 \('data' x 'fsdp'\)"):
        place(NamedSharding(THREE, P(("data", "fsdp"))), {"x": np.zeros(6)})


@pytest.mark.parametrize(
    ("sharding", "batch", "message"),
    [
        ({"x": ROWS}, {"x": 1, "label": 2}, "sharding has no entry for 'label'"),
        ({"x": ROWS, "labl": ROWS}, {"x": 1}, "sharding has an entry for 'labl', the batch has none"),
        ({"m": {"x": ROWS}}, {"m": {"y": 1}}, "sharding has no entry for 'm.y'"),
        ({"x": [ROWS, ROWS]}, {"x": (1, 2)}, "sharding has a list at 'x', the batch a tuple"),
        ((ROWS, ROWS), [1, 2], "sharding has a tuple, the batch a list"),
        ((ROWS, ROWS), (1, 2, 3), r"sharding has no entry for '\[2\]'"),
        ((ROWS, [ROWS, ROWS]), (1, [2]), r"sharding has an entry for '\[1\]\[1\]', the batch has none"),
        ({"x": {"y": ROWS}}, {"x": np.zeros(3)}, r"sharding has a dict at 'x', the batch an array of shape \(3,\)"),
        ({"x": ROWS}, collections.OrderedDict(x=1), "sharding has a dict, the batch an OrderedDict"),
        (Pair(ROWS, ROWS), (1, 2), "sharding has a Pair, the batch a tuple"),
        ({"s": Strict(ROWS, "a")}, {"s": Strict(np.zeros(1), "b")}, "the Strict at 's' differs in what it holds beside its leaves"),
    ],
)
def test_a_tree_of_rules_that_is_no_prefix(sharding: Any, batch: Any, message: str) -> None:
    rules = resolve(sharding)
    with pytest.raises(PlacementError, match=message):
        rules.flatten(batch)


@pytest.mark.parametrize(
    ("sharding", "message"),
    [
        ("data", r"write PartitionSpec\('data'\)"),
        ({"x": ("data", None)}, r"sharding at 'x\[0\]': 'data' .* write PartitionSpec\('data'\)"),
        (DEVICES[0], "SingleDeviceSharding"),
        (3, "a 1-D Mesh, a PartitionSpec"),
        ({}, "holds no rule"),
        ([], "holds no rule"),
        ({"x": TWO}, "sharding at 'x': the mesh"),
        (NamedSharding(TWO.abstract_mesh, P()), "abstract mesh, which has no devices"),
        ([NamedSharding(TWO.abstract_mesh, P()), None], r"sharding at '\[0\]': .*abstract mesh"),
    ],
)
def test_what_is_no_sharding(sharding: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(sharding)


# --- callables


def test_a_callable_is_asked_for_each_leaf() -> None:
    asked: list[Any] = []

    def rule(path: str, shape: tuple[int, ...], dtype: Any) -> Any:
        asked.append((path, shape, dtype))
        return {"a": P("data"), "b[0]": None, "b[1]": HOST, "c": TWO_ROWS, "d": P()}[path]

    batch = {"a": rows(2), "b": [np.zeros(8, np.int8), rows()], "c": rows(), "d": np.zeros(7)}
    got = place(rule, batch)
    assert got == {
        "a": TWO_ROWS,
        "b[0]": NamedSharding(TWO, P(("data", "model"))),
        "b[1]": HOST,
        "c": TWO_ROWS,
        "d": NamedSharding(TWO, P()),
    }
    assert asked[:2] == [("a", (8, 2), np.float32), ("b[0]", (8,), np.int8)]


def test_a_callable_that_returns_none_leaves_it_to_the_default() -> None:
    assert place(lambda *_: None, {"a": rows(2), "n": 3}) == {"a": ROWS, "n": WHOLE}
    assert place({"a": lambda *_: None, "b": TWO_ROWS}, {"a": rows(), "b": rows()})["a"] == NamedSharding(TWO, P(("data", "model")))
    with pytest.raises(PlacementError, match="rules over different devices"):
        place(lambda path, *_: {"a": None, "b": SingleDeviceSharding(DEVICES[1]), "c": ROWS}[path], {"a": rows(), "b": rows(), "c": rows()})


def test_a_callable_is_asked_again_for_another_shape() -> None:
    rules = resolve(lambda path, shape, dtype: P("data") if shape[0] == 8 else P())
    assert placed_by(rules, {"x": rows()}) == {"x": ROWS}
    assert placed_by(rules, {"x": np.zeros(3)}) == {"x": WHOLE}


def test_a_callable_uses_the_mesh_in_force_where_the_loader_was_made() -> None:
    with jax.set_mesh(TWO):
        rules = resolve({"x": functools.partial(lambda spec, path, shape, dtype: spec, P("model")), "y": HOST})
    assert placed_by(rules, {"x": rows(), "y": "text"}) == {"x": NamedSharding(TWO, P("model")), "y": HOST}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"x": ROWS}, "leaf x: the sharding callable gave .* is no sharding"),
        (P("data", "model"), "leaf x: the sharding callable gave .*no mesh is in force"),
        (NamedSharding(ONE, P("data", None)), "leaf x: .*rank 1"),
        (lambda *_: None, "leaf x: the sharding callable gave a callable"),
    ],
)
def test_a_callable_that_answers_wrongly(answer: Any, message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        place(lambda path, shape, dtype: answer, {"x": rows()})


# --- containers


@pytest.mark.parametrize(
    ("batch", "paths"),
    [
        (rows(), ("",)),
        ({"b": rows(), "a": {"x": rows()}}, ("a.x", "b")),
        (Pair(rows(), [rows(), None, rows()]), ("a", "b[0]", "b[2]")),
        ([Sample(rows(), rows())], ("[0].x", "[0].y")),
        (collections.OrderedDict(z=rows(), a=rows()), ("z", "a")),
        ({"s": Strict(rows(), "tag")}, ("s.array",)),
        ({1: rows(), 2: rows()}, ("[1]", "[2]")),
        ({"a.b": rows(), "image/png": rows()}, ("['a.b']", "image/png")),
    ],
    ids=lambda value: type(value).__name__,
)
def test_containers_come_back(batch: Any, paths: tuple[str, ...]) -> None:
    for sharding in (ROWS, None, lambda path, shape, dtype: ROWS, jax.tree.map(lambda _: ROWS, batch)):
        if sharding == {}:
            continue
        rules = resolve(sharding)
        leaves, structure = rules.flatten(batch)
        assert structure.paths == paths
        again = structure.unflatten(leaves)
        assert jax.tree.structure(again) == jax.tree.structure(batch)
        assert all(x is y for x, y in zip(jax.tree.leaves(again), jax.tree.leaves(batch), strict=True))


def test_a_container_of_a_kind_that_checks_what_it_holds() -> None:
    got = place({"s": Strict(ROWS, "tag"), "other": HOST}, {"s": Strict(rows(), "tag"), "other": ["a"]})
    assert got == {"s.array": ROWS, "other": HOST}


def test_structures_are_compared_and_hashed() -> None:
    rules = resolve({"a": ROWS, "b": HOST})
    one = rules.flatten({"a": rows(), "b": "x"})[1]
    other = rules.flatten({"a": [rows()], "b": "x"})[1]
    again = rules.flatten({"a": rows(3), "b": ["y", "z"]})[1]
    assert one == again
    assert hash(one) == hash(again)
    assert one is not again
    assert one != other
    assert other.named == (False, True)
    assert one != "a"
    assert len({one, other, again}) == 2
    assert (len(one), repr(one)) == (2, "BatchTree(a, b)")


def test_the_same_structure_is_made_once() -> None:
    rules = resolve(ROWS)
    assert rules.flatten({"x": rows()})[1] is rules.flatten({"x": rows(2)})[1]


def test_keys_that_cannot_be_sorted() -> None:
    with pytest.raises(PlacementError, match="JAX cannot take the batch apart"):
        resolve(ROWS).flatten({"a": rows(), 1: rows()})


TREES = st.recursive(
    st.builds(rows) | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abcd"), inner, max_size=3) | st.builds(Pair, inner, inner),
    max_leaves=8,
)


def cut(tree: Any, draw: Any) -> Any:
    """A random prefix of a tree, with a rule in each place."""
    if isinstance(tree, np.ndarray) or tree is None or draw(st.booleans()):
        return draw(st.sampled_from([ROWS, HOST, None]))
    if isinstance(tree, dict):
        return {key: cut(below, draw) for key, below in tree.items()}
    parts = [cut(below, draw) for below in tree]
    return Pair(*parts) if isinstance(tree, Pair) else parts


@settings(deadline=None)
@given(TREES, st.data())
def test_any_prefix_takes_any_batch_apart_and_puts_it_together(batch: Any, data: st.DataObject) -> None:
    sharding = cut(batch, data.draw)
    if not jax.tree.leaves(sharding, is_leaf=lambda node: node is None):
        return
    rules = resolve(sharding)
    if batch is None or not jax.tree.leaves(batch):
        return
    leaves, structure = rules.flatten(batch)
    assert len(set(structure.paths)) == len(leaves) == len(structure.named) == len(structure)
    again = structure.unflatten(leaves)
    assert jax.tree.structure(again) == jax.tree.structure(batch)
    assert all(x is y for x, y in zip(jax.tree.leaves(again), jax.tree.leaves(batch), strict=True))
    for path, where in placed_by(rules, batch).items():
        assert where in (ROWS, WHOLE, HOST), path


# --- host=


BATCH = {"x": rows(2), "text": ["a"] * 8, "meta": {"id": rows(), "odd.key": rows(), "name": ["b"] * 8}}


@pytest.mark.parametrize(
    ("host", "paths"),
    [
        (("text", "meta.name"), ("meta.id", "meta['odd.key']", "meta.name", "text", "x")),
        (["text", "meta"], ("meta", "text", "x")),
        ({"text", "meta"}, ("meta", "text", "x")),
        (("text", "meta.name", "meta['odd.key']"), ("meta.id", "meta['odd.key']", "meta.name", "text", "x")),
    ],
)
@pytest.mark.parametrize(
    "sharding", [None, ROWS, P("data"), {"x": ROWS, "text": None, "meta": None}, {"x": ROWS, "text": HOST, "meta": None}]
)
def test_leaves_named_by_their_paths_stay_on_the_host(host: Any, paths: tuple[str, ...], sharding: Any) -> None:
    rules = resolve(sharding, host)
    got = placed_by(rules, BATCH)
    assert set(got) == set(paths)
    assert got == {path: HOST if path in host else ROWS for path in paths}
    leaves, structure = rules.flatten(BATCH)
    assert rules.flatten(BATCH)[1] is structure
    again = structure.unflatten(leaves)
    assert again["text"] is BATCH["text"]
    assert again["meta"]["name"] is BATCH["meta"]["name"]
    assert rules.on_host(structure) == tuple(path in host for path in structure.paths)


def test_one_path_and_none() -> None:
    assert place_with(ROWS, "x", {"x": rows(), "xx": rows()}) == {"x": HOST, "xx": ROWS}
    assert place_with(ROWS, None, {"x": rows()}) == {"x": ROWS}
    assert place_with(None, "", rows()) == {"": HOST}
    assert place_with(ROWS, "[1].y", (rows(), Sample(rows(), "text"))) == {"[0]": ROWS, "[1].x": ROWS, "[1].y": HOST}
    assert place_with(lambda *_: ROWS, "y", {"x": rows(), "y": object()}) == {"x": ROWS, "y": HOST}


def place_with(sharding: Any, host: Any, batch: Any) -> dict[str, Any]:
    return placed_by(resolve(sharding, host), batch)


@pytest.mark.parametrize("host", ["txet", ("text", "txet"), "meta.nam", "meta.name.more", "te"])
def test_a_path_that_the_batch_lacks(host: Any) -> None:
    with pytest.raises(ConfigError, match=r"host= names '.*', and the batch has no such leaf.*its leaves are .*'x'"):
        place_with({"x": ROWS, "text": HOST, "meta": {"id": ROWS, "odd.key": ROWS, "name": HOST}}, host, BATCH)
    with pytest.raises(ConfigError, match="no such leaf"):
        resolve(ROWS, host).flatten_arrays({"x": rows(), "text": rows(), "meta": {"name": rows()}})


@pytest.mark.parametrize(
    ("sharding", "host"),
    [({"x": ROWS}, "x"), ({"x": {"y": ROWS}}, "x"), ({"x": P()}, ["x"]), ({"x": lambda *_: ROWS}, ["x"]), (ROWS, "")],
    ids=["sharding", "below", "spec", "callable", "whole"],
)
def test_a_rule_for_the_very_leaf_that_is_to_stay_on_the_host(sharding: Any, host: Any) -> None:
    with pytest.raises(ConfigError, match=r"host= names '.*', and sharding= has a rule for"):
        resolve(sharding, host)


# --- what the loader asks


@pytest.mark.parametrize(
    ("sharding", "pieces"),
    [
        (None, 8),
        (P("data"), 8),
        (P(None, "data"), 1),
        (NamedSharding(TWO, P("data")), 4),
        (NamedSharding(TWO, P(("data", "model"))), 8),
        (NamedSharding(THREE, P(("data", "fsdp"), "model")), 4),
        (SingleDeviceSharding(DEVICES[1]), 1),
        (HOST, 1),
        ({"a": NamedSharding(TWO, P("data")), "b": NamedSharding(TWO, P("model")), "c": HOST, "d": P()}, 4),
        ({"a": NamedSharding(TWO, P("data")), "d": None}, 8),
        ({"a": ROWS, "b": lambda *_: None}, None),
    ],
)
def test_pieces_of_the_batch(sharding: Any, pieces: int | None) -> None:
    assert resolve(sharding).batch_split() == pieces


def test_what_stays_on_the_host() -> None:
    rules = resolve({"a": ROWS, "b": HOST, "c": lambda *_: HOST})
    structure = rules.flatten({"a": [rows(), rows()], "b": ["x", "y"], "c": rows()})[1]
    assert rules.on_host(structure) == (False, False, True, False)  # a callable is asked when shapes are known


def test_a_device_is_one_of_those_that_the_rules_speak_of() -> None:
    assert [resolve(sharding).device() for sharding in (None, {"a": HOST, "b": ROWS}, lambda *_: None)] == [DEVICES[0]] * 3
    assert resolve(SingleDeviceSharding(DEVICES[3])).device() == DEVICES[3]


def test_where_the_mask_goes() -> None:
    rules = resolve({"a": P(), "b": NamedSharding(TWO, P("model", "data"))})
    leaves, structure = rules.flatten({"a": rows(), "b": rows(4)})
    shapes = [leaf.shape for leaf in leaves]
    assert rows_like(rules.shardings(structure, shapes, [np.float32] * 2), shapes) == NamedSharding(TWO, P("model"))


def test_repr_says_where_things_go() -> None:
    def by_rank(path: str, shape: Any, dtype: Any) -> Any: ...

    text = repr(resolve({"a": [NamedSharding(TWO, P("data")), HOST], "b": by_rank, "c": SingleDeviceSharding(DEVICES[1])}))
    assert text.startswith("ShardingRules(a[0]: P('data') on the mesh {'data': 4, 'model': 2}; a[1]: ps.HOST; b: <function ")
    assert text.endswith("; c: device 1 (cpu))")
    assert repr(resolve(None)) == "ShardingRules(P('data') on the mesh {'data': 8})"


def test_taking_a_batch_apart_is_cheap() -> None:
    """It happens for each batch of the source, so it is a matter of a few calls, however many leaves there are."""
    rules = resolve(ROWS)
    batch = {f"leaf{number}": rows(2) for number in range(40)}
    rules.flatten(batch)
    calls = 0

    def count(frame: Any, event: str, arg: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        rules.flatten(batch)
    finally:
        sys.setprofile(None)
    assert calls <= 10


def test_a_structure_does_not_hold_the_batch() -> None:
    import gc
    import weakref

    rules = resolve({"x": ROWS})
    array = rows()
    gone = weakref.ref(array)
    structure: BatchTree = rules.flatten({"x": array})[1]
    del array
    gc.collect()
    assert gone() is None
    assert structure.paths == ("x",)
