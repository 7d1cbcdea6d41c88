"""The way back to where a state was saved, over a source without random access, and the marks that make it short."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec

from prefetchshard.base.batches import Position
from prefetchshard.base.errors import StateError
from prefetchshard.reading.filling import OpenBatch
from prefetchshard.reading.reading_plan import ReadingPlan, StartPoint
from prefetchshard.resuming.sampling import sample_of
from prefetchshard.sources.iterables import END, EndType
from prefetchshard.sources.stateful import StateAccess

_LOG = logging.getLogger(__name__)

PROGRESS_SECONDS = 5.0
"""A line of progress comes no more often than this while items are skipped."""
COUNT_SECONDS = 0.1
"""Nor are the statistics told more often: that costs as much as pulling a cheap item."""


class Replay:
    """Leads a run to its beginning, and leaves on each batch what leads back to it.

    The last batch that was handed out before is read once more, in full, where the state holds its sample: a probe that is compared
    and never handed out.

    Args:
        task: what every reader is given.

    Attributes:
        start: where the reader begins to make batches: one batch earlier than the run, where that is probed.

    Thread safety: `skip` and `mark` are called by the source's thread, `passes` by any worker.
    """

    def __init__(self, task: ReadingPlan, snapshot_every: int | None) -> None:
        self._task = task
        self._every = snapshot_every
        start = self._given = task.start
        self._probes = start.sample is not None and start.snapshot is None and start.batches > 0 and start.step > 0
        if self._probes and task.batch_size is not None:
            self._probes = 0 < start.last_rows <= min(start.rows, task.batch_size)
        self._snapshot: bytes | None = None
        self._since = 0
        self.start = start
        if self._probes:
            self.start = msgspec.structs.replace(
                start, rows=max(0, start.rows - start.last_rows), batches=start.batches - 1, step=start.step - 1
            )

    @property
    def _unit(self) -> str:
        return "batches" if self._task.batch_size is None else "examples"

    def snapshot_of(self, epoch: int) -> bytes | None:
        """The source's own state from which this epoch goes on; called before the epoch is opened."""
        begins = epoch == self._given.epoch
        self._snapshot = self._given.snapshot if begins else None
        self._since = self._given.since_snapshot if begins and self._snapshot is not None else 0
        return self._snapshot

    def skip(self, epoch: int, pull: Callable[[], Any | EndType]) -> bool:
        """Pull and drop what was handed out of this epoch already. False: nothing more is wanted.

        Raises:
            StateError: the source is shorter than that.
        """
        if epoch != self._given.epoch:
            return True
        goal = self._items(self.start) if self._snapshot is None else self._since
        if self._snapshot is None:
            self._since = goal
        if goal:
            _LOG.info("going on where the state was saved: %d %s are read again and dropped", goal, self._unit)
        clock, out = self._task.clock, self._task.out
        counted, counted_at = 0, clock()
        said_at = counted_at
        for done in range(goal):
            ended = pull() is END
            now, cancelled = clock(), out.cancelled
            if ended and not cancelled:
                raise self._too_short(done)
            if cancelled or now - counted_at > COUNT_SECONDS or done + 1 == goal:
                self._task.meters.add(replayed=done + 1 - counted)  # no source seconds: those are of the batches that come
                counted, counted_at = done + 1, now
            if cancelled:
                return False
            if now - said_at > PROGRESS_SECONDS:
                said_at = now
                _LOG.info("going on where the state was saved: %d of %d %s read again", done + 1, goal, self._unit)
        return True

    def _items(self, cursor: StartPoint) -> int:
        """Items of its epoch that lie before it."""
        return cursor.batches if self._task.batch_size is None else cursor.rows

    def _too_short(self, done: int) -> StateError:
        if self._snapshot is not None:
            return StateError(
                f"the source ended {done} {self._unit} after it was put where its own state says, and the state was saved {self._since} "
                f"{self._unit} after that: it is no longer the same source"
            )
        return StateError(
            f"the source ended after {done} {self._unit} of epoch {self._given.epoch}, and the state was saved after "
            f"{self._items(self._given)}: it is no longer the same source, or was not given from its beginning"
        )

    # -- batches

    def is_probe(self, position: Position) -> bool:
        """Whether this batch was handed out before, and is read for the sake of comparing."""
        return self._probes and position.step == self.start.step and position.epoch == self._given.epoch

    def check_count(self, position: Position, items: int) -> None:
        """Compare how many examples, or batches, could be read for the probe.

        Raises:
            StateError: not as many as then.
        """
        if not self.is_probe(position):
            return
        then = 1 if self._task.batch_size is None else self._given.last_rows
        if items < then:
            raise self._too_short(self._items(self.start) + items)
        if items > then:
            raise StateError(
                f"epoch {self._given.epoch} of the source ended after {self._items(self._given)} {self._unit} when the state was saved, and has "
                f"more now: it is no longer the same source"
            )

    def mark(self, position: Position, items: int, pair: StateAccess | None) -> None:
        """Note at a batch what leads back to the place after it. Called right after its last item was pulled.

        Args:
            position: of the batch.
            items: that were pulled for it.
            pair: how the source tells its own state; None where it cannot, or where it was asked for more than this batch.

        Raises:
            StateError: the source's state cannot be kept.
        """
        self._since += items
        due = self._every is not None and (self._snapshot is None or (position.batches - 1) % self._every == 0)
        snapshot = pair.snapshot() if pair is not None and due else None
        if snapshot is not None:
            self._snapshot = snapshot
            self._since = 0
        position.snapshot = self._snapshot
        position.since_snapshot = self._since if self._snapshot is not None else 0

    def passes(self, assembly: OpenBatch) -> bool:
        """Sample a batch that is complete. False: it is the probe, which is right and goes no further.

        Raises:
            StateError: the probe is another batch than the one that was handed out then.
        """
        position = assembly.position
        probe = self.is_probe(position)
        if assembly.plan is None or (position.snapshot is not None and not probe):
            return True
        position.sample = sample_of(assembly.plan, assembly.memory, assembly.passed)
        if not probe:
            return True
        self._task.meters.add(replayed=1 if self._task.batch_size is None else position.rows - position.first_row)
        if position.sample != self._given.sample:
            raise StateError(
                f"batch {position.batches - 1} of epoch {position.epoch}, the last that was handed out before the state was saved, is another "
                f"one now: the source, `transform` or `collate` is no longer the same, or draws random numbers that are not seeded; "
                f"state.unchecked() goes on without this comparison"
            )
        return False
