"""What becomes of a last batch that is not full, for every kind of source."""

from __future__ import annotations

import collections
import collections.abc
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import prefetchshard as ps
from consumers import Consume, consumer, joined, places

P = PartitionSpec
sync = consumer("sync")


def x(rows: int) -> np.ndarray:
    return np.arange(rows, dtype=np.float32)


class Dataset:
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


async def asynchronously(items: list[Any]) -> AsyncIterator[Any]:
    for item in items:
        yield item


BY_ROWS: dict[str, Callable[[int], Any]] = {
    "arrays": lambda rows: {"x": x(rows)},
    "dataset": lambda rows: Dataset([{"x": value} for value in x(rows)]),
    "generator": lambda rows: ({"x": value} for value in x(rows)),
    "async generator": lambda rows: asynchronously([{"x": value} for value in x(rows)]),
}
HOOKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "transform": {"transform": lambda example: {"x": example["x"]}},
    "collate": {
        "transform": lambda example: {"x": example["x"]},
        "collate": lambda examples: {"x": np.stack([example["x"] for example in examples])},
    },
}


@pytest.mark.parametrize("kind", BY_ROWS)
@pytest.mark.parametrize("hooks", HOOKS)
def test_drop_pad_and_error_by_rows(kind: str, hooks: str, S: NamedSharding) -> None:
    options = {"batch_size": 8, "workers": 3, **HOOKS[hooks]}
    source = BY_ROWS[kind]

    loader = ps.Loader(source(19), S, **options)
    seen = sync(loader)
    assert joined(seen, lambda b: b["x"]).tolist() == list(range(16))
    assert places(seen) == [(0, 0, 1, 8, False), (0, 1, 2, 16, True)]
    assert (loader.stats().rows, loader.stats().dropped_rows, loader.stats().padded_rows) == (16, 3, 0)

    loader = ps.Loader(source(19), S, remainder="pad", **options)
    seen = sync(loader)
    assert [np.asarray(b["x"]).tolist() for b, _ in seen][2] == [16, 17, 18, 0, 0, 0, 0, 0]
    assert joined(seen, lambda b: b["mask"]).tolist() == [True] * 19 + [False] * 5
    assert places(seen) == [(0, 0, 1, 8, False), (0, 1, 2, 16, False), (0, 2, 3, 19, True)]
    assert (loader.stats().rows, loader.stats().dropped_rows, loader.stats().padded_rows) == (19, 0, 5)

    with pytest.raises(ValueError, match=r"19 rows.*batch_size=8.*remainder='error'") as caught:
        sync(ps.Loader(source(19), S, remainder="error", **options))
    assert type(caught.value) is (ps.ConfigError if kind in ("arrays", "dataset") else ps.BatchError)


@pytest.mark.parametrize("kind", BY_ROWS)
@pytest.mark.parametrize("hooks", HOOKS)
def test_a_full_last_batch_adds_nothing(kind: str, hooks: str, S: NamedSharding) -> None:
    for remainder in ("drop", "pad", "error"):
        loader = ps.Loader(BY_ROWS[kind](16), S, batch_size=8, remainder=remainder, **HOOKS[hooks])
        seen = sync(loader)
        assert joined(seen, lambda b: b["x"]).tolist() == list(range(16))
        assert [p.ends_epoch for _, p in seen] == [False, True]
        assert (loader.stats().dropped_rows, loader.stats().padded_rows) == (0, 0)
        if remainder == "pad":
            assert joined(seen, lambda b: b["mask"]).all()


@pytest.mark.parametrize("kind", BY_ROWS)
def test_fewer_rows_than_a_batch_and_none_at_all(kind: str, S: NamedSharding, consume: Consume) -> None:
    source = BY_ROWS[kind]
    for rows in (5, 1):
        with pytest.raises(
            ValueError, match=rf"its {rows} rows are fewer than batch_size=8.*'keep'.*'pad'.*leave batch_size out.*ps.rebatch"
        ) as told:
            consume(ps.Loader(source(rows), S, batch_size=8))
        assert type(told.value) is (ps.ConfigError if kind in ("arrays", "dataset") else ps.BatchError)
    for rows in (5, 1, 0):
        if rows == 0:
            assert consume(ps.Loader(source(rows), S, batch_size=8)) == []
        seen = consume(ps.Loader(source(rows), S, batch_size=8, remainder="pad"))
        assert [(np.asarray(b["x"]).tolist(), np.asarray(b["mask"]).tolist()) for b, _ in seen] == (
            [([*range(rows), *[0.0] * (8 - rows)], [True] * rows + [False] * (8 - rows))] if rows else []
        )
        assert places(seen) == ([(0, 0, 1, rows, True)] if rows else [])


# -- batches of the source's own making


def whole(*rows: int) -> list[dict[str, np.ndarray]]:
    """Batches of so many rows each, numbered through."""
    ends = np.cumsum(rows)
    return [{"x": x(int(end))[int(end) - n :], "scale": np.float32(3)} for end, n in zip(ends, rows, strict=True)]


BY_BATCHES: dict[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "dataset": Dataset,
    "generator": lambda batches: (batch for batch in batches),
    "async generator": asynchronously,
    "factory": lambda batches: lambda: iter(batches),
}
BY_HAND: dict[str, dict[str, Any]] = {"plain": {}, "by workers": {"transform": lambda batch: batch}}
whole_sources = pytest.mark.parametrize("kind", BY_BATCHES)
ways = pytest.mark.parametrize("way", BY_HAND)


