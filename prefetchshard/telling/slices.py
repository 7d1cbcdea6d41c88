"""The way of batches as slices of time on tracks, for a trace and for plots.

Each thread, and each kind of waiting, is a track of slices that follow one another or lie inside one another. What overlaps otherwise,
as transfers do, gets lanes of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from prefetchshard.measuring.timeline import STAGE_OF, BatchTimes, PartTimes

ALTERNATES = "these kinds of work alternate from row to row; here each is laid out in one piece"


AFTER_READING = ("transfer", "ready", "next()", "step")
"""The tracks that are no threads, in the order in which a batch comes to them."""


class Slice(NamedTuple):
    """A stretch of time on a track.

    Attributes:
        track: its name.
        began, ended: nanoseconds since the run began.
        name: what is written on it.
        batch: that it belongs to.
        args: shown beside what is known of the batch.
        inner: slices inside it: name, began, ended, args.
        flows_at: where the arrow of the batch touches it; None: nowhere.
    """

    track: str
    began: int
    ended: int
    name: str
    batch: BatchTimes
    args: dict[str, Any]
    inner: Sequence[tuple[str, int, int, dict[str, Any]]] = ()
    flows_at: int | None = None


class Lane(NamedTuple):
    """Slices that do not overlap, in the order of time.

    Attributes:
        track: of the slices.
        name: the track, with a number where it has several lanes.
        slices: in the lane.
    """

    track: str
    name: str
    slices: list[Slice]


def slices_of(batches: Iterable[BatchTimes], began_at: float) -> list[Slice]:
    """All that happened to batches: first what threads read, then what came after.

    Args:
        batches: that were handed out, all with a step of their own.
        began_at: when the run began, in seconds of its clock.
    """
    found = in_order(batches)
    return [*_reading(found, began_at), *_after_reading(found, began_at)]


def in_order(batches: Iterable[BatchTimes]) -> list[BatchTimes]:
    """Batches in the order in which they were taken, each once."""
    return sorted({times.step: times for times in batches}.values(), key=lambda times: (times.taken_at, times.step))


def lanes_of(slices: Iterable[Slice]) -> list[Lane]:
    """The lanes of each track, the tracks in the order of their first slices; in a lane no two slices overlap."""
    by_track: dict[str, list[Slice]] = {}
    for each in slices:
        by_track.setdefault(each.track, []).append(each)
    found: list[Lane] = []
    for track, mine in by_track.items():
        lanes: list[list[Slice]] = []
        for each in sorted(mine, key=lambda one: (one.began, one.ended)):
            free = next((lane for lane in lanes if lane[-1].ended <= each.began), None)
            if free is None:
                lanes.append([each])
            else:
                free.append(each)
        found += [Lane(track, track if i == 1 else f"{track} {i}", lane) for i, lane in enumerate(lanes, 1)]
    return found


def _reading(batches: Sequence[BatchTimes], began_at: float) -> Iterator[Slice]:
    for times in batches:
        for part in list(times.parts):
            began, ended = _ns(part.began_at, began_at), _ns(part.ended_at, began_at)
            inner = list(_work(part, began, ended))
            yield Slice(part.thread, began, ended, f"step {times.step}: rows", times, {}, inner, began)


def _work(part: PartTimes, began: int, ended: int) -> Iterator[tuple[str, int, int, dict[str, Any]]]:
    """The kinds of work in a part, one after the other. A process's own seconds may be more than the part took."""
    spent = [(work, part.seconds[work]) for work in STAGE_OF if part.seconds.get(work, 0.0) > 0]
    total = sum(seconds for _, seconds in spent)
    fits = total * 1e9 <= ended - began + len(spent)  # each is rounded
    scale = 1e9 if fits else (ended - began) / total
    at, sofar = began, 0.0
    for work, seconds in spent:
        sofar += seconds
        until = max(at, min(ended, began + round(sofar * scale)))
        args: dict[str, Any] = {"seconds": seconds, "note": ALTERNATES}
        if not fits:
            args["clipped"] = "took longer, in a process; shortened to what its thread waited and worked"
        yield work, at, until, args
        at = until


def _after_reading(batches: Sequence[BatchTimes], began_at: float) -> Iterator[Slice]:
    for times, following in itertools.zip_longest(batches, batches[1:]):
        dispatch, dispatched, ready, asked, taken = (
            _ns(at, began_at) for at in (times.dispatch_at, times.dispatched_at, times.ready_at, times.asked_at, times.taken_at)
        )
        step = f"step {times.step}"
        yield Slice(
            "transfer", dispatch, ready, f"{step}: transfer", times, {}, [("dispatch", dispatch, min(dispatched, ready), {})], dispatch
        )
        yield Slice("ready", ready, taken, f"{step}: ready", times, {}, (), ready)
        yield Slice("next()", asked, taken, f"{step}: next()", times, {}, _waiting(asked, ready, taken), (max(asked, ready) + taken) // 2)
        until = taken if following is None else _ns(following.asked_at, began_at)
        if until > taken:
            yield Slice("step", taken, until, step, times, {})


def _waiting(asked: int, ready: int, taken: int) -> list[tuple[str, int, int, dict[str, Any]]]:
    """What a `next()` that waited did.

    Perfetto turns an arrow round where the slice it leads to began before the one it comes from. So the arrow ends in a slice that began
    when the batch was ready.
    """
    return [("waiting", asked, ready, {}), ("handing over", ready, taken, {})] if asked < ready else []


def _ns(at: float, began_at: float) -> int:
    return max(0, round((at - began_at) * 1e9))
