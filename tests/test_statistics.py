"""Every number of the statistics, from batches whose times are known."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import prefetchshard as ps
from prefetchshard.measuring.delivered import CAUSES, Delivered, Steps
from prefetchshard.measuring.distribution import LEAST_SECONDS, Distribution, Durations
from prefetchshard.measuring.locking import LATE_SHARE, MOST_PROBE_SECONDS, PROBE_SECONDS, Locking, LockProbes
from prefetchshard.measuring.recorder import RECENT, Recorder, Span
from prefetchshard.measuring.setup import Setup
from prefetchshard.measuring.stats import Stats
from prefetchshard.measuring.timeline import BatchTimes, PartTimes
from prefetchshard.placing.placer import LOOK_EVERY, DeviceLooks, PendingTransfer
from prefetchshard.queues.bounded_queue import QueueStats
from prefetchshard.staging.layout import StagingStats
from prefetchshard.testing import ManualClock
from support import Thread

NO_QUEUE = QueueStats(2, 0, 0, 0, 0, 0, 0.0, 0.0)
NO_STAGING = StagingStats(*([0] * len(StagingStats.__struct_fields__)))


def batch(
    step: int, asked: float, taken: float, *, read: float, ready: float, dispatch: float | None = None, **seconds: float
) -> BatchTimes:
    """A batch that was complete on the host at `read`, dispatched then unless said otherwise, ready at `ready`."""
    times = BatchTimes(0, 8 * step)
    times.step = step
    spent: Any = seconds or {"reading": 1.0}
    times.parts = [PartTimes("reader", read - sum(spent.values()), read, spent)]
    times.dispatch_at = times.dispatched_at = read if dispatch is None else dispatch
    times.ready_at, times.asked_at, times.taken_at = ready, asked, taken
    return times


def seconds_of(steps: Steps) -> dict[str, float]:
    """What is not 0."""
    return {name: pytest.approx(value) for name, value in msgspec.structs.asdict(steps).items() if value}


# -- distributions


@given(st.lists(st.floats(1e-6, 1e4), min_size=1, max_size=60), st.sampled_from([0.1, 0.5, 0.9, 0.99, 1.0]))
def test_a_quantile_is_right_to_a_hundredth(seconds: list[float], share: float) -> None:
    durations = Durations()
    durations.add(np.array(seconds), range(len(seconds)))
    found = durations.now()
    assert found.quantile(share) == pytest.approx(sorted(seconds)[math.ceil(share * len(seconds)) - 1], rel=0.0115)
    assert (found.count, found.largest, found.largest_step) == (len(seconds), max(seconds), seconds.index(max(seconds)))
    assert found.total == pytest.approx(sum(seconds))
    assert found.mean == pytest.approx(sum(seconds) / len(seconds))


def test_a_distribution_of_nothing_and_of_no_time() -> None:
    assert (Distribution().p50, Distribution().p99, Distribution().mean, Distribution().largest_step) == (0.0, 0.0, 0.0, -1)
    durations = Durations()
    durations.add(np.array([]), [])
    durations.add(np.zeros(3), [4, 5, 6])
    assert durations.now().to_dict() == {
        "count": 3, "total": 0.0, "mean": 0.0, "p50": 0.0, "p90": 0.0, "p99": 0.0, "largest": 0.0, "largest_step": 4,
    }  # fmt: skip
    durations.add(np.array([LEAST_SECONDS / 2, 1e9]), [7, 8])
    assert (durations.now().p50, durations.now().largest) == (0.0, 1e9)


def test_what_was_added_since() -> None:
    durations = Durations()
    durations.add(np.array([1.0, 8.0]), [0, 1])
    early = durations.now()
    durations.add(np.array([2.0, 2.0, 4.0]), [2, 3, 4])
    since = durations.now() - early
    assert (since.count, since.total) == (3, 8.0)
    assert (since.p50, since.p99) == (pytest.approx(2.0, rel=0.02), pytest.approx(4.0, rel=0.02))
    assert (since.largest, since.largest_step) == (pytest.approx(4.0, rel=0.03), -1), (
        "it was not the longest of all, so only its bucket is known"
    )
    durations.add(np.array([16.0]), [5])
    assert ((durations.now() - early).largest, (durations.now() - early).largest_step) == (16.0, 5)
    assert (early - early).to_dict() == Distribution().to_dict()


# -- what a wait was for


@pytest.mark.parametrize(
    ("taken", "read", "dispatch", "ready", "expected"),
    [
        (
            10.0,
            9.0,
            9.5,
            10.0,
            {"reading": 2.25, "transform": 4.5, "copying": 2.25, "transferring": 0.5, "handing_over": 0.5, "late": 10.0},
        ),
        (10.0, -1.0, 4.0, 7.0, {"transferring": 3.0, "handing_over": 7.0, "late": 10.0}),  # read before
        (10.0, 1.0, 4.0, 7.0, {"reading": 0.25, "transform": 0.5, "copying": 0.25, "transferring": 3.0, "handing_over": 6.0, "late": 10.0}),
        (10.0, -3.0, -2.0, -1.0, {"handing_over": 10.0, "ahead": 1.0}),
        (10.0, 10.0, 10.0, 10.0, {"reading": 2.5, "transform": 5.0, "copying": 2.5, "late": 10.0}),
        (0.0, -3.0, -2.0, -1.0, {"ahead": 1.0}),
    ],
)
def test_a_wait_is_for_where_its_batch_was(taken: float, read: float, dispatch: float, ready: float, expected: dict[str, float]) -> None:
    delivered = Delivered()
    first = batch(0, -9.0, -8.0, read=-8.5, ready=-8.0)
    second = batch(1, -4.0, -4.0, read=-7.0, ready=-6.0)
    third = batch(2, 0.0, taken, read=read, dispatch=dispatch, ready=ready, reading=1.0, transforming=1.5, collating=0.5, batching=1.0)
    delivered.add([first, second, third], warm_up=1)
    expected = {"count": 1, "busy": 4.0, **({"stalled": taken} if taken else {}), **expected}
    assert seconds_of(delivered.steady) == expected
    longest = max(CAUSES, key=lambda cause: expected.get(cause.replace(" ", "_"), 0.0))
    assert delivered.longest_wait == (longest if taken else "")


def test_a_batch_of_which_nothing_was_measured_was_being_read() -> None:
    delivered = Delivered()
    delivered.add([batch(i, float(i), i + 0.5, read=i + 0.5, ready=i + 0.5, reading=0.0) for i in range(4)], warm_up=1)
    assert delivered.steady.reading == delivered.steady.stalled == 1.0


def test_start_up_and_the_first_step_are_apart() -> None:
    """The first batch is start-up, the first step compiles, and what was read ahead meanwhile is used up first."""
    delivered = Delivered()
    asked = [0.0, 10.0, 11.0, 12.0, 13.0, 16.0, 19.0]
    taken = [4.0, 10.0, 11.0, 12.0, 15.0, 18.0, 21.0]
    for i, (began, got) in enumerate(zip(asked, taken, strict=True)):
        delivered.add([batch(i, began, got, read=got, ready=got if got > began else began - 0.5)], warm_up=9)
    assert delivered.start_up_seconds == 4.0
    assert seconds_of(delivered.warm_up) == {"count": 4, "busy": 3.0, "stalled": 2.0, "reading": 2.0, "ahead": 1.5, "late": 2.0}, (
        "not the 6 s of the first step"
    )
    assert seconds_of(delivered.steady) == {"count": 2, "busy": 2.0, "stalled": 4.0, "reading": 4.0}
    assert (delivered.next.count, delivered.next.largest, delivered.next.largest_step) == (6, 2.0, 4)
    assert (delivered.step.count, delivered.step.total) == (5, 5.0)
    assert delivered.longest_wait == "reading"


@pytest.mark.parametrize("sizes", [[7], [1] * 7, [2, 2, 3], [1, 6], [3, 4]])
def test_it_does_not_matter_how_many_are_summed_up_at_once(sizes: list[int]) -> None:
    batches = [
        batch(i, 3.0 * i, 3.0 * i + (i % 3), read=3.0 * i + 0.25, dispatch=3.0 * i + 0.5, ready=3.0 * i + 0.75 * (i % 2 + 1))
        for i in range(7)
    ]
    whole, cut = Delivered(), Delivered()
    whole.add(batches, 3)
    left = iter(batches)
    for size in sizes:
        cut.add(list(itertools.islice(left, size)), 3)
    for name in ("warm_up", "steady", "start_up_seconds", "transfer_seconds", "ready_seconds", "host_seconds", "longest_wait", "batches"):
        assert getattr(cut, name) == getattr(whole, name), name
    for name in ("next", "step", "reading", "transferring"):
        assert getattr(cut, name).now() == getattr(whole, name).now(), name


def test_a_transfer_behind_another_begins_when_that_is_done() -> None:
    delivered = Delivered()
    batches = [
        batch(0, 9.0, 9.0, read=0.0, dispatch=1.0, ready=3.0),
        batch(1, 9.0, 9.0, read=0.5, dispatch=2.0, ready=6.0),
        batch(2, 9.0, 9.0, read=5.0, dispatch=7.0, ready=8.0),
    ]
    for one in batches:
        one.dispatched_at = one.dispatch_at + 0.25
    delivered.add(batches, warm_up=0)
    assert delivered.transfer_seconds == 2.0 + 3.0 + 1.0
    assert delivered.dispatch_seconds == 0.75
    assert (delivered.transferring.total, delivered.transferring.largest, delivered.transferring.largest_step) == (6.0, 3.0, 1)
    assert delivered.host_seconds == 1.0 + 1.5 + 2.0
    assert delivered.ready_seconds == 6.0 + 3.0 + 1.0


# -- the interpreter's lock


def test_who_wakes_late_has_waited_for_the_lock() -> None:
    clock, probes = ManualClock(), LockProbes()
    late = iter([0.0, 0.001, 0.004, 0.02])
    slept: list[float] = []

    def wait_ready(seconds: float) -> bool:
        slept.append(seconds)
        clock.advance(seconds + next(late, 0.0))
        return len(slept) == 5

    assert LATE_SHARE == 0.6
    assert probes.wait(wait_ready, lambda: False, clock)
    assert slept == [PROBE_SECONDS * 2**i for i in range(5)]
    assert probes.now() == Locking(4, 2, pytest.approx(0.024))
    assert probes.now().share == 0.5
    probes.woken(0.001)
    assert probes.now().looks == 4, "who is woken in time says nothing"
    probes.woken(0.006)
    assert probes.now() - Locking(4, 2, 0.024) == Locking(1, 1, pytest.approx(0.006))
    assert Locking().share == 0.0


def test_a_wait_that_ends_without_anything() -> None:
    probes = LockProbes()
    assert not probes.wait(lambda seconds: False, lambda: True, ManualClock())
    assert probes.now() == Locking()


def test_long_waits_are_looked_at_seldom() -> None:
    clock, probes, slept = ManualClock(), LockProbes(), []

    def wait_ready(seconds: float) -> bool:
        slept.append(seconds)
        clock.advance(seconds)
        return len(slept) == 20

    probes.wait(wait_ready, lambda: False, clock)
    assert slept[-1] == MOST_PROBE_SECONDS
    assert max(slept) == MOST_PROBE_SECONDS


# -- all of it


def run(recorder: Recorder, batches: list[BatchTimes]) -> None:
    """As the consumer notes what it takes."""
    for times in batches:
        if recorder.first_next_at is None:
            recorder.first_next_at = times.asked_at
        recorder.recent[recorder.batches % RECENT] = times
        recorder.stall_seconds += times.taken_at - times.asked_at
        recorder.last_next_at = times.taken_at
        recorder.batches += 1
        recorder.rows += 8
        recorder.bytes += 100


def stats_of(recorder: Recorder, **changes: Any) -> Stats:
    return msgspec.structs.replace(recorder.stats(workers=3, host=NO_QUEUE, ready=NO_QUEUE, staging=NO_STAGING), **changes)


def test_rates_occupancy_and_shares() -> None:
    recorder = Recorder(ManualClock())
    run(recorder, [batch(i, 4.0 * i, 4.0 * i + 1.0, read=4.0 * i - 2.0, dispatch=4.0 * i - 1.0, ready=4.0 * i + 0.5) for i in range(6)])
    recorder.add_device("gpu:0", 3_000, 1.0)
    recorder.add_device("gpu:0", 1_000, 1.0)
    recorder.add_device("gpu:1", 1_000, 1.0)
    stats = stats_of(recorder)
    assert stats.wall_seconds == 21.0
    assert (stats.rows_per_second, stats.bytes_per_second) == (48 / 21, 600 / 21)
    assert (stats.stall_seconds, stats.busy_seconds, stats.stall_share) == (6.0, 15.0, 6 / 21)
    assert stats.mean_ready == pytest.approx(6 * 0.5 / 21)
    assert stats.mean_read == pytest.approx(6 * 1.0 / 21)
    assert (stats.devices, stats.imbalance) == ({"gpu:0": 2_000.0, "gpu:1": 1_000.0}, 1.0)
    assert (stats.next.p50, stats.step.p50) == (pytest.approx(1.0, rel=0.0115), pytest.approx(3.0, rel=0.0115))
    assert (stats.transfer_seconds, stats.stages.transferring.p50) == (9.0, pytest.approx(1.5, rel=0.0115))
    assert msgspec.structs.replace(stats, devices={}).imbalance == 0.0


def test_what_happened_between_two_looks() -> None:
    recorder = Recorder(ManualClock())
    batches = [batch(i, 4.0 * i, 4.0 * i + 1.0, read=4.0 * i + 0.5, ready=4.0 * i + 0.75) for i in range(12)]
    run(recorder, batches[:5])
    early = stats_of(recorder)
    run(recorder, batches[5:])
    since = stats_of(recorder) - early
    assert (since.batches, since.rows, since.bytes, since.wall_seconds) == (7, 56, 700, 28.0)
    assert (since.stall_seconds, since.busy_seconds, since.start_up_seconds, since.stall_share) == (7.0, 21.0, 0.0, 0.25)
    assert (since.next.count, since.steady.count, since.steady.busy) == (7, 7, 21.0)
    assert since.longest_wait == ""
    assert since.verdict.bound == "reading"
    assert (early - early).batches == 0


def test_threads_by_what_they_are_for() -> None:
    clock, cpu = ManualClock(), ManualClock()
    recorder = Recorder(clock, cpu)
    meter = recorder.meter("readers")
    span = Span(recorder, "reading", BatchTimes(0))
    clock.advance(3.0)
    cpu.advance(1.0)
    span.end()
    meter.waited_seconds = 5.0
    readers = stats_of(recorder).readers
    assert (readers.threads, readers.busy_seconds, readers.cpu_seconds) == (1, 3.0, 1.0)
    assert (readers.input_seconds, readers.room_seconds) == (0.0, 5.0), "rows that are found by number are always there"
    assert stats_of(recorder).source_thread.threads == 0
    meter.role = "source"
    room = msgspec.structs.replace(NO_QUEUE, backpressure_seconds=7.0)
    source = recorder.stats(workers=1, host=room, ready=NO_QUEUE, staging=NO_STAGING).source_thread
    assert (source.threads, source.busy_seconds, source.input_seconds, source.room_seconds) == (1, 3.0, 0.0, 7.0)
    other = Recorder(clock, cpu)
    other.meter("source").waited_seconds = 1.0
    waiting = _meter_of_another_thread(other)
    waiting.waited_seconds = 4.0
    readers = stats_of(other).readers
    assert (readers.input_seconds, readers.room_seconds) == (4.0, 0.0), "they wait for the thread that pulls"


def test_threads_that_came_and_went_are_not_taken_for_threads_beside_each_other() -> None:
    """Three at once were at work all the time, and the thread that pulls was not."""
    recorder = Recorder(ManualClock())
    recorder.setup = Setup(has_functions=True)
    recorder.meter("source").busy["reading"] = 20.0
    for _ in range(5):
        _meter_of_another_thread(recorder).busy["transforming"] = 16.0
    run(recorder, [batch(i, 2.0 * i, 2.0 * i + 1.0, read=2.0 * i + 0.9, ready=2.0 * i + 1.0, transforming=6.0) for i in range(12)])
    stats = stats_of(recorder)
    assert (stats.readers.threads, stats.workers) == (5, 3)
    assert stats.verdict.bound == "transform"
    assert stats_of(recorder, workers=5).verdict.bound == "reading"
    assert "\n3 reader threads (5 in all, as they come and go): 80.00 s at work" in str(stats)
    assert "\n5 reader threads: 80.00 s at work" in str(stats_of(recorder, workers=5))


@pytest.mark.parametrize(("late", "advice"), [({10: 90.0}, "most of that was one wait"), ({8: 30.0, 10: 30.0, 12: 30.0}, 'depth="auto": ')])
def test_one_long_wait_is_told_from_several(late: dict[int, float], advice: str) -> None:
    """Steps of 20 s; the other batches are ready 15 s before they are asked for."""
    recorder = Recorder(ManualClock())
    asked = 0.0
    for i in range(16):
        taken = asked + late.get(i, 0.0)
        run(recorder, [batch(i, asked, taken, read=taken, ready=taken if i in late else asked - 15.0)])
        asked = taken + 20.0
    assert stats_of(recorder).verdict.advice.startswith(advice)


def _meter_of_another_thread(recorder: Recorder) -> Any:
    return Thread(lambda: recorder.meter("readers")).returned()


def test_the_times_of_the_last_batches_are_kept() -> None:
    recorder = Recorder(ManualClock())
    batches = [batch(i, float(i), float(i), read=i - 1.0, ready=i - 0.5) for i in range(RECENT + 40)]
    for start in range(0, len(batches), 50):
        run(recorder, batches[start : start + 50])
        recorder.sum_up()
    assert recorder.recent_batches() == batches[-RECENT:]
    assert stats_of(recorder).next.count == len(batches) - 1


def test_the_text_has_the_verdict_first_and_then_a_table() -> None:
    recorder = Recorder(ManualClock())
    run(recorder, [batch(i, 4.0 * i, 4.0 * i + 1.0, read=4.0 * i + 0.5, ready=4.0 * i + 0.75) for i in range(12)])
    recorder.locking.look(0.01)
    recorder.add_device("gpu:0", 4_000_000_000, 1.0)
    recorder.meter("readers")
    text = str(stats_of(recorder, dropped_rows=3))
    lines = text.splitlines()
    assert lines[0] == str(stats_of(recorder).verdict)
    assert text.startswith("Bound by reading: waiting takes 25.0 % of the steady time, and without it the loop would be at most ")
    assert lines[2].split() == ["ms", "a", "batch", "mean", "p50", "p90", "p99", "largest", "at", "step"]
    assert [line.split()[0] for line in lines[3:9]] == ["next()", "step", "reading", "transform", "copying", "transferring"]
    assert lines[3].split()[1] == "1000.000"
    for words in ("3 rows of a remainder were dropped", "was for reading", "held at 100 % of 1 looks", "gpu:0 4.00", "1 reader threads: "):
        assert words in text
    assert max(map(len, lines[1:])) <= 120
    assert "no batch was handed out yet" in str(stats_of(Recorder(ManualClock())))


class Piece:
    """What one device gets of a batch, after so many seconds."""

    def __init__(self, clock: ManualClock, device: Any, ready_at: float) -> None:
        self.clock, self.device, self.ready_at = clock, device, ready_at
        self.data = self
        self.nbytes = 1000

    def is_ready(self) -> bool:
        return self.clock() >= self.ready_at

    def block_until_ready(self) -> None:
        self.clock.advance(max(0.0, self.ready_at - self.clock()))


class Device(NamedTuple):
    id: int

    def __str__(self) -> str:
        return f"gpu:{self.id}"


def test_devices_are_looked_at_one_by_one() -> None:
    """The slow one is seen as slow, and the fast one as fast, although the slow one is done last."""
    clock = ManualClock()
    recorder = Recorder(clock)
    looks = DeviceLooks(recorder)
    devices = [Device(0), Device(1)]

    def transfer(slow: float, fast: float) -> None:
        host: Any = SimpleNamespace(times=BatchTimes(0))
        host.times.dispatch_at = began = clock()
        pieces = [Piece(clock, devices[0], began + slow), Piece(clock, devices[1], began + fast)]
        array: Any = SimpleNamespace(sharding=SimpleNamespace(addressable_devices=set(devices)), addressable_shards=pieces)
        looks.look(PendingTransfer(host, [array], None, is_late=False))
        clock.advance(100.0)

    for _ in range(4 * LOOK_EVERY):
        transfer(8.0, 2.0)
    assert {name: nbytes / seconds for name, (nbytes, seconds) in recorder.device_seconds.items()} == {"gpu:0": 125.0, "gpu:1": 500.0}
    before = dict(recorder.device_seconds)
    for _ in range(2 * LOOK_EVERY):
        transfer(0.0, 0.0)
    assert recorder.device_seconds == before, "when it was done is not known"


def test_a_signal_handler_may_ask_in_the_middle_of_a_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, asked = Recorder(ManualClock()), []
    add = Delivered.add

    def interrupted(self: Delivered, *args: Any) -> None:
        if not asked:
            asked.append(True)
            asked.append(stats_of(recorder).batches)
        add(self, *args)

    monkeypatch.setattr(Delivered, "add", interrupted)
    run(recorder, [batch(i, float(i), float(i), read=i - 1.0, ready=i - 0.5) for i in range(5)])
    assert (stats_of(recorder).next.count, asked) == (4, [True, 5])


def test_what_ctrl_c_cuts_off_is_not_added_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(ManualClock())
    add = Durations.add

    def cut_off(self: Durations, *args: Any) -> None:
        add(self, *args)
        raise KeyboardInterrupt

    run(recorder, [batch(i, float(i), float(i), read=i - 1.0, ready=i - 0.5) for i in range(5)])
    with monkeypatch.context() as patch:
        patch.setattr(Durations, "add", cut_off)
        with pytest.raises(KeyboardInterrupt):
            recorder.sum_up()
    assert stats_of(recorder).stages.reading.count == 5


def test_who_takes_the_batches_may_have_other_jax_settings() -> None:
    """Advice depends on what a batch is, as it was made: it is not planned anew under the settings of this thread."""
    with jax.enable_x64(True):
        iterator = iter(ps.Loader(np.arange(16) + 2**40, batch_size=8, narrow="error"))
    assert [int(batch[0]) - 2**40 for batch in iterator] == [0, 8]
    assert iterator.stats().setup.wide_share == 1.0


def test_what_advice_knows_of_a_batch() -> None:
    """Leaves that stay on the host take no call."""
    loader = ps.Loader(
        {"x": np.zeros((16, 2), np.uint8), "y": np.zeros(16, np.float32), "name": np.arange(16)}, batch_size=8, host=("name",)
    )
    iterator = iter(loader)
    assert len(list(iterator)) == 2
    setup = iterator.stats().setup
    assert (setup.leaves, setup.wide_share, setup.is_numbered, setup.is_memory) == (2, 2 / 3, True, True)
