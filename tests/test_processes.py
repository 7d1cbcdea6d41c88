"""Worker processes under the reader threads: the same batches, the same errors, and nothing left of them."""

from __future__ import annotations

import collections
import dataclasses
import functools
import gc
import math
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import prefetchshard as ps
import process_sources as sources
from prefetchshard.ordering.epoch_order import seed_sequence
from prefetchshard.processes import child, pickling, pool, worker_process
from prefetchshard.queues.bounded_queue import BoundedQueue
from prefetchshard.reading import process_worker
from prefetchshard.reading.row_dealer import RowDealer
from support import HANG_SECONDS, run_python

TWO = ps.Processes(2)


def children() -> set[int]:
    """The worker processes of this one that live, or were not waited for."""
    command = ["ps", "-axww", "-o", "pid=", "-o", "ppid=", "-o", "args="]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    rows = [line.split(None, 2) for line in lines]
    mine = [(int(pid), "".join(args)) for pid, parent, *args in rows if int(parent) == os.getpid()]
    return {pid for pid, args in mine if "child.py" in args or "defunct" in args}


@pytest.fixture(autouse=True)
def no_process_left(no_thread_left: None) -> Generator[None]:
    yield
    deadline = time.monotonic() + HANG_SECONDS
    while (left := children()) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.02)
    assert not left


@pytest.fixture(autouse=True)
def patient_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """None is ended by force because the machine is busy; a test of that says how soon."""
    monkeypatch.setattr(worker_process, "BUSY_SECONDS", HANG_SECONDS)
    monkeypatch.setattr(worker_process, "IDLE_SECONDS", HANG_SECONDS)
    monkeypatch.setattr(worker_process, "DEATH_SECONDS", HANG_SECONDS)


@pytest.fixture
def only_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """No batch is made by the parent while the processes start."""
    monkeypatch.setattr(worker_process, "MAY_WORK_BEFORE", False)


def same(one: Any, other: Any) -> None:
    """Both are the same, to the bit and to the type."""
    leaves, tree = jax.tree.flatten(one)
    others, other_tree = jax.tree.flatten(other)
    assert tree == other_tree
    for a, b in zip(leaves, others, strict=True):
        assert type(a) is type(b)
        if isinstance(a, (np.ndarray, jax.Array)):
            left, right = np.asarray(a), np.asarray(b)
            assert (left.dtype, left.shape) == (right.dtype, right.shape)
            assert left.tolist() == right.tolist() if left.dtype == object else left.tobytes() == right.tobytes()
        else:
            assert a == b


def taken(make: Callable[[], Any], workers: Any, options: dict[str, Any]) -> list[Any]:
    with ps.Loader(make(), P("data"), workers=workers, **options) as loader:
        return list(loader)


def arrays() -> Any:
    return {"x": np.arange(120.0, dtype=np.float32).reshape(40, 3), "row": np.arange(40, dtype=np.int32)}


def list_of_examples() -> Any:
    return [{"x": np.full((2, 300), row, np.float32), "row": np.int32(row)} for row in range(40)]


class AsyncRows:
    async def __aiter__(self) -> AsyncIterator[Any]:
        for item in sources.pulled():
            yield item


CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "plain": (sources.Rows, {}),
    "in place": (sources.Rows, {"transform": sources.double, "epochs": 2}),
    "a list in place": (list_of_examples, {"transform": sources.double, "epochs": 2}),
    "rng": (sources.Rows, {"transform": sources.with_rng, "shuffle": True, "seed": 2**70 + 3, "epochs": 2}),
    "padded": (functools.partial(sources.Rows, 37), {"remainder": "pad", "shuffle": True}),
    "dropped": (functools.partial(sources.Many, 37), {"shuffle": True, "epochs": 3}),
    "tuple": (functools.partial(sources.Rows, 40, "tuple"), {}),
    "named tuple": (functools.partial(sources.Rows, 40, "pair"), {}),
    "array": (functools.partial(sources.Rows, 40, "array"), {"narrow": "error"}),
    "numbers": (functools.partial(sources.Rows, 40, "numbers"), {}),
    "fortran": (functools.partial(sources.Rows, 40, "fortran"), {}),
    "mixed": (functools.partial(sources.Rows, 40, "mixed"), {}),
    "one buffer": (functools.partial(sources.Rows, 40, "buffer"), {}),
    "host": (functools.partial(sources.Rows, 37, "text"), {"host": ("name", "more", "odd"), "remainder": "pad"}),
    "host leaves": (sources.Rows, {"host": ("x", "row", "flag", "n")}),
    "collate": (sources.Rows, {"transform": sources.ragged, "collate": sources.pad, "shuffle": True}),
    "collate, keep": (functools.partial(sources.Rows, 36), {"transform": sources.ragged, "collate": sources.pad, "remainder": "pad"}),
    "collate, host": (sources.Rows, {"collate": sources.with_names, "host": ("notes",)}),
    "arrays": (arrays, {"transform": sources.double, "shuffle": True, "epochs": 2}),
    "arrays, collate": (arrays, {"transform": sources.double, "collate": sources.pad}),
    "arrays alone": (arrays, {}),
    "items": (sources.pulled, {"transform": sources.with_rng}),
    "items, padded": (functools.partial(sources.pulled, "dict", 37), {"transform": sources.double, "remainder": "pad"}),
    "items, collate": (functools.partial(sources.pulled, "dict", 37), {"transform": sources.ragged, "collate": sources.pad}),
    "items, text": (functools.partial(sources.pulled, "text"), {"transform": sources.double, "host": ("name", "more", "odd")}),
    "factory": (lambda: sources.pulled, {"transform": sources.double, "epochs": 2}),
    "async": (AsyncRows, {"transform": sources.double}),
    "batches": (sources.batches, {"batch_size": None, "transform": sources.negate, "host": ("name",)}),
    "list of batches": (lambda: list(sources.batches()), {"batch_size": None, "transform": sources.negate, "host": ("name",)}),
    "per worker": (lambda: ps.per_worker(sources.Rows), {"transform": sources.double}),
}


@pytest.mark.usefixtures("only_processes")
@pytest.mark.parametrize("name", CASES)
def test_the_batches_are_those_of_threads(name: str) -> None:
    make, options = CASES[name]
    options = {"batch_size": 8, **options}
    same(taken(make, TWO, options), taken(make, 1, options))


def test_batches_made_before_the_processes_are_ready_are_the_same() -> None:
    options = {"batch_size": 8, "epochs": 40, "transform": sources.with_rng, "shuffle": True}
    same(taken(sources.Rows, TWO, options), taken(sources.Rows, 1, options))


def test_the_first_batches_do_not_wait_for_the_processes() -> None:
    """Here they never become ready."""
    batches = list(ps.Loader(sources.NotReady(), P("data"), batch_size=8, workers=TWO))
    assert [int(batch["row"][0]) for batch in batches] == [0, 8, 16]


@pytest.mark.usefixtures("only_processes")
def test_a_state_of_threads_goes_on_in_processes() -> None:
    def loader(workers: Any, state: ps.LoaderState | None = None) -> ps.Loader:
        return ps.Loader(
            sources.Rows(), P("data"), batch_size=8, shuffle=True, epochs=2, transform=sources.with_rng, workers=workers, state=state
        )

    whole = list(loader(1))
    iterator = iter(loader(2))
    first = [next(iterator) for _ in range(3)]
    state = iterator.state()
    iterator.close()
    same([*first, *loader(TWO, state)], whole)


@pytest.mark.usefixtures("only_processes")
def test_processes_import_no_jax_and_share_large_arrays() -> None:
    batches = list(ps.Loader(sources.Where(4000), P("data"), batch_size=1000, workers=TWO))
    assert {int(value) for batch in batches for value in batch["jax"]} == {0}
    assert {int(value) for batch in batches for value in batch["owns"]} == {0}
    assert os.getpid() not in {int(value) for batch in batches for value in batch["pid"]}


