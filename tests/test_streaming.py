"""Copies past the cache: byte for byte what NumPy copies, only where they can be and are faster, and in every way that a batch is made."""

from __future__ import annotations

import logging
import platform
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding

import prefetchshard as ps
from prefetchshard.streaming import choosing, copies, machine_code
from prefetchshard.streaming.copies import BY_NUMPY, Copies
from prefetchshard.streaming.machine_code import NoMachineCode, address_of, code_for, make_copy_rows
from support import HANG_SECONDS, no_threads, wait_until

llvm = pytest.importorskip("llvmlite.binding")

DTYPES = ["u1", "i2", "f4", "c16", ">i4", "?"]


class Counting:
    """The machine code, which counts its calls."""

    def __init__(self) -> None:
        self.calls = 0
        self._copy_rows = make_copy_rows()

    def __call__(self, *arguments: int) -> None:
        self.calls += 1
        self._copy_rows(*arguments)


COUNTING = Counting()


@pytest.fixture
def streaming(monkeypatch: pytest.MonkeyPatch) -> Copies:
    """Copies past the cache whatever the size."""
    monkeypatch.setattr(copies, "LEAST_ROW_BYTES", 1)
    COUNTING.calls = 0
    return Copies(COUNTING, least_bytes=1)


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> Counting:
    """Loaders that copy past the cache whatever the size, from their first batch on."""
    monkeypatch.setattr(copies, "LEAST_ROW_BYTES", 1)
    monkeypatch.setattr(choosing, "LEAST_BYTES_ON_CPU", 1)
    monkeypatch.setattr(choosing, "is_decided", lambda are_read: True)
    monkeypatch.setattr(choosing, "streaming_if_faster", lambda are_read: COUNTING)
    COUNTING.calls = 0
    return COUNTING


# -- the machine code


@pytest.mark.parametrize(
    ("machine", "triple", "cpu", "store"),
    [
        ("x86_64", "x86_64-linux-gnu", "x86-64", "movnt"),
        ("AMD64", "x86_64-linux-gnu", "znver4", "movnt"),
        ("aarch64", "aarch64-linux-gnu", "neoverse-n1", "stnp"),
        ("arm64", "arm64-apple-macosx", "apple-m1", "stnp"),
    ],
)
def test_its_stores_go_past_the_cache(machine: str, triple: str, cpu: str, store: str) -> None:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = llvm.parse_assembly(code_for(machine))
    module.verify()
    assembly = llvm.Target.from_triple(triple).create_target_machine(opt=3, cpu=cpu).emit_assembly(module)
    assert store in assembly
    assert re.search("sfence|dmb", assembly)


def test_another_machine_gets_none() -> None:
    with pytest.raises(NoMachineCode, match="riscv64"):
        code_for("riscv64")


def test_code_that_copies_wrongly_is_not_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    wrong = code_for(platform.machine()).replace("%to_offset = mul i64 %i, %size", "%to_offset = mul i64 0, %size")
    monkeypatch.setattr(machine_code, "code_for", lambda machine: wrong)
    with pytest.raises(NoMachineCode, match="wrongly"):
        make_copy_rows()
    assert undecided(monkeypatch, caplog) is None
    assert "wrongly" in caplog.text


def undecided(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, are_read: bool = False) -> Any:
    """What a process finds that has not looked yet."""
    caplog.set_level(logging.INFO, "prefetchshard")
    monkeypatch.setattr(copies, "_measured", copies._Measured())
    assert not copies.is_decided(are_read=are_read)
    found = copies.streaming_if_faster(are_read=are_read)
    assert copies.is_decided(are_read=are_read)
    assert copies.streaming_if_faster(are_read=are_read) is found
    return found


def test_without_llvmlite_numpy_copies(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "llvmlite.binding", None)
    assert undecided(monkeypatch, caplog) is None
    assert "pip install 'prefetchshard[native]'" in caplog.text
    assert copies.find_streaming(are_read=False)[:2] == (None, False)


