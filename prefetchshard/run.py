"""One run: its queues and threads, and how they end.

Every thread is a daemon that is stopped and joined before the interpreter goes down: a daemon thread that is inside JAX when the
interpreter finalises aborts the process, a thread that is no daemon holds it for as long as a source blocks. The source's own code is
never run by the thread that calls JAX, so that a source that does not return can be given up on.
"""

from __future__ import annotations

import atexit
import contextvars
import os
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

from prefetchshard.bounded_queue import BoundedQueue
from prefetchshard.clock import Clock
from prefetchshard.errors import StuckThreadWarning, UsedUpError
from prefetchshard.jax_context import JaxContext
from prefetchshard.reading import Reader
from prefetchshard.stages import HostQueue, Pace, Placer, ReadyQueue, transfer
from prefetchshard.staging import Staging
from prefetchshard.statistics import Meters, Stats

THREAD_PREFIX = "prefetchshard-"
GRACE_SECONDS = 0.25
"""How long a source may take to come out by itself before it is closed from outside."""
GIVE_UP_SECONDS = 1.5
"""How long a closing run waits for a source that does not return."""
TRANSFER_SECONDS = 60.0
"""How long it waits for the transfer thread, which never runs the source's code: only for a transfer or a compilation."""

_live: set[Run] = set()


class Run:
    """The threads and queues between a source and a consumer.

    Args:
        reader: reads the source into `inbox`.
        inbox: host batches.
        placer: puts them on the devices.
        outbox: ready batches.
        pace: how many transfers may be on their way at once.
        meters: what is measured.
        staging: the ring.
        workers: reader threads, for the statistics.
        context: the caller's JAX settings.
        clock: monotonic seconds.

    Thread safety: every method may be called from any thread; `cancel` also from a finaliser.
    """

    def __init__(
        self,
        reader: Reader,
        inbox: HostQueue,
        placer: Placer,
        outbox: ReadyQueue,
        *,
        pace: Pace,
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
        self._closing = threading.Lock()  # one closer at a time; the others wait for it
        self._left = 0
        self._left_lock = threading.Lock()  # guards _left
        self._source_threads = [self._thread(name, body, context) for name, body in reader.bodies]
        self._transfer_thread = self._thread("transfer", lambda: transfer(inbox, placer, outbox, meters, pace), context)

    def _thread(self, name: str, body: Callable[[], None], context: JaxContext) -> threading.Thread:
        variables = contextvars.copy_context()

        def run() -> None:
            try:
                with context.in_force():
                    body()
            finally:
                self._thread_ended()

        self._left += 1
        return threading.Thread(target=lambda: variables.run(run), name=THREAD_PREFIX + name, daemon=True)

    def start(self) -> None:
        """Begin to read."""
        _live.add(self)
        for thread in (*self._source_threads, self._transfer_thread):
            thread.start()

    def _thread_ended(self) -> None:
        with self._left_lock:
            self._left -= 1
            ended = self._left == 0
        if ended:
            _live.discard(self)
            self._reader = None  # lets go of the source, also where nobody closes the run

    def check_process(self) -> None:
        """Whether this is the process that the threads are in.

        Raises:
            UsedUpError: the run was carried into a forked child.
        """
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
        if reader is not None:
            reader.interrupt()

    def close(self) -> None:
        """Stop, and wait until the threads have ended, in bounded time. Further calls do nothing."""
        self.closed = True
        self.cancel()
        if self._pid != os.getpid():
            return
        with self._closing:
            self._join()
            self.outbox.clear()
            self._inbox.clear()

    def _join(self) -> None:
        me = threading.current_thread()
        deadline = time.monotonic() + GRACE_SECONDS
        _join_until([t for t in (*self._source_threads, self._transfer_thread) if t is not me], deadline)
        stuck = [t for t in self._source_threads if t.is_alive() and t is not me]
        reader = self._reader
        if stuck and reader is not None:
            deadline = time.monotonic() + GIVE_UP_SECONDS - GRACE_SECONDS
            closer = threading.Thread(target=_quietly, args=(reader.close_from_outside,), name=THREAD_PREFIX + "closer", daemon=True)
            closer.start()
            _join_until([*stuck, closer], deadline)
        if self._transfer_thread is not me:
            _join_until([self._transfer_thread], time.monotonic() + TRANSFER_SECONDS)
        for thread in self._source_threads:
            if thread.is_alive() and thread is not me:
                _warn_of(thread)
        self._source_threads = []

    def stats(self) -> Stats:
        """What the run has done so far."""
        return self.meters.stats(workers=self._workers, host=self._inbox.stats(), ready=self.outbox.stats(), staging=self._staging.stats())


def _join_until(threads: list[threading.Thread], deadline: float) -> None:
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def _quietly(function: Callable[[], None]) -> None:
    try:
        function()
    except BaseException as error:  # noqa: BLE001 - the source's close; the run is over and has nobody to tell but the reader of warnings
        warnings.warn(f"closing the source raised {type(error).__name__}: {error}", StuckThreadWarning, stacklevel=2)


def _warn_of(thread: threading.Thread) -> None:
    frame = sys._current_frames().get(thread.ident or 0)
    stack = "" if frame is None else "".join(traceback.format_stack(frame)[-6:])
    warnings.warn(
        f"thread {thread.name} is still inside the source's own code and was given up on; it ends when that code returns. "
        f"Give the source a close() that makes it return. Its stack:\n{stack}",
        StuckThreadWarning,
        stacklevel=5,
    )


def _close_all() -> None:
    """At exit: tell all runs first, so that they end side by side."""
    runs: list[Any] = list(_live)
    for run in runs:
        run.cancel()
    for run in runs:
        run.close()


# Registered after JAX's own clean-up, so run before it: the transfer threads have left JAX when it goes down.
atexit.register(_close_all)


def new_queue(capacity: int, clock: Clock, *, held_until_release: bool = False) -> BoundedQueue[Any]:
    return BoundedQueue(capacity, held_until_release=held_until_release, clock=clock)
