"""The event loops in which the async sources of a run are pulled, and what is said where one of them cannot make progress."""

from __future__ import annotations

import contextvars
import logging
import threading
import time
from traceback import FrameSummary
from typing import Protocol

import anyio

from prefetchshard.base.errors import SourceError
from prefetchshard.base.event_loop import HomeLoop, running_loop
from prefetchshard.base.jax_context import JaxContext
from prefetchshard.base.stacks import stack_of
from prefetchshard.base.waiters import Waiters

LOOP_THREAD = "prefetchshard-loop"
LOOK_SECONDS = 2.5
"""Who waits for a batch of an async source looks this often whether its loop can make progress, and speaks after the second look."""

_log = logging.getLogger(__name__)


class Pulled(Protocol):
    """What is pulled in an event loop: one iteration over an async iterable.

    Attributes:
        asked_for: the number of the item that it was asked for and has not given yet; None where there is none.
    """

    asked_for: int | None

    def loop_is_gone(self) -> None:
        """Nothing will come any more: the loop was closed without another turn."""
        ...

    def wake(self) -> None:
        """Let who waits look again."""
        ...

    def stack(self) -> list[FrameSummary]:
        """Where it awaits; empty where that cannot be told, or its code runs."""
        ...


class Loops:
    """The event loops of one run: the one in which it was begun, and one of its own, which serves all its epochs.

    Args:
        threads: list to which the thread of the own loop is added.
        began_in: the loop in which `aiter` began the run; None: `iter` began it.
        made_in: the loop in which the loader was made, if any.
        reuses_buffers: an async source may overwrite an item as soon as it is asked for the next one.

    Attributes:
        threads, began_in, reuses_buffers: as above.
        home: the loop of the user's in which the source is pulled; None: none, or not known yet.
        home_is_blocked: closing the run blocks it, so that nothing can be awaited there meanwhile.

    Thread safety: `own`, `begin` and `close` are called by the source's thread; the rest by any thread.
    """

    def __init__(
        self,
        threads: list[threading.Thread],
        began_in: HomeLoop | None = None,
        made_in: HomeLoop | None = None,
        *,
        reuses_buffers: bool = True,
    ) -> None:
        self.threads = threads
        self.began_in = began_in
        self.reuses_buffers = reuses_buffers
        self.home: HomeLoop | None = None
        self.home_is_blocked = False
        self._made_in = made_in
        self._pulled: Pulled | None = None
        self._is_chosen = False
        self._has_spoken = False
        self._look: _Look | None = None
        self._thread: threading.Thread | None = None
        self._own: HomeLoop | None = None
        self._stopping: anyio.Event | None = None
        self._failure: BaseException | None = None
        self._running = Waiters()

    # -- in the source's thread

    def own(self) -> HomeLoop:
        """The run's own loop; the first call starts it.

        Raises:
            SourceError: it could not be started.
        """
        if self._thread is None:
            variables, context = contextvars.copy_context(), JaxContext()
            self._thread = threading.Thread(target=lambda: variables.run(self._run, context), name=LOOP_THREAD, daemon=True)
            self.threads.append(self._thread)
            self._thread.start()
            self._running.wait(lambda: self._own is not None or self._failure is not None)
        if self._own is None:
            raise SourceError("no event loop could be started for the async source") from self._failure
        return self._own

    def _run(self, context: JaxContext) -> None:
        try:
            with context.in_force():
                anyio.run(self._main, backend="asyncio")
        except BaseException as error:  # noqa: BLE001 - a thread has no caller; the pump reports to the thread that waits for an item
            self._failure = error
            self._running.wake()

    async def _main(self) -> None:
        self._stopping = anyio.Event()
        self._own = HomeLoop()
        self._running.wake()
        await self._stopping.wait()

    def begin(self, pulled: Pulled | None, home: HomeLoop | None = None, *, is_chosen: bool = False) -> None:
        """From here on this is pulled; None: nothing that needs a loop.

        Args:
            pulled: what is pulled.
            home: the loop of the user's that does it; None: the own one.
            is_chosen: the user said which.
        """
        self._pulled, self.home, self._is_chosen = pulled, home, is_chosen

    @property
    def home_thread(self) -> int | None:
        """The thread of the loop of the user's in which the source is pulled, if it is."""
        return None if self.home is None else self.home.thread

    def close(self) -> None:
        """Stop the own loop, and cancel the tasks that the source left in it."""
        self._pulled = None
        if self._thread is not None and self._own is not None and self._stopping is not None:
            self._own.call_soon(self._stopping.set)
            self._thread.join()

    # -- for who closes the run

    def will_block(self) -> None:
        """This thread is about to wait until the run's threads have ended. In the thread of `home` that blocks the clean-up."""
        pulled = self._pulled
        if self.home is not None and self.home.runs_here():
            self.home_is_blocked = True
            if pulled is not None:
                pulled.wake()

    # -- for who waits for a batch

    def check_thread(self) -> None:
        """Whether this thread may block.

        Raises:
            RuntimeError: it is the thread of the event loop that has to produce the item.
        """
        if self.home is not None and self.home.runs_here():
            raise RuntimeError(
                "the source is pulled in the event loop of this thread (where `aiter` began the run, or ps.from_this_loop was called), so "
                "waiting here would block the loop that has to produce the batch: use `async for`, consume in another thread, or give the "
                "source a loop of its own with ps.in_own_loop"
            )

    def stack(self) -> list[FrameSummary]:
        """Where the source awaits that is asked for an item; else where the thread of its loop is; empty where nothing is asked for."""
        pulled, home = self._pulled, self.home or self._own
        if pulled is None or home is None or pulled.asked_for is None:
            return []
        return pulled.stack() or stack_of(home.thread)

    def complaint(self) -> str | None:
        """Call it after each `LOOK_SECONDS` of waiting: why nothing may ever come, in words, once a run; None while nothing speaks for it."""
        pulled, home, now = self._pulled, self.home, time.monotonic()
        if self._has_spoken or pulled is None or (item := pulled.asked_for) is None:
            self._look = None
            return None
        last = self._look
        if last is None or last.pulled is not pulled or last.item != item:
            self._look_at(pulled, item, home)
            return None
        if last.is_gone or now - last.at < LOOK_SECONDS / 2:  # or another one who waits came first
            return None
        words = self._words(home, runs=last.is_answered)
        if not self._has_spoken:  # a loop that turned then may have been stopped, blocked or closed since
            self._look_at(pulled, item, home)
        return words

    def _look_at(self, pulled: Pulled, item: int, home: HomeLoop | None) -> None:
        self._look = look = _Look(pulled, item, time.monotonic())
        if home is not None and not home.call_soon(look.answer):
            look.is_gone = True  # who pulls says so, as soon as its thread comes to it
            pulled.loop_is_gone()

    def _words(self, home: HomeLoop | None, *, runs: bool) -> str | None:
        since = f"the async source has not given an item for {LOOK_SECONDS:g} seconds or longer"
        if home is not None and not runs:
            self._has_spoken = True
            return (
                f"{since}, and the event loop that pulls it does not run: it was stopped, or something blocks it. It is pulled in the loop "
                f"where `aiter` began the run, or where ps.from_this_loop was called; ps.in_own_loop(source) gives it a loop of its own"
            )
        here = running_loop()
        if home is None:
            others = here is not None or self._made_in is not None
            where = "a loop of its own" + ("" if self._is_chosen else ", as the run was begun by `iter` or `spec`")
        else:
            others = self._made_in is not None and not self._made_in.is_same(home)
            where = "the loop where " + ("ps.from_this_loop was called" if self._is_chosen else "`aiter` began the run")
        if not others:
            return None
        self._has_spoken = True
        words = (
            f"{since}. It is pulled in {where}; if it waits for something of another event loop, it waits for ever. Begin the run in that "
            f"loop with `async for` (or `await loader.aspec()`), or mark the source there with ps.from_this_loop. If it is only slow, "
            f"ps.in_own_loop(source) says so"
        )
        if self._is_chosen:
            _log.warning(words)
            return None
        return words


class _Look:
    """What was seen when somebody looked.

    Attributes:
        pulled, item: what was asked for which item.
        at: when, in seconds of the monotonic clock.
        is_answered: whether its loop has turned since.
        is_gone: whether that was closed.
    """

    __slots__ = ("at", "is_answered", "is_gone", "item", "pulled")

    def __init__(self, pulled: Pulled, item: int, at: float) -> None:
        self.pulled = pulled
        self.item = item
        self.at = at
        self.is_answered = False
        self.is_gone = False

    def answer(self) -> None:
        self.is_answered = True


FOREIGN = ("no running event loop", "must be called from async context", "different loop", "different event loop")
"""In what the async libraries say where something is used in a loop that is not its own."""


def hint_at_loop(error: BaseException) -> None:
    """Note on an error that comes from being in another event loop how to choose the loop."""
    if isinstance(error, RuntimeError) and any(words in str(error) for words in FOREIGN):
        error.add_note(
            "prefetchshard: while pulling an async source in the event loop where `aiter` began the run, or in one of its own (asyncio) "
            "where `iter` did; ps.from_this_loop(source) and ps.in_own_loop(source) choose the loop"
        )
