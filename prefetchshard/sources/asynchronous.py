"""Async iterables: pulled in the event loop where `aiter` began the run, in one of their own where `iter` did, or in the one chosen."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable
from traceback import FrameSummary
from typing import Any

import anyio
import anyio.lowlevel

from prefetchshard.base.errors import ConfigError, SourceError
from prefetchshard.base.event_loop import HomeLoop
from prefetchshard.base.stacks import stack_of_awaiting
from prefetchshard.base.waiters import Waiters
from prefetchshard.leaves.copying import is_small, private_copy
from prefetchshard.sources.epochs import Wrapper
from prefetchshard.sources.iterables import END, EndType, OpenSource, PulledSource, length_of
from prefetchshard.sources.loops import Loops, hint_at_loop
from prefetchshard.sources.stateful import refuse_snapshot

CLOSE_SECONDS = 8.0
"""Time limit for the clean-up of an async source; less than closing waits for a source that is inside its own close."""
TURN_SECONDS = 0.2
"""Closing waits for a clean-up in a loop of the user's while that loop turns at least this often: the wait itself may be what blocks it."""
SLICE_SECONDS = 0.0003
"""Items that come without waiting are pulled for so long before the loop's other tasks have a turn. A turn takes some microseconds."""
GATHER_SECONDS = 0.001
"""How long who waits for an item is left waiting for all that were asked for. Waking a thread costs more than an item."""