def test_a_compiler_that_fails_is_no_fault_of_the_run(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(machine_code, "code_for", lambda machine: "no code at all")
    assert undecided(monkeypatch, caplog) is None
    assert "LLVM says" in caplog.text


@pytest.mark.parametrize("are_read", [False, True])
@pytest.mark.parametrize("gain", [0.0, 1e9])
def test_it_is_used_where_it_is_faster(
    gain: float, are_read: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(copies, "LEAST_GAIN", gain)
    found = undecided(monkeypatch, caplog, are_read=are_read)
    asked = copies.find_streaming(are_read=are_read)
    assert asked.copy_rows is not None
    assert (asked.is_faster, asked.reason.endswith(": used")) == (found is not None, found is not None)
    assert asked.reason in caplog.text
    assert (found is not None) == (gain == 0.0)
    assert ("not used" in caplog.text) == (gain > 0)


# -- a copy


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_it_copies_what_numpy_copies(data: st.DataObject) -> None:
    """Rows of any size, at any address, far apart, backwards; nothing beside them is written."""
    dtype = np.dtype(data.draw(st.sampled_from(DTYPES)))
    row = data.draw(st.integers(1, 300))
    length, count = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 12))
    step, cut, start = data.draw(st.sampled_from([1, 2, -1, -3])), data.draw(st.integers(0, 3)), data.draw(st.integers(0, 130))
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    base = random.integers(0, 2 if dtype.kind == "b" else 256, (3 * length, (row + cut) * dtype.itemsize)).astype(np.uint8).view(dtype)
    source = base[::step][:length, :row]
    rows = random.integers(0, len(source), count)
    memory = np.full(count * row * dtype.itemsize + start + 200, 77, np.uint8)
    start -= start % dtype.alignment
    view = np.ndarray((count, row), dtype, memory, start)
    mark = pytest.MonkeyPatch()
    mark.setattr(copies, "LEAST_ROW_BYTES", 1)
    try:
        before = COUNTING.calls
        Copies(COUNTING, least_bytes=1).take(view, source, rows)
        assert COUNTING.calls == before + 1
        want = source[rows]
        assert view.tobytes() == want.tobytes()
        assert (memory[:start] == 77).all()
        assert (memory[start + view.nbytes :] == 77).all()
        Copies(COUNTING, least_bytes=1).copy(view, np.ascontiguousarray(want[::-1]))
        assert COUNTING.calls == before + 2
        assert view.tobytes() == want[::-1].tobytes()
        assert (memory[start + view.nbytes :] == 77).all()
    finally:
        mark.undo()


SQUARE = np.arange(4096, dtype=np.float32).reshape(64, 64)
OBJECTS = np.array([[object()] * 64] * 64)

LEFT_TO_NUMPY: dict[str, tuple[Callable[[], np.ndarray], np.ndarray]] = {
    "a view with gaps": (lambda: np.zeros((64, 128), np.float32)[:, ::2], SQUARE),
    "a value with gaps": (lambda: np.zeros((64, 64), np.float32), np.repeat(SQUARE, 2, 1)[:, ::2]),
    "a value that is stretched": (lambda: np.zeros((64, 64), np.float32), SQUARE[:1]),
    "objects": (lambda: np.zeros((64, 64), object), OBJECTS),
    "another order": (lambda: np.zeros((64, 64), np.float32), np.asfortranarray(SQUARE)),
    "nothing": (lambda: np.zeros((0, 64), np.float32), SQUARE[:0]),
}


@pytest.mark.parametrize("what", LEFT_TO_NUMPY)
def test_what_is_no_plain_memory_is_left_to_numpy(what: str, streaming: Copies) -> None:
    make, value = LEFT_TO_NUMPY[what]
    view = make()
    streaming.copy(view, value)
    assert np.array_equal(view, np.broadcast_to(value, view.shape))
    if len(value) == len(view) and len(value):
        rows = np.arange(len(view))[::-1]
        view = make()
        streaming.take(view, value, rows)
        assert np.array_equal(view, value[rows])
    assert COUNTING.calls == 0


