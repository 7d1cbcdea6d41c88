"""What a loader says about itself: spec, statistics, positions, repr; and its `with` blocks."""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import msgspec
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

import prefetchshard as ps
from consumers import Consume, batches, consumer, joined, places
from prefetchshard.testing import ManualClock
from support import loader_threads, wait_until

P = PartitionSpec
sync = consumer("sync")


def full(i: float) -> np.ndarray:
    return np.full(8, i, np.float32)


class Asked:
    """A re-iterable source that counts what it was asked for."""

    def __init__(self, count: int = 5) -> None:
        self.count = count
        self.opened = 0
        self.closed = 0

    def __iter__(self) -> Iterator[np.ndarray]:
        self.opened += 1
        try:
            for i in range(self.count):
                yield full(i)
        finally:
            self.closed += 1


# -- spec


def test_spec_of_arrays_reads_nothing(S: NamedSharding, R: NamedSharding) -> None:
    source = {"x": np.zeros((20, 3)), "n": np.zeros(20, np.int16), "name": np.array(["a"] * 20)}
    loader = ps.Loader(source, {"x": S, "n": R, "name": ps.HOST}, batch_size=16, remainder="pad")
    spec = loader.spec()
    assert loader._live() == []
    assert loader_threads() == []
    assert {path: (leaf.shape, leaf.dtype, leaf.bytes_per_device) for path, leaf in spec.items()} == {
        "x": ((16, 3), np.float32, 24),
        "n": ((16,), np.int16, 32),
        "name": ((16,), np.dtype("<U1"), 0),
        "mask": ((16,), np.bool_, 2),
    }
    assert spec["name"].sharding is ps.HOST
    assert spec["x"].sharding.is_equivalent_to(S, 2)
    assert spec.bytes_per_device == 24 + 32 + 2
    assert spec.ahead >= 1
    batch = next(iter(loader))
    for path, leaf in spec.items():
        assert batch[path].shape == leaf.shape
        assert batch[path].dtype == leaf.dtype
        if leaf.sharding is not ps.HOST:
            assert batch[path].sharding.is_equivalent_to(leaf.sharding, batch[path].ndim)


def test_no_batch_is_lost_by_asking(S: NamedSharding, consume: Consume) -> None:
    sources: list[tuple[Any, dict[str, Any]]] = [
        (map(full, range(5)), {}),
        ([full(i) for i in range(5)], {}),
        (lambda: map(full, range(5)), {}),
        (Asked(), {}),
        ((row for i in range(5) for row in full(i)), {"batch_size": 8}),
    ]
    for source, options in sources:
        loader = ps.Loader(source, S, **options)
        for _ in range(3):
            (leaf,) = loader.spec().values()
            assert (leaf.path, leaf.shape, leaf.dtype, leaf.bytes_per_device) == ("", (8,), np.float32, 4)
        seen = consume(loader)
        assert joined(seen, lambda b: b[:1]).tolist() == [0, 1, 2, 3, 4]
        assert places(seen)[0] == (0, 0, 1, 8, False)
        assert loader.spec()[""].shape == (8,), "known by now"
        assert loader._live() == []


def test_the_run_that_spec_started_is_taken_over(S: NamedSharding) -> None:
    source = Asked()
    loader = ps.Loader(source, S)
    loader.spec()
    loader.spec()
    assert source.opened == 1
    iterator = iter(loader)
    assert source.opened == 1
    other = iter(loader)
    assert other is not iterator
    assert [float(b[0]) for b in iterator] == [float(b[0]) for b in other] == [0, 1, 2, 3, 4]
    assert source.opened == 2


def test_spec_while_a_run_is_live_and_after_it(S: NamedSharding) -> None:
    source = Asked()
    loader = ps.Loader(source, S)
    iterator = iter(loader)
    next(iterator)
    assert loader.spec()[""].shape == (8,)
    assert source.opened == 1, "the first batch has said it"
    iterator.close()
    one_shot = ps.Loader(map(full, range(2)), S)
    sync(one_shot)
    assert one_shot.spec()[""].shape == (8,)
    with pytest.raises(ps.UsedUpError):
        iter(one_shot)
    never_read = ps.Loader(map(full, range(2)), S)
    iter(never_read).close()
    with pytest.raises(ps.UsedUpError):
        never_read.spec()
    assert never_read._live() == []


