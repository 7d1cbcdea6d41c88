"""What takes the batches of one run: `LoaderIterator` is its face to users, `Loader` talks to it directly."""

from __future__ import annotations

import logging
import math
import threading
import time
import warnings
import weakref
from types import TracebackType
from typing import Any, NoReturn

from prefetchshard.base.errors import BatchError, PrefetchWarning
from prefetchshard.base.event_loop import HomeLoop
from prefetchshard.base.faults import note, safe_to_raise
from prefetchshard.base.specs import LeafSpec
from prefetchshard.building.run_factory import RunFactory
from prefetchshard.measuring.minutes import MinuteLine
from prefetchshard.measuring.recorder import RECENT, SUM_EVERY
from prefetchshard.measuring.stalls import find_holder, tell
from prefetchshard.placing.placed_batch import PlacedBatch
from prefetchshard.queues import async_waiting as aio
from prefetchshard.queues.bounded_queue import EMPTY, EmptyType
from prefetchshard.resuming.handed_out import HandedOut
from prefetchshard.resuming.loader_state import LoaderState
from prefetchshard.running.at_exit import hold_daemons
from prefetchshard.sources.loops import LOOK_SECONDS

COUNTING_SECONDS = 1.0
"""How long the end of a run waits for a thread that has taken a batch and not counted it yet. That takes microseconds, unless a signal
strikes in between, whose handler may itself wait for the end."""

_log = logging.getLogger(__name__)


