"""How many batches may be where in one run, while its threads and its depth change."""

from __future__ import annotations

import logging
import threading
from typing import Any

from prefetchshard.building.batch_limits import BatchLimits
from prefetchshard.measuring.recorder import Recorder
from prefetchshard.placing.depth import MOST_DEPTH, DepthController
from prefetchshard.placing.transfer_loops import TransferLimits
from prefetchshard.queues.bounded_queue import BoundedQueue
from prefetchshard.reading.crew import Crew

_log = logging.getLogger(__name__)


class Room:
    """The bounds of a run's queues and transfers.

    Args:
        limits: of the loader.
        crew: the reader threads.
        depth: batches that are kept ready to begin with.
        host: the queue of host batches.
        ready: the queue of ready batches.
        transfers: the bound on these.
        recorder: of the run.

    Attributes:
        depth: batches that are to be kept ready, where memory allows.

    Thread safety: `resize` from any thread, `watch` from the transfer thread.
    """

    def __init__(
        self,
        limits: BatchLimits,
        crew: Crew,
        depth: int,
        host: BoundedQueue[Any],
        ready: BoundedQueue[Any],
        transfers: TransferLimits,
        recorder: Recorder,
    ) -> None:
        self.depth = depth
        self._limits, self._crew = limits, crew
        self._host, self._ready, self._transfers = host, ready, transfers
        self._recorder = recorder
        self._controller = DepthController()
        self._used_up_at = -1  # after how many batches there was none left, the last time
        self._lock = threading.Lock()  # or an older result could replace a newer one

    def resize(self) -> None:
        """Let the bounds follow the threads, the depth, and what batches turned out to take."""
        with self._lock:
            fitting = self._limits.of(self._crew.wanted, self.depth)
            self._recorder.warm_up = fitting.ahead
            self._host.capacity, self._ready.capacity, self._transfers.in_flight = fitting.slots, fitting.depth, fitting.in_flight
        self._host.senders.wake()  # there may be more room

    def watch(self) -> None:
        """A batch is ready: let the depth follow what the consumer needs."""
        recorder, ready = self._recorder, self._ready
        taken, held = recorder.batches, ready.held
        if not taken:  # the wait for the first batch is no wait that a greater depth would even out
            return
        if not held:
            self._used_up_at = taken
        elif taken == self._used_up_at and held >= ready.capacity:  # the consumer is being woken, and has not counted its wait yet
            return
        change = self._controller.decide(recorder.clock(), recorder.stall_seconds, held, ready.capacity, self._most)
        if change is not None:
            _log.info("depth %d, %d before: %s", change.depth, ready.capacity, change.reason)
            self.depth = change.depth
            self.resize()

    def _most(self) -> int:
        return self._limits.of(self._crew.wanted, MOST_DEPTH).depth
