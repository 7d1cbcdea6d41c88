"""What a worker does with one part, without threads: what it counts, when it lets go, and into how many shares a copy is cut."""

from __future__ import annotations

import queue
import weakref
from functools import partial
from typing import Any

import numpy as np
import pytest

from prefetchshard.base.limits import MOST_IN_FLIGHT
from prefetchshard.base.position import EpochEnd, StartPoint
from prefetchshard.measuring.recorder import Recorder
from prefetchshard.planning.host_batch import ReadFailure
from prefetchshard.reading.batch_copying import SHARE_BYTES, BatchCopying
from prefetchshard.reading.crew import Crew
from prefetchshard.reading.open_batch import OpenBatch
from prefetchshard.reading.reading_plan import HostQueue, Part, ReadingPlan
from prefetchshard.reading.user_functions import UserFunctions
from prefetchshard.reading.worker import Worker
from prefetchshard.testing import ManualClock

NO_WRITER: Any = None


def plan_of(clock: ManualClock, *, places: int = 1, workers: int = 2) -> ReadingPlan:
    functions = UserFunctions(None, None, None)
    return ReadingPlan(
        functions, HostQueue(places), Recorder(clock), StartPoint(), 1, None, "drop", Crew(workers), None, reuses_buffers=True
    )


def open_batch(plan: ReadingPlan, parts: int) -> OpenBatch:
    ticket = plan.out.reserve()
    assert ticket is not None
    batch = OpenBatch(ticket, 3, 16, EpochEnd(False))
    batch.expect(parts)
    return batch


def test_each_share_of_a_copy_counts_for_its_batch() -> None:
    clock = ManualClock()
    plan = plan_of(clock)
    recorder, worker, batch = plan.recorder, Worker(plan, NO_WRITER), open_batch(plan, 3)

    def broken() -> None:
        clock.advance(4.0)
        raise ValueError("a share")

    for seconds in (1.0, 2.0):
        worker.do(Part(batch, 0, 1, work=partial(clock.advance, seconds)))
    worker.do(Part(batch, 0, 1, work=broken))
    assert recorder.meter().busy["copying"] == 7.0
    assert [(part.began_at, part.ended_at, part.seconds) for part in batch.host.times.parts] == [
        (began, began + took, {"copying": took}) for began, took in ((0.0, 1.0), (1.0, 2.0), (3.0, 4.0))
    ]
    assert (batch.host.times.epoch, batch.host.times.row) == (3, 16)
    failure = plan.out.failure
    assert isinstance(failure, ReadFailure)
    assert (str(failure.error), failure.stage, failure.epoch) == ("a share", "reading", 3)


@pytest.mark.parametrize("as_items", [False, True], ids=["share", "items"])
def test_a_part_lets_go_before_it_is_done(as_items: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the last part the source goes on, and may look who holds its memory."""
    released: list[bool] = []
    plan = plan_of(ManualClock())
    worker, batch = Worker(plan, NO_WRITER), open_batch(plan, 2)
    memory = np.zeros((8, 64), np.float32)
    ref = weakref.ref(memory)
    part = Part(batch, 0, 1, items=[memory]) if as_items else Part(batch, 0, 1, work=partial(np.sum, memory))
    del memory
    monkeypatch.setattr(Worker, "_fill", lambda *_: None)
    monkeypatch.setattr(OpenBatch, "part_done", lambda *_: released.append(ref() is None))
    worker.do(part)
    assert released == [True]


@pytest.mark.parametrize(
    ("goes_on", "read_at_once", "shares"),
    [(False, 1, 8), (False, 2, 8), (True, 1, 7), (True, 2, 4), (True, 4, 2), (True, 7, 1), (True, 9, 1)],
)
def test_batches_that_are_copied_at_once_share_the_workers(
    goes_on: bool, read_at_once: int, shares: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the source waits for its batch, no other is copied meanwhile: all workers and the source's own thread take a share."""
    monkeypatch.setattr("prefetchshard.reading.batch_copying.cpu_count", lambda: 16)
    plan = plan_of(ManualClock(), places=MOST_IN_FLIGHT + read_at_once, workers=8)
    copying = BatchCopying(plan, NO_WRITER, Worker(plan, NO_WRITER), queue.SimpleQueue())
    batch: Any = open_batch(plan, 1)
    batch.plan = type("OfRows", (), {"rows": 256})()
    assert copying._choose_shares(batch, 9 * SHARE_BYTES, goes_on, 0.0) == shares
    assert copying._choose_shares(batch, SHARE_BYTES - 1, goes_on, 0.0) == 0
    batch.plan = type("WithoutRows", (), {"rows": None})()
    assert copying._choose_shares(batch, 9 * SHARE_BYTES, goes_on, 0.0) == 0