@pytest.mark.usefixtures("only_processes")
def test_memory_mapped_arrays_travel_as_their_file(tmp_path: Path) -> None:
    array = np.memmap(tmp_path / "rows", np.float32, "w+", shape=(40, 6))
    array[:] = np.arange(240).reshape(40, 6)
    source = sources.Mapped(array)
    assert len(pickling._pickle(pickling._plain_pickler(), source)[0]) < 2000
    (batch,) = ps.Loader(source, P(), batch_size=16, workers=ps.Processes(1))
    assert (np.asarray(batch["maps"]) == 3).all()
    for key, rows in (("a", array), ("b", array[10:, ::2]), ("c", array[5:])):
        assert np.array_equal(batch[key], rows[:16])


@pytest.mark.usefixtures("only_processes")
def test_epochs_reach_the_processes() -> None:
    batches = list(ps.Loader(sources.Epochs(16), P("data"), batch_size=8, epochs=3, workers=TWO))
    assert [set(np.asarray(batch["epoch"]).tolist()) for batch in batches] == [{0}, {0}, {1}, {1}, {2}, {2}]
    by_hand = sources.Epochs(16)
    by_hand.set_epoch(5)
    batches = list(ps.Loader(by_hand, P("data"), batch_size=8, epochs=2, workers=TWO))
    assert [int(batch["epoch"][0]) for batch in batches] == [5, 5, 6, 6]
    own = list(ps.Loader(ps.per_worker(functools.partial(sources.Epochs, 16)), P("data"), batch_size=8, epochs=2, workers=TWO))
    assert [int(batch["epoch"][0]) for batch in own] == [0, 0, 1, 1]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many questions each process had to answer, whenever it was asked one more."""
    counts: list[int] = []
    ask = worker_process.WorkerProcess.ask

    def counted(process: worker_process.WorkerProcess, *args: Any) -> None:
        ask(process, *args)
        counts.append(len(process._open))

    monkeypatch.setattr(worker_process.WorkerProcess, "ask", counted)
    monkeypatch.setattr(process_worker, "QUICK_SECONDS", math.inf)
    return counts


def growing() -> Any:
    return {"x": np.arange(1 << 20, dtype=np.float32).reshape(512, -1), "row": np.arange(512, dtype=np.int32)}


@pytest.mark.usefixtures("only_processes")
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (functools.partial(sources.Epochs, 88), {"epochs": 3}),
        (functools.partial(sources.Rows, 800, "text"), {"host": ("name", "more", "odd")}),
        (functools.partial(sources.Rows, 800), {"transform": sources.ragged, "collate": sources.pad, "shuffle": True}),
        (growing, {"transform": sources.double, "shuffle": True}),
        (functools.partial(sources.Rows, 800, "row and long text"), {"host": ("text",), "batch_size": 40}),
        (
            lambda: [batch for _ in range(20) for batch in sources.batches()],
            {"batch_size": None, "transform": sources.negate, "host": ("name",)},
        ),
    ],
    ids=["epochs", "pickles", "collate", "arrays", "large answers", "batches"],
)
def test_a_process_is_asked_before_it_has_answered(make: Any, options: dict[str, Any], asked: list[int]) -> None:
    options = {"batch_size": 8} | options
    for one, other in zip(taken(make, 1, options), taken(make, TWO, options), strict=True):
        same(one, other)
    assert 2 in asked
    assert max(asked) == 2


@pytest.mark.usefixtures("only_processes")
def test_who_has_a_part_waits_for_no_room(asked: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The room may shrink at any moment, when a batch turns out to be large: who waited for it might wait for its own part."""
    ahead, waited = threading.local(), list[str]()
    at_once, reserve = RowDealer.deal_at_once, BoundedQueue.reserve

    def noted(dealer: Any) -> Any:
        ahead.has_one = True
        try:
            return at_once(dealer)
        finally:
            ahead.has_one = False

    def told(queue: Any, *or_else: Any) -> Any:
        if getattr(ahead, "has_one", False):
            waited.append(threading.current_thread().name)
        return reserve(queue, *or_else)

    monkeypatch.setattr(RowDealer, "deal_at_once", noted)
    monkeypatch.setattr(BoundedQueue, "reserve", told)
    assert len(taken(functools.partial(sources.Rows, 800), TWO, {"batch_size": 8})) == 100
    assert 2 in asked
    assert not waited