@whole_sources
@ways
def test_a_short_last_batch(kind: str, way: str, S: NamedSharding) -> None:
    source, options = BY_BATCHES[kind], {"workers": 3, **BY_HAND[way]}

    loader = ps.Loader(source(whole(8, 8, 3)), {"x": S, "scale": None}, remainder="drop", **options)
    seen = sync(loader)
    assert joined(seen, lambda b: b["x"]).tolist() == list(range(16))
    assert places(seen) == [(0, 0, 1, 8, False), (0, 1, 2, 16, True)]
    assert (loader.stats().rows, loader.stats().dropped_rows) == (16, 3)
    assert "; 3 rows of a remainder were dropped\n" in str(loader.stats())

    loader = ps.Loader(source(whole(8, 8, 3)), {"x": S, "scale": None}, remainder="pad", **options)
    seen = sync(loader)
    assert [np.asarray(b["x"]).tolist() for b, _ in seen][2] == [16, 17, 18, 0, 0, 0, 0, 0]
    assert joined(seen, lambda b: b["mask"]).tolist() == [True] * 19 + [False] * 5
    assert [float(b["scale"]) for b, _ in seen] == [3, 3, 3]
    assert places(seen) == [(0, 0, 1, 8, False), (0, 1, 2, 16, False), (0, 2, 3, 19, True)]
    assert (loader.stats().rows, loader.stats().padded_rows) == (19, 5)

    iterator = iter(ps.Loader(source(whole(8, 8, 3)), {"x": S, "scale": None}, remainder="error", **options))
    assert len(sync(iterator, 2)) == 2
    with pytest.raises(ps.BatchError, match=r"last batch is 5 rows shorter.*remainder='error'"):
        next(iterator)


@whole_sources
@ways
def test_a_short_batch_in_the_middle(kind: str, way: str, S: NamedSharding) -> None:
    source, options = BY_BATCHES[kind], {"workers": 3, **BY_HAND[way]}
    for remainder in ("auto", "drop", "error", "pad"):
        seen = sync(ps.Loader(source(whole(16, 8, 16)), {"x": S, "scale": None}, remainder=remainder, **options))
        assert [len(b["x"]) for b, _ in seen] == [16, 8, 16]
        assert places(seen) == [(0, 0, 1, 16, False), (0, 1, 2, 24, False), (0, 2, 3, 40, True)]
    seen = sync(ps.Loader(source(whole(16, 5, 16)), {"x": S, "scale": None}, remainder="pad", **options))
    assert [(len(b["x"]), int(np.asarray(b["mask"]).sum())) for b, _ in seen] == [(16, 16), (8, 5), (16, 16)]
    assert places(seen) == [(0, 0, 1, 16, False), (0, 1, 2, 21, False), (0, 2, 3, 37, True)]


@whole_sources
@ways
def test_a_longer_batch_stays_as_it_is(kind: str, way: str, S: NamedSharding) -> None:
    source, options = BY_BATCHES[kind], {"workers": 3, **BY_HAND[way]}
    for remainder in ("auto", "keep", "drop", "error", "pad"):
        seen = sync(ps.Loader(source(whole(8, 24, 16)), {"x": S, "scale": None}, remainder=remainder, **options))
        assert joined(seen, lambda b: b["x"]).tolist() == list(range(48))
        assert [len(b["x"]) for b, _ in seen] == [8, 24, 16]
        if remainder == "pad":
            assert [np.asarray(b["mask"]).tolist() for b, _ in seen] == [[True] * 8, [True] * 24, [True] * 16]


@whole_sources
@ways
@pytest.mark.parametrize("remainder", ["drop", "pad"])
def test_the_steps_are_numbered_through_the_epochs(kind: str, way: str, remainder: Any, S: NamedSharding) -> None:
    source = BY_BATCHES[kind](whole(8, 8, 3))
    if kind in ("generator", "async generator"):
        source = (lambda: BY_BATCHES[kind](whole(8, 8, 3))) if kind == "generator" else lambda: asynchronously(whole(8, 8, 3))
    loader = ps.Loader(source, {"x": S, "scale": None}, epochs=3, remainder=remainder, workers=3, **BY_HAND[way])
    seen, again = sync(loader), sync(loader)
    each = 2 if remainder == "drop" else 3
    rows = [8, 16, 19][:each]
    want = [(e, each * e + i, i + 1, rows[i], i == each - 1) for e in range(6) for i in range(each)]
    assert places(seen) + places(again) == want
    assert loader.stats().dropped_rows == (9 if remainder == "drop" else 0)


def test_a_short_batch_that_is_ready_before_the_first_one_is_still_padded(S: NamedSharding) -> None:
    """What is short is told by the first batch, not by the one that a worker happens to be done with first."""
    last_is_done = threading.Event()

    class Batches(Dataset):
        def __getitem__(self, index: int) -> Any:
            if index == 0:
                assert last_is_done.wait(30)
            return self.items[index]

    def transform(batch: Any) -> Any:
        if len(batch["x"]) == 3:
            last_is_done.set()
        return batch

    seen = sync(ps.Loader(Batches(whole(8, 3)), {"x": S, "scale": None}, transform=transform, workers=2, remainder="pad"))
    assert [int(np.asarray(b["mask"]).sum()) for b, _ in seen] == [8, 3]


def test_one_worker_and_many_short_batches_do_not_wait_for_each_other(S: NamedSharding) -> None:
    for remainder, count in (("drop", 5), ("auto", 6)):
        source = iter(whole(16, 8, 8, 8, 8, 8))
        seen = sync(ps.Loader(source, {"x": S, "scale": None}, transform=lambda b: b, workers=1, remainder=remainder))
        assert [len(b["x"]) for b, _ in seen] == [16, 8, 8, 8, 8, 8][:count]


def test_an_epoch_that_is_short_as_a_whole(S: NamedSharding) -> None:
    """The first batch of the run tells, so an epoch may be nothing but a remainder; one that gives no batch is no quiet loop."""
    epochs = [whole(8), whole(3), whole(8, 8)]
    iterator = iter(ps.Loader(lambda epoch: iter(epochs[epoch]), {"x": S, "scale": None}, epochs=3, remainder="drop"))
    assert places(sync(iterator, 1)) == [(0, 0, 1, 8, True)]
    with pytest.raises(
        ps.BatchError, match=r"epoch 1 gave no batch: its only one has 3 rows \(x\), the first of the run had 8.*'keep'.*'pad'"
    ):
        next(iterator)
    loader = ps.Loader(lambda epoch: iter(epochs[epoch]), {"x": S, "scale": None}, epochs=3, remainder="pad")
    assert places(sync(loader)) == [(0, 0, 1, 8, True), (1, 1, 1, 3, True), (2, 2, 1, 8, False), (2, 3, 2, 16, True)]


