"""Benchmarks of a user's own source: every figure from a clock that the test owns, every kind of source, every way to be wrong."""

from __future__ import annotations

import contextlib
import functools
import gc
import html
import importlib
import io
import itertools
import json
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import msgspec
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import prefetchshard as ps
from prefetchshard.app import cli
from prefetchshard.app.bench.finding import find_factory
from prefetchshard.app.bench.progress import Progress
from prefetchshard.benchmarking.benchmark import parts_of
from prefetchshard.benchmarking.by_hand import Placing, read_batches
from prefetchshard.benchmarking.passes import ByHandPass, Counts, LoaderPass
from prefetchshard.benchmarking.report import Benchmark, BenchmarkRun
from prefetchshard.benchmarking.rounds import Round, Rounds
from prefetchshard.benchmarking.steps import FIRST_PRODUCTS, chain_on, make_step, products_for
from prefetchshard.measuring.verdict import Verdict
from prefetchshard.testing import ManualClock

SHORT = 0.02
ROWS = np.arange(64 * 3, dtype=np.float32).reshape(64, 3)


def batches(count: int = 10, rows: int = 16) -> Iterator[Any]:
    for number in range(count):
        yield {"x": np.full((rows, 3), number, np.float32)}


def endless() -> Iterator[Any]:
    while True:
        yield from batches()


async def asynchronous() -> Any:
    for batch in batches():
        yield batch


