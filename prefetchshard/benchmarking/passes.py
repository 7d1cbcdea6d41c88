"""The ways to get the batches of a source, behind one interface: each is an iterator that counts what it handed out."""

from __future__ import annotations

import contextlib
import queue
import threading
from typing import Any, NamedTuple, Protocol

from prefetchshard.base.jax_context import JaxContext
from prefetchshard.base.jax_types import block_until_ready
from prefetchshard.benchmarking.by_hand import Placing, read_batches
from prefetchshard.building.run_factory import Parts
from prefetchshard.iterator import recent_of
from prefetchshard.loader import Loader
from prefetchshard.measuring.stats import Stats
from prefetchshard.measuring.timeline import Recent

QUEUE_BATCHES = 2
JOIN_SECONDS = 10.0
"""So long is a thread waited for that is inside the source's own code."""


class Counts(NamedTuple):
    """Of the batches handed out so far: rows and bytes."""

    rows: int = 0
    nbytes: int = 0


class Pass(Protocol):
    """Once through the batches, or for as long as they are wanted."""

    def __next__(self) -> Any: ...

    @property
    def counts(self) -> Counts: ...

    @property
    def begins_epoch(self) -> bool:
        """Whether the last batch is the first one of an epoch."""
        ...

    def stats(self) -> Stats | None:
        """What the loader measured, but for the first batch; None where there is no loader."""
        ...

    def recent(self) -> Recent | None:
        """When what happened to the last batches of the loader; None where there is none."""
        ...

    def close(self) -> None: ...


class SourcePass:
    """Reads in the thread that asks; nothing goes to a device."""

    def __init__(self, parts: Parts) -> None:
        self._batches = read_batches(parts)
        self.counts = Counts()
        self.begins_epoch = False

    def __next__(self) -> Any:
        batch = next(self._batches)
        self.counts = Counts(self.counts.rows + batch.rows, self.counts.nbytes + batch.nbytes)
        self.begins_epoch = batch.begins_epoch
        return batch

    def stats(self) -> None:
        """None: there is no loader."""

    def recent(self) -> None:
        """None: as above."""

    def close(self) -> None:
        self._batches.close()


class ByHandPass:
    """A thread reads, and puts on the devices; a queue of two lies between it and who asks."""

    def __init__(self, parts: Parts) -> None:
        self.counts = Counts()
        self.begins_epoch = False
        self._parts, self._context = parts, JaxContext()
        self._queue: queue.Queue[Any] = queue.Queue(QUEUE_BATCHES)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="prefetchshard-by-hand", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        with self._context.in_force():
            try:
                self._read_on()
                end: BaseException = StopIteration()
            except BaseException as error:  # noqa: BLE001 - a thread has no caller; who asks for a batch gets it
                end = error
        self._queue.put(end)

    def _read_on(self) -> None:
        place = Placing(self._parts)
        with contextlib.closing(read_batches(self._parts)) as batches:
            for batch in batches:
                self._queue.put((place(batch), batch.rows, batch.nbytes, batch.begins_epoch))
                if self._is_over.is_set():
                    return

    def __next__(self) -> Any:
        found = self._queue.get()
        if isinstance(found, BaseException):
            raise found
        batch, rows, nbytes, self.begins_epoch = found
        self.counts = Counts(self.counts.rows + rows, self.counts.nbytes + nbytes)
        return block_until_ready(batch)

    def stats(self) -> None:
        """None: there is no loader."""

    def recent(self) -> None:
        """None: as above."""

    def close(self) -> None:
        """Stop the thread: it gets room for what it holds, and then looks whether it is to go on."""
        self._is_over.set()
        for _ in range(int(JOIN_SECONDS / 0.05)):
            with contextlib.suppress(queue.Empty):
                while True:
                    self._queue.get_nowait()
            self._thread.join(0.05)
            if not self._thread.is_alive():
                return


class LoaderPass:
    """A run of a loader."""

    def __init__(self, loader: Loader[Any]) -> None:
        self._batches = iter(loader)
        self._after_first: Stats | None = None
        self._epoch: int | None = None
        self.begins_epoch = False

    def __next__(self) -> Any:
        batch = next(self._batches)
        if self._after_first is None:
            self._after_first = self._batches.stats()
        position = self._batches.position
        assert position is not None  # a batch was handed out
        self.begins_epoch, self._epoch = position.epoch != self._epoch, position.epoch
        return batch

    @property
    def counts(self) -> Counts:
        found = self._batches.stats()
        return Counts(found.rows, found.bytes)

    def stats(self) -> Stats:
        """Of the run so far, but for its first batch, whose wait would be most of a short measurement. Of all of it where no other came."""
        stats, first = self._batches.stats(), self._after_first
        return stats if first is None or stats.batches == first.batches else stats - first

    def recent(self) -> Recent:
        """The batches of the run that were handed out last: their times, not their arrays."""
        return recent_of(self._batches)

    def close(self) -> None:
        self._batches.close()
