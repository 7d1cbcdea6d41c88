"""Sources without a state of their own are read again up to the place, and told from others."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import jax
import msgspec
import numpy as np
import pytest
from jax.sharding import NamedSharding

import prefetchshard as ps
from prefetchshard.base.position import StartPoint
from prefetchshard.resuming import replay as retracing
from prefetchshard.sources.iterables import END
from prefetchshard.testing import ManualClock
from resumes import Again, batch_of, batches_of, broken_off, example, frozen, take, through_bytes


def state_after(count: int, source: Any, sharding: Any, **options: Any) -> ps.LoaderState:
    iterator = iter(ps.Loader(source, sharding, **options))
    assert len(take(iterator, count)) == count
    state = through_bytes(iterator.state())
    iterator.close()
    return state


def examples(length: int, changed: tuple[int, ...] = ()) -> list[dict[str, np.ndarray]]:
    return [example(row, 1 if row in changed else 0) for row in range(length)]


# --- what is read again


class Counting:
    """An iterator that counts what is pulled, and whose items say so too."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items
        self.pulled = 0

    def __iter__(self) -> Counting:
        return self

    def __next__(self) -> Any:
        if self.pulled == len(self.items):
            raise StopIteration
        self.pulled += 1
        return self.items[self.pulled - 1]


def test_what_is_skipped_costs_no_transform_and_no_batch(S: NamedSharding) -> None:
    """What was handed out is pulled again, and that is all; the batches that come are the next ones."""
    seen: list[int] = []
    lock = threading.Lock()

    def transform(item: dict[str, Any]) -> dict[str, Any]:
        with lock:
            seen.append(int(item["id"]))
        return item

    state = state_after(6, iter(examples(64)), S, batch_size=8, transform=transform)
    seen.clear()
    source = Counting(examples(64))
    iterator = iter(ps.Loader(source, S, batch_size=8, transform=transform, state=state))
    assert iterator.stats().batches == 0
    assert take(iterator) == [frozen(batch_of(range(start, start + 8))) for start in (48, 56)]
    assert sorted(seen) == list(range(48, 64))
    assert source.pulled == 64
    stats = iterator.stats()
    assert (stats.replayed, stats.batches, stats.rows) == (48, 2, 16)


@pytest.mark.parametrize("count", [1, 3, 8])
def test_the_way_is_said_and_counted(count: int, S: NamedSharding) -> None:
    state = state_after(count, batches_of(64, 8).__iter__(), S)
    assert (state.resumes_by, state.batches, state.rows, state.last_rows, state.batch_rows) == ("replay", count, 8 * count, 8, None)
    assert state.sample is not None
    assert len(state.sample) == 16
    iterator = iter(ps.Loader(iter(batches_of(64, 8)), S, state=state))
    assert len(take(iterator)) == 8 - count
    assert iterator.stats().replayed == count


def test_later_epochs_are_opened_and_only_there_it_is_skipped(S: NamedSharding) -> None:
    opened: list[int] = []

    def factory(epoch: int) -> Iterator[Any]:
        opened.append(epoch)
        return iter([example(row, epoch) for row in range(24)])

    state = state_after(7, factory, S, batch_size=8, epochs=4)
    assert (state.epoch, state.rows, state.step) == (2, 8, 7)
    opened.clear()
    iterator = iter(ps.Loader(factory, S, batch_size=8, epochs=4, state=state))
    first = next(iterator)
    assert np.asarray(first["x"])[0, 0] == 8.5 + 2000
    assert opened[0] == 2
    assert len(take(iterator)) == 4
    assert opened == [2, 3]
    assert iterator.stats().replayed == 8


def test_set_epoch_is_called_with_the_epoch_to_go_on_with(S: NamedSharding) -> None:
    class Epochs:
        def __init__(self) -> None:
            self.epochs: list[int] = []

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

        def __iter__(self) -> Iterator[Any]:
            return iter([example(row, self.epochs[-1]) for row in range(24)])

    state = state_after(4, Epochs(), S, batch_size=8, epochs=3)
    source = Epochs()
    seen = take(iter(ps.Loader(source, S, batch_size=8, epochs=3, state=state)))
    assert source.epochs == [1, 2]
    assert seen[0] == frozen(batch_of(range(8, 16), 1))