def test_small_copies_are_left_to_numpy() -> None:
    before = COUNTING.calls
    large = Copies(COUNTING)
    view = np.zeros(copies.LEAST_BYTES - 1, np.uint8)
    large.copy(view, np.ones_like(view))
    assert view.all()
    thin = np.zeros((copies.LEAST_BYTES, 4), np.uint8)
    large.take(thin, np.ones_like(thin), np.arange(len(thin)))
    assert thin.all()
    assert COUNTING.calls == before
    view = np.zeros(copies.LEAST_BYTES, np.uint8)
    large.copy(view, np.ones_like(view))
    assert view.all()
    assert COUNTING.calls == before + 1


def test_row_numbers_of_any_kind(streaming: Copies) -> None:
    for rows in (np.array([3, 1], np.int32), np.arange(9)[::4], np.array([2, 2, 0], np.uint8)):
        view = np.zeros((len(rows), 64), np.float32)
        streaming.take(view, SQUARE, rows)
        assert np.array_equal(view, SQUARE[rows])
    assert COUNTING.calls == 3
    assert address_of(SQUARE) == SQUARE.ctypes.data


def test_a_run_of_rows_is_one_call(streaming: Copies) -> None:
    view = np.empty_like(SQUARE)
    streaming.take(view, SQUARE, np.arange(64)[::-1])
    assert np.array_equal(view, SQUARE[::-1])
    assert COUNTING.calls == 1


# -- loaders


def batches_of(data: dict[str, np.ndarray], size: int) -> Iterator[dict[str, np.ndarray]]:
    for start in range(0, len(data["y"]), size):
        yield {name: array[start : start + size] for name, array in data.items()}


class Examples:
    def __init__(self, data: dict[str, np.ndarray]) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data["y"])

    def __getitem__(self, row: int) -> dict[str, np.ndarray]:
        return {name: array[row] for name, array in self.data.items()}


def collate(examples: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.stack([example[name] for example in examples]) for name in examples[0]}


def stored(data: dict[str, np.ndarray], folder: Path) -> dict[str, np.ndarray]:
    for name, array in data.items():
        np.save(folder / f"{name}.npy", array)
    return {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in data}


WAYS: dict[str, Callable[[dict[str, np.ndarray], NamedSharding, Path], ps.Loader]] = {
    "arrays": lambda data, S, _: ps.Loader(data, S, batch_size=64, shuffle=True, seed=3, workers=2),
    "arrays in order": lambda data, S, _: ps.Loader(data, S, batch_size=64),
    "rows far apart": lambda data, S, _: ps.Loader(
        {name: np.repeat(x, 2, 0)[::2] for name, x in data.items()}, S, batch_size=64, shuffle=True
    ),
    "memmaps": lambda data, S, folder: ps.Loader(stored(data, folder), S, batch_size=64, shuffle=True),
    "padded": lambda data, S, _: ps.Loader(data, S, batch_size=96, remainder="pad", shuffle=True),
    "wrapped": lambda data, S, _: ps.prefetch(batches_of(data, 64), S),
    "wrapped, going on": lambda data, S, _: ps.prefetch(batches_of(data, 64), S, reuses_buffers=False),
    "collated": lambda data, S, _: ps.Loader(Examples(data), S, batch_size=64, collate=collate),
}


