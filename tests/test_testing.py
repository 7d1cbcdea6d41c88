"""The fakes that the package ships catch what they are there to catch, and let pass what is right."""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding

import prefetchshard as ps
from prefetchshard.placing.placer import Placer
from prefetchshard.staging.layout import ALIGNMENT, Layout
from prefetchshard.testing import (
    POISON,
    ManualClock,
    PoisonStaging,
    SlotMisuseError,
    SourceReport,
    check_source,
    poisoned_staging,
)
from support import copies_late

F4 = np.dtype(np.float32)
LARGE = [((64, 4096), F4)]  # 1 MiB: the CPU backend copies it after the call returned
SMALL = [((8, 3), F4), ((8,), np.dtype(bool))]


# -- the clock


def test_time_passes_when_told() -> None:
    clock = ManualClock(3.0)
    assert clock() == clock() == 3.0
    assert clock.advance(0.5) == 3.5
    assert clock() == 3.5
    with pytest.raises(ValueError, match="backwards"):
        clock.advance(-1)


# -- the ring


def address(view: np.ndarray) -> int:
    return view.__array_interface__["data"][0]


def test_a_released_slot_is_poison_and_is_the_next_one_used() -> None:
    ring, layout = PoisonStaging(4), Layout([*LARGE, *SMALL])
    memory = ring.lease(layout)
    views = memory.views
    for view in views:
        view[...] = 1
    where = [address(view) for view in views]
    memory.release()
    assert all((view.view(np.uint8) == POISON).all() for view in views)
    again = ring.lease(layout)
    assert [address(view) for view in again.views] == where
    assert ring.check().out == 1
    assert (ring.stats().made, ring.stats().reused) == (1, 1)


def test_slots_on_loan_are_apart() -> None:
    ring, layout = PoisonStaging(2), Layout([*LARGE, *SMALL])
    memories = [ring.lease(layout) for _ in range(4)]
    for i, memory in enumerate(memories):
        for view in memory.views:
            view[...] = i
    for i, memory in enumerate(memories):
        assert all((view == np.full((), i, view.dtype)).all() for view in memory.views)
        memory.release()
    assert ring.check().out == 0
    assert ring.stats().free_bytes > 0


def test_writing_after_the_release_is_told() -> None:
    ring, layout = PoisonStaging(2), Layout(LARGE)
    memory = ring.lease(layout)
    view = memory.views[0]
    memory.release()
    view[3, 7] = 1.0
    with pytest.raises(SlotMisuseError, match="written to after it had been released: 4 bytes"):
        ring.lease(layout)


def test_writing_after_the_last_release_is_told_at_the_end() -> None:
    def misuse() -> None:
        with poisoned_staging() as rings:
            rings.append(PoisonStaging(1))
            memory = rings[0].lease(Layout(LARGE))
            view = memory.views[0]
            memory.release()
            view[:] = 1.0

    with pytest.raises(SlotMisuseError, match="written"):
        misuse()


def test_a_second_release_is_told() -> None:
    memory = PoisonStaging(2).lease(Layout(SMALL))
    memory.release()
    with pytest.raises(SlotMisuseError, match="twice"):
        memory.release()


def test_memory_that_nobody_holds_comes_back() -> None:
    ring = PoisonStaging(2)
    memory = ring.lease(Layout(LARGE))
    del memory
    gc.collect()
    counts = ring.check()
    assert (counts.leased, counts.released, counts.dropped, counts.out) == (1, 0, 1, 0)


DTYPES = [np.dtype(name) for name in ("bool", "int8", "int16", "float32", "complex64", "float64", "complex128")]
leaves = st.lists(
    st.tuples(st.tuples(st.integers(1, 16), st.integers(1, 9)), st.sampled_from(DTYPES), st.booleans()), min_size=1, max_size=6
)


