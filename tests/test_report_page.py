"""The page of a benchmark: each bar, line and mark of its plots where the figures say, and nothing of a user's text as markup."""

from __future__ import annotations

import math
import os
import re
import threading
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import prefetchshard as ps
from prefetchshard.base.files import write_whole
from prefetchshard.benchmarking.report import Benchmark, BenchmarkRun
from prefetchshard.benchmarking.rounds import Round
from prefetchshard.measuring.delivered import Steps
from prefetchshard.measuring.distribution import Distribution, Durations
from prefetchshard.measuring.locking import Locking
from prefetchshard.measuring.stats import Stats
from prefetchshard.measuring.timeline import BatchTimes, PartTimes, Recent, Work
from prefetchshard.plotting import occupancy, spread, waits, way
from prefetchshard.plotting.axes import Scale, duration, up
from prefetchshard.plotting.markup import Plot, drawing, element
from prefetchshard.queues.bounded_queue import QueueStats
from prefetchshard.staging.layout import StagingStats

BEGAN = 100.0
"""Of the run, by its clock: plots count from there."""

QUEUE = QueueStats(
    capacity=2, held=0, ready=0, taken=0, senders_waiting=0, receivers_waiting=0, backpressure_seconds=0.0, starved_seconds=0.0
)
STAGING = StagingStats(*(0 for _ in StagingStats.__struct_fields__))
HOSTILE = "<script>alert('1')</script> & \"<img src=http://example.org/x>\" \x00\ud800"


def stats_of(**given: Any) -> Stats:
    counts = ("batches", "rows", "bytes", "dropped_rows", "padded_rows", "workers")
    stages = ("wall", "stall", "busy", "source", "transform", "copy", "transfer", "first_batch")
    found: dict[str, Any] = {**dict.fromkeys(counts, 0), **{f"{name}_seconds": 0.0 for name in stages}}
    return Stats(**{**found, "host": QUEUE, "ready": QUEUE, "staging": STAGING, **given})


def a_batch(
    step: int, *parts: tuple[str, float, float, dict[Work, float]], dispatch: float, ready: float, asked: float, taken: float
) -> BatchTimes:
    """All times in seconds since the run began."""
    times = BatchTimes(0, step)
    times.step = step
    times.parts = [PartTimes(thread, BEGAN + began, BEGAN + ended, work) for thread, began, ended, work in parts]
    times.dispatch_at, times.dispatched_at, times.ready_at = BEGAN + dispatch, BEGAN + dispatch, BEGAN + ready
    times.asked_at, times.taken_at = BEGAN + asked, BEGAN + taken
    return times


def two_batches() -> Recent:
    """The axis of their way is from 0 s to 4 s."""
    first = a_batch(0, ("prefetchshard-reader-2", 0.0, 0.5, {"reading": 0.5}), dispatch=0.5, ready=1.0, asked=0.0, taken=1.5)
    second = a_batch(
        1, ("prefetchshard-reader-10", 1.0, 2.0, {"reading": 0.25, "transforming": 0.75}), dispatch=2.5, ready=3.0, asked=3.5, taken=4.0
    )
    return Recent(BEGAN, (first, second))


def drawn(plot: Plot) -> ET.Element:
    assert plot.svg, plot.said
    return ET.fromstring(plot.svg)


def bars(svg: ET.Element, kind: str) -> list[tuple[float, float, str]]:
    """x, width and hover of the bars of a kind."""
    found = [rect for rect in svg.iter("rect") if kind in rect.attrib["class"].split()]
    return [(float(rect.attrib["x"]), float(rect.attrib["width"]), rect.findtext("title", "")) for rect in found]


def texts(svg: ET.Element) -> list[str]:
    return [text.text or "" for text in svg.iter("text")]


def approx(*values: float) -> Any:
    return pytest.approx(values, abs=0.02)  # two decimals are written


# -- the way of batches


