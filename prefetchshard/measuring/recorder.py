"""Where the time of a run goes: threads say which stage they enter, statistics are the sums."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Literal, TypeAlias

from prefetchshard.base.clock import Clock
from prefetchshard.measuring.stats import Stats
from prefetchshard.queues.bounded_queue import QueueStats
from prefetchshard.staging.layout import StagingStats

Stage: TypeAlias = Literal["reading", "transforming", "collating", "planning", "copying", "batching", "finishing", "placing"]


NONE_YET = (-1.0, 0, 0)

ADD_SECONDS = 0.05
"""A span that goes on hands over what it has so far when this has passed, so that `stats()` need not wait for a slow batch."""


class Span:
    """The work of one thread on a batch, or on a part of it, stage after stage. Thread safety: one thread at a time.

    Most have one stage, so those keep no dicts.

    Args:
        recorder: that gets the seconds.
        stage: the first one; it begins now.
        epoch: of the batch.
        row: the first row of the batch in its epoch; without `batch_size`, its number.

    Attributes:
        stage: the present one.
        entered_at: when it was entered, seconds of the recorder's clock; when the span ended, once it did.
        began_at: when the span began.
        seconds: in each stage before the present one; None where there was none.
        added: those that the recorder has.
        added_at: when it got them.
    """

    __slots__ = ("_recorder", "added", "added_at", "began_at", "entered_at", "epoch", "row", "seconds", "stage")
    added: dict[Stage, float]
    added_at: float

    def __init__(self, recorder: Recorder, stage: Stage, epoch: int, row: int) -> None:
        self._recorder = recorder
        self.stage: Stage = stage
        self.epoch = epoch
        self.row = row
        self.seconds: defaultdict[Stage, float] | None = None
        self.began_at = self.entered_at = recorder.clock()

    def enter(self, stage: Stage) -> float:
        """Leave the present stage for another one. Returns the seconds since the present one was entered."""
        now = self._recorder.clock()
        seconds = self.seconds
        if seconds is None:
            seconds = self.seconds = defaultdict(float)
            self.added = {}
            self.added_at = self.began_at
        took = now - self.entered_at
        seconds[self.stage] += took
        self.stage = stage
        self.entered_at = now
        if now - self.added_at > ADD_SECONDS:
            self._recorder.add(self, seconds)
        return took

    def end(self) -> float:
        """Hand the seconds to the recorder. Returns their sum."""
        recorder, seconds = self._recorder, self.seconds
        now = recorder.clock()
        took = now - self.entered_at
        self.entered_at = now
        if seconds is None:
            recorder.add_stage(self.stage, took, self.epoch, self.row)
        else:
            seconds[self.stage] += took
            recorder.add(self, seconds)
        return now - self.began_at


class Recorder:
    """What the threads of a run add to.

    Args:
        clock: monotonic seconds.

    Attributes:
        longest: of each stage the longest span, with the epoch and the row of its batch.

    Thread safety: `add` and `count` from any thread; the consumer's attributes from the consumer only.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._lock = threading.Lock()  # guards the sums that several threads add to
        self.seconds: defaultdict[Stage, float] = defaultdict(float)
        self.longest: dict[Stage, tuple[float, int, int]] = {}
        self.dropped_rows = 0
        self.padded_rows = 0
        self.replayed = 0
        # The consumer's
        self.first_batch_seconds = 0.0
        self.batches = 0
        self.rows = 0
        self.bytes = 0
        self.stall_seconds = 0.0
        self.first_next_at: float | None = None
        self.last_next_at = 0.0

    def add(self, span: Span, seconds: dict[Stage, float]) -> None:
        """Add those seconds of a span that are not added yet."""
        with self._lock:
            for stage, took in seconds.items():
                self.seconds[stage] += took - span.added.get(stage, 0.0)
                if stage not in self.longest or took > self.longest[stage][0]:
                    self.longest[stage] = took, span.epoch, span.row
        span.added = seconds.copy()
        span.added_at = span.entered_at

    def add_stage(self, stage: Stage, took: float, epoch: int, row: int) -> None:
        """Add seconds of one stage: a span of its own."""
        with self._lock:
            self.seconds[stage] += took
            if took > self.longest.get(stage, NONE_YET)[0]:
                self.longest[stage] = took, epoch, row

    def count(self, *, dropped: int = 0, padded: int = 0, replayed: int = 0) -> None:
        """Add rows, or items, from any thread."""
        with self._lock:
            self.dropped_rows += dropped
            self.padded_rows += padded
            self.replayed += replayed

    def __str__(self) -> str:
        """The longest span of each stage, for a log: asked only where that is written."""
        found = sorted(self.longest.items(), key=lambda item: item[1], reverse=True)
        return ", ".join(f"{stage} {took:.3f} s (epoch {epoch}, row {row})" for stage, (took, epoch, row) in found)

    def stats(self, *, workers: int, host: QueueStats, ready: QueueStats, staging: StagingStats) -> Stats:
        """What was measured so far."""
        wall = 0.0 if self.first_next_at is None else self.last_next_at - self.first_next_at
        spent = self.seconds.copy()
        return Stats(
            batches=self.batches,
            rows=self.rows,
            bytes=self.bytes,
            dropped_rows=self.dropped_rows,
            padded_rows=self.padded_rows,
            replayed=self.replayed,
            wall_seconds=wall,
            stall_seconds=self.stall_seconds,
            busy_seconds=max(0.0, wall - self.stall_seconds),
            source_seconds=spent["reading"],
            transform_seconds=spent["transforming"] + spent["collating"],
            copy_seconds=spent["planning"] + spent["copying"] + spent["batching"] + spent["finishing"],
            transfer_seconds=spent["placing"],
            first_batch_seconds=self.first_batch_seconds,
            workers=workers,
            host=host,
            ready=ready,
            staging=staging,
        )
