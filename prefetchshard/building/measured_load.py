"""What the controller of the reader threads is told about its run, put together from what is measured anyway."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from prefetchshard.measuring.recorder import Recorder, queued_seconds
from prefetchshard.queues.bounded_queue import BoundedQueue
from prefetchshard.reading.controller import Load

SMOOTHING = 0.2
"""The weight of the last look at the interpreter's lock; all of the first ones weigh the same."""


def measure_of(recorder: Recorder, host: BoundedQueue[Any], ready: BoundedQueue[Any]) -> Callable[[], Load]:
    """A function that says what a run has done so far, called by its reader threads, one at a time.

    Args:
        recorder: of the run.
        host: the queue of host batches.
        ready: the queue of ready batches.
    """
    clock = recorder.clock
    began_at = clock()
    contended = 0.0
    looks = 0

    def measure() -> Load:
        nonlocal contended, looks
        before, queued = clock(), queued_seconds()
        time.sleep(0)  # lets go of the interpreter's lock, and comes back when it is free
        now = clock()
        waited = max(0.0, now - before - (queued_seconds() - queued))
        looks += 1
        contended += max(SMOOTHING, 1 / looks) * (min(1.0, waited / sys.getswitchinterval()) - contended)
        busy, cpu, queued_by_all, parts = recorder.readers_now()
        stall = recorder.stall_seconds
        if not recorder.batches:
            stall = now - began_at
        elif len(ready.receivers):  # it waits now, and so far nobody counted that
            step = (recorder.last_next_at - (recorder.first_next_at or 0.0) - stall) / recorder.batches
            stall += max(0.0, now - recorder.last_next_at - step)
        # Where the transfer did not wait for the readers either, it is not they who are slow
        starved = host.receivers.waited_seconds + (now - recorder.last_next_at if len(host.receivers) else 0.0)
        return Load(
            at=now,
            batches=recorder.batches,
            stall_seconds=stall if not recorder.batches else min(stall, starved),
            busy_seconds=busy,
            cpu_seconds=cpu,
            contended=contended,
            parts=parts,
            queued_seconds=queued_by_all,
        )

    return measure
