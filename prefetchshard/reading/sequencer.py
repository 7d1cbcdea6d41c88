"""Sees the batches of a run in order, at the mouth of the transfer, and decides there what each of them is.

Only here is it known which batch came before: so here are decided the plan by which a batch is placed, what is short and what becomes of
it, positions and steps, and where an epoch ends. It runs in the thread that dispatches transfers; readers never wait for it.
"""

from __future__ import annotations

from collections import deque
from typing import TypeAlias

from prefetchshard.base.config import Pad, Policy
from prefetchshard.base.errors import BatchError, ConfigError
from prefetchshard.base.faults import note, of_epoch, safe_to_raise
from prefetchshard.base.position import EpochEnd, Position, StartPoint, Way
from prefetchshard.measuring.recorder import Recorder
from prefetchshard.planning.host_batch import EpochMark, HostBatch, ReadFailure
from prefetchshard.planning.plan import HostPlan
from prefetchshard.planning.planner import Planner
from prefetchshard.queues.bounded_queue import EMPTY, EmptyType, QueueStats
from prefetchshard.reading.full_rows import FullRows, too_few
from prefetchshard.reading.reading_plan import HostQueue
from prefetchshard.sharding.batch_tree import in_brackets
from prefetchshard.staging.layout import Staging

Decided: TypeAlias = deque[HostBatch]


