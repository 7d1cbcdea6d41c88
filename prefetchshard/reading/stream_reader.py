"""Reads a source that is pulled: one thread is inside it; transforms and collating run in workers beside it."""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from prefetchshard.base.errors import BatchError
from prefetchshard.base.faults import of_epoch
from prefetchshard.base.waiters import Waiters
from prefetchshard.leaves.copying import are_unshared, private_copy
from prefetchshard.reading.filling import CopyJob, FlatBatch, OpenBatch, WholeBatches
from prefetchshard.reading.reading_plan import BatchNumbering, ReadingPlan, cpu_count
from prefetchshard.resuming.replay import Replay
from prefetchshard.sharding.batch_tree import in_brackets
from prefetchshard.sources.asynchronous import AsyncStream, OwnLoop
from prefetchshard.sources.iterables import END, EndType, OpenSource, Stream

_Job = Callable[[], None]


COPY_BYTES_PER_SECOND = 4e9
"""Of one thread, a low guess: 5 to 10 GB/s were measured."""

SHARE_BYTES = 4 << 20
"""A large batch is copied in shares of at least this size: waking a thread costs as much as copying some hundred kilobytes."""

HAND_OVER_SECONDS = 0.001
"""A source that takes longer than this for a batch is asked for the next one before a worker has copied it, where that can be."""