class _Pump:
    """Pulls an async iterator, as many items as a request allows, always in the same task.

    One task, because cancel scopes and task groups inside an async generator belong to the task that entered them. Several items a request,
    because one takes two thread switches. The event loop keeps running between requests, so the source's background tasks do too.

    Args:
        iterable: has `__aiter__`.
        reuses_buffers: it may overwrite an item as soon as it is asked for the next one.
    """

    def __init__(self, iterable: Any, reuses_buffers: bool) -> None:
        self._iterable = iterable
        self._reuses_buffers = reuses_buffers
        self._iterator: Any = None
        self._wanted: anyio.Event | None = None
        self._scope: anyio.CancelScope | None = None
        self._stopped = False
        self._left = 0  # items that may be pulled: at 0 the thread sets it, else the loop, which adds to `_ready` first
        self._ready: deque[tuple[Any, BaseException | None]] = deque()
        self._answered = Waiters()
        self._is_patient = False  # who waits would have all that were asked for
        self._turned_at = 0.0
        self._turns = 0
        self._over = False
        self._is_closing = False
        self._deadline = math.inf
        self._task: Any = None
        self._timer: Any = None

    def stack(self) -> list[FrameSummary]:
        """Where it awaits; empty where that cannot be told, or its code runs. From any thread."""
        task = self._task
        return stack_of_awaiting(None if task is None else task.get_coro(), self._iterator)

    def keep(self, task: Any) -> None:
        self._task = task  # asyncio holds its tasks weakly

    # -- in the loop

    async def run(self) -> None:
        try:
            with anyio.CancelScope() as self._scope:
                if not self._stopped:
                    await self._serve()
        except BaseException as error:  # in the caller's loop an error must not reach beyond this task
            is_cancelled = _is_cancelled(error)
            if is_cancelled and self._stopped and self._task is not None:
                return  # `stop` cancelled it
            self._reply(None, error, left=0)
            if is_cancelled:
                raise
        finally:
            if self._timer is not None:
                self._timer.cancel()
            self._task = None
            self._over = True
            self._answered.wake()

    async def _serve(self) -> None:
        try:
            while await self._may_pull():
                item, error = await self._pull()
                if item is END and error is None:
                    break
                left = 0 if error is not None else self._left - 1
                if left and self._reuses_buffers:
                    if is_small(item):
                        item = private_copy(item)
                    else:
                        left = 0  # it has to be read first, and the next request says that it was
                self._reply(item, error, left)
                del item, error  # keep no reference while waiting: the consumer may check that it holds the only one
        finally:
            await self._close_iterator()
        if not self._stopped:
            self._reply(END, None, left=0)

    async def _pull(self) -> tuple[Any, BaseException | None]:
        try:
            if self._iterator is None:
                self._iterator = _opened(self._iterable)
            return await anext(self._iterator), None
        except StopAsyncIteration:
            return END, None
        except BaseException as error:
            # GeneratorExit may come from closing this coroutine itself, which then must not await anything.
            if isinstance(error, GeneratorExit) or _is_cancelled(error):
                raise
            return None, error

    async def _close_iterator(self) -> None:
        iterator, self._iterator = self._iterator, None
        close: Any = getattr(iterator, "aclose", None)
        if close is not None and not isinstance(sys.exception(), GeneratorExit):
            self._is_closing = True
            seconds = min(CLOSE_SECONDS, max(0.1, self._deadline - time.monotonic()))
            with anyio.move_on_after(seconds, shield=True):
                await close()

    async def _may_pull(self) -> bool:
        """Wait until an item is asked for. False: nothing more is."""
        if self._left and time.monotonic() - self._turned_at > SLICE_SECONDS:
            await anyio.lowlevel.checkpoint()
            self._turned_at = time.monotonic()
        while not self._left and not self._stopped:
            self._wanted = anyio.Event()
            await self._wanted.wait()
            self._turned_at = time.monotonic()
        return not self._stopped

    def _reply(self, item: Any, error: BaseException | None, left: int) -> None:
        if isinstance(error, (GeneratorExit, anyio.get_cancelled_exc_class())):
            shown = SourceError(f"the async source raised {type(error).__name__}, or was cancelled with its event loop")
            shown.__cause__ = error
            error = shown
        self._ready.append((item, error))
        self._left = left
        if not left or not self._is_patient:
            self._answered.wake()

    def wanted(self) -> None:
        if self._wanted is not None:
            self._wanted.set()

    def stop(self) -> None:
        """Cancel the task. Call it in the loop."""
        if self._stopped:
            return
        self._stopped = True
        scope = self._scope
        if scope is None or self._is_closing:  # `run` checks `_stopped` before it starts; the clean-up has its own time limit
            return
        self._deadline = time.monotonic() + CLOSE_SECONDS
        if self._task is None:
            scope.cancel()
            return
        # Cancel once, as asyncio does: a cancel scope would also cancel every await in the source's clean-up. The price is that anyio's
        # shields have no effect, just as under `asyncio.run`.
        self._task.cancel()
        self._timer = sys.modules["asyncio"].get_running_loop().call_later(CLOSE_SECONDS, scope.cancel)

    # -- in the source's thread

    def answer(self, most: int, request: Callable[[Callable[[], object]], bool], cancelled: Callable[[], bool]) -> Any | EndType:
        """The next item; up to `most` are asked for where all earlier ones were given."""
        if not self._left and not self._ready:  # in this order: the loop adds an item first
            self._left = most
            if not request(self.wanted):
                raise SourceError("the event loop of the async source is closed")
        if not self._ready:
            self._wait(cancelled)
        if not self._ready:
            if cancelled():
                return END
            raise SourceError("the event loop of the async source was closed while an item was awaited")
        item, error = self._ready.popleft()
        if error is not None:
            hint_at_loop(error)
            raise error
        return item

    def _wait(self, cancelled: Callable[[], bool]) -> None:
        """Wait for all items that were asked for; after a while for any."""
        self._is_patient = True
        if not self._answered.wait(lambda: not self._left or self._over or cancelled(), GATHER_SECONDS):
            self._is_patient = False  # before the look whether there is one: who adds one from now on wakes
            self._answered.wait(lambda: bool(self._ready) or self._over or cancelled())

    def wait_over(self) -> None:
        """Wait for the clean-up, which has its own time limit."""
        self._answered.wait(lambda: self._over)

    def wait_while_it_turns(self, home: HomeLoop, is_blocked: Callable[[], bool]) -> None:
        """Wait for the clean-up as long as its loop turns. Once that is blocked, the clean-up goes on without being waited for."""

        def over() -> bool:
            return self._over or is_blocked()

        while not over():
            before = self._turns
            if not home.call_soon(self._turn) or (not self._answered.wait(over, TURN_SECONDS) and self._turns == before):
                return

    def _turn(self) -> None:
        self._turns += 1

    def wake(self) -> None:
        self._answered.wake()

    def loop_is_gone(self) -> None:
        self._over = True
        self._answered.wake()


def _opened(iterable: Any) -> Any:
    try:
        return aiter(iterable)
    except StopAsyncIteration as error:
        raise SourceError("the async source raised StopAsyncIteration from __aiter__") from error


def _is_cancelled(error: BaseException) -> bool:
    """Whether this task is really being cancelled. A cancellation error that the source raised by itself is an ordinary failure."""
    if not isinstance(error, anyio.get_cancelled_exc_class()):
        return False
    if anyio.current_effective_deadline() == -math.inf:
        return True
    asyncio = sys.modules.get("asyncio")
    if asyncio is None or not isinstance(error, asyncio.CancelledError):
        return False
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class OpenAsyncIterator:
    """An iteration over an async iterable, pulled from a thread.

    Args:
        iterable: has `__aiter__`.
        loops: the event loops of the run.
        home: the loop of the user's that pulls it; None: the run's own.

    Attributes:
        asked_for: the number of the item that it was asked for and has not given yet; None where there is none.
    """

    closable_from_outside = False
    access = None

    def __init__(self, iterable: Any, loops: Loops, home: HomeLoop | None) -> None:
        self._pump = _Pump(iterable, loops.reuses_buffers)
        self._loops = loops
        self._is_own = home is None
        self._home = home or loops.own()
        self._count = 0
        self.asked_for: int | None = None
        self._cancelled = False
        self._started = False

    def pull(self, most: int = 1) -> Any | EndType:
        if self._cancelled:
            return END
        if not self._started:
            self._started = True
            if not self._home.start(self._pump.run, self._pump.keep, self._pump.loop_is_gone):
                raise SourceError("the event loop of the async source is closed")
        self.asked_for = self._count
        try:
            return self._pump.answer(most, self._home.call_soon, lambda: self._cancelled)
        finally:
            self._count += 1
            self.asked_for = None

    def loop_is_gone(self) -> None:
        self._pump.loop_is_gone()

    def stack(self) -> list[FrameSummary]:
        return self._pump.stack()

    def interrupt(self) -> None:
        self._cancelled = True
        if self._started:
            self._home.call_soon(self._pump.stop)
        self._pump.wake()

    def close(self) -> None:
        self._cancelled = True
        if not self._started or not self._home.call_soon(self._pump.stop):
            return
        if self._is_own:
            self._pump.wait_over()
        else:
            self._pump.wait_while_it_turns(self._home, lambda: self._loops.home_is_blocked)

    def wake(self) -> None:
        self._pump.wake()


