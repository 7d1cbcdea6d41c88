"""Statistics of the last seconds: what they hold, how exact they are, what looks cost."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from jax.sharding import NamedSharding

import prefetchshard as ps
from prefetchshard.measuring.recorder import Recorder
from prefetchshard.measuring.stats import Stats
from prefetchshard.measuring.window import MOST_LOOKS, MOST_SECONDS, Look, Window, kept
from prefetchshard.queues.bounded_queue import QueueStats
from prefetchshard.staging.layout import StagingStats
from prefetchshard.testing import ManualClock
from support import at_every_step, handled_everywhere, wait_until

NOTHING = Recorder(ManualClock()).stats(
    workers=1,
    host=QueueStats(2, 0, 0, 0, 0, 0, 0.0, 0.0),
    ready=QueueStats(2, 0, 0, 0, 0, 0, 0.0, 0.0),
    staging=StagingStats(*([0] * len(StagingStats.__struct_fields__))),
)


def after(batches: int) -> Stats:
    """Of a run that has handed out so many."""
    return msgspec.structs.replace(NOTHING, batches=batches)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    """Of every run that the test begins."""
    clock = ManualClock()
    monkeypatch.setattr("prefetchshard.loader.MONOTONIC", clock)
    return clock


def endless() -> Iterator[np.ndarray]:
    while True:
        yield np.zeros((8, 2), np.float32)


# -- looks


def test_a_window_is_never_shorter_and_little_longer() -> None:
    window = Window(0.0)
    for second in range(1, 3000):
        window.look(float(second), lambda second=second: after(second))
        if second < 1300:
            continue
        for seconds, longer in ((1, 1.0), (10, 1.0), (30, 2.0), (60, 4.0), (300, 32.0), (MOST_SECONDS, 64.0)):
            found = window.since(after(second), second + 0.99, seconds).batches
            assert seconds - 1 <= found <= seconds + longer, (second, seconds)


def test_so_many_looks_are_kept_and_no_more() -> None:
    looks: tuple[Look, ...] = ()
    for second in range(2000):
        looks = kept((*looks, Look(float(second), NOTHING)), float(second))
        assert len(looks) <= MOST_LOOKS
        assert looks[-1].at == second
        assert looks[0].at <= max(0, second - MOST_SECONDS), "the longest window has a look to begin at"
    assert len(looks) == MOST_LOOKS
    assert [look.at for look in looks] == sorted({look.at for look in looks})


def test_looks_that_are_far_apart_are_kept_for_the_longest_window() -> None:
    """A loop whose step takes minutes."""
    looks: tuple[Look, ...] = ()
    for minute in range(0, 200, 20):
        looks = kept((*looks, Look(60.0 * minute, NOTHING)), 60.0 * minute)
    assert [look.at for look in looks] == [60.0 * 160, 60.0 * 180]


def test_a_younger_run_has_only_what_it_did() -> None:
    window = Window(100.0)
    assert window.since(after(3), 100.5, 10.0).batches == 3
    window.look(101.0, lambda: after(7))
    assert window.since(after(8), 110.9, 10.0).batches == 8
    assert window.since(after(8), 111.0, 10.0).batches == 1


def test_no_look_before_it_is_due() -> None:
    asked: list[float] = []

    def stats(now: float) -> Stats:
        asked.append(now)
        return NOTHING

    window = Window(5.0)
    for now in (5.0, 5.5, 6.0, 6.5, 6.9, 7.0, 60.0, 60.5):
        window.look(now, lambda now=now: stats(now))
    assert asked == [6.0, 7.0, 60.0]
    assert window.due_at == 61.0


def test_a_look_that_fails_ends_no_loop(caplog: pytest.LogCaptureFixture) -> None:
    def stats() -> Any:
        raise ZeroDivisionError

    window = Window(0.0)
    with caplog.at_level(logging.DEBUG, "prefetchshard"):
        window.look(1.0, stats)
    (record,) = caplog.records
    assert record.levelno == logging.DEBUG
    assert window.due_at == 2.0
    assert window.since(after(4), 20.0, 10.0).batches == 4


def test_who_comes_meanwhile_disturbs_nothing() -> None:
    """Another thread, or a signal handler, at each step of a look."""
    windows: list[Window] = []

    def prepare() -> None:
        windows[:] = [Window(0.0)]
        windows[0].look(1.0, lambda: after(1))

    def disturb() -> None:
        windows[0].look(2.5, lambda: after(2))
        assert windows[0].since(after(3), 12.5, 11.5).batches == 2

    for walk in (at_every_step, handled_everywhere):
        for _ in walk(prepare, lambda: windows[0].look(2.0, lambda: after(2)), disturb):
            looks = [look.at for look in windows[0]._looks]  # pyright: ignore[reportPrivateUsage]
            assert looks in ([1.0, 2.0], [1.0, 2.5])


# -- runs


def test_the_last_seconds_of_a_run(S: NamedSharding, clock: ManualClock) -> None:
    with ps.Loader(endless, S) as loader:
        batches = iter(loader)
        for _ in range(40):
            next(batches)
            clock.advance(0.5)
        assert batches.stats().batches == 40
        assert batches.stats(last_seconds=5.0).batches == 10
        assert loader.stats(last_seconds=5.0).batches == 10
        assert batches.stats(last_seconds=5.0).rows_per_second == pytest.approx(16.0)
        assert batches.stats(last_seconds=100.0).batches == 40, "it is younger"
        clock.advance(50.0)
        assert batches.stats(last_seconds=5.0).batches == 2, "since the last look, which stands before them"
        batches.close()
        assert loader.stats(last_seconds=100.0).batches == 40, "of the last run"


def test_the_verdict_is_that_of_the_window(S: NamedSharding, clock: ManualClock) -> None:
    """It was bound by its step, and now the source is slow; three batches of a run that goes on are no start-up."""
    slow_from, slow = 30, 4.0

    def source() -> Iterator[np.ndarray]:
        for i in range(slow_from + 3):
            if i >= slow_from:
                while batches.stats().batches < i or not batches.stats().ready.receivers_waiting:
                    pass
                clock.advance(slow)
            yield np.zeros((8, 2), np.float32)

    loader = ps.Loader(source(), S, stall_warning_seconds=None)
    batches = iter(loader)
    for _ in range(slow_from):
        next(batches)
        wait_until(lambda: batches.stats().ready.senders_waiting == 1 or batches.stats().host.receivers_waiting == 1)  # no transfer gets it
        clock.advance(1.0)
    assert batches.stats(last_seconds=10.0).bound == "consumer"
    for _ in range(3):
        next(batches)
    assert batches.stats(last_seconds=11.0).batches <= 4
    assert batches.stats(last_seconds=11.0).bound == "reading"
    batches.close()


@pytest.mark.parametrize("seconds", [0, -1.0, MOST_SECONDS + 1, math.nan, math.inf])
def test_no_such_window(seconds: float) -> None:
    with ps.Loader(np.zeros(8, np.float32), batch_size=8) as loader:
        batches = iter(loader)
        for ask in (loader.stats, batches.stats):
            with pytest.raises(ps.ConfigError, match="last_seconds must be above 0 and at most 600"):
                ask(last_seconds=seconds)