def test_errors_about_the_remainder_name_the_leaves(S: NamedSharding) -> None:
    images = {"img": np.zeros((19, 2)), "lab": x(19)}
    rows = [{"img": i, "lab": j} for i, j in zip(*images.values(), strict=True)]
    cut = [{name: leaf[i : i + 8] for name, leaf in images.items()} for i in (0, 8, 16)]
    for source, options in ((images, {"batch_size": 8}), (iter(rows), {"batch_size": 8}), (cut, {}), (iter(cut), {})):
        with pytest.raises(ValueError, match=r"\(img, lab\).*remainder='error'"):
            sync(ps.Loader(source, S, remainder="error", **options))


# -- the mask


@pytest.mark.parametrize("remainder", ["drop", "pad"])
def test_one_signature_for_jit_over_all_epochs(remainder: Any, S: NamedSharding) -> None:
    for source, options in (
        ({"x": x(19)}, {"batch_size": 8}),
        (lambda: ({"x": value} for value in x(19)), {"batch_size": 8, "transform": lambda e: e}),
        ([{"x": part} for part in np.split(x(19), [8, 16])], {}),
        (lambda: ({"x": part} for part in np.split(x(19), [8, 16])), {"transform": lambda b: b}),
    ):
        step = jax.jit(lambda batch: jax.tree.map(lambda leaf: leaf.sum(), batch))
        for batch, _ in sync(ps.Loader(source, S, epochs=3, remainder=remainder, **options)):
            step(batch)
        assert step._cache_size() == 1


