"""The way of the last batches, as a trace that Perfetto and Chrome show (the Trace Event Format).

Each thread, and each kind of waiting, is a track of slices that follow one another or lie inside one another. What overlaps otherwise,
as transfers do, gets tracks of its own. Arrows (flow events) lead from a batch's reading to the `next()` that got it.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from prefetchshard.measuring.timeline import STAGE_OF, BatchTimes, PartTimes

Event: TypeAlias = dict[str, Any]

NAME = "batch"
"""Of the arrows."""

ALTERNATES = "these kinds of work alternate from row to row; here each is laid out in one piece"


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


def write_trace(path: str | os.PathLike[str], batches: Iterable[BatchTimes], began_at: float) -> None:
    """Write a trace. The file is there as a whole or not at all.

    Args:
        path: of the file; where it ends with ".gz" it is compressed.
        batches: that were handed out, all with a step of their own.
        began_at: when the run began, in seconds of its clock.

    Raises:
        OSError: it cannot be written.
    """
    target = os.fspath(path)
    data = json.dumps(trace_of(batches, began_at), separators=(",", ":")).encode()
    beside = f"{target}.{uuid.uuid4().hex}"
    try:
        with open(beside, "xb") as file:
            file.write(gzip.compress(data) if target.endswith(".gz") else data)
        os.replace(beside, target)
    except BaseException:
        if os.path.exists(beside):
            os.remove(beside)
        raise


def trace_of(batches: Iterable[BatchTimes], began_at: float) -> dict[str, Any]:
    """The trace as what JSON holds; see `write_trace`."""
    found = sorted({times.step: times for times in batches}.values(), key=lambda times: (times.taken_at, times.step))
    slices = [*_reading(found, began_at), *_after_reading(found, began_at)]
    process = os.getpid()
    lanes = _in_lanes(slices)
    events = [event for thread, _, laid in lanes for event in _events(thread, process, laid)]
    events += _flows([(thread, each) for thread, _, laid in lanes for each in laid], process)
    events.sort(key=lambda event: (event["ts"], -event.get("dur", 0.0)))  # what lies inside comes after what it lies in
    return {"traceEvents": [*_names([(thread, name) for thread, name, _ in lanes], process), *events], "displayTimeUnit": "ms"}


# -- what there is to see


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


# -- tracks


def _in_lanes(slices: Sequence[Slice]) -> list[tuple[int, str, list[Slice]]]:
    """Number, name and slices of each track: those of threads first; in each no two slices overlap."""
    by_track: dict[str, list[Slice]] = {}
    for each in slices:
        by_track.setdefault(each.track, []).append(each)
    numbers = itertools.count(1)
    found: list[tuple[int, str, list[Slice]]] = []
    for track, mine in by_track.items():
        lanes: list[list[Slice]] = []
        for each in sorted(mine, key=lambda one: (one.began, one.ended)):
            free = next((lane for lane in lanes if lane[-1].ended <= each.began), None)
            if free is None:
                lanes.append([each])
            else:
                free.append(each)
        found += [(next(numbers), track if i == 1 else f"{track} {i}", lane) for i, lane in enumerate(lanes, 1)]
    return found


def _names(tracks: Iterable[tuple[int, str]], process: int) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": "prefetchshard"}}
    for thread, name in tracks:
        yield {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": process, "tid": thread, "args": {"sort_index": thread}}


def _events(thread: int, process: int, slices: Iterable[Slice]) -> Iterator[Event]:
    for each in slices:
        times = each.batch
        known = {"step": times.step, "epoch": times.epoch, "row": times.row, "rows": times.rows, "bytes": times.bytes}
        yield _event(thread, process, each.name, each.began, each.ended, {**known, **each.args})
        for name, began, ended, args in each.inner:
            yield _event(thread, process, name, began, ended, {"step": times.step, **args})


def _event(thread: int, process: int, name: str, began: int, ended: int, args: dict[str, Any]) -> Event:
    return {
        "ph": "X", "name": name, "cat": "prefetchshard", "pid": process, "tid": thread,
        "ts": _micros(began), "dur": _micros(ended) - _micros(began), "args": args,
    }  # fmt: skip


def _micros(ns: int) -> float:
    """Microseconds, in eighths: binary fractions, which readers add without an error. Else a slice ends after the next one has begun."""
    return ns // 125 / 8


def _flows(slices: Iterable[tuple[int, Slice]], process: int) -> Iterator[Event]:
    """The arrows: one way for each batch, through its slices in the order of time."""
    touched: dict[int, list[tuple[int, int, int]]] = {}
    order = {"transfer": 1, "ready": 2, "next()": 3}
    for thread, each in slices:
        if each.flows_at is not None:
            touched.setdefault(each.batch.step, []).append((order.get(each.track, 0), each.flows_at, thread))
    for step, way in touched.items():
        for i, (_, at, thread) in enumerate(sorted(way)):
            phase = "s" if i == 0 else "f" if i == len(way) - 1 else "t"
            event: Event = {"ph": phase, "name": NAME, "cat": NAME, "id": step, "pid": process, "tid": thread, "ts": _micros(at)}
            yield {**event, "bp": "e"} if phase == "f" else event
