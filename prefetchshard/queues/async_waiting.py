"""The async side: how a task waits for a ready batch without a thread, and closes a run without blocking its loop."""

from __future__ import annotations

import contextvars
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

import anyio
import anyio.lowlevel

from prefetchshard.base.event_loop import HomeLoop, leave_event_loop
from prefetchshard.base.threads import run_uncut
from prefetchshard.queues.bounded_queue import BoundedQueue

T = TypeVar("T")


class _LoopWaker:
    """A waker for `Waiters`: sets an event in its loop. A loop that is gone has nobody to wake."""

    __slots__ = ("_event", "_home")

    def __init__(self) -> None:
        self._home = HomeLoop()
        self._event = anyio.Event()

    def release(self) -> None:
        self._home.call_soon(self._event.set)

    async def wait(self) -> None:
        await self._event.wait()


async def wait_ready_for(queue: BoundedQueue[T], seconds: float) -> bool:
    """As `wait_ready`, no longer than this. Whether an item can be taken."""
    with anyio.move_on_after(seconds):
        await wait_ready(queue)
    return queue.has_ready()


async def wait_ready(queue: BoundedQueue[T]) -> None:
    """Wait until an item can be taken or none will come. Takes nothing, so a cancelled wait loses nothing."""
    while not queue.is_settled():
        waker = _LoopWaker()
        queue.receivers.park(waker)
        try:
            if not queue.is_settled():
                await waker.wait()
        finally:
            queue.receivers.leave(waker)


async def in_thread(function: Callable[[], None]) -> None:
    """Run what blocks, but not for ever, in a thread of its own; cancellation waits until it is done.

    Where warnings are errors, one never takes the place of an exception that is on its way.

    The thread ends with it. Those of `anyio.to_thread` stay for the next call, and hold the program where their loop was closed early.
    """
    failures: list[BaseException] = []
    done = _LoopWaker()
    variables = contextvars.copy_context()

    def run() -> None:
        try:
            variables.run(leave_event_loop)
            variables.run(function)
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            failures.append(error)
        finally:
            done.release()

    with anyio.CancelScope(shield=True):
        thread = threading.Thread(target=run, name="prefetchshard-closing", daemon=False)
        run_uncut(thread.start)
        await done.wait()
        thread.join()  # it has only to return
    if failures:
        on_its_way = sys.exception()
        if on_its_way is None or not isinstance(failures[0], Warning):
            raise failures.pop()
        # As in `close_runs`, which could not see it from its thread
        on_its_way.add_note(f"{type(failures[0]).__name__}: {failures[0]}")


async def checkpoint() -> None:
    """Let other tasks run, and let a cancellation arrive, before anything is taken."""
    await anyio.lowlevel.checkpoint()
