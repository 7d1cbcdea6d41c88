"""`iterator.trace()`: the way of the last batches, in the Trace Event Format; and the stages in a profile of JAX's."""

from __future__ import annotations

import gzip
import json
import os
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jax.sharding import NamedSharding

import prefetchshard as ps
from consumers import Consume
from prefetchshard.measuring.timeline import BatchTimes, PartTimes
from prefetchshard.telling.slices import in_order
from prefetchshard.telling.trace import trace_of
from process_sources import Rows
from support import run_python

STEPS = 12
KNOWN = {"step", "epoch", "row", "rows", "bytes"}


def check(trace: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The slices by the name of their track, once the trace is as the format demands."""
    events = trace["traceEvents"]
    assert trace["displayTimeUnit"] == "ms"
    metadata = [event for event in events if event["ph"] == "M"]
    others = [event for event in events if event["ph"] != "M"]
    assert events == metadata + others
    assert {event["ph"] for event in others} <= {"X", "s", "t", "f"}
    assert len({event["pid"] for event in events}) == 1
    stamps = [event["ts"] for event in others]
    assert stamps == sorted(stamps)
    assert all(stamp >= 0 for stamp in stamps)
    names = {event["tid"]: event["args"]["name"] for event in metadata if event["name"] == "thread_name"}
    assert len(set(names.values())) == len(names), "two tracks have one name"
    assert [event["args"]["name"] for event in metadata if event["name"] == "process_name"] == ["prefetchshard"]
    tracks: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in others:
        assert {"ph", "name", "cat", "pid", "tid", "ts"} <= event.keys()
        assert event["tid"] in names
        if event["ph"] == "X":
            assert event["dur"] >= 0
            tracks[names[event["tid"]]].append(event)
    for slices in tracks.values():
        check_nesting(slices)
    check_flows([event for event in others if event["ph"] != "X"], tracks, names)
    return dict(tracks)


def ends(event: dict[str, Any]) -> float:
    return event["ts"] + event["dur"]  # as readers add: an error of rounding would make slices overlap


def check_nesting(slices: list[dict[str, Any]]) -> None:
    """Each slice of a track begins after the one before has ended, or lies inside it."""
    around: list[dict[str, Any]] = []
    for event in slices:
        while around and ends(around[-1]) <= event["ts"]:
            around.pop()
        assert not around or ends(event) <= ends(around[-1]), (around[-1], event)
        around.append(event)


def check_flows(flows: list[dict[str, Any]], tracks: dict[str, list[dict[str, Any]]], names: dict[int, str]) -> None:
    """The arrows of each batch begin once, end once, and touch slices of that batch."""
    ways: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in flows:
        ways[event["id"]].append(event)
    steps = {slice["args"]["step"] for slices in tracks.values() for slice in slices}
    assert set(ways) == steps
    for step, way in ways.items():
        assert [event["ph"] for event in way] == ["s", *["t"] * (len(way) - 2), "f"]
        assert len({(event["name"], event["cat"]) for event in way}) == 1
        assert way[-1]["bp"] == "e"
        assert names[way[-1]["tid"]].startswith("next()")
        began = -1.0
        for event in way:
            inside = [s for s in tracks[names[event["tid"]]] if s["ts"] <= event["ts"] <= ends(s) and s["args"]["step"] == step]
            assert inside, event
            # Perfetto turns an arrow round that leads to a slice which began earlier; it takes the innermost slice
            innermost = max(slice["ts"] for slice in inside)
            assert began <= innermost, event
            began = innermost


def steps_in(tracks: dict[str, list[dict[str, Any]]], name: str) -> list[int]:
    """The steps of the slices of a kind of track, without those inside others."""
    found = [event for track, events in tracks.items() if track.startswith(name) for event in events if KNOWN <= event["args"].keys()]
    return sorted(event["args"]["step"] for event in found)


async def pulled() -> AsyncIterator[np.ndarray]:
    for i in range(STEPS):
        yield np.full((8, 2), i, np.float32)


def batches() -> Iterator[np.ndarray]:
    for i in range(STEPS):
        yield np.full((8, 2), i, np.float32)


def same(example: Any) -> Any:
    return example


SOURCES: dict[str, tuple[Any, dict[str, Any]]] = {
    "arrays": (np.zeros((8 * STEPS, 2), np.float32), {"batch_size": 8, "shuffle": True, "workers": 3}),
    "two epochs": (np.zeros((4 * STEPS, 2), np.float32), {"batch_size": 8, "epochs": 2}),
    "iterator": (batches, {}),
    "iterator and transform": (batches, {"transform": same, "workers": 2}),
    "dataset": (Rows(8 * STEPS, "array"), {"batch_size": 8, "transform": same, "workers": 4}),
    "async": (pulled, {}),
    "processes": (Rows(8 * STEPS, "array"), {"batch_size": 8, "workers": ps.Processes(2)}),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_each_batch_can_be_followed(kind: str, S: NamedSharding, consume: Consume, tmp_path: Path) -> None:
    source, options = SOURCES[kind]
    iterator = iter(ps.Loader(source, S, **options))
    consume(iterator)
    iterator.trace(tmp_path / "trace.json")
    tracks = check(json.loads((tmp_path / "trace.json").read_text()))
    every = list(range(STEPS))
    assert steps_in(tracks, "transfer") == steps_in(tracks, "ready") == steps_in(tracks, "next()") == every
    assert set(steps_in(tracks, "prefetchshard-")) == set(every), "what threads read"
    assert set(steps_in(tracks, "step")) <= set(every[:-1])
    (last,) = [event for event in tracks["next()"] if event["name"] == f"step {STEPS - 1}: next()"]
    assert (last["args"]["rows"], last["args"]["bytes"]) == (8, 192 if "dataset" in kind or kind == "processes" else 64)


def test_only_the_last_batches_are_there(S: NamedSharding, tmp_path: Path) -> None:
    iterator = iter(ps.Loader(np.zeros((8 * 300, 1), np.float32), S, batch_size=8))
    assert len(list(iterator)) == 300
    iterator.trace(tmp_path / "trace.json")
    tracks = check(json.loads((tmp_path / "trace.json").read_text()))
    assert steps_in(tracks, "next()") == list(range(300 - 256, 300))


def test_it_is_there_at_any_time(S: NamedSharding, tmp_path: Path) -> None:
    """Before the first batch, between batches, from another thread, and after the run was closed."""
    iterator = iter(ps.Loader(np.zeros((80, 1), np.float32), S, batch_size=8))
    found: list[list[int]] = []

    def write() -> None:
        iterator.trace(str(tmp_path / "trace.json"))
        found.append(steps_in(check(json.loads((tmp_path / "trace.json").read_text())), "next()"))

    write()
    next(iterator)
    write()
    next(iterator)
    other = threading.Thread(target=write)
    other.start()
    other.join()
    iterator.close()
    write()
    assert found == [[], [0], [0, 1], [0, 1]]


def test_a_name_that_ends_with_gz_is_compressed(S: NamedSharding, tmp_path: Path) -> None:
    iterator = iter(ps.Loader(np.zeros((80, 1), np.float32), S, batch_size=8))
    list(iterator)
    iterator.trace(tmp_path / "trace.json.gz")
    assert steps_in(check(json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))), "next()") == list(range(10))


def test_the_file_is_there_as_a_whole_or_not_at_all(S: NamedSharding, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    iterator = iter(ps.Loader(np.zeros((80, 1), np.float32), S, batch_size=8))
    with pytest.raises(FileNotFoundError):
        iterator.trace(tmp_path / "nowhere" / "trace.json")

    def fail(*_: object) -> None:
        raise OSError("the disk is full")

    (tmp_path / "trace.json").write_text("before")
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="full"):
        iterator.trace(tmp_path / "trace.json")
    assert [file.name for file in tmp_path.iterdir()] == ["trace.json"]
    assert (tmp_path / "trace.json").read_text() == "before"
    iterator.close()


def batch(step: int, parts: list[PartTimes], *ends_at: float) -> BatchTimes:
    times = BatchTimes(0, 8 * step)
    times.step, times.rows, times.bytes, times.parts = step, 8, 32, parts
    times.dispatch_at, times.dispatched_at, times.ready_at, times.asked_at, times.taken_at = ends_at
    return times


def test_what_overlaps_gets_tracks_of_its_own() -> None:
    part = PartTimes("reader", 10.0, 11.0, {"reading": 1.0})
    flights = [batch(i, [part] if i == 0 else [], 11.0 + i, 11.5 + i, 13.5 + i, 13.4 + i, 13.6 + i) for i in range(4)]
    tracks = check(trace_of(flights, 10.0))
    assert {name for name in tracks if name.startswith("transfer")} == {"transfer", "transfer 2", "transfer 3"}
    (first, *_) = tracks["transfer"]
    assert (first["ts"], first["dur"], first["name"]) == (1e6, 2.5e6, "step 0: transfer")
    assert [(event["name"], event["ts"], event["dur"]) for event in tracks["step"]] == [
        (f"step {i}", pytest.approx((3.6 + i) * 1e6), pytest.approx(0.8e6)) for i in range(3)
    ]


def test_kinds_of_work_lie_inside_their_part() -> None:
    seconds: Any = {"batching": 0.25, "reading": 0.5, "transforming": 0.125, "copying": 0.0}
    times = batch(0, [PartTimes("reader", 1.0, 2.0, seconds)], 2.0, 2.0, 2.5, 0.5, 2.5)
    parent, *inner = check(trace_of([times], 0.0))["reader"]
    assert (parent["name"], parent["ts"], parent["dur"]) == ("step 0: rows", 1e6, 1e6)
    assert parent["args"] == {"step": 0, "epoch": 0, "row": 0, "rows": 8, "bytes": 32}
    assert [(event["name"], event["ts"], event["dur"]) for event in inner] == [
        ("reading", 1e6, 0.5e6),
        ("transforming", 1.5e6, 0.125e6),
        ("batching", 1.625e6, 0.25e6),
    ]
    assert all("alternate" in event["args"]["note"] and "clipped" not in event["args"] for event in inner)


def test_what_a_next_that_waited_did_lies_inside_it() -> None:
    part = PartTimes("reader", 0.0, 1.0, {})
    waited = batch(0, [part], 1.0, 1.0, 2.0, 0.5, 2.5)
    found_it_ready = batch(1, [part], 1.0, 1.0, 2.0, 3.0, 3.5)
    outer, *inner, last = check(trace_of([waited, found_it_ready], 0.0))["next()"]
    assert (outer["name"], outer["ts"], outer["dur"]) == ("step 0: next()", 0.5e6, 2e6)
    assert [(event["name"], event["ts"], event["dur"]) for event in inner] == [
        ("waiting", 0.5e6, 1.5e6),
        ("handing over", 2e6, 0.5e6),
    ]
    assert last["name"] == "step 1: next()"


def test_readers_add_times_without_an_error() -> None:
    """Slices that touch: in decimal microseconds the sum of beginning and duration is often a little more than the next beginning."""
    parts = [
        PartTimes("reader", at / 1e7, (at + 77) / 1e7, {"reading": 3.3e-6, "transforming": 4.4e-6}) for at in range(1234567, 1304637, 77)
    ]
    tracks = check(trace_of([batch(0, parts, 1.0, 1.0, 2.0, 0.5, 2.5)], 0.0))
    assert len(tracks["reader"]) == 3 * len(parts)
    assert all((8 * event[name]).is_integer() for event in tracks["reader"] for name in ("ts", "dur"))


def test_batches_are_in_the_order_in_which_they_were_taken_each_once() -> None:
    """Threads that share a run take them in any order, and a place that is written anew may be read twice."""
    part = PartTimes("reader", 0.0, 1.0, {})
    late, early = batch(3, [part], 1.0, 1.0, 2.0, 8.0, 9.0), batch(4, [part], 1.0, 1.0, 2.0, 6.0, 7.0)
    assert in_order([late, early, late]) == [early, late]


def test_the_seconds_of_a_process_are_clipped_and_named() -> None:
    seconds: Any = {"reading": 3.0, "transforming": 1.0}
    times = batch(0, [PartTimes("reader", 1.0, 2.0, seconds)], 2.0, 2.0, 2.5, 0.5, 2.5)
    _, *inner = check(trace_of([times], 0.0))["reader"]
    assert [(event["ts"], event["dur"], event["args"]["seconds"]) for event in inner] == [(1e6, 0.75e6, 3.0), (1.75e6, 0.25e6, 1.0)]
    assert all("clipped" in event["args"] for event in inner)


def test_a_profile_shows_the_stages(tmp_path: Path) -> None:
    program = """
        import glob, gzip, json, sys
        import jax
        import numpy as np
        import prefetchshard as ps

        class Rows:
            def __len__(self):
                return 64
            def __getitem__(self, row):
                return np.full(3, row, np.float32)

        with jax.profiler.trace(sys.argv[1]):
            for batch in ps.Loader(Rows(), batch_size=8, transform=lambda row: row + 1):
                batch.block_until_ready()
        (path,) = glob.glob(sys.argv[1] + "/**/*.trace.json.gz", recursive=True)
        with gzip.open(path) as file:
            events = json.load(file)["traceEvents"]
        found = {}
        for event in events:
            name, args = event.get("name", ""), event.get("args", {})
            if name.startswith("prefetchshard: "):
                found.setdefault(name, set()).add(int(args["step"] if "step" in args else args["row"]))
        print(json.dumps({name: sorted(numbers) for name, numbers in found.items()}))
    """
    done = run_python(program, args=(str(tmp_path),))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    steps = list(range(8))
    assert found["prefetchshard: dispatching"] == found["prefetchshard: transferring"] == steps
    assert found["prefetchshard: next()"] == [*steps, 8]  # the last one found the end
    assert found["prefetchshard: reading"] == [8 * step for step in steps]
