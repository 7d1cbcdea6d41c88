"""Decides how many reader threads a run has, from what it has done so far. Pure: no thread, no clock of its own.

Whether more threads help is measured, as no model tells it: each change is a trial, and one that did not pay is undone and left alone for a
while. What is tried follows from why the threads are slow: they wait (for files, a network), they compute, they wait for the interpreter's
lock, or they have nothing to do.
"""

from __future__ import annotations

import math
from collections import deque

import msgspec

LEAST_STALL = 0.01
"""Of the time. A consumer that waits less than that does not wait for the threads."""

LEAST_SECONDS = 0.03
LEAST_BATCHES = 2
"""What is looked at before something is tried, unless batches take so long that `SLOW_SECONDS` pass."""

TRIAL_SECONDS = 0.06
TRIAL_BATCHES = 4
"""What is looked at before a change is judged; also two rounds of the threads, as they may all be done at the same time."""

CALM_SECONDS = 0.25
CALM_BATCHES = 8
"""What is looked at before threads are sent away that nobody waits for."""

SLOW_SECONDS = 0.5
"""Who looks for so long need not see batches, where parts of them were done."""

START_SECONDS = 0.004
"""What is looked at before the first batch is there: whether the threads wait shows soon."""

WAITING = 0.6
"""Threads that are on a CPU for a smaller part of the time wait for something else, which more threads can do side by side."""

ONLY_WAITING = 0.3
"""CPUs that all threads together keep busy, at most, where nothing but waiting explains that the first batch is not there."""

BUSY = 0.6
"""Of the threads. Where fewer of them have something to do, more do not help."""

CONTENDED = 0.3
"""Of the time that a thread waits for the interpreter's lock. More threads only wait for each other then."""

MOSTLY = 0.6
"""Likewise. Where it is less, many threads may be needed all the same: they wait for something else most of the time."""

SATURATED = 0.85
"""Of the CPUs."""

GAIN = 0.15
"""By so much faster twice the threads have to be."""

DOUBT_SECONDS = 0.5
DOUBT_BATCHES = 16
"""Where it is not clear whether a change pays, so much is looked at. If it is no clearer then, more threads stay, and fewer are tried later."""

LOSS = 0.08
"""By so much slower fewer threads may be, all in all."""

ABOUT_ONE = 0.3
"""Of a CPU. Threads that share a lock keep so much more than one busy, and are meant to be one."""

REFERENCE_BATCHES = 8
"""The speed before a change is that of so many batches, where there were as many since the last one. Earlier it may have been otherwise."""

AGREE = 1.5
"""The source may just have changed where the speed is so many times another one than lately."""

MOST_DIFFERENT = 4
"""Looks in a row at which that may be so, and is then put up with."""

MOST_ROUNDS_SECONDS = 2.0
"""Longer nobody waits for slow parts to end."""

LOOKS_KEPT = 32

TELLING = 1.25
"""What a batch took where threads did not disturb each other tells something where it takes less than so many times other CPU time now."""

LEAST_CPU_SECONDS = 0.001
"""Of a batch. Less is not told apart."""

STRIDE = 4
"""Threads that wait may become so many times as many at once."""

HEADROOM = 1.25
"""Times the threads that are busy on average."""

WAITED_FOR = 1.5
"""The same where the consumer waits (16 cores, one H200: copies of images lost a fifth with 1.25)."""

FIRST_PATIENCE_SECONDS = 4.0
MOST_PATIENCE_SECONDS = 60.0
"""How long what did not pay is not tried again: twice as long each time."""

CHANGED = 2.0
"""A batch takes so many times the work, or so many times less: what did not pay may pay now."""


class Load(msgspec.Struct, frozen=True):
    """What a run has done since it began.

    Attributes:
        at: when this was, seconds of the run's clock.
        batches: handed to the consumer.
        stall_seconds: that the consumer waited because of reading, transforming or copying, the start of the run included.
        busy_seconds: of the reader threads inside the source, transforms and copying, summed over threads; with what is under way.
        cpu_seconds: the CPU time in these.
        contended: 0.0 to 1.0, the part of the recent time in which a thread that could run waited for the interpreter's lock.
        parts: of batches, that the reader threads have done.
        queued_seconds: of the busy ones, that threads could run and had no CPU; 0 where that is not known.
    """

    at: float
    batches: int
    stall_seconds: float
    busy_seconds: float
    cpu_seconds: float
    contended: float
    parts: int
    queued_seconds: float = 0.0


