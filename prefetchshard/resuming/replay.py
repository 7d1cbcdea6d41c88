"""A source that begins where a run begins, and the marks that lead back to each batch of it.

Where the source restores its own state it goes on from there. Else its items are read again and dropped, and a hash over some of the
last batch's items tells whether it is still the same source.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from typing import Any

from prefetchshard.base.errors import StateError
from prefetchshard.base.position import StartPoint
from prefetchshard.measuring.recorder import Recorder
from prefetchshard.planning.host_batch import SourceMark
from prefetchshard.resuming.sampling import add_item, is_sampled
from prefetchshard.sources.iterables import END, EndType, OpenSource, Stream

_LOG = logging.getLogger(__name__)

PROGRESS_SECONDS = 5.0
"""A line of progress comes no more often than this while items are skipped."""
COUNT_SECONDS = 0.1
"""Nor are the statistics told more often: that costs as much as pulling a cheap item."""


class ReplayedSource:
    """Opens a source at a start point, and hands out its items from there.

    Args:
        source: that is pulled.
        start: where the run begins.
        batch_size: examples of a batch; None where an item is a batch.
        snapshot_every: batches from one look at the source's own state to the next; None: it is never asked.
        recorder: counts what is read again.

    Attributes:
        is_inside: whether a thread is in the source's code.
        home_thread: the thread whose event loop the source is pulled in, where it is bound to one.

    Thread safety: called by the source's thread; the attributes may be read from any thread.
    """

    def __init__(self, source: Stream, start: StartPoint, batch_size: int | None, snapshot_every: int | None, recorder: Recorder) -> None:
        self.is_inside = False
        self._source = source
        self.home_thread = None if source.home is None else source.home.thread
        self._start = start
        self._batch_size = batch_size
        self._every = snapshot_every
        self._recorder = recorder
        self._items: OpenSource | None = None
        self._ended = False
        self._batches = 0  # of this epoch, up to the last mark
        self._snapshot: bytes | None = None
        self._since = 0  # items that were pulled after it
        self._hash: Any = None  # over items of the batch that is being read

    @property
    def _unit(self) -> str:
        return "batches" if self._batch_size is None else "examples"

    def rows_done(self, epoch: int) -> int:
        """Rows of the epoch that were handed out before the run."""
        return self._start.rows if epoch == self._start.epoch else 0

    def batches_done(self, epoch: int) -> int:
        """Batches of the epoch that were handed out before the run."""
        return self._start.batches if epoch == self._start.epoch else 0

    # -- getting there

    def open(self, epoch: int, loop: Any) -> OpenSource:
        """Open an epoch, at the source's own state where the run begins with one. `skip` comes next.

        Raises:
            StateError: the source takes no state.
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
        """Pull and drop what was handed out of this epoch already. False: nothing more is wanted.

        Raises:
            StateError: the source is shorter than that, or another one.
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
        """Items of its epoch that lie before it."""
        return point.batches if self._batch_size is None else point.rows

    def _drop(self, items: OpenSource, goal: int, cancelled: Callable[[], bool]) -> bool:
        if goal:
            _LOG.info("going on where the state was saved: %d %s are read again and dropped", goal, self._unit)
        clock = self._recorder.clock
        counted, counted_at = 0, clock()
        said_at = counted_at
        size = self._batch_size or 1
        last_batch = goal - (1 if self._batch_size is None else self._start.last_rows)
        for done in range(goal):
            item = items.pull()
            now, is_cancelled = clock(), cancelled()
            if item is END and not is_cancelled:
                raise self._too_short(done)
            if is_cancelled or now - counted_at > COUNT_SECONDS or done + 1 == goal:
                self._recorder.count(replayed=done + 1 - counted)  # no source seconds: those are of the batches that come
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
        """Compare with the source that was read when the state was saved. False: nothing more is wanted."""
        start, sample = self._start, self._digest()
        if start.sample is None or not start.batches:
            return True
        if sample != start.sample:
            raise StateError(
                f"batch {start.batches - 1} of epoch {start.epoch}, the last that was handed out before the state was saved, is another "
                f"one now: the source is no longer the same, or draws random numbers that are not seeded; "
                f"state.unchecked() goes on without this comparison"
            )
        if self._batch_size is not None and start.last_rows < self._batch_size:  # a remainder, so the epoch ended there
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

    def pull(self, row: int, size: int) -> Any | EndType:
        """The next item, or END.

        Args:
            row: its place in the batch.
            size: items of a whole batch.
        """
        assert self._items is not None
        if self._ended:
            return END
        self.is_inside = True
        try:
            item = self._items.pull()
        finally:
            self.is_inside = False
        if item is not END and self._snapshot is None:
            self._look_at(item, row, size)
        return item

    def _look_at(self, item: Any, row: int, size: int) -> None:
        """Add an item to the hash of its batch: now, as the source may overwrite it."""
        if is_sampled(row, size):
            if self._hash is None:
                self._hash = hashlib.blake2b(digest_size=16)
            add_item(self._hash, item)

    def _digest(self) -> bytes | None:
        digest, self._hash = self._hash, None
        return None if digest is None else digest.digest()

    def mark(self, items: int, *, is_whole: bool) -> SourceMark:
        """What leads back to the place right after a batch. Called when its last item was pulled.

        Args:
            items: that were pulled for it.
            is_whole: False where the source was asked for more than this batch, so that its state is further on.

        Raises:
            StateError: the source's state cannot be kept.
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