class Sequencer:
    """The queue of host batches as the transfer sees it: each batch with its plan, its position, and its padding.

    Args:
        queue: of what the readers made.
        planner: for the plans by which batches are placed.
        staging: for the memory of a batch that must grow.
        recorder: counts rows that are dropped or padded.
        start: where the run begins.
        batch_size: rows of a batch; None where the source makes the batches.
        remainder: what becomes of a batch that is short.
        is_endless: the run has no last epoch, so that an epoch without a batch would go on for ever.

    Thread safety: one thread takes; `cancel`, `clear` and `stats` from any thread, without a lock.
    """

    def __init__(
        self,
        queue: HostQueue,
        planner: Planner,
        staging: Staging,
        recorder: Recorder,
        start: StartPoint,
        *,
        batch_size: int | None,
        remainder: Policy,
        is_endless: bool,
    ) -> None:
        self._queue = queue
        self._planner = planner
        self._staging = staging
        self._recorder = recorder
        self._batch_size = batch_size
        self._remainder = remainder
        self._pads = isinstance(remainder, Pad)
        self._compares = self._pads or (batch_size is None and remainder != "keep")  # by the first batch it tells what is short
        self._holds = self._compares and batch_size is None
        self._is_endless = is_endless
        self._at = start
        self._full = FullRows(start.batch_rows)
        self._decided: Decided = deque()
        self._held: HostBatch | None = None  # short; whether it is the last of its epoch is not known yet
        self._open: EpochEnd | None = None  # of the last batch, where it is not known whether it ends its epoch
        self._given_up = False

    # -- as a queue

    def wait_ready(self, timeout_seconds: float | None = None) -> bool:
        """Wait until a batch can be taken. False: none will come (see `is_over`), or the time ran out."""
        while not self.has_ready():
            if self._queue.wait_ready(timeout_seconds):
                continue
            if self._queue.is_over():
                return self._release_held()
            if timeout_seconds is not None:
                return False
        return True

    def has_ready(self) -> bool:
        """Whether a batch can be taken at once.

        Raises:
            PlacementError: a batch does not fit its sharding.
            BatchError: a batch is short, under remainder="error"; or it cannot be told what its rows are.
        """
        while not self._decided:
            item = self._queue.take_nowait()
            if item is EMPTY:
                return False
            if isinstance(item, EpochMark):
                self._end_epoch(item)
                self._queue.release()
            else:
                self._take(item)
        return True

    def take_nowait(self) -> HostBatch | EmptyType:
        """The next batch, or EMPTY."""
        return self._decided.popleft() if self._decided else EMPTY

    def release(self) -> None:
        """The transfer of a batch is done: its place in the queue is free."""
        self._queue.release()

    def is_over(self) -> bool:
        """Whether nothing will come any more."""
        return not self._decided and self._held is None and self._queue.is_over()

    @property
    def failure(self) -> BaseException | None:
        """Why it is over, as the consumer gets it; None where the data ended."""
        failure = self._queue.failure
        if not isinstance(failure, ReadFailure):
            return failure
        self._give_up()
        if not failure.of_batch:
            return of_epoch(failure.error, failure.stage, failure.epoch)
        at = self._begin(failure.epoch)
        rows = failure.rows or (at.rows, at.rows + (self._batch_size or 0))
        return note(safe_to_raise(failure.error, failure.stage), failure.stage, _place_of_next(at, rows))

    def cancel(self) -> None:
        """Nothing more is wanted. Never blocks, takes no lock."""
        self._queue.cancel()
        self._give_up()

    def clear(self) -> None:
        """Drop what is left. Takes no lock."""
        self._queue.clear()
        self._decided.clear()
        self._held = None

    def is_read(self) -> bool:
        """Whether the next batch is complete on the host. From any thread: takes nothing."""
        return bool(self._decided) or self._queue.has_ready()

    def stats(self) -> QueueStats:
        return self._queue.stats()

    # -- what a batch is

    def _take(self, batch: HostBatch) -> None:
        if self._held is not None:
            self._release_held()
        if self._compares and batch.host_plan.is_made:
            self._tell_rows(batch)
        if not self._holds or not self._is_short(batch):
            self._decide(batch)
        elif batch.is_last:
            self._end_short(batch)
        elif batch.is_last is None:
            self._held = batch
        else:
            self._decide(batch)

    def _tell_rows(self, batch: HostBatch) -> None:
        plan = batch.host_plan
        try:
            told = self._full.told(plan, "pad" if isinstance(self._remainder, Pad) else self._remainder)
        except BatchError as error:
            raise note(error, "batching", self._position(self._begin(batch.epoch), batch))  # noqa: B904 - it is that error
        if told is not plan:
            batch.host_plan = told
            if batch.examples is None:  # else positions count examples, whatever `collate` made of them
                batch.rows = told.rows or 0

    def _is_short(self, batch: HostBatch) -> bool:
        """Whether a batch that the source made has fewer rows than the first one."""
        rows, full = batch.host_plan.rows, self._full.rows
        return rows is not None and full is not None and rows < full

    def _end_short(self, batch: HostBatch) -> None:
        """A short batch is the last one of its epoch."""
        if self._pads:
            self._decide(batch, fills=True)
        else:
            self._leave_out(batch)

    def _release_held(self) -> bool:
        """A short batch was held, and it is not the last of its epoch: it comes as it is. Whether there was one."""
        held, self._held = self._held, None
        if held is not None and not self._queue.cancelled:
            self._decide(held)
        return bool(self._decided)

    def _decide(self, batch: HostBatch, *, fills: bool = False) -> None:
        """Give the batch its plan and its position; `fills`: with the rows of the first one."""
        at = self._at if self._at.epoch == batch.epoch else self._begin(batch.epoch)
        host_plan = batch.host_plan
        if batch.fault is not None:
            raise note(batch.fault, batch.fault_stage, self._position(at, batch))
        try:
            rows = self._placed_rows(batch, host_plan, fills=fills)
            batch.plan = plan = host_plan.placed.get(rows) or self._planner.placed(host_plan, rows)
            if not self._full.is_seen:
                self._full.see(plan.rows, host_plan)
            valid = host_plan.rows if host_plan.is_made else batch.examples
            if valid != plan.rows or plan.rows != host_plan.rows or plan.pad is not None:
                self._recorder.count(padded=batch.complete(plan, valid, self._staging))
        except BaseException as error:  # noqa: BLE001 - raised again
            raise note(error, "planning", self._position(at, batch))  # noqa: B904 - it is that error
        if self._open is not None:
            self._open.settle(at.batches == 0)  # the first of its epoch: the one before ended the last epoch
        self._open = None if batch.end.is_known else batch.end
        if self._given_up:
            batch.end.settle(False)
        batch.position = position = self._position(at, batch)
        self._at = position.after
        self._decided.append(batch)

    def _placed_rows(self, batch: HostBatch, plan: HostPlan, *, fills: bool) -> int | None:
        """The rows with which a batch is placed."""
        if not plan.is_made:
            return batch.examples if self._remainder == "keep" else plan.rows
        if not self._pads or plan.rows is None:
            return plan.rows
        if fills or (self._batch_size is not None and self._is_short(batch)):
            return self._full.rows
        if self._batch_size is not None and batch.examples == plan.rows < self._batch_size:
            return self._batch_size
        return self._planner.whole_rows(plan, plan.rows)

    def _begin(self, epoch: int) -> StartPoint:
        """Where the run stands before the next batch, which is of this epoch."""
        at = self._at
        if epoch != at.epoch:
            self._at = at = StartPoint(
                run=at.run, run_epoch=at.run_epoch, epoch=epoch, step=at.step, batch_rows=at.batch_rows, resumes_by=at.resumes_by
            )
        return at

    def _position(self, at: StartPoint, batch: HostBatch) -> Position:
        mark = batch.mark
        way: Way = "index" if at.resumes_by == "index" else "replay" if mark is None or mark.snapshot is None else "snapshot"
        after = StartPoint(
            run=at.run,
            run_epoch=at.run_epoch,
            epoch=batch.epoch,
            rows=at.rows + batch.rows,
            batches=at.batches + 1,
            step=at.step + 1,
            last_rows=batch.rows,
            batch_rows=self._full.rows if batch.host_plan.is_made and self._compares else None,
            resumes_by=way,
            snapshot=None if mark is None else mark.snapshot,
            since_snapshot=0 if mark is None else mark.since_snapshot,
            sample=None if mark is None else mark.sample,
        )
        return Position(after, at.rows, batch.end)

    # -- the end of an epoch

    def _end_epoch(self, mark: EpochMark) -> None:
        held, self._held = self._held, None
        if held is not None:
            self._end_short(held)
        at = self._begin(mark.epoch)
        if mark.left:
            self._drop_examples(mark, at)
        self._settle(True)
        if self._is_endless and at.batches == 0:
            empty = ConfigError(f"epoch {mark.epoch} gave no batch, and epochs=None would go on so for ever: the source is empty")
            raise of_epoch(empty, "reading the source", mark.epoch)

    def _drop_examples(self, mark: EpochMark, at: StartPoint) -> None:
        """What becomes of examples that make no whole batch.

        Raises:
            BatchError: under remainder="error", or where the epoch gave nothing else.
        """
        size, left = self._batch_size, mark.left
        error: BatchError | None = None
        if self._remainder == "error":
            error = BatchError(
                f"the epoch has {at.rows + left} rows: the last batch{in_brackets(mark.paths)} has {left} of batch_size={size}, and "
                f"remainder='error'; drop it (remainder='drop') or fill it up under a mask (remainder='pad')"
            )
        elif at.batches == 0:
            error = BatchError(f"epoch {mark.epoch} gave no batch: {too_few(left, size or 0)}")
        if error is not None:
            raise note(error, "batching", _place_of_next(at, (at.rows, at.rows + left)))
        self._recorder.count(dropped=left)

    def _leave_out(self, batch: HostBatch) -> None:
        """What becomes of a last batch that is shorter than the first one, and is not padded.

        Raises:
            BatchError: under remainder="error", or where the epoch gave nothing else.
        """
        at = self._begin(batch.epoch)
        rows = batch.host_plan.rows or 0
        full = self._full.rows or 0
        paths = in_brackets([leaf.path for leaf in batch.host_plan.leaves if leaf.has_rows])
        error: BatchError | None = None
        if self._remainder == "error":
            error = BatchError(
                f"the last batch is {full - rows} rows shorter than the first one{paths}, and remainder='error'; drop it "
                f"(remainder='drop') or fill it up under a mask (remainder='pad')"
            )
        elif at.batches == 0:
            error = BatchError(
                f"epoch {batch.epoch} gave no batch: its only one has {rows} rows{paths}, the first of the run had {full}, and "
                f"remainder='drop'; let it come as it is (remainder='keep'), or fill it up under a mask (remainder='pad')"
            )
        if error is not None:
            raise note(error, "batching", self._position(at, batch))
        self._recorder.count(dropped=rows)
        batch.drop_memory()
        self._queue.release()
        self._settle(True)

    def _give_up(self) -> None:
        """Nobody will hear more about whether the last batch ends its epoch."""
        self._given_up = True
        self._settle(False)

    def _settle(self, ends: bool) -> None:
        last = self._open
        if last is not None:
            last.settle(ends)


def _place_of_next(at: StartPoint, rows: tuple[int, int]) -> Position:
    """Where a batch would stand that was not made: rows `[first, last)` of the epoch."""
    after = StartPoint(run=at.run, epoch=at.epoch, step=at.step + 1, batches=at.batches + 1, rows=rows[1])
    return Position(after, rows[0], EpochEnd(False))