class Squares:
    """A dataset without anything else."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, row: int) -> Any:
        return {"x": np.full(3, row * row, np.float32)}


# -- figures


class FakePass:
    """Batches of 8 rows and 100 bytes; the first takes 5 s, each other one 2 s."""

    def __init__(self, clock: ManualClock, count: int) -> None:
        self.clock, self.left, self.counts, self.is_closed = clock, count, Counts(), False
        self.begins_epoch = False

    def __next__(self) -> int:
        if not self.left:
            self.clock.advance(50)  # what the end takes is in no figure
            raise StopIteration
        self.clock.advance(2 if self.counts.rows else 5)
        self.left -= 1
        self.counts = Counts(self.counts.rows + 8, self.counts.nbytes + 100)
        return self.left

    def stats(self) -> None:
        """There is no loader."""

    def recent(self) -> None:
        """Likewise."""

    def close(self) -> None:
        self.is_closed = True


def measured(count: int, seconds: float) -> tuple[Round, list[FakePass], list[float]]:
    clock, passes, told = ManualClock(), list[FakePass](), list[float]()

    def begin() -> FakePass:
        passes.append(FakePass(clock, count))
        return passes[-1]

    found = Rounds(begin, lambda _: clock.advance(1), clock).run(seconds, told.append)
    assert all(one.is_closed for one in passes)
    return found, passes, told


def test_the_first_batch_of_a_pass_is_not_counted() -> None:
    found, passes, told = measured(count=1000, seconds=9)
    assert len(passes) == 1
    assert found == Round(batches=3, rows=24, nbytes=300, seconds=9, waited_seconds=6, step_seconds=3, passes=1, first_batch_seconds=5)
    assert told == [3, 6]


def test_a_source_that_ends_is_begun_anew() -> None:
    found, passes, _ = measured(count=3, seconds=12)
    assert (len(passes), found.passes, found.batches, found.rows) == (1, 1, 2, 16)  # four times the seconds are over
    found, passes, _ = measured(count=11, seconds=60)
    assert (len(passes), found.batches, found.seconds, found.waited_seconds) == (2, 20, 60, 40)


def test_a_source_of_one_batch_is_counted_with_its_beginning() -> None:
    found, passes, _ = measured(count=1, seconds=30)
    assert (found.has_steady, found.batches, found.rows, found.seconds, found.waited_seconds) == (
        False,
        len(passes),
        8 * len(passes),
        6 * len(passes),
        5 * len(passes),
    )


class FakeEpochs(FakePass):
    """The same in epochs of some batches, in one pass; the first so many batches of each take 5 s."""

    def __init__(self, clock: ManualClock, length: int, slow: int = 1) -> None:
        super().__init__(clock, 10**6)
        self.length, self.slow, self.taken = length, slow, 0

    def __next__(self) -> int:
        row = self.taken % self.length
        self.begins_epoch, self.taken = row == 0, self.taken + 1
        self.clock.advance(5 if row < self.slow else 2)
        self.counts = Counts(self.counts.rows + 8, self.counts.nbytes + 100)
        return row


def in_epochs(length: int, seconds: float, slow: int = 1) -> Round:
    clock = ManualClock()
    return Rounds(lambda: FakeEpochs(clock, length, slow), lambda _: clock.advance(1), clock, first_batches=slow).run(
        seconds, lambda _: None
    )


def test_the_first_batch_of_a_later_epoch_is_not_counted() -> None:
    found = in_epochs(length=4, seconds=21)
    assert (found.batches, found.rows, found.nbytes, found.seconds, found.waited_seconds) == (7, 56, 700, 21, 14)
    assert (found.epochs, found.epochs_seconds, found.first_batch_seconds) == (2, 10, 5)


def test_as_many_first_batches_are_left_out_as_there_are_processes() -> None:
    found = in_epochs(length=5, seconds=12, slow=3)
    assert (found.batches, found.seconds, found.waited_seconds, found.epochs) == (4, 12, 8, 1)
    assert found.epochs_seconds == 15, "of the later epoch, not of the pass"
    found = in_epochs(length=1000, seconds=1, slow=3)
    assert (found.batches, found.seconds, found.epochs) == (1, 3, 0)  # one at least, however short the time


@pytest.mark.parametrize(("length", "slow"), [(1, 1), (2, 3)])
def test_epochs_that_only_begin_come_to_an_end(length: int, slow: int) -> None:
    found = in_epochs(length, seconds=12, slow=slow)
    assert not found.has_steady
    assert found.batches * 6 == found.seconds
    assert found.rows == 8 * found.batches


def test_epochs_that_mostly_begin_come_to_an_end() -> None:
    found = in_epochs(length=3, seconds=2, slow=2)
    assert (found.batches, found.seconds) == (1, 3)
    found = in_epochs(length=2, seconds=100)  # 6 s to begin one, and then 3 s that count
    assert (found.batches, found.seconds) == (34, 102)
    assert in_epochs(length=2, seconds=0.5).batches == 1
    found = in_epochs(length=10, seconds=10, slow=9)  # 54 s for each 3 that count: it ends after 40
    assert (found.batches, found.seconds, found.epochs) == (1, 3, 1)


def test_a_source_without_a_batch_is_refused() -> None:
    with pytest.raises(ps.BatchError, match="no batch"):
        measured(count=0, seconds=1)


def a_round(batches: int, seconds: float, waited: float = 0.0, first: float = 0.25) -> Round:
    return Round(
        batches=batches,
        rows=8 * batches,
        nbytes=1_000_000 * batches,
        seconds=seconds,
        waited_seconds=waited,
        step_seconds=seconds - waited,
        passes=1,
        first_batch_seconds=first,
    )


def a_run(name: str, *rounds: Round) -> BenchmarkRun:
    stats: Any = SimpleNamespace(verdict=Verdict("consumer", 0.0, 0.0, ""), to_dict=dict) if name in ("loader", "step") else None
    return BenchmarkRun(name=name, rounds=rounds, stats=stats)


def test_the_rates_of_a_run() -> None:
    run = a_run("by_hand", a_round(10, 2.0, 1.0, first=0.5), a_round(30, 2.0, 2.0))
    assert (run.batches, run.seconds, run.batches_per_second, run.rows_per_second) == (40, 4.0, 10.0, 80.0)
    assert (run.bytes_per_second, run.seconds_per_batch, run.waited_share, run.first_batch_seconds) == (1e7, 0.1, 0.75, 0.5)
    assert run.to_dict()["rounds_batches_per_second"] == [5.0, 15.0]
    assert str(run).split()[-7:] == ["hand", "10.0", "80.0", "10.0", "100.000", "75.0", "%"]


def test_the_ratio_is_of_batches_a_second() -> None:
    runs = {"loader": a_run("loader", a_round(20, 2.0), a_round(60, 2.0)), "by_hand": a_run("by_hand", a_round(10, 2.0), a_round(30, 2.0))}
    found = Benchmark(source="a test", runs=runs)
    assert found.ratio == 2.0
    text = str(found)
    assert text.startswith("Bound by the consumer: ")
    assert "2.00 times as fast as the thread and queue (2.00, 2.00 in each of 2 rounds)" in text
    assert "the loader 250.0 ms, thread and queue by hand 250.0 ms" in text
    assert Benchmark(source="a test", runs={"loader": runs["loader"]}).ratio is None
    with pytest.raises(ps.ConfigError, match="no loader was measured"):
        _ = Benchmark(source="a test", runs={}).verdict


def test_what_beginning_an_epoch_costs_is_said() -> None:
    def a_text(*waits: float) -> str:
        rounds = [msgspec.structs.replace(a_round(10, 1.0), epochs=2, epochs_seconds=wait) for wait in waits]
        runs = {"source": a_run("source", a_round(10, 1.0)), "loader": a_run("loader", *rounds), "by_hand": a_run("by_hand", *rounds)}
        assert runs["source"].to_dict()["next_epoch_seconds"] is None
        return str(Benchmark(source="a test", runs=runs))

    said = "not in these figures, but in the verdict: the wait for a later epoch to begin (the loader 1500.0 ms, thread and queue by hand 1500.0 ms)"
    assert said in a_text(2.0, 4.0)
    assert "later epoch" not in a_text(0.01, 0.01)


def test_the_advice_where_epochs_begin_for_long() -> None:
    measured = ps.benchmark(lambda: batches(100), sharding=P(), seconds=SHORT)

    def advice(epochs_seconds: float, waited: float, epochs: int = 2, bound: Any = "reading") -> str:
        one = msgspec.structs.replace(a_round(10, 1.0, waited), epochs=epochs, epochs_seconds=epochs_seconds)
        stats: Any = SimpleNamespace(verdict=Verdict(bound, 0.9, 9.0, "something else"))
        run = BenchmarkRun(name="loader", rounds=(one,), stats=stats)
        return msgspec.structs.replace(measured, runs={"loader": run}).verdict.advice

    assert advice(10.0, 0.5).startswith("most of it is for a later epoch to begin (5.0 s each time): keep what that needs")
    assert advice(0.3, 0.5) == advice(0.01, 0.001) == advice(0.0, 0.5, epochs=0) == "something else"
    assert advice(10.0, 0.5, bound="lock") == "something else"


def test_the_start_of_a_loader_is_not_in_its_statistics() -> None:
    """Else a short measurement is bound by start-up."""
    one = LoaderPass(ps.Loader(lambda: batches(4), P("data"), epochs=2))
    found: list[bool] = []
    next(one)
    assert (one.begins_epoch, one.stats().batches, one.counts.rows) == (True, 1, 16)
    assert one.stats().start_up_seconds > 0
    with contextlib.suppress(StopIteration):
        while True:
            next(one)
            found.append(one.begins_epoch)
    assert found == [False] * 3 + [True] + [False] * 3
    assert (one.stats().batches, one.stats().start_up_seconds, one.counts.rows) == (7, 0.0, 128)
    one.close()


def test_as_many_products_as_the_step_is_long() -> None:
    clock = ManualClock()
    found = products_for(0.5, lambda products: clock.advance(0.1 + 0.01 * products), clock)
    assert 0.1 + 0.01 * found == pytest.approx(0.5)
    assert products_for(0.01, lambda products: clock.advance(0.1 + 0.01 * products), clock) == 1
    assert products_for(0.5, lambda _: None, clock) == FIRST_PRODUCTS  # a clock that does not move


def test_the_devices_compute_a_chain() -> None:
    chain = chain_on(jax.local_devices(), side=8)
    (found,) = {float(chain(products)[0, 0]) for products in (0, 1, 5)}  # each product of these matrices is the matrix
    assert found == 1 / 8


def test_what_the_step_is() -> None:
    device: Any = jax.devices()[0]
    assert make_step(0.0, device, ManualClock()).kind == ""
    step = make_step(0.001, device, ManualClock())
    assert ("sleep" if device.platform == "cpu" else "matrix products") in step.kind
    step.run(None)


# -- by hand


def arrays_of(loader: ps.Loader[Any], count: int) -> list[np.ndarray]:
    """The leaf x, or the batch, of the first batches that are read by hand and put on devices."""
    parts = parts_of(loader)
    place, found = Placing(parts), list[np.ndarray]()
    with contextlib.closing(read_batches(parts)) as read:
        for batch, _ in zip(read, range(count), strict=False):
            assert (batch.rows, batch.nbytes) == (16, 16 * 3 * 4)
            placed = place(batch)
            found.append(np.asarray(placed["x"] if isinstance(placed, dict) else placed))
    return found


@pytest.mark.parametrize(
    ("source", "options"),
    [
        (ROWS, {"batch_size": 16}),
        ({"x": ROWS}, {"batch_size": 16, "transform": lambda row: {"x": row["x"] + 1}}),
        (list(ROWS), {"batch_size": 16, "collate": np.stack}),
        (Squares(), {"batch_size": 16}),
        ([batch["x"] for batch in batches()], {}),
        (lambda: batches(), {}),
        (ps.rebatch(list(batches(12, 4)), 16), {}),
        (lambda: iter(ROWS), {"batch_size": 16}),
        (asynchronous, {}),
    ],
)
def test_what_is_read_by_hand_is_what_a_loader_gives(source: Any, options: dict[str, Any]) -> None:
    by_hand = arrays_of(ps.Loader(source, P("data"), **options), 2)
    with ps.Loader(source, P("data"), **options) as loader:
        given = [np.asarray(batch["x"] if isinstance(batch, dict) else batch) for batch, _ in zip(loader, range(2), strict=False)]
    np.testing.assert_array_equal(by_hand, given)


def test_by_hand_a_buffer_of_the_source_is_copied() -> None:
    buffer = np.zeros((16, 3), np.float32)

    def reused() -> Iterator[Any]:
        for number in range(4):
            buffer[:] = number
            yield buffer

    parts = parts_of(ps.Loader(reused, P("data")))
    place = Placing(parts)
    with contextlib.closing(read_batches(parts)) as read:
        placed = [place(next(read)) for _ in range(4)]
    assert [float(batch[0, 0]) for batch in placed] == [0, 1, 2, 3]


def test_by_hand_leaves_may_stay_on_the_host() -> None:
    parts = parts_of(ps.Loader([{"x": ROWS[0], "name": "a"}] * 16, P("data"), host="name", batch_size=16))
    with contextlib.closing(read_batches(parts)) as read:
        placed = Placing(parts)(next(read))
    assert placed["name"].tolist() == ["a"] * 16
    assert isinstance(placed["x"], jax.Array)


def test_by_hand_a_callable_may_say_what_stays_on_the_host() -> None:
    def rule(path: str, shape: tuple[int, ...], dtype: Any) -> Any:
        return ps.HOST if path == "name" else P("data")

    examples = [{"x": ROWS[0], "name": "a"}] * 16
    found = ps.benchmark(lambda: examples, sharding=rule, batch_size=16, seconds=SHORT)
    assert found.runs["source"].bytes_per_second == pytest.approx(16 * 3 * 4 * found.runs["source"].batches_per_second)


def test_what_was_measured_is_let_go_of() -> None:
    """Else several copies of a large source would lie in memory at once."""
    alive: list[int] = []
    made: list[weakref.ref[Any]] = []

    def make() -> Any:
        gc.collect()
        alive.append(sum(ref() is not None for ref in made))
        dataset = Squares()
        made.append(weakref.ref(dataset))
        return dataset

    ps.benchmark(make, batch_size=16, seconds=SHORT, step_ms=1)
    assert alive == [0, 0, 1, 0]


def test_by_hand_rows_and_bytes_are_counted_as_a_loader_does() -> None:
    """A scalar has no rows, and devices hold 32 bits."""
    found = ps.benchmark(lambda: [{"x": np.zeros((16, 3)), "epoch": 3}] * 8, seconds=SHORT, sharding=lambda path, shape, dtype: P())
    counted = {
        name: (one.rows_per_second / one.batches_per_second, one.bytes_per_second / one.batches_per_second)
        for name, one in found.runs.items()
    }
    assert counted == dict.fromkeys(("source", "loader", "by_hand"), pytest.approx((16, 16 * 3 * 4 + 4)))


def test_by_hand_the_thread_ends_while_it_waits_for_room() -> None:
    one = ByHandPass(parts_of(ps.Loader(endless, P("data"))))
    next(one)
    one.close()
    assert not [thread for thread in threading.enumerate() if "by-hand" in thread.name]


# -- all of it


SOURCES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "a generator": (batches, {}),
    "an endless generator": (endless, {}),
    "an async generator": (asynchronous, {}),
    "a list of batches": (lambda: list(batches()), {}),
    "a list of examples": (lambda: list(ROWS), {"batch_size": 16, "workers": 2}),
    "arrays": (lambda: {"x": ROWS}, {"batch_size": ps.PerDevice(1), "sharding": P("data", None)}),
    "a dataset": (Squares, {"batch_size": 16}),
    "an iterator of one batch": (lambda: batches(1), {}),
    "a loader": (lambda: ps.Loader(ROWS, P("data"), batch_size=16, shuffle=True), {}),
    "a loader of one batch": (lambda: ps.Loader(ROWS, P("data"), batch_size=64), {}),
    "a loader over a generator": (lambda: ps.prefetch(batches(), P("data")), {}),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_every_kind_of_source(kind: str) -> None:
    make, options = SOURCES[kind]
    told: list[tuple[str, float]] = []
    found = ps.benchmark(make, seconds=SHORT, step_ms=1, progress=lambda what, share: told.append((what, share)), **options)
    assert list(found.runs) == ["source", "loader", "by_hand", "step"]
    assert all(run.batches > 0 and run.rows_per_second > 0 and run.bytes_per_second > 0 for run in found.runs.values())
    assert [len(run.rounds) for run in found.runs.values()] == [1, 2, 2, 1]
    assert found.stats is found.runs["step"].stats
    assert str(found).startswith(str(found.verdict))
    assert repr(found) == str(found)
    assert {what for what, _ in told} >= {"the source alone, one thread", "the loader beside a step"}
    assert all(0 <= share <= 1 for _, share in told)
    assert json.loads(json.dumps(found.to_dict()))["verdict"]["bound"] == found.verdict.bound
    assert [note for note in found.notes if "an epoch is over before its start is" not in note] == []
    assert bool(found.notes) == (kind in ("a loader of one batch", "an iterator of one batch"))


def test_arrays_on_the_devices_have_no_way_by_hand() -> None:
    found = ps.benchmark(lambda: ps.OnDevice({"x": ROWS}), batch_size=16, seconds=SHORT)
    assert list(found.runs) == ["loader"]
    assert found.ratio is None
    assert "no step was measured" in str(found)
    assert "stay on the devices" in str(found)


def test_what_is_left_out_by_hand_is_said() -> None:
    found = ps.benchmark(
        lambda: ps.Loader(ROWS, P("data"), batch_size=16, device_transform=lambda batch: batch, remainder="pad"), seconds=SHORT
    )
    assert "the thread and queue do without device_transform and pad" in str(found)


def test_examples_taken_for_batches_are_pointed_out() -> None:
    said = "each item of the dataset was taken for a whole batch"
    assert said in str(ps.benchmark(Squares, sharding=P(), seconds=SHORT))
    assert said not in str(ps.benchmark(Squares, batch_size=16, seconds=SHORT))


@pytest.mark.parametrize(("keeps", "is_said"), [(False, True), (True, False)])
def test_processes_that_are_started_for_each_epoch_are_pointed_out(keeps: bool, is_said: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    left_out: list[int] = []

    class Seen(Rounds):
        def __init__(self, begin: Any, step: Any, clock: Any, first_batches: int) -> None:
            left_out.append(first_batches)
            super().__init__(begin, step, clock, first_batches)

    monkeypatch.setattr("prefetchshard.benchmarking.benchmark.Rounds", Seen)

    class WithProcesses:
        num_workers, persistent_workers = 2, keeps

        def __iter__(self) -> Iterator[Any]:
            return batches()

    said = "the source starts 2 worker processes anew for each epoch: persistent_workers=True keeps"
    assert (said in str(ps.benchmark(WithProcesses, seconds=SHORT))) == is_said
    assert set(left_out) == {2}, "each process has a first batch"


@pytest.mark.ecosystem
def test_a_torch_data_loader() -> None:
    torch: Any = pytest.importorskip("torch")
    data: Any = importlib.import_module("torch.utils.data")
    tensors = data.TensorDataset(torch.zeros(64, 3), torch.zeros(64, dtype=torch.int64))
    found = ps.benchmark(lambda: data.DataLoader(tensors, batch_size=16), seconds=SHORT, step_ms=1)
    assert list(found.runs) == ["source", "loader", "by_hand", "step"]
    for run in found.runs.values():
        assert run.bytes_per_second == pytest.approx(16 * (3 * 4 + 4) * run.batches_per_second)
    found = ps.benchmark(lambda: tensors, batch_size=16, seconds=SHORT)
    assert found.runs["loader"].batches > 0
    found = ps.benchmark(lambda: data.DataLoader(tensors, batch_size=None), batch_size=16, seconds=SHORT)
    assert found.runs["loader"].batches > 0
    with pytest.raises(ps.ConfigError, match="batches already"):
        ps.benchmark(lambda: data.DataLoader(tensors, batch_size=16), batch_size=16, seconds=SHORT)


@pytest.mark.ecosystem
def test_a_grain_pipeline() -> None:
    grain: Any = pytest.importorskip("grain")
    found = ps.benchmark(lambda: grain.MapDataset.source(list(ROWS)).to_iter_dataset().batch(16), seconds=SHORT)
    assert found.runs["by_hand"].batches > 0
    found = ps.benchmark(lambda: grain.MapDataset.source(list(ROWS)), batch_size=16, seconds=SHORT)
    assert found.runs["loader"].batches > 0
    python: Any = importlib.import_module("grain.python")

    def loader() -> Any:
        sampler = python.IndexSampler(64, shuffle=True, seed=0, num_epochs=1)
        return python.DataLoader(data_source=list(ROWS), sampler=sampler, operations=[python.Batch(16)], worker_count=0)

    found = ps.benchmark(loader, seconds=SHORT)
    assert found.runs["loader"].rows_per_second == pytest.approx(16 * found.runs["loader"].batches_per_second)


@pytest.mark.ecosystem
def test_a_table_of_datasets() -> None:
    datasets: Any = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"x": ROWS}).with_format("numpy")
    found = ps.benchmark(lambda: table, batch_size=16, seconds=SHORT)
    assert found.runs["loader"].batches > 0


@pytest.mark.parametrize(
    ("make", "options", "error", "said"),
    [
        (list, {}, ps.BatchError, "the source gives no batch"),
        (lambda: iter([]), {}, ps.BatchError, "the source gives no batch"),
        (lambda: batches(0), {"batch_size": 8}, ps.BatchError, "no batch of 8 rows"),
        (lambda: None, {}, ps.ConfigError, "is a `return` missing"),
        (lambda: 5, {}, ps.ConfigError, "is no source"),
        (lambda: Squares, {}, ps.ConfigError, "returned the class Squares, not a source: call it, return Squares(...)"),
        (ROWS, {}, ps.ConfigError, "a function that returns a source"),
        (lambda: ps.Loader(ROWS, batch_size=8), {"batch_size": 8, "workers": 2}, ps.ConfigError, "leave batch_size=, workers= out"),
        (batches, {"seconds": 0}, ps.ConfigError, "seconds=0"),
        (batches, {"step_ms": -1}, ps.ConfigError, "step_ms=-1"),
        (functools.partial(next, itertools.repeat(batches())), {}, ps.UsedUpError, "must make a new iterator each time"),
    ],
)
def test_what_cannot_be_measured_is_said(make: Any, options: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=re.escape(said)):
        ps.benchmark(make, **{"seconds": SHORT, **options})


def test_what_the_source_raises_is_raised() -> None:
    def broken() -> Iterator[Any]:
        yield from batches(3)
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        ps.benchmark(broken, seconds=5)


# -- the command

MODULE = """
import numpy as np
import prefetchshard as ps

