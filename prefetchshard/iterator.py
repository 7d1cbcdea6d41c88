"""`LoaderIterator`: one run of a loader, as its consumer sees it."""

from __future__ import annotations

import weakref
from types import TracebackType
from typing import Any

from prefetchshard.base.errors import BatchError, PrefetchWarning
from prefetchshard.base.faults import note, safe_to_raise
from prefetchshard.base.jax_context import JaxContext
from prefetchshard.base.position import Position, StartPoint
from prefetchshard.base.specs import LeafSpec
from prefetchshard.building.run_factory import RunFactory
from prefetchshard.measuring.stats import Stats
from prefetchshard.placing.placed_batch import PlacedBatch
from prefetchshard.queues import async_waiting as aio
from prefetchshard.queues.bounded_queue import EMPTY, EmptyType
from prefetchshard.resuming.handed_out import HandedOut
from prefetchshard.resuming.loader_state import LoaderState
from prefetchshard.running.at_exit import hold_daemons
from prefetchshard.running.closing import close_runs
from prefetchshard.running.run import Run

__all__ = ["LoaderIterator"]


class LoaderIterator:
    """One run of a loader: its threads, and the batches in order, for a `for` and for an `async for` loop.

    Example:
        with ps.Loader(np.zeros((64, 3), np.float32), P("data"), batch_size=16) as loader:
            batches = iter(loader)
            next(batches)
            state = batches.state()  # goes on after this batch: ps.Loader(..., state=state)
        assert state.batches == 1

    Thread safety: every method may be called from any thread; threads and tasks that share an iterator share its batches, each going
    to one of them.
    """

    def __init__(self, factory: RunFactory, start: StartPoint) -> None:
        self._factory = factory
        self._progress = HandedOut(start)
        self._failure: BaseException | None = None
        self._traceback: TracebackType | None = None
        self._over = False
        self._run = factory.build(start)
        self._meters = self._run.meters
        self._outbox = self._run.outbox
        self._clock = self._run.clock
        # An iterator that nobody holds any more tells its threads so; they hold the run, never the iterator.
        weakref.finalize(self, self._run.abandon).atexit = False

    # -- sync

    def __iter__(self) -> LoaderIterator:
        return self

    def __next__(self) -> Any:
        began = self._clock()
        self._run.check_consumer()
        while (batch := self._take(began)) is EMPTY:
            if self._outbox.is_over():
                break
            self._factory.check_thread()
            self._outbox.wait_ready()
        else:
            return batch
        self._stop(began)
        self._close_at_end()
        end = self._failure_or(StopIteration())
        try:
            raise end
        finally:
            del self, end  # the traceback holds this frame

    def _take(self, began: float) -> Any | EmptyType:
        """The next batch, or EMPTY."""
        item: PlacedBatch | EmptyType = EMPTY
        try:
            item = self._outbox.take_nowait()
            return EMPTY if item is EMPTY else self._hand_out(item, began)
        except BaseException:  # Ctrl-C: it is the next one again
            if item is not EMPTY:
                self._outbox.untake(item)
            raise

    def _hand_out(self, item: PlacedBatch, began: float) -> Any | EmptyType:
        if item.finish is not None and (not self._finish(item) or self._outbox.cancelled):
            return EMPTY
        meters = self._meters
        now = self._clock()
        if meters.first_next_at is None:
            meters.first_batch_seconds = max(0.0, item.ready_at - self._run.began_at)
            self._factory.remember_spec(item, x64=self._run.context.x64)
            meters.first_next_at = began
        # No call from here on, so no Ctrl-C in between: it is handed out and counted, or neither.
        meters.stall_seconds += now - began
        meters.last_next_at = now
        meters.batches += 1
        meters.rows += item.rows
        meters.bytes += item.bytes
        progress, position = self._progress, item.position
        # Threads that share the run come here in any order. `position.step` would be a call
        if progress.position is None or position.after.step > progress.position.after.step:
            progress.position = position
        return item.batch

    def _finish(self, item: PlacedBatch) -> bool:
        """Make a batch that is for this thread to make. False: it could not be made, which ends the run."""
        try:
            item.finished()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - raised as what comes from the other threads is
            self._outbox.break_off(note(safe_to_raise(error, "placing"), "placing", item.position))
            return False
        return True

    def _stop(self, began: float) -> None:
        """The first time that nothing more comes: keep why, and move the loader on where the run ended by itself."""
        if self._over or self._run.closed:
            return
        now = self._clock()
        if self._meters.first_next_at is None:
            self._meters.first_next_at = began
        self._meters.stall_seconds += now - began
        self._meters.last_next_at = now
        if not self._has_failed():
            self._progress.end = self._factory.ended(self._progress.start, self._progress.position)
        self._over = True  # last: who shares the iterator goes by it

    def _has_failed(self) -> bool:
        """Keep the failure that ended the run, where one did, as it came: each time that it is raised its traceback grows."""
        failure = self._outbox.failure
        if failure is not None:
            if self._failure is None:
                self._traceback = failure.__traceback__
                self._failure = failure
            self._outbox.clear()  # of the failure too: raised here, its traceback leads back to the queue
        return self._failure is not None

    def _close_at_end(self) -> None:
        if self._run.closed:  # by somebody else, who waits for the threads
            hold_daemons()
            return
        try:
            self._run.close()
        except PrefetchWarning:  # where warnings are errors; the fault of the source comes first
            if self._failure is None:
                raise

    def _failure_or(self, end: BaseException) -> BaseException:
        return end if self._failure is None else self._failure.with_traceback(self._traceback)

    # -- async

    def __aiter__(self) -> LoaderIterator:
        return self

    async def __anext__(self) -> Any:
        began = self._clock()
        self._run.check_consumer()
        await aio.checkpoint()
        while (batch := self._take(began)) is EMPTY:
            if self._outbox.is_over():
                break
            await aio.wait_ready(self._outbox)
        else:
            return batch
        self._stop(began)
        if self._run.closed:
            hold_daemons()
        else:
            await aio.in_thread(self._close_at_end)
        end = self._failure_or(StopAsyncIteration())
        try:
            raise end
        finally:
            del self, end  # the traceback holds this frame

    # -- both

    @property
    def run(self) -> Run:
        """Its threads and queues, for the loader."""
        return self._run

    @property
    def position(self) -> Position | None:
        """Where the last batch that was handed out stands in the data; None before the first."""
        return self._progress.position

    def state(self) -> LoaderState:
        """Where the run stands after the batches that were handed out, whatever was read ahead; consumes nothing, never waits.

        `Loader(..., state=...)` with it goes on with the next batch, bit for bit. After the end of the run it is the beginning of the
        next one; after `close()` and after an error it still speaks of the batches handed out before. It is a value: going on does not
        change it. From any thread, also while another one takes batches: it is then the state after some whole number of them.
        """
        return self._progress.state(self._factory.fingerprint)

    def stats(self) -> Stats:
        """What the run has done so far, and where its time went."""
        return self._run.stats()

    def close(self) -> None:
        """Stop the run, and wait, in bounded time, until its threads have ended. Later `next()` end at once."""
        close_runs([self._run])

    async def aclose(self) -> None:
        """`close` without blocking the event loop; from any task, and also while that task is being cancelled."""
        await aio.in_thread(self._run.close)

    @property
    def progress(self) -> HandedOut:
        """What was handed out; the loader keeps it when the run is gone."""
        return self._progress

    @property
    def is_live(self) -> bool:
        """Whether more may come: it neither ended, nor failed, nor was closed."""
        return not self._over and not self._run.closed

    def learn_spec(self) -> tuple[LeafSpec, ...]:
        """What the next batch looks like; waits for it and leaves it where it is.

        Raises:
            BatchError: there is none.
        """
        self._factory.check_thread()
        while not self._outbox.is_over():
            self._outbox.wait_ready()
            item = self._outbox.peek_nowait()
            if item is not EMPTY and (item.finish is None or self._finish(item)):
                return self._factory.learn_spec(item, x64=self._run.context.x64)
        self._has_failed()
        end = self._failure_or(BatchError("the source has no batch, so it cannot be told what one looks like"))
        try:
            raise end
        finally:
            del self, end  # the traceback holds this frame

    def is_under_these_settings(self) -> bool:
        """Whether the JAX settings in force in this thread are those of the run."""
        return self._run.context == JaxContext()

    def __repr__(self) -> str:
        state = "live" if self.is_live else "failed" if self._failure is not None else "ended" if self._over else "closed"
        ready = self._outbox.stats()
        at = "" if self.position is None else f", at {self.position!r}"
        return f"<LoaderIterator {state}: {ready.ready} of {ready.capacity} batches ready{at}>"