@pytest.mark.parametrize("way", WAYS)
def test_loaders_give_right_values(way: str, S: NamedSharding, forced: Counting, tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    data = {"x": random.random((320, 4099), np.float32), "wide": random.integers(-9, 9, (320, 70)), "y": np.arange(320, dtype=np.int32)}
    seen: list[int] = []
    with WAYS[way](data, S, tmp_path) as loader:
        kept = list(loader)
    for batch in kept:
        is_real = np.asarray(batch["mask"]) if "mask" in batch else slice(None)
        rows = np.asarray(batch["y"])[is_real]
        assert np.array_equal(np.asarray(batch["x"])[is_real], data["x"][rows])
        assert np.array_equal(np.asarray(batch["wide"])[is_real], data["wide"][rows])
        seen += rows.tolist()
    assert sorted(seen) == list(range(320))
    assert forced.calls >= len(kept)


def test_values_that_do_not_fit_are_found_as_ever(S: NamedSharding, forced: Counting) -> None:
    data = {"x": np.zeros((64, 4096), np.float32), "wide": np.full((64, 8), 2**40)}
    with pytest.raises(ps.NarrowingError, match="wide"):
        list(ps.Loader(data, S, batch_size=64))
    assert no_threads()


# -- when a run begins to


def test_it_is_found_out_beside_the_first_batches(S: NamedSharding, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batches do not wait for it; the thread ends; the next run need not ask."""
    asked, may_answer = threading.Event(), threading.Event()
    decided: list[bool] = []

    def find(are_read: bool) -> Counting:
        assert are_read
        asked.set()
        may_answer.wait(HANG_SECONDS)
        decided.append(True)
        return COUNTING

    monkeypatch.setattr(choosing, "LEAST_BYTES_ON_CPU", 1)
    monkeypatch.setattr(copies, "LEAST_ROW_BYTES", 1)
    monkeypatch.setattr(choosing, "is_decided", lambda are_read: bool(decided))
    monkeypatch.setattr(choosing, "streaming_if_faster", find)
    COUNTING.calls = 0
    x = np.random.default_rng(0).random((64, 1000), np.float32)
    iterator = iter(ps.Loader(x, S, batch_size=8, epochs=None))
    for i in range(5):
        assert np.array_equal(np.asarray(next(iterator)), x[8 * i : 8 * i + 8])
    assert asked.wait(HANG_SECONDS)
    assert COUNTING.calls == 0
    may_answer.set()
    wait_until(lambda: bool(next(iterator) is not None and COUNTING.calls))
    iterator.close()
    assert no_threads()
    COUNTING.calls = 0
    assert np.array_equal(np.asarray(next(iter(ps.Loader(x, S, batch_size=8)))), x[:8])
    assert COUNTING.calls
    assert decided == [True, True]


def test_closing_waits_for_it(S: NamedSharding, monkeypatch: pytest.MonkeyPatch) -> None:
    began, may_end = threading.Event(), threading.Event()

    def find(are_read: bool) -> None:
        began.set()
        may_end.wait(HANG_SECONDS)

    monkeypatch.setattr(choosing, "LEAST_BYTES_ON_CPU", 1)
    monkeypatch.setattr(choosing, "is_decided", lambda are_read: False)
    monkeypatch.setattr(choosing, "streaming_if_faster", find)
    iterator = iter(ps.Loader(np.zeros((64, 8), np.float32), S, batch_size=8, epochs=None))
    next(iterator)
    assert began.wait(HANG_SECONDS)
    closer = threading.Thread(target=iterator.close)
    closer.start()
    may_end.set()
    closer.join(HANG_SECONDS)
    assert not closer.is_alive()
    assert no_threads()


def test_a_run_does_without_where_no_thread_can_be_started(
    S: NamedSharding, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "prefetchshard")
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "prefetchshard-copies":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    monkeypatch.setattr(choosing, "LEAST_BYTES_ON_CPU", 1)
    monkeypatch.setattr(choosing, "is_decided", lambda are_read: False)
    x = np.random.default_rng(0).random((64, 100), np.float32)
    got = np.concatenate([np.asarray(batch) for batch in ps.Loader(x, S, batch_size=8)])
    assert np.array_equal(got, x)
    assert "does without its thread copies" in caplog.text
    assert no_threads()


def test_small_batches_need_no_thread(S: NamedSharding, monkeypatch: pytest.MonkeyPatch) -> None:
    def find(are_read: bool) -> None:
        raise AssertionError("not asked for")

    monkeypatch.setattr(choosing, "is_decided", lambda are_read: False)
    monkeypatch.setattr(choosing, "streaming_if_faster", find)
    assert len(list(ps.Loader(np.zeros((64, 8), np.float32), S, batch_size=8))) == 64 // 8
    assert BY_NUMPY.copy_rows is None