def batches():
    for number in range(10):
        yield {"x": np.full((16, 3), number, np.float32)}

def loader():
    return ps.Loader({"x": np.zeros((64, 3), np.float32)}, batch_size=16)

def examples():
    print("reading")
    return np.zeros((64, 3), np.float32)

def broken():
    raise ValueError("no such\\nbucket")

def breaks():
    yield np.zeros((16, 3))
    raise OSError("gone")

def nothing():
    pass

def empty():
    return []

def needs(folder):
    pass

number = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with a module of factories in it; what is imported from there is forgotten."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    importlib.invalidate_caches()
    (tmp_path / "benchmarked_data.py").write_text(MODULE)
    (tmp_path / "wants_more.py").write_text("import no_such_package")
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]


def test_the_command_prints_a_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "benchmarked_data:batches", "--seconds", "0.02", "--sharding", "data,None"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("Bound by ")
    assert "an iterator" in shown.out or "a one-shot iterator, made anew when it ends" in shown.out
    assert shown.err.splitlines()[0] == "measuring the source alone, one thread"


def test_the_command_prints_one_json_object(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "benchmarked_data.py:examples", "--batch-size", "16", "--workers", "2", "--step-ms", "1"]
    assert cli.main([*arguments, "--seconds", "0.02", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["runs"]) == ["source", "loader", "by_hand", "step"]
    assert found["runs"]["step"]["stats"]["workers"] == 2
    assert found["step_seconds"] == 0.001


def test_the_command_writes_a_report(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "benchmarked_data:batches", "--seconds", "0.02", "--json", "--report", "out.html"]) == 0
    shown = capsys.readouterr()
    verdict = json.loads(shown.out)["verdict"]["text"]
    page = (folder / "out.html").read_text()
    assert f"<h1>{html.escape(verdict)}</h1>" in page
    assert "<title>benchmarked_data:batches: prefetchshard bench</title>" in page
    assert shown.err.splitlines()[-1] == "wrote out.html"