def test_a_slice_lies_where_its_time_is() -> None:
    svg = drawn(way.way_of(two_batches(), has_step=True))
    second = (way.RIGHT - way.LEFT) / 4  # pixels
    reading, transform = bars(svg, "reading"), bars(svg, "transform")
    assert [bar[:2] for bar in reading] == [approx(way.LEFT, second / 2), approx(way.LEFT + second, second / 4)]
    assert [bar[:2] for bar in transform] == [approx(way.LEFT + 1.25 * second, 0.75 * second)]
    assert transform[0][2] == "step 1: transform 750 ms"
    assert [bar[:2] for bar in bars(svg, "transferring")] == [
        approx(way.LEFT + 0.5 * second, 0.5 * second),
        approx(way.LEFT + 2.5 * second, 0.5 * second),
    ]
    assert [bar[:2] for bar in bars(svg, "ready")] == [
        approx(way.LEFT + second, 0.5 * second),
        approx(way.LEFT + 3 * second, second),
    ]
    assert [bar[:2] for bar in bars(svg, "next")] == [approx(way.LEFT, 1.5 * second), approx(way.LEFT + 3.5 * second, 0.5 * second)]
    assert [bar[:2] for bar in bars(svg, "step")] == [approx(way.LEFT + 1.5 * second, 2 * second)]


def test_the_lanes_are_in_the_order_of_the_way() -> None:
    svg = drawn(way.way_of(two_batches(), has_step=True))
    names = [text for text in texts(svg) if text[0].isalpha()]
    assert names == ["since the run began, s", "reader-2", "reader-10", "transfer", "ready", "next()", "step"]
    by_lane = [{rect.attrib["class"].split()[0] for rect in lane.iter("rect")} for lane in svg.iter("g")]
    assert by_lane == [{"reading"}, {"reading", "transform"}, {"transferring"}, {"ready"}, {"next"}, {"step"}]
    heights = [{rect.attrib["y"] for rect in lane.iter("rect")} for lane in svg.iter("g")]
    assert all(len(found) == 1 for found in heights)
    assert len({y for found in heights for y in found}) == 6


def test_the_axis_is_of_time() -> None:
    svg = drawn(way.way_of(two_batches(), has_step=True))
    ticks = {text.text: float(text.attrib["x"]) for text in svg.iter("text") if re.fullmatch(r"\d\.\d", text.text or "")}
    assert ticks["0.0"] == pytest.approx(way.LEFT)
    assert ticks["1.0"] == pytest.approx(way.LEFT + (way.RIGHT - way.LEFT) / 4, abs=0.01)
    assert ticks["4.0"] == pytest.approx(way.RIGHT)


def many(count: int, parts: int = 1) -> Recent:
    """A batch a second, read in the second before it is taken."""
    each = 0.5 / parts
    read: list[list[tuple[str, float, float, dict[Work, float]]]] = [
        [(f"reader-{part % 64}", step + part * each, step + (part + 1) * each, {"reading": each}) for part in range(parts)]
        for step in range(count)
    ]
    return Recent(BEGAN, tuple(a_batch(i, *read[i], dispatch=i + 0.5, ready=i + 0.6, asked=i + 0.7, taken=i + 1.0) for i in range(count)))


def test_only_the_last_batches_are_drawn_and_nothing_lies_outside() -> None:
    plot = way.way_of(many(100), has_step=True)
    assert plot.said[0].startswith("Steps 60 to 99.")
    found = [bar for kind in ("reading", "transferring", "ready", "next", "step") for bar in bars(drawn(plot), kind)]
    assert all(way.LEFT <= x and x + width <= way.RIGHT + way.LEAST_WIDTH for x, width, _ in found)
    assert len(bars(drawn(plot), "reading")) == way.SHOWN


def test_a_page_of_many_parts_stays_small() -> None:
    plot = way.way_of(many(60, parts=400), has_step=True)
    assert len(plot.svg) < 350_000
    total = sum(width for _, width, _ in bars(drawn(plot), "reading"))
    assert total > 0


