"""How many batches were read, and how many were ready, at each moment."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from prefetchshard.measuring.stats import Stats
from prefetchshard.measuring.timeline import BatchTimes, Recent
from prefetchshard.plotting.axes import Scale, time_axis, up
from prefetchshard.plotting.markup import Plot, drawing, element, line, words
from prefetchshard.telling.slices import in_order

HEADING = "Batches in the queues"
WIDTH, LEFT, RIGHT = 960, 60, 945
TOP, HEIGHT, BETWEEN = 20, 90, 30

AVERAGES = 59
"""Stretches of time that have an average: some 15 pixels each."""


def occupancy_of(recent: Recent, stats: Stats) -> Plot:
    """How full the queues were.

    Args:
        recent: batches that were handed out.
        stats: of that run.
    """
    batches = in_order(recent.batches)
    if not batches:
        return Plot(HEADING, ("There is nothing to draw: no batch was handed out.",))
    low, high, read_until = known_from(batches, stats.batches), *known_until(batches, is_end=recent.is_end)
    if low >= high:
        return Plot(HEADING, ("There is nothing to draw: all batches whose times are kept were ready before the first of them was taken.",))
    ready = levels([(times.ready_at, times.taken_at) for times in batches], low, high)
    read_until = max(low, min(high, read_until))
    read = levels([(times.read_at, times.dispatch_at) for times in batches], low, read_until)
    x = Scale(low - recent.began_at, high - recent.began_at, LEFT, RIGHT)
    most = max(1, *(count for _, count in (*ready, *read)))
    above = Scale(0, max(most, stats.ready.capacity), TOP + HEIGHT, TOP)
    below = Scale(0, most, TOP + 2 * HEIGHT + BETWEEN, TOP + HEIGHT + BETWEEN)
    inside = [*up(above, LEFT, RIGHT, "batches"), *_filled(ready, high, recent.began_at, x, above, "ready")]
    inside += [*up(below, LEFT, RIGHT, "batches"), *_filled(read, read_until, recent.began_at, x, below, "reading")]
    inside += time_axis(x, below.at_low, TOP, "since the run began")
    at_depth = above(stats.ready.capacity)
    inside += [line(LEFT, at_depth, RIGHT, at_depth, "limit"), words(RIGHT - 4, at_depth - 5, "depth", text_anchor="end", class_="over")]
    said = (
        f"The last {len(batches)} batches. One counts as ready as soon as its transfer is done, also while it waits for its place in the "
        "queue, so that there may be more of them than depth."
    )
    if not recent.is_end:
        said += " The areas end where batches that the loop never took would have to be counted too."
    legend = (
        ("ready", "ready on the devices, waiting for next()"),
        ("reading", "read, waiting for the transfer"),
        ("average", "average over a short stretch of time"),
    )
    return Plot(HEADING, (said,), drawing(WIDTH, below.at_low + 42, "batches in the queues, over time", *inside), legend)


def known_from(batches: Sequence[BatchTimes], total: int) -> float:
    """From when on all batches that were there are known: from the beginning, or since the first that is kept was taken."""
    return batches[0].taken_at if total > len(batches) else min(times.began_at for times in batches)


def known_until(batches: Sequence[BatchTimes], *, is_end: bool) -> tuple[float, float]:
    """Until when all that were ready are known, and all that were read: others come later, and none was taken."""
    last = batches[-1]
    return (last.taken_at, last.taken_at) if is_end else (last.ready_at, last.read_at)


def levels(stays: Iterable[tuple[float, float]], low: float, high: float) -> list[tuple[float, int]]:
    """How many there were.

    Args:
        stays: from when to when each was there.
        low: the first moment.
        high: the last one.

    Returns:
        Moments at which it changes, the first moment among them, with how many there are from then on.
    """
    changes: dict[float, int] = {low: 0}
    for began, ended in stays:
        if ended > began and ended > low and began < high:
            changes[max(low, began)] = changes.get(max(low, began), 0) + 1
            if ended < high:
                changes[ended] = changes.get(ended, 0) - 1
    moments = sorted(changes)
    return list(zip(moments, itertools.accumulate(changes[at] for at in moments), strict=True))


def averages(found: Sequence[tuple[float, int]], low: float, high: float, stretches: int) -> list[float]:
    """How many there were on average in each of so many stretches of equal length; `found`: what `levels` returns."""
    length = (high - low) / stretches
    sums = [0.0] * stretches
    for (began, count), (ended, _) in zip(found, [*found[1:], (high, 0)], strict=True):
        first, last = int((began - low) / length), min(stretches - 1, int((ended - low) / length))
        for number in range(first, last + 1):
            inside = min(ended, low + (number + 1) * length) - max(began, low + number * length)
            sums[number] += count * max(0.0, inside)
    return [total / length for total in sums]


def _filled(found: Sequence[tuple[float, int]], end: float, began_at: float, x: Scale, y: Scale, kind: str) -> list[str]:
    """The steps with what is below them, and a line of averages; nothing where there is no time."""
    began = found[0][0]
    if end <= began:
        return []
    way = f"M{x(began - began_at):.2f} {y(0):.2f}" + "".join(f"H{x(at - began_at):.2f}V{y(count):.2f}" for at, count in found)
    area = element("path", class_=f"area {kind}", d=f"{way}H{x(end - began_at):.2f}V{y(0):.2f}Z")
    stretches = max(1, round(AVERAGES * (end - began) / (x.high - x.low)))
    edges = [x(began - began_at + number * (end - began) / stretches) for number in range(stretches + 1)]
    steps = [
        f"{left:.2f} {y(mean):.2f}H{right:.2f}"
        for left, right, mean in zip(edges, edges[1:], averages(found, began, end, stretches), strict=False)
    ]
    return [area, element("path", class_="means", d=f"M{'L'.join(steps)}")]