class Bounds(msgspec.Struct, frozen=True):
    """How many threads there may be.

    Attributes:
        for_work: that compute: the CPUs that the process may use.
        most: that wait; never fewer.
    """

    for_work: int
    most: int


class Decision(msgspec.Struct, frozen=True):
    """A change.

    Attributes:
        workers: reader threads from now on.
        reason: in words.
    """

    workers: int
    reason: str


class Window:
    """What was done between two looks.

    Attributes:
        seconds: between them.
        batches: handed out.
        parts: done.
        stall: part of the time that the consumer waited.
        busy: threads that were busy, on average.
        cpus: in use by them, on average.
        runnable: threads that were on a CPU or waited for one, on average.
        rate: batches a second.
        contended: as in `Load`.
    """

    def __init__(self, before: Load, after: Load) -> None:
        self.seconds = seconds = max(after.at - before.at, 1e-9)
        self.batches = after.batches - before.batches
        self.parts = after.parts - before.parts
        stall = 1.0 if not after.batches else (after.stall_seconds - before.stall_seconds) / seconds
        self.stall = min(1.0, max(0.0, stall))
        self.busy = max(0.0, after.busy_seconds - before.busy_seconds) / seconds
        self.cpus = max(0.0, after.cpu_seconds - before.cpu_seconds) / seconds
        self.runnable = self.cpus + max(0.0, after.queued_seconds - before.queued_seconds) / seconds
        self.rate = self.batches / seconds
        self.contended = after.contended

    @property
    def part_seconds(self) -> float:
        """What a part takes."""
        return self.busy * self.seconds / max(1, self.parts)

    @property
    def spans_rounds(self) -> bool:
        """Whether each thread has done parts from beginning to end in it: they may all end at the same time."""
        return self.seconds >= min(2 * self.part_seconds, MOST_ROUNDS_SECONDS)

    @property
    def on_cpu(self) -> float:
        """The part of their time that busy threads spend on a CPU, or want to."""
        return min(1.0, self.runnable / max(self.busy, 1e-9))

    @property
    def work(self) -> float:
        """Seconds of threads that a batch takes."""
        return self.busy * self.seconds / max(1, self.batches)

    @property
    def cpu(self) -> float:
        """Seconds of CPUs that a batch takes, which depends little on how many threads there are."""
        return self.cpus * self.seconds / max(1, self.batches)

    @property
    def is_lock_bound(self) -> bool:
        return self.contended > CONTENDED

    @property
    def needed(self) -> float:
        """Threads that would keep up with the consumer, were they not to disturb each other."""
        between = (1.0 - self.stall) * self.seconds / max(1, self.batches)  # what the consumer takes for a batch
        return math.inf if self.stall > 0.9 or not self.batches else self.work / between


class Trial(msgspec.Struct, frozen=True):
    """A change that has to prove itself.

    Attributes:
        before: the threads before.
        rate: batches a second that are to be beaten, or kept; of several trials with fewer and fewer threads the best.
        batches: of which that is known.
        work: seconds of threads that a batch took before.
        cpu: seconds of CPUs.
        calm: nobody waited before.
        lock: the threads fought over the interpreter's lock before.
    """

    before: int
    rate: float
    batches: int
    work: float
    cpu: float
    calm: bool
    lock: bool

    def change(self, seen: Window) -> float:
        """By which part it is faster now."""
        return seen.rate / self.rate - 1 if self.rate else math.inf

    def doubt(self, seen: Window) -> float:
        """How far that may be from the truth: batches are counted in whole ones."""
        return 1 / max(1, self.batches) + 1 / max(1, seen.batches)

    def tells(self, seen: Window, workers: int) -> bool:
        """Whether it is clear what the change brought. Where a batch takes other CPU time now it is another source."""
        return abs(self.change(seen) - self.needs(workers)) > self.doubt(seen) and _ratio(seen.cpu, self.cpu) < CHANGED

    def needs(self, workers: int) -> float:
        """How much faster so many threads have to be."""
        return GAIN * math.log2(workers / self.before) if workers > self.before else -LOSS

    def is_outdated(self, seen: Window, workers: int) -> bool:
        """Whether the source has changed since, as threads that disturb each other do not explain what a batch takes now."""
        by_threads = max(workers, self.before) / min(workers, self.before)
        return bool(self.work and seen.work) and _ratio(seen.work, self.work) > 2 * CHANGED * by_threads

    def is_clear(self, seen: Window, workers: int) -> bool:
        """Whether it can be judged."""
        if self.calm or seen.stall < LEAST_STALL or (seen.seconds >= DOUBT_SECONDS and seen.batches >= DOUBT_BATCHES):
            return True
        return self.tells(seen, workers) or _ratio(seen.cpu, self.cpu) >= CHANGED