SHARDINGS: dict[str, Callable[[], Any]] = {
    "rows over all": lambda: NamedSharding(Mesh(np.array(jax.devices()), ("data",)), P("data")),
    "rows and columns": lambda: NamedSharding(Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model")), P("data", "model")),
    "rows over two axes": lambda: NamedSharding(Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model")), P(("data", "model"))),
    "replicated": lambda: NamedSharding(Mesh(np.array(jax.devices()), ("data",)), P()),
    "columns": lambda: NamedSharding(Mesh(np.array(jax.devices()[:2]), ("model",)), P(None, "model")),
    "one device": lambda: jax.sharding.SingleDeviceSharding(jax.devices()[3]),
    "an explicit mesh": lambda: NamedSharding(jax.make_mesh((8,), ("data",)), P("data")),
}


@pytest.mark.parametrize("place", SHARDINGS)
def test_the_mask_is_placed_like_the_rows(place: str) -> None:
    sharding = SHARDINGS[place]()
    for batch, position in sync(ps.Loader({"x": np.ones((19, 4), np.float32)}, sharding, batch_size=8, remainder="pad")):
        mask = batch["mask"]
        assert (mask.shape, mask.dtype, mask.committed) == ((8,), bool, True)
        assert np.asarray(mask).tolist() == [True] * (position.rows - position.first_row) + [False] * (
            8 - position.rows + position.first_row
        )
        for device, (rows, *_) in batch["x"].sharding.devices_indices_map((8, 4)).items():
            assert mask.sharding.devices_indices_map((8,))[device] == (rows,)


def test_the_mask_has_the_name_that_was_chosen(S: NamedSharding) -> None:
    batches = [b for b, _ in sync(ps.Loader({"x": x(10), "mask": x(10)}, S, batch_size=8, remainder=ps.Pad(mask_key="valid")))]
    assert [sorted(b) for b in batches] == [["mask", "valid", "x"]] * 2
    assert np.asarray(batches[1]["mask"]).tolist() == [8, 9, 0, 0, 0, 0, 0, 0]
    assert np.asarray(batches[1]["valid"]).sum() == 2


def test_a_name_that_is_taken_is_refused(S: NamedSharding) -> None:
    with pytest.raises(ps.ConfigError, match=r"'mask'.*ps.Pad\(mask_key=...\)"):
        ps.Loader({"x": x(10), "mask": x(10)}, S, batch_size=8, remainder="pad")
    for source, options in (
        (({"mask": value} for value in x(10)), {"batch_size": 8}),
        ([{"mask": x(8)}], {}),
        ({"x": x(10)}, {"batch_size": 8, "transform": lambda e: {"mask": e["x"]}}),
    ):
        with pytest.raises(ps.ConfigError, match=r"'mask'.*ps.Pad\(mask_key=...\)"):
            sync(ps.Loader(source, S, remainder="pad", **options))


class Pair(NamedTuple):
    x: Any
    y: Any


@pytest.mark.parametrize(
    "container", [lambda v: v, lambda v: (v, v), lambda v: [v, v], lambda v: Pair(v, v)], ids=["one", "tuple", "list", "namedtuple"]
)
def test_other_containers_come_with_their_mask(container: Any, S: NamedSharding) -> None:
    sources: list[tuple[Any, dict[str, Any]]] = [
        ((container(value) for value in x(10)), {"batch_size": 8}),
        ([container(x(8)), container(x(2))], {}),
    ]
    if not isinstance(container(0), list):
        sources.append((container(x(10)), {"batch_size": 8}))
    for source, options in sources:
        seen = [b for b, _ in sync(ps.Loader(source, S, remainder="pad", **options))]
        assert all(type(both) is tuple and len(both) == 2 for both in seen)
        assert {jax.tree.structure(batch) for batch, _ in seen} == {jax.tree.structure(container(0))}
        assert [np.asarray(mask).sum() for _, mask in seen] == [8, 2]


def test_mappings_stay_what_they_are(S: NamedSharding) -> None:
    source = collections.OrderedDict(b=x(10), a=x(10))
    for made in (source, [collections.OrderedDict(b=x(8), a=x(8))]):
        for batch, _ in sync(ps.Loader(made, S, batch_size=8 if made is source else None, remainder="pad")):
            assert type(batch) is collections.OrderedDict
            assert list(batch) == ["b", "a", "mask"]
    assert list(source) == ["b", "a"]
    for batch, _ in sync(ps.Loader([collections.defaultdict(int, x=x(8))], S, remainder="pad")):
        assert type(batch) is collections.defaultdict


class Frozen(collections.abc.Mapping[str, Any]):
    """A mapping that cannot be changed, made from another one."""

    def __init__(self, entries: Any) -> None:
        self.entries = dict(entries)

    def __getitem__(self, key: str) -> Any:
        return self.entries[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


jax.tree_util.register_pytree_node(
    Frozen, lambda f: (tuple(f.entries.values()), tuple(f.entries)), lambda k, v: Frozen(zip(k, v, strict=True))
)


def test_a_mapping_that_cannot_be_changed_is_made_anew(S: NamedSharding) -> None:
    for source, options in ((Frozen({"x": x(10)}), {"batch_size": 8}), ([Frozen({"x": x(8)}), Frozen({"x": x(2)})], {})):
        (_, last) = (b for b, _ in sync(ps.Loader(source, S, remainder="pad", **options)))
        assert type(last) is Frozen
        assert np.asarray(last["mask"]).sum() == 2
        with pytest.raises(ps.ConfigError, match="'x'"):
            sync(ps.Loader(source, S, remainder=ps.Pad(mask_key="x"), **options))


def test_the_mask_of_batches_that_stay_on_the_host() -> None:
    for batch, position in sync(ps.Loader({"x": x(10)}, ps.HOST, batch_size=8, remainder="pad")):
        assert type(batch["mask"]) is np.ndarray
        assert batch["mask"].tolist() == [True] * (8 if position.step == 0 else 2) + [False] * (0 if position.step == 0 else 6)


def test_the_weighted_mean_is_exact(S: NamedSharding, consume: Consume) -> None:
    total = count = 0.0
    for batch, _ in consume(ps.Loader({"x": x(13)}, S, batch_size=8, remainder=ps.Pad(value=1000))):
        total += float((batch["x"] * batch["mask"]).sum())
        count += float(batch["mask"].sum())
    assert total / count == x(13).mean()


# -- what fills the padding rows


@pytest.mark.parametrize(
    "dtype",
    ["bool", "int8", "uint8", "int32", "uint32", "float16", "float32", "complex64", "bfloat16", "float8_e4m3fn", "int4"],
)
def test_padding_is_zero_in_every_dtype(dtype: str, S: NamedSharding) -> None:
    leaf = np.ones((10, 2), jnp.dtype(dtype))
    for source, options in (
        ({"x": leaf}, {"batch_size": 8}),
        (({"x": row} for row in leaf), {"batch_size": 8}),
        ([{"x": leaf[:8]}, {"x": leaf[8:]}], {}),
        ([{"x": jnp.asarray(leaf[:8])}, {"x": jnp.asarray(leaf[8:])}], {}),
    ):
        (_, last) = (b for b, _ in sync(ps.Loader(source, S, remainder="pad", **options)))
        assert last["x"].dtype == leaf.dtype
        assert np.array_equal(np.asarray(last["x"]), np.concatenate([leaf[8:], np.zeros((6, 2), leaf.dtype)]))


def test_keys_are_padded_with_valid_keys(S: NamedSharding) -> None:
    keys = jax.random.split(jax.random.key(0), 10)
    for source, options in ((({"k": key} for key in keys), {"batch_size": 8}), ([{"k": keys[:8]}, {"k": keys[8:]}], {})):
        (_, last) = (b for b, _ in sync(ps.Loader(source, S, remainder="pad", **options)))
        assert last["k"].dtype == keys.dtype
        assert np.array_equal(jax.random.key_data(last["k"])[:2], jax.random.key_data(keys[8:]))
        assert np.asarray(last["mask"]).sum() == 2


@pytest.mark.parametrize(
    ("value", "dtype", "want"),
    [
        (-1, "int32", -1),
        (1.5, "float32", 1.5),
        (True, "bool", True),
        (7, "bfloat16", 7),
        (float("nan"), "float32", None),
        (0.1, "float16", 0.1),
        (2.0, "int8", 2),
    ],
)
def test_padding_of_a_chosen_value(value: Any, dtype: str, want: Any, S: NamedSharding) -> None:
    leaf = np.ones(10, jnp.dtype(dtype))
    for source, options in (({"x": leaf}, {"batch_size": 8}), ([{"x": leaf[:8]}, {"x": jnp.asarray(leaf[8:])}], {})):
        (_, last) = (b for b, _ in sync(ps.Loader(source, S, remainder=ps.Pad(value=value), **options)))
        padding = np.asarray(last["x"])[2:]
        assert np.isnan(padding).all() if want is None else (padding == np.asarray(want).astype(leaf.dtype)).all()


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (-1, "uint8"),
        (300, "uint8"),
        (-1, "uint32"),
        (1.5, "int32"),
        (float("nan"), "int32"),
        (float("inf"), "int8"),
        (-1, "bool"),
        (2, "bool"),
        (1e9, "float16"),
        (9, "int4"),
        (2**40, "int64"),
    ],
)
def test_padding_that_does_not_fit_is_refused(value: Any, dtype: str, S: NamedSharding) -> None:
    leaf = np.ones(10, jnp.dtype(dtype) if dtype != "int64" else np.int64)
    with pytest.raises(ValueError, match=r"leaf x: ps.Pad\(value=.*does not fit dtype"):
        ps.Loader({"x": leaf}, S, batch_size=8, remainder=ps.Pad(value=value))
    sources: list[Any] = [[{"x": leaf[:8]}, {"x": leaf[8:]}]]
    if dtype != "int64":
        sources.append([{"x": jnp.asarray(leaf[:8])}, {"x": jnp.asarray(leaf[8:])}])
    for source in sources:
        with pytest.raises(ValueError, match=r"leaf x: ps.Pad\(value=.*does not fit dtype"):
            sync(ps.Loader(source, S, remainder=ps.Pad(value=value)))


# -- leaves without rows


def test_leaves_without_rows_are_left_alone(S: NamedSharding, R: NamedSharding) -> None:
    batches = [{"x": x(8), "w": x(5), "s": 3, "k": jax.random.key(1)}, {"x": x(2), "w": x(5) + 1, "s": 4, "k": jax.random.key(2)}]
    first, last = (b for b, _ in sync(ps.Loader(batches, {"x": S, "w": R, "s": None, "k": R}, remainder="pad")))
    assert (np.asarray(last["w"]).tolist(), int(last["s"])) == ([1, 2, 3, 4, 5], 4)
    assert jax.random.key_data(last["k"]).tolist() == jax.random.key_data(jax.random.key(2)).tolist()
    assert [np.asarray(b["mask"]).sum() for b in (first, last)] == [8, 2]


def test_host_leaves_of_examples_are_filled_up(S: NamedSharding) -> None:
    names = [f"n{i}" for i in range(10)]
    for source in (
        {"x": x(10), "name": np.array(names)},
        ({"x": value, "name": name} for value, name in zip(x(10), names, strict=True)),
    ):
        (_, last) = (b for b, _ in sync(ps.Loader(source, {"x": S, "name": ps.HOST}, batch_size=8, remainder="pad")))
        assert list(last["name"]) == ["n8", "n9", *[""] * 6]


# -- with collate


def pack(examples: list[Any]) -> dict[str, np.ndarray]:
    """Examples of a few tokens each, packed to rows of eight."""
    tokens = np.concatenate([example["t"] for example in examples])
    rows = -(-len(tokens) // 8)
    return {"t": np.pad(tokens, (0, rows * 8 - len(tokens))).reshape(rows, 8)}


def ragged(lengths: list[int]) -> Iterator[dict[str, np.ndarray]]:
    for i, length in enumerate(lengths):
        yield {"t": np.full(length, i + 1, np.int32)}


def test_collate_that_packs(R: NamedSharding) -> None:
    lengths = [8, 8, 8, 8, 8, 8, 5, 3, 8]  # 4, then 3 rows of the four examples, then the remainder
    seen = sync(ps.Loader(ragged(lengths), R, batch_size=4, collate=pack))
    assert [b["t"].shape for b, _ in seen] == [(4, 8), (3, 8)]
    assert places(seen) == [(0, 0, 1, 4, False), (0, 1, 2, 8, True)]
    loader = ps.Loader(ragged(lengths), R, batch_size=4, collate=pack, remainder="pad", workers=3)
    seen = sync(loader)
    assert [b["t"].shape for b, _ in seen] == [(4, 8)] * 3
    assert [np.asarray(b["mask"]).tolist() for b, _ in seen] == [[True] * 4, [True] * 3 + [False], [True] + [False] * 3]
    assert places(seen) == [(0, 0, 1, 4, False), (0, 1, 2, 8, False), (0, 2, 3, 9, True)]
    assert loader.stats().rows == 9


def test_collate_that_pads_to_varying_lengths(S: NamedSharding) -> None:
    def widest(examples: list[Any]) -> dict[str, np.ndarray]:
        width = max(len(example["t"]) for example in examples)
        return {"t": np.stack([np.pad(example["t"], (0, width - len(example["t"]))) for example in examples])}

    lengths = [1, 2, 3, 4, 5, 6, 7, 8, 2, 2, 2, 2, 2, 2, 2, 3, 4, 4]
    for source in (ragged(lengths), Dataset(list(ragged(lengths)))):
        seen = [b for b, _ in sync(ps.Loader(source, S, batch_size=8, collate=widest, remainder="pad"))]
        assert [b["t"].shape for b in seen] == [(8, 8), (8, 3), (8, 4)]
        assert np.asarray(seen[2]["t"]).tolist() == [[17] * 4, [18] * 4, *[[0] * 4] * 6]
        assert [np.asarray(b["mask"]).sum() for b in seen] == [8, 8, 2]


# -- sizes at the edge


def test_a_batch_of_one_row_keeps_its_axis() -> None:
    one = Mesh(np.array(jax.devices()[:1]), ("data",))
    for source, options in (
        (np.ones((3, 2), np.int8), {"batch_size": 1}),
        ((row for row in np.ones((3, 2), np.int8)), {"batch_size": 1}),
        ([np.ones((1, 2), np.int8)] * 3, {}),
    ):
        assert [(b.shape, b.dtype) for b, _ in sync(ps.Loader(source, one, **options))] == [((1, 2), np.int8)] * 3


def test_one_device_takes_any_number_of_rows() -> None:
    one = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("data",)), P("data"))
    (batch,) = (b for b, _ in sync(ps.Loader([np.ones((5, 3))], one)))
    assert batch.shape == (5, 3)
    assert batch.devices() == {jax.devices()[0]}