@pytest.mark.usefixtures("only_processes", "asked")
def test_a_question_and_an_answer_that_fill_the_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = socket.socketpair

    def small(*args: Any) -> tuple[socket.socket, socket.socket]:
        ends = pair(*args)
        for end in ends:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return ends

    monkeypatch.setattr(worker_process.socket, "socketpair", small)
    options = {"batch_size": 2048, "shuffle": True, "host": ("text",), "epochs": 3}
    make = functools.partial(sources.Rows, 4096, "row and set")
    for one, other in zip(taken(make, 1, options), taken(make, ps.Processes(1), options), strict=True):
        same(one, other)


@pytest.mark.usefixtures("only_processes")
@pytest.mark.parametrize(("transform", "words"), [(sources.late_exit, "ended with exit code 3"), (sources.late_raise, "row 200")])
def test_what_fails_while_two_are_asked_for(transform: Callable[..., Any], words: str, asked: list[int]) -> None:
    got: list[int] = []
    batches = iter(ps.Loader(sources.Rows(400), P("data"), batch_size=8, workers=ps.Processes(1), transform=transform))
    with pytest.raises((ps.SourceError, ValueError)) as caught:
        got.extend(row for batch in batches for row in np.asarray(batch["row"]).tolist())
    assert words in f"{caught.value} {getattr(caught.value, '__notes__', '')}"
    assert got == list(range(200))
    assert 2 in asked


def test_an_answer_is_not_lost_with_its_process() -> None:
    sent = {
        "source": "dataset", "dataset": sources.Rows(8), "transform": None, "collate": None, "wants_rng": False, "seed": 0, "reads_many": False,
    }  # fmt: skip
    group = pool.Pool(1, sent, {})
    process = group.claim()
    try:
        process.start()
        process.wait_ready()
        for first in (0, 4):
            process.ask((range(first, first + 2), 0, None, "examples"))
        assert process.answer().kind == "stack"
        assert select.select([process._fileno], [], [], HANG_SECONDS)[0]
        os.kill(process.pid, signal.SIGKILL)
        assert process._process is not None
        process._process.wait(HANG_SECONDS)
        with pytest.raises(ps.SourceError, match="was ended by SIGKILL"):
            process.ask((range(6, 8), 0, None, "examples"))
        answer = process.answer()
        dtype, shape, start = answer.body[1][1]
        assert np.ndarray((2, *shape), dtype, answer.memory, start).tolist() == [4, 5]
        with pytest.raises(ps.SourceError, match="was ended by SIGKILL"):
            process.answer()
    finally:
        group.leave(process)


@pytest.mark.usefixtures("only_processes")
def test_a_slow_process_is_not_asked_ahead(asked: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_worker, "QUICK_SECONDS", 0.0)
    assert len(taken(functools.partial(sources.Rows, 80), TWO, {"batch_size": 8})) == 10
    assert set(asked) == {1}


@pytest.mark.usefixtures("only_processes")
def test_a_dataset_of_its_own_is_closed_in_each_process(tmp_path: Path) -> None:
    path = tmp_path / "closed"
    iterator = iter(ps.Loader(ps.per_worker(functools.partial(sources.Closed, str(path))), P("data"), batch_size=8, workers=TWO))
    next(iterator)
    iterator.close()
    pids = set(path.read_text().split())
    assert len(pids - {str(os.getpid())}) >= 1


def test_generators_of_the_example_are_seeded_alike() -> None:
    for numbers in [(0, 0, 0), (2**32 + 7, 0, 5), (2**80, 3, 2**33)]:
        want = seed_sequence(*numbers).generate_state(4).tolist()
        assert np.random.SeedSequence(child.seed_words(*numbers)).generate_state(4).tolist() == want


def test_what_is_no_number_of_processes() -> None:
    for wrong in (0, -1, True, "4", 100_000, 2.0):
        with pytest.raises(ps.ConfigError, match=r"Processes\(n\)"):
            ps.Processes(wrong)  # pyright: ignore[reportArgumentType]
    assert repr(ps.Processes(4)) == "Processes(n=4)"


# -- errors


