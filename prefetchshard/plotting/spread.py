"""How a duration is spread: a histogram with its quantiles."""

from __future__ import annotations

from typing import NamedTuple

from prefetchshard.measuring.distribution import PER_OCTAVE, Distribution, upper_of
from prefetchshard.plotting.axes import Scale, across, duration, up
from prefetchshard.plotting.markup import Plot, bar, drawing, line, words

HEADING = "How long next() took"
WIDTH, LEFT, RIGHT = 960, 60, 945
LABEL = 15
TOP, BOTTOM = 6 + 4 * LABEL, 226

MOST_BARS = 64
LEAST_HEIGHT = 1.5
"""Pixels: a single long one is still seen beside thousands."""


class Bar(NamedTuple):
    """Durations that are counted together.

    Attributes:
        low: the least of them.
        high: all of them are shorter.
        batches: how many.
    """

    low: float
    high: float
    batches: int


def bars_of(found: Distribution) -> list[Bar]:
    """Its buckets, as many of them put together as makes them few enough to be seen; none is empty."""
    if not found.buckets:
        return []
    together = 4
    while (max(found.buckets) - min(found.buckets)) / together > MOST_BARS and together < PER_OCTAVE:
        together *= 2
    counts: dict[int, int] = {}
    for bucket, count in found.buckets.items():
        counts[bucket // together] = counts.get(bucket // together, 0) + count
    return [Bar(upper_of(n * together - 1), upper_of((n + 1) * together - 1), counts[n]) for n in sorted(counts)]


def spread_of(found: Distribution) -> Plot:
    """How long `next()` took.

    Args:
        found: its durations, but for the first batch.
    """
    bars = bars_of(found)
    if not bars:
        return Plot(HEADING, ("There is nothing to draw: the first batch is not counted here, and there was no other one.",))
    x = Scale(bars[0].low / 1.2, bars[-1].high * 1.2, LEFT, RIGHT, is_log=True)
    y = Scale(0, max(1.05 * max(one.batches for one in bars), 2), BOTTOM, TOP)
    inside = [
        *across(x, BOTTOM, TOP, [(value, duration(value)) for value in x.ticks(8)], "next() took, logarithmic"),
        *up(y, LEFT, RIGHT, "batches"),
    ]
    for one in bars:
        height = max(LEAST_HEIGHT, BOTTOM - y(one.batches))
        hover = f"{one.batches} of {found.count}: {duration(one.low)} to {duration(one.high)}"
        inside.append(bar(x(one.low), BOTTOM - height, x(one.high) - x(one.low), height, "next", hover))
    at = f" at step {found.largest_step}" if found.largest_step >= 0 else ""
    marks = (("p50", found.p50, ""), ("p90", found.p90, ""), ("p99", found.p99, ""), ("largest", found.largest, at))
    inside += [line(x(seconds), _label_at(row), x(seconds), BOTTOM, "mark") for row, (_, seconds, _) in enumerate(marks)]
    inside += [_label(x(seconds), row, f"{name} {duration(seconds)}{more}") for row, (name, seconds, more) in enumerate(marks)]
    said = (f"{found.count} calls, the first one of the run not among them; {duration(found.mean)} on average.",)
    return Plot(HEADING, said, drawing(WIDTH, BOTTOM + 42, "histogram of next()", *inside))


def _label(x: float, row: int, said: str) -> str:
    """Words in a row of their own, on the side of the line where there is room."""
    is_right = x > (LEFT + RIGHT) / 2
    at = x - 5 if is_right else x + 5
    return words(at, _label_at(row) + 10, said, text_anchor="end" if is_right else "start", class_="marked")


def _label_at(row: int) -> float:
    return 6 + LABEL * row
