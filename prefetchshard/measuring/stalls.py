"""What holds the batch that a consumer waits for."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Sequence
from typing import NamedTuple

from prefetchshard.base.stacks import is_own, stack_of
from prefetchshard.measuring.recorder import Recorder, Span, TransferWork
from prefetchshard.measuring.timeline import STAGE_OF, BatchTimes, Stage

IN_STAGE: dict[Stage, str] = {
    "reading": "it is being read",
    "transform": "it is in your `transform` or `collate`",
    "copying": "it is being copied into staging memory",
    "transferring": "it is in its transfer to the devices",
}


class Holder(NamedTuple):
    """What holds a batch.

    Attributes:
        words: in which stage it is.
        times: of the batch; None where nothing has begun with it.
        since: when that began, in seconds of the run's clock; None where it is not known.
        ident: of the thread that works on it; None where there is none.
        reads: the thread is in the source's code for it.
    """

    words: str
    times: BatchTimes | None = None
    since: float | None = None
    ident: int | None = None
    reads: bool = False


def find_holder(recorder: Recorder, step: int, *, is_read: bool, readers: Sequence[threading.Thread]) -> Holder:
    """What holds the batch at the head of the queues.

    Args:
        recorder: of the run.
        step: of the batch.
        is_read: the first batch that is not in transfer is complete on the host.
        readers: the threads that run the source's code.
    """
    transferring = recorder.transferring
    if transferring is not None:
        return _in_transfer(transferring, step)
    if is_read:
        return Holder("it was read, and waits for its transfer")
    working = [(span.times.epoch, span.times.row, span.began_at, meter.ident, span) for meter, span in recorder.working]
    if working:
        *_, ident, span = min(working, key=lambda work: work[:4])
        return _in_work(span, ident)
    alive = [thread.ident for thread in readers if thread.is_alive()]
    return Holder("no thread has begun with it", ident=alive[0] if alive else None, reads=True)


def _in_transfer(transferring: TransferWork, step: int) -> Holder:
    work, times, ident = transferring
    if work == "finishing":
        return Holder("its transfer is done, and what you get is being made of it", times, times.ready_at, ident)
    if work == "dispatching" and not times.dispatched_at:
        if times.step <= step:
            return Holder("its transfer is being dispatched", times, times.dispatch_at or None, ident)
        return Holder("it is in its transfer, while the thread dispatches the next one", None, None, ident)
    return Holder(IN_STAGE["transferring"], times, times.dispatch_at, ident)


def _in_work(span: Span, ident: int) -> Holder:
    stage = STAGE_OF[span.work]
    return Holder(IN_STAGE[stage], span.times, span.began_at, ident, reads=stage == "reading")


def tell(holder: Holder, what: str, step: int, *, waited: float, now: float, awaiting: Callable[[], list[traceback.FrameSummary]]) -> str:
    """What a log says of a long wait.

    Args:
        holder: what holds the batch.
        what: the call that waits.
        step: that it waits for.
        waited: for so many seconds.
        now: seconds of the run's clock.
        awaiting: where an async source awaits, or its loop is; empty where the source is none.
    """
    times, thread = holder.times, _name_of(holder.ident)
    place = "" if times is None else f" (epoch {times.epoch}, row {times.row})"
    since = "" if holder.since is None else f", for {now - holder.since:.1f} s so far"
    by = f", by the thread {thread}" if thread and times is not None else ""
    stack = [] if holder.ident is None else stack_of(holder.ident)
    process = ""
    if stack and is_own(stack, "processes"):
        process = "; its worker process is being started" if times is None else "; its worker process was asked, and has not answered"
    title = f"Stack of {thread}"
    if holder.reads and (found := awaiting()):
        stack, title = found, "In the event loop of the source"
    text = f"{what} has waited {waited:.1f} s for step {step}{place}: {holder.words}{since}{by}{process}"
    return f"{text}\n{title} (most recent call last):\n{''.join(traceback.format_list(stack))}".rstrip() if stack else text


def _name_of(ident: int | None) -> str:
    return next((thread.name for thread in threading.enumerate() if thread.ident == ident), "") if ident is not None else ""