def read(transform: Callable[..., Any], source: Any = None) -> BaseException:
    """What reading 40 rows with it raises, after the two batches before row 21."""
    iterator = iter(ps.Loader(source or sources.Rows(), P("data"), batch_size=8, transform=transform, workers=TWO))
    for _ in range(2):
        next(iterator)
    with pytest.raises((Exception, SystemExit)) as found:
        next(iterator)
    with pytest.raises(type(found.value)):
        next(iterator)
    iterator.close()
    return found.value


def notes(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", ()))


@pytest.mark.usefixtures("only_processes")
def test_the_exception_of_a_row_comes_with_its_traceback() -> None:
    error = read(sources.fails)
    assert type(error) is sources.Odd
    assert error.code == 7
    assert str(error) == "code 7"
    assert "at row 21. Its traceback there" in notes(error)
    assert "in deeper" in notes(error)
    assert "while transforming batch 2 (epoch 0, rows" in notes(error)
    assert "child.py" not in notes(error)


@pytest.mark.usefixtures("only_processes")
@pytest.mark.parametrize("transform", [sources.fails_unpickled, sources.fails_unloadable])
def test_an_exception_that_does_not_travel_has_a_stand_in(transform: Callable[..., Any]) -> None:
    error = read(transform)
    assert type(error) is ps.SourceError
    assert "row 21: process_sources.Not" in str(error)
    assert f"in {transform.__name__}" in str(error)


@pytest.mark.usefixtures("only_processes")
def test_what_would_be_read_as_control_flow() -> None:
    error = read(sources.stops)
    assert type(error) is ps.SourceError
    assert "transforming raised StopIteration" in str(error)
    assert type(read(sources.leaves_python)) is SystemExit


@pytest.mark.usefixtures("only_processes")
def test_errors_of_the_library_are_those_of_threads() -> None:
    for transform, source in ((sources.forgets, None), (sources.last_leaf_differs, None), (None, sources.TooMany(40))):
        texts: list[str] = []
        for workers in (1, ps.Processes(1)):
            with pytest.raises(ps.PrefetchError) as found:
                list(ps.Loader(source or sources.Rows(), P("data"), batch_size=8, transform=transform, workers=workers))
            texts.append(f"{type(found.value)} {found.value} {notes(found.value)}")
        assert texts[0] == texts[1]


@pytest.mark.usefixtures("only_processes")
@pytest.mark.parametrize(
    ("transform", "words"),
    [
        (sources.exits, r"worker process \d \(pid \d+\) ended with exit code 3 while it worked"),
        (sources.is_killed, r"worker process \d \(pid \d+\) was ended by SIGKILL while it worked, most often .* memory ran out"),
    ],
)
def test_a_process_that_dies_is_named(transform: Callable[..., Any], words: str) -> None:
    error = read(transform)
    assert type(error) is ps.SourceError
    assert re.search(words, str(error)), error
    asked = re.search(r"it was asked for rows (\d+) to (\d+)", notes(error))
    assert asked is not None
    assert int(asked[1]) <= 21 <= int(asked[2])


@pytest.mark.usefixtures("only_processes")
def test_no_shared_memory_is_an_error_that_names_it() -> None:
    with pytest.raises(ps.SourceError, match=r"worker process \d \(pid \d+\): there is no shared memory for .* bytes"):
        list(ps.Loader(sources.Rows(), P("data"), batch_size=8, transform=sources.has_no_memory, workers=ps.Processes(1)))


def test_a_process_that_hangs_is_killed_at_closing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "MAY_WORK_BEFORE", False)
    monkeypatch.setattr(worker_process, "BUSY_SECONDS", 0.1)
    iterator = iter(ps.Loader(sources.Rows(), P("data"), batch_size=8, transform=sources.hangs, workers=TWO))
    next(iterator)
    next(iterator)
    began = time.monotonic()
    iterator.close()
    assert time.monotonic() - began < HANG_SECONDS


@pytest.mark.usefixtures("only_processes")
def test_a_source_that_cannot_be_unpickled() -> None:
    with pytest.raises(ps.SourceError, match=r"could not take the source and the functions: ValueError: no such data here") as found:
        list(ps.Loader(sources.Unpickles(), P("data"), batch_size=8, workers=TWO))
    assert type(found.value.__cause__) is ValueError


