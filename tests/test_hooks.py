"""`transform` with its generator, and `collate`: on the host, in the workers, the same whoever does it."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import prefetchshard as ps
from consumers import Consume, consumer, joined
from prefetchshard.base.signatures import takes_parameter

sync = consumer("sync")
ROWS = 24
X = np.arange(ROWS, dtype=np.int32)


class Dataset:
    def __init__(self, items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


async def async_rows() -> AsyncIterator[Any]:
    for row in X:
        yield row


SOURCES: dict[str, Callable[[], Any]] = {
    "arrays": lambda: X,
    "dataset": lambda: Dataset(X),
    "iterable": lambda: lambda: iter(X),
    "async": lambda: async_rows,
}


def draw(row: Any, rng: np.random.Generator) -> dict[str, Any]:
    return {"row": np.int32(row), "u": rng.random(2, np.float32), "i": rng.integers(1 << 30, dtype=np.int32)}


def drawn(source: Any, sharding: Any, **options: Any) -> dict[tuple[int, int], tuple[float, ...]]:
    """What was drawn for each (epoch, row)."""
    options = {"batch_size": 8, "transform": draw, **options}
    found: dict[tuple[int, int], tuple[float, ...]] = {}
    for batch, position in sync(ps.Loader(source, sharding, **options)):
        rows, u, i = (np.asarray(batch[name]).tolist() for name in ("row", "u", "i"))
        for row, pair, number in zip(rows, u, i, strict=True):
            assert (position.epoch, row) not in found
            found[position.epoch, row] = (*pair, number)
    return found


# -- the generator


def test_the_same_is_drawn_for_a_row_whoever_reads_it(S: NamedSharding) -> None:
    want = drawn(X, S, epochs=2)
    assert len(set(want.values())) == 2 * ROWS, "rows and epochs differ"
    one = Mesh(np.array(jax.devices()[:1]), ("data",))
    for kind, make in SOURCES.items():
        for workers, size, place in ((1, 8, S), (5, 24, one), (8, 8, one)):
            assert drawn(make(), place, epochs=2, workers=workers, batch_size=size) == want, kind
    assert drawn(X, S, epochs=2, shuffle=True) == want, "it goes by the row, not by its place in the epoch"


def test_a_later_run_draws_what_one_long_run_would_have(S: NamedSharding) -> None:
    want = drawn(X, S, epochs=2)
    loader = ps.Loader(Dataset(X), S, batch_size=8, transform=draw)
    sync(loader)
    second = {
        (position.epoch, row): number
        for batch, position in sync(loader)
        for row, number in zip(np.asarray(batch["row"]).tolist(), np.asarray(batch["i"]).tolist(), strict=True)
    }
    assert second == {key: value[2] for key, value in want.items() if key[0] == 1}


def test_what_is_drawn_depends_on_the_seed(S: NamedSharding) -> None:
    seeds = [drawn(X, S, seed=seed)[0, 0] for seed in (0, 1, 2**32, 2**32 + 1, 2**80)]
    assert len(set(seeds)) == len(seeds)


def test_batches_of_the_sources_own_get_one_generator_each(S: NamedSharding) -> None:
    def batch_draw(batch: Any, rng: np.random.Generator) -> Any:
        return {"x": batch, "u": rng.random(8, np.float32)}

    sources: list[tuple[Any, int]] = [
        (list(np.split(X, 3)), 1),
        (lambda: iter(np.split(X, 3)), 1),
        (lambda: iter(np.split(X, 3)), 4),
        (Dataset(np.split(X, 3)), 4),
    ]
    found = [joined(sync(ps.Loader(s, S, transform=batch_draw, workers=w, epochs=2)), lambda b: b["u"]).tolist() for s, w in sources]
    assert all(other == found[0] for other in found)
    assert len(set(found[0])) == len(found[0])


class Callable_:
    def __call__(self, row: Any, *, rng: np.random.Generator) -> Any:
        return draw(row, rng)

    def method(self, row: Any, rng: np.random.Generator) -> Any:
        return draw(row, rng)

    @staticmethod
    def static(row: Any, rng: np.random.Generator) -> Any:
        return draw(row, rng)

    @classmethod
    def of_class(cls, row: Any, rng: np.random.Generator) -> Any:
        return draw(row, rng)


def with_strength(row: Any, strength: float, rng: np.random.Generator | None = None) -> Any:
    assert rng is not None
    return draw(row, rng)


@functools.wraps(draw)
def passes_all_on(*args: Any, **kwargs: Any) -> Any:
    return draw(*args, **kwargs)


@pytest.mark.parametrize(
    "transform",
    [
        Callable_(),
        Callable_().method,
        Callable_.static,
        Callable_.of_class,
        functools.partial(with_strength, strength=2.0),
        functools.partial(functools.partial(with_strength), strength=2.0),
        passes_all_on,
        lambda row, rng=None: draw(row, rng),
    ],
    ids=["object", "method", "static", "class method", "partial", "partial of partial", "wrapped", "default"],
)
def test_who_has_a_parameter_rng_gets_it(transform: Any, S: NamedSharding) -> None:
    assert drawn(X, S, transform=transform) == drawn(X, S)


def test_who_has_none_gets_none(S: NamedSharding) -> None:
    @functools.wraps(draw)
    def keeps_it(row: Any) -> Any:
        return row + 0

    def generator(row: Any, generator: Any = None) -> Any:
        assert generator is None
        return row

    def keywords(row: Any, **options: Any) -> Any:
        assert not options
        return row

    def bound(row: Any, rng: Any) -> Any:
        assert rng == "mine"
        return row

    plain: list[Any] = [np.int32, np.negative, abs, int, generator, keywords, keeps_it, functools.partial(bound, rng="mine"), np.asarray]
    for transform in plain:
        got = joined(sync(ps.Loader(X, S, batch_size=8, transform=transform))).tolist()
        assert got == [transform(row) for row in X]


def test_which_parameters_count() -> None:
    def positional(row: Any, rng: Any, /) -> None: ...
    def many(row: Any, *rng: Any) -> None: ...
    def words(row: Any, **rng: Any) -> None: ...
    def named(row: Any, *, rng: Any) -> None: ...

    assert [takes_parameter(f, "rng") for f in (positional, many, words, named)] == [False, False, False, True]
    assert takes_parameter(jax.jit(lambda batch, key: batch), "key")
    assert takes_parameter(jax.vmap(lambda batch, key: batch), "key")
    assert not takes_parameter(int, "rng")


# -- where it runs, and on what


def test_transforms_run_in_the_workers_side_by_side(S: NamedSharding, consume: Consume) -> None:
    """The first four rows wait for each other, which one thread could never do; and the source is asked by one thread."""
    meeting = threading.Barrier(4)
    rows_so_far = itertools.count()
    pulling: set[threading.Thread] = set()
    working: set[threading.Thread] = set()

    def rows() -> Iterator[Any]:
        for row in X:
            pulling.add(threading.current_thread())
            yield row

    def transform(row: Any) -> Any:
        working.add(threading.current_thread())
        if next(rows_so_far) < 4:
            meeting.wait(30)
        return row

    for source in (rows(), Dataset(X)):
        working.clear()
        rows_so_far = itertools.count()
        assert joined(consume(ps.Loader(source, S, batch_size=8, workers=4, transform=transform))).tolist() == X.tolist()
        assert len(working) == 4
        assert threading.current_thread() not in working
    assert len(pulling) == 1
    assert not pulling & working


def test_a_transform_owns_the_example_that_it_gets(S: NamedSharding) -> None:
    def distrust(example: Any) -> Any:
        example["image"] *= -1
        example["record"]["a"] = 99
        example["extra"] = example["image"].sum()
        return {"image": example["image"], "extra": example["extra"]}

    source = {"image": np.arange(16 * 4, dtype=np.float32).reshape(16, 4), "record": np.ones(16, [("a", np.int32)])}
    kept = {name: leaf.copy() for name, leaf in source.items()}
    seen = sync(ps.Loader(source, S, batch_size=8, transform=distrust, epochs=2))
    assert all(np.array_equal(source[name], kept[name]) for name in source)
    assert np.array_equal(joined(seen, lambda b: b["image"]), -np.concatenate([kept["image"]] * 2))


def test_a_transform_may_return_what_it_was_given(S: NamedSharding) -> None:
    source = np.arange(32, dtype=np.float32).reshape(16, 2)
    assert np.array_equal(joined(sync(ps.Loader(source, S, batch_size=8, transform=lambda row: row))), source)


def test_a_transform_that_keeps_its_buffer(S: NamedSharding) -> None:
    """An example is copied before its worker makes the next one."""
    buffers = threading.local()

    def transform(row: Any) -> Any:
        if not hasattr(buffers, "own"):
            buffers.own = np.zeros(3, np.int32)
        buffers.own[:] = row
        return buffers.own

    for workers in (1, 3):
        for source in (X, Dataset(X), iter(X)):
            got = joined(sync(ps.Loader(source, S, batch_size=8, workers=workers, transform=transform)))
            assert np.array_equal(got, np.repeat(X[:, None], 3, axis=1))


def test_a_source_that_keeps_its_buffer_and_transforms_in_workers(S: NamedSharding) -> None:
    def rows() -> Iterator[Any]:
        buffer = np.zeros(3, np.int32)
        for row in X:
            buffer[:] = row
            yield {"x": buffer}

    seen = sync(ps.Loader(rows(), S, batch_size=8, workers=4, transform=lambda e: {"x": e["x"] + 1}))
    assert np.array_equal(joined(seen, lambda b: b["x"]), np.repeat(X[:, None], 3, axis=1) + 1)


def test_a_transform_may_change_the_structure_and_the_dtypes(S: NamedSharding) -> None:
    seen = sync(ps.Loader({"a": X, "b": X}, S, batch_size=8, transform=lambda e: (np.float32(e["a"]), [np.int8(1), {"c": e["b"]}])))
    (floats, (ones, inner)) = seen[0][0]
    assert (floats.dtype, ones.dtype, inner["c"].dtype) == (np.float32, np.int8, np.int32)


# -- collate


def test_collate_gets_the_examples_in_order(S: NamedSharding, consume: Consume) -> None:
    def collate(examples: Any) -> Any:
        assert type(examples) is list
        assert len(examples) == 8
        return {"x": np.array([int(e) for e in examples], np.int32), "sum": np.full(8, sum(int(e) for e in examples))}

    for source in (Dataset(X), iter(X), async_rows()):
        seen = consume(ps.Loader(source, S, batch_size=8, workers=3, collate=collate))
        assert joined(seen, lambda b: b["x"]).tolist() == X.tolist()
        assert [int(b["sum"][0]) for b, _ in seen] == [28, 92, 156]


def test_collate_gets_the_gathered_batch_of_arrays(S: NamedSharding) -> None:
    source = {"x": X, "y": np.ones((ROWS, 2), np.float32)}
    kept = source["y"].copy()

    def collate(batch: Any) -> Any:
        assert (sorted(batch), batch["x"].shape, batch["y"].shape) == (["x", "y"], (8,), (8, 2))
        batch["y"] *= 5  # its own copy
        return {"z": batch["y"] + batch["x"][:, None]}

    for options in ({}, {"shuffle": True}):
        seen = sync(ps.Loader(source, S, batch_size=8, collate=collate, workers=3, **options))
        assert sorted(joined(seen, lambda b: b["z"])[:, 0].tolist()) == [5.0 + i for i in range(ROWS)]
        assert np.array_equal(source["y"], kept)


def test_collate_after_transform_gets_examples_of_arrays_too(S: NamedSharding) -> None:
    def collate(examples: Any) -> Any:
        assert type(examples) is list
        return np.stack(examples)

    loader = ps.Loader(X, S, batch_size=8, transform=lambda row: np.array([row, row]), collate=collate, narrow="allow")
    assert joined(sync(loader))[:, 0].tolist() == X.tolist()


def test_collate_needs_a_batch_size(S: NamedSharding) -> None:
    with pytest.raises(ps.ConfigError, match="collate"):
        ps.Loader([X], S, collate=np.stack)


def test_ragged_text_is_padded_in_collate(S: NamedSharding, consume: Consume) -> None:
    words = [np.full(1 + i % 5, i, np.int32) for i in range(ROWS)]

    def pad(examples: Any) -> Any:
        width = max(map(len, examples))
        tokens = np.zeros((len(examples), width), np.int32)
        for row, example in zip(tokens, examples, strict=True):
            row[: len(example)] = example
        return {"tokens": tokens, "length": np.array(list(map(len, examples)), np.int32)}

    for source in (Dataset(words), iter(words)):
        for batch, position in consume(ps.Loader(source, S, batch_size=8, workers=3, collate=pad)):
            lengths = np.asarray(batch["length"])
            assert batch["tokens"].shape == (8, lengths.max())
            for i, (row, length) in enumerate(zip(np.asarray(batch["tokens"]), lengths, strict=True)):
                assert row[:length].tolist() == words[position.first_row + i].tolist()
                assert not row[length:].any()


# -- what goes wrong says where


def test_errors_name_the_row(S: NamedSharding, consume: Consume) -> None:
    def transform(row: Any) -> Any:
        if row == 13:
            raise KeyError("k")
        return row

    for source in (X, Dataset(X), iter(X)):
        iterator = iter(ps.Loader(source, S, batch_size=8, workers=2, transform=transform))
        assert joined(consume(iterator, 1)).tolist() == list(range(8))
        with pytest.raises(KeyError) as caught:
            consume(iterator)
        assert caught.value.args == ("k",)
        assert any("batch 1 (epoch 0" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("error", [StopIteration, StopAsyncIteration, GeneratorExit])
def test_control_flow_in_hooks_is_no_end(error: type[BaseException], S: NamedSharding, consume: Consume) -> None:
    def fail(_: Any) -> Any:
        raise error

    for options in ({"transform": fail}, {"collate": fail}):
        with pytest.raises(ps.SourceError) as caught:
            consume(ps.Loader(Dataset(X), S, batch_size=8, **options))
        assert type(caught.value.__cause__) is error


def test_a_hook_that_forgot_to_return_says_so(S: NamedSharding, consume: Consume) -> None:
    for name in ("transform", "collate", "device_transform"):
        with pytest.raises(ps.SourceError, match=f"{name} returned None"):
            consume(ps.Loader(Dataset(X), S, batch_size=8, **{name: lambda item: None}))


def test_placement_of_a_hooks_result_is_checked() -> None:
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    with pytest.raises(ps.PlacementError, match=r"leaf x: shape \(5,\)"):
        sync(ps.Loader(Dataset(X), sharding, batch_size=8, collate=lambda examples: {"x": np.zeros(5)}))
