"""Where the time of a run goes: threads say which stage they enter, statistics are the sums."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, TypeAlias

from prefetchshard.base.clock import Clock
from prefetchshard.measuring.stats import Stats
from prefetchshard.queues.bounded_queue import QueueStats
from prefetchshard.staging.layout import StagingStats

Stage: TypeAlias = Literal["reading", "transforming", "collating", "planning", "copying", "batching", "finishing", "placing"]

NONE_YET: Mapping[Stage, float] = MappingProxyType({})

ADD_SECONDS = 0.05
"""A span that goes on hands over what it has so far when this has passed, so that `stats()` need not wait for a slow batch."""


class Span:
    """The work of one thread on a batch, or on a part of it, stage after stage. Thread safety: one thread at a time.

    Args:
        recorder: that gets the seconds.
        stage: the first one; it begins now.
        epoch: of the batch.
        row: the first row of the batch in its epoch; without `batch_size`, its number.

    Attributes:
        stage: the present one.
        entered_at: when it was entered, seconds of the recorder's clock; when the span ended, once it did.
        began_at: when the span began.
        seconds: in each stage so far.
        added: those that the recorder has.
        added_at: when it got them.
    """

    __slots__ = ("_clock", "_recorder", "added", "added_at", "began_at", "entered_at", "epoch", "row", "seconds", "stage")

    def __init__(self, recorder: Recorder, stage: Stage, epoch: int, row: int) -> None:
        self._recorder = recorder
        self._clock = recorder.clock
        self.seconds: defaultdict[Stage, float] = defaultdict(float)
        self.epoch = epoch
        self.row = row
        self.stage: Stage = stage
        self.added: dict[Stage, float] = {}
        self.began_at = self.added_at = self.entered_at = recorder.clock()

    def enter(self, stage: Stage) -> float:
        """Leave the present stage for another one. Returns the seconds since the present one was entered."""
        now = self._clock()
        took = now - self.entered_at
        self.seconds[self.stage] += took
        self.stage = stage
        self.entered_at = now
        if now - self.added_at > ADD_SECONDS:
            self._hand_over()
        return took

    def end(self) -> float:
        """Hand the seconds to the recorder. Returns their sum."""
        now = self._clock()
        self.seconds[self.stage] += now - self.entered_at
        self.entered_at = now
        self._hand_over()
        return now - self.began_at

    def _hand_over(self) -> None:
        self._recorder.add(self.seconds, self.epoch, self.row, self.added)
        self.added = self.seconds.copy()
        self.added_at = self.entered_at


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

    def add(self, seconds: Mapping[Stage, float], epoch: int, row: int, added: Mapping[Stage, float] = NONE_YET) -> None:
        """Add what the stages of a batch, or of a part of it, took.

        Args:
            seconds: in each stage, since the beginning.
            epoch: of the batch.
            row: the first row of the batch in its epoch; without `batch_size`, its number.
            added: those seconds that were added before.
        """
        with self._lock:
            for stage, took in seconds.items():
                self.seconds[stage] += took - added.get(stage, 0.0)
                if stage not in self.longest or took > self.longest[stage][0]:
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
