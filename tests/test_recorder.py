"""Where the time of a run goes: spans of threads, and their sums."""

from __future__ import annotations

import logging
import re
from typing import Any

import numpy as np
import pytest
from jax.sharding import NamedSharding

import prefetchshard as ps
from prefetchshard.measuring.recorder import Recorder, Span
from prefetchshard.testing import ManualClock


def spent(recorder: Recorder) -> dict[Any, float]:
    return dict(recorder.seconds)


def test_each_stage_gets_the_time_until_the_next_one() -> None:
    clock = ManualClock()
    recorder = Recorder(clock)
    span = Span(recorder, "reading", 0, 8)
    clock.advance(0.25 / 64)
    assert span.enter("transforming") == 0.25 / 64
    clock.advance(0.5 / 64)
    span.enter("reading")
    clock.advance(1.0 / 64)
    assert spent(recorder) == {}  # a span is added when it ends
    assert span.end() == 1.75 / 64
    assert spent(recorder) == {"reading": 1.25 / 64, "transforming": 0.5 / 64}
    assert span.entered_at == clock()


def test_overlapping_spans_add_up_and_the_longest_keeps_its_place() -> None:
    clock = ManualClock()
    recorder = Recorder(clock)
    first, second = Span(recorder, "placing", 0, 0), Span(recorder, "placing", 1, 16)
    clock.advance(3.0)
    second.end()
    clock.advance(1.0)
    first.end()
    Span(recorder, "placing", 2, 0).end()
    assert spent(recorder) == {"placing": 7.0}
    assert recorder.longest == {"placing": (4.0, 0, 0)}
    assert str(recorder) == "placing 4.000 s (epoch 0, row 0)"


def test_every_stage_is_in_the_statistics() -> None:
    clock = ManualClock()
    recorder = Recorder(clock)
    for seconds, stage in enumerate(("reading", "transforming", "collating", "planning", "copying", "batching", "finishing", "placing")):
        span = Span(recorder, stage, 0, 0)  # pyright: ignore[reportArgumentType] - the names above
        clock.advance(10.0**seconds)
        span.end()
    nothing: Any = None
    stats = recorder.stats(workers=1, host=nothing, ready=nothing, staging=nothing)
    assert (stats.source_seconds, stats.transform_seconds) == (1.0, 110.0)
    assert (stats.copy_seconds, stats.transfer_seconds) == (1111000.0, 1e7)


def test_a_run_says_at_debug_what_took_longest(S: NamedSharding, caplog: pytest.LogCaptureFixture) -> None:
    rows = [np.full(2, i, np.float32) for i in range(32)]
    with caplog.at_level(logging.DEBUG, "prefetchshard"):
        loader = ps.Loader(rows, S, batch_size=8, transform=lambda row: row + 1)
        assert len(list(loader)) == 4
        loader.close()
    (line,) = (record.getMessage() for record in caplog.records if "has ended" in record.getMessage())
    for stage in ("reading", "transforming", "batching", "placing"):
        assert re.search(rf"\b{stage} \d+\.\d{{3}} s", line)


def test_a_long_span_hands_over_what_it_has_so_far() -> None:
    clock = ManualClock()
    recorder = Recorder(clock)
    span = Span(recorder, "reading", 0, 0)
    for _ in range(3):
        clock.advance(1.0)
        span.enter("reading")
        clock.advance(0.01)
        span.enter("batching")
    assert sum(spent(recorder).values()) == pytest.approx(3.02)  # but for the last stage, which was short
    assert span.end() == pytest.approx(3.03)
    assert sum(spent(recorder).values()) == pytest.approx(3.03)  # nothing twice
    assert recorder.longest["reading"] == (pytest.approx(spent(recorder)["reading"]), 0, 0)


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
