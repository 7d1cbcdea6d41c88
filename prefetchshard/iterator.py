"""`LoaderIterator`: one run of a loader, as its consumer sees it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Generic

from prefetchshard.base.position import Position
from prefetchshard.consumer import Consumer
from prefetchshard.measuring.profiling import annotate, is_taken, leave
from prefetchshard.measuring.stats import Stats
from prefetchshard.measuring.timeline import Recent
from prefetchshard.queues import async_waiting as aio
from prefetchshard.queues.bounded_queue import EMPTY
from prefetchshard.resuming.loader_state import LoaderState
from prefetchshard.running.at_exit import hold_daemons
from prefetchshard.running.closing import close_runs
from prefetchshard.telling.trace import write_trace

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
        annotation = annotate("next()", step=consumer.next_step) if is_taken() else None
        consumer.run.check_consumer()
        is_told = False
        while (batch := consumer.take(began)) is EMPTY:
            if consumer.outbox.is_over() and consumer.stop(began):
                break
            is_told = consumer.wait(began, "next()", is_told=is_told)
        else:
            return batch  # the annotation goes with the frame: Ctrl-C could come after a call, and the batch would be lost
        leave(annotation)
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
        is_told = False
        while (batch := consumer.take(began)) is EMPTY:
            if consumer.outbox.is_over() and consumer.stop(began):
                break
            is_told = await consumer.wait_async(began, "anext()", is_told=is_told)
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

    def stats(self, *, last_seconds: float | None = None) -> Stats:
        """What the run has done so far, or of late, and where its time went.

        Args:
            last_seconds: None: all of the run. Else about so many seconds, up to 600: since the last look that is as old. Looks are kept
                by `next()`, one a second, and fewer of those that are older: it is at most 1 s longer where it is of 10 s, 4 s of a minute, 64 s of ten
                minutes; and by a step of the loop, where that takes longer. All of the run where that is younger. Queues and ring are
                those of now. A `next()` that has not returned is not in it.

        Raises:
            ConfigError: `last_seconds` is not above 0, or above 600.

        Example:
            batches = iter(ps.Loader(np.zeros((64, 3), np.float32), P("data"), batch_size=16))
            next(batches)
            print(batches.stats(last_seconds=10.0).verdict)
            batches.close()
        """
        return self._consumer.run.stats(last_seconds)

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Write the way of the last 256 batches as a trace, for Perfetto (https://ui.perfetto.dev) or `chrome://tracing`.

        It shows what each thread did for which batch, transfers, batches that were ready, each `next()`, and the loop's own steps, in
        microseconds since the run began; arrows lead from a batch's reading to its `next()`. The file is there as a whole or not at all.
        At any time, also after the end of the run.

        Args:
            path: of the file, such as `loader.json`; it is compressed where that ends with ".gz".

        Raises:
            OSError: it cannot be written.

        Example:
            batches = iter(ps.Loader(np.zeros((64, 3), np.float32), P("data"), batch_size=16))
            total = sum(batch.sum() for batch in batches)
            batches.trace("loader.json.gz")
        """
        recent = recent_of(self)
        write_trace(path, recent.batches, recent.began_at)

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


def recent_of(iterator: LoaderIterator[Any]) -> Recent:
    """When what happened to the last batches that it handed out; also after the end of the run."""
    consumer = iterator._consumer  # pyright: ignore[reportPrivateUsage] - what is no use to others
    recorder = consumer.run.recorder
    return Recent(recorder.began_at, tuple(recorder.recent_batches()), is_end=consumer.status == "ended")
