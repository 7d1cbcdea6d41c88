"""Reads a source that is pulled: one thread is inside it; transforms and collating run in workers beside it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax

from prefetchshard.errors import BatchError
from prefetchshard.faults import note, presentable
from prefetchshard.filling import Assembly, Wholes
from prefetchshard.leaves import own_leaf
from prefetchshard.parking import Parking
from prefetchshard.reading import Line, Task, cpu_count
from prefetchshard.sources.iterables import END, EndType, Items, Stream

_Job = Callable[[], None]


SHARE_BYTES = 4 << 20
"""A large batch is copied in shares of at least this size: waking a thread costs as much as copying some hundred kilobytes."""


class StreamReader:
    """Reads an iterator, an iterable, a factory or an async source.

    Args:
        task: what every reader is given.
        source: that is pulled.
        reuses_buffers: the source may overwrite an item as soon as it is asked for the next one.
        tell_epoch: called before each epoch.
    """

    def __init__(self, task: Task, source: Stream, *, reuses_buffers: bool, tell_epoch: Callable[[int], None]) -> None:
        self._task = task
        self._source = source
        self._reuses_buffers = reuses_buffers
        self._tell_epoch = tell_epoch
        self._line = Line(task.start)
        self._items: Items | None = None
        self._closing = threading.Lock()  # guards _items' being closed once
        self._inside = False
        self._wholes = Wholes(
            task.filler, task.meters, first_step=task.start.step, batch_size=task.batch_size, shares_items=not reuses_buffers
        )
        self._copied = Parking()
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
            self._close(items)

    def _dismiss_workers(self) -> None:
        for _ in range(self._task.workers):
            self._jobs.put(None)

    # -- a worker

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _part(self, assembly: Assembly, work: Callable[[], None], rows: tuple[int, int] | None = None) -> _Job:
        """A job that does one part of a batch, and finishes the batch where it was the last part."""

        def job() -> None:
            try:
                if not self._task.out.cancelled:
                    work()
            except BaseException as error:  # noqa: BLE001 - a thread has no caller: the queue is the way out
                self._fail(assembly, error, "copying" if assembly.work is not None else "transforming", rows)
            if assembly.part_done():
                self._finish(assembly)
                self._copied.wake()

        assembly.add_part()
        return job

    def _fail(self, assembly: Assembly, error: BaseException, stage: str, rows: tuple[int, int] | None) -> None:
        if assembly.fail(error, stage, rows):
            self._wholes.stop()
            self._line.give_up()

    def _finish(self, assembly: Assembly) -> None:
        task = self._task
        if assembly.settled:  # failed, or dropped
            assembly.drop_memory()
            return
        try:
            if task.out.cancelled:
                assembly.withdraw()
                assembly.drop_memory()
                return
            if assembly.work is not None:
                task.meters.add(padded=self._wholes.end(assembly, assembly.work))
            elif assembly.examples is not None:
                self._wholes.collate(assembly, task.hooks, pads=task.pads, gathered=False)
            elif task.batch_size is not None:
                task.meters.add(padded=task.filler.finish(assembly, assembly.rows))
            assembly.send()
        except BaseException as error:  # noqa: BLE001 - as above
            self._fail(assembly, error, "finishing", None)

    # -- the source's thread

    def _read(self) -> None:
        out = self._task.out
        failure: BaseException | None = None
        try:
            for epoch in self._task.epoch_numbers():
                if not self._read_epoch(epoch):
                    break
        except BaseException as error:  # noqa: BLE001 - as above
            failure = note(presentable(error, "the source"), "reading the source", None)
        finally:
            try:
                if self._items is not None:
                    self._close(self._items)
            except BaseException as error:  # noqa: BLE001 - as above
                failure = failure or note(presentable(error, "closing the source"), "closing the source", None)
            if failure is not None:
                self._line.give_up()
            out.end(failure)
            self._dismiss_workers()

    def _read_epoch(self, epoch: int) -> bool:
        """Read one epoch. False: nothing more is wanted."""
        self._tell_epoch(epoch)
        rows, batches = self._line.begin_epoch(epoch)
        self._items = items = self._source.open(epoch)
        if self._task.out.cancelled:  # it came between: nobody else will tell the new items
            items.interrupt()
            return False
        wanted = self._read_examples(items, epoch, rows) if self._task.batch_size is not None else self._read_batches(items, epoch)
        if not wanted:
            return False
        self._close(items)
        if self._line.is_empty_epoch and not batches:
            self._task.refuse_empty(epoch)
        return True

    def _pull(self, items: Items) -> Any | EndType:
        began = self._task.clock()
        self._inside = True
        try:
            return items.pull()
        finally:
            self._inside = False
            self._task.meters.add(source=self._task.clock() - began)

    def _close(self, items: Items) -> None:
        with self._closing:
            if self._items is not items:
                return
            self._items = None
        items.close()

    def _keep(self, item: Any) -> Any:
        """The item, safe from what the source does next."""
        if not self._reuses_buffers:
            return item
        leaves, tree = jax.tree.flatten(item)
        return jax.tree.unflatten(tree, [own_leaf(leaf) for leaf in leaves])

    # -- examples

    def _read_examples(self, items: Items, epoch: int, first_row: int) -> bool:
        size = self._task.batch_size
        assert size is not None
        while (ticket := self._task.out.reserve()) is not None:
            position, before = self._line.position(epoch, first_row, first_row + size, None)
            assembly = Assembly(ticket, position, before)
            try:
                count = self._fill(assembly, items, size)
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

    def _fill(self, assembly: Assembly, items: Items, size: int) -> int:
        """Read up to `size` examples into a batch; how many there were."""
        if self._by_workers:
            return self._fill_by_workers(assembly, items, size)
        filler = self._task.filler
        assembly.wide = {}
        for row in range(size):
            item = self._pull(items)
            if item is END or self._task.out.cancelled:
                return row
            if row == 0:
                self._goes_on(assembly)
            filler.write_examples(assembly, row, (item,))
        return size

    def _fill_by_workers(self, assembly: Assembly, items: Items, size: int) -> int:
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

    def _goes_on(self, assembly: Assembly) -> None:
        """The epoch has an example more; under "drop" that does not make a batch yet."""
        if assembly.before is not None and self._task.remainder != "drop":
            assembly.before.settle_end(False)

    def _hand_over(self, assembly: Assembly, chunk: list[Any], stop: int) -> None:
        if chunk:
            start = stop - len(chunk)
            first = assembly.position.first_row
            self._jobs.put(self._part(assembly, lambda: self._do_chunk(assembly, start, chunk), (first + start, first + stop)))

    def _do_chunk(self, assembly: Assembly, start: int, chunk: list[Any]) -> None:
        task = self._task
        began = task.clock()
        if task.hooks.transform is not None:
            epoch, first = assembly.position.epoch, assembly.position.first_row + start
            chunk = [task.hooks.transformed(item, epoch, first + i) for i, item in enumerate(chunk)]
        done = task.clock()
        if assembly.examples is not None:
            assembly.examples[start : start + len(chunk)] = chunk
        else:
            task.filler.write_examples(assembly, start, chunk)
        task.meters.add(transform=done - began, copy=task.clock() - done)

    def _complete(self, assembly: Assembly, count: int) -> None:
        """All examples of a batch were read."""
        assembly.rows = count
        if assembly.examples is not None:
            assembly.examples = assembly.examples[:count]
            self._jobs.put(self._part(assembly, lambda: None))  # collating is work for a worker
        if assembly.close_parts():
            self._finish(assembly)

    def _remainder(self, assembly: Assembly, count: int) -> bool:
        """The epoch ended inside a batch (or right before it)."""
        task = self._task
        assembly.position.settle_end(True)
        if count and task.pads:
            assembly.position.rows = assembly.position.first_row + count
            self._complete(assembly, count)
            return True
        if count and task.remainder == "error":
            error = BatchError(
                f"the epoch has {assembly.position.first_row + count} rows: the last batch has {count} of batch_size={task.batch_size}, and "
                f"remainder='error'; drop it (remainder='drop') or fill it up under a mask (remainder='pad')"
            )
            self._fail(assembly, error, "batching", None)
            return False
        task.meters.add(dropped=count)
        self._line.take_back(assembly.before)
        self._discard(assembly)
        return True

    def _discard(self, assembly: Assembly) -> None:
        """Leave a batch out; the workers that still write to it give its memory back."""
        assembly.withdraw()
        if assembly.close_parts():
            assembly.drop_memory()

    # -- batches that the source makes

    def _read_batches(self, items: Items, epoch: int) -> bool:
        held: tuple[Assembly, Any, int] | None = None
        last: Assembly | None = None
        while (ticket := self._task.out.reserve()) is not None:
            position, before = self._line.position(epoch, 0, 0, None)
            assembly = Assembly(ticket, position, before)
            try:
                item = self._pull(items)
                if last is not None:
                    self._wholes.tell_last(last, item is END)
                if held is not None:
                    held = self._resolve(held, ended=item is END)
                if item is END or self._task.out.cancelled:
                    self._line.take_back(before)
                    self._line.end_epoch()
                    ticket.withdraw()
                    return item is END and not self._task.out.cancelled
                held, last = self._take(assembly, item), assembly
            except BaseException as error:  # noqa: BLE001 - as above
                if held is not None:
                    self._resolve(held, ended=False)  # it was read before the fault
                self._fail(assembly, error, "reading", None)
                return False
        return False

    def _take(self, assembly: Assembly, item: Any) -> tuple[Assembly, Any, int] | None:
        """Write a batch, or hand it to a worker; one that is short, and may be the last, is held until that is known."""
        task = self._task
        if self._by_workers:
            self._goes_on(assembly)
            kept = self._keep(item)
            job = self._part(assembly, lambda: self._do_batch(assembly, kept))
            assembly.close_parts()
            self._jobs.put(job)
            return None
        missing = 0 if task.pads else self._wholes.missing(assembly, item)
        if missing:
            return assembly, self._keep(item), missing
        self._write(assembly, item)
        return None

    def _write(self, assembly: Assembly, item: Any) -> None:
        """Copy a batch in this thread, or, where it is large, in shares by the workers too."""
        task, wholes = self._task, self._wholes
        began = task.clock()
        work = wholes.begin(assembly, item, pads=task.pads)
        shares = min(self._copiers + 1, work.plan.nbytes // SHARE_BYTES) if work.rows else 1
        if shares > 1:
            assembly.work = work
            jobs = [self._part(assembly, partial(wholes.copy_share, assembly, work, i, shares)) for i in range(shares)]
            assembly.close_parts()
            for job in jobs[1:]:
                self._jobs.put(job)
            jobs[0]()
            if self._reuses_buffers:
                self._wait_until_read(assembly)
            task.meters.add(copy=task.clock() - began)
            return
        wholes.copy_share(assembly, work)
        task.meters.add(copy=task.clock() - began, padded=wholes.end(assembly, work))
        assembly.send()

    def _wait_until_read(self, assembly: Assembly) -> None:
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

    def _resolve(self, held: tuple[Assembly, Any, int], *, ended: bool) -> None:
        assembly, item, missing = held
        try:
            if ended:
                assembly.position.settle_end(True)
                self._wholes.refuse_or_drop(assembly, item, missing, self._task.remainder)
            else:
                self._wholes.write(assembly, item, pads=False)
                assembly.send()
        except BaseException as error:  # noqa: BLE001 - as above
            self._fail(assembly, error, "reading", None)

    def _do_batch(self, assembly: Assembly, item: Any) -> None:
        task = self._task
        began = task.clock()
        if task.hooks.transform is not None:
            item = task.hooks.transformed(item, assembly.position.epoch, assembly.position.batches - 1)
        task.meters.add(transform=task.clock() - began)
        missing = 0 if task.pads else self._wholes.missing(assembly, item)
        if missing and self._wholes.is_last(assembly):
            self._wholes.refuse_or_drop(assembly, item, missing, task.remainder)
        else:
            self._wholes.write(assembly, item, pads=task.pads)