def test_a_run_that_spec_started_is_closed_with_the_loader(S: NamedSharding) -> None:
    source = Asked()
    with ps.Loader(source, S) as loader:
        loader.spec()
        assert loader._live()
    assert loader._live() == []
    assert (source.opened, source.closed) == (1, 1)
    assert len(sync(loader)) == 5


def test_spec_of_an_empty_source(S: NamedSharding) -> None:
    for source, options in (([], {}), (iter(()), {}), (Asked(0), {}), ([], {"batch_size": 8})):
        loader = ps.Loader(source, S, **options)
        for _ in range(2):
            with pytest.raises(ps.BatchError, match="no batch"):
                loader.spec()
        assert sync(loader) == []


def test_spec_of_a_source_that_fails(S: NamedSharding) -> None:
    def source() -> Iterator[np.ndarray]:
        raise KeyError("first")
        yield

    loader = ps.Loader(source(), S)
    with pytest.raises(KeyError, match="first"):
        loader.spec()
    with pytest.raises(KeyError, match="first"):
        sync(loader)


def test_spec_reads_well(S: NamedSharding) -> None:
    loader = ps.Loader({"x": np.zeros((16, 3), np.float32), "name": np.array(["a"] * 16)}, {"x": S, "name": ps.HOST}, batch_size=8)
    text = repr(loader.spec())
    assert re.search(r"12 bytes a device, at most \d+ batches ahead", text)
    assert "x: float32[8, 3]" in text
    assert "name: <U1[8], ps.HOST" in text


# -- describe


def test_describe_a_batch(S: NamedSharding) -> None:
    batch = next(iter(ps.Loader({"x": np.zeros((8, 3), np.float32)}, S, batch_size=8)))
    assert "x" in ps.describe(batch)
    assert "float32" in ps.describe(batch)


# -- statistics


def test_the_counts(S: NamedSharding, consume: Consume) -> None:
    loader = ps.Loader({"x": np.zeros((20, 2), np.float32)}, S, batch_size=8, remainder="pad", epochs=2)
    with pytest.raises(ps.ConfigError, match="not run"):
        loader.stats()
    iterator = iter(loader)
    assert (iterator.stats().batches, iterator.stats().rows, iterator.stats().wall_seconds) == (0, 0, 0)
    assert str(iterator.stats()) == "no batch was handed out yet"
    consume(iterator, 2)
    assert (iterator.stats().batches, iterator.stats().rows, iterator.stats().bytes) == (2, 16, 2 * 8 * (8 + 1))
    assert loader.stats().batches == 2
    consume(iterator)
    stats = loader.stats()
    assert (stats.batches, stats.rows, stats.padded_rows, stats.dropped_rows) == (6, 40, 8, 0)
    assert stats.bytes == 6 * 8 * (8 + 1)
    assert stats.ready.taken == stats.host.taken == 6
    consume(loader)
    assert loader.stats().batches == 6, "of the last run"


def test_statistics_are_shown_as_text_and_are_a_dict(S: NamedSharding) -> None:
    loader = ps.Loader({"x": np.zeros((20, 2), np.float32)}, S, batch_size=np.int64(8), seed=np.int64(3), shuffle=True, epochs=np.int32(2))
    iterator = iter(loader)
    stats = iterator.stats()
    assert repr(stats) == str(stats)
    early = stats.to_dict()
    assert (early["batches"], early["first_batch_seconds"], early["stall_share"], early["bound"]) == (0, None, None, None)
    for stats in (sync(iterator) and iterator.stats(), loader.stats()):
        assert repr(stats) == str(stats)
        told = stats.to_dict()
        assert json.loads(json.dumps(told, allow_nan=False)) == told
        assert {type(value) for value in told.values()} <= {int, float, str, dict}
        assert dict(stats) == {**stats} == told
        assert list(stats) == list(told)
        derived = {
            "stall_share",
            "bound",
            "verdict",
            "rows_per_second",
            "bytes_per_second",
            "transfer_bytes_per_second",
            "mean_ready",
            "mean_read",
            "imbalance",
        }
        assert set(msgspec.structs.asdict(stats)) | derived == set(told)
        assert told["verdict"]["bound"] == told["bound"] == stats.verdict.bound
        assert (told["batches"], told["rows"], told["dropped_rows"], stats["bound"]) == (4, 32, 8, stats.bound)
        assert told["ready"]["taken"] == stats.ready.taken == 4


