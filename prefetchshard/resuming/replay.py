"""Opens a source at the start point of a run, and makes a mark after each batch from which a later run can resume.

If the source can restore its own state, it does. Else its items are read again and dropped, and a hash over some items of the last
batch checks that it is still the same source.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from typing import Any, Protocol

from prefetchshard.base.errors import StateError
from prefetchshard.base.position import StartPoint
from prefetchshard.measuring.recorder import Recorder
from prefetchshard.planning.host_batch import SourceMark
from prefetchshard.resuming.sampling import add_item, is_sampled
from prefetchshard.sources.iterables import END, EndType, OpenSource, Stream

_LOG = logging.getLogger(__name__)

PROGRESS_SECONDS = 5.0
"""The shortest time between two progress messages while items are skipped."""
COUNT_SECONDS = 0.1
"""The shortest time between two updates of the statistics: an update costs as much as pulling a cheap item."""


class Cancellable(Protocol):
    """What is read for."""

    @property
    def cancelled(self) -> bool:
        """Whether nothing more is wanted."""
        ...


class ReplayedSource:
    """Opens a source at a start point, and yields its items from there.

    Args:
        source: the stream to pull.
        start: where the run begins.
        batch_size: examples per batch; None if an item is a batch.
        snapshot_every: take a snapshot of the source's own state every this many batches; None: never.
        recorder: counts what is read again.

    Attributes:
        is_inside: whether a thread is in the source's code. Set before the last look whether anything is wanted: who cancels first, and
            then finds nobody inside, need not close the source for anybody who comes later.

    Thread safety: call it from the source's thread; any thread may read the attributes.
    """

    def __init__(self, source: Stream, start: StartPoint, batch_size: int | None, snapshot_every: int | None, recorder: Recorder) -> None:
        self.is_inside = False
        self._source = source
        self._start = start
        self._batch_size = batch_size
        self._every = snapshot_every
        self._recorder = recorder
        self._items: OpenSource | None = None
        self._ended = False
        self._batches = 0  # of this epoch, up to the last mark
        self._snapshot: bytes | None = None
        self._since = 0  # items pulled since the snapshot
        self._hash: Any = None  # over items of the current batch

    @property
    def _unit(self) -> str:
        return "batches" if self._batch_size is None else "examples"

    def rows_done(self, epoch: int) -> int:
        """Rows of the epoch that were delivered before this run."""
        return self._start.rows if epoch == self._start.epoch else 0

    def batches_done(self, epoch: int) -> int:
        """Batches of the epoch that were delivered before this run."""
        return self._start.batches if epoch == self._start.epoch else 0

    # -- going to the start point

    def open(self, epoch: int, loop: Any) -> OpenSource:
        """Open an epoch; restore the source's own state if the run begins with one. Call `skip` next.

        Raises:
            StateError: the source cannot restore a state.
        """
        begins = epoch == self._start.epoch
        self._snapshot = self._start.snapshot if begins else None
        self._since = self._start.since_snapshot if begins and self._snapshot is not None else 0
        self._batches = self.batches_done(epoch)
        self._ended = False
        self._hash = None
        self._items = self._source.open(epoch, loop, self._snapshot)
        return self._items

    def skip(self, epoch: int, items: OpenSource, cancelled: Callable[[], bool]) -> bool:
        """Pull and drop the items of this epoch that were delivered before. Returns False if cancelled.

        Raises:
            StateError: the source is shorter than that, or has changed.
        """
        if epoch != self._start.epoch:
            return True
        self.is_inside = True
        try:
            if self._snapshot is not None:
                return self._drop(items, self._since, cancelled)
            goal = self._since = self._place(self._start)
            return self._drop(items, goal, cancelled) and self._is_the_same(items, cancelled)
        finally:
            self.is_inside = False

    def _place(self, point: StartPoint) -> int:
        """The number of items of its epoch before a start point."""
        return point.batches if self._batch_size is None else point.rows

    def _drop(self, items: OpenSource, goal: int, cancelled: Callable[[], bool]) -> bool:
        if goal:
            _LOG.info("going on where the state was saved: %d %s are read again and dropped", goal, self._unit)
        clock = self._recorder.clock
        counted, counted_at = 0, clock()
        said_at = counted_at
        if cancelled():
            return False
        size = self._batch_size or 1
        last_batch = goal - (1 if self._batch_size is None else self._start.last_rows)
        for done in range(goal):
            item = items.pull(min(size, goal - done))
            now, is_cancelled = clock(), cancelled()
            if item is END and not is_cancelled:
                raise self._too_short(done)
            if is_cancelled or now - counted_at > COUNT_SECONDS or done + 1 == goal:
                self._recorder.count(replayed=done + 1 - counted)  # adds no source seconds: those are for delivered batches
                counted, counted_at = done + 1, now
            if is_cancelled:
                return False
            if done >= last_batch and self._snapshot is None:
                self._look_at(item, done - last_batch, size)
            if now - said_at > PROGRESS_SECONDS:
                said_at = now
                _LOG.info("going on where the state was saved: %d of %d %s read again", done + 1, goal, self._unit)
        return True

    def _is_the_same(self, items: OpenSource, cancelled: Callable[[], bool]) -> bool:
        """Check that the source has not changed since the state was saved. Returns False if cancelled."""
        start, sample = self._start, self._digest()
        if start.sample is None or not start.batches:
            return True
        if sample != start.sample:
            raise StateError(
                f"batch {start.batches - 1} of epoch {start.epoch}, the last that was handed out before the state was saved, is another "
                f"one now: the source has changed, or draws unseeded random numbers; state.unchecked() resumes without this check"
            )
        if self._batch_size is not None and start.last_rows < self._batch_size:  # an incomplete batch, so the epoch ended there
            self._ended = items.pull() is END
            if cancelled():
                return False
            if not self._ended:
                raise StateError(
                    f"epoch {start.epoch} of the source ended after {start.rows} {self._unit} when the state was saved, and has "
                    f"more now: it is no longer the same source"
                )
        return True

    def _too_short(self, done: int) -> StateError:
        if self._snapshot is not None:
            return StateError(
                f"the source ended {done} {self._unit} after it was put where its own state says, and the state was saved {self._since} "
                f"{self._unit} after that: it is no longer the same source"
            )
        return StateError(
            f"the source ended after {done} {self._unit} of epoch {self._start.epoch}, and the state was saved after "
            f"{self._place(self._start)}: it is no longer the same source, or was not given from its beginning"
        )

    # -- items

    def pull(self, row: int, size: int, out: Cancellable) -> Any | EndType:
        """The next item, or END; END too where nothing more is wanted.

        Args:
            row: its row in the batch.
            size: items in a full batch.
            out: where the item goes.
        """
        assert self._items is not None
        if self._ended:
            return END
        self.is_inside = True
        try:
            item = END if out.cancelled else self._items.pull(size - row)
        finally:
            self.is_inside = False
        if item is not END and self._snapshot is None:
            self._look_at(item, row, size)
        return item

    def _look_at(self, item: Any, row: int, size: int) -> None:
        """Add an item to the hash of its batch; called right after the pull, as the source may overwrite the item later."""
        if is_sampled(row, size):
            if self._hash is None:
                self._hash = hashlib.blake2b(digest_size=16)
            add_item(self._hash, item)

    def _digest(self) -> bytes | None:
        digest, self._hash = self._hash, None
        return None if digest is None else digest.digest()

    def mark(self, items: int, *, is_whole: bool) -> SourceMark:
        """The mark from which a run resumes right after a batch. Call it once the batch's last item is pulled.

        Args:
            items: number of items pulled for the batch.
            is_whole: False if the source was pulled beyond this batch, so that a snapshot would be too late.

        Raises:
            StateError: the source's state cannot be packed.
        """
        self._batches += 1
        self._since += items
        access = self._items.access if self._items is not None and is_whole else None
        if access is not None and self._every is not None and (self._snapshot is None or (self._batches - 1) % self._every == 0):
            snapshot = access.snapshot()
            if snapshot is not None:
                self._snapshot, self._since = snapshot, 0
        sample = self._digest()
        if self._snapshot is not None:
            return SourceMark(self._snapshot, self._since, None)
        return SourceMark(None, 0, sample)
