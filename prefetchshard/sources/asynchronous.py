"""Async iterables: pulled in an event loop of their own, or in the event loop to which their queues and streams are bound."""

from __future__ import annotations

import contextvars
import math
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import anyio

from prefetchshard.base.errors import ConfigError, SourceError
from prefetchshard.base.event_loop import HomeLoop
from prefetchshard.base.jax_context import JaxContext
from prefetchshard.base.waiters import Waiters
from prefetchshard.sources.iterables import END, EndType, OpenSource, PulledSource, length_of
from prefetchshard.sources.stateful import refuse_snapshot

LOOP_THREAD = "prefetchshard-loop"
CLOSE_SECONDS = 0.8
"""Time limit for the clean-up of an async source."""
HOME_SECONDS = 0.2
"""How long closing waits for the clean-up in the caller's event loop. Short, as that loop may be the one that is blocked by the wait."""


class OwnLoop:
    """An event loop in its own thread, for async sources that are bound to no loop; it serves all epochs of a run.

    Args:
        threads: list to which the loop's thread is added.

    Thread safety: call all methods from the source's thread.
    """

    def __init__(self, threads: list[threading.Thread]) -> None:
        self._threads = threads
        self._thread: threading.Thread | None = None
        self._home: HomeLoop | None = None
        self._stopping: anyio.Event | None = None
        self._failure: BaseException | None = None
        self._running = Waiters()

    def home(self) -> HomeLoop:
        """The loop; the first call starts it.

        Raises:
            SourceError: it could not be started.
        """
        if self._thread is None:
            variables, context = contextvars.copy_context(), JaxContext()
            self._thread = threading.Thread(target=lambda: variables.run(self._run, context), name=LOOP_THREAD, daemon=True)
            self._threads.append(self._thread)
            self._thread.start()
            self._running.wait(lambda: self._home is not None or self._failure is not None)
        if self._home is None:
            raise SourceError("no event loop could be started for the async source") from self._failure
        return self._home

    def _run(self, context: JaxContext) -> None:
        try:
            with context.in_force():
                anyio.run(self._main, backend="asyncio")
        except BaseException as error:  # noqa: BLE001 - a thread has no caller; the pump reports to the thread that waits for an item
            self._failure = error
            self._running.wake()

    async def _main(self) -> None:
        self._stopping = anyio.Event()
        self._home = HomeLoop()
        self._running.wake()
        await self._stopping.wait()

    def close(self) -> None:
        """Stop the loop, and cancel the tasks that the source left in it."""
        if self._thread is not None and self._home is not None and self._stopping is not None:
            self._home.call_soon(self._stopping.set)
            self._thread.join()


