"""What takes the batches of one run: `LoaderIterator` is its face to users, `Loader` talks to it directly."""

from __future__ import annotations

import weakref
from types import TracebackType
from typing import Any

from prefetchshard.base.errors import BatchError, PrefetchWarning
from prefetchshard.base.faults import note, safe_to_raise
from prefetchshard.base.specs import LeafSpec
from prefetchshard.building.run_factory import RunFactory
from prefetchshard.placing.placed_batch import PlacedBatch
from prefetchshard.queues.bounded_queue import EMPTY, EmptyType
from prefetchshard.resuming.handed_out import HandedOut
from prefetchshard.resuming.loader_state import LoaderState
from prefetchshard.running.at_exit import hold_daemons


class Consumer:
    """Builds the next run of a loader, takes its batches, counts them, and keeps why no more come.

    Args:
        factory: of the loader.

    Attributes:
        run: its threads and queues; `Loader` starts it.
        handed_out: the loader keeps it when the run is gone.

    Thread safety: every method may be called from any thread.
    """

    def __init__(self, factory: RunFactory) -> None:
        start = factory.next_start
        self.factory = factory
        self.handed_out = HandedOut(start)
        self.run = factory.build(start)
        self.outbox = self.run.outbox
        self.clock = self.run.recorder.clock
        self._recorder = self.run.recorder
        self._failure: BaseException | None = None
        self._traceback: TracebackType | None = None
        self._over = False
        # Dropped with its iterator, it tells the threads so; they hold the run, never this.
        weakref.finalize(self, self.run.abandon).atexit = False

    # -- batches

    def take(self, began: float) -> Any | EmptyType:
        """The next batch, counted, or EMPTY. `began`: when it was asked for, in seconds of the run's clock."""
        item: PlacedBatch | EmptyType = EMPTY
        try:
            item = self.outbox.take_nowait()
            return EMPTY if item is EMPTY else self._hand_out(item, began)
        except BaseException:  # Ctrl-C: it is the next one again
            if item is not EMPTY:
                self.outbox.untake(item)
            raise

    def _hand_out(self, item: PlacedBatch, began: float) -> Any | EmptyType:
        if item.finish is not None and (not self._finish(item) or self.outbox.cancelled):
            return EMPTY
        recorder = self._recorder
        now = self.clock()
        if recorder.first_next_at is None:
            recorder.first_batch_seconds = max(0.0, item.ready_at - self.run.began_at)
            self.factory.specs.remember(item, x64=self.run.context.x64)
            recorder.first_next_at = began
        # No call from here on, so no Ctrl-C in between: it is handed out and counted, or neither.
        recorder.stall_seconds += now - began
        recorder.last_next_at = now
        recorder.batches += 1
        recorder.rows += item.rows
        recorder.bytes += item.bytes
        handed_out, position = self.handed_out, item.position
        # Threads that share the run come here in any order. `position.step` would be a call
        if handed_out.position is None or position.after.step > handed_out.position.after.step:
            handed_out.position = position
        return item.batch

    def _finish(self, item: PlacedBatch) -> bool:
        """Make a batch that is for this thread to make. False: it could not be made, which ends the run."""
        try:
            item.finished()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - raised as what comes from the other threads is
            self.outbox.break_off(note(safe_to_raise(error, "placing"), "placing", item.position))
            return False
        return True

    # -- the end

    def stop(self, began: float) -> None:
        """The first time that nothing more comes: keep why, and move the loader on where the run ended by itself."""
        if self._over or self.run.closed:
            return
        now = self.clock()
        if self._recorder.first_next_at is None:
            self._recorder.first_next_at = began
        self._recorder.stall_seconds += now - began
        self._recorder.last_next_at = now
        if not self._has_failed():
            self.handed_out.end = self.factory.ended(self.handed_out.start, self.handed_out.position)
        self._over = True  # last: who shares the iterator goes by it

    def _has_failed(self) -> bool:
        """Keep the failure that ended the run, where one did, as it came: each time that it is raised its traceback grows."""
        failure = self.outbox.failure
        if failure is not None:
            if self._failure is None:
                self._traceback = failure.__traceback__
                self._failure = failure
            self.outbox.clear()
        return self._failure is not None

    def close_at_end(self) -> None:
        """Wait for the threads of a run that has stopped."""
        if self.run.closed:  # by somebody else, who waits for the threads
            hold_daemons()
            return
        try:
            self.run.close()
        except PrefetchWarning:  # where warnings are errors; the fault of the source comes first
            if self._failure is None:
                raise

    def failure_or(self, end: BaseException) -> BaseException:
        """What is to be raised now that nothing more comes."""
        return end if self._failure is None else self._failure.with_traceback(self._traceback)

    # -- looking

    @property
    def is_live(self) -> bool:
        """Whether more may come: it neither ended, nor failed, nor was closed."""
        return not self._over and not self.run.closed

    @property
    def status(self) -> str:
        """The same in a word."""
        return "live" if self.is_live else "failed" if self._failure is not None else "ended" if self._over else "closed"

    def state(self) -> LoaderState:
        """Where the run stands after the batches that were handed out."""
        return self.handed_out.state(self.factory.fingerprint)

    def learn_spec(self) -> tuple[LeafSpec, ...]:
        """What the next batch looks like; waits for it and leaves it where it is.

        Raises:
            BatchError: there is none.
        """
        self.factory.check_thread()
        while not self.outbox.is_over():
            self.outbox.wait_ready()
            item = self.outbox.peek_nowait()
            if item is not EMPTY and (item.finish is None or self._finish(item)):
                return self.factory.specs.learn(item, x64=self.run.context.x64)
        self._has_failed()
        end = self.failure_or(BatchError("the source has no batch, so it cannot be told what one looks like"))
        try:
            raise end
        finally:
            del self, end  # the traceback holds this frame

    def is_under_these_settings(self) -> bool:
        """Whether the JAX settings in force in this thread are those of the run."""
        return self.run.context.is_in_force()
