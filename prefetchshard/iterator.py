"""`LoaderIterator`: one run of a loader, as its consumer sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic

from prefetchshard.base.position import Position
from prefetchshard.consumer import Consumer
from prefetchshard.measuring.stats import Stats
from prefetchshard.queues import async_waiting as aio
from prefetchshard.queues.bounded_queue import EMPTY
from prefetchshard.resuming.loader_state import LoaderState
from prefetchshard.running.at_exit import hold_daemons
from prefetchshard.running.closing import close_runs

if TYPE_CHECKING:
    from typing_extensions import TypeVar  # that of Python 3.11 has no default

    Batch_co = TypeVar("Batch_co", covariant=True, default=Any)
else:
    from typing import TypeVar

    Batch_co = TypeVar("Batch_co", covariant=True)

__all__ = ["LoaderIterator"]


class LoaderIterator(Generic[Batch_co]):
    """One run of a loader: its threads, and the batches in order, for a `for` and for an `async for` loop.

    Example:
        with ps.Loader(np.zeros((64, 3), np.float32), P("data"), batch_size=16) as loader:
            batches = iter(loader)
            next(batches)
            state = batches.state()  # goes on after this batch: ps.Loader(..., state=state)
        assert state.batches == 1

    Thread safety: every method may be called from any thread; threads and tasks that share an iterator share its batches, each going
    to one of them.
    """

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer

    def __iter__(self) -> LoaderIterator[Batch_co]:
        return self

    def __next__(self) -> Batch_co:
        consumer = self._consumer
        began = consumer.clock()
        consumer.run.check_consumer()
        while (batch := consumer.take(began)) is EMPTY:
            if consumer.outbox.is_over() and consumer.stop(began):
                break
            consumer.wait()
        else:
            return batch
        consumer.close_at_end()
        end = consumer.failure_or(StopIteration())
        try:
            raise end
        finally:
            del self, consumer, end  # the traceback holds this frame

    def __aiter__(self) -> LoaderIterator[Batch_co]:
        return self

    async def __anext__(self) -> Batch_co:
        consumer = self._consumer
        began = consumer.clock()
        consumer.run.check_consumer()
        await aio.checkpoint()
        while (batch := consumer.take(began)) is EMPTY:
            if consumer.outbox.is_over() and consumer.stop(began):
                break
            await consumer.wait_async()
        else:
            return batch
        if consumer.run.closed:
            hold_daemons()
        else:
            await aio.in_thread(consumer.close_at_end)
        end = consumer.failure_or(StopAsyncIteration())
        try:
            raise end
        finally:
            del self, consumer, end  # the traceback holds this frame

    @property
    def position(self) -> Position | None:
        """Where the last batch that was handed out stands in the data; None before the first."""
        return self._consumer.handed_out.position

    def state(self) -> LoaderState:
        """Where the run stands after the batches that were handed out, whatever was read ahead; consumes nothing, never waits.

        `Loader(..., state=...)` with it goes on with the next batch, bit for bit. After the end of the run it is the beginning of the
        next one; after `close()` and after an error it still speaks of the batches handed out before. It is a value: going on does not
        change it. From any thread, also while another one takes batches: it is then the state after some whole number of them.
        """
        return self._consumer.state()

    def stats(self) -> Stats:
        """What the run has done so far, and where its time went."""
        return self._consumer.run.stats()

    def close(self) -> None:
        """Stop the run, and wait, in bounded time, until its threads have ended. Later `next()` end at once."""
        close_runs([self._consumer.run])

    async def aclose(self) -> None:
        """`close` without blocking the event loop; from any task, and also while that task is being cancelled."""
        await aio.in_thread(self._consumer.run.close)

    def __repr__(self) -> str:
        ready = self._consumer.outbox.stats()
        at = "" if self.position is None else f", at {self.position!r}"
        return f"<LoaderIterator {self._consumer.status}: {ready.ready} of {ready.capacity} batches ready{at}>"
