"""The threads of a run. Their start cannot be interrupted half-way, and threads can join and leave while the run goes on.

Every thread is a daemon, as any other would keep the interpreter alive for as long as a source blocks. A thread that runs the source's
own code may be abandoned; the others never run such code, and end soon after they are told to.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable

from prefetchshard.base.event_loop import leave_event_loop
from prefetchshard.base.jax_context import JaxContext
from prefetchshard.base.threads import run_uncut
from prefetchshard.running.before_3_14 import LastingThread

THREAD_PREFIX = "prefetchshard-"

_STARTER, _CLOSER = "starter", "closer"


class GroupThread(LastingThread):
    """One thread of a group.

    Attributes:
        runs_source: it runs the source's own code.
        ends_soon: the source's code cannot block it, so it ends soon once told to.
        has_left: its body has returned.
    """

    def __init__(self, name: str, body: Callable[[GroupThread], None], *, runs_source: bool) -> None:
        super().__init__(THREAD_PREFIX + name, lambda: body(self))
        self.runs_source = runs_source
        self.ends_soon = not runs_source
        self.has_left = False
        self._claims: dict[str, list[str]] = {}

    def claim(self, who: str) -> bool:
        """Claim the decision whether the thread runs. True for the first caller only."""
        mine = [who]
        return self._claims.setdefault("first", mine) is mine  # one call into C, so atomic for other threads and for Ctrl-C

    @property
    def may_run(self) -> bool:
        """Whether it runs or may still start."""
        return not self.has_left and self._claims.get("first") != [_CLOSER]


class ThreadGroup:
    """The threads of a run.

    Args:
        context: the JAX settings for the threads.
        helpers: additional threads of the source; a shared list to which others append.
        may_begin: called by each thread at its start; if it returns False, the thread ends at once.
        on_fault: called with the exception that a body raised.
        on_leave: called by each thread when its body has returned.

    Thread safety: call every method from any thread. If Ctrl-C interrupts one, calling it again completes it.

    Attributes:
        has_begun: its threads are being started, or were.
    """

    def __init__(
        self,
        context: JaxContext,
        helpers: list[threading.Thread],
        *,
        may_begin: Callable[[], bool],
        on_fault: Callable[[BaseException], None],
        on_leave: Callable[[], None],
    ) -> None:
        self.helpers = helpers
        self._context = context
        self._may_begin = may_begin
        self._on_fault = on_fault
        self._on_leave = on_leave
        self._threads: dict[GroupThread, None] = {}  # in the order in which they were added
        # The caller's, for those that join later too: whoever adds them may be running the source's own code
        self._variables = contextvars.copy_context()
        self._variables.run(leave_event_loop)
        self._is_refusing = False
        self.has_begun = False

    def add(self, name: str, body: Callable[[], None], *, runs_source: bool = True) -> None:
        """Add a thread. It starts with the others, or at once if they have started, and leaves the group when its body returns.

        Nothing starts once the group refuses.

        Raises:
            RuntimeError: no more threads can be started.
        """
        for thread in list(self._threads):
            if thread.has_left and not thread.is_alive():
                self._threads.pop(thread, None)
        variables = self._variables.copy()
        bodies = [body]
        thread = GroupThread(name, lambda thread: variables.run(self._run, thread, bodies), runs_source=runs_source)
        self._threads[thread] = None
        if self._is_refusing:  # looked at after it can be found: either `refuse` finds it, or this sees that
            self.refuse()
        elif self.has_begun:
            run_uncut(self._start_all)

    def start(self) -> None:
        """Start the threads, unless that was done.

        Raises:
            RuntimeError: no more threads can be started. Those that started keep running.
        """
        if not self.has_begun:
            run_uncut(self._start_all)

    def _start_all(self) -> None:
        self.has_begun = True
        for thread in list(self._threads):
            if thread.claim(_STARTER):
                try:
                    thread.start()
                except BaseException:
                    thread.has_left = True
                    thread.set_done()
                    raise

    def refuse(self) -> None:
        """Prevent threads that have not started from starting, and those that are added later."""
        self._is_refusing = True
        for thread in list(self._threads):
            if thread.claim(_CLOSER):
                thread.set_done()

    def _run(self, thread: GroupThread, bodies: list[Callable[[], None]]) -> None:
        try:
            if self._may_begin():
                with self._context.in_force():
                    bodies.pop()()  # drops the reference to the body, which holds the reader and so the source
        except BaseException as error:  # noqa: BLE001 - bodies catch users' errors: this is a bug of ours, which must not hang the consumer
            self._on_fault(error)
        finally:
            bodies.clear()
            thread.has_left = True
            self._on_leave()
            thread.ends_soon = True

    @property
    def in_source(self) -> list[threading.Thread]:
        """The threads that run the source's own code, with the helpers."""
        return [*(thread for thread in list(self._threads) if thread.runs_source), *self.helpers]

    @property
    def outside_source(self) -> list[threading.Thread]:
        """The threads that never run the source's own code."""
        return [thread for thread in list(self._threads) if not thread.runs_source]

    @property
    def has_left_source(self) -> bool:
        """Whether none of its threads runs the source's own code any more."""
        return not any(thread.runs_source and thread.may_run for thread in list(self._threads))

    @property
    def has_ended(self) -> bool:
        """Whether none of its threads runs, and none is about to."""
        return not (self.has_begun and any(thread.may_run for thread in list(self._threads)))

    @property
    def is_gone(self) -> bool:
        """Whether it has ended, and none of its threads exists any more: one whose body has returned takes a while to go."""
        return self.has_ended and not any(threading.Thread.is_alive(thread) for thread in list(self._threads))

    def __repr__(self) -> str:
        names = [thread.name.removeprefix(THREAD_PREFIX) for thread in list(self._threads) if thread.may_run]
        return f"<ThreadGroup {'of' if self.has_begun else 'not begun, of'} {', '.join(names) or 'none'}>"


def ending_threads() -> list[threading.Thread]:
    """All live threads that no source can block, including those of dropped runs, which may be inside JAX while they drop batches."""
    return [thread for thread in threading.enumerate() if isinstance(thread, GroupThread) and thread.ends_soon]
