"""One run: its queues, its threads, its figures.

The source's own code is never run by the thread that calls JAX, so that a source that does not return can be given up on.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from typing import Any

from prefetchshard.base.clock import Clock
from prefetchshard.base.errors import PrefetchWarning, UsedUpError
from prefetchshard.base.jax_context import JaxContext
from prefetchshard.base.threads import run_uncut
from prefetchshard.measuring.stats import Meters, Stats
from prefetchshard.placing.placer import Placer
from prefetchshard.placing.transfer_loops import ReadyQueue, TransferLimits, transfer_bodies
from prefetchshard.queues.bounded_queue import BoundedQueue
from prefetchshard.reading.reading_plan import Reader
from prefetchshard.reading.sequencer import Sequencer
from prefetchshard.running import at_exit
from prefetchshard.running.before_3_14 import note_consumer
from prefetchshard.running.closing import close_runs
from prefetchshard.running.thread_group import THREAD_PREFIX, ThreadGroup
from prefetchshard.staging.aliased import Staging

_log = logging.getLogger(__name__)


class Run:
    """The threads and queues between a source and a consumer.

    Args:
        reader: reads the source into `inbox`.
        inbox: host batches.
        placer: puts them on the devices.
        outbox: ready batches.
        transfer_limits: how many transfers may be on their way at once.
        meters: what is measured.
        staging: the ring.
        workers: reader threads, for the statistics.
        context: the caller's JAX settings.
        clock: monotonic seconds.

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
        meters: Meters,
        staging: Staging,
        workers: int,
        context: JaxContext,
        clock: Clock,
    ) -> None:
        self.outbox = outbox
        self.meters = meters
        self.clock = clock
        self.context = context
        self.began_at = clock()
        self.closed = False
        self._reader: Reader | None = reader
        self._inbox = inbox
        self._staging = staging
        self._workers = workers
        self._pid = os.getpid()
        self._waited = False  # a closer has waited for the threads; the next one need not
        self._close_failures = reader.close_failures
        # Weakly: the threads of a run that was dropped end, and let go of its source, without the garbage collector
        this = weakref.ref(self)
        self.threads = ThreadGroup(
            context,
            reader.helpers,
            may_begin=lambda: (run := this()) is not None and run._may_begin(),
            on_fault=outbox.end,
            on_leave=lambda: None if (run := this()) is None else run._thread_left(),
        )
        for name, body in reader.bodies:
            self.threads.add(name, body)
        for name, body in transfer_bodies(inbox, placer, outbox, meters, transfer_limits):
            self.threads.add(name, body, runs_source=False)

    def start(self) -> None:
        """Begin to read, unless it has begun. Where Ctrl-C cuts the wait for that it begins all the same.

        Raises:
            UsedUpError: the interpreter goes down.
            RuntimeError: there can be no more threads.
        """
        at_exit.hold_daemons()
        if at_exit.is_exiting():
            raise UsedUpError("the interpreter goes down: no run of a loader can start any more")
        if self.threads.has_begun:
            return
        at_exit.live.add(self)
        run_uncut(self._start)

    def _start(self) -> None:
        try:
            self.threads.start()
        except BaseException:  # there can be no more threads
            self.closed = True
            self.cancel()
            self.threads.refuse()
            self._thread_left()
            raise
        _log.debug("run %#x begins: %s", id(self), self.threads)

    def _may_begin(self) -> bool:
        if at_exit.is_exiting():  # too late to be waited for
            self.closed = True
            self.cancel()
            return False
        return True

    def _thread_left(self) -> None:
        if self.threads.has_left_source:
            self._reader = None  # lets go of the source, whose own code that may run, also where nobody closes the run
        if self.threads.has_ended:
            if self.outbox.cancelled:
                self._clear()
            self._retire()

    def _retire(self) -> None:
        try:
            at_exit.live.remove(self)
        except KeyError:  # several threads may see that all have left
            return
        _log.debug("run %#x has ended", id(self))

    def _clear(self) -> None:
        self.outbox.clear()
        self._inbox.clear()

    @property
    def has_ended(self) -> bool:
        """Whether all of its threads have ended, or none has begun."""
        return self.threads.has_ended

    def check_consumer(self) -> None:
        """Note which thread takes batches, and refuse where this is not the process that the run's threads are in.

        Raises:
            UsedUpError: the run was carried into a forked child.
        """
        note_consumer(self.meters)
        if self._pid != os.getpid():
            raise UsedUpError(
                "this loader's threads are in the parent of this forked process; make the loader in the child (and note that JAX itself "
                "does not survive a fork: use the spawn method)"
            )

    def cancel(self) -> None:
        """Tell every thread that nothing more is wanted. Never blocks, takes no lock."""
        self.outbox.cancel()
        self._inbox.cancel()
        reader = self._reader
        if reader is not None and self._pid == os.getpid():
            reader.interrupt()

    def abandon(self) -> None:
        """`cancel` where nobody is left who could take a batch. Never blocks, takes no lock."""
        self.closed = True
        self.cancel()
        if self.threads.has_ended:  # else the last thread does it
            self._clear()
            at_exit.live.discard(self)  # no word of it: logging takes locks

    def close(self) -> None:
        """Stop, and wait until the threads have ended, in bounded time. Further calls do nothing."""
        close_runs([self])

    # -- the steps of closing, for `close_runs`

    def tell(self) -> bool:
        """Tell the threads to end. Whether the caller should wait for them: not twice, and not from one of them."""
        self.closed = True
        self.cancel()
        if self._waited or self._pid != os.getpid():
            return False
        self.threads.refuse()
        if threading.current_thread() in (*self.threads.in_source, *self.threads.beside_source):
            return False
        _log.debug("run %#x closes: %s", id(self), self.threads)
        return True

    def close_source(self) -> None:
        """Close the source from outside where a thread is still inside it. Does not wait for that."""
        reader = self._reader
        if reader is None or not any(thread.is_alive() for thread in self.threads.in_source):
            return
        closer = threading.Thread(target=reader.close_from_outside, name=THREAD_PREFIX + "closer", daemon=True)
        self.threads.helpers.append(closer)
        try:
            run_uncut(closer.start)
        except RuntimeError:  # the interpreter goes down, and starts no more threads
            pass

    def finish(self) -> list[Warning]:
        """Drop what is left. What there is to say of how the source closed."""
        self._waited = True
        self._clear()
        if self.threads.has_ended:  # none began, where Ctrl-C cut its start
            self._retire()
        failures, self._close_failures = self._close_failures, []
        return [PrefetchWarning(f"closing the source raised {type(f).__name__}: {f}") for f in failures]

    def stats(self) -> Stats:
        """What the run has done so far."""
        return self.meters.stats(workers=self._workers, host=self._inbox.stats(), ready=self.outbox.stats(), staging=self._staging.stats())


def new_queue(capacity: int, clock: Clock, *, held_until_release: bool = False) -> BoundedQueue[Any]:
    return BoundedQueue(capacity, held_until_release=held_until_release, clock=clock)