def test_parts_that_touch_are_one_bar_in_proportion() -> None:
    parts: list[tuple[str, float, float, dict[Work, float]]] = [
        ("reader", i / 1000, (i + 1) / 1000, {"reading": 0.0002, "copying": 0.0008}) for i in range(1000)
    ]
    one = a_batch(0, *parts, dispatch=1.0, ready=2.0, asked=0.0, taken=4.0)
    svg = drawn(way.way_of(Recent(BEGAN, (one,)), has_step=False))
    second = (way.RIGHT - way.LEFT) / 4
    assert [bar[:2] for bar in bars(svg, "reading")] == [approx(way.LEFT, 0.2 * second)]
    assert [bar[:2] for bar in bars(svg, "copying")] == [approx(way.LEFT + 0.2 * second, 0.8 * second)]
    assert bars(svg, "copying")[0][2] == "step 0: copying 800 ms"


def test_what_a_thread_waited_between_is_in_proportion_in_its_bars() -> None:
    one = a_batch(0, ("reader", 0.0, 2.0, {"reading": 0.25, "copying": 0.75}), dispatch=2.0, ready=3.0, asked=0.0, taken=4.0)
    svg = drawn(way.way_of(Recent(BEGAN, (one,)), has_step=False))
    second = (way.RIGHT - way.LEFT) / 4
    assert [bar[:2] for kind in ("reading", "copying") for bar in bars(svg, kind)] == [
        approx(way.LEFT, 0.5 * second),
        approx(way.LEFT + 0.5 * second, 1.5 * second),
    ]


def test_what_a_thread_did_for_two_batches_is_two_bars() -> None:
    first = a_batch(0, ("reader", 0.0, 1.0, {"reading": 1.0}), dispatch=1.0, ready=1.5, asked=0.0, taken=2.0)
    second = a_batch(1, ("reader", 1.0, 2.0, {"reading": 1.0}), dispatch=2.0, ready=2.5, asked=3.0, taken=4.0)
    found = bars(drawn(way.way_of(Recent(BEGAN, (first, second)), has_step=True)), "reading")
    assert [hover for *_, hover in found] == ["step 0: reading 1 s", "step 1: reading 1 s"]


def test_the_axis_begins_where_the_batch_before_was_taken() -> None:
    """Although the first one that is drawn was read before."""
    batches = [
        a_batch(i, ("reader", max(0.0, i - 2.0), i - 1.5, {"reading": 0.5}), dispatch=i, ready=i + 0.6, asked=i + 0.7, taken=i + 1.0)
        for i in range(2, 2 + way.SHOWN + 1)
    ]
    (x, *_), *_ = bars(drawn(way.way_of(Recent(BEGAN, tuple(batches)), has_step=True)), "next")
    assert x == pytest.approx(way.LEFT + 0.7 * (way.RIGHT - way.LEFT) / way.SHOWN, abs=0.02)


def test_many_threads_have_lower_lanes_and_parts_too_many_to_draw_are_put_together() -> None:
    svg = drawn(way.way_of(many(8, parts=2000), has_step=True))
    tops = [float(rect.attrib["y"]) for lane in svg.iter("g") if (rect := lane.find("rect")) is not None]
    assert len(tops) == 64 + 4
    assert {below - above for above, below in zip(tops, tops[1:], strict=False)} == {11}
    assert len(bars(svg, "reading")) < way.MOST_PIECES


def test_what_is_short_is_still_seen() -> None:
    one = a_batch(0, ("reader", 0.0, 1e-7, {"reading": 1e-7}), dispatch=1.0, ready=1.0, asked=0.0, taken=4.0)
    ((_, width, _),) = bars(drawn(way.way_of(Recent(BEGAN, (one,)), has_step=False)), "reading")
    assert width == way.LEAST_WIDTH


