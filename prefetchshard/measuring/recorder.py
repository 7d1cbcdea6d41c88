"""Where the time of a run goes: threads say what they do for which batch, and when each batch was where."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

from prefetchshard.base.clock import Clock
from prefetchshard.measuring.delivered import Delivered
from prefetchshard.measuring.locking import LockProbes
from prefetchshard.measuring.profiling import annotate, is_taken, leave
from prefetchshard.measuring.setup import Setup
from prefetchshard.measuring.stats import Stages, Stats, ThreadTimes
from prefetchshard.measuring.timeline import STAGE_OF, STAGES, BatchTimes, PartTimes, Work

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prefetchshard.queues.bounded_queue import QueueStats
    from prefetchshard.staging.layout import StagingStats

Role: TypeAlias = Literal["source", "readers", "others"]
"""What a thread is for: it pulls an iterator, it reads and transforms, or it is the user's."""

TransferWork: TypeAlias = tuple[Literal["dispatching", "waiting", "finishing"], BatchTimes, int]
"""What the transfer thread does: it dispatches a transfer, waits for one, or makes of it what the consumer gets; the batch; its ident."""

CPU_EVERY_SECONDS = 0.02
"""A thread looks at its CPU clock this often: each look is a system call."""

SCHEDULING = "/proc/thread-self/schedstat"
"""Of this thread, where there is such a file: nanoseconds on a CPU, and nanoseconds in which it could run and had none."""

RECENT = 256
"""Batches whose times are kept, for traces and for summing up."""

SUM_EVERY = 64
"""Batches that are summed up at once: of 64 each costs 3.3 us, of 8 each 15, a single one 106 (`Delivered.add` by itself, two cores)."""


T = TypeVar("T")


def queued_seconds() -> float:
    """For how long this thread has waited for a CPU so far; 0.0 where nobody counts that."""
    try:
        with open(SCHEDULING, "rb") as file:
            return int(file.read().split()[1]) * 1e-9
    except (OSError, IndexError, ValueError):
        return 0.0


class Meter:
    """What one thread spends its time on.

    Attributes:
        thread: its name.
        role: what it is for.
        busy: seconds of each kind of work; of work that ended.
        waited_seconds: for something to do: for room where it takes rows by number, for input where others pull.
        cpu_seconds: of the thread, up to a moment ago.
        queued_seconds: in which it could run and had no CPU, up to a moment ago; 0.0 where the system does not tell.
        parts: pieces of work that it has done.
        span: what it is doing now.

    Thread safety: written by its thread alone.
    """

    __slots__ = (
        "_clock", "_cpu_at", "_cpu_clock", "_cpu_from", "_cpu_id", "_queued_from", "busy", "cpu_seconds", "ident", "parts", "queued_seconds",
        "role", "span", "thread", "version", "waited_seconds",
    )  # fmt: skip

    def __init__(self, role: Role, clock: Clock, cpu_clock: Clock) -> None:
        thread = threading.current_thread()
        self.thread = thread.name
        self.ident = threading.get_ident()
        self.role: Role = role
        self.busy: dict[Work, float] = dict.fromkeys(STAGE_OF, 0.0)
        self.waited_seconds = 0.0
        self.cpu_seconds = 0.0
        self.span: Span | None = None
        self.version = 0  # odd while `busy` and `span` change
        self.parts = 0
        self.queued_seconds = 0.0
        self._queued_from = queued_seconds()
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._cpu_from = cpu_clock()
        self._cpu_at = -math.inf
        # Of the thread itself, so that others can ask it while the thread lives
        has_id = cpu_clock is time.thread_time and hasattr(time, "pthread_getcpuclockid")
        self._cpu_id = time.pthread_getcpuclockid(self.ident) if has_id else None

    def look_at_cpu(self, now: float) -> None:
        """Take the CPU clock, unless that was done a moment ago. By its thread."""
        if now - self._cpu_at >= CPU_EVERY_SECONDS:
            self._cpu_at = now
            self.cpu_seconds = self._cpu_clock() - self._cpu_from
            self.queued_seconds = queued_seconds() - self._queued_from

    def cpu_now(self) -> float:
        """CPU seconds of the thread, which must not end meanwhile; where that cannot be asked, up to a moment ago."""
        return self.cpu_seconds if self._cpu_id is None else time.clock_gettime(self._cpu_id) - self._cpu_from

    def leave(self) -> None:
        """Its thread ends."""
        self._cpu_at = -math.inf
        self.look_at_cpu(self._clock())
        self._cpu_id = None

    def wait_for(self, get: Callable[[], T]) -> T:
        """What `get()` returns, which waits for it. By its thread."""
        began = self._clock()
        found = get()
        self.waited_seconds += self._clock() - began
        return found

    def seconds(self, now: float) -> dict[Work, float]:
        """Of each kind of work, with what is going on. From any thread."""
        while True:
            version = self.version
            found = self.busy.copy()
            span = self.span
            while span is not None:
                for work, took in list(span.seconds.items()):
                    found[work] += took
                found[span.work] += max(0.0, now - span.entered_at)
                span = span.outer
            if version == self.version and not version & 1:
                return found
            time.sleep(0)  # its thread is changing them


