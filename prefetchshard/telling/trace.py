"""The way of the last batches, as a trace that Perfetto and Chrome show (the Trace Event Format).

Each lane of slices is a track. Arrows (flow events) lead from a batch's reading to the `next()` that got it.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

from prefetchshard.base.files import write_whole
from prefetchshard.measuring.timeline import BatchTimes
from prefetchshard.telling.slices import Slice, lanes_of, slices_of

Event: TypeAlias = dict[str, Any]

NAME = "batch"
"""Of the arrows."""


def write_trace(path: str | os.PathLike[str], batches: Iterable[BatchTimes], began_at: float) -> None:
    """Write a trace. The file is there as a whole or not at all.

    Args:
        path: of the file; where it ends with ".gz" it is compressed.
        batches: that were handed out, all with a step of their own.
        began_at: when the run began, in seconds of its clock.

    Raises:
        OSError: it cannot be written.
    """
    data = json.dumps(trace_of(batches, began_at), separators=(",", ":")).encode()
    write_whole(path, gzip.compress(data) if os.fspath(path).endswith(".gz") else data)


def trace_of(batches: Iterable[BatchTimes], began_at: float) -> dict[str, Any]:
    """The trace as what JSON holds; see `write_trace`."""
    process = os.getpid()
    lanes = list(enumerate(lanes_of(slices_of(batches, began_at)), 1))
    events = [event for thread, lane in lanes for event in _events(thread, process, lane.slices)]
    events += _flows([(thread, each) for thread, lane in lanes for each in lane.slices], process)
    events.sort(key=lambda event: (event["ts"], -event.get("dur", 0.0)))  # what lies inside comes after what it lies in
    return {"traceEvents": [*_names([(thread, lane.name) for thread, lane in lanes], process), *events], "displayTimeUnit": "ms"}


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