class AsyncStream(PulledSource):
    """A stream over an object with `__aiter__`; one-shot if it has `__anext__` too.

    Args:
        iterable: has `__aiter__`.
        chosen: what the user chose of the event loops; None: nothing.
    """

    kind = "async iterator"

    def __init__(self, iterable: Any, chosen: ChosenLoop | None = None) -> None:
        self.one_shot = hasattr(iterable, "__anext__")
        self._chosen = chosen
        self._iterable = iterable

    @property
    def length(self) -> int | None:
        return length_of(self._iterable)

    def home_in(self, began_in: HomeLoop | None) -> HomeLoop | None:
        """The loop of the user's that pulls it in a run that `aiter` began there; None: one of the run's own."""
        return began_in if self._chosen is None else self._chosen.home

    def open(self, epoch: int, loop: Loops, snapshot: bytes | None = None) -> OpenSource:
        del epoch
        if snapshot is not None:
            raise refuse_snapshot(self._iterable)
        home = self.home_in(loop.began_in)
        items = OpenAsyncIterator(self._iterable, loop, home)
        loop.begin(items, home, is_chosen=self._chosen is not None)
        return items


class ChosenLoop(Wrapper):
    """An async source with the event loop that pulls it; see `from_this_loop` and `in_own_loop`.

    Args:
        source: an async iterable, or a function that returns one.
        home: the loop; None: one of the run's own.
        function: that chose it, for the error.

    Raises:
        ConfigError: it is none of these.
    """

    def __init__(self, source: Any, home: HomeLoop | None, function: str = "") -> None:
        if not hasattr(source, "__aiter__") and not callable(source):
            raise ConfigError(f"{function} takes an async iterable, or a function that returns one, not {type(source).__qualname__}")
        self.source = source
        self.home = home

    @property
    def is_factory(self) -> bool:
        return not hasattr(self.source, "__aiter__")

    def around(self, made: Any) -> Any:
        """What the factory made, with the same choice."""
        return ChosenLoop(made, self.home) if hasattr(made, "__aiter__") else made


def from_this_loop(source: Any) -> ChosenLoop:
    """Mark an async source to be pulled in the event loop that calls this, wherever the run is begun.

    `async for` needs no mark: it pulls an async source in the loop in which it runs. This is for a loader over queues and streams of this
    loop that is consumed in another thread, or in another loop. A `for` loop in this loop's own thread would block the loop that produces
    the items, so it raises.

    Args:
        source: has `__aiter__`, or is a function that returns such an object, called once an epoch in a thread.

    Raises:
        ConfigError: no event loop runs here, or it is something else.

    Example:
        async def consume(stream):
            loader = ps.prefetch(ps.from_this_loop(stream), P("data"))
            await asyncio.to_thread(lambda: [print(batch.shape) for batch in loader])
    """
    try:
        home = HomeLoop()
    except Exception as error:  # its type depends on the async library
        raise ConfigError("ps.from_this_loop must be called in a running event loop, the one that the source is bound to") from error
    return ChosenLoop(source, home, "ps.from_this_loop")


def in_own_loop(source: Any) -> ChosenLoop:
    """Mark an async source to be pulled in an event loop (asyncio) of the run's own thread, also where `async for` begins the run.

    For a source that computes or blocks between its awaits, which would hold up your loop, and for asyncio's libraries under trio. It must
    not use queues, streams or connections of another loop.

    Args:
        source: has `__aiter__`, or is a function that returns such an object, called once an epoch.

    Raises:
        ConfigError: it is something else.

    Example:
        async def images():
            yield np.zeros((16, 3), np.float32)
        async def train():
            async for batch in ps.prefetch(ps.in_own_loop(images), P("data")):
                print(batch.shape)
    """
    return ChosenLoop(source, None, "ps.in_own_loop")
