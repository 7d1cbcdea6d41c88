"""Takes batches for a while, and counts them. The first batches of each epoch, and the step that compiles, are apart."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from prefetchshard.base.clock import Clock
from prefetchshard.base.errors import BatchError
from prefetchshard.benchmarking.passes import Pass
from prefetchshard.measuring.stats import Stats
from prefetchshard.measuring.timeline import Recent

TELL_SECONDS = 0.1
MOST_TIMES = 4
"""What is mostly the beginning of passes and epochs ends after this many times the seconds asked for."""

Tell = Callable[[float], object]
"""Gets how many seconds are measured so far."""


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """What one round measured.

    Attributes:
        batches: counted.
        rows: in them.
        nbytes: in them.
        seconds: that they took.
        waited_seconds: of these, for a batch.
        step_seconds: of these, in the step.
        passes: how often the source was begun.
        first_batch_seconds: from the beginning of the first pass until its first batch was there.
        epochs: begun while a pass went on.
        epochs_seconds: that their first batches were waited for.
        has_steady: False where each epoch had only first batches: these are then counted, with what beginning takes.
        stats: of the pass with the most batches; None without a loader.
        recent: when what happened to the last batches of that pass; None likewise.
    """

    batches: int
    rows: int
    nbytes: int
    seconds: float
    waited_seconds: float
    step_seconds: float
    passes: int
    first_batch_seconds: float
    epochs: int = 0
    epochs_seconds: float = 0.0
    has_steady: bool = True
    stats: Stats | None = None
    recent: Recent | None = None


class _Sums:
    """What was counted of some batches; of those that begin epochs also how many epochs were begun in a pass, and the waits for these."""

    def __init__(self) -> None:
        self.batches = self.rows = self.nbytes = self.begun = 0
        self.seconds = self.waited = self.worked = self.waited_for_begun = 0.0

    def add(self, rows: int, nbytes: int) -> None:
        self.rows += rows
        self.nbytes += nbytes

    def took(self, waited: float, worked: float) -> None:
        self.batches += 1
        self.seconds += waited + worked
        self.waited += waited
        self.worked += worked


class Limits(NamedTuple):
    """When a pass has had enough, and what of it is counted.

    Attributes:
        seconds: to count.
        first_batches: of each epoch that are not counted.
    """

    seconds: float
    first_batches: int


class Rounds:
    """Takes batches from passes, one after the other, until enough seconds are counted.

    Args:
        begin: begins a pass.
        step: what is done with a batch.
        clock: monotonic seconds.
        first_batches: of each epoch that are not counted: as many as the source has worker processes, which begin one after the other.
    """

    def __init__(self, begin: Callable[[], Pass], step: Callable[[Any], object], clock: Clock, first_batches: int = 1) -> None:
        self._begin, self._step, self._clock, self._first_batches = begin, step, clock, first_batches

    def run(self, seconds: float, tell: Tell) -> Round:
        """One round.

        Args:
            seconds: to count; at least one batch beyond the first is counted where a pass has one.
            tell: is told now and then.

        Raises:
            BatchError: a pass has no batch.
        """
        clock = self._clock
        began = clock()
        firsts, epochs, steady = _Sums(), _Sums(), _Sums()
        stats: Stats | None = None
        recent: Recent | None = None
        first_seconds: float | None = None
        passes = 0
        while steady.seconds < seconds and (not passes or clock() - began < MOST_TIMES * seconds):
            with contextlib.closing(_Begun(self._begin, clock)) as begun:
                begun.take_first(self._step, firsts)
                first_seconds = begun.first_seconds if first_seconds is None else first_seconds
                begun.take_rest(self._step, steady, epochs, Limits(seconds, self._first_batches), tell)
                found, last = begun.stats(), begun.recent()
            passes += 1
            if found is not None and (stats is None or found.batches > stats.batches):
                stats, recent = found, last
        sums = steady if steady.batches else epochs if epochs.batches else firsts
        return Round(
            batches=sums.batches,
            rows=sums.rows,
            nbytes=sums.nbytes,
            seconds=sums.seconds,
            waited_seconds=sums.waited,
            step_seconds=sums.worked,
            passes=passes,
            first_batch_seconds=first_seconds or 0.0,
            epochs=epochs.begun,
            epochs_seconds=epochs.waited_for_begun,
            has_steady=sums is steady,
            stats=stats,
            recent=recent,
        )


class _Begun:
    """A pass that is being timed."""

    def __init__(self, begin: Callable[[], Pass], clock: Clock) -> None:
        self._clock = clock
        self._began = clock()
        self._pass = begin()
        self.first_seconds = 0.0

    def take_first(self, step: Callable[[Any], object], sums: _Sums) -> None:
        """Take the first batch, with all that beginning takes."""
        try:
            batch = next(self._pass)
        except StopIteration:
            raise BatchError("the source gives no batch: it is empty, or has fewer rows than a batch") from None
        taken = self._clock()
        self.first_seconds = taken - self._began
        step(batch)
        sums.took(self.first_seconds, self._clock() - taken)
        sums.add(*self._pass.counts)

    def take_rest(self, step: Callable[[Any], object], steady: _Sums, epochs: _Sums, limits: Limits, tell: Tell) -> None:
        """Take the batches after it, until the sums have these seconds, too much time has gone, or there is no more.

        Args:
            step: what is done with a batch.
            steady: gets what is counted.
            epochs: gets the first batches of epochs: beginning one may start processes and open files, and a short measurement has none
                or one of them.
            limits: how long, and how many first batches.
            tell: is told now and then.
        """
        clock, batches = self._clock, self._pass
        before = batches.counts
        first_left, counted, left_out = limits.first_batches - 1, steady.batches, epochs.batches
        begun = epochs.begun
        told = 0.0
        began = asked = clock()
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                break
            taken = clock()
            step(batch)
            del batch
            done = clock()
            if batches.begins_epoch:
                first_left = limits.first_batches
                epochs.begun += 1
            (epochs if first_left else steady).took(taken - asked, done - taken)
            if first_left and epochs.begun > begun:  # else it is the pass that begins
                epochs.waited_for_begun += taken - asked
            first_left = max(0, first_left - 1)
            if steady.seconds >= limits.seconds or self._is_only_beginning(steady, epochs, done - began, limits.seconds):
                break
            if done - told >= TELL_SECONDS:
                told = done
                tell(steady.seconds)
            asked = done
        after = batches.counts
        rows, nbytes = after.rows - before.rows, after.nbytes - before.nbytes
        counted, left_out = steady.batches - counted, epochs.batches - left_out
        share = counted / max(1, counted + left_out)
        steady.add(round(share * rows), round(share * nbytes))
        epochs.add(round((1 - share) * rows), round((1 - share) * nbytes))

    @staticmethod
    def _is_only_beginning(steady: _Sums, epochs: _Sums, passed: float, seconds: float) -> bool:
        """Whether to leave off as epochs that begin take the time."""
        return epochs.begun > 0 and (passed >= MOST_TIMES * seconds or (not steady.batches and epochs.seconds >= seconds))

    def stats(self) -> Stats | None:
        return self._pass.stats()

    def recent(self) -> Recent | None:
        return self._pass.recent()

    def close(self) -> None:
        self._pass.close()