def test_a_batch_size_that_never_fits_is_refused_where_the_loader_is_made(S: NamedSharding) -> None:
    both = NamedSharding(Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model")), P(("data", "model")))
    data = NamedSharding(both.mesh, P("data"))
    for source in (np.zeros((64, 2)), Dataset([np.zeros(2)] * 64), (row for row in np.zeros((64, 2)))):
        for sharding, multiple in ((S, 8), (both, 8), (data, 4)):
            with pytest.raises(ps.ConfigError, match=rf"batch_size=6.*multiple of {multiple}"):
                ps.Loader(source, sharding, batch_size=6)


def test_a_batch_that_does_not_fit_names_leaf_shape_spec_and_multiple(S: NamedSharding) -> None:
    for remainder in ("drop", "error"):
        with pytest.raises(ps.PlacementError, match=r"leaf img: shape \(19, 2\).*P\('data'\).*multiple of 8"):
            sync(ps.Loader([{"img": np.zeros((19, 2))}], S, remainder=remainder))


def test_values_stay_right_when_the_ring_is_used_again(S: NamedSharding) -> None:
    """Large leaves come from memory that is used again, padding and all."""
    rows = np.arange(20, dtype=np.float32)[:, None] * np.ones((1, 1 << 14), np.float32)
    loader = ps.Loader({"x": rows}, S, batch_size=8, remainder="pad", epochs=6)
    for i, batch in enumerate(loader):
        start = i % 3 * 8
        stop = min(start + 8, 20)
        want = np.concatenate([rows[start:stop], np.zeros((8 - stop + start, 1 << 14), np.float32)])
        assert np.array_equal(np.asarray(batch["x"]), want)
        del batch


def test_fewer_examples_than_a_batch_with_collate(S: NamedSharding, R: NamedSharding) -> None:
    """The only batch is the short one, and is filled up to the batch size where it has a row for each example."""

    def stack(examples: list[Any]) -> dict[str, Any]:
        return {"x": np.stack(examples), "table": np.ones(3, np.float32)}

    for make in (lambda: iter(x(5)), lambda: Dataset(list(x(5)))):
        loader = ps.Loader(make(), {"x": S, "table": R}, batch_size=8, collate=stack, remainder="pad", epochs=1)
        (batch,) = (b for b, _ in sync(loader))
        assert np.asarray(batch["x"]).tolist() == [0, 1, 2, 3, 4, 0, 0, 0]
        assert np.asarray(batch["mask"]).sum() == 5
        assert batch["table"].shape == (3,)
        (batch,) = (b for b, _ in sync(ps.Loader(make(), S, batch_size=8, collate=np.stack, remainder="pad")))
        assert np.asarray(batch[0]).tolist() == [0, 1, 2, 3, 4, 0, 0, 0]
    (batch,) = (b for b, _ in sync(ps.Loader(ragged([8, 8, 2]), R, batch_size=4, collate=pack, remainder="pad")))
    assert (batch["t"].shape, np.asarray(batch["mask"]).tolist()) == ((4, 8), [True, True, True, False])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e5m2", "float32"])
def test_padding_keeps_the_bits_of_arrays_on_the_devices(dtype: str, S: NamedSharding) -> None:
    """Not-a-numbers with a payload too."""
    size = jnp.dtype(dtype).itemsize
    rows = np.frombuffer(np.random.default_rng(0).bytes(2000 * 8 * size), jnp.dtype(dtype)).reshape(2000, 8)
    source = [jnp.asarray(rows[start : start + 800]) for start in (0, 800, 1600)]
    got = np.concatenate([np.asarray(batch)[np.asarray(mask)] for batch, mask in ps.prefetch(source, S, remainder=ps.Pad(value=1))])
    assert got.tobytes() == rows.tobytes()


# -- what is left out need not fit


WIDE = [{"x": np.ones(8, np.int64)}, {"x": np.full(4, 2**40)}]  # no 32 bits hold the second
TEXT = [{"x": np.ones(8)}, {"x": np.array(["a"] * 4)}]


@pytest.mark.parametrize("batches", [WIDE, TEXT], ids=["narrowing", "text"])
@pytest.mark.parametrize("options", [{}, {"transform": lambda batch: batch}], ids=["plain", "by workers"])
@pytest.mark.parametrize("kind", ["list", "generator", "factory"])
def test_a_short_last_batch_that_is_left_out_need_not_fit(kind: str, options: dict[str, Any], batches: list[Any], S: NamedSharding) -> None:
    options = {"remainder": "drop", **options}
    assert len(sync(ps.Loader(BY_BATCHES[kind](batches), S, **options))) == 1
    with pytest.raises(ps.BatchError, match="4 rows shorter"):
        sync(ps.Loader(BY_BATCHES[kind](batches), S, **{**options, "remainder": "error"}))
    for longer in ([*batches, batches[0]], [batches[0], {"x": np.concatenate([batches[1]["x"]] * 2)}]):
        with pytest.raises((ps.NarrowingError, ps.LeafTypeError)) as caught:
            sync(ps.Loader(BY_BATCHES[kind](longer), S, **options))
        assert any("batch 1" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("remainder", ["pad", "error"])
@pytest.mark.parametrize("options", [{}, {"transform": lambda example: example}], ids=["plain", "by workers"])
def test_the_first_example_of_the_next_batch_tells_that_the_epoch_goes_on(
    remainder: Any, options: dict[str, Any], S: NamedSharding
) -> None:
    goes_on = threading.Event()

    def source() -> Iterator[Any]:
        yield from x(9)
        assert goes_on.wait(30)
        yield from x(7)

    with ps.Loader(source, S, batch_size=8, remainder=remainder, **options) as loader:
        iterator = iter(loader)
        next(iterator)
        assert iterator.position is not None
        assert not iterator.position.ends_epoch  # the second batch is not whole yet
        goes_on.set()
        assert len(sync(iterator)) == 1


def test_after_a_remainder_that_is_an_error_no_further_epoch_is_opened(S: NamedSharding) -> None:
    opened: list[int] = []

    def source(epoch: int) -> Any:
        opened.append(epoch)
        return iter(x(12))

    with pytest.raises(ps.BatchError, match="12 rows"):
        sync(ps.Loader(source, S, batch_size=8, remainder="error", epochs=5))
    assert opened == [0]


# -- as they are


@pytest.mark.parametrize("kind", BY_ROWS)
@pytest.mark.parametrize("hooks", HOOKS)
def test_a_last_batch_is_kept_as_it_is(kind: str, hooks: str, mesh: Mesh, consume: Consume) -> None:
    where = NamedSharding(Mesh(mesh.devices[:4], ("data",)), P("data"))
    loader = ps.Loader(BY_ROWS[kind](20), where, batch_size=8, remainder="keep", workers=3, **HOOKS[hooks])
    assert kind not in ("arrays", "dataset") or len(loader) == 3
    seen = consume(loader)
    assert [len(b["x"]) for b, _ in seen] == [8, 8, 4]
    assert joined(seen, lambda b: b["x"]).tolist() == list(range(20))
    assert places(seen) == [(0, 0, 1, 8, False), (0, 1, 2, 16, False), (0, 2, 3, 20, True)]
    assert (loader.stats().rows, loader.stats().dropped_rows, loader.stats().padded_rows) == (20, 0, 0)


def test_whatever_is_in_it_is_kept(R: NamedSharding) -> None:
    """Leaves on the host, keys, narrowed leaves, microbatches, rows that stay on the devices, and a state in the middle."""
    names, keys, ids = [f"n{i}" for i in range(10)], jax.random.split(jax.random.key(0), 10), np.arange(10)
    examples = [{"name": n, "key": k, "id": i} for n, k, i in zip(names, keys, ids, strict=True)]
    for source in (examples, iter(examples)):
        loader = ps.Loader(source, {"name": ps.HOST, "key": R, "id": R}, batch_size=8, remainder="keep")
        *_, (last, _) = sync(loader)
        assert (list(last["name"]), np.asarray(last["id"]).tolist()) == (names[8:], [8, 9])
        assert np.array_equal(jax.random.key_data(last["key"]), jax.random.key_data(keys[8:]))
    columns = {"id": ids, "name": np.array(names), "wide": np.arange(20.0).reshape(10, 2)}
    for rules in (ps.HOST, {"id": R, "name": ps.HOST, "wide": ps.HOST}):
        for shuffle in (False, True):
            last = list(ps.Loader(columns, rules, batch_size=8, remainder="keep", shuffle=shuffle))[-1]
            rows = np.asarray(last["id"])
            assert (len(rows), last["name"].tolist()) == (2, [names[i] for i in rows])
            assert np.array_equal(last["wide"], columns["wide"][rows])
    for source in ({"x": ids}, ps.OnDevice({"x": ids}), [{"x": i} for i in ids]):
        loader = ps.Loader(source, R, batch_size=6, microbatches=2, remainder="keep", shuffle=True, epochs=2)
        seen = [b for b, _ in sync(loader)]
        assert [b["x"].shape for b in seen] == [(2, 3), (2, 2)] * 2
        assert sorted(np.asarray(seen[0]["x"]).ravel().tolist() + np.asarray(seen[1]["x"]).ravel().tolist()) == list(range(10))
        iterator = iter(loader)
        next(iterator)
        state = iterator.state()
        iterator.close()
        assert ps.LoaderState.decode(state.encode()).fingerprint.remainder == "keep"
        rest = sync(ps.Loader(source, R, batch_size=6, microbatches=2, remainder="keep", shuffle=True, epochs=2, state=state))
        assert [p.rows for _, p in rest] == [10, 6, 10]
        with pytest.raises(ps.StateError, match=r"remainder: the state has 'keep', this loader 'drop'"):
            ps.Loader(source, R, batch_size=6, microbatches=2, shuffle=True, epochs=2, state=state)
    whole = ps.Loader({"x": ids}, R, batch_size=4, remainder="keep")
    iterator = iter(whole)
    next(iterator)
    assert [len(b["x"]) for b in ps.Loader({"x": ids}, R, batch_size=5, remainder="keep", state=iterator.state().rebatch(5))] == [5, 1]
    iterator.close()


def test_what_cannot_be_kept_is_told_where_the_loader_is_made(S: NamedSharding, R: NamedSharding) -> None:
    for source in ({"x": x(19)}, ps.OnDevice({"x": x(19)}), Dataset(list(x(19)))):
        with pytest.raises(ps.ConfigError, match=r"19 rows.*batch_size=8.*last batch would have 3.*multiple of 8.*'drop'.*'pad'"):
            ps.Loader(source, S, batch_size=8, remainder="keep")
        with pytest.raises(ps.ConfigError, match=r"last batch would have 3.*multiple of 2"):
            ps.Loader(source, R, batch_size=8, microbatches=2, remainder="keep")
    for source in (x(19), ps.OnDevice(x(19))):
        with pytest.raises(ps.PlacementError, match=r"shape \(3,\).*multiple of 8.*'pad'.*'drop'"):
            ps.Loader(source, lambda path, shape, dtype: S, batch_size=8, remainder="keep")
    state = next_state(ps.Loader(x(24), S, batch_size=8, remainder="keep"))
    with pytest.raises(ps.ConfigError, match=r"16 rows of epoch 0 are left.*batch_size=24.*last batch would have 16"):
        ps.Loader(
            x(24),
            NamedSharding(Mesh(np.array(jax.devices()[:3]), ("d",)), P("d")),
            batch_size=24,
            remainder="keep",
            state=state.rebatch(24),
        )


def next_state(loader: ps.Loader[Any]) -> ps.LoaderState:
    with loader:
        iterator = iter(loader)
        next(iterator)
        return iterator.state()


@pytest.mark.parametrize("kind", BY_BATCHES)
@ways
def test_the_batches_of_the_source_come_as_they_are(kind: str, way: str, S: NamedSharding, consume: Consume) -> None:
    for sizes in ((16, 16, 8), (16, 8, 24, 8), (8,), (8, 16), (16, 8, 8, 8)):
        for remainder in ("auto", "keep"):
            loader = ps.Loader(BY_BATCHES[kind](whole(*sizes)), S, remainder=remainder, workers=3, **BY_HAND[way])
            seen = consume(loader)
            assert [len(b["x"]) for b, _ in seen] == list(sizes)
            assert joined(seen, lambda b: b["x"]).tolist() == list(range(sum(sizes)))
            assert [p.ends_epoch for _, p in seen] == [False] * (len(sizes) - 1) + [True]
            assert loader.stats().dropped_rows == 0


@pytest.mark.parametrize("kind", BY_BATCHES)
@ways
def test_a_batch_that_its_sharding_cannot_split_is_no_quiet_end(kind: str, way: str, S: NamedSharding) -> None:
    iterator = iter(ps.Loader(BY_BATCHES[kind](whole(16, 16, 3)), {"x": S, "scale": None}, **BY_HAND[way]))
    assert len(sync(iterator, 2)) == 2
    with pytest.raises(ps.PlacementError, match=r"leaf x: shape \(3,\).*multiple of 8.*remainder='pad'.*remainder='drop'"):
        next(iterator)


@pytest.mark.parametrize("kind", BY_BATCHES)
@ways
def test_batches_of_many_sizes_under_a_mask(kind: str, way: str, S: NamedSharding) -> None:
    """Only the last one is filled up to the first; any other as far as its sharding needs."""
    for sizes, want in (((16, 8, 24, 8), [16, 8, 24, 16]), ((16, 5, 20, 3), [16, 8, 24, 16]), ((12, 8, 16), [16, 8, 16]), ((5,), [8])):
        loader = ps.Loader(BY_BATCHES[kind](whole(*sizes)), {"x": S, "scale": None}, remainder="pad", workers=3, epochs=1, **BY_HAND[way])
        seen = sync(loader)
        assert [len(b["x"]) for b, _ in seen] == want
        assert [int(np.asarray(b["mask"]).sum()) for b, _ in seen] == list(sizes)
        got = np.concatenate([np.asarray(b["x"])[np.asarray(b["mask"])] for b, _ in seen])
        assert got.tolist() == list(range(sum(sizes)))
        assert loader.stats().padded_rows == sum(want) - sum(sizes)


def test_microbatches_of_a_batch_that_has_too_few_rows_for_them(S: NamedSharding) -> None:
    seen = [b for b, _ in sync(ps.Loader(whole(32, 8, 32), {"x": S, "scale": None}, remainder="pad", microbatches=2))]
    assert [b["x"].shape for b in seen] == [(2, 16), (2, 8), (2, 16)]
    assert [int(np.asarray(b["mask"]).sum()) for b in seen] == [32, 8, 32]


# -- which leaves have rows


def with_constant(*rows: int) -> list[dict[str, Any]]:
    """Batches of so many rows, with a table of 16 that is no row."""
    return [{"table": np.arange(16.0), "x": part["x"]} for part in whole(*rows)]


WHERE: dict[str, Callable[[], Any]] = {
    "one device": lambda: jax.sharding.SingleDeviceSharding(jax.devices()[3]),
    "replicated": lambda: NamedSharding(Mesh(np.array(jax.devices()), ("data",)), P()),
    "callable": lambda: lambda path, shape, dtype: jax.sharding.SingleDeviceSharding(jax.devices()[0]),
    "on the devices": lambda: jax.sharding.SingleDeviceSharding(jax.devices()[0]),
}


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("kind", ["list", "generator", "async generator"])
def test_rows_are_what_varies(where: str, kind: str) -> None:
    def source(*rows: int) -> Any:
        batches = with_constant(*rows)
        return BY_BATCHES[kind](jax.tree.map(jnp.asarray, batches) if where == "on the devices" else batches)

    sharding = WHERE[where]()
    seen = sync(ps.Loader(source(16, 16, 5), sharding, remainder="pad"))
    assert [b["table"].tolist() for b, _ in seen] == [list(range(16))] * 3
    assert [np.asarray(b["x"])[np.asarray(b["mask"])].tolist() for b, _ in seen] == [
        list(range(16)),
        list(range(16, 32)),
        list(range(32, 37)),
    ]
    assert [(b["x"].shape, b["mask"].shape) for b, _ in seen] == [((16,), (16,))] * 3
    assert [p.rows for _, p in seen] == [16, 32, 37]
    loader = ps.Loader(source(16, 16, 5), sharding, remainder="drop")
    assert [p.rows for _, p in sync(loader)] == [16, 32]
    assert loader.stats().dropped_rows == 5
    iterator = iter(ps.Loader(source(16, 16, 5), sharding, remainder="error"))
    assert len(sync(iterator, 2)) == 2
    with pytest.raises(ps.BatchError, match=r"11 rows shorter than the first one \(x\)"):
        next(iterator)
    assert [len(b["x"]) for b, _ in sync(ps.Loader(source(16, 5, 16), sharding, remainder="pad"))] == [16, 5, 16]


def test_what_varies_is_told_alike_after_a_state() -> None:
    one = WHERE["one device"]()
    whole_run = sync(ps.Loader(with_constant(16, 16, 5), one, remainder="pad"))
    for done in (1, 2):
        iterator = iter(ps.Loader(iter(with_constant(16, 16, 5)), one, remainder="pad"))
        for _ in range(done):
            next(iterator)
        state = iterator.state()
        iterator.close()
        rest = sync(ps.Loader(iter(with_constant(16, 16, 5)), one, remainder="pad", state=state))
        for (got, _), (want, _) in zip(rest, whole_run[done:], strict=True):
            jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), got, want)


