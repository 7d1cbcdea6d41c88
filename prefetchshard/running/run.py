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
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any

from prefetchshard.base.clock import Clock
from prefetchshard.base.errors import PrefetchWarning, StuckThreadWarning, UsedUpError
from prefetchshard.base.jax_context import JaxContext
from prefetchshard.base.waiters import Waiters
from prefetchshard.measuring.stats import Meters, Stats
from prefetchshard.placing.placer import Placer
from prefetchshard.placing.transfer_loops import ReadyQueue, TransferLimits, transfer_bodies
from prefetchshard.queues.bounded_queue import BoundedQueue
from prefetchshard.reading.reading_plan import Reader
from prefetchshard.reading.sequencer import Sequencer
from prefetchshard.staging.aliased import Staging

THREAD_PREFIX = "prefetchshard-"
GRACE_SECONDS = 0.25
"""How long a source may take to come out by itself before it is closed from outside."""
GIVE_UP_SECONDS = 1.5
"""How long a closing run waits for a source that does not return."""
TRANSFER_SECONDS = 60.0
"""How long it waits for the transfer thread, which never runs the source's code: only for a transfer or a compilation."""
CONSUMER_SECONDS = 1.0
"""How long the end of the program waits for daemon threads to come to their next batch."""
LOOK_SECONDS = 0.2
"""How long the end of the program looks whether a source that was given up on calls JAX."""
QUIET_SECONDS = 1.0
"""How long one that does must have stayed away from JAX."""

_OF_TREES = ("jax.tree", "jax._src.tree")
"""Modules of JAX that call back what they are given, and compute nothing."""

_live: set[Run] = set()
_consumers: set[int] = set()  # idents of the threads that took batches
_held: set[int] = set()  # idents of those that are kept from going on, at exit
_holding = Waiters()
_exiting = False


