"""The fields of a state are checked against each other when a loader takes it: what no loader can have handed out is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import prefetchshard as ps

ONE = jax.sharding.SingleDeviceSharding(jax.devices()[0])
COUNT = 12  # rows of a source of examples, or batches of a source of batches


class Stateful:
    """An iterator that restores its own state."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items
        self.next = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.next == len(self.items):
            raise StopIteration
        self.next += 1
        return self.items[self.next - 1]

    def get_state(self) -> int:
        return self.next

    def set_state(self, state: int) -> None:
        self.next = state


def examples(count: int = COUNT) -> list[Any]:
    return [{"x": np.float32(i)} for i in range(count)]


def wholes(sizes: list[int]) -> list[Any]:
    return [{"x": np.zeros(size, np.float32)} for size in sizes]


def source_of(kind: str, items: list[Any]) -> Any:
    if kind == "arrays":
        return {"x": np.arange(len(items), dtype=np.float32)}
    return {"dataset": items, "factory": lambda: iter(items), "stateful": lambda: Stateful(items)}[kind]


KINDS = ["arrays", "dataset", "factory", "stateful"]


def handed_out(loader: ps.Loader, take: int, runs: int) -> Iterator[ps.LoaderState]:
    """The states of a few runs, the last of which is broken off."""
    yield loader.state()
    for run in range(runs):
        iterator = iter(loader)
        yield iterator.state()
        for taken, _ in enumerate(iterator, 1):
            yield iterator.state()
            if run == runs - 1 and taken == take:
                break
        yield iterator.state()
        iterator.close()


@given(
    kind=st.sampled_from(KINDS),
    sizes=st.lists(st.integers(1, COUNT), min_size=1, max_size=3),
    remainder=st.sampled_from(["drop", "keep", "pad"]),
    epochs=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    take=st.integers(1, 5),
    runs=st.integers(1, 3),
    every=st.sampled_from([1, 2]),
)
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_state_of_examples_is_taken(
    kind: str, sizes: list[int], remainder: Any, epochs: list[int], take: int, runs: int, every: int
) -> None:
    """Through chains of other batch sizes and other numbers of epochs, and after each batch on the way."""
    state: ps.LoaderState | None = None
    for link, size in enumerate(sizes):
        if state is not None and state.resumes_by == "snapshot":
            break  # which cannot be cut anew
        options: Any = {"batch_size": size, "remainder": remainder, "epochs": epochs[link % len(epochs)], "snapshot_every": every}
        start = None if state is None else state.rebatch(size)
        make = lambda state, options=options: ps.Loader(source_of(kind, examples()), ps.HOST, state=state, workers=1, **options)  # noqa: E731
        seen = list(handed_out(make(start), take, runs))
        for state in seen:
            make(ps.LoaderState.decode(state.encode()))
            if state.resumes_by != "snapshot":
                ps.Loader(source_of(kind, examples()), ps.HOST, state=state.rebatch(5), **{**options, "batch_size": 5})


@given(
    kind=st.sampled_from(["dataset", "factory", "stateful"]),
    rows=st.lists(st.sampled_from([8, 8, 8, 3, 16]), max_size=6),
    remainder=st.sampled_from(["drop", "keep", "pad"]),
    epochs=st.integers(1, 3),
    take=st.integers(1, 4),
    runs=st.integers(1, 3),
)
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_state_of_batches_is_taken(kind: str, rows: list[int], remainder: Any, epochs: int, take: int, runs: int) -> None:
    def make(state: ps.LoaderState | None) -> ps.Loader:
        return ps.Loader(source_of(kind, wholes(rows)), ONE, state=state, remainder=remainder, epochs=epochs, workers=1)

    for state in list(handed_out(make(None), take, runs)):
        make(ps.LoaderState.decode(state.encode()))


# -- what is refused


def after(batches: int, source: Any, **options: Any) -> tuple[ps.LoaderState, Any]:
    """The state after so many batches, and what takes it."""
    options = {"workers": 1, "sharding": ONE, **options}
    iterator = iter(ps.Loader(source(), **options))
    for _ in range(batches):
        next(iterator)
    state = iterator.state()
    iterator.close()
    return state, lambda state: ps.Loader(source(), state=state, **options)


def in_arrays(batches: int) -> tuple[ps.LoaderState, Any]:
    return after(batches, lambda: source_of("arrays", examples()), batch_size=4, epochs=9)