def test_a_short_batch_with_other_entries(S: NamedSharding) -> None:
    for where in (S, WHERE["one device"]()):
        for last in ({"x": x(3)}, {"x": x(3), "y": x(3), "z": x(3)}):
            batches = [{"x": x(8), "y": x(8)}, last]
            loader = ps.Loader(batches, where, remainder="drop")
            assert len(sync(loader)) == 1
            assert loader.stats().dropped_rows == 3
            with pytest.raises(ps.BatchError, match=r"5 rows shorter than the first one"):
                sync(ps.Loader(batches, where, remainder="error"))
            got = [b for b, _ in sync(ps.Loader(batches, where, remainder="pad"))][1]
            assert (sorted(got), len(got["x"]), int(np.asarray(got["mask"]).sum())) == (sorted([*last, "mask"]), 8, 3)


@pytest.mark.parametrize("remainder", ["drop", "error", "pad"])
def test_where_it_cannot_be_told_the_error_asks(remainder: Any) -> None:
    one = WHERE["one device"]()
    for batches in (
        [{"ids": x(16), "offsets": x(5)}],
        [{"a": x(16), "b": x(16)}, {"a": x(12), "b": x(8)}],
        [(x(16), x(4))],
    ):
        with pytest.raises(
            ps.BatchError, match=rf"remainder='{remainder}' has to know the rows.*axis 0.*PartitionSpec\('data'\).*'keep'"
        ) as told:
            sync(ps.Loader(batches, one, remainder=remainder))
        assert any("batch" in note for note in told.value.__notes__)
        assert len(sync(ps.Loader(batches, one))) == len(batches)
    named = {
        "ids": NamedSharding(Mesh(np.array(jax.devices()[:1]), ("data",)), P("data")),
        "offsets": NamedSharding(Mesh(np.array(jax.devices()[:1]), ("data",)), P()),
    }
    assert len(sync(ps.Loader([{"ids": x(16), "offsets": x(5)}], named, remainder=remainder))) == 1
    if remainder == "pad":
        with pytest.raises(ps.BatchError, match="none of its leaves has an axis"):
            sync(ps.Loader([{"scale": 3.0}], one, remainder="pad"))


def test_columns_in_a_list_are_items(S: NamedSharding) -> None:
    """A list of two columns is two examples, as a list always is; the error names both ways out."""
    with pytest.raises(ps.ConfigError, match=r"2 rows are fewer than batch_size=16.*leave batch_size out"):
        ps.Loader([np.zeros((200, 4)), np.zeros(200)], S, batch_size=16)
    chunks = iter([np.zeros((16, 4)), np.zeros((16, 4))])
    with pytest.raises(ps.BatchError, match=r"epoch 0 gave no batch: its 2 rows are fewer than batch_size=16.*ps.rebatch"):
        sync(ps.Loader(chunks, S, batch_size=16))


def test_a_later_epoch_without_a_batch_is_an_error_too(S: NamedSharding, consume: Consume) -> None:
    loader = ps.Loader(lambda epoch: iter(x(16 if epoch == 0 else 5)), S, batch_size=8, epochs=2)
    iterator = iter(loader)
    assert len(sync(iterator, 2)) == 2
    with pytest.raises(ps.BatchError, match=r"epoch 1 gave no batch: its 5 rows"):
        next(iterator)