def test_a_loop_without_a_step_is_said_to_be_one() -> None:
    assert "No step was measured" in " ".join(way.way_of(two_batches(), has_step=False).said)
    assert "No step" not in " ".join(way.way_of(two_batches(), has_step=True).said)


# -- the queues


def test_how_many_there_were() -> None:
    assert occupancy.levels([(1.0, 3.0), (2.0, 5.0), (2.5, 2.5)], 0.0, 4.0) == [(0.0, 0), (1.0, 1), (2.0, 2), (3.0, 1)]
    assert occupancy.levels([(-1.0, 1.0), (0.5, 9.0), (7.0, 8.0)], 0.0, 4.0) == [(0.0, 1), (0.5, 2), (1.0, 1)]
    assert occupancy.levels([], 0.0, 4.0) == [(0.0, 0)]


def test_the_average_of_a_stretch() -> None:
    found = occupancy.levels([(1.0, 3.0), (2.0, 5.0)], 0.0, 4.0)
    assert occupancy.averages(found, 0.0, 4.0, 4) == pytest.approx([0.0, 1.0, 2.0, 1.0])
    assert occupancy.averages(found, 0.0, 4.0, 1) == pytest.approx([1.0])
    assert sum(occupancy.averages(found, 0.0, 4.0, 7)) * 4 / 7 == pytest.approx(4.0)


def path_of(svg: ET.Element, kind: str) -> list[tuple[float, float]]:
    """The corners of an area, without the ground below it: where each level begins."""
    (way,) = [path.attrib["d"] for path in svg.iter("path") if path.attrib["class"] == f"area {kind}"]
    return [(float(x), float(y)) for x, y in re.findall(r"H([\d.]+)V([\d.]+)", way)][:-1]


def test_the_steps_of_the_queues_are_where_the_stamps_are() -> None:
    recent = Recent(
        BEGAN,
        tuple(
            a_batch(i, ("reader", i, i + 0.25, {"reading": 0.25}), dispatch=i + 0.5, ready=i + 1.0, asked=i + 1.0, taken=i + 2.5)
            for i in range(4)
        ),
    )
    svg = drawn(occupancy.occupancy_of(recent, stats_of(batches=4)))
    second = (occupancy.RIGHT - occupancy.LEFT) / 4  # the first began at 0, the last was ready at 4
    top, high = occupancy.TOP, occupancy.HEIGHT
    # ready: one from 1.0, two from 2.0, one from 2.5, two from 3.0, one from 3.5; two at once is the top, as is depth
    assert path_of(svg, "ready") == [
        approx(occupancy.LEFT + at * second, top + high * (1 - count / 2))
        for at, count in ((0, 0), (1, 1), (2, 2), (2.5, 1), (3, 2), (3.5, 1))
    ]
    base = top + 2 * high + occupancy.BETWEEN
    assert path_of(svg, "reading")[:3] == [
        approx(occupancy.LEFT + at * second, base - high * count / 2) for at, count in ((0, 0), (0.25, 1), (0.5, 0))
    ]
    limit = next(line for line in svg.iter("line") if line.attrib["class"] == "limit")
    assert float(limit.attrib["y1"]) == top  # depth


@pytest.mark.parametrize(("depth", "limit_at", "two_at"), [(4, 0.0, 0.5), (1, 0.5, 0.0)])
def test_the_scale_of_the_queues_has_room_for_depth_and_for_all(depth: int, limit_at: float, two_at: float) -> None:
    """Parts of the height, from above."""
    batches = [a_batch(i, dispatch=i, ready=i, asked=i, taken=i + 2.0) for i in range(4)]
    stats = stats_of(batches=4, ready=msgspec.structs.replace(QUEUE, capacity=depth))
    svg = drawn(occupancy.occupancy_of(Recent(BEGAN, tuple(batches), is_end=True), stats))
    limit = next(line for line in svg.iter("line") if line.attrib["class"] == "limit")
    assert float(limit.attrib["y1"]) == occupancy.TOP + limit_at * occupancy.HEIGHT
    assert min(y for _, y in path_of(svg, "ready")) == occupancy.TOP + two_at * occupancy.HEIGHT