def test_numbers_of_numpy_are_plain_in_the_dict(S: NamedSharding) -> None:
    loader = ps.Loader(np.zeros(8), S, batch_size=8)
    sync(loader)
    odd = msgspec.structs.replace(loader.stats(), rows=np.int64(8), wall_seconds=np.float64(0.5))
    told = odd.to_dict()
    assert (type(told["rows"]), type(told["wall_seconds"])) == (int, float)


def test_which_run_is_meant(S: NamedSharding) -> None:
    loader = ps.Loader([full(i) for i in range(5)], S)
    first, second = iter(loader), iter(loader)
    next(first)
    with pytest.raises(ps.ConfigError, match=r"2 runs.*ask the iterator"):
        loader.stats()
    assert (first.stats().batches, second.stats().batches) == (1, 0)
    second.close()
    assert loader.stats().batches == 1
    first.close()
    assert loader._live() == []


def test_stall_and_busy_add_up_to_the_wall(S: NamedSharding, consume: Consume) -> None:
    iterator = iter(ps.Loader([full(i) for i in range(30)], S))
    began = time.perf_counter()
    consume(iterator, 20)
    took = time.perf_counter() - began  # of the same clock, around all that it measured
    stats = iterator.stats()
    assert stats.stall_seconds + stats.busy_seconds == pytest.approx(stats.wall_seconds)
    assert 0 < stats.wall_seconds <= took
    assert 0 <= stats.stall_share <= 1
    assert stats.first_batch_seconds > 0
    before = iterator.stats()
    assert iterator.stats().wall_seconds == before.wall_seconds, "it stands still while nothing is asked for"
    iterator.close()


