"""A run that is broken off anywhere goes on with the very next batch, bit for bit."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import prefetchshard as ps
from consumers import consumer
from prefetchshard.ordering.epoch_order import EpochOrder
from resumes import (
    BY_INDEX,
    BY_REPLAY,
    BY_SNAPSHOT,
    ONE_SHOT,
    Again,
    Rows,
    batch_of,
    broken_off,
    example,
    frozen,
    source_of,
    take,
    through_bytes,
)

LENGTH, SIZE = 56, 16  # three full batches and half of one


def sharded() -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))


def augment(item: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**item, "x": item["x"] + rng.random(item["x"].shape, np.float32)}


def noisy(batch: Any, key: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf + jax.random.uniform(key) if leaf.dtype == jnp.float32 else leaf, batch)


# --- at every batch


@pytest.mark.parametrize("depth", [1, 2, 7])
def test_every_point_of_a_run(depth: int, S: NamedSharding) -> None:
    """The state speaks of what was handed out, however much was read ahead."""

    def make(state: ps.LoaderState | None = None) -> ps.Loader:
        return ps.prefetch(np.arange(80).reshape(80, 1), batch_size=8, sharding=S, depth=depth, state=state)

    whole = take(iter(make()))
    assert len(whole) == 10
    for k in range(11):
        iterator = iter(make())
        head = take(iterator, k)
        if k < 10:
            assert iterator._consumer.outbox.wait_ready()  # it has run ahead
        state = through_bytes(iterator.state())
        iterator.close()
        assert (state.rows, state.batches, state.step) == (8 * k, k, k)
        assert head + take(iter(make(state))) == whole


@pytest.mark.parametrize("kind", [*BY_INDEX, *BY_REPLAY, *BY_SNAPSHOT])
def test_a_state_does_not_depend_on_depth_or_time(kind: str, S: NamedSharding) -> None:
    def states(**options: Any) -> list[bytes]:
        source, size = source_of(kind, LENGTH, SIZE)
        iterator = iter(ps.Loader(source, S, batch_size=size, **options))
        found = [iterator.state().encode()]
        for _ in iterator:
            if options["depth"] == 3:
                iterator._consumer.outbox.wait_ready()  # the source has run ahead, or ended
            found.append(iterator.state().encode())
        found.append(iterator.state().encode())
        return found

    assert states(depth=1, workers=1) == states(depth=3, workers=3)
    pads: dict[str, Any] = {"transform": lambda item: item, "remainder": "pad"}
    assert states(depth=1, workers=1, **pads) == states(depth=3, workers=3, **pads)


KINDS = [*BY_INDEX, *BY_REPLAY, *BY_SNAPSHOT]


@st.composite
def settings_of_a_run(draw: st.DrawFn) -> tuple[str, dict[str, Any], list[int]]:
    kind = draw(st.sampled_from(KINDS))
    batched = kind.endswith("batches")
    options: dict[str, Any] = {
        "remainder": draw(st.sampled_from(["drop", "pad"])),
        "epochs": 1 if kind in ONE_SHOT else draw(st.sampled_from([1, 2, 3, None])),
        "shuffle": kind in BY_INDEX and draw(st.booleans()),
        "seed": draw(st.sampled_from([0, 7, 2**70])),
        "microbatches": draw(st.sampled_from([None, 2])) if not batched or kind in BY_INDEX else None,
        "transform": draw(st.sampled_from([None, augment])),
        "snapshot_every": draw(st.sampled_from([1, 2, 3, None])),
        "reuses_buffers": draw(st.booleans()),
    }
    if draw(st.integers(0, 3)) == 0:
        options["device_transform"] = noisy
    return kind, options, draw(st.lists(st.integers(0, 5), min_size=1, max_size=3))


def check_the_whole(case: tuple[str, dict[str, Any], list[int]], draw: Callable[[st.SearchStrategy[int]], int]) -> None:
    kind, options, cuts = case
    where = sharded()

    def make(state: ps.LoaderState | None = None) -> ps.Loader:
        # Shuffled batches of the source's own are all full: a short one could come first.
        source, size = source_of(kind, 48 if options["shuffle"] and kind.endswith("batches") else LENGTH, SIZE)
        ahead = {"depth": draw(st.integers(1, 3)), "workers": draw(st.integers(1, 3))}
        return ps.Loader(source, where, batch_size=size, state=state, **options, **ahead)

    limit = 9 if options["epochs"] is None else None
    iterator = iter(make())
    whole = take(iterator, limit)
    iterator.close()
    seen, stats = broken_off(make, cuts, len(whole), ends=limit is None)
    assert seen == whole
    if kind in BY_INDEX:
        assert stats.replayed == 0


@given(case=settings_of_a_run(), data=st.data())
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_head_and_resumed_tail_are_the_whole(case: Any, data: st.DataObject) -> None:
    check_the_whole(case, data.draw)


@pytest.mark.slow
@given(case=settings_of_a_run(), data=st.data())
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_head_and_resumed_tail_are_the_whole_often(case: Any, data: st.DataObject) -> None:
    check_the_whole(case, data.draw)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_at_every_batch(kind: str, S: NamedSharding) -> None:
    """Over two epochs where the source has them, the end of each included; and which way was used is said."""
    epochs = 1 if kind in ONE_SHOT else 2

    def make(state: ps.LoaderState | None = None) -> ps.Loader:
        source, size = source_of(kind, LENGTH, SIZE)
        return ps.Loader(source, S, batch_size=size, remainder="pad", epochs=epochs, state=state)

    whole = take(iter(make()))
    assert len(whole) == 4 * epochs
    way = "index" if kind in BY_INDEX else "replay" if kind in BY_REPLAY else "snapshot"
    for k in range(1, len(whole) + 1):
        iterator = iter(make())
        take(iterator, k)
        state = through_bytes(iterator.state())
        assert state.resumes_by == (way if k % 4 or way != "snapshot" else state.resumes_by)
        iterator.close()
        rest = iter(make(state))
        assert take(rest) == whole[k:]
        # A last batch that is not full has the snapshot of the one before it, and the rows after that are read again.
        since = 0 if k % 4 or kind.endswith("batches") else 8
        units = (k - 1) % 4 + 1 if kind.endswith("batches") else min(LENGTH, 16 * ((k - 1) % 4 + 1))
        assert rest.stats().replayed == {"index": 0, "replay": units, "snapshot": since}[way]


def test_a_run_can_go_on_on_trio_what_began_in_a_plain_loop(S: NamedSharding) -> None:
    def make(state: ps.LoaderState | None = None) -> ps.Loader:
        return ps.Loader(np.arange(64).reshape(64, 1), S, batch_size=8, shuffle=True, state=state)

    whole = take(iter(make()))
    head = iter(make())
    seen = take(head, 3)
    for way in ("trio", "asyncio", "sync"):
        loader = make(head.state())
        head = iter(loader)
        seen += [frozen(batch) for batch, _ in consumer(way)(head, 1)]
        loader.close()
    assert seen + take(iter(make(head.state()))) == whole


# --- asking


def test_asking_before_the_first_batch_takes_nothing(S: NamedSharding) -> None:
    loader = ps.prefetch([np.full(8, i) for i in range(6)], sharding=S)
    first = loader.state()
    iterator = iter(loader)
    assert iterator.state() == loader.state() == first
    assert [int(np.asarray(batch)[0]) for batch in iterator] == list(range(6))


def test_looking_at_the_spec_does_not_move_the_state(S: NamedSharding) -> None:
    loader = ps.Loader(iter([example(row) for row in range(64)]), S, batch_size=8)
    first = loader.state()
    assert loader.spec()["x"].shape == (8, 2)
    assert loader.state() == first
    next(iter(loader))
    assert loader.state().rows == 8
    loader.close()


def test_a_seed_of_any_length_is_compared(S: NamedSharding) -> None:
    rows = np.arange(64).reshape(64, 1)
    long = 10**300
    iterator = iter(ps.Loader(rows, S, batch_size=8, shuffle=True, seed=long))
    head = take(iterator, 3)
    state = through_bytes(iterator.state())
    iterator.close()
    whole = take(iter(ps.Loader(rows, S, batch_size=8, shuffle=True, seed=long)))
    assert head + take(iter(ps.Loader(rows, S, batch_size=8, shuffle=True, seed=long, state=state))) == whole
    with pytest.raises(ps.StateError, match="seed"):
        ps.Loader(rows, S, batch_size=8, shuffle=True, seed=long + 1, state=state)


def test_a_state_that_was_given_comes_back_before_any_batch(S: NamedSharding) -> None:
    """What is saved again at once is what was loaded, whatever the way."""
    for kind in KINDS:
        source, size = source_of(kind, LENGTH, SIZE)
        with ps.Loader(source, S, batch_size=size) as loader:
            iterator = iter(loader)
            take(iterator, 2)
            state = iterator.state()
        source, size = source_of(kind, LENGTH, SIZE)
        with ps.Loader(source, S, batch_size=size, state=state) as again:
            assert again.state() == state
            iterator = iter(again)
            assert iterator.state() == state
            assert iterator.position is None
            assert json.loads(json.dumps(json.loads(state.to_json()))) == json.loads(again.state().to_json())


def test_a_state_is_a_value(S: NamedSharding) -> None:
    """Reading on does not change it."""
    iterator = iter(ps.Loader(np.arange(64).reshape(64, 1), S, batch_size=8))
    take(iterator, 2)
    state = iterator.state()
    kept = state.encode()
    take(iterator)
    assert state.encode() == kept
    assert iterator.state() != state


def test_asking_from_another_thread_gives_the_state_after_some_whole_number_of_batches(S: NamedSharding) -> None:
    def make() -> ps.Loader:
        return ps.Loader(np.arange(320).reshape(320, 1), S, batch_size=8, epochs=2)

    iterator = iter(make())
    right = {iterator.state().encode()}
    for _ in iterator:
        right.add(iterator.state().encode())
    right.add(iterator.state().encode())
    assert len(right) == 82

    iterator = iter(make())
    asked = threading.Semaphore(0)
    over = threading.Event()
    seen: list[bytes] = []

    def ask() -> None:
        while not over.is_set():
            seen.append(iterator.state().encode())
            asked.release()

    asker = threading.Thread(target=ask)
    asker.start()
    count = 0
    for _ in iterator:
        count += 1
        if count % 8 == 0:
            asked.acquire()
    over.set()
    asker.join()
    assert count == 80
    assert set(seen) <= right
    steps = [ps.LoaderState.decode(state).step for state in seen]
    assert steps == sorted(steps)


def test_threads_that_share_a_run_leave_the_state_of_the_furthest(S: NamedSharding) -> None:
    iterator = iter(ps.Loader(np.arange(800).reshape(800, 1), S, batch_size=8))
    got: list[int] = []

    def consume() -> None:
        got.extend(int(np.asarray(batch)[0, 0]) // 8 for _, batch in zip(range(30), iterator, strict=False))

    threads = [threading.Thread(target=consume) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got) == list(range(len(got)))
    assert iterator.state().step == len(got) == 90
    # Two threads that took a batch each, and come to say so in the other order.
    taken = [iterator._consumer.outbox.take_nowait() for _ in range(2) if iterator._consumer.outbox.wait_ready()]
    for item in taken:
        iterator._consumer.outbox.untake(item)
    for _ in taken:
        iterator._consumer.take(0.0)
    assert iterator.state().step == 92
    iterator.close()


# --- loaders and their runs


def test_a_loader_speaks_of_its_only_live_run(S: NamedSharding) -> None:
    loader = ps.Loader(np.arange(64).reshape(64, 1), S, batch_size=8)
    assert loader.state().step == 0
    one = iter(loader)
    take(one, 3)
    assert loader.state() == one.state()
    assert loader.state().step == 3
    two = iter(loader)
    with pytest.raises(ps.ConfigError, match=r"ask the iterator"):
        loader.state()
    take(two, 1)
    two.close()
    assert loader.state() == one.state()
    loader.close()
    assert loader.state() == two.state()  # of none: that of the run that was started last
    assert (one.state().step, two.state().step) == (3, 1)


def test_a_loop_left_by_break_tells_where(S: NamedSharding) -> None:
    loader = ps.Loader(np.arange(64).reshape(64, 1), S, batch_size=8)
    for seen, _ in enumerate(loader):
        if seen == 4:
            break
    loader.close()
    state = loader.state()
    assert (state.step, state.rows) == (5, 40)
    assert len(list(loader)) == 8  # its own next run starts over
    assert len(list(ps.Loader(np.arange(64).reshape(64, 1), S, batch_size=8, state=state))) == 3


def test_after_a_failure_the_good_batches_before_it_count(S: NamedSharding) -> None:
    def source(fails: bool) -> Any:
        for row in range(64):
            if fails and row == 40:
                raise OSError("gone")
            yield example(row)

    iterator = iter(ps.Loader(source(True), S, batch_size=8))
    with pytest.raises(OSError, match="gone"):
        take(iterator)
    assert iterator.state().rows == 40
    assert take(iter(ps.Loader(source(False), S, batch_size=8, state=iterator.state()))) == [
        frozen(batch_of(range(start, start + 8))) for start in (40, 48, 56)
    ]


def test_a_run_broken_off_starts_over_where_the_state_was(S: NamedSharding) -> None:
    def make(state: ps.LoaderState | None = None) -> ps.Loader:
        return ps.Loader(np.arange(64).reshape(64, 1), S, batch_size=8, state=state)

    head = iter(make())
    take(head, 3)
    loader = make(head.state())
    whole = take(iter(make()))
    for _ in range(2):
        iterator = iter(loader)
        assert take(iterator, 2) == whole[3:5]
        iterator.close()
    assert take(iter(loader)) == whole[3:]
    assert take(iter(loader)) == whole  # the next run


def loops(make: Callable[..., ps.Loader], runs: int) -> tuple[list[list[Any]], list[tuple[int, int, ps.LoaderState]]]:
    """`for e in range(runs): for b in loader`: the batches of each run, and (run, batches done, state) at every point."""
    loader = make()
    whole: list[list[Any]] = []
    saved = [(0, 0, loader.state())]
    for run in range(runs):
        whole.append([])
        for batch in loader:
            whole[-1].append(frozen(batch))
            saved.append((run, len(whole[-1]), loader.state()))
        saved.append((run + 1, 0, loader.state()))
    return whole, saved


@pytest.mark.parametrize(
    ("kind", "epochs"),
    [
        *((kind, 1) for kind in KINDS if kind not in ONE_SHOT),
        *((kind, 2) for kind in ("arrays", "list of batches", "iterable", "telling itself of batches")),
    ],
)
def test_loops_over_epochs(kind: str, epochs: int, S: NamedSharding) -> None:
    """Before the end of a run: the rest of it, which may be empty, then the next; after it: the next at once."""

    def make(state: ps.LoaderState | None = None) -> ps.Loader:
        source, size = source_of(kind, 48, SIZE)
        return ps.Loader(source, S, batch_size=size, epochs=epochs, state=state, shuffle=kind in BY_INDEX)

    whole, saved = loops(make, 3)
    assert [len(run) for run in whole] == [3 * epochs] * 3
    saved = [point for point in saved if point[0] < 2 or point[1] == 0]
    assert len(saved) == 6 * epochs + 4
    for run, done, state in saved:
        loader = make(through_bytes(state))
        for expected in whole[run : run + 2]:
            assert take(iter(loader)) == expected[done:], (run, done)
            done = 0


@pytest.mark.parametrize("kind", ["arrays", "iterable", "telling iterable", "iterable of batches"])
def test_positions_go_on_and_say_where_epochs_end(kind: str, S: NamedSharding) -> None:
    def make(state: ps.LoaderState | None = None) -> ps.Loader:
        source, size = source_of(kind, 48, SIZE)
        return ps.Loader(source, S, batch_size=size, epochs=3, state=state)

    def places(iterator: ps.LoaderIterator, count: int | None = None) -> list[tuple[int, ...]]:
        found: list[tuple[int, ...]] = []
        while count is None or len(found) < count:
            if next(iterator, None) is None:
                break
            p = iterator.position
            assert p is not None
            found.append((p.run, p.epoch, p.step, p.first_row, p.rows, p.batches, p.ends_epoch))
        return found

    whole = places(iter(make()))
    assert [place[-1] for place in whole] == [False, False, True] * 3
    for k in range(10):
        iterator = iter(make())
        head = places(iterator, k)
        state = iterator.state()
        iterator.close()
        assert head + places(iter(make(state))) == whole


def test_fewer_epochs_than_were_read_give_an_empty_run_and_lose_nothing(S: NamedSharding) -> None:
    def make(epochs: int, state: ps.LoaderState | None = None) -> ps.Loader:
        return ps.Loader(np.arange(32).reshape(32, 1), S, batch_size=8, epochs=epochs, shuffle=True, state=state)

    whole = take(iter(make(4)))
    iterator = iter(make(4))
    take(iterator, 10)
    state = iterator.state()
    iterator.close()
    loader = make(1, state)
    assert take(iter(loader)) == []
    assert take(iter(loader)) == whole[10:12]
    assert take(iter(loader)) == whole[12:]
    assert take(iter(make(3, state))) == whole[10:12]


def test_the_length_is_that_of_what_is_left(S: NamedSharding) -> None:
    for kind in ("arrays", "dataset of batches", "list"):
        source, size = source_of(kind, 48, SIZE)
        iterator = iter(ps.Loader(source, S, batch_size=size, epochs=2))
        for done in range(7):
            loader = ps.Loader(source, S, batch_size=size, epochs=2, state=iterator.state())
            assert len(loader) == 6 - done == len(list(loader))
            next(iterator, None)


class Sized(Again):
    def __len__(self) -> int:
        return len(self.items)


def test_a_length_that_fails_is_no_length(S: NamedSharding) -> None:
    class Shy(Again):
        def __len__(self) -> int:
            raise RuntimeError("not connected")

    loader = ps.Loader(Shy([example(row) for row in range(16)]), S, batch_size=8)
    assert loader.state().fingerprint.length is None
    assert len(take(iter(loader))) == 2


@pytest.mark.parametrize("remainder", ["drop", "pad"])
def test_the_length_over_an_iterable_with_another_batch_size(remainder: Any, S: NamedSharding) -> None:
    source = Sized([example(row) for row in range(100)])
    iterator = iter(ps.Loader(source, S, batch_size=32, epochs=2, remainder=remainder))
    for _ in range(4):
        loader = ps.Loader(source, S, batch_size=8, epochs=2, remainder=remainder, state=iterator.state().rebatch(8))
        assert len(loader) == len(list(loader))
        next(iterator)
    iterator.close()
    with pytest.raises(ps.StateError, match="length: the state has 100, this loader 99"):
        ps.Loader(Sized(source.items[1:]), S, batch_size=32, remainder=remainder, state=iterator.state())


# --- other settings


def state_after(count: int, **options: Any) -> ps.LoaderState:
    iterator = iter(ps.Loader(np.arange(100).reshape(100, 1), **{"batch_size": 10, "sharding": one_device(), **options}))
    take(iterator, count)
    state = iterator.state()
    iterator.close()
    return state


def one_device() -> Any:
    return jax.sharding.SingleDeviceSharding(jax.devices()[0])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch_size": 20}, r"batch_size: the state has 10, this loader 20; state\.rebatch\(20\)"),
        ({"batch_size": None}, "batch_size: the state has 10, this loader None"),
        ({"seed": 3}, "seed: the state has 0, this loader 3"),
        ({"shuffle": True}, "shuffle: the state has False, this loader True"),
        ({"remainder": "pad"}, "remainder: the state has 'drop', this loader 'pad'"),
        ({"source": np.arange(90).reshape(90, 1)}, "length: the state has 100, this loader 90"),
        ({"source": iter(np.arange(100).reshape(100, 1))}, "kind: the state has 'random access', this loader 'iterator'"),
    ],
)
def test_what_would_give_other_batches_is_refused_where_the_loader_is_made(options: dict[str, Any], said: str) -> None:
    state = state_after(1)
    source = options.pop("source", np.arange(100).reshape(100, 1))
    if options.get("batch_size", 10) is None:
        source = [np.zeros((10, 1))] * 100
    with pytest.raises(ps.StateError, match=said) as caught:
        ps.Loader(source, **{"batch_size": 10, "sharding": one_device(), "state": state, **options})
    assert isinstance(caught.value, ValueError)


def test_other_workers_depth_devices_and_form_of_the_rows_are_accepted(mesh: Mesh) -> None:
    rows = np.arange(96).reshape(96, 1)
    whole = take(iter(ps.Loader(rows, one_device(), batch_size=8, shuffle=True, seed=5)))
    state: ps.LoaderState | None = None
    half = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    seen = []
    for source, sharding, options in [
        (rows, NamedSharding(mesh, PartitionSpec("data")), {"depth": 3}),
        (list(rows), one_device(), {"workers": 1}),
        (Rows(list(rows)), NamedSharding(half, PartitionSpec(("data", "model"))), {"workers": 5}),
        (rows, NamedSharding(half, PartitionSpec("data")), {"depth": 1, "device_transform": lambda batch: batch}),
    ]:
        iterator = iter(ps.Loader(source, sharding, batch_size=8, shuffle=True, seed=5, state=state, **options))
        seen += take(iterator, 3)
        state = iterator.state()
        iterator.close()
    assert seen == whole


@pytest.mark.parametrize(
    ("junk", "said"),
    [
        (b"PFSt", r"LoaderState\.decode"),
        (bytearray(4), r"LoaderState\.decode"),
        ({"junk": 1}, r"takes a LoaderState .* not dict"),
        (5, "not int"),
        ("path", "not str"),
    ],
)
def test_what_is_no_state_is_refused(junk: Any, said: str) -> None:
    with pytest.raises(ps.ConfigError, match=said):
        ps.Loader(np.arange(100), one_device(), batch_size=10, state=junk)


def test_a_place_that_the_epoch_does_not_have_is_refused() -> None:
    for change in ({"rows": 101}, {"rows": 2**40}):
        with pytest.raises(ps.StateError, match=f"after {change['rows']} of 100"):
            ps.Loader(np.arange(100).reshape(100, 1), one_device(), batch_size=10, state=msgspec.structs.replace(state_after(1), **change))


@pytest.mark.parametrize("every", [0, -1, 1.5, True, "1"])
def test_snapshot_every_is_a_count_or_none(every: Any) -> None:
    with pytest.raises(ps.ConfigError, match="snapshot_every"):
        ps.Loader(np.arange(100), one_device(), batch_size=10, snapshot_every=every)


# --- elastic


def ids_of(batches: list[Any]) -> list[int]:
    """The rows, without padding."""
    return [
        int(row)
        for batch in batches
        for row, real in zip(np.asarray(batch["id"]), np.asarray(batch.get("mask", np.ones(len(batch["id"]), bool))), strict=True)
        if real
    ]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("kind", ["arrays", "dataset"])
def test_eight_devices_and_then_four_with_half_the_batch(shuffle: bool, kind: str, mesh: Mesh) -> None:
    """No row of the epoch is lost or comes twice, and the order stays that of the epoch."""
    source, _ = source_of(kind, 1000, 64)
    eight = NamedSharding(mesh, PartitionSpec("data"))
    four = NamedSharding(Mesh(np.array(jax.devices()[:4]), ("data",)), PartitionSpec("data"))
    whole = ids_of(list(ps.Loader(source, eight, batch_size=64, shuffle=shuffle, remainder="pad", epochs=2)))
    assert Counter(whole) == Counter(dict.fromkeys(range(1000), 2))
    for cut in (1, 7, 15, 16, 20):
        before = iter(ps.Loader(source, eight, batch_size=64, shuffle=shuffle, remainder="pad", epochs=2))
        head = ids_of([next(before) for _ in range(cut)])
        state = through_bytes(before.state())
        before.close()
        after = iter(ps.Loader(source, four, batch_size=32, shuffle=shuffle, remainder="pad", epochs=2, state=state.rebatch(32)))
        middle = ids_of([next(after) for _ in range(3)])
        assert after.position is not None
        assert after.position.step == cut + 2
        last = ps.Loader(source, eight, batch_size=64, shuffle=shuffle, remainder="pad", epochs=2, state=after.state().rebatch(64))
        after.close()
        assert head + middle + ids_of(list(last)) == whole


def test_a_batch_size_by_device_asks_for_rebatch_on_fewer_devices(mesh: Mesh) -> None:
    half = NamedSharding(Mesh(np.array(jax.devices()[:4]), ("data",)), PartitionSpec("data"))
    source, _ = source_of("arrays", 1000, 64)
    before = iter(ps.Loader(source, NamedSharding(mesh, PartitionSpec("data")), batch_size=ps.PerDevice(8)))
    take(before, 3)
    state = before.state()
    before.close()
    with pytest.raises(ps.StateError, match=r"batch_size: the state has 64, this loader 32; state\.rebatch\(32\)"):
        ps.Loader(source, half, batch_size=ps.PerDevice(8), state=state)
    loader = ps.Loader(source, half, batch_size=ps.PerDevice(8), state=state.rebatch(32))
    assert ids_of(list(loader)) == list(range(192, 992))


def test_rows_that_a_larger_batch_would_drop_go_into_smaller_ones(mesh: Mesh) -> None:
    where = NamedSharding(mesh, PartitionSpec("data"))
    source, _ = source_of("arrays", 100, 64)
    before = iter(ps.Loader(source, where, batch_size=64))
    head = ids_of([next(before)])
    after = ps.Loader(source, where, batch_size=16, state=before.state().rebatch(16))
    before.close()
    assert len(after) == 2
    assert head + ids_of(list(after)) == list(range(96))


def test_what_is_left_must_be_whole_batches_where_a_remainder_is_an_error(mesh: Mesh) -> None:
    state = state_after(3, remainder="error").rebatch(20)
    with pytest.raises(ps.ConfigError, match=r"70 rows of epoch 0 are left, no multiple of batch_size=20"):
        ps.Loader(np.arange(100).reshape(100, 1), one_device(), batch_size=20, remainder="error", state=state)
    state = state_after(4, remainder="error").rebatch(20)
    assert len(list(ps.Loader(np.arange(100).reshape(100, 1), one_device(), batch_size=20, remainder="error", state=state))) == 3


# --- large


class Virtual:
    """2**33 rows that exist only when they are asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __len__(self) -> int:
        return 2**33

    def __getitem__(self, row: int) -> dict[str, np.ndarray]:
        self.asked.append(row)
        return {"high": np.array(row >> 20, np.int32), "low": np.array(row & 0xFFFFF, np.int32)}


def test_in_the_middle_of_two_to_the_33_rows(S: NamedSharding) -> None:
    dataset = Virtual()
    make = lambda **options: ps.Loader(dataset, S, batch_size=1024, shuffle=True, seed=1, **options)  # noqa: E731
    state = msgspec.structs.replace(make().state(), run=3, epoch=12, run_epoch=10, rows=2**32, batches=2**22, step=12 * 2**23 + 2**22)
    assert len(state.encode()) < 300
    loader = make(epochs=5, state=through_bytes(state))
    iterator = iter(loader)
    batch = next(iterator)
    rows = np.asarray(batch["high"]).astype(np.int64) << 20 | np.asarray(batch["low"])
    expected = EpochOrder(2**33, 1024, drop=True, shuffle=True, seed=1).rows(12, 2**32, 2**32 + 1024)
    assert rows.tolist() == np.asarray(expected).tolist()
    assert len(iterator.state().encode()) < 300
    loader.close()
    assert len(dataset.asked) <= 1024 * (loader.spec().ahead + 1)  # no row before the place was read