def test_where_the_run_ended_all_of_it_is_known() -> None:
    _, last = two_batches().batches
    assert occupancy.known_until([last], is_end=False) == (BEGAN + 3.0, BEGAN + 2.0)
    assert occupancy.known_until([last], is_end=True) == (BEGAN + 4.0, BEGAN + 4.0)
    ended = two_batches()._replace(is_end=True)
    assert "later batches" in way.way_of(two_batches(), has_step=True).said[0]
    assert way.way_of(ended, has_step=True).said == ("Steps 0 to 1.",)
    assert "never took" not in occupancy.occupancy_of(ended, stats_of(batches=2)).said[0]


def test_batches_before_those_that_are_kept_are_not_taken_for_none() -> None:
    batches = many(10).batches
    assert occupancy.known_from(batches, 10) == BEGAN
    assert occupancy.known_from(batches, 11) == BEGAN + 1.0


# -- waits


def test_waits_are_in_proportion_and_add_up() -> None:
    steps = Steps(4, 5.0, 3.0, reading=1.6, transform=0.8, copying=0.4, transferring=0.2, handing_over=0.0)
    found = stats_of(
        batches=5, wall_seconds=10.0, stall_seconds=4.0, start_up_seconds=0.5, warm_up=steps, steady=Steps(), locking=Locking(8, 2, 0.8)
    )
    causes = waits.causes_of(found)
    assert sum(causes.values()) == pytest.approx(4.0)
    assert causes["end"] == pytest.approx(0.5)
    plot = waits.waits_plot(found)
    svg = drawn(plot)
    widths = {
        kind: bars(svg, kind)[0][1] for kind in ("start", "reading", "transform", "copying", "transferring", "handing", "end", "lock")
    }
    assert widths["reading"] == pytest.approx(waits.RIGHT - waits.LEFT)
    assert {kind: width / widths["reading"] * 1.6 for kind, width in widths.items()} == pytest.approx(
        {"start": 0.5, "reading": 1.6, "transform": 0.8, "copying": 0.4, "transferring": 0.2, "handing": 0.0, "end": 0.5, "lock": 0.8},
        abs=1e-3,
    )
    assert {x for x, *_ in bars(svg, "reading") + bars(svg, "lock")} == {float(waits.LEFT)}
    assert "1.6 s (16.0 %)" in texts(svg)
    assert "4 s of 10 s, 40.0 %" in plot.said[0]
    assert "at 2 of 8 looks" in plot.said[1]


@pytest.mark.parametrize(("factor", "unit"), [(1.0, "s"), (1e-3, "ms")])
def test_the_axis_of_waits_is_of_them_and_of_the_lock(factor: float, unit: str) -> None:
    steps = Steps(4, 5.0, factor, reading=factor)
    plot = waits.waits_plot(stats_of(batches=5, stall_seconds=factor, steady=steps, locking=Locking(8, 2, 2 * factor)))
    svg = drawn(plot)
    assert [bars(svg, kind)[0][1] for kind in ("reading", "lock")] == [(waits.RIGHT - waits.LEFT) / 2, waits.RIGHT - waits.LEFT]
    ticks = {text.text: float(text.attrib["x"]) for text in svg.iter("text")}
    assert (ticks["1"], ticks["2"]) == (pytest.approx((waits.LEFT + waits.RIGHT) / 2), waits.RIGHT)
    assert f"waited, {unit}" in ticks


# -- next()


def durations(seconds: list[float]) -> Distribution:
    found = Durations()
    found.add(np.array(seconds), range(len(seconds)))
    return found.now()


