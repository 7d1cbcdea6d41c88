"""Copies batches that the source makes: in the source's thread, in a worker while the source goes on, or in shares by several."""

from __future__ import annotations

import math
import queue
from functools import partial
from typing import Any

from prefetchshard.base.cpus import cpu_count
from prefetchshard.base.waiters import Waiters
from prefetchshard.leaves.copying import are_unshared
from prefetchshard.measuring.recorder import Span
from prefetchshard.reading.open_batch import OpenBatch
from prefetchshard.reading.reading_plan import Part, ReadingPlan
from prefetchshard.reading.worker import Worker
from prefetchshard.reading.writing import Writer
from prefetchshard.sharding.batch_tree import BatchTree

COPY_BYTES_PER_SECOND = 4e9
"""Of one thread, a low guess: 5 to 10 GB/s were measured."""

SHARE_BYTES = 4 << 20
"""A large batch is copied in shares of at least this size: waking a thread costs as much as copying some hundred kilobytes."""

HAND_OVER_SECONDS = 0.001
"""A source that takes longer than this for a batch is asked for the next one before a worker has copied it, where that can be."""


class BatchCopying:
    """Decides for each batch who copies it.

    Args:
        plan: of the reading.
        writer: writes into the memory of batches.
        worker: does parts in the source's own thread.
        jobs: what its other threads do.

    Attributes:
        helpers: threads that copy beside the source's own; copying is all that they do.

    Thread safety: called by the source's thread.
    """

    def __init__(self, plan: ReadingPlan, writer: Writer, worker: Worker, jobs: queue.SimpleQueue[Part | None]) -> None:
        self._plan = plan
        self._writer = writer
        self._worker = worker
        self._jobs = jobs
        self._copied = Waiters()
        worker.part_done = self._tell
        self.helpers = min(plan.workers, cpu_count()) - 1

    def copy(self, batch: OpenBatch, leaves: list[Any], tree: BatchTree, span: Span, took: float) -> None:
        """Copy a batch in this thread, by a worker while the source goes on, or, where it is large, in shares by several.

        Args:
            batch: to be filled.
            leaves: of the batch that the source made.
            tree: of these leaves.
            span: in which they are copied.
            took: seconds, the source for this batch.
        """
        plan, writer = self._plan, self._writer
        # The first batch is looked at in this thread
        goes_on = not plan.reuses_buffers or (self.helpers > 0 and writer.has_plan and are_unshared(leaves))
        is_slow = goes_on and self.helpers > 0 and took > HAND_OVER_SECONDS
        if is_slow and writer.plain_bytes(leaves, tree) < SHARE_BYTES:  # making its memory is work for the worker too
            span.end()
            batch.expect(1)
            self._jobs.put(Part(batch, 0, 1, work=partial(writer.write_whole, batch, leaves, tree)))
            return
        kept = writer.open_whole(batch, leaves, tree)
        nbytes = 0 if batch.plan is None else batch.plan.layout.nbytes
        shares = self._choose_shares(batch, nbytes, goes_on, took)
        if is_slow and nbytes:
            shares = max(1, shares)
        if not (shares > 1 or (shares and goes_on)):
            writer.copy_share(batch, kept)
            span.end()
            batch.send()
            return
        span.end()
        parts = [Part(batch, 0, 1, work=partial(writer.copy_share, batch, kept, i, shares)) for i in range(shares)]
        batch.expect(shares)
        for part in parts if goes_on else parts[1:]:
            self._jobs.put(part)
        if not goes_on:
            self._worker.do(parts[0])
            self._wait_until_read(batch)

    def _tell(self, is_last: bool) -> None:
        if is_last:  # to be woken for nothing takes the interpreter's lock from those who copy
            self._copied.wake()

    def _choose_shares(self, batch: OpenBatch, nbytes: int, goes_on: bool, pull_seconds: float) -> int:
        """Into how many shares a batch is cut; 0 where it is copied here, at once.

        Where the source goes on meanwhile, just as many copy as keep up with it, and the batches that are copied at once share the
        workers: each that wakes takes the interpreter's lock from the source (one H200, batches of 38 MB that exist: 4 shares rather
        than 7 bring 4 to 6 %).
        """
        if batch.plan is None or not batch.plan.rows:
            return 0
        together = -(-self.helpers // self._plan.batches_at_once) if goes_on else self.helpers + 1
        most = min(together, nbytes // SHARE_BYTES)
        if not goes_on or most < 1:
            return most
        return max(1, min(most, math.ceil(1.5 * nbytes / COPY_BYTES_PER_SECOND / max(pull_seconds, 1e-6))))

    def _wait_until_read(self, batch: OpenBatch) -> None:
        """Wait for the other shares; the source must not be touched before, also where nothing more is wanted."""
        while not batch.is_read:
            try:
                part = self._jobs.get_nowait()  # workers that were dismissed leave parts behind
            except queue.Empty:
                self._copied.wait(lambda: batch.is_read)
                return
            if part is not None:
                self._worker.do(part)
            elif not self._plan.out.cancelled:
                self._jobs.put(None)