def test_another_batch_size_goes_on_at_the_next_row(S: NamedSharding) -> None:
    state = state_after(3, iter(examples(96)), S, batch_size=16).rebatch(8)
    assert state.sample is None
    iterator = iter(ps.Loader(iter(examples(96)), S, batch_size=8, state=state))
    seen = take(iterator, 2)
    assert iterator.stats().replayed == 48
    state = through_bytes(iterator.state())
    assert state.sample is not None
    iterator.close()
    seen += take(iter(ps.Loader(iter(examples(96)), S, batch_size=8, state=state)))
    assert seen == [frozen(batch_of(range(start, start + 8))) for start in range(48, 96, 8)]


def test_a_run_that_goes_on_can_be_closed_while_it_skips(S: NamedSharding) -> None:
    state = state_after(6, iter(examples(64)), S, batch_size=8)
    reached = threading.Event()

    def endless() -> Iterator[Any]:
        yield from examples(24)
        reached.set()
        while True:
            yield example(0)

    far = msgspec.structs.replace(state, rows=2**60, batches=2**57, step=2**57)
    iterator = iter(ps.Loader(endless(), S, batch_size=8, state=far))
    assert reached.wait(30)
    iterator.close()
    assert next(iterator, None) is None
    assert iterator.state() == far
    assert iterator.stats().replayed >= 24
    assert str(iterator.stats()) == (
        f"no batch was handed out yet; {iterator.stats().replayed} items were read again to get to where the state was saved"
    )


