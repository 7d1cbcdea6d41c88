"""What the batches that were handed out have taken, and what each `next()` waited for.

A wait is laid over the way of the batch that ended it: while that batch was being read, the wait was for reading (or for a transform, or
for copying, by what its readers spent); while it was transferred, for the transfer; between these, and from then on, for the hand-over from
thread to thread. So a stage that is busy all the time and never waited for has no part in a wait.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from prefetchshard.base.memory import AnyArray
from prefetchshard.measuring.distribution import Durations
from prefetchshard.measuring.timeline import BatchTimes

CAUSES = ("reading", "transform", "copying", "transferring", "handing over")
"""What a wait can be for."""


class Steps(msgspec.Struct, frozen=True):
    """Some steps of the loop, each from one batch handed out to the next one, and what their waits were for. Seconds, summed.

    Attributes:
        count: how many.
        busy: the consumer between its calls of `next()`.
        stalled: inside `next()`; the sum of what follows.
        reading: of that, while the batch was in the source's code.
        transform: in `transform` or `collate`.
        copying: being copied into staging memory.
        transferring: in its transfer.
        handing_over: what waking threads takes: read, and its transfer not begun yet; ready, and not handed out yet.
        ahead: that batches were ready before they were asked for.
        late: of `stalled`, the waits right after a batch that was ready before it was asked for.
    """

    count: int = 0
    busy: float = 0.0
    stalled: float = 0.0
    reading: float = 0.0
    transform: float = 0.0
    copying: float = 0.0
    transferring: float = 0.0
    handing_over: float = 0.0
    ahead: float = 0.0
    late: float = 0.0

    @property
    def wall(self) -> float:
        return self.busy + self.stalled

    def __add__(self, other: Steps) -> Steps:
        return Steps(*(a + b for a, b in zip(msgspec.structs.astuple(self), msgspec.structs.astuple(other), strict=True)))

    def __sub__(self, earlier: Steps) -> Steps:
        return Steps(*(a - b for a, b in zip(msgspec.structs.astuple(self), msgspec.structs.astuple(earlier), strict=True)))


class Delivered:
    """Sums over the batches that were handed out, in the order in which they were.

    Attributes:
        start_up_seconds: the wait for the first batch.
        warm_up: the steps until the loop has used up what was read during the first step, which compiles, and during start-up.
        steady: the steps after these.
        next: how long `next()` took, but for the first batch.
        step: how long the consumer took from one batch to its next call, but for the first step.
        longest_wait: the stage for which the longest of these waited; empty where none has waited.
        reading: what that took for each batch; so too the others.
        transfer_seconds: in which a transfer was on its way.
        dispatch_seconds: in the calls that begin transfers.
        ready_seconds: that batches waited, ready, for the consumer, summed.
        host_seconds: that batches waited, read, for their transfer, summed.

    Thread safety: one thread at a time.
    """

    def __init__(self) -> None:
        self.start_up_seconds = 0.0
        self.warm_up = Steps()
        self.steady = Steps()
        self.next = Durations()
        self.step = Durations()
        self.longest_wait = ""
        self.reading, self.transform, self.copying, self.transferring = (Durations() for _ in range(4))
        self.transfer_seconds = 0.0
        self.dispatch_seconds = 0.0
        self.ready_seconds = 0.0
        self.host_seconds = 0.0
        self.batches = 0
        self._is_steady = False
        self._last_taken = 0.0
        self._last_ready = -np.inf
        self._was_ahead = False

    def add(self, batches: Sequence[BatchTimes], warm_up: int) -> None:
        """Add batches; `warm_up`: how many may have been read ahead before the loop began."""
        ends = np.array([(b.asked_at, b.taken_at, b.dispatch_at, b.dispatched_at, b.ready_at, b.read_at) for b in batches])
        asked, taken, dispatch, dispatched, ready, read = ends.T
        work = np.array([b.seconds() for b in batches])
        steps = [b.step for b in batches]
        stalled = taken - asked
        before = np.empty_like(taken)
        before[0], before[1:] = self._last_taken, taken[:-1]
        ready_before = np.maximum.accumulate(np.concatenate([[self._last_ready], ready[:-1]]))
        transfer = np.maximum(0.0, ready - np.maximum(dispatch, ready_before))
        self.transfer_seconds += float(transfer.sum())
        self.dispatch_seconds += float((dispatched - dispatch).sum())
        self.ready_seconds += float((taken - ready).sum())
        self.host_seconds += float(np.maximum(0.0, dispatch - read).sum())
        for durations, seconds in zip((self.reading, self.transform, self.copying), work.T, strict=True):
            durations.add(seconds, steps)
        self.transferring.add(transfer, steps)
        first = 0 if self.batches else 1
        causes = _causes(asked, taken, read, dispatch, ready, work)
        longest = self.next.largest
        self.next.add(stalled[first:], steps[first:])
        if self.next.largest > longest:
            self.longest_wait = CAUSES[int(np.argmax([cause[first:][stalled[first:].argmax()] for cause in causes]))]
        if first:
            self.start_up_seconds = float(stalled[0])
        is_ahead = ready < asked
        late = np.where(np.concatenate([[self._was_ahead], is_ahead[:-1]]) & (ready > asked), stalled, 0.0)
        columns = np.stack([np.ones_like(asked), asked - before, stalled, *causes, np.maximum(0.0, asked - ready), late])
        if self.batches < 2:
            columns[1, : max(0, 2 - self.batches)] = 0.0  # nothing came before the first batch, and the first step compiles
        self.step.add(columns[1, max(0, 2 - self.batches) :], steps[max(0, 2 - self.batches) :])
        steady_from = self._find_steady(ready > asked, warm_up)
        if steady_from > first:
            self.warm_up += Steps(*columns[:, first:steady_from].sum(axis=1).tolist())
        if steady_from < len(batches):
            self.steady += Steps(*columns[:, max(first, steady_from) :].sum(axis=1).tolist())
        self.batches += len(batches)
        self._last_taken, self._last_ready = float(taken[-1]), float(max(ready_before[-1], ready[-1]))
        self._was_ahead = bool(is_ahead[-1])

    def _find_steady(self, waited: AnyArray, warm_up: int) -> int:
        """The first of these batches whose step is a steady one: after the first wait, or after as many as could be read ahead."""
        if self._is_steady:
            return 0
        for i, has_waited in enumerate(waited.tolist()):
            if self.batches + i >= 1 and (has_waited or self.batches + i >= warm_up):
                self._is_steady = True
                return i + 1
        return len(waited)


def _causes(asked: AnyArray, taken: AnyArray, read: AnyArray, dispatch: AnyArray, ready: AnyArray, work: AnyArray) -> list[AnyArray]:
    """Of each wait the seconds for reading, transform, copying, the transfer and the hand-over."""
    in_readers = np.clip(np.minimum(taken, np.minimum(read, dispatch)) - asked, 0.0, None)
    until_ready = np.clip(np.minimum(taken, ready) - asked, 0.0, None)
    # The batches before it were handed out, so nothing but the thread that dispatches can be late
    waking = np.clip(np.minimum(taken, dispatch) - np.maximum(asked, read), 0.0, None)
    total = work.sum(axis=1)
    shares = np.divide(work, total[:, None], out=np.zeros_like(work), where=total[:, None] > 0)
    shares[total <= 0, 0] = 1.0  # nothing was measured: it was the source that had not begun
    return [*(in_readers * share for share in shares.T), until_ready - in_readers - waking, taken - asked - until_ready + waking]