class StreamReader:
    """Reads an iterator, an iterable, a factory or an async source.

    Args:
        task: what every reader is given.
        source: that is pulled.
        reuses_buffers: the source may overwrite an item as soon as it is asked for the next one.
        tell_epoch: called before each epoch.
        snapshot_every: batches from one look at the source's own state to the next; None: it is never asked.
    """

    def __init__(
        self, task: ReadingPlan, source: Stream, *, reuses_buffers: bool, tell_epoch: Callable[[int], None], snapshot_every: int | None = 1
    ) -> None:
        self._task = task
        self._source = source
        self._reuses_buffers = reuses_buffers
        self._tell_epoch = tell_epoch
        home = source.home if isinstance(source, AsyncStream) else None
        self._trail = Replay(task, snapshot_every)
        self._line = BatchNumbering(self._trail.start, None if home is None else home.thread)
        self._items: OpenSource | None = None
        self._closing = threading.Lock()  # guards _items' being closed once
        self.helpers: list[threading.Thread] = []
        self._loop = OwnLoop(self.helpers)
        self.close_failures: list[BaseException] = []
        self._inside = False
        self._wholes = WholeBatches(
            task.filler, task.meters, first_step=self._trail.start.step, batch_size=task.batch_size, full_rows=task.start.batch_rows
        )
        self._copied = Waiters()
        self._pull_seconds = 0.0  # of the last item
        self._copiers = min(task.workers, cpu_count()) - 1  # beside the source's own thread; copying is all that they do
        self._by_workers = task.hooks.transform is not None or task.hooks.collate is not None
        # Workers are told the end through it too: its put takes no lock that a finaliser could meet.
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()

    @property
    def bodies(self) -> Sequence[tuple[str, Callable[[], None]]]:
        workers = self._task.workers if self._by_workers else self._copiers if self._task.batch_size is None else 0
        return [("source", self._read), *((f"reader-{i}", self._work) for i in range(workers))]

    def interrupt(self) -> None:
        self._wholes.stop()
        self._line.give_up()
        items = self._items
        if items is not None:
            items.interrupt()
        self._dismiss_workers()

    def close_from_outside(self) -> None:
        items = self._items
        if items is not None and self._inside and items.closable_from_outside:
            try:
                self._close(items)
            except BaseException as error:  # noqa: BLE001 - whoever closes the run says it
                self.close_failures.append(error)

    def _dismiss_workers(self) -> None:
        for _ in range(self._task.workers):
            self._jobs.put(None)

    # -- a worker

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # while the next one is waited for it would hold what it copied

    def _part(self, assembly: OpenBatch, stage: str, work: Callable[[], None], rows: tuple[int, int] | None = None) -> _Job:
        """A job that does one part of a batch, and finishes the batch where it was the last part."""

        def job() -> None:
            try:
                if not self._task.out.cancelled:
                    work()
            except BaseException as error:  # noqa: BLE001 - a thread has no caller: the queue is the way out
                self._fail(assembly, error, stage, rows)
            if assembly.part_done():
                self._copied.wake()  # first: the source may be waiting to go on
                self._finish(assembly)

        assembly.add_part()
        return job

    def _fail(self, assembly: OpenBatch, error: BaseException, stage: str, rows: tuple[int, int] | None) -> None:
        if assembly.fail(error, stage, rows):
            self._wholes.stop()
            self._line.give_up()

    def _finish(self, assembly: OpenBatch) -> None:
        task = self._task
        if assembly.settled:  # failed, or dropped
            assembly.drop_memory()
            return
        stage = "finishing" if assembly.examples is None else "collating"
        try:
            if task.out.cancelled:
                assembly.withdraw()
                assembly.drop_memory()
                return
            if assembly.work is not None:
                work, assembly.work = assembly.work, None
                task.meters.add(padded=self._wholes.end(assembly, work))
            elif assembly.examples is not None:
                self._wholes.collate(assembly, task.hooks, pads=task.pads, gathered=False)
            elif task.batch_size is not None:
                task.meters.add(padded=task.filler.finish(assembly, assembly.rows))
            self._send(assembly)
        except BaseException as error:  # noqa: BLE001 - as above
            self._fail(assembly, error, stage, None)

    # -- the source's thread

    def _read(self) -> None:
        out = self._task.out
        failure: BaseException | None = None
        epoch = self._task.start.epoch
        try:
            for epoch in self._task.epoch_numbers():
                if not self._read_epoch(epoch):
                    break
        except BaseException as error:  # noqa: BLE001 - as above
            failure = of_epoch(error, "reading the source", epoch)
        try:
            if self._items is not None:
                self._close(self._items)
        except BaseException as error:  # noqa: BLE001 - as above
            if out.cancelled:
                self.close_failures.append(error)
            elif failure is None:
                failure = of_epoch(error, "closing the source", epoch)
        if failure is not None:
            self._line.give_up()
        out.end(failure)
        self._dismiss_workers()
        del failure  # its traceback holds this frame
        self._loop.close()

    def _read_epoch(self, epoch: int) -> bool:
        """Read one epoch. False: nothing more is wanted."""
        if self._task.out.cancelled:
            return False
        self._tell_epoch(epoch)
        rows, batches = self._line.begin_epoch(epoch)
        self._items = items = self._source.open(epoch, self._loop, self._trail.snapshot_of(epoch))
        if self._task.out.cancelled:  # it came between: nobody else will tell the new items
            items.interrupt()
            return False
        if not self._skip(items, epoch):
            return False
        wanted = self._read_examples(items, epoch, rows) if self._task.batch_size is not None else self._read_batches(items, epoch)
        if not wanted:
            return False
        self._close(items)
        if self._line.is_empty_epoch and not batches:
            self._task.refuse_empty(epoch)
        return True

    def _pull(self, items: OpenSource) -> Any | EndType:
        began = self._task.clock()
        self._inside = True
        try:
            return items.pull()
        finally:
            self._inside = False
            self._pull_seconds = self._task.clock() - began
            self._task.meters.add(source=self._pull_seconds)

    def _skip(self, items: OpenSource, epoch: int) -> bool:
        """Leave out what of this epoch was handed out before the run."""
        self._inside = True
        try:
            return self._trail.skip(epoch, items.pull)
        finally:
            self._inside = False

    def _send(self, assembly: OpenBatch) -> None:
        if self._trail.passes(assembly):
            assembly.send()
        else:
            assembly.withdraw()
            assembly.drop_memory()

    def _close(self, items: OpenSource) -> None:
        with self._closing:
            if self._items is not items:
                return
            self._items = None
        items.close()

    def _keep(self, item: Any) -> Any:
        """The item, safe from what the source does next."""
        return private_copy(item, deep=True) if self._reuses_buffers else item

    # -- examples

    def _read_examples(self, items: OpenSource, epoch: int, first_row: int) -> bool:
        size = self._task.batch_size
        assert size is not None
        while (ticket := self._task.out.reserve()) is not None:
            position, before = self._line.position(epoch, first_row, first_row + size, None)
            assembly = OpenBatch(ticket, position, before)
            try:
                count = self._fill(assembly, items, size)
                if not self._task.out.cancelled:
                    self._trail.check_count(position, count)
                    self._trail.mark(position, count, items.pair if count == size else None)
            except BaseException as error:  # noqa: BLE001 - as above
                self._fail(assembly, error, "reading", None)
                return False
            if self._task.out.cancelled:
                self._discard(assembly)
                return False
            if count < size:
                return self._remainder(assembly, count)
            first_row += size
            self._complete(assembly, count)
        return False

    def _fill(self, assembly: OpenBatch, items: OpenSource, size: int) -> int:
        """Read up to `size` examples into a batch; how many there were."""
        if self._by_workers:
            return self._fill_by_workers(assembly, items, size)
        writer = self._task.filler.examples(assembly, 0, size)
        for row in range(size):
            item = self._pull(items)
            if item is END or self._task.out.cancelled:
                if self._task.pads:
                    writer.finish()
                return row
            if row == 0:
                self._goes_on(assembly)
            writer.write(item)
        writer.finish()
        return size

    def _fill_by_workers(self, assembly: OpenBatch, items: OpenSource, size: int) -> int:
        """As `_fill`, handing runs of examples to the workers."""
        run = max(1, size // (2 * self._task.workers))  # several runs a worker: an uneven one delays the batch less
        assembly.examples = [None] * size if self._task.hooks.collate is not None else None
        chunk: list[Any] = []
        for row in range(size):
            item = self._pull(items)
            if item is END or self._task.out.cancelled:
                self._hand_over(assembly, chunk, row)
                return row
            if row == 0:
                self._goes_on(assembly)
            chunk.append(self._keep(item))
            if len(chunk) == run:
                self._hand_over(assembly, chunk, row + 1)
                chunk = []
        self._hand_over(assembly, chunk, size)
        return size

    def _goes_on(self, assembly: OpenBatch) -> None:
        """The epoch has an example more; under "drop" that does not make a batch yet."""
        if assembly.before is not None and self._task.remainder != "drop":
            assembly.before.settle_end(False)

    def _hand_over(self, assembly: OpenBatch, chunk: list[Any], stop: int) -> None:
        if chunk:
            start = stop - len(chunk)
            first = assembly.position.first_row
            work = partial(self._do_chunk, assembly, start, chunk)
            self._jobs.put(self._part(assembly, "transforming", work, (first + start, first + stop)))

    def _do_chunk(self, assembly: OpenBatch, start: int, chunk: list[Any]) -> None:
        task = self._task
        writer = task.filler.examples(assembly, start, len(chunk))
        transform = copy = 0.0
        for i, item in enumerate(chunk):  # each is written before the next: a transform may make them all in one buffer
            began = task.clock()
            item = self._transformed(item, assembly, assembly.position.first_row + start + i)
            done = task.clock()
            if assembly.examples is not None:
                assembly.examples[start + i] = item
            else:
                writer.write(item)
            transform += done - began
            copy += task.clock() - done
        began = task.clock()
        writer.finish()
        task.meters.add(transform=transform, copy=copy + task.clock() - began)

    def _transformed(self, item: Any, assembly: OpenBatch, row: int) -> Any:
        hooks = self._task.hooks
        if not self._reuses_buffers:
            item = private_copy(item)  # what these do to it must not reach the source
        return item if hooks.transform is None else hooks.transformed(item, assembly.position.epoch, row)

    def _complete(self, assembly: OpenBatch, count: int) -> None:
        """All examples of a batch were read."""
        assembly.rows = count
        if assembly.examples is not None:
            assembly.examples = assembly.examples[:count]
            self._jobs.put(self._part(assembly, "transforming", lambda: None))  # collating is work for a worker
        if assembly.close_parts():
            self._finish(assembly)

    def _remainder(self, assembly: OpenBatch, count: int) -> bool:
        """The epoch ended inside a batch (or right before it)."""
        task = self._task
        assembly.position.settle_end(True)
        if count and task.pads:
            assembly.position.rows = assembly.position.first_row + count
            self._complete(assembly, count)
            return True
        if count and task.remainder == "error":
            leaves = "" if assembly.plan is None else in_brackets(assembly.plan.structure.paths)
            error = BatchError(
                f"the epoch has {assembly.position.first_row + count} rows: the last batch{leaves} has {count} of batch_size={task.batch_size}, and "
                f"remainder='error'; drop it (remainder='drop') or fill it up under a mask (remainder='pad')"
            )
            self._fail(assembly, error, "batching", None)
            return False
        task.meters.add(dropped=count)
        self._line.take_back(assembly.before)
        self._discard(assembly)
        return True

    def _discard(self, assembly: OpenBatch) -> None:
        """Leave a batch out; the workers that still write to it give its memory back."""
        assembly.withdraw()
        if assembly.close_parts():
            assembly.drop_memory()

    # -- batches that the source makes

    def _read_batches(self, items: OpenSource, epoch: int) -> bool:
        held: tuple[OpenBatch, FlatBatch, int] | None = None
        last: OpenBatch | None = None
        pull = self._pull if self._by_workers else self._pull_parts
        while (ticket := self._task.out.reserve()) is not None:
            position, before = self._line.position(epoch, 0, 0, None)
            assembly = OpenBatch(ticket, position, before)
            try:
                item = pull(items)
                if last is not None:
                    self._wholes.tell_last(last, item is END)
                if held is not None:
                    held = self._resolve(held, ended=item is END)
                if item is END or self._task.out.cancelled:
                    if not self._task.out.cancelled:
                        self._trail.check_count(position, 0)
                    self._line.take_back(before)
                    self._line.end_epoch()
                    ticket.withdraw()
                    return item is END and not self._task.out.cancelled
                self._trail.mark(position, 1, items.pair)
                held, last = self._take(assembly, item), assembly
                del item  # the source may use its memory for the next one
            except BaseException as error:  # noqa: BLE001 - as above
                if held is not None:
                    self._resolve(held, ended=False)  # it was read before the fault
                self._fail(assembly, error, "reading", None)
                return False
        return False

    def _pull_parts(self, items: OpenSource) -> FlatBatch | EndType:
        item = self._pull(items)
        return END if item is END else self._wholes.parts(item)

    def _take(self, assembly: OpenBatch, item: Any) -> tuple[OpenBatch, FlatBatch, int] | None:
        """Write a batch, or hand it to a worker; one that is short, and may be the last, is held until that is known."""
        task = self._task
        if self._by_workers:
            self._goes_on(assembly)
            kept = self._keep(item)
            job = self._part(assembly, "transforming", partial(self._do_batch, assembly, kept))
            assembly.close_parts()
            self._jobs.put(job)
            return None
        missing = 0 if task.pads else self._wholes.missing(assembly, item)
        if missing:
            return assembly, FlatBatch(self._keep(item.leaves), item.structure), missing
        self._write(assembly, item)
        return None

    def _write(self, assembly: OpenBatch, parts: FlatBatch) -> None:
        """Copy a batch in this thread, by a worker while the source goes on, or, where it is large, in shares by several."""
        task, wholes = self._task, self._wholes
        goes_on = not self._reuses_buffers or (self._copiers > 0 and wholes.has_first and are_unshared(parts.leaves))
        is_slow = goes_on and self._copiers > 0 and self._pull_seconds > HAND_OVER_SECONDS
        nbytes = wholes.plain_bytes(parts) if is_slow else None
        if nbytes is not None and nbytes < SHARE_BYTES:  # nothing of it can fail, or is to be planned in order
            job = self._part(assembly, "reading", partial(wholes.write, assembly, parts, pads=task.pads))
            assembly.close_parts()
            self._jobs.put(job)
            return
        began = task.clock()
        work = wholes.begin(assembly, parts, pads=task.pads)
        shares = self._choose_shares(work, goes_on)
        if is_slow and work.plan.nbytes:
            shares = max(1, shares)
        if shares > 1 or (shares and goes_on):
            assembly.work = work
            jobs = [self._part(assembly, "reading", partial(wholes.copy_share, assembly, work, i, shares)) for i in range(shares)]
            assembly.close_parts()
            for job in jobs if goes_on else jobs[1:]:
                self._jobs.put(job)
            if not goes_on:
                jobs[0]()
                self._wait_until_read(assembly)
            task.meters.add(copy=task.clock() - began)
            return
        wholes.copy_share(assembly, work)
        task.meters.add(copy=task.clock() - began, padded=wholes.end(assembly, work))
        self._send(assembly)

    def _choose_shares(self, work: CopyJob, goes_on: bool) -> int:
        """Into how many shares a batch is cut; 0 where it is copied here, at once.

        Where the source goes on meanwhile, just as many copy as keep up with it: each that wakes takes the interpreter's lock from it.
        """
        most = min(self._copiers + (not goes_on), work.plan.nbytes // SHARE_BYTES) if work.rows else 0
        if not goes_on or most < 1:
            return most
        copying = work.plan.nbytes / COPY_BYTES_PER_SECOND
        return max(1, min(most, math.ceil(1.5 * copying / max(self._pull_seconds, 1e-6))))

    def _wait_until_read(self, assembly: OpenBatch) -> None:
        """Wait for the other shares; the source must not be touched before, also where nothing more is wanted."""
        while not assembly.is_read:
            try:
                job = self._jobs.get_nowait()  # workers that were dismissed leave jobs behind
            except queue.Empty:
                self._copied.wait(lambda: assembly.is_read)
                return
            if job is not None:
                job()
            elif not self._task.out.cancelled:
                self._jobs.put(None)

    def _resolve(self, held: tuple[OpenBatch, FlatBatch, int], *, ended: bool) -> None:
        assembly, parts, missing = held
        try:
            if ended:
                assembly.position.settle_end(True)
                self._wholes.refuse_or_drop(assembly, missing, self._task.remainder)
            else:
                self._wholes.write(assembly, parts, pads=False)
                self._send(assembly)
        except BaseException as error:  # noqa: BLE001 - as above
            self._fail(assembly, error, "reading", None)

    def _do_batch(self, assembly: OpenBatch, item: Any) -> None:
        task = self._task
        began = task.clock()
        item = self._transformed(item, assembly, assembly.position.batches - 1)
        task.meters.add(transform=task.clock() - began)
        parts = self._wholes.parts(item)
        missing = 0 if task.pads else self._wholes.missing(assembly, parts)
        if missing and self._wholes.is_last(assembly):
            self._wholes.refuse_or_drop(assembly, missing, task.remainder)
        else:
            self._wholes.write(assembly, parts, pads=task.pads)