def test_progress_is_said_by_the_clock(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    counted: list[dict[str, Any]] = []
    ended = False

    def pull(most: int) -> Any:
        assert 1 <= most <= 10
        clock.advance(0.5)
        return END if ended else 0

    def replayed() -> tuple[retracing.ReplayedSource, Any]:
        items: Any = SimpleNamespace(pull=pull, access=None)
        stream: Any = SimpleNamespace(open=lambda *_: items, home=None)
        recorder: Any = SimpleNamespace(count=lambda **sums: counted.append(sums), clock=clock)
        source = retracing.ReplayedSource(stream, StartPoint(rows=100, batches=10, step=10), 10, 1, recorder)
        assert source.open(0, None) is items
        return source, items

    source, items = replayed()
    with caplog.at_level(logging.INFO, "prefetchshard"):
        assert source.skip(0, items, lambda: False)
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "going on where the state was saved: 100 examples are read again and dropped"
    assert lines[1:] == [f"going on where the state was saved: {done} of 100 examples read again" for done in range(11, 101, 11)]
    assert sum(sums["replayed"] for sums in counted) == 100
    ended = True
    assert source.skip(1, items, lambda: False)  # another epoch: nothing to skip
    source, items = replayed()
    assert not source.skip(0, items, lambda: True)  # the source was told to end: it is not too short


# --- sources that are no longer the same


@pytest.mark.parametrize("left", [0, 3, 20, 39])
def test_a_source_that_ends_before_the_place_is_refused(left: int, S: NamedSharding) -> None:
    state = state_after(5, iter(examples(64)), S, batch_size=8)
    loader = ps.Loader(iter(examples(left)), S, batch_size=8, state=state)
    with pytest.raises(ps.StateError, match=f"ended after {left} examples of epoch 0, and the state was saved after 40"):
        take(iter(loader))
    assert loader.state() == state


@pytest.mark.parametrize("left", [0, 1, 4])
def test_a_source_of_batches_that_ends_before_the_place_is_refused(left: int, S: NamedSharding) -> None:
    for hook in (None, lambda batch: batch):
        state = state_after(5, iter(batches_of(64, 8)), S, transform=hook)
        with pytest.raises(ps.StateError, match=f"ended after {left} batches of epoch 0, and the state was saved after 5"):
            take(iter(ps.Loader(iter(batches_of(8 * left, 8)), S, state=state, transform=hook)))


def test_a_source_that_has_just_what_was_handed_out_is_not_too_short(S: NamedSharding) -> None:
    state = state_after(5, iter(examples(64)), S, batch_size=8)
    assert take(iter(ps.Loader(iter(examples(40)), S, batch_size=8, state=state))) == []
    assert take(iter(ps.Loader(iter(examples(47)), S, batch_size=8, state=state))) == []


@pytest.mark.parametrize("hook", [None, lambda item: item])
@pytest.mark.parametrize("whole", [False, True])
def test_another_source_is_refused_and_can_be_forced(whole: bool, hook: Callable[[Any], Any] | None, S: NamedSharding) -> None:
    def make(changed: tuple[int, ...], state: ps.LoaderState | None = None) -> ps.Loader:
        items = examples(64, changed)
        if not whole:
            return ps.Loader(iter(items), S, batch_size=8, transform=hook, state=state)
        stacked = [jax.tree.map(lambda *leaves: np.stack(leaves), *items[start : start + 8]) for start in range(0, 64, 8)]
        return ps.Loader(iter(stacked), S, transform=hook, state=state)

    iterator = iter(make(()))
    take(iterator, 5)
    state = iterator.state()
    iterator.close()
    again = iter(make((35,), state))
    with pytest.raises(ps.StateError, match=r"batch 4 of epoch 0, the last that was handed out .* is another one now.*unchecked"):
        next(again)
    with pytest.raises(ps.StateError):  # and again
        next(again)
    assert again.state() == state
    assert len(take(iter(make((35,), state.unchecked())))) == 3
    assert len(take(iter(make((3, 44), state)))) == 3  # only the last batch is looked at


def test_other_rows_shapes_or_leaves_are_another_source(S: NamedSharding) -> None:
    state = state_after(2, iter(batches_of(64, 8)), S)

    def drop_x(batch: dict[str, Any]) -> dict[str, Any]:
        return {"id": batch["id"]}

    for change in (
        lambda batch: {**batch, "x": batch["x"][:, :1]},
        lambda batch: {**batch, "x": batch["x"][:, :, None]},
        lambda batch: {**batch, "x": batch["x"] * np.float32(1.0001)},
        lambda batch: {**batch, "id": batch["id"][::-1].copy()},
        lambda batch: {**batch, "x": -batch["x"]},
        drop_x,
    ):
        with pytest.raises(ps.StateError, match="is another one now"):
            take(iter(ps.Loader(map(change, batches_of(64, 8)), S, state=state)))


def test_text_that_stays_on_the_host_is_looked_at_too(S: NamedSharding) -> None:
    def items(word: str) -> list[Any]:
        return [{"id": np.int32(row), "text": f"{word} {row}"} for row in range(32)]

    where = {"id": S, "text": ps.HOST}
    state = state_after(2, iter(items("row")), where, batch_size=8)
    assert len(take_ids(ps.Loader(iter(items("row")), where, batch_size=8, state=state))) == 16
    with pytest.raises(ps.StateError, match="is another one now"):
        take_ids(ps.Loader(iter(items("line")), where, batch_size=8, state=state))


def take_ids(loader: ps.Loader) -> list[int]:
    return [int(row) for batch in loader for row in np.asarray(batch["id"])]


def test_an_epoch_that_had_a_remainder_and_has_more_now_is_another_one(S: NamedSharding) -> None:
    for collate in (None, lambda items: {"x": np.stack([item["x"] for item in items])}):
        options: dict[str, Any] = {"batch_size": 16, "remainder": "pad", "collate": collate}
        state = state_after(4, iter(examples(56)), S, **options)
        assert (state.rows, state.last_rows) == (56, 8)
        assert take(iter(ps.Loader(iter(examples(56)), S, state=state, **options))) == []
        with pytest.raises(ps.StateError, match="ended after 56 examples when the state was saved, and has more now"):
            take(iter(ps.Loader(iter(examples(64)), S, state=state, **options)))
        with pytest.raises(ps.StateError, match="ended after 55 examples of epoch 0, and the state was saved after 56"):
            take(iter(ps.Loader(iter(examples(55)), S, state=state, **options)))


def test_a_one_shot_iterator_has_one_epoch(S: NamedSharding) -> None:
    state = state_after(7, Again(examples(24)), S, batch_size=8, epochs=4)
    with pytest.raises(ps.StateError, match="epoch 2 of a run that began with epoch 0, and a one-shot iterator has one epoch"):
        ps.Loader(iter(examples(24)), S, batch_size=8, state=state)


def test_after_the_end_of_a_one_shot_iterator_the_next_one_is_read_from_its_beginning(S: NamedSharding) -> None:
    iterator = iter(ps.Loader(iter(examples(24)), S, batch_size=8))
    take(iterator)
    state = through_bytes(iterator.state())
    assert (state.run, state.epoch, state.rows, state.step) == (1, 1, 0, 3)
    after = iter(ps.Loader(iter(examples(24)), S, batch_size=8, state=state))
    assert take(after) == [frozen(batch_of(range(start, start + 8))) for start in (0, 8, 16)]
    assert after.state().step == 6


def test_the_probe_keeps_nothing_from_the_loop_when_it_is_the_last_batch(S: NamedSharding) -> None:
    """The only thing that comes of the resumed epoch is the comparison; the next epochs follow."""
    state = state_after(3, Again(examples(24)), S, batch_size=8, epochs=2, transform=lambda item: item)
    iterator = iter(ps.Loader(Again(examples(24)), S, batch_size=8, epochs=2, transform=lambda item: item, state=state))
    assert take(iterator) == [frozen(batch_of(range(start, start + 8))) for start in (0, 8, 16)]
    assert iterator.position is not None
    assert (iterator.position.epoch, iterator.position.step, iterator.position.batches) == (1, 5, 3)


# --- a last batch that is short by the first one, which was before the break


def shortened(kind: str, remainder: str, hooks: bool, sharding: Any, state: ps.LoaderState | None = None) -> ps.Loader:
    items = batches_of(40, 16)
    source: Any = Again(items) if kind == "iterable" else items
    return ps.Loader(
        source, sharding, remainder=remainder, epochs=2, state=state, transform=(lambda batch: batch) if hooks else None, workers=2
    )


@pytest.mark.parametrize("hooks", [False, True])
@pytest.mark.parametrize("kind", ["iterable", "list"])
def test_a_short_last_batch_is_dropped_or_padded_though_the_first_is_gone(kind: str, hooks: bool, S: NamedSharding) -> None:
    for remainder, count in (("drop", 4), ("pad", 6)):

        def make(state: ps.LoaderState | None = None) -> ps.Loader:
            return shortened(kind, remainder, hooks, S, state)  # noqa: B023 - called in this turn

        whole = take(iter(make()))
        assert len(whole) == count
        for cut in range(count + 1):
            assert broken_off(make, [cut], count)[0] == whole
        assert broken_off(make, [1, 1, 1, 1], count)[0] == whole


@pytest.mark.parametrize("hooks", [False, True])
@pytest.mark.parametrize("kind", ["iterable", "list"])
def test_a_short_last_batch_is_an_error_though_the_first_is_gone(kind: str, hooks: bool, S: NamedSharding) -> None:
    iterator = iter(shortened(kind, "error", hooks, S))
    take(iterator, 2)
    state = iterator.state()
    assert state.batch_rows == 16
    iterator.close()
    with pytest.raises(ps.BatchError, match="8 rows shorter than the first one"):
        next(iter(shortened(kind, "error", hooks, S, state)))


@pytest.mark.parametrize("short", [4, 8])
@pytest.mark.parametrize("kind", ["iterable", "list"])
def test_leaves_without_rows_do_not_confuse_it(kind: str, short: int, S: NamedSharding, R: NamedSharding) -> None:
    """By the sharding it is told which leaves have rows, also from a batch that does not fit the devices."""
    items = [{"table": np.arange(16, dtype=np.float32), "x": np.full((rows, 2), rows, np.float32)} for rows in (16, 16, short)]

    def make(state: ps.LoaderState | None = None) -> ps.Loader:
        source: Any = Again(items) if kind == "iterable" else items
        return ps.Loader(source, {"table": R, "x": S}, remainder="pad", state=state)

    whole = take(iter(make()))
    assert len(whole) == 3
    for cut in range(4):
        assert broken_off(make, [cut], 3)[0] == whole
    iterator = iter(make())
    take(iterator, 2)
    last = next(iter(make(iterator.state())))
    assert last["x"].shape == (16, 2)
    assert np.asarray(last["mask"]).sum() == short
    iterator.close()


def test_a_collated_last_batch_is_padded_to_the_first_ones_rows(R: NamedSharding) -> None:
    """Packing: the rows of a batch are what `collate` makes of it."""

    def pack(items: list[Any]) -> dict[str, np.ndarray]:
        return {"x": np.repeat(np.array([item["id"] for item in items]), 3)}

    def make(state: ps.LoaderState | None = None) -> ps.Loader:
        return ps.Loader(iter(examples(20)), R, batch_size=8, collate=pack, remainder="pad", state=state)

    whole = take(iter(make()))
    assert [batch[1][1] for batch in whole] == [(24,)] * 3
    for cut in range(4):
        assert broken_off(make, [cut], 3)[0] == whole


def test_a_short_batch_in_the_middle_is_probed_like_any_other(S: NamedSharding) -> None:
    items = [batch_of(range(start, stop)) for start, stop in ((0, 16), (16, 24), (24, 40), (40, 48), (48, 64))]

    def make(state: ps.LoaderState | None = None) -> ps.Loader:
        return ps.Loader(Again(items), S, epochs=2, state=state)

    whole = take(iter(make()))
    assert len(whole) == 10
    for cut in range(11):
        assert broken_off(make, [cut], 10)[0] == whole