class Barrier:
    """A number of threads that did not pay, and until when it is not tried again.

    Attributes:
        workers: that number; None where nothing is known.
    """

    def __init__(self) -> None:
        self.workers: int | None = None
        self._until = 0.0
        self._patience = FIRST_PATIENCE_SECONDS
        self._seen_by = 0
        self._work = 0.0

    def raise_at(self, workers: int, at: float, *, seen_by: int, work: float) -> None:
        """So many did not pay, while a batch took so much work for the threads that there are instead."""
        self.workers = workers
        self._until = at + self._patience
        self._patience = min(MOST_PATIENCE_SECONDS, 2 * self._patience)
        self._seen_by = seen_by
        self._work = work

    def look(self, at: float, workers: int, work: float) -> None:
        """Forget it where its time is over, or where a batch takes other work now."""
        if self.workers is None:
            return
        change = work / self._work if self._work and work and workers == self._seen_by else 1.0
        if not 1 / CHANGED < change < CHANGED:
            self.workers = None
            self._patience = FIRST_PATIENCE_SECONDS
        elif at >= self._until:
            self.workers = None


class Controller:
    """The policy. Thread safety: one caller at a time.

    Args:
        start: what was done when the run began.

    Attributes:
        is_lock_bound: threads were sent away because they fought over the interpreter's lock, and none came since.
    """

    def __init__(self, start: Load) -> None:
        self._from = start
        self._looks = deque([start], LOOKS_KEPT)  # the latest ones since the last change
        self._quiet_until: float | None = start.at
        self._quiet_seconds = 0.0
        self._expected = 0
        self._lately = Window(start, start)
        self._trial: Trial | None = None
        self._ceiling = Barrier()
        self._floor = Barrier()
        self._best_rate = 0.0  # of the trials with fewer threads that went before
        self._free_work = 0.0  # seconds of threads for a batch, where these do not disturb each other
        self._free_cpu = 0.0  # and of CPUs
        self._differed = 0  # looks in a row at which the speed was another one than lately
        self._doubted: int | None = None  # whether more than so many pay was not clear
        self.is_lock_bound = False

    def decide(self, load: Load, workers: int, bounds: Bounds) -> Decision | None:
        """Look at a run. None: go on as it is.

        Args:
            load: what it has done so far.
            workers: its reader threads.
            bounds: how many there may be.
        """
        if self._trial is not None and workers != self._expected:  # somebody else changed it
            self._trial = None
        if self._quiet_until is None:  # the first look after a change: the threads have come
            self._quiet_until = load.at + self._quiet_seconds
        if load.at < self._quiet_until:
            self._from = load
            self._looks = deque([load], LOOKS_KEPT)
            return None
        seen = Window(self._from, load)
        if not self._has_seen_enough(seen, workers):
            return None
        self._best_rate = 0.0
        self._lately = self._look_back(load)
        decision = self._judge(seen, load.at, workers) or self._try(seen, load.at, workers, bounds)
        self._from = load
        self._looks.append(load)
        if decision is not None:
            self._expected = decision.workers
            # What was begun before the change is done after it
            self._quiet_until, self._quiet_seconds = None, min(seen.part_seconds, 1.0)
        return decision

    def _look_back(self, load: Load) -> Window:
        """Over `REFERENCE_BATCHES`, or as far as to the last change."""
        windows = (Window(look, load) for look in reversed(self._looks))
        return next(
            (window for window in windows if window.batches >= REFERENCE_BATCHES and window.spans_rounds), Window(self._looks[0], load)
        )

    def _has_seen_enough(self, seen: Window, workers: int) -> bool:
        if seen.parts == 0:
            return False
        if self._trial is not None:
            enough = seen.seconds >= TRIAL_SECONDS and seen.spans_rounds and seen.batches >= TRIAL_BATCHES
            return enough and self._trial.is_clear(seen, workers)
        if self._from.batches == seen.batches == 0:  # the first batch is still being made
            return seen.seconds >= START_SECONDS and _only_waits(seen, workers)
        if seen.stall < LEAST_STALL:
            return seen.seconds >= CALM_SECONDS and seen.batches >= CALM_BATCHES
        if seen.seconds >= SLOW_SECONDS:
            return seen.parts >= workers
        return seen.seconds >= max(LEAST_SECONDS, min(seen.part_seconds, SLOW_SECONDS)) and seen.batches >= LEAST_BATCHES

    # -- judging

    def _judge(self, seen: Window, at: float, workers: int) -> Decision | None:
        """Undo what did not pay."""
        trial, self._trial = self._trial, None
        if trial is None:
            return None
        grown, change = workers > trial.before, trial.change(seen)
        if seen.stall < LEAST_STALL or trial.is_outdated(seen, workers):
            return None
        needed = trial.needs(workers)
        is_clear = trial.tells(seen, workers)
        if not trial.calm and (change >= needed or not is_clear):
            self._accept(trial, seen, at, workers, is_clear=is_clear)
            return None
        barrier = self._ceiling if grown else self._floor
        barrier.raise_at(workers, at, seen_by=trial.before, work=trial.work if trial.batches >= TRIAL_BATCHES else 0.0)
        if not grown:
            self.is_lock_bound = False
        if trial.calm:
            return Decision(trial.before, f"with {workers} the consumer waits {_percent(seen.stall)} of the time, and it did not before")
        words = "does not pay" if grown else "is too slow"
        return Decision(trial.before, f"{workers} brought {100 * change:+.0f} % batches a second, which {words}")

    def _accept(self, trial: Trial, seen: Window, at: float, workers: int, *, is_clear: bool) -> None:
        if workers > trial.before:
            self._doubted = None if is_clear and trial.batches else trial.before
        elif is_clear:
            self._best_rate = max(trial.rate, seen.rate)
            # With a lock for all of them it is one more that does not pay
            self._ceiling.raise_at(workers + 1 if trial.lock else trial.before, at, seen_by=workers, work=seen.work)

    # -- trying

    def _try(self, seen: Window, at: float, workers: int, bounds: Bounds) -> Decision | None:
        for barrier in (self._ceiling, self._floor):
            barrier.look(at, workers, self._lately.work if self._lately.batches >= CALM_BATCHES else 0.0)
        self._note_work(seen, workers, bounds)
        if workers > bounds.most:
            return Decision(bounds.most, "there is no room for more")
        if seen.stall < LEAST_STALL:
            return self._shrink_calmly(seen, workers, bounds)
        return self._shrink_wisely(seen, workers, bounds) or self._grow(seen, workers, bounds) or self._shrink_in_doubt(seen, workers)

    def _note_work(self, seen: Window, workers: int, bounds: Bounds) -> None:
        """Note what a batch takes where threads do not disturb each other; forget it where batches take another time on a CPU now."""
        if _ratio(seen.cpu, self._free_cpu) > CHANGED:
            self._free_work = 0.0
        disturbed = seen.contended > CONTENDED / 2 or (seen.runnable > SATURATED * bounds.for_work and workers > bounds.for_work)
        if seen.batches and not disturbed and (not self._free_work or seen.work < self._free_work):
            self._free_work, self._free_cpu = seen.work, seen.cpu

    def _undisturbed(self, seen: Window) -> int:
        """Threads that would do what is done now, were they not to disturb each other; 0 where that is not known."""
        return math.ceil(self._free_work * seen.rate) if _ratio(seen.cpu, self._free_cpu) < TELLING else 0

    def _shrink_calmly(self, seen: Window, workers: int, bounds: Bounds) -> Decision | None:
        """Send away those whom nobody waits for, a few at a time."""
        demand = max(seen.cpus, seen.busy - (seen.runnable - seen.cpus))
        if seen.is_lock_bound:
            demand = max(seen.cpus, seen.busy * (1 - seen.contended))
        elif seen.busy > bounds.for_work and seen.cpus > 0.5 * bounds.for_work:
            demand = (seen.busy + seen.cpus) / 2  # some of them wait for a CPU
        enough = max(1, math.ceil(HEADROOM * demand))
        target = self._above_floor(workers, max(enough, math.floor(0.7 * workers)))
        if target >= workers:
            return None
        return self._change(seen, workers, target, f"nobody waits for them, and {demand:.1f} are busy on average", calm=True)

    def _shrink_wisely(self, seen: Window, workers: int, bounds: Bounds) -> Decision | None:
        """Try fewer where the reason why batches come late is that there are too many, or something else than the threads."""
        target, reason = workers, ""
        if not self._is_speed_known(seen):  # nobody could tell afterwards what it brought
            return None
        if seen.is_lock_bound:
            needed = workers // STRIDE if seen.contended < MOSTLY and workers >= 2 * STRIDE else 1  # so many may wait for something else
            target = max(1, math.ceil(seen.cpus - ABOUT_ONE), self._undisturbed(seen), needed)
            reason = f"they wait for the interpreter's lock {_percent(seen.contended)} of the time and keep {seen.cpus:.1f} CPUs busy"
        elif seen.busy < BUSY * workers:
            target = max(1, math.ceil(WAITED_FOR * seen.busy))
            reason = f"the consumer waits, but only {seen.busy:.1f} of them are busy"
        elif seen.runnable >= SATURATED * bounds.for_work and workers > bounds.for_work:
            step = STRIDE if workers >= 2 * STRIDE * bounds.for_work else 2  # some may wait as well, and are needed
            target = max(bounds.for_work, workers // step, self._undisturbed(seen))
            reason = f"they compute, and all of {bounds.for_work} CPUs are busy"
        target = self._above_floor(workers, target)
        if target >= workers:
            return None
        self.is_lock_bound = seen.is_lock_bound
        return self._change(seen, workers, target, reason)

    def _is_speed_known(self, seen: Window) -> bool:
        """Whether enough batches came at one speed, or so many looks differed that they will go on to do so."""
        agree = 1 / AGREE < self._lately.rate / max(seen.rate, 1e-9) < AGREE
        self._differed = 0 if agree else self._differed + 1
        return self._lately.batches >= TRIAL_BATCHES and self._lately.spans_rounds and (agree or self._differed > MOST_DIFFERENT)

    def _shrink_in_doubt(self, seen: Window, workers: int) -> Decision | None:
        """Try fewer where more did not pay, or where nobody knows whether as many do."""
        if self._doubted is not None and self._doubted < workers:
            target, reason = self._doubted, "it was not clear whether as many pay"
        elif self._ceiling.workers is not None and seen.on_cpu < WAITING:
            target, reason = max(1, workers // 2), "more did not pay, as if they waited for each other"
        else:
            return None
        self._doubted = None
        target = self._above_floor(workers, target)
        return None if target >= workers else self._change(seen, workers, target, reason)

    def _grow(self, seen: Window, workers: int, bounds: Bounds) -> Decision | None:
        if seen.is_lock_bound or seen.busy < BUSY * workers:
            return None
        waits = seen.on_cpu < WAITING and seen.runnable < SATURATED * bounds.for_work
        if waits:
            at_most = min(bounds.most, STRIDE * workers, math.ceil(bounds.for_work / max(seen.runnable / seen.busy, 1e-3)))
            reason = f"they wait as well ({_percent(seen.on_cpu)} of their time on a CPU)"
        else:
            at_most = min(bounds.for_work, 2 * workers)
            reason = f"they compute, on {seen.cpus:.1f} of {bounds.for_work} CPUs"
        target = self._below_ceiling(workers, int(min(at_most, max(workers + 1, math.ceil(1.1 * min(seen.needed, 1e6))))))
        if target <= workers:
            return None
        self.is_lock_bound = False
        return self._change(seen, workers, target, f"the consumer waits {_percent(seen.stall)} of the time, and {reason}")

    def _change(self, seen: Window, workers: int, target: int, reason: str, *, calm: bool = False) -> Decision:
        lately = self._lately
        rate = max(lately.rate, 0.0 if target > workers else self._best_rate)
        self._trial = Trial(workers, rate, lately.batches, lately.work, lately.cpu, calm, seen.is_lock_bound)
        return Decision(target, reason)

    def _below_ceiling(self, workers: int, target: int) -> int:
        """The same, or half-way to what did not pay; `workers` where that is not worth it."""
        ceiling = self._ceiling.workers
        if ceiling is None or target < ceiling:
            return target
        between = math.floor(math.sqrt(workers * ceiling))
        return between if between >= 1.3 * workers else workers

    def _above_floor(self, workers: int, target: int) -> int:
        floor = self._floor.workers
        if floor is None or target > floor:
            return target
        between = math.ceil(math.sqrt(workers * floor))
        return between if between > floor and between <= workers / 1.3 else workers


def _only_waits(seen: Window, workers: int) -> bool:
    return seen.cpus < ONLY_WAITING and not seen.is_lock_bound and seen.busy >= BUSY * workers


def _ratio(one: float, other: float) -> float:
    """How many times as large the larger one is."""
    one, other = max(one, LEAST_CPU_SECONDS), max(other, LEAST_CPU_SECONDS)
    return max(one / other, other / one)


def _percent(part: float) -> str:
    return f"{100 * part:.0f} %"