@settings(deadline=None, max_examples=50)
@given(leaves, st.sampled_from([1, 2, 4, 8]))
def test_no_piece_of_a_leaf_begins_where_it_would_be_aliased(leaves: list[Any], pieces: int) -> None:
    layout = Layout([((rows * 8, columns * (1024 if large else 1)), dtype) for (rows, columns), dtype, large in leaves])
    ring = PoisonStaging(1, pieces=pieces)
    memory = ring.lease(layout)
    used_once = ring.check().not_reused
    starts = [address(view) + view.nbytes // pieces * i for view in memory.views for i in range(pieces)]
    if not used_once:
        assert all(start % ALIGNMENT for start in starts)
        assert memory.slab is None or not len(memory.slab) or address(memory.slab) % ALIGNMENT
    for i, view in enumerate(memory.views):
        view[...] = i
    assert all((view == np.full((), i, view.dtype)).all() for i, view in enumerate(memory.views))
    memory.release()
    assert ring.check().out == 0


def test_a_loader_over_it_gives_right_values(S: NamedSharding) -> None:
    x = np.random.default_rng(0).random((640, 4096), np.float32)
    y = np.arange(640)
    with poisoned_staging() as rings:
        loader = ps.Loader({"x": x, "y": y}, S, batch_size=64, shuffle=True, seed=1, epochs=2)
        for _ in zip(range(3), loader, strict=False):
            pass  # a run that is dropped
        with loader:
            kept = list(loader)
    assert len(kept) == 20
    for batch in kept:
        assert np.array_equal(np.asarray(batch["x"]), x[np.asarray(batch["y"])])
    assert len(rings) == 1
    assert rings[0].check().leased >= 20
    assert rings[0].stats().reused > 0


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="other backends read the memory before the call returns")
def test_a_release_before_the_transfer_is_ready_shows(S: NamedSharding, monkeypatch: pytest.MonkeyPatch) -> None:
    put = Placer.dispatch

    def early(self: Placer, host: Any) -> Any:
        flight = put(self, host)
        host.memory.release()
        host.memory = None
        return flight

    monkeypatch.setattr(Placer, "dispatch", early)
    x = np.ones((4096, 4096), np.float32)
    with poisoned_staging(), ps.Loader(x, S, batch_size=256, epochs=4) as loader:
        assert all((np.asarray(batch) == 1).all() for batch in loader) != copies_late(S)


# -- sources: what is right


def example(row: int) -> dict[str, Any]:
    return {"x": np.full(3, row, np.float32), "name": f"row {row}"}


ROWS = 20
EXAMPLES = [example(row) for row in range(ROWS)]


class Rows:
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> dict[str, Any]:
        if not 0 <= row < ROWS:
            raise IndexError(row)
        return example(row)


class ManyRows(Rows):
    def __getitems__(self, rows: list[int]) -> list[dict[str, Any]]:
        return [self[row] for row in rows]


class Repeating:
    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(EXAMPLES)


def in_one_buffer() -> Iterator[dict[str, Any]]:
    x = np.empty(3, np.float32)
    for row in range(ROWS):
        x[:] = row
        yield {"x": x, "name": f"row {row}"}


async def pulled_in_a_loop() -> AsyncIterator[dict[str, Any]]:
    for row in range(ROWS):
        yield example(row)


class Stateful:
    def __init__(self) -> None:
        self.row = 0

    def __iter__(self) -> Stateful:
        return self

    def __next__(self) -> dict[str, Any]:
        if self.row == ROWS:
            raise StopIteration
        self.row += 1
        return example(self.row - 1)

    def get_state(self) -> bytes:
        return json.dumps(self.row).encode()

    def set_state(self, state: bytes) -> None:
        self.row = json.loads(state)


class WithoutEnd(Rows):
    """A loader never asks for a row past the end."""

    def __getitem__(self, row: int) -> dict[str, Any]:
        return example(row)


RIGHT: dict[str, tuple[Callable[[], Any], SourceReport]] = {
    "dataset": (Rows, SourceReport("dataset", ROWS, ROWS, False, True, False)),
    "without an IndexError": (WithoutEnd, SourceReport("dataset", ROWS, ROWS, False, True, False)),
    "one a worker": (lambda: ps.per_worker(Rows), SourceReport("dataset", ROWS, ROWS, False, True, False)),
    "many rows": (ManyRows, SourceReport("dataset", ROWS, ROWS, False, True, False)),
    "list": (lambda: EXAMPLES, SourceReport("dataset", ROWS, ROWS, False, True, False)),
    "iterable": (Repeating, SourceReport("iterator", None, ROWS, False, True, False)),
    "generator": (in_one_buffer, SourceReport("iterator", None, ROWS, True, False, False)),
    "factory": (lambda: in_one_buffer, SourceReport("factory", None, ROWS, True, True, False)),
    "stateful": (Stateful, SourceReport("stateful iterator", None, ROWS, False, False, True)),
}


@pytest.mark.parametrize(("make", "report"), RIGHT.values(), ids=RIGHT)
def test_what_a_right_source_is_found_to_be(make: Callable[[], Any], report: SourceReport) -> None:
    assert check_source(make, EXAMPLES) == report
    assert check_source(make) == report


def test_an_async_source_is_read_in_a_loop_of_its_own() -> None:
    report = check_source(pulled_in_a_loop, EXAMPLES)
    assert (report.items, report.reuses_buffers) == (ROWS, False)