@pytest.mark.parametrize(
    ("batches", "change", "text"),
    [
        (1, {"run_epoch": 5}, "run_epoch=5 and epoch=0"),
        (4, {"run_epoch": 1}, "run=0 and run_epoch=1"),
        (1, {"step": 2}, "step=2, batches=1 and epoch=0"),
        (1, {"step": 0}, "step=0, batches=1 and epoch=0"),
        (1, {"step": 2**62}, f"step={2**62}, batches=1"),
        (1, {"epoch": 3}, "step=1, batches=1 and epoch=3: 3 epochs of a source of length 12 have 3 to 36 batches, not 0"),
        (4, {"epoch": 0}, "step=4, batches=1 and epoch=0"),
        (4, {"step": 1}, "epochs of a source of length 12 have 1 to 12 batches, not 0"),
        (4, {"step": 14}, "epochs of a source of length 12 have 1 to 12 batches, not 13"),
        (4, {"epoch": 2**61}, "epochs of a source of length 12"),
        (2, {"batches": 1}, "step=2, batches=1 and epoch=0"),
        (1, {"rows": 8}, "batches=1, rows=8 and last_rows=4"),
        (1, {"rows": 0}, "batches=1, rows=0 and last_rows=4"),
        (2, {"rows": 4}, "batches=2, rows=4 and last_rows=4"),
        (2, {"rows": 24}, "saved after 24 of 12 items"),
        (2, {"last_rows": 8}, "batches=2, rows=8 and last_rows=8"),
        (0, {"rows": 4}, "batches=0, rows=4 and last_rows=0"),
        (1, {"batch_rows": 4}, "batch_rows=4, batches=1 and batch_size=4"),
        (1, {"resumes_by": "replay"}, "resumes_by='replay' and kind='random access'"),
        (1, {"since_snapshot": 4}, "resumes_by='index' and since_snapshot=4"),
        (1, {"sample": b"x"}, "resumes_by='index' and a sample"),
    ],
    ids=str,
)
def test_one_field_that_contradicts_the_others(batches: int, change: dict[str, Any], text: str) -> None:
    state, take = in_arrays(batches)
    take(state)
    with pytest.raises(ps.StateError) as caught:
        take(msgspec.structs.replace(state, **change))
    assert text in str(caught.value)


@pytest.mark.parametrize("kind", ["dataset", "factory", "stateful"])
def test_of_batches_that_the_source_makes(kind: str) -> None:
    state, take = after(2, lambda: source_of(kind, wholes([8, 8, 8])), epochs=4, remainder="drop")
    take(state)
    for change in ({"step": 3}, {"batches": 3}, {"rows": 7}, {"run_epoch": 1}, {"batches": 0, "step": 0}, {"batch_rows": 17}):
        with pytest.raises(ps.StateError, match="contradicts itself"):
            take(msgspec.structs.replace(state, **change))
    if kind == "dataset":
        later, take = after(4, lambda: source_of(kind, wholes([8, 8, 8])), epochs=4, remainder="drop")
        with pytest.raises(ps.StateError, match=r"1 epochs of a source of length 3 have 2 to 3 batches, not 1"):
            take(msgspec.structs.replace(later, step=2))


def test_of_a_source_that_restores_its_own_state() -> None:
    state, take = after(2, lambda: source_of("stateful", examples()), batch_size=4)
    assert state.resumes_by == "snapshot"
    take(state)
    for change in ({"resumes_by": "replay"}, {"snapshot": None}, {"since_snapshot": 9}, {"sample": b"x"}, {"resumes_by": "index"}):
        with pytest.raises(ps.StateError, match="contradicts itself"):
            take(msgspec.structs.replace(state, **change))


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_in_the_first_epoch_no_count_stands_alone(data: Any) -> None:
    """Whatever one of them is changed to: it is refused, or it was no change."""
    state, take = in_arrays(1)
    name = data.draw(st.sampled_from(["run_epoch", "epoch", "rows", "batches", "step", "last_rows", "since_snapshot"]))
    value = data.draw(st.integers(0, 40) | st.integers(0, 2**63 - 1))
    if (name, value) == ("last_rows", 0):
        return  # decides nothing where rows are found by number
    changed = msgspec.structs.replace(state, **{name: value})
    if changed == state:
        take(changed)
    else:
        with pytest.raises(ps.StateError):
            take(changed)


def test_rows_that_collate_makes_are_not_what_positions_count() -> None:
    """Under "pad" they tell what is short; a resumed run goes on after the examples."""

    def packed(some: list[Any]) -> Any:
        return {"x": np.zeros(8 if some[0] == 0 else 6), "y": np.full(8, some[0])}

    def load(state: ps.LoaderState | None = None) -> ps.Loader:
        return ps.Loader(list(range(24)), ONE, batch_size=8, remainder="pad", collate=packed, state=state, workers=1)

    iterator = iter(load())
    assert [int(next(iterator)["y"][0]) for _ in range(2)] == [0, 8]
    state = iterator.state()
    assert (state.rows, state.last_rows) == (16, 8)
    assert [int(batch["y"][0]) for batch in load(state)] == [16]