class Consumer:
    """Builds the next run of a loader, takes its batches, counts them, and keeps why no more come.

    Args:
        factory: of the loader.
        began_in: the event loop in which `aiter` begins the run.

    Attributes:
        run: its threads and queues; `Loader` starts it.
        handed_out: the loader keeps it when the run is gone.

    Thread safety: every method may be called from any thread.
    """

    def __init__(self, factory: RunFactory, began_in: HomeLoop | None = None) -> None:
        start = factory.next_start
        self.factory = factory
        self.handed_out = HandedOut(start)
        self.run = factory.build(start, began_in)
        self.outbox = self.run.outbox
        self.clock = self.run.recorder.clock
        self._recorder = self.run.recorder
        self._window = self.run.window
        self._minutes = MinuteLine(self.run.stats, self._recorder.began_at)
        seconds = factory.stall_warning_seconds
        self._stall_seconds = math.inf if seconds is None else seconds
        self._failure: BaseException | None = None
        self._traceback: TracebackType | None = None
        self._over = False
        self._finishing = threading.RLock()  # held by the thread that makes the batch at the head of the queue
        # Dropped with its iterator, it tells the threads so; they hold the run, never this.
        weakref.finalize(self, self.run.abandon).atexit = False

    # -- batches

    def take(self, began: float) -> Any | EmptyType:
        """The next batch, counted, or EMPTY. `began`: when it was asked for, in seconds of the run's clock."""
        outbox, recorder = self.outbox, self._recorder
        if recorder.batches - recorder.summed >= SUM_EVERY:
            recorder.sum_up()
        if began >= self._window.due_at:
            self.run.look(began)
        if began >= self._minutes.due_at:
            self._minutes.tell(began)
        item: PlacedBatch | EmptyType = EMPTY
        try:
            head = outbox.peek_nowait()
            # Made before it is taken: until then the run is not over for the threads that share it
            if head is EMPTY or (head.finish is not None and not self._finish(head)):
                return EMPTY
            item = outbox.take_nowait(head)
            if item is EMPTY:
                return EMPTY
            now = self.clock()
            if recorder.first_next_at is None:
                recorder.first_batch_seconds = max(0.0, item.times.ready_at - recorder.began_at)
                self.factory.specs.remember(item, x64=self.run.context.x64)
                recorder.setup = self.factory.setup(recorder.setup.workers, item)
                recorder.first_next_at = began
            # No call from here on, so no Ctrl-C and no other thread in between: it is handed out and counted, or neither.
            recorder.stall_seconds += now - began
            recorder.last_next_at = now
            times = item.times
            times.asked_at, times.taken_at = began, now
            recorder.recent[recorder.batches % RECENT] = times
            recorder.batches += 1
            recorder.rows += item.rows
            recorder.bytes += item.bytes
            handed_out, position = self.handed_out, item.position
            # Threads that share the run come here in any order. `position.step` would be a call
            if handed_out.position is None or position.after.step > handed_out.position.after.step:
                handed_out.position = position
            return item.batch
        except BaseException:  # Ctrl-C: it is the next one again
            if item is not EMPTY:
                outbox.untake(item)
            raise

    def _finish(self, item: PlacedBatch) -> bool:
        """Make the batch at the head of the queue, which is for this thread to make. False: it cannot be taken.

        Another thread that shares the run waits meanwhile. If the batch cannot be made, the run ends there.
        """
        with self._finishing:
            finish = item.finish
            if finish is None:  # another thread made it
                return True
            if self.outbox.peek_nowait() is not item:  # another thread could not make it, or the run was closed
                return False
            try:
                item.batch = finish()
                item.finish = None
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # noqa: BLE001 - raised as what comes from the other threads is
                self.outbox.break_off(note(safe_to_raise(error, "placing"), "placing", item.position))
                return False
        return True

    # -- waiting

    def wait(self, began: float, what: str, *, is_told: bool) -> bool:
        """Wait until a batch can be taken, or none will come, or for nothing. A long wait is told in the log.

        Args:
            began: when the batch was asked for, in seconds of the run's clock.
            what: the call that waits.
            is_told: this wait was told.

        Returns:
            Whether it was told by now.

        Raises:
            RuntimeError: this is the thread of the event loop that has to produce it.
        """
        loops = self.run.loops
        if loops is not None:
            loops.check_thread()
        if self.outbox.wait_ready(self._look_after(began, is_told=is_told)):
            return is_told
        if loops is not None:
            self._pass_on(loops.complaint())
        return is_told or self._tell(began, what)

    async def wait_async(self, began: float, what: str, *, is_told: bool) -> bool:
        """As `wait`, in an event loop."""
        loops = self.run.loops
        seconds = self._look_after(began, is_told=is_told)
        if seconds is None:
            await aio.wait_ready(self.outbox)
            return is_told
        if await aio.wait_ready_for(self.outbox, seconds):
            return is_told
        if loops is not None:
            self._pass_on(loops.complaint())
        return is_told or self._tell(began, what)

    def _look_after(self, began: float, *, is_told: bool) -> float | None:
        """After how many seconds of waiting to look at what happens; None: never."""
        left = math.inf if is_told else max(0.0, began + self._stall_seconds - self.clock())
        if self.run.loops is not None:
            return min(left, LOOK_SECONDS)
        return None if left == math.inf else left

    def _tell(self, began: float, what: str) -> bool:
        """Say what holds the batch, where it is waited for so long. Whether that is so."""
        now, run, step = self.clock(), self.run, self.next_step
        if now - began < self._stall_seconds or self.outbox.is_settled():
            return False
        holder = find_holder(self._recorder, step, is_read=run.has_read, readers=run.threads.in_source)
        awaiting = list if run.loops is None else run.loops.stack
        _log.warning(tell(holder, what, step, waited=now - began, now=now, awaiting=awaiting))
        return True

    def _pass_on(self, complaint: str | None) -> None:
        if complaint is not None and not self.run.closed:
            warnings.warn(complaint, PrefetchWarning, stacklevel=4)  # at the user's `next`, or `async for`

    # -- the end

    def stop(self, began: float) -> bool:
        """The first time that nothing more comes: keep why, and move the loader on where the run ended by itself.

        False: something comes after all, as Ctrl-C made another thread put it back.
        """
        if self._over or self.run.closed:
            return True
        self._wait_until_counted()
        if not self.outbox.is_over():
            return False
        now = self.clock()
        if self._recorder.first_next_at is None:
            self._recorder.first_next_at = began
        self._recorder.stall_seconds += now - began
        self._recorder.last_next_at = now
        if not self._has_failed():
            if self.run.closed:  # meanwhile, which drops a failure: nobody can tell any more whether the run ended by itself
                return True
            self.handed_out.end = self.factory.ended(self.handed_out.start, self.handed_out.position)
        self._over = True  # last: who shares the iterator goes by it
        return True

    def _wait_until_counted(self) -> None:
        """Wait for the threads that share the run to count what they have taken."""
        deadline = time.monotonic() + COUNTING_SECONDS
        while self.outbox.stats().taken > self._recorder.batches and time.monotonic() < deadline:
            time.sleep(0.0001)

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
    def next_step(self) -> int:
        """Of the batch that comes next."""
        last = self.handed_out.position
        return self.handed_out.start.step if last is None else last.after.step

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
        began, is_told = self.clock(), False
        while not self.outbox.is_over():
            is_told = self.wait(began, "spec()", is_told=is_told)
            if (leaves := self._look_at_next()) is not None:
                return leaves
        self._raise_for_spec()

    async def learn_spec_async(self) -> tuple[LeafSpec, ...]:
        """As `learn_spec`, without blocking the event loop."""
        began, is_told = self.clock(), False
        while not self.outbox.is_over():
            is_told = await self.wait_async(began, "aspec()", is_told=is_told)
            if (leaves := self._look_at_next()) is not None:
                return leaves
        self._raise_for_spec()

    def _look_at_next(self) -> tuple[LeafSpec, ...] | None:
        item = self.outbox.peek_nowait()
        if item is EMPTY or (item.finish is not None and not self._finish(item)):
            return None
        return self.factory.specs.learn(item, x64=self.run.context.x64)

    def _raise_for_spec(self) -> NoReturn:
        self._has_failed()
        end = self.failure_or(BatchError("the source has no batch, so it cannot be told what one looks like"))
        try:
            raise end
        finally:
            del self, end  # the traceback holds this frame

    def is_under_these_settings(self) -> bool:
        """Whether the JAX settings in force in this thread are those of the run."""
        return self.run.context.is_in_force()