@pytest.mark.parametrize("largest", [0.02, 1.0, 3600.0])
def test_the_bars_add_up_to_all(largest: float) -> None:
    found = durations([0.001] * 90 + [0.010] * 9 + [largest])
    counted = spread.bars_of(found)
    assert sum(bar.batches for bar in counted) == 100
    assert all(bar.low < bar.high for bar in counted)
    assert next(bar.batches for bar in counted if bar.low <= 0.001 < bar.high) == 90
    svg = drawn(spread.spread_of(found))
    hovers = [hover for *_, hover in bars(svg, "next")]
    assert sum(int(hover.split(" of ")[0]) for hover in hovers) == 100
    heights = sorted(float(rect.attrib["height"]) for rect in svg.iter("rect"))
    assert heights[-1] / heights[-2] == pytest.approx(90 / 9, rel=0.01)


def test_each_duration_lies_in_its_bar_and_bars_are_few() -> None:
    seconds = np.geomspace(2e-6, 900, 500)
    for one in seconds.tolist():
        (found,) = spread.bars_of(durations([one]))
        assert found.low <= one <= found.high
    assert len(spread.bars_of(durations(seconds.tolist()))) <= spread.MOST_BARS + 1


def test_the_quantiles_are_marked() -> None:
    found = durations([0.001] * 90 + [0.010] * 9 + [1.0])
    counted = spread.bars_of(found)
    x = Scale(counted[0].low / 1.2, counted[-1].high * 1.2, spread.LEFT, spread.RIGHT, is_log=True)
    svg = drawn(spread.spread_of(found))
    marks = [float(line.attrib["x1"]) for line in svg.iter("line") if line.attrib["class"] == "mark"]
    assert marks == pytest.approx([x(0.001), x(0.001), x(0.010), x(1.0)], abs=(spread.RIGHT - spread.LEFT) * 0.01)
    said = [text for text in texts(svg) if text.startswith(("p", "largest"))]
    assert said == [f"p50 {duration(found.p50)}", f"p90 {duration(found.p90)}", f"p99 {duration(found.p99)}", "largest 1 s at step 99"]
    sides = {text.text: text.attrib["text-anchor"] for text in svg.iter("text") if text.text in said}
    assert [sides[text] for text in said] == ["start", "start", "start", "end"], "words lie inside the drawing"
    (one,) = {rect.attrib["x"] for rect in svg.iter("rect") if rect.findtext("title", "").startswith("90 ")}
    assert float(one) <= marks[0]


@pytest.mark.parametrize("seconds", [[0.0], [1e-9, 0.0], [5e-3], [1e5]])
def test_any_duration_can_be_drawn(seconds: list[float]) -> None:
    svg = drawn(spread.spread_of(durations(seconds)))
    assert all(math.isfinite(float(rect.attrib["x"])) and float(rect.attrib["width"]) > 0 for rect in svg.iter("rect"))
    assert len([text for text in texts(svg) if text.endswith("s")]) > 1


# -- nothing to draw


def test_where_there_is_nothing_to_draw_the_page_says_why() -> None:
    nothing, some = Recent(BEGAN), stats_of(batches=1, wall_seconds=1.0)
    late = a_batch(3, dispatch=0.5, ready=1.0, asked=0.0, taken=1.5)
    found = [
        way.way_of(nothing, has_step=False),
        occupancy.occupancy_of(nothing, stats_of()),
        occupancy.occupancy_of(Recent(BEGAN, (late,)), stats_of(batches=4)),
        waits.waits_plot(stats_of()),
        waits.waits_plot(some),
        spread.spread_of(Distribution()),
    ]
    assert all(not plot.svg and plot.said[0].startswith("There is nothing to draw: ") for plot in found)
    assert len({plot.said for plot in found}) == 4