def test_a_report_that_cannot_be_written_is_said(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("prefetchshard.base.files.os.replace", fail)
    assert cli.main(["bench", "benchmarked_data:batches", "--seconds", "0.02", "--report", "out.html"]) == 2
    shown = capsys.readouterr()
    assert shown.out.startswith("Bound by ")  # what was measured is not lost
    assert shown.err.splitlines()[-1].endswith("--report out.html: No space left on device")
    assert not [*folder.glob("out*"), *folder.glob("*.part")]


def test_a_report_is_written_where_the_command_was_given(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some programs go to a folder of their own when they are imported."""
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder)  # to come back
    (folder / "going.py").write_text("import os\nfrom benchmarked_data import batches\nos.chdir('elsewhere')\n")
    assert cli.main(["bench", "going:batches", "--seconds", "0.02", "--report", "out.html"]) == 0
    assert (folder / "out.html").is_file()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["batches"], "'batches': MODULE:FACTORY, as in my_data:batches or my_data.py:batches"),
        (["no_such_module:batches"], "no module named 'no_such_module', neither here nor installed"),
        (["no_such_file.py:batches"], "there is no file no_such_file.py"),
        (["benchmarked_data:other"], "benchmarked_data:other: benchmarked_data has no 'other'"),
        (["benchmarked_data:number"], "number is no function (int)"),
        (["benchmarked_data:broken"], "benchmarked_data:broken raised ValueError: no such bucket (benchmarked_data.py, line 17)"),
        (["benchmarked_data:breaks"], "benchmarked_data:breaks raised OSError: gone (benchmarked_data.py, line 21)"),
        (["benchmarked_data:needs"], "make is called without arguments, and cannot be: missing a required argument: 'folder'"),
        (["benchmarked_data:nothing"], "the function returned None"),
        (["benchmarked_data:empty"], "the source gives no batch"),
        (["benchmarked_data:loader", "--batch-size", "8"], "whose own settings count: leave batch_size= out"),
        (
            ["wants_more:batches"],
            "wants_more:batches raised ModuleNotFoundError: No module named 'no_such_package' (wants_more.py, line 1)",
        ),
    ],
)
def test_what_the_command_cannot_do_is_said_in_one_line(
    arguments: list[str], said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", *arguments, "--seconds", "0.02"]) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("prefetchshard: error: ")
    assert said in line


def test_a_method_of_a_class_is_found(folder: Path) -> None:
    (folder / "with_class.py").write_text("class Data:\n    @staticmethod\n    def make():\n        return 5\n")
    assert find_factory("with_class:Data.make")() == 5
    assert find_factory("with_class.py:Data.make")() == 5


def test_a_file_with_the_name_of_a_module_is_refused(folder: Path) -> None:
    (folder / "json.py").write_text("def make():\n    return 5\n")
    with pytest.raises(ps.ConfigError, match="another module is named 'json' already; rename the file"):
        find_factory("json.py:make")


def test_a_file_that_cannot_be_run_leaves_no_module(folder: Path) -> None:
    with pytest.raises(ModuleNotFoundError):
        find_factory("wants_more.py:make")
    assert "wants_more" not in sys.modules


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_one_line_on_a_terminal_and_is_taken_away() -> None:
    stream = Terminal()
    with Progress(stream) as progress:
        progress.tell("the loader", 0.0)
        progress.tell("the loader", 0.5)
    assert "\n" not in stream.getvalue()
    assert "[##########..........]  50 %  the loader" in stream.getvalue()
    assert stream.getvalue().endswith("\r\x1b[K")


def test_progress_is_a_line_for_each_measurement_elsewhere() -> None:
    stream = io.StringIO()
    with Progress(stream) as progress:
        for share in (0.0, 0.3, 0.6):
            progress.tell("the loader", share)
        progress.tell("by hand", 0.9)
    assert stream.getvalue() == "measuring the loader\nmeasuring by hand\n"
