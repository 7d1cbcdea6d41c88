"""Where a batch stands in the data, and where a run begins: one value for a place."""

from __future__ import annotations

import threading
from typing import Literal, TypeAlias

import msgspec

from prefetchshard.base.waiters import Waiters

Way: TypeAlias = Literal["index", "snapshot", "replay"]


class StartPoint(msgspec.Struct, frozen=True, kw_only=True):
    """A place between two batches, from which a run can begin.

    Attributes:
        run: number of the run, from 0.
        run_epoch: the epoch with which that run began.
        epoch: the epoch of the next batch; after the last batch of an epoch still that epoch.
        rows: global rows of this epoch that were handed out.
        batches: batches of this epoch that were handed out.
        step: batches that were handed out over all epochs and runs.
        last_rows: rows of the last batch that was handed out.
        batch_rows: rows of the first batch of the run, where the source or `collate` makes the batches; a batch with fewer is short.
        resumes_by: "index": rows are found by number; "snapshot": the source restores its own state; "replay": items are read again.
        snapshot: the source's own state, encoded.
        since_snapshot: items (examples, or batches without `batch_size`) to pull after the snapshot.
        sample: a hash over items of the last batch; a replay compares it to notice a source that has changed.
    """

    run: int = 0
    run_epoch: int = 0
    epoch: int = 0
    rows: int = 0
    batches: int = 0
    step: int = 0
    last_rows: int = 0
    batch_rows: int | None = None
    resumes_by: Way = "index"
    snapshot: bytes | None = None
    since_snapshot: int = 0
    sample: bytes | None = None


class EpochEnd:
    """Whether a batch is the last of its epoch. Known at once where the length is; else once the source was asked for the next item.

    Args:
        known: the answer, where it is known.
        home_thread: the thread whose event loop pulls the source; it must not wait for the answer.
    """

    __slots__ = ("__weakref__", "_home_thread", "_known", "_waiters")

    def __init__(self, known: bool | None = None, home_thread: int | None = None) -> None:
        self._known = known
        self._home_thread = home_thread
        self._waiters = Waiters() if known is None else None

    def settle(self, ends: bool) -> None:
        """Give the answer; the first one stands."""
        if self._known is None:
            self._known = ends
            assert self._waiters is not None
            self._waiters.wake()

    @property
    def is_known(self) -> bool:
        return self._known is not None

    def wait(self) -> bool:
        """Wait until it is known.

        Raises:
            RuntimeError: this thread must not wait.
        """
        if self._known is None and self._home_thread == threading.get_ident():
            raise RuntimeError(
                "whether this batch ends its epoch is not known before the source was asked for the next item, and the source is pulled in "
                "the event loop of this thread, which would be blocked: look at `end_is_known` first, or ask in "
                "another thread"
            )
        if self._waiters is not None:
            self._waiters.wait(lambda: self._known is not None)
        return bool(self._known)


class Position:
    """Where a batch stands in the data.

    Example:
        batches = iter(ps.Loader(np.zeros((64, 3), np.float32), P("data"), batch_size=16))
        list(batches)
        assert (batches.position.step, batches.position.rows) == (3, 64)
        assert batches.position.ends_epoch

    Attributes:
        after: the place right after the batch, from which a run can go on.
        first_row: rows of the epoch before this batch.
    """

    __slots__ = ("_end", "after", "first_row")

    def __init__(self, after: StartPoint, first_row: int, end: EpochEnd) -> None:
        self.after = after
        self.first_row = first_row
        self._end = end

    @property
    def run(self) -> int:
        """Number of the run, from 0."""
        return self.after.run

    @property
    def epoch(self) -> int:
        """The epoch of the batch, from 0, counted over all runs."""
        return self.after.epoch

    @property
    def step(self) -> int:
        """Batches before this one, over all epochs and runs."""
        return self.after.step - 1

    @property
    def rows(self) -> int:
        """Rows of the epoch up to and including this batch."""
        return self.after.rows

    @property
    def batches(self) -> int:
        """Batches of the epoch up to and including this one."""
        return self.after.batches

    @property
    def ends_epoch(self) -> bool:
        """Whether this is the last batch of its epoch.

        Over a source of unknown length this waits until the source was asked for the item after it; `end_is_known` says whether it
        has to wait.
        """
        return self._end.wait()

    @property
    def end_is_known(self) -> bool:
        """Whether `ends_epoch` answers at once."""
        return self._end.is_known

    def __repr__(self) -> str:
        return f"Position(run={self.run}, epoch={self.epoch}, step={self.step}, rows={self.rows}, batches={self.batches})"