class Span:
    """The work of one thread for a batch, or for a part of it, one kind after the other. Thread safety: one thread at a time.

    Args:
        recorder: that gets the seconds.
        work: the first kind; it begins now.
        times: of the batch.

    Attributes:
        work: the present kind.
        entered_at: when it was entered, seconds of the recorder's clock; when the span ended, once it did.
        began_at: when the span began.
        seconds: of each kind so far.
        times: of the batch.
        outer: what the thread had begun before and goes on with afterwards.
    """

    __slots__ = ("_annotation", "_clock", "_meter", "began_at", "entered_at", "outer", "seconds", "times", "work")

    def __init__(self, recorder: Recorder, work: Work, times: BatchTimes) -> None:
        self._clock = recorder.clock
        self._meter = meter = recorder.meter()
        self.times = times
        self.seconds: dict[Work, float] = {work: 0.0}
        self.work: Work = work
        self.outer = meter.span
        self._annotation = annotate(work, epoch=times.epoch, row=times.row) if is_taken() else None
        self.began_at = self.entered_at = self._clock()
        meter.span = self

    def enter(self, work: Work) -> float:
        """Leave the present kind of work for another one. Returns the seconds since the present one was entered."""
        now = self._clock()
        took = now - self.entered_at
        seconds = self.seconds
        seconds[self.work] += took
        if work not in seconds:
            seconds[work] = 0.0
        self.work = work
        self.entered_at = now
        return took

    def add(self, work: Work, seconds: float) -> None:
        """Add seconds that were spent elsewhere: in a process. Negative: what this thread waited for it."""
        self.seconds[work] = self.seconds.get(work, 0.0) + seconds

    def end(self) -> float:
        """Hand the seconds to the batch and to the thread. Returns their sum."""
        now = self._clock()
        meter, seconds = self._meter, self.seconds
        seconds[self.work] += now - self.entered_at
        self.entered_at = now
        self.times.parts.append(PartTimes(meter.thread, self.began_at, now, seconds))
        meter.version += 1
        busy = meter.busy
        for work, took in seconds.items():
            busy[work] += took
        meter.span = self.outer
        meter.parts += 1
        meter.version += 1
        if self._annotation is not None:
            leave(self._annotation)
        meter.look_at_cpu(now)
        return now - self.began_at