class _Pump:
    """Pulls an async iterator, one item per request, always in the same task.

    One task, because cancel scopes and task groups inside an async generator belong to the task that entered them. The event loop keeps
    running between requests, so the source's background tasks do too.
    """

    def __init__(self, iterable: Any) -> None:
        self._iterable = iterable
        self._iterator: Any = None
        self._wanted: anyio.Event | None = None
        self._scope: anyio.CancelScope | None = None
        self._requests = 0
        self._stopped = False
        self._answer: tuple[Any, BaseException | None] | None = None
        self._answered = Waiters()
        self._over = False
        self._is_closing = False
        self._deadline = math.inf
        self._task: Any = None
        self._timer: Any = None

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
            self._reply(None, error)
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
            while await self._next_request():
                item, error = await self._pull()
                if item is END and error is None:
                    break
                self._reply(item, error)
                del item, error  # keep no reference while waiting: the consumer may check that it holds the only one
        finally:
            await self._close_iterator()
        if not self._stopped:
            self._reply(END, None)

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

    async def _next_request(self) -> bool:
        while not self._requests and not self._stopped:
            self._wanted = anyio.Event()
            await self._wanted.wait()
        self._requests = 0
        return not self._stopped

    def _reply(self, item: Any, error: BaseException | None) -> None:
        if isinstance(error, (GeneratorExit, anyio.get_cancelled_exc_class())):
            shown = SourceError(f"the async source raised {type(error).__name__}, or was cancelled with its event loop")
            shown.__cause__ = error
            error = shown
        self._answer = (item, error)
        self._answered.wake()

    def wanted(self) -> None:
        self._requests += 1
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

    def answer(self, request: Callable[[Callable[[], object]], bool], cancelled: Callable[[], bool]) -> Any | EndType:
        self._answer = None
        if not request(self.wanted):
            raise SourceError("the event loop of the async source is closed")
        self._answered.wait(lambda: self._answer is not None or self._over or cancelled())
        answer = self._taken_answer()
        if answer is None:
            if cancelled():
                return END
            raise SourceError("the event loop of the async source was closed while an item was awaited")
        item, error = answer
        if error is not None:
            raise error
        return item

    def _taken_answer(self) -> tuple[Any, BaseException | None] | None:
        answer, self._answer = self._answer, None
        return answer

    def wait_over(self, timeout_seconds: float | None) -> None:
        self._answered.wait(lambda: self._over, timeout_seconds)

    def wake(self) -> None:
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
        home: the event loop that pulls it.
        patience_seconds: how long `close` waits for the source's clean-up; None: until it is done.
    """

    closable_from_outside = False
    access = None

    def __init__(self, iterable: Any, home: HomeLoop, patience_seconds: float | None) -> None:
        self._pump = _Pump(iterable)
        self._home = home
        self._patience_seconds = patience_seconds
        self._cancelled = False
        self._started = False

    def pull(self) -> Any | EndType:
        if self._cancelled:
            return END
        if not self._started:
            self._started = True
            if not self._home.start(self._pump.run, self._pump.keep):
                raise SourceError("the event loop of the async source is closed")
        return self._pump.answer(self._home.call_soon, lambda: self._cancelled)

    def interrupt(self) -> None:
        self._cancelled = True
        if self._started:
            self._home.call_soon(self._pump.stop)
        self._pump.wake()

    def close(self) -> None:
        self.interrupt()
        if self._started:
            self._pump.wait_over(self._patience_seconds)


class AsyncStream(PulledSource):
    """A stream over an object with `__aiter__`; one-shot if it has `__anext__` too."""

    kind = "async iterator"

    def __init__(self, iterable: Any, home: HomeLoop | None = None) -> None:
        self.one_shot = hasattr(iterable, "__anext__")
        self.home = home
        self._iterable = iterable

    @property
    def length(self) -> int | None:
        return length_of(self._iterable)

    def open(self, epoch: int, loop: OwnLoop, snapshot: bytes | None = None) -> OpenSource:
        del epoch
        if snapshot is not None:
            raise refuse_snapshot(self._iterable)
        if self.home is None:
            return OpenAsyncIterator(self._iterable, loop.home(), None)
        return OpenAsyncIterator(self._iterable, self.home, HOME_SECONDS)


class FromThisLoop:
    """An async iterable bound to the running event loop; see `from_this_loop`."""

    def __init__(self, iterable: Any) -> None:
        if not hasattr(iterable, "__aiter__"):
            raise ConfigError(f"ps.from_this_loop takes an async iterable, not {type(iterable).__qualname__}")
        try:
            self.home = HomeLoop()
        except Exception as error:  # its type depends on the async library
            raise ConfigError("ps.from_this_loop must be called in a running event loop, the one that the source is bound to") from error
        self.iterable = iterable


def from_this_loop(iterable: Any) -> FromThisLoop:
    """Mark an async iterable to be pulled in the event loop that calls this, for queues and streams bound to that loop.

    Consume the loader with `async for`, or in another thread. A plain `for` in the loop's own thread would block the loop that produces
    the items, so it raises.

    Args:
        iterable: has `__aiter__`.

    Raises:
        ConfigError: no event loop runs here.

    Example:
        async def consume(stream):
            async for batch in ps.prefetch(ps.from_this_loop(stream), P("data")):
                print(batch.shape)
    """
    return FromThisLoop(iterable)
