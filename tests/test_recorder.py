"""Where the time of a run goes: what threads do for which batch."""

from __future__ import annotations

import logging
import re
import threading
from typing import Any

import numpy as np
import pytest
from jax.sharding import NamedSharding

import prefetchshard as ps
from prefetchshard.measuring.recorder import CPU_EVERY_SECONDS, Recorder, Span
from prefetchshard.measuring.timeline import STAGE_OF, BatchTimes
from prefetchshard.testing import ManualClock
from support import Thread


def spent(recorder: Recorder) -> dict[Any, float]:
    """Of this thread, what is not 0."""
    return {work: seconds for work, seconds in recorder.meter().seconds(recorder.clock()).items() if seconds}


def test_each_kind_of_work_gets_the_time_until_the_next_one() -> None:
    clock = ManualClock()
    recorder, times = Recorder(clock), BatchTimes(0, 8)
    span = Span(recorder, "reading", times)
    clock.advance(0.25 / 64)
    assert span.enter("transforming") == 0.25 / 64
    clock.advance(0.5 / 64)
    span.enter("reading")
    clock.advance(1.0 / 64)
    assert times.parts == []
    assert span.end() == 1.75 / 64
    assert times.parts == [
        (threading.current_thread().name, 0.0, 1.75 / 64, {"reading": 1.25 / 64, "transforming": 0.5 / 64}),
    ]
    assert spent(recorder) == {"reading": 1.25 / 64, "transforming": 0.5 / 64}
    assert span.entered_at == clock()


def test_what_goes_on_counts_so_far() -> None:
    clock = ManualClock()
    recorder = Recorder(clock)
    outer = Span(recorder, "reading", BatchTimes(0))
    clock.advance(1.0)
    outer.enter("copying")
    clock.advance(2.0)
    assert spent(recorder) == {"reading": 1.0, "copying": 2.0}
    inner = Span(recorder, "collating", BatchTimes(0))
    assert [(meter.thread, span) for meter, span in recorder.working] == [(threading.current_thread().name, inner)]
    inner.end()
    assert recorder.working[0][1] is outer
    outer.end()
    assert recorder.working == []
    assert spent(recorder) == {"reading": 1.0, "copying": 2.0}


def test_seconds_of_another_process_are_added() -> None:
    clock = ManualClock()
    recorder, times = Recorder(clock), BatchTimes(0)
    span = Span(recorder, "reading", times)
    clock.advance(4.0)
    span.add("reading", -span.enter("batching"))
    span.add("transforming", 3.0)
    span.end()
    assert spent(recorder) == {"transforming": 3.0}
    assert times.seconds() == (0.0, 3.0, 0.0)


def test_a_batch_sums_up_its_parts() -> None:
    clock = ManualClock()
    recorder, times = Recorder(clock), BatchTimes(2, 16)
    clock.advance(1.0)
    for exponent, work in enumerate(STAGE_OF):
        span = Span(recorder, work, times)
        clock.advance(10.0**exponent)
        span.end()
    assert list(STAGE_OF) == ["reading", "transforming", "collating", "planning", "copying", "batching", "finishing"]
    assert times.seconds() == (1.0, 110.0, 1111000.0)
    assert (times.began_at, times.read_at) == (1.0, 1111112.0)
    untouched = BatchTimes(0)
    untouched.dispatch_at = 5.0
    assert (untouched.began_at, untouched.read_at) == (5.0, 5.0)


def test_the_cpu_clock_is_looked_at_now_and_then() -> None:
    clock, cpu = ManualClock(), ManualClock()
    recorder = Recorder(clock, cpu)
    cpu.advance(100.0)  # before the thread came
    meter = recorder.meter("readers")
    clock.advance(1.0)
    for advance, seen in ((0.5, 0.5), (0.25, 1.75)):
        cpu.advance(advance)
        Span(recorder, "reading", BatchTimes(0)).end()
        assert meter.cpu_seconds == seen
        cpu.advance(1.0)
        clock.advance(CPU_EVERY_SECONDS / 2)
        Span(recorder, "reading", BatchTimes(0)).end()
        assert meter.cpu_seconds == seen, "a moment later it is not asked again"
        clock.advance(CPU_EVERY_SECONDS)


def test_each_thread_has_a_meter() -> None:
    recorder = Recorder(ManualClock())
    mine = recorder.meter("source")
    assert recorder.meter("readers") is mine
    thread = Thread(lambda: recorder.meter("readers"))
    other = thread.returned()
    assert (mine.role, other.role) == ("source", "readers")
    assert other.thread == thread.name


def test_a_run_says_at_debug_what_took_longest(S: NamedSharding, caplog: pytest.LogCaptureFixture) -> None:
    rows = [np.full(2, i, np.float32) for i in range(32)]
    with caplog.at_level(logging.DEBUG, "prefetchshard"):
        loader = ps.Loader(rows, S, batch_size=8, transform=lambda row: row + 1)
        assert len(list(loader)) == 4
        loader.close()
    (line,) = (record.getMessage() for record in caplog.records if "has ended" in record.getMessage())
    for stage in ("reading", "transform", "copying", "transferring"):
        assert re.search(rf"\b{stage} \d+\.\d{{3}} s", line)


@pytest.mark.parametrize("ends", ["raises", "ends"])
@pytest.mark.parametrize("batch_size", [None, 2])
@pytest.mark.parametrize("transform", [None, lambda item: item], ids=["plain", "transform"])
def test_the_seconds_of_a_pull_count_however_it_comes_out(
    S: NamedSharding, R: NamedSharding, monkeypatch: pytest.MonkeyPatch, ends: str, batch_size: int | None, transform: Any
) -> None:
    clock = ManualClock()
    monkeypatch.setattr("prefetchshard.loader.MONOTONIC", clock)

    def source() -> Any:
        clock.advance(1.0)
        yield np.zeros(8, np.float32)
        clock.advance(2.0)
        if ends == "raises":
            raise ValueError("no more")

    where = S if batch_size is None else R
    iterator = iter(
        ps.Loader(source(), where, batch_size=batch_size, transform=transform, remainder="auto" if batch_size is None else "keep")
    )
    if ends == "raises":
        with pytest.raises(ValueError, match="no more"):
            list(iterator)
    else:
        list(iterator)
    assert iterator.stats().source_seconds == 3.0
