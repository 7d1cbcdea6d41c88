"""One run: its queues, its threads, its statistics.

The thread that calls JAX never runs the source's own code, so a thread in a source that does not return can be abandoned.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable

from prefetchshard.base.errors import PrefetchWarning, UsedUpError
from prefetchshard.base.jax_context import JaxContext
from prefetchshard.base.threads import run_uncut
from prefetchshard.measuring.recorder import Recorder
from prefetchshard.measuring.stats import Stats
from prefetchshard.measuring.window import Window, check_seconds
from prefetchshard.placing.placer import Placer
from prefetchshard.placing.transfer_loops import ReadyQueue, TransferLimits, transfer
from prefetchshard.reading.reading_plan import Reader
from prefetchshard.reading.sequencer import Sequencer
from prefetchshard.running import at_exit
from prefetchshard.running.before_3_14 import note_consumer
from prefetchshard.running.closing import EXIT, close_runs
from prefetchshard.running.thread_group import THREAD_PREFIX, GroupThread, ThreadGroup
from prefetchshard.sources.loops import Loops
from prefetchshard.staging.layout import Staging
from prefetchshard.streaming.choosing import CopyChoice

_log = logging.getLogger(__name__)


class Run:
    """The threads and queues between a source and a consumer.

    Args:
        reader: reads the source into `inbox`.
        inbox: the queue of host batches.
        placer: puts them on the devices.
        outbox: the queue of placed batches.
        transfer_limits: how many transfers may be pending.
        recorder: measures what its threads do.
        staging: the staging ring.
        context: the caller's JAX settings.
        loops: in which an async source is pulled; None where there is none for sure.
        copy_choice: how it copies, which may be found out beside its first batches.

    Thread safety: every method may be called from any thread; `cancel` and `abandon` also from a finaliser.
    """

    def __init__(
        self,
        reader: Reader,
        inbox: Sequencer,
        placer: Placer,
        outbox: ReadyQueue,
        *,
        transfer_limits: TransferLimits,
        recorder: Recorder,
        staging: Staging,
        context: JaxContext,
        loops: Loops | None,
        copy_choice: CopyChoice,
    ) -> None:
        self.outbox = outbox
        self.recorder = recorder
        self.window = Window(recorder.began_at)
        self.context = context
        self.loops = loops
        self.closed = False
        self._reader: Reader | None = reader
        self._interrupt = reader.interrupt
        self._inbox = inbox
        self._staging = staging
        self._crew = reader.crew
        self._pid = os.getpid()
        self._exit = EXIT  # an attribute outlives the module
        self._waited = False  # whether a close has waited for the threads; later ones need not
        self._close_failures = reader.close_failures
        self._closing_in = reader.closing_in
        self._closers: list[threading.Thread] = []
        # A weak reference, so that a dropped run is freed without the garbage collector: its threads end and release the source.
        this = weakref.ref(self)
        self.threads = ThreadGroup(
            context,
            reader.helpers,
            may_begin=lambda: (run := this()) is not None and run._may_begin(),
            on_fault=outbox.end,
            on_leave=lambda: None if (run := this()) is None else run._thread_left(),
        )
        copy_choice.start = lambda name, body: None if (run := this()) is None else run._start_beside(name, body)
        reader.crew.start = lambda name, body: (run := this()) is not None and run._start_reader(name, body)
        for name, body in reader.bodies:
            self.threads.add(name, body)
        self.threads.add("transfer", lambda: transfer(inbox, placer, outbox, transfer_limits, recorder), runs_source=False)

    def start(self) -> None:
        """Start the threads, unless that was done. If Ctrl-C interrupts the call, they start all the same.

        Raises:
            UsedUpError: the interpreter is exiting.
            RuntimeError: no more threads can be started.
        """
        at_exit.hold_daemons()
        if at_exit.is_exiting():
            raise UsedUpError("the interpreter is exiting: no run of a loader can start any more")
        if self.threads.has_begun:
            return
        at_exit.live.add(self)
        run_uncut(self._start)

    def _start(self) -> None:
        try:
            self.threads.start()
        except BaseException:
            self.closed = True
            self.cancel()
            self.threads.refuse()
            self._thread_left()
            raise
        _log.debug("run %#x begins: %s", id(self), self.threads)

    def _start_beside(self, name: str, body: Callable[[], None]) -> None:
        if self.outbox.cancelled:
            return
        try:
            self.threads.add(name, body, runs_source=False)
        except RuntimeError as error:  # they come without what it finds out
            _log.info("run %#x does without its thread %s: %s", id(self), name, error)

    def _start_reader(self, name: str, body: Callable[[], None]) -> bool:
        if self.outbox.cancelled:
            return False
        self.threads.add(name, body)
        return True

    def _may_begin(self) -> bool:
        if at_exit.is_exiting():  # exit may have stopped waiting for threads already
            self.closed = True
            self.cancel()
            return False
        return True

    def _thread_left(self) -> None:
        if self.threads.has_left_source:
            self._reader = None  # releases the source, even if nobody closes the run; may run the source's own code
        if self.threads.has_ended:
            if self.outbox.cancelled:
                self._clear()
            self._retire()

    def _retire(self) -> None:
        try:
            at_exit.live.remove(self)
        except KeyError:  # several threads may see that all have left
            return
        _log.debug("run %#x has ended; the longest spans: %s", id(self), self.recorder)

    def _clear(self) -> None:
        self.outbox.clear()
        self._inbox.clear()

    @property
    def has_ended(self) -> bool:
        """Whether all of its threads have ended, or none has started."""
        return self.threads.has_ended

    @property
    def has_read(self) -> bool:
        """Whether the first batch that was not dispatched is complete on the host."""
        return self._inbox.is_read()

    def check_consumer(self) -> None:
        """Record that this thread takes batches, and check that it is in the process of the run's threads.

        Raises:
            UsedUpError: this is a forked child of that process.
        """
        note_consumer(self.recorder)
        if self._pid != os.getpid():
            raise UsedUpError(
                "this loader's threads are in the parent of this forked process; make the loader in the child (and note that JAX itself "
                "does not survive a fork: use the spawn method)"
            )

    def cancel(self) -> None:
        """Tell every thread to end. Never blocks, takes no lock."""
        self.outbox.cancel()
        self._inbox.cancel()
        if self._reader is not None and self._pid == os.getpid():
            self._interrupt()

    def abandon(self) -> None:
        """Cancel a run that has no consumer left. Never blocks, takes no lock."""
        if self._exit.is_over:
            return
        self.closed = True
        self.cancel()
        if self.threads.has_ended:  # else the last thread does it
            self._clear()
            at_exit.live.discard(self)  # not `_retire`: it logs, and logging takes locks

    def close(self) -> None:
        """Stop the run, and wait in bounded time until its threads have ended. Further calls do nothing."""
        close_runs([self])

    # -- the steps of closing, for `close_runs`; see `Closable`

    def request_stop(self) -> bool:
        if self._exit.is_over:
            return False
        self.closed = True
        self.cancel()
        if self._waited or self._pid != os.getpid():
            return False
        self.threads.refuse()
        if threading.current_thread() in (*self.threads.in_source, *self.threads.outside_source):
            return False
        if self.loops is not None:
            self.loops.will_block()
        _log.debug("run %#x closes: %s", id(self), self.threads)
        return True

    def close_source(self) -> None:
        if self._reader is None or not any(thread.is_alive() for thread in self.threads.in_source):
            return
        closer = threading.Thread(target=self._close_from_outside, name=THREAD_PREFIX + "closer", daemon=True)
        self._closers.append(closer)
        self.threads.helpers.append(closer)
        try:
            run_uncut(closer.start)
        except RuntimeError:  # the interpreter is exiting, and starts no more threads
            pass

    def _close_from_outside(self) -> None:
        reader = self._reader  # held by this thread alone, not by who closes the run: the last to hold it runs the source's destructor
        if reader is not None:
            reader.close_from_outside()

    def closing_threads(self) -> list[threading.Thread]:
        idents = self._closing_in
        # A thread whose body has returned lets go of the source, whose destructor may take its time; so may a closer
        return [
            thread
            for thread in self.threads.in_source
            if thread.is_alive()
            and (thread.ident in idents or thread in self._closers or (isinstance(thread, GroupThread) and thread.has_left))
        ]

    def finish(self) -> list[Warning]:
        self._waited = True
        self._clear()
        if self.threads.has_ended:  # else the last thread does it; Ctrl-C may have left the run without threads
            self._retire()
        failures, self._close_failures = self._close_failures, []
        return [PrefetchWarning(f"closing the source raised {type(f).__name__}: {f}") for f in failures]

    def stats(self, last_seconds: float | None = None) -> Stats:
        """The statistics so far, or of about the last so many seconds.

        Raises:
            ConfigError: of so many seconds there are none.
        """
        if last_seconds is not None:
            check_seconds(last_seconds)
        stats = self.recorder.stats(
            workers=self._crew.wanted, host=self._inbox.stats(), ready=self.outbox.stats(), staging=self._staging.stats()
        )
        return stats if last_seconds is None else self.window.since(stats, self.recorder.clock(), last_seconds)

    def look(self, now: float) -> None:
        """Keep a look at the statistics, where one is due; `now` in seconds of the run's clock. Never raises, but for Ctrl-C."""
        self.window.look(now, self.stats)