class _Thread(threading.Thread):
    """A thread of a run, which can be waited for also after Ctrl-C.

    An interrupted `join` takes the thread for ended from then on (CPython 3.11 and 3.12), and one that is inside JAX at exit aborts the
    process.

    Attributes:
        is_done: its body has ended.
        ends_soon: no code of the source's holds it, once it was told to end.
    """

    def __init__(self, name: str, body: Callable[[], None], *, ends_soon: bool) -> None:
        super().__init__(target=body, name=THREAD_PREFIX + name, daemon=True)
        self.is_done = False
        self.ends_soon = ends_soon
        self._done = Waiters()

    def run(self) -> None:
        try:
            super().run()
        finally:
            self.is_done = True
            self._done.wake()

    def join(self, timeout: float | None = None) -> None:
        if self._done.wait(lambda: self.is_done, timeout):
            super().join(TRANSFER_SECONDS)

    def is_alive(self) -> bool:
        return super().is_alive() and not self.is_done


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
        inbox: Sequencer,
        placer: Placer,
        outbox: ReadyQueue,
        *,
        pace: TransferLimits,
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
        self._helpers = reader.helpers
        self._close_failures = reader.close_failures
        self._closers: list[threading.Thread] = []
        self._left: set[_Thread] = set()
        self._left_lock = threading.Lock()  # guards _left
        self._has_begun = False
        self._consumer: int | None = None  # the thread that took a batch last
        self._source_threads = [self._thread(name, body, context, ends_soon=False) for name, body in reader.bodies]
        moving = transfer_bodies(inbox, placer, outbox, meters, pace)
        self.transfer_threads = [self._thread(name, body, context, ends_soon=True) for name, body in moving]

    def _thread(self, name: str, body: Callable[[], None], context: JaxContext, *, ends_soon: bool) -> _Thread:
        variables = contextvars.copy_context()
        variables.run(_leave_event_loop)

        def run() -> None:
            try:
                if _exiting:  # begun too late to be waited for
                    self.closed = True
                    self.cancel()
                    return
                with context.in_force():
                    bodies.pop()()  # and lets go of it: what it holds of the source goes with `_reader`
            except BaseException as error:  # noqa: BLE001 - users' faults were caught before: this is ours, and still no reason to hang
                self.outbox.end(error)
            finally:
                self._thread_ended(thread)

        bodies = [body]
        thread = _Thread(name, lambda: variables.run(run), ends_soon=ends_soon)
        return thread

    def start(self) -> None:
        """Begin to read, unless it has begun.

        Raises:
            UsedUpError: the interpreter goes down.
        """
        hold_daemons()
        if _exiting:
            raise UsedUpError("the interpreter goes down: no run of a loader can start any more")
        if self._has_begun:
            return
        threads = (*self._source_threads, *self.transfer_threads)
        try:
            self._has_begun = True
            self._left.update(threads)
            _live.add(self)
            for thread in threads:
                thread.start()
        except BaseException:  # there can be no more threads, or Ctrl-C
            self.closed = True
            self.cancel()
            for thread in threads:
                if thread.ident is None:
                    self._thread_ended(thread)
            raise

    def _thread_ended(self, thread: _Thread) -> None:
        with self._left_lock:
            self._left.discard(thread)
            is_read = self._left.isdisjoint(self._source_threads)
            ended = not self._left
        if is_read:
            self._reader = None  # lets go of the source, whose own code that may run, also where nobody closes the run
        thread.ends_soon = True
        if ended:
            if self.outbox.cancelled:
                self._clear()
            _live.discard(self)

    def _clear(self) -> None:
        self.outbox.clear()
        self._inbox.clear()

    @property
    def has_ended(self) -> bool:
        """Whether all of its threads have ended."""
        return not self._left

    def check_consumer(self) -> None:
        """Note which thread takes batches, and refuse where this is not the process that the run's threads are in.

        Raises:
            UsedUpError: the run was carried into a forked child.
        """
        consumer = threading.get_ident()
        if consumer != self._consumer:
            self._consumer = consumer
            _consumers.add(consumer)
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
        """`cancel` for a finaliser: nobody is left who could take a batch."""
        self.cancel()
        if not self._left:  # else the last thread does it
            self._clear()

    def close(self) -> None:
        """Stop, and wait until the threads have ended, in bounded time. Further calls do nothing."""
        close_runs([self])

    # -- the steps of closing, for `close_runs`

    def tell(self) -> bool:
        """Tell the threads to end. Whether the caller should wait for them: not twice, and not from one of them."""
        self.closed = True
        self.cancel()
        return not self._waited and self._pid == os.getpid() and threading.current_thread() not in (*self.in_source, *self.transfer_threads)

    @property
    def in_source(self) -> list[threading.Thread]:
        """The threads that run the source's own code."""
        return [*self._source_threads, *self._helpers, *self._closers]

    def close_source(self) -> None:
        """Close the source from outside where a thread is still inside it."""
        reader = self._reader
        if reader is None or not any(thread.is_alive() for thread in self.in_source):
            return
        closer = threading.Thread(target=reader.close_from_outside, name=THREAD_PREFIX + "closer", daemon=True)
        try:
            closer.start()
        except RuntimeError:  # the interpreter goes down, and starts no more threads
            return
        self._closers.append(closer)

    def finish(self) -> list[Warning]:
        """Drop what is left. What there is to say of threads that were given up on, and of how the source closed."""
        self._waited = True
        self._clear()
        left = [thread for thread in (*self.in_source, *self.transfer_threads) if thread.is_alive()]
        failures, self._close_failures = self._close_failures, []
        found: list[Warning] = [PrefetchWarning(f"closing the source raised {type(f).__name__}: {f}") for f in failures]
        return [StuckThreadWarning("\n".join(map(_words, left))), *found] if left else found

    def stats(self) -> Stats:
        """What the run has done so far."""
        return self.meters.stats(workers=self._workers, host=self._inbox.stats(), ready=self.outbox.stats(), staging=self._staging.stats())


def close_runs(runs: Sequence[Run], *, quietly: bool = False) -> None:
    """Stop runs side by side, and wait until their threads have ended, in bounded time whatever their sources do.

    All are told first; a source that does not come out by itself is closed from outside; what stays is named and given up on.
    """
    waiting = [run for run in runs if run.tell()]
    began = time.monotonic()
    _join((thread for run in waiting for thread in (*run.in_source, *run.transfer_threads)), began + GRACE_SECONDS)
    for run in waiting:
        run.close_source()
    _join((thread for run in waiting for thread in run.in_source), began + GIVE_UP_SECONDS)
    _join((thread for run in waiting for thread in run.transfer_threads), time.monotonic() + TRANSFER_SECONDS)
    found = [warning for run in waiting for warning in run.finish()]
    for warning in () if quietly else found:
        warnings.warn(warning, stacklevel=3)