@pytest.mark.usefixtures("only_processes")
def test_a_process_that_dies_while_it_starts() -> None:
    with pytest.raises(ps.SourceError, match=r"worker process \d \(pid \d+\) ended with exit code 4 while it started"):
        list(ps.Loader(sources.Exits(), P("data"), batch_size=8, workers=TWO))


@pytest.mark.usefixtures("only_processes")
def test_the_statistics_have_what_the_processes_took() -> None:
    iterator = iter(ps.Loader(sources.Rows(), P("data"), batch_size=8, transform=sources.takes_a_while, workers=TWO))
    list(iterator)
    assert iterator.stats().transform_seconds >= 40 * 0.0003
    assert iterator.stats().workers == 2


@pytest.mark.usefixtures("only_processes")
def test_lambdas_travel_by_cloudpickle() -> None:
    pytest.importorskip("cloudpickle")
    batches = list(ps.Loader(sources.Rows(), P("data"), batch_size=8, transform=lambda row: row["x"] + 1, workers=ps.Processes(1)))
    assert np.array_equal(np.concatenate(batches), sources.Rows().values + 1)


def test_what_cannot_be_pickled_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ps.ConfigError, match=r"the source\.inner\['(file|lock)'\] \(a .*\) cannot be pickled: TypeError"):
        iter(ps.Loader(sources.Holds(), P("data"), batch_size=8, workers=TWO))
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    words = r"sends transform to .*<lambda>|transform \(a builtins.function\) cannot be pickled: .* top of a module.*or install cloudpickle"
    with pytest.raises(ps.ConfigError, match=words):
        iter(ps.Loader(sources.Rows(), P("data"), batch_size=8, transform=lambda row: row, workers=TWO))


@pytest.mark.usefixtures("only_processes")
def test_items_that_cannot_be_pickled() -> None:
    def items() -> Iterator[Any]:
        for row in range(40):
            yield {"x": np.zeros(3, np.float32), "row": row, "lock": threading.Lock()}

    with pytest.raises(ps.SourceError, match="items of the source cannot be sent to a worker process"):
        list(ps.Loader(items(), P("data"), batch_size=8, transform=sources.double, workers=TWO, host=("lock",), reuses_buffers=False))


# -- ways out


@pytest.mark.usefixtures("only_processes")
def test_a_dropped_run_ends_its_processes() -> None:
    iterator = iter(ps.Loader(sources.Rows(), P("data"), batch_size=8, epochs=None, workers=TWO))
    next(iterator)
    assert len(children()) == 2
    del iterator  # `no_process_left` looks


PROGRAM = """
    import os, signal, sys, time
    sys.path.insert(0, "tests")
    import process_sources as sources
    import numpy as np
    import prefetchshard as ps
    from jax.sharding import PartitionSpec as P

    from prefetchshard.processes import worker_process
    worker_process.MAY_WORK_BEFORE = False
    loader = ps.Loader(sources.Where(64), P("data"), batch_size=8, epochs=None, workers=ps.Processes(2))
    iterator = iter(loader)
    pids = set()
    while len(pids) < 2:
        pids |= set(np.asarray(next(iterator)["pid"]).tolist())
    print(*pids, flush=True)
"""