def test_arrays_are_sources_too() -> None:
    assert check_source(lambda: {"x": np.ones((5, 2)), "y": np.zeros(5)}).length == 5


def test_of_an_endless_source_some_is_looked_at() -> None:
    def endless() -> Iterator[int]:
        row = 0
        while True:
            yield row
            row += 1

    assert check_source(endless, most=30).items == 30
    assert check_source(lambda: range(10**9), most=30).items == 30


def test_no_source_at_all() -> None:
    with pytest.raises(ps.ConfigError, match="no source"):
        check_source(lambda: 5)


# -- sources: what is wrong


class Short(Rows):
    def __getitem__(self, row: int) -> dict[str, Any]:
        if row == ROWS - 1:
            raise IndexError(row)
        return super().__getitem__(row)


class Growing(Rows):
    def __init__(self) -> None:
        self.length = ROWS - 1

    def __len__(self) -> int:
        self.length += 1
        return self.length


class Random(Rows):
    def __init__(self) -> None:
        self.random = np.random.default_rng(0)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return super().__getitem__(row) | {"x": self.random.random(3)}


class Disordered(ManyRows):
    def __getitems__(self, rows: list[int]) -> list[dict[str, Any]]:
        return [self[row] for row in sorted(rows)]


class OnlyOnce:
    def __init__(self) -> None:
        self.left = list(EXAMPLES)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while self.left:
            yield self.left.pop(0)


class ForgetsHalf(Stateful):
    def set_state(self, state: bytes) -> None:
        self.row = json.loads(state) // 2 * 2 + 1


class GoesOn(Stateful):
    def __next__(self) -> dict[str, Any]:
        if self.row == ROWS:
            self.row = 0
            raise StopIteration
        return super().__next__()


class WrongLength(Repeating):
    def __len__(self) -> int:
        return ROWS + 1


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "is shorter than its length": (Short, "row 19 of 20 raises IndexError"),
    "has another length each time": (Growing, "the length was 20, and is 21"),
    "is random": (Random, "asked by 4 threads at once: row"),
    "gives many in another order": (Disordered, "asked with others of __getitems__, is another one"),
    "can be read once only": (OnlyOnce, "when it was read again, is missing"),
    "does not go on where its state says": (ForgetsHalf, "from its state after item"),
    "goes on after its end": (GoesOn, "after its end it gave one more item"),
    "is told longer than it is": (WrongLength, "its length is 21, and it gave 20 items"),
}


@pytest.mark.parametrize(("make", "words"), WRONG.values(), ids=WRONG)
def test_a_source_that_is_wrong_is_told_so(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        check_source(make)


def test_a_dataset_that_is_not_safe_for_threads_is_told_so() -> None:
    """Each thread stops in the middle of its first row until another one has begun with its own, and then until that one is as far."""

    class Meeting(Rows):
        def __init__(self) -> None:
            self.threads = threading.Barrier(2)
            self.met = threading.local()
            self.place = 0

        def __getitem__(self, row: int) -> dict[str, Any]:
            if not 0 <= row < ROWS:
                raise IndexError(row)
            self.place = place = row
            if threading.current_thread() is not threading.main_thread() and not hasattr(self.met, "once"):
                self.met.once = True
                self.threads.wait(30)
                place = self.place
                self.threads.wait(30)  # neither goes on to its next row, which may be the other's first, before both have looked
            return example(place)

    with pytest.raises(AssertionError, match="asked by 2 threads at once: row .* read it with workers=1"):
        check_source(Meeting, threads=2)


def test_examples_are_compared_bit_by_bit() -> None:
    with pytest.raises(AssertionError, match=r"row 3 is another one: leaf x is .* dtype=float32\) and not array"):
        check_source(Rows, [*EXAMPLES[:3], {"x": np.full(3, 3, np.float64), "name": "row 3"}, *EXAMPLES[4:]])
    with pytest.raises(AssertionError, match="there are 19 examples"):
        check_source(Rows, EXAMPLES[:-1])
    with pytest.raises(AssertionError, match="item 5 is another one"):
        check_source(Repeating, [*EXAMPLES[:5], EXAMPLES[6], *EXAMPLES[6:]])
    with pytest.raises(AssertionError, match="row 1 is another one: it is 1 and not 2"):
        check_source(lambda: [0, 1], [0, 2])
    nan = {"x": np.array([np.nan, -0.0]), "n": None}
    assert check_source(lambda: [nan], [dict(nan)]).items == 1
