"""The sequencer by itself: what it makes of batches, marks and faults that come in order. No thread, no source."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from jax.sharding import NamedSharding

import prefetchshard as ps
from prefetchshard.base.clock import MONOTONIC
from prefetchshard.base.config import Pad
from prefetchshard.base.position import EpochEnd, StartPoint
from prefetchshard.measuring.recorder import Recorder
from prefetchshard.planning.host_batch import EpochMark, HostBatch, ReadFailure, SourceMark
from prefetchshard.planning.planner import Planner
from prefetchshard.queues.bounded_queue import EMPTY, BoundedQueue
from prefetchshard.reading.open_batch import OpenBatch
from prefetchshard.reading.sequencer import Sequencer
from prefetchshard.sharding.rules import resolve
from prefetchshard.staging.layout import FreshStaging
from support import Thread


class Line:
    """A sequencer with its queue, and batches to put into it."""

    def __init__(self, sharding: Any, *, remainder: Any = "drop", start: StartPoint | None = None, is_endless: bool = False) -> None:
        self.recorder = Recorder(MONOTONIC)
        self.staging = FreshStaging()
        pad = remainder if isinstance(remainder, Pad) else None
        self.planner = Planner(
            resolve(sharding), rows=None, pad=pad, microbatches=None, narrow="check", x64=False, on_bytes=lambda host, device: None
        )
        self.queue: BoundedQueue[Any] = BoundedQueue(16, held_until_release=True)
        self.sequencer = Sequencer(
            self.queue,
            self.planner,
            self.staging,
            self.recorder,
            start or StartPoint(resumes_by="replay"),
            batch_size=None,
            remainder=remainder,
            is_endless=is_endless,
        )

    def send(self, rows: int, epoch: int = 0, mark: SourceMark | None = None) -> None:
        leaves, tree = self.planner.rules.flatten(np.full(rows, rows, np.float32))
        plan = self.planner.for_batch(leaves, tree)
        memory = self.staging.lease(plan.layout)
        memory.views[0][:] = leaves[0]
        batch = HostBatch(epoch, EpochEnd())
        batch.host_plan, batch.rows, batch.memory, batch.mark = plan, rows, memory, mark
        assert self.queue.put(batch)

    def end_epoch(self, epoch: int = 0) -> None:
        assert self.queue.put(EpochMark(epoch))

    def take(self) -> list[HostBatch]:
        """What can be taken now, without waiting."""
        taken: list[HostBatch] = []
        while self.sequencer.has_ready():
            batch = self.sequencer.take_nowait()
            assert batch is not EMPTY
            taken.append(batch)
            self.sequencer.release()
        return taken


def rows_of(batches: list[HostBatch]) -> list[int]:
    return [batch.rows for batch in batches]


def test_a_short_batch_waits_until_the_next_is_seen(S: NamedSharding) -> None:
    line = Line(S)
    line.send(16)
    line.send(8)
    assert rows_of(line.take()) == [16]
    line.send(16)
    assert rows_of(line.take()) == [8, 16]


def test_a_short_batch_at_the_end_is_dropped_and_counted(S: NamedSharding) -> None:
    line = Line(S)
    line.send(16)
    line.send(8)
    (first,) = line.take()
    assert not first.position.end_is_known
    line.end_epoch()
    assert line.take() == []
    assert first.position.ends_epoch
    assert line.recorder.dropped_rows == 8
    assert line.queue.stats().held == 0


def test_a_short_batch_at_the_end_is_an_error_that_names_it(S: NamedSharding) -> None:
    line = Line(S, remainder="error")
    line.send(16)
    line.send(8)
    line.end_epoch()
    assert line.sequencer.has_ready()
    assert line.sequencer.take_nowait() is not EMPTY
    with pytest.raises(ps.BatchError, match="8 rows shorter") as caught:
        line.sequencer.has_ready()
    assert caught.value.__notes__ == ["prefetchshard: while batching batch 1 (epoch 0, rows 16 to 23 of the epoch)"]


def test_a_short_batch_is_moved_and_filled_up_under_a_mask(S: NamedSharding) -> None:
    line = Line(S, remainder=Pad(value=7))
    line.send(16)
    line.send(5)  # does not fit eight devices by itself
    line.end_epoch()
    first, short = line.take()
    assert first.mask is not None
    assert first.mask.all()
    assert short.mask is not None
    assert short.mask.tolist() == [True] * 5 + [False] * 11
    assert short.memory is not None
    assert short.memory.views[0].tolist() == [5.0] * 5 + [7.0] * 11
    assert (short.rows, line.recorder.padded_rows) == (5, 11)


def test_positions_go_on_from_the_start_point(S: NamedSharding) -> None:
    start = StartPoint(run=2, run_epoch=3, epoch=4, rows=32, batches=2, step=9, batch_rows=16, resumes_by="replay")
    line = Line(S, start=start)
    line.send(16, epoch=4, mark=SourceMark(None, 0, b"hash"))
    line.end_epoch(4)
    line.send(16, epoch=5, mark=SourceMark(b"state", 3, None))
    one, two = (batch.position for batch in line.take())
    assert (one.run, one.epoch, one.step, one.first_row, one.rows, one.batches, one.ends_epoch) == (2, 4, 9, 32, 48, 3, True)
    assert (one.after.resumes_by, one.after.sample, one.after.run_epoch, one.after.batch_rows) == ("replay", b"hash", 3, 16)
    assert (two.epoch, two.step, two.first_row, two.rows, two.batches) == (5, 10, 0, 16, 1)
    assert (two.after.resumes_by, two.after.snapshot, two.after.since_snapshot) == ("snapshot", b"state", 3)


def test_a_run_that_goes_on_tells_short_by_its_first_batch(S: NamedSharding) -> None:
    line = Line(S, start=StartPoint(batches=1, rows=16, step=1, batch_rows=16, resumes_by="replay"))
    line.send(8)
    line.end_epoch()
    assert line.take() == []
    assert line.recorder.dropped_rows == 8


def test_a_fault_comes_after_what_was_held_and_names_its_batch(S: NamedSharding) -> None:
    line = Line(S)
    line.send(16)
    line.send(8)
    ticket = line.queue.reserve()
    assert ticket is not None
    error = ValueError("boom")
    ticket.fail(ReadFailure(error, "reading", 0))
    assert rows_of(line.take()) == [16]
    assert line.sequencer.wait_ready()  # nothing more comes, so the short one is no remainder
    assert rows_of(line.take()) == [8]
    assert line.sequencer.is_over()
    assert line.sequencer.failure is error
    assert error.__notes__ == ["prefetchshard: while reading batch 2 (epoch 0, batch 2 of the epoch)"]


def test_who_waits_for_the_end_of_an_epoch_is_let_go(S: NamedSharding) -> None:
    line = Line(S)
    line.send(16)
    (batch,) = line.take()
    line.sequencer.cancel()
    assert Thread(lambda: batch.position.ends_epoch).returned() is False
    assert not line.sequencer.wait_ready()


@pytest.mark.parametrize("epochs", [0, 2])
def test_an_epoch_without_a_batch_is_an_error_only_where_there_is_no_end(epochs: int, S: NamedSharding) -> None:
    for is_endless in (False, True):
        line = Line(S, is_endless=is_endless)
        for epoch in range(epochs):
            line.send(16, epoch=epoch)
            line.end_epoch(epoch)
        line.end_epoch(epochs)
        if is_endless:
            with pytest.raises(ps.ConfigError, match=f"epoch {epochs} gave no batch"):
                line.take()
        else:
            assert rows_of(line.take()) == [16] * epochs


# -- an open batch that is not wanted


class Memory:
    views = ()
    slab = None

    def __init__(self) -> None:
        self.released = 0

    def release(self) -> None:
        self.released += 1


def test_what_is_discarded_gives_its_memory_back_with_its_last_part() -> None:
    for parts in range(3):
        batch = OpenBatch(BoundedQueue[Any](4).reserve(), 0, 0, EpochEnd())  # type: ignore[arg-type]
        batch.host.memory = memory = Memory()
        for _ in range(parts):
            batch.add_part()
        batch.discard()
        assert memory.released == (parts == 0)  # while a part is at work its memory must stay
        for left in reversed(range(parts)):
            assert batch.part_done() == (left == 0)
        batch.host.drop_memory()
        assert memory.released == 1
        batch.fail(ValueError("too late"), "reading")
        assert batch.ticket.failure is None