def gone(pids: list[int]) -> bool:
    deadline = time.monotonic() + HANG_SECONDS
    while any(Path(f"/proc/{pid}").exists() and "child.py" in Path(f"/proc/{pid}/cmdline").read_text() for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks processes up in /proc")
@pytest.mark.parametrize("way", ["exit", "sys.exit(3)", "os.kill(os.getpid(), signal.SIGKILL)", "raise ValueError('own')"])
def test_nothing_is_left_when_the_program_ends(way: str) -> None:
    done = run_python(PROGRAM + f"    {way}\n")
    assert done.returncode == {"e": 0, "s": 3, "o": -9, "r": 1}[way[0]], done.stderr
    assert gone([int(pid) for pid in done.stdout.split()])
    assert "Traceback" not in done.stderr or way.startswith("raise")


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks processes up in /proc")
def test_ctrl_c_is_the_parents() -> None:
    """A terminal sends it to all processes of the group."""
    body = """
    try:
        os.killpg(0, signal.SIGINT)
        time.sleep(60)
    except KeyboardInterrupt:
        print("interrupted", int(next(iterator)["row"].sum() >= 0))
        iterator.close()
    """
    done = run_python("import os\nos.setpgid(0, 0)\n" + PROGRAM.replace("\n    ", "\n") + body.replace("\n    ", "\n"))
    assert done.returncode == 0, done.stderr
    assert "interrupted 1" in done.stdout
    assert done.stderr == ""
    assert gone([int(pid) for pid in done.stdout.splitlines()[0].split()])


def test_a_script_without_a_guard_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import numpy as np, prefetchshard as ps\n"
        "from jax.sharding import PartitionSpec as P\n"
        "from prefetchshard.processes import worker_process\n"
        "worker_process.MAY_WORK_BEFORE = False\n"
        "def change(x):\n    return x\n"
        "list(ps.Loader([np.zeros(3)] * 8, P(), batch_size=8, transform=change, workers=ps.Processes(1)))\n"
    )
    repository = Path(ps.__file__).parent.parent
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": str(repository)},
    )
    assert done.returncode == 1
    assert "could not take the source and the functions" in done.stderr
    assert "if __name__ == '__main__':" in done.stderr


SCRIPT = """
import typing
import numpy as np, prefetchshard as ps
from jax.sharding import PartitionSpec as P
from prefetchshard.processes import worker_process
worker_process.MAY_WORK_BEFORE = False

class Pair(typing.NamedTuple):
    x: object
    y: object

class Rows:
    def __len__(self):
        return 16

    def __getitem__(self, row):
        return Pair(np.float32(row), np.zeros(3))

def change(pair):
    return Pair(pair.x + 1, pair.y)

if __name__ == "__main__":
    for transform in (change, lambda pair: change(pair)):
        batches = list(ps.Loader(Rows(), P(), batch_size=8, transform=transform, workers=ps.Processes(1)))
        assert [type(batch) for batch in batches] == [Pair, Pair]
        assert batches[1].x.tolist() == list(range(9, 17))
    print("right")
"""


@pytest.mark.parametrize("has_file", [True, False])
def test_what_the_program_itself_defines(tmp_path: Path, has_file: bool) -> None:
    """In a script, which its processes import, and in a program without a file, which cloudpickle takes along."""
    pytest.importorskip("cloudpickle")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(Path(ps.__file__).parent.parent)}
    command = [sys.executable, str(script)] if has_file else [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment, stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stdout, done.stderr) == (0, "right\n", "")


# -- parts of the child, in this process


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Point:
    x: Any
    y: Any


def test_copies_share_nothing() -> None:
    array = np.arange(6.0)
    objects = np.empty(1, object)
    objects[0] = array
    value = {
        "list": [array, (array,)],
        "ordered": collections.OrderedDict(a=array),
        "default": collections.defaultdict(list, a=array),
        "pair": sources.Pair(array, 1),
        "point": Point(array, "text"),
        "objects": objects,
        "memory": memoryview(array),
        "none": None,
    }
    copied = child.private_copy(value)
    array[:] = -1
    for part in (
        *(copied["list"][0], copied["list"][1][0], copied["ordered"]["a"], copied["default"]["a"], copied["pair"].x),
        *(copied["point"].x, copied["objects"][0], np.asarray(copied["memory"])),
    ):
        assert part.tolist() == list(range(6))
    assert type(copied["ordered"]) is collections.OrderedDict
    assert copied["default"].default_factory is list
    assert copied["point"].y == "text"


def test_examples_are_put_together_from_rows_of_arrays() -> None:
    template = {"a": 0, "b": (1, [2]), "c": sources.Pair(0, None), "d": Point(1, 2), "e": collections.OrderedDict(f=0)}
    leaves = [np.arange(4) + 10 * i for i in range(3)]
    made = child.filled(template, leaves, 2)
    assert made == {"a": 2, "b": (12, [22]), "c": sources.Pair(2, None), "d": Point(12, 22), "e": collections.OrderedDict(f=2)}