def _leave_event_loop() -> None:
    """A context that was copied in an event loop says in another thread that one runs there (sniffio)."""
    sniffio = sys.modules.get("sniffio")
    if sniffio is not None:
        sniffio.current_async_library_cvar.set(None)


def _join(threads: Iterable[threading.Thread], deadline: float) -> None:
    for thread in threads:
        if thread.ident is not None:
            thread.join(max(0.0, deadline - time.monotonic()))


def _words(thread: threading.Thread) -> str:
    frame = _frame(thread)
    stack = "" if frame is None else "".join(traceback.format_stack(frame)[-6:])
    return (
        f"thread {thread.name} is still inside the source's own code and was given up on; it ends when that code returns. "
        f"Give the source a close() that makes it return. Its stack:\n{stack}"
    )


def _frame(thread: threading.Thread) -> FrameType | None:
    return sys._current_frames().get(thread.ident or 0)  # pyright: ignore[reportPrivateUsage] - documented; the only way to a thread's stack


def hold_daemons() -> None:
    """Once the interpreter goes down, what daemon threads are left come no further than this.

    Their runs were closed for them; they must neither take that for the end of the data, nor start another run.
    """
    while _exiting and threading.current_thread() is not threading.main_thread():
        _held.add(threading.get_ident())
        _holding.wake()
        time.sleep(TRANSFER_SECONDS)


def _are_consumers_held() -> bool:
    # An ident in no frame is that of a thread that has ended
    left = _consumers - _held - {threading.get_ident()}
    return left.isdisjoint(sys._current_frames())  # pyright: ignore[reportPrivateUsage] - documented; costs no lock


def _ending() -> list[threading.Thread]:
    """The threads that end whatever a source does: also those of runs that were dropped, which are in JAX while they drop batches."""
    return [thread for thread in threading.enumerate() if isinstance(thread, _Thread) and thread.ends_soon]


def _wait_outside_jax(deadline: float) -> None:
    """A source or a transform may be given up on where it does not return, but not where it computes with JAX, or compiles.

    Frames tell it, so only what JAX does in Python: a thread counts as inside JAX until it was not seen there for `QUIET_SECONDS`, as
    the calls of compiled functions, and waiting for another thread's compilation, have no frames.
    """
    last_seen = time.monotonic() - QUIET_SECONDS + LOOK_SECONDS
    while (now := time.monotonic()) < deadline:
        left = [thread for thread in threading.enumerate() if thread.name.startswith(THREAD_PREFIX)]
        if not left:
            return
        if any(map(_is_in_jax, left)):
            last_seen = now
        elif now - last_seen > QUIET_SECONDS:
            return
        left[0].join(0.02)


def _is_in_jax(thread: threading.Thread) -> bool:
    frame = _frame(thread)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("jax.") and not name.startswith(_OF_TREES):
            return True
        frame = frame.f_back
    return False


def _close_all() -> None:
    """At exit. Threads that wait in a source may be left, what they would say is of no use any more; those that call JAX may not."""
    global _exiting
    _exiting = True
    try:
        close_runs(list(_live), quietly=True)
        # A daemon thread that takes batches may be inside JAX too, where it drops one: it comes to its next batch first, and no further
        _holding.wait(_are_consumers_held, CONSUMER_SECONDS)
    finally:  # Ctrl-C too
        deadline = time.monotonic() + TRANSFER_SECONDS
        _join(_ending(), deadline)
        _wait_outside_jax(deadline)


# Registered after JAX's own clean-up, so run before it: the transfer threads have left JAX when it goes down.
atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: (_live.clear(), _consumers.clear()))  # their threads are in the parent


def new_queue(capacity: int, clock: Clock, *, held_until_release: bool = False) -> BoundedQueue[Any]:
    return BoundedQueue(capacity, held_until_release=held_until_release, clock=clock)
