"""What the readers hand to the transfer: batches on the host, the end of an epoch, and why reading failed."""

from __future__ import annotations

from typing import Any

import numpy as np

from prefetchshard.base.memory import AnyArray, Memory
from prefetchshard.base.position import EpochEnd, Position
from prefetchshard.measuring.timeline import BatchTimes
from prefetchshard.planning.plan import MASK, HostPlan, Plan
from prefetchshard.staging.layout import Staging


class SourceMark:
    """What leads back to the place in the source right after a batch.

    Attributes:
        snapshot: the source's own state after this batch or one before it, encoded; None where it has none.
        since_snapshot: items that were pulled after the snapshot, up to the end of the batch.
        sample: a hash over items of the batch, where only reading again leads back here.
    """

    __slots__ = ("sample", "since_snapshot", "snapshot")

    def __init__(self, snapshot: bytes | None, since_snapshot: int, sample: bytes | None) -> None:
        self.snapshot = snapshot
        self.since_snapshot = since_snapshot
        self.sample = sample


class HostBatch:
    """A batch on the host, on its way to the transfer.

    The readers fill in what they know; the sequencer adds `plan`, `position` and `mask`.

    Args:
        epoch: of the batch.
        end: tells whether it ends its epoch, at once or later.
        row: the first row of the batch in its epoch; without `batch_size`, its number.

    Attributes:
        times: when each thing happened to it.
        host_plan: how it lies on the host.
        rows: that count for it, padding not among them; 0 where its leaves have none in common.
        memory: of the leaves that are staged; None where there are none.
        passed: leaves that are not staged, by index: jax.Arrays, lists of keys, and what stays on the host.
        examples: that it was made of; None where the source makes the batches.
        is_last: whether the source has no item after it in this epoch; None where that is not known.
        mark: what leads back to the place after it; None where rows are found by number.
        fault: why it does not fit the devices; raised unless it is left out.
        fault_stage: in which stage that was seen.
        plan: how it is placed and put together again.
        position: where it stands in the data.
        mask: `(rows,)` of bool, False where a row is padding; None where the plan has no mask on the devices.
    """

    __slots__ = (
        "end", "epoch", "examples", "fault", "fault_stage", "host_plan", "is_last", "mark", "mask", "memory", "passed", "plan", "position", "rows", "times",
    )  # fmt: skip
    host_plan: HostPlan
    rows: int
    plan: Plan
    position: Position

    def __init__(self, epoch: int, end: EpochEnd, row: int = 0) -> None:
        self.epoch = epoch
        self.times = BatchTimes(epoch, row)
        self.end = end
        self.examples: int | None = None
        self.is_last: bool | None = None
        self.mark: SourceMark | None = None
        self.fault: Exception | None = None
        self.fault_stage = "reading"
        self.memory: Memory | None = None
        self.passed: dict[int, Any] = {}
        self.mask: AnyArray | None = None

    def complete(self, plan: Plan, valid: int | None, staging: Staging) -> int:
        """Give it the rows of its plan, filled up where it has fewer, and the row mask. Returns the number of padding rows.

        Args:
            plan: how it is placed.
            valid: rows that it has; None where it has none in common.
            staging: for the memory of a batch that must grow or shrink.
        """
        if plan.rows is None or valid is None:
            return 0
        missing = plan.rows - valid
        if plan.layout is not self.host_plan.layout:
            self._move(plan, staging)
        if missing and self.memory is not None:
            for view, i in zip(self.memory.views, plan.staged, strict=True):
                padding = plan.leaves[i].padding
                if plan.leaves[i].has_rows and padding is not None:
                    view[valid:] = padding
        if plan.pad is not None:
            mask = np.ones(plan.rows, bool)
            mask[valid:] = False
            if plan.masks_on_host:
                self.passed[MASK] = mask
            else:
                self.mask = mask
        return missing

    def _move(self, plan: Plan, staging: Staging) -> None:
        """Into memory for the rows of the plan: one more copy, for a batch that is short."""
        old = self.memory
        if old is None:
            return
        self.memory = staging.lease(plan.layout)
        for view, from_view in zip(self.memory.views, old.views, strict=True):
            if view.shape == from_view.shape:
                np.copyto(view, from_view)
            else:
                rows = min(len(view), len(from_view))
                np.copyto(view[:rows], from_view[:rows])
        self.memory.lock()
        old.release()

    def drop_memory(self) -> None:
        """Give the memory back unused."""
        memory, self.memory = self.memory, None
        if memory is not None:
            memory.release()


class EpochMark:
    """The end of an epoch, in the order of the batches.

    Attributes:
        epoch: that ended.
        left: examples read after the last whole batch, which make no batch; the remainder policy decides what becomes of them.
        paths: of the leaves of these examples, for an error; empty where not known.
    """

    __slots__ = ("epoch", "left", "paths")

    def __init__(self, epoch: int, left: int = 0, paths: tuple[str, ...] = ()) -> None:
        self.epoch = epoch
        self.left = left
        self.paths = paths


class ReadFailure(Exception):
    """Carries the fault of a reader through the queue, to where it is known which batch it belongs to. Never reaches a user.

    Attributes:
        error: what was raised.
        stage: in which stage.
        epoch: of the batch.
        rows: positions `[first, last)` in the epoch, where they are known.
        of_batch: whether it belongs to a batch, rather than to the epoch.
    """

    def __init__(self, error: BaseException, stage: str, epoch: int, *, rows: tuple[int, int] | None = None, of_batch: bool = True) -> None:
        super().__init__(stage)
        self.error = error
        self.stage = stage
        self.epoch = epoch
        self.rows = rows
        self.of_batch = of_batch