class Pass:
    """Time passes where a test says so, and only while all else is at rest, so that it is known whose it is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = ManualClock()
        self.runs: list[ps.LoaderIterator] = []
        monkeypatch.setattr("prefetchshard.loader.MONOTONIC", self.clock)

    def begin(self, loader: ps.Loader) -> ps.LoaderIterator:
        self.runs.append(iter(loader))
        return self.runs[-1]

    def while_awaited(self, batch: int, seconds: float) -> None:
        """While the consumer waits for this batch, having taken all before it."""
        wait_until(lambda: bool(self.runs))
        wait_until(lambda: self.runs[-1].stats().batches == batch and self.runs[-1].stats().ready.receivers_waiting == 1)
        self.clock.advance(seconds)


@pytest.fixture
def passing(monkeypatch: pytest.MonkeyPatch) -> Pass:
    return Pass(monkeypatch)


def test_bound_by_the_source(S: NamedSharding, consume: Consume, passing: Pass) -> None:
    def source() -> Iterator[np.ndarray]:
        for i in range(10):
            passing.while_awaited(i, 0.05)
            yield full(i)

    iterator = passing.begin(ps.Loader(source(), S))
    consume(iterator)
    stats = iterator.stats()
    assert stats.bound == "reading"
    assert (stats.source_seconds, stats.stall_seconds) == (pytest.approx(0.5), pytest.approx(0.5))
    assert (stats.busy_seconds, stats.transfer_seconds, stats.copy_seconds, stats.transform_seconds) == (0, 0, 0, 0)
    assert str(stats).startswith("Bound by reading")


def test_bound_by_the_consumer(S: NamedSharding, passing: Pass) -> None:
    iterator = passing.begin(ps.Loader((full(i) for i in iter(int, 1)), S))
    for _ in range(10):
        wait_until(lambda: iterator.stats().ready.ready == 2 and iterator.stats().ready.senders_waiting == 1)
        next(iterator)
        wait_until(lambda: iterator.stats().ready.ready == 2 and iterator.stats().ready.senders_waiting == 1)
        passing.clock.advance(0.03)
    stats = iterator.stats()
    iterator.close()
    assert stats.bound == "consumer"
    assert (stats.stall_seconds, stats.busy_seconds) == (0, pytest.approx(0.27))  # between ten batches


def test_bound_by_a_transform(S: NamedSharding, passing: Pass) -> None:
    read: list[np.float32] = []

    def rows() -> Iterator[np.float32]:
        for row in np.arange(64, dtype=np.float32):
            read.append(row)
            yield row

    def source_rests(batch: int) -> bool:
        """Whether its thread has read as far ahead of this batch as it may; its reading would have some of the time else."""
        host = passing.runs[-1].stats().host
        if batch + host.capacity > 8:
            return not any(thread.name.endswith("-source") for thread in loader_threads())
        return len(read) == 8 * (batch + host.capacity) and host.senders_waiting == 1

    def transform(row: Any) -> Any:
        if read:
            wait_until(lambda: passing.runs and source_rests(int(row) // 8))
        passing.while_awaited(int(row) // 8, 0.004)
        return row

    for source in (np.arange(64, dtype=np.float32), rows()):
        passing.runs.clear()
        iterator = passing.begin(ps.Loader(source, S, batch_size=8, workers=1, transform=transform))
        sync(iterator)
        assert iterator.stats().bound == "transform"
        assert (iterator.stats().source_seconds, iterator.stats().transform_seconds) == (0, pytest.approx(64 * 0.004))


def test_bound_by_collate(S: NamedSharding, passing: Pass) -> None:
    def collate(examples: Any) -> Any:
        passing.while_awaited(int(examples[0]) // 8, 0.03)
        return np.stack(examples)

    iterator = passing.begin(ps.Loader(list(np.arange(64, dtype=np.float32)), S, batch_size=8, workers=1, collate=collate))
    sync(iterator)
    assert iterator.stats().bound == "transform"
    assert iterator.stats().transform_seconds == pytest.approx(8 * 0.03)
    assert iterator.stats().stages.transform.p50 == pytest.approx(0.03, rel=0.011)


def test_reading_and_stepping_overlap(S: NamedSharding) -> None:
    """A step that lasts until the source has made the next batch comes to its end."""
    made: list[int] = []

    def source() -> Iterator[np.ndarray]:
        for i in range(20):
            made.append(i)
            yield full(i)

    for taken, _ in enumerate(ps.Loader(source(), S), 1):
        wait_until(lambda taken=taken: len(made) > min(taken, 19))


# -- repr


def test_repr_says_the_state_in_words(S: NamedSharding) -> None:
    loader = ps.Loader(np.zeros((20, 2)), S, batch_size=8)
    assert repr(loader) == "<Loader over arrays of 20 rows: at rest before run 0, epoch 0, step 0>"
    iterator = iter(loader)
    assert repr(loader) == "<Loader over arrays of 20 rows: 1 live run>"
    assert re.fullmatch(r"<LoaderIterator live: \d of 2 batches ready>", repr(iterator))
    other = iter(loader)
    assert repr(loader) == "<Loader over arrays of 20 rows: 2 live runs>"
    other.close()
    assert repr(other).startswith("<LoaderIterator closed: 0 of 2")
    next(iterator)
    assert "at Position(run=0, epoch=0, step=0, rows=8, batches=1)" in repr(iterator)
    sync(iterator)
    assert repr(iterator).startswith("<LoaderIterator ended: 0 of 2")
    assert repr(loader) == "<Loader over arrays of 20 rows: at rest before run 1, epoch 1, step 2>"

    def fails() -> Iterator[np.ndarray]:
        raise KeyError
        yield

    failed = iter(ps.Loader(fails(), S))
    with pytest.raises(KeyError):
        next(failed)
    assert repr(failed).startswith("<LoaderIterator failed: 0 of 2")
    words = {
        "a one-shot iterator": map(full, range(1)),
        "an iterator": Asked(),
        "a factory": lambda: map(full, range(1)),
        "dataset of 2 batches": [full(0), full(1)],
    }
    for text, source in words.items():
        assert repr(ps.Loader(source, S)).startswith(f"<Loader over {text}: at rest"), source


# -- positions


def test_the_position_is_that_of_the_last_batch(S: NamedSharding) -> None:
    iterator = iter(ps.Loader([full(i) for i in range(4)], S, epochs=2))
    assert iterator.position is None
    for i in range(8):
        next(iterator)
        position = iterator.position
        assert position is not None
        assert (position.epoch, position.step, position.batches, position.rows, position.first_row) == (
            i // 4, i, i % 4 + 1, 8 * (i % 4 + 1), 8 * (i % 4)
        )  # fmt: skip
        assert position.ends_epoch is (i % 4 == 3)
    assert next(iterator, None) is None
    assert iterator.position is position


def test_batches_without_rows_in_common_have_a_position_all_the_same(R: NamedSharding) -> None:
    seen = sync(ps.Loader([{"a": np.ones(3), "b": np.ones((5, 2))}] * 2, R))
    assert places(seen) == [(0, 0, 1, 0, False), (0, 1, 2, 0, True)]


def test_the_rows_are_those_of_the_leaves_that_are_split(S: NamedSharding, R: NamedSharding) -> None:
    batch = {"x": np.ones((16, 2)), "table": np.ones((5, 2)), "scale": 2.0}
    loader = ps.Loader([batch, batch], {"x": S, "table": R, "scale": R})
    assert [p.rows for _, p in sync(loader)] == [16, 32]
    assert loader.stats().rows == 32


# -- with


def test_with_closes_every_run(S: NamedSharding) -> None:
    source = Asked(1000)
    with ps.Loader(source, S) as loader:
        first, second = iter(loader), iter(loader)
        next(first)
        next(second)
    assert loader._live() == []
    assert loader_threads() == []
    assert source.opened == source.closed == 2
    for iterator in (first, second):
        with pytest.raises(StopIteration):
            next(iterator)
    with contextlib.suppress(KeyError), loader:
        next(iter(loader))
        raise KeyError
    assert loader_threads() == []


def test_with_leaves_a_loader_that_can_be_read_again(S: NamedSharding) -> None:
    loader = ps.Loader([full(i) for i in range(3)], S)
    for _ in range(2):
        with loader:
            assert len(sync(loader)) == 3
        with loader:
            pass


def test_prefetch_is_a_loader(S: NamedSharding) -> None:
    loader = ps.prefetch([full(i) for i in range(3)], S, depth=1)
    assert type(loader) is ps.Loader
    assert len(sync(loader)) == 3


def test_without_a_sharding(consume: Consume) -> None:
    """The rows go over all devices; the same line is right on one."""
    seen = consume(ps.prefetch([np.arange(16, dtype=np.float32)] * 2))
    for batch in batches(seen):
        assert len(batch.devices()) == len(jax.devices())
        assert {shard.data.shape for shard in batch.addressable_shards} == {(16 // len(jax.devices()),)}
    one = consume(ps.prefetch([np.arange(5, dtype=np.float32)], SingleDeviceSharding(jax.devices()[0])))
    assert batches(one)[0].devices() == {jax.devices()[0]}


def test_numbers_may_be_numpys(S: NamedSharding) -> None:
    def draw(row: Any, rng: np.random.Generator) -> Any:
        return {"row": row, "u": np.float32(rng.random())}

    def read(number: Any) -> Any:
        loader = ps.Loader(
            np.arange(32, dtype=np.int32), S, batch_size=number(16), microbatches=number(2), epochs=number(2), seed=number(3),
            workers=number(2), depth=number(2), shuffle=True, transform=draw, device_transform=lambda batch, key: (batch, jax.random.key_data(key)),
        )  # fmt: skip
        seen = sync(loader)
        assert len(seen) == 4
        assert {type(value) for _, p in seen for value in (p.epoch, p.step, p.rows, p.batches, p.first_row)} == {int}
        return jax.tree.map(lambda leaf: np.asarray(leaf).tolist(), batches(seen))

    assert read(int) == read(np.int16) == read(np.uint64)


def test_two_threads_share_a_loader(S: NamedSharding) -> None:
    """`iter` and `next` from several threads: each batch goes to one of them."""
    iterator = iter(ps.Loader([full(i) for i in range(60)], S))
    got: list[list[float]] = [[], [], []]
    threads = [threading.Thread(target=lambda mine=mine: mine.extend(float(b[0]) for b in iterator)) for mine in got]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(sum(got, [])) == list(range(60))