class Recorder:
    """What the threads of a run note.

    Args:
        clock: monotonic seconds.
        cpu_clock: CPU seconds of the thread that calls it.

    Attributes:
        began_at: when the run was made.
        locking: how long threads waited for the interpreter's lock, where that was seen.
        setup: how the loader was made, for advice.
        summed: batches that were handed out and are summed up.
        warm_up: how many batches may be read ahead before the loop begins.
        transferring: what the transfer thread does, or did last; None where it has no batch.

    Thread safety: every method from any thread; the consumer's attributes from the consumer only.
    """

    def __init__(self, clock: Clock, cpu_clock: Clock = time.thread_time) -> None:
        self.clock = clock
        self.began_at = clock()
        self.locking = LockProbes()
        self.setup = Setup()
        self.warm_up = 0
        self.transferring: TransferWork | None = None
        self._cpu_clock = cpu_clock
        self._mine = threading.local()
        self._meters: deque[Meter] = deque()
        # Guards what is counted, and what is summed up. A signal handler may ask for statistics in the middle of that, in the same thread
        self._lock = threading.RLock()
        self._is_summing = False
        self.dropped_rows = 0
        self.padded_rows = 0
        self.replayed = 0
        self.device_seconds: dict[str, tuple[int, float]] = {}
        self.summed = 0
        self._delivered = Delivered()
        # The consumer's
        self.first_batch_seconds = 0.0
        self.batches = 0
        self.rows = 0
        self.bytes = 0
        self.stall_seconds = 0.0
        self.first_next_at: float | None = None
        self.last_next_at = 0.0
        self.recent: list[BatchTimes | None] = [None] * RECENT

    # -- what threads do

    def meter(self, role: Role = "others") -> Meter:
        """Of the calling thread; `role`: what it is for, where this is its first call."""
        try:
            return self._mine.meter
        except AttributeError:
            meter = self._mine.meter = Meter(role, self.clock, self._cpu_clock)
            self._meters.append(meter)
            return meter

    def leave(self) -> None:
        """The calling thread ends."""
        with self._lock:
            self.meter().leave()

    def count(self, *, dropped: int = 0, padded: int = 0, replayed: int = 0) -> None:
        """Add rows, or items, from any thread."""
        with self._lock:
            self.dropped_rows += dropped
            self.padded_rows += padded
            self.replayed += replayed

    def add_device(self, device: str, nbytes: int, seconds: float) -> None:
        """A device had these bytes after so many seconds of a transfer. From the transfer thread."""
        known_bytes, known = self.device_seconds.get(device, (0, 0.0))
        self.device_seconds[device] = known_bytes + nbytes, known + seconds

    @property
    def working(self) -> Sequence[tuple[Meter, Span]]:
        """What threads are doing now."""
        return [(meter, span) for meter in list(self._meters) if (span := meter.span) is not None]

    def readers_now(self) -> tuple[float, float, float, int]:
        """Of all reader threads, with what is going on: busy seconds, CPU seconds, seconds without a CPU, and parts that are done."""
        now, busy, cpu, queued, parts = self.clock(), 0.0, 0.0, 0.0, 0
        with self._lock:  # a thread whose CPU clock is read must not end meanwhile
            for meter in list(self._meters):
                if meter.role == "readers":
                    busy += sum(meter.seconds(now).values())
                    cpu += meter.cpu_now()
                    queued += meter.queued_seconds
                    parts += meter.parts
        return busy, cpu, queued, parts

    # -- batches that were handed out

    def sum_up(self) -> None:
        """Sum up the batches that were handed out since this was last called."""
        with self._lock:
            first, last = self.summed, self.batches
            if first == last or self._is_summing:
                return
            self._is_summing = True
            try:
                self.summed = last  # first: what Ctrl-C cuts off here must not be added twice
                self._delivered.add([times for i in range(first, last) if (times := self.recent[i % RECENT]) is not None], self.warm_up)
            finally:
                self._is_summing = False

    def recent_batches(self) -> list[BatchTimes]:
        """The times of the last batches that were handed out, in order."""
        last = self.batches
        return [times for i in range(max(0, last - RECENT), last) if (times := self.recent[i % RECENT]) is not None]

    # -- statistics

    def __str__(self) -> str:
        """What each stage took at most for a batch, for a log: asked only where that is written."""
        self.sum_up()
        done = self._delivered
        stages = zip(STAGES, (done.reading, done.transform, done.copying, done.transferring), strict=True)
        found = sorted(((most.largest, most.largest_step, stage) for stage, most in stages if most.largest), reverse=True)
        return ", ".join(f"{stage} {took:.3f} s (step {step})" for took, step, stage in found)

    def stats(self, *, workers: int, host: QueueStats, ready: QueueStats, staging: StagingStats) -> Stats:
        """What was measured so far."""
        self.sum_up()
        now = self.clock()
        with self._lock:
            done = self._delivered
            wall = 0.0 if self.first_next_at is None else self.last_next_at - self.first_next_at
            spent = dict.fromkeys(STAGES, 0.0)
            threads: dict[Role, list[Meter]] = {"source": [], "readers": [], "others": []}
            for meter in list(self._meters):
                threads[meter.role].append(meter)
                for work, seconds in meter.seconds(now).items():
                    spent[STAGE_OF[work]] += seconds
            return Stats(
                batches=self.batches,
                rows=self.rows,
                bytes=self.bytes,
                dropped_rows=self.dropped_rows,
                padded_rows=self.padded_rows,
                replayed=self.replayed,
                wall_seconds=wall,
                stall_seconds=self.stall_seconds,
                busy_seconds=max(0.0, wall - self.stall_seconds),
                start_up_seconds=done.start_up_seconds,
                warm_up=done.warm_up,
                steady=done.steady,
                source_seconds=spent["reading"],
                transform_seconds=spent["transform"],
                copy_seconds=spent["copying"],
                transfer_seconds=done.transfer_seconds,
                dispatch_seconds=done.dispatch_seconds,
                next=done.next.now(),
                step=done.step.now(),
                stages=Stages(done.reading.now(), done.transform.now(), done.copying.now(), done.transferring.now()),
                source_thread=_thread_times(threads["source"], now, room=host.backpressure_seconds),
                readers=_thread_times(threads["readers"], now, pulled=bool(threads["source"])),
                locking=self.locking.now(),
                longest_wait=done.longest_wait,
                ready_batch_seconds=done.ready_seconds,
                host_batch_seconds=done.host_seconds,
                devices={name: nbytes / seconds for name, (nbytes, seconds) in self.device_seconds.items() if seconds > 0},
                first_batch_seconds=self.first_batch_seconds,
                workers=workers,
                host=host,
                ready=ready,
                staging=staging,
                setup=self.setup,
            )


def _thread_times(meters: list[Meter], now: float, *, room: float | None = None, pulled: bool = False) -> ThreadTimes:
    """Sums over threads of one kind. What readers wait for is input where another thread pulls, else room."""
    waited = sum(meter.waited_seconds for meter in meters)
    return ThreadTimes(
        threads=len(meters),
        busy_seconds=sum(sum(meter.seconds(now).values()) for meter in meters),
        cpu_seconds=sum(meter.cpu_seconds for meter in meters),
        input_seconds=waited if pulled and room is None else 0.0,
        room_seconds=waited if room is None and not pulled else (room or 0.0) if meters else 0.0,
    )
