"""A batch while it is read: opened with its first example, filled in parts by several workers, sent by the last of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from prefetchshard.base.memory import AnyArray
from prefetchshard.base.position import EpochEnd
from prefetchshard.leaves.on_host import blank
from prefetchshard.planning.host_batch import HostBatch, ReadFailure
from prefetchshard.planning.plan import HostPlan, Kind
from prefetchshard.reading.reading_plan import HostTicket
from prefetchshard.staging.layout import Memory, Staging


class OpenBatch:
    """One batch on its way from the source into the staging memory.

    Args:
        ticket: its place in the order.
        epoch: of the batch.
        first_row: rows of the epoch before it; without `batch_size`, batches.
        end: tells whether it ends its epoch, at once or later.

    Attributes:
        ticket: its place in the order.
        host: what the transfer gets.
        first_row: as above.
        collected: what `collate` gets; None where examples are written as they come.
        plan: how it lies on the host; None before it is opened.
        may_be_left_out: it may turn out to be a short last batch, which need not fit the devices.
        is_settled: it was sent, failed or dropped.
    """

    __slots__ = (
        "_closed", "_lock", "_parts", "collected", "first_row", "host", "is_settled", "may_be_left_out", "plan", "ticket",
    )  # fmt: skip

    def __init__(self, ticket: HostTicket, epoch: int, first_row: int, end: EpochEnd) -> None:
        self.ticket = ticket
        self.host = HostBatch(epoch, end, first_row)
        self.first_row = first_row
        self.collected: list[Any] | None = None
        self.plan: HostPlan | None = None
        self.may_be_left_out = False
        self.is_settled = False
        self._lock = threading.Lock()  # guards opening, settling, and the count of parts
        self._parts = 0
        self._closed = False

    def open(self, make_plan: Callable[[], HostPlan], staging: Staging, arrays: Sequence[AnyArray] | None = None) -> HostPlan:
        """The plan of the batch; the first caller decides it and takes the memory.

        Args:
            make_plan: called once.
            staging: for the memory.
            arrays: whose rows the batch is made of, where it is.
        """
        if self.plan is None:
            with self._lock:
                if self.plan is None:
                    plan = make_plan()
                    if self.host.examples is not None:
                        for i, leaf in enumerate(plan.leaves):
                            if leaf.kind in (Kind.HOST, Kind.KEYS):
                                self.host.passed[i] = [None] * (plan.rows or 0) if arrays is None else blank(arrays[i], leaf.shape)
                    self.host.memory = _leased(staging, plan) if plan.staged else None
                    self.plan = plan
        return self.plan

    # -- its parts

    def expect(self, parts: int) -> None:
        """Just so many parts come. Called before the first one is given out."""
        self._parts = parts
        self._closed = True

    def add_part(self) -> None:
        """Expect one more part."""
        with self._lock:
            self._parts += 1

    def close_parts(self) -> bool:
        """No further part comes. Whether all are done already."""
        with self._lock:
            self._closed = True
            return self._parts == 0

    def part_done(self) -> bool:
        """One part is done. Whether it was the last."""
        with self._lock:
            self._parts -= 1
            return self._closed and self._parts == 0

    @property
    def is_read(self) -> bool:
        """Whether all of its parts are done."""
        return self._closed and self._parts == 0

    # -- what becomes of it

    def _settle(self) -> bool:
        with self._lock:
            was_settled, self.is_settled = self.is_settled, True
        return not was_settled

    def send(self) -> None:
        """The batch is complete."""
        if not self._settle():
            return
        host, plan = self.host, self.plan
        assert plan is not None
        host.host_plan = plan
        host.rows = (plan.rows or 0) if host.examples is None else host.examples
        if host.memory is not None:
            host.memory.lock()
        self.ticket.send(host)

    def fail(self, error: BaseException, stage: str, rows: tuple[int, int] | None = None) -> None:
        """The batch cannot be made: the queue ends here. What is settled stays as it is."""
        if self._settle():
            self.ticket.fail(ReadFailure(error, stage, self.host.epoch, rows=rows))

    def discard(self) -> bool:
        """The batch is not wanted. Its memory goes back with its last part. False: it had failed before, so its ticket is used."""
        had_not_failed = self._settle()
        if self.close_parts():
            self.host.drop_memory()
        return had_not_failed


def _leased(staging: Staging, plan: HostPlan) -> Memory:
    try:
        return staging.lease(plan.layout)
    except MemoryError as error:
        error.add_note(f"a batch takes {plan.layout.nbytes:,} bytes of host memory: choose a smaller batch_size")
        raise