# -- axes


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.0, "0 ns"), (2.5e-8, "25 ns"), (1.2345e-5, "12.3 µs"), (0.00099999, "1 ms"), (0.25, "250 ms"), (1.5, "1.5 s"), (2e4, "20,000 s")],
)
def test_seconds_in_a_unit_that_suits_them(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def test_ticks_are_round() -> None:
    assert Scale(0.0, 4.0, 0, 100).ticks(8) == pytest.approx([0.5 * i for i in range(9)])
    assert Scale(0.13, 0.37, 0, 100).ticks(5) == pytest.approx([0.15, 0.2, 0.25, 0.3, 0.35])
    assert Scale(0.5, 2000, 0, 100, is_log=True).ticks(6) == pytest.approx([1, 10, 100, 1000])


def test_ticks_of_ratios_are_as_many_as_are_asked_for() -> None:
    assert Scale(0.5, 40, 0, 100, is_log=True).ticks(8) == pytest.approx([1, 3, 10, 30])
    assert Scale(0.5, 40, 0, 100, is_log=True).ticks(10) == pytest.approx([0.5, 1, 2, 5, 10, 20])


def test_batches_are_counted_in_whole_numbers() -> None:
    svg = ET.fromstring(drawing(10, 10, "a test", *up(Scale(0, 2, 100, 0), 0, 10, "batches")))
    assert texts(svg) == ["0", "1", "2", "batches"]


def test_attributes_are_escaped() -> None:
    assert ET.fromstring(element("p", title=HOSTILE)).attrib["title"].startswith("<script>alert('1')</script> & \"")


# -- the page


def a_round(batches: int) -> Round:
    return Round(batches=batches, rows=8, nbytes=8, seconds=1.0, waited_seconds=0.5, step_seconds=0.5, passes=1, first_batch_seconds=0.1)


def a_benchmark(source: str = "a test", *, step: str = "") -> Benchmark:
    steps = Steps(4, 1.0, 1.0, reading=1.0)
    stats = stats_of(batches=5, wall_seconds=2.0, stall_seconds=1.0, steady=steps, next=durations([0.25] * 4))
    name = "step" if step else "loader"
    run = BenchmarkRun(name=name, rounds=(a_round(4),), stats=stats, recent=two_batches())
    return Benchmark(
        source=source, runs={"source": BenchmarkRun(name="source", rounds=(a_round(9),)), name: run}, step=step, step_seconds=0.005
    )


def page_of(found: Benchmark, folder: Path, title: str = "") -> tuple[str, ET.Element]:
    found.write_report(folder / "report.html", title=title)
    text = (folder / "report.html").read_text("utf-8")
    assert text.startswith("<!DOCTYPE html>\n<html")
    return text, ET.fromstring(text)


def test_the_page_begins_with_the_verdict(tmp_path: Path) -> None:
    found = a_benchmark(step="a sleep")
    text, root = page_of(found, tmp_path, "mine:data")
    assert root.findtext(".//h1") == str(found.verdict)
    assert text.index("<h1>") < text.index("<table>") < text.index("<h2>")
    assert [row.findtext("td") for row in root.iterfind(".//tbody/tr")] == ["the source alone, one thread", "the loader beside a step"]
    assert [cell.text or "" for cell in root.findall(".//tbody/tr")[1]] == list(found.runs["step"].cells())
    assert [heading.text for heading in root.iterfind(".//h2")] == [way.HEADING, occupancy.HEADING, waits.HEADING, spread.HEADING]
    assert len(root.findall(".//section/svg")) == 4
    assert root.findtext(".//pre") == str(found)
    assert "mine:data: a test" in text
    assert "of the loader beside a step of 5 ms." in text


def test_a_page_without_a_step_says_so(tmp_path: Path) -> None:
    text, _ = page_of(a_benchmark(), tmp_path)
    assert "What follows is of the loader, nothing done: no step was measured." in text


def test_what_a_user_wrote_is_only_text(tmp_path: Path) -> None:
    text, root = page_of(a_benchmark(HOSTILE), tmp_path, HOSTILE)
    assert "<script" not in text.lower()
    assert "<img" not in text.lower()
    assert "\x00" not in text
    shown = HOSTILE.replace("\x00", "\ufffd").replace("\ud800", "\ufffd")
    assert (root.findtext("head/title") or "").startswith(shown)
    assert root.findtext("body/p") == f"{shown}: {shown}"


def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    text, root = page_of(a_benchmark(), tmp_path)
    assert "//" not in text.replace("<!DOCTYPE", ""), "the address of something"
    assert not {"script", "link", "img", "iframe", "object", "image", "use"} & {node.tag for node in root.iter()}
    assert not {name for node in root.iter() for name in node.attrib if name in ("href", "src", "style") or name.startswith("on")}
    assert "url(" not in text
    assert "@import" not in text
    policy = next(meta.attrib["content"] for meta in root.iter("meta") if "http-equiv" in meta.attrib)
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"
    style = root.findtext("head/style") or ""
    assert "prefers-color-scheme: dark" in style
    for used in {name for node in root.iter() for name in node.attrib.get("class", "").split()} - {"thin", "name"}:
        assert f".{used} " in style or f".{used}," in style, used


def test_without_a_loader_there_is_no_page(tmp_path: Path) -> None:
    with pytest.raises(ps.ConfigError, match="no loader was measured"):
        Benchmark(source="a test", runs={}).write_report(tmp_path / "report.html")
    assert not list(tmp_path.iterdir())


def test_what_was_not_kept_is_not_drawn(tmp_path: Path) -> None:
    found = a_benchmark()
    runs = {name: msgspec.structs.replace(run, recent=None) for name, run in found.runs.items()}
    _, root = page_of(msgspec.structs.replace(found, runs=runs), tmp_path)
    assert len(root.findall(".//section/svg")) == 2
    assert len(root.findall(".//p[@class='none']")) == 2


def test_a_file_is_there_as_a_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_whole(path, b"old")

    def fail(*_: object) -> None:
        raise OSError("full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="full"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes in the file system")
def test_no_file_takes_the_place_of_what_is_none(tmp_path: Path) -> None:
    """Whoever may write to /dev may also replace what is there: `--report /dev/null` must not."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()), daemon=True)
    reader.start()
    write_whole(pipe, b"page")
    assert pipe.is_fifo()
    reader.join(30)
    assert read == [b"page"]


def test_a_link_leads_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    path, link = tmp_path / "folder" / "file", tmp_path / "link"
    for content in (b"old", b"new"):
        link.unlink(missing_ok=True)
        link.symlink_to(path)
        write_whole(link, content)
        assert link.is_symlink()
        assert path.read_bytes() == content
    assert list((tmp_path / "folder").iterdir()) == [path]


def test_a_name_may_be_as_long_as_the_system_allows(tmp_path: Path) -> None:
    path = tmp_path / ("a" * 250)
    write_whole(path, b"page")
    assert path.read_bytes() == b"page"


# -- measured


def test_a_run_that_ended_is_known_to_have_ended() -> None:
    found = ps.benchmark(lambda: ps.Loader(np.zeros((64, 3), np.float32), batch_size=16), seconds=0.02).runs["loader"].recent
    assert found is not None
    assert (found.is_end, len(found.batches)) == (True, 4)


@pytest.mark.parametrize("step_ms", [0.0, 1.0])
def test_the_page_of_a_real_benchmark(step_ms: float, tmp_path: Path) -> None:
    found = ps.benchmark(lambda: np.zeros((640, 3), np.float32), batch_size=16, seconds=0.05, step_ms=step_ms)
    _, root = page_of(found, tmp_path)
    assert len(root.findall(".//section/svg")) >= 3
    recent = found.runs["step" if step_ms else "loader"].recent
    assert recent is not None
    assert recent.batches[-1].step == found.stats.batches  # the first is not in the statistics
    assert not recent.is_end
    assert found.runs["source"].recent is None
    assert os.path.getsize(tmp_path / "report.html") < 500_000
