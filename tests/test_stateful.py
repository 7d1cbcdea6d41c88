"""Sources that tell their own state: asked by their own thread, at the right batch, and put back there."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from jax.sharding import NamedSharding

import prefetchshard as ps
from prefetchshard.base.codec import unpack_snapshot
from resumes import Again, Telling, TellingItself, batch_of, batches_of, broken_off, example, frozen, take, through_bytes


def full(i: int) -> np.ndarray:
    return np.full(8, i, np.int32)


class Stateful:
    """As in the field case, with a record of who called what."""

    def __init__(self, count: int = 10, names: tuple[str, str] = ("get_state", "set_state")) -> None:
        self.i = 0
        self.count = count
        self.state = {"i": 0, "history": [0]}
        self.calls: list[tuple[str, int]] = []
        self.threads: set[int] = set()
        self.inside = False
        setattr(self, names[0], self._get)
        setattr(self, names[1], self._set)

    def __iter__(self) -> Stateful:
        return self

    def __next__(self) -> np.ndarray:
        self._enter("next")
        if self.i == self.count:
            self.inside = False
            raise StopIteration
        self.i += 1
        self.state["i"] = self.i
        self.state["history"].append(self.i)
        self.inside = False
        return full(self.i - 1)

    def _get(self) -> dict[str, Any]:
        self._enter("get")
        self.inside = False
        return self.state  # the object itself: it goes on changing

    def _set(self, state: dict[str, Any]) -> None:
        self._enter("set")
        self.i = state["i"]
        self.state = state
        self.inside = False

    def _enter(self, name: str) -> None:
        assert not self.inside, "asked while it is being read"
        self.inside = True
        self.threads.add(threading.get_ident())
        self.calls.append((name, self.i))


def values(iterator: Any, count: int | None = None) -> list[int]:
    seen: list[int] = []
    while count is None or len(seen) < count:
        batch = next(iterator, None)
        if batch is None:
            break
        seen.append(int(np.asarray(batch)[0]))
    return seen


def own_state(state: ps.LoaderState) -> Any:
    assert state.snapshot is not None
    return unpack_snapshot(state.snapshot)


@pytest.mark.parametrize("names", [("get_state", "set_state"), ("state_dict", "load_state_dict")])
def test_the_snapshot_is_that_of_the_last_batch_handed_out(names: tuple[str, str], S: NamedSharding) -> None:
    """Not that of the item which was read last."""
    source = Stateful(names=names)
    iterator = iter(ps.prefetch(source, sharding=S, depth=4))
    assert values(iterator, 3) == [0, 1, 2]
    assert iterator._consumer.outbox.wait_ready()  # it has read on
    state = through_bytes(iterator.state())
    iterator.close()
    assert source.i > 3
    assert own_state(state) == {"i": 3, "history": [0, 1, 2, 3]}
    assert (state.resumes_by, state.since_snapshot, state.sample) == ("snapshot", 0, None)

    again = Stateful(names=names)
    iterator = iter(ps.prefetch(again, sharding=S, depth=4, state=state))
    assert values(iterator) == list(range(3, 10))
    assert again.calls[0] == ("set", 0)
    assert again.calls[1] == ("next", 3)
    assert iterator.stats().replayed == 0


def test_only_the_thread_that_reads_the_source_asks_it(S: NamedSharding) -> None:
    source = Stateful(30)
    loader = ps.prefetch(source, S, transform=lambda batch: batch, workers=3)
    iterator = iter(loader)
    states = [iterator.state() for _ in iterator]
    assert len(source.threads) == 1
    assert threading.get_ident() not in source.threads
    assert [own_state(state)["i"] for state in states] == list(range(1, 31))
    again = Stateful(30)
    assert values(iter(ps.prefetch(again, S, transform=lambda batch: batch, workers=3, state=states[11]))) == list(range(12, 30))
    assert len(again.threads) == 1
    assert threading.get_ident() not in again.threads


@pytest.mark.parametrize("hook", [None, lambda item: item])
def test_of_a_batch_of_examples_it_is_that_of_its_last_one(hook: Any, S: NamedSharding) -> None:
    """Where several items make a batch, the snapshot is the one after the last of them."""
    iterator = iter(ps.Loader(Telling([example(row) for row in range(30)]), S, batch_size=8, transform=hook, depth=3))
    for count in (1, 2, 3):
        next(iterator)
        assert own_state(iterator.state()) == {"at": 8 * count}
    assert next(iterator, None) is None


def test_it_is_asked_only_as_often_as_wanted(S: NamedSharding) -> None:
    for every, asked in ((1, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]), (3, [1, 4, 7, 10]), (4, [1, 5, 9]), (100, [1]), (None, [])):
        source = Stateful()
        iterator = iter(ps.prefetch(source, S, snapshot_every=every))
        states = [iterator.state() for _ in iterator]
        assert [at for name, at in source.calls if name == "get"] == asked
        for done, state in enumerate(states, 1):
            again = iter(ps.prefetch(Stateful(), S, snapshot_every=every, state=through_bytes(state)))
            assert values(again) == list(range(done, 10))
            since = done - max((at for at in asked if at <= done), default=0)
            assert again.stats().replayed == since
            assert state.resumes_by == ("replay" if every is None else "snapshot")
            assert (state.sample is None) == (every is not None)


def test_between_snapshots_a_second_break_counts_from_the_snapshot(S: NamedSharding) -> None:
    def make(state: ps.LoaderState | None = None) -> ps.Loader:
        return ps.prefetch(Stateful(), S, snapshot_every=7, state=state)

    for cuts in ([3, 2], [3, 2, 1, 1], [1, 1, 1, 4, 1], [0, 3, 0, 3]):
        seen, _ = broken_off(make, cuts, 10)
        assert seen == [frozen(full(i)) for i in range(10)]


def test_every_epoch_has_its_own_and_the_last_one_leads_to_the_next(S: NamedSharding) -> None:
    def make(state: ps.LoaderState | None = None) -> ps.Loader:
        def items(epoch: int) -> list[Any]:
            return [example(row, epoch) for row in range(40)]

        return ps.Loader(TellingItself(items), S, batch_size=16, remainder="pad", epochs=3, snapshot_every=2, state=state)

    iterator = iter(make())
    states = [iterator.state() for _ in iterator]
    assert [(own_state(s)["epoch"], own_state(s)["at"], s.since_snapshot) for s in states[:6]] == [
        *((0, 16, 0), (0, 16, 16), (0, 16, 24)),
        *((1, 16, 0), (1, 16, 16), (1, 16, 24)),
    ]
    whole = take(iter(make()))
    for cut in range(10):
        assert broken_off(make, [cut], 9)[0] == whole


def test_an_epoch_of_one_batch_that_is_not_full_is_read_again(S: NamedSharding) -> None:
    """Its end is seen only when the source was asked for more, and by then its state is no longer that of the batch."""

    def make(state: ps.LoaderState | None = None) -> ps.Loader:
        return ps.Loader(Telling([example(row) for row in range(5)]), S, batch_size=8, remainder="pad", state=state)

    iterator = iter(make())
    next(iterator)
    state = iterator.state()
    assert (state.snapshot, state.resumes_by) == (None, "replay")
    assert take(iter(make(state))) == []


def test_two_runs_over_one_source_do_not_take_each_others_state(S: NamedSharding) -> None:
    """Its state is that of the iterator it made last; the earlier run goes by what it took before, or reads again."""

    def make(state: ps.LoaderState | None = None) -> ps.Loader:
        return ps.Loader(TellingItself(lambda epoch: [example(row, epoch) for row in range(512)]), S, batch_size=8, state=state)

    whole = take(iter(make()))
    loader = make()
    one = iter(loader)
    take(one, 2)
    two = iter(loader)
    take(two, 1)
    take(one, 3)
    take(two, 1)
    states = [one.state(), two.state()]
    loader.close()
    for state, done in zip(states, (5, 2), strict=True):
        assert take(iter(make(through_bytes(state)))) == whole[done:]
    assert states[1].resumes_by == "replay"
    third = iter(loader)  # the others are gone: it is asked again
    take(third, 2)
    assert third.state().resumes_by == "snapshot"
    loader.close()


# --- states that cannot be kept


class Odd(Stateful):
    def _get(self) -> dict[str, Any]:
        return {"i": self.i, "files": [0, {"handle": object()}]}


def test_what_cannot_be_kept_fails_at_its_first_snapshot_and_names_the_place(S: NamedSharding) -> None:
    iterator = iter(ps.prefetch(Odd(), S))
    with pytest.raises(ps.StateError, match=r"\['files'\]\[1\]\['handle'\]: object cannot be kept .*Odd\.get_state.*snapshot_every=None"):
        next(iterator)


def test_what_cannot_be_kept_does_not_matter_where_nothing_is_to_be_kept(S: NamedSharding) -> None:
    iterator = iter(ps.prefetch(Odd(), S, snapshot_every=None))
    assert values(iterator, 4) == [0, 1, 2, 3]
    state = iterator.state()
    iterator.close()
    assert state.resumes_by == "replay"
    assert values(iter(ps.prefetch(Odd(), S, snapshot_every=None, state=state))) == list(range(4, 10))


def test_what_the_source_raises_when_asked_arrives_as_it_is(S: NamedSharding) -> None:
    class Broken(Stateful):
        def _get(self) -> dict[str, Any]:
            if self.i == 3:
                raise OSError("no state today")
            return {"i": self.i}

    iterator = iter(ps.prefetch(Broken(), S))
    with pytest.raises(OSError, match="no state today") as caught:
        values(iterator)
    assert any("batch 2" in note for note in caught.value.__notes__)
    assert iterator.state().step == 2  # the good batches before it


# --- sources that do not fit


def test_a_source_that_takes_no_state_refuses_one(S: NamedSharding) -> None:
    iterator = iter(ps.prefetch(Stateful(), S))
    values(iterator, 3)
    state = iterator.state()
    iterator.close()
    said = "holds the source's own state, and a source of type .* takes none"
    with pytest.raises(ps.StateError, match=said):
        ps.prefetch(iter([full(i) for i in range(10)]), S, state=state)  # told at once
    with pytest.raises(ps.StateError, match=said):
        next(iter(ps.prefetch(Again([full(i) for i in range(10)]), S, state=state)))
    with pytest.raises(ps.StateError, match=said):
        next(iter(ps.prefetch(lambda: iter([full(i) for i in range(10)]), S, state=state)))

    async def items() -> Any:
        yield full(0)

    with pytest.raises(ps.StateError, match=said):
        next(iter(ps.prefetch(lambda: items(), S, state=state)))


def test_half_a_pair_is_none(S: NamedSharding) -> None:
    class Half:
        def __init__(self) -> None:
            self.at = 0

        def __iter__(self) -> Iterator[np.ndarray]:
            return iter([full(i) for i in range(10)])

        def state_dict(self) -> dict[str, Any]:
            raise AssertionError("not asked")

        load_state_dict = None

    iterator = iter(ps.prefetch(Half(), S))
    values(iterator, 3)
    assert iterator.state().resumes_by == "replay"
    iterator.close()


def test_a_state_by_reading_again_is_accepted_by_a_source_that_tells_its_own(S: NamedSharding) -> None:
    iterator = iter(ps.prefetch(iter([full(i) for i in range(10)]), S))
    values(iterator, 3)
    state = iterator.state()
    iterator.close()
    source = Stateful()
    again = iter(ps.prefetch(source, S, state=state))
    assert values(again, 2) == [3, 4]
    assert own_state(again.state())["i"] == 5
    assert again.stats().replayed == 3
    again.close()


def test_a_source_that_is_shorter_after_its_snapshot_is_refused(S: NamedSharding) -> None:
    iterator = iter(ps.prefetch(Stateful(), S, snapshot_every=5))
    values(iterator, 4)
    state = iterator.state()
    iterator.close()
    assert state.since_snapshot == 3
    with pytest.raises(ps.StateError, match=r"ended 2 batches after it was put where its own state says, and the state was saved 3"):
        next(iter(ps.prefetch(Stateful(3), S, snapshot_every=5, state=state)))


def test_batches_of_a_size_that_the_source_chose_are_not_cut_otherwise(S: NamedSharding) -> None:
    iterator = iter(ps.Loader(Telling([example(row) for row in range(64)]), S, batch_size=16))
    next(iterator)
    state = iterator.state()
    iterator.close()
    with pytest.raises(ps.StateError, match="the source's own state"):
        state.rebatch(8)
    with pytest.raises(ps.StateError, match="batch_size: the state has 16, this loader 8"):
        ps.Loader(Telling([example(row) for row in range(64)]), S, batch_size=8, state=state)
    assert take(iter(ps.Loader(Telling([example(row) for row in range(64)]), S, batch_size=16, state=state))) == [
        frozen(batch_of(range(start, start + 16))) for start in (16, 32, 48)
    ]


def test_a_short_last_batch_of_the_sources_own_after_going_on(S: NamedSharding) -> None:
    for remainder, count in (("drop", 2), ("pad", 3)):

        def make(state: ps.LoaderState | None = None) -> ps.Loader:
            return ps.Loader(Telling(batches_of(40, 16)), S, remainder=remainder, state=state)  # noqa: B023 - called in this turn

        whole = take(iter(make()))
        assert len(whole) == count
        for cut in range(count + 1):
            assert broken_off(make, [cut], count)[0] == whole


# --- real ones


def rows() -> np.ndarray:
    return np.arange(100, dtype=np.int32)


def check(make: Any, count: int, way: str | None = "snapshot") -> None:
    whole = take(iter(make()))
    assert len(whole) == count
    for cut in (0, 1, count // 2, count - 1, count):
        seen, stats = broken_off(make, [cut], count)
        assert seen == whole
        assert stats.replayed == 0 or way != "snapshot"
    assert broken_off(make, [1, 2, 1], count)[0] == whole
    iterator = iter(make())
    take(iterator, 2)
    assert iterator.state().resumes_by == way
    iterator.close()


@pytest.mark.ecosystem
@pytest.mark.parametrize("kind", ["rows", "batches", "iterator", "factory", "prefetching", "data loader"])
def test_grain(kind: str, S: NamedSharding) -> None:
    grain = pytest.importorskip("grain")
    python = pytest.importorskip("grain.python")

    class Source:
        def __len__(self) -> int:
            return 100

        def __getitem__(self, index: int) -> Any:
            return rows()[index]

        def __repr__(self) -> str:  # grain compares it
            return "Source()"

    def pipeline(seed: int = 3) -> Any:
        return grain.MapDataset.source(list(rows())).shuffle(seed=seed)

    def batches(seed: int = 3) -> Any:
        return pipeline(seed).to_iter_dataset().batch(8, drop_remainder=True)

    def data_loader() -> Any:
        sampler = python.IndexSampler(100, python.NoSharding(), shuffle=True, num_epochs=1, seed=1)
        operations = [python.Batch(8, drop_remainder=True)]
        return python.DataLoader(data_source=Source(), sampler=sampler, worker_count=0, operations=operations)

    options = grain.ReadOptions(num_threads=4, prefetch_buffer_size=10)
    makers: dict[str, Any] = {
        "rows": lambda state=None: ps.Loader(pipeline().to_iter_dataset(), S, batch_size=8, epochs=2, state=state),
        "batches": lambda state=None: ps.Loader(batches(), S, epochs=2, state=state),
        "iterator": lambda state=None: ps.Loader(iter(batches()), S, state=state),
        "factory": lambda state=None: ps.Loader(lambda epoch: batches(epoch), S, epochs=2, state=state),
        "prefetching": lambda state=None: ps.Loader(pipeline().to_iter_dataset(options).batch(8, drop_remainder=True), S, state=state),
        "data loader": lambda state=None: ps.Loader(data_loader(), S, state=state),
    }
    check(makers[kind], 24 if kind in ("rows", "batches", "factory") else 12)


@pytest.mark.ecosystem
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("kind", ["plain", "epochs", "shuffled", "generator"])
def test_stateful_data_loader(kind: str, S: NamedSharding) -> None:
    torch = pytest.importorskip("torch")
    module = pytest.importorskip("torchdata.stateful_dataloader")

    def loader(**options: Any) -> Any:
        torch.manual_seed(0)
        dataset = torch.utils.data.TensorDataset(torch.from_numpy(rows()))
        return module.StatefulDataLoader(dataset, batch_size=8, drop_last=True, **options)

    def make(state: ps.LoaderState | None = None) -> ps.Loader:
        if kind == "generator":  # its state is a tensor
            return ps.Loader(loader(shuffle=True, generator=torch.Generator().manual_seed(5)), S, state=state)
        return ps.Loader(loader(shuffle=kind == "shuffled"), S, epochs=2 if kind == "epochs" else 1, state=state)

    check(make, 24 if kind == "epochs" else 12)


@pytest.mark.ecosystem
@pytest.mark.parametrize("kind", ["loader", "prefetcher", "examples", "node"])
def test_torchdata_nodes(kind: str, S: NamedSharding) -> None:
    nodes = pytest.importorskip("torchdata.nodes")
    data = pytest.importorskip("torch.utils.data")

    class Order(data.Sampler):
        def __iter__(self) -> Iterator[int]:
            return iter(range(100))

    def node() -> Any:
        return nodes.Mapper(nodes.Batcher(nodes.SamplerWrapper(Order()), 8, drop_last=True), lambda batch: np.array(batch, np.int32))

    makers: dict[str, Any] = {
        "loader": lambda state=None: ps.Loader(nodes.Loader(node()), S, epochs=2, state=state),
        "prefetcher": lambda state=None: ps.Loader(nodes.Loader(nodes.Prefetcher(node(), 4)), S, epochs=2, state=state),
        "examples": lambda state=None: ps.Loader(
            nodes.Loader(nodes.IterableWrapper([np.int32(row) for row in range(100)])), S, batch_size=8, state=state
        ),
        "node": lambda state=None: ps.Loader(node(), S, state=state),
    }
    check(makers[kind], 24 if kind in ("loader", "prefetcher") else 12)


@pytest.mark.ecosystem
@pytest.mark.parametrize("kind", ["map", "examples", "batches", "shuffle buffer"])
def test_hugging_face_datasets(kind: str, S: NamedSharding, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets = pytest.importorskip("datasets")

    def streamed() -> Any:
        return datasets.Dataset.from_dict({"x": rows()}).to_iterable_dataset(num_shards=4).with_format("numpy")

    makers: dict[str, Any] = {
        "map": lambda state=None: ps.Loader(
            datasets.Dataset.from_dict({"x": rows()}).with_format("numpy"), S, batch_size=8, epochs=2, shuffle=True, state=state
        ),
        "examples": lambda state=None: ps.Loader(streamed(), S, batch_size=8, epochs=2, state=state),
        "batches": lambda state=None: ps.Loader(streamed().batch(8, drop_last_batch=True), S, epochs=2, state=state),
        # What lies in a shuffle buffer is not in the dataset's own state, so the way back is to read again.
        "shuffle buffer": lambda state=None: ps.Loader(
            streamed().shuffle(seed=1, buffer_size=10), S, batch_size=8, epochs=2, snapshot_every=None, state=state
        ),
    }
    check(makers[kind], 24, {"map": "index", "shuffle buffer": "replay"}.get(kind, "snapshot"))
