"""Decides how many batches are kept ready on the devices, from what a run has done so far. Pure: no thread, no clock of its own.

More of them help a loop that waits now and then although batches come fast enough on average: some batch took longer (a file that had to be
opened, a pause of the storage), while those before it had filled all places, so that nothing could be made ahead. They help nobody who
always waits, as no place is ever filled then, nor who never does. Whether they did is measured: what did not pay is undone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

FIRST_DEPTH = 2
"""Where a run begins, and the least: one batch is taken while the next one is there."""

MOST_DEPTH = 32
"""The most, where there is memory for so many."""

LEAST_STALL = 0.01
"""Of the time. A loop that waits less than that is left alone."""

STALLS = 2
"""Times that all batches were used up after all places had been filled. A single one may never come again."""

GROWTH = 4
"""Times as many places at once. With twice as many it was not clear whether they paid where a pause takes 25 steps (`bench/auto_depth.py`,
"long pauses": one run of three ended at 2)."""

WORTH = 0.9
"""They pay where the waits, or the part of the time that they take, are below so much of what they were."""

CALM_SECONDS = 60.0
"""What was not used for so long is given up, and what did not pay is not tried again for so long; then for twice as long."""

MOST_PATIENCE_SECONDS = 600.0


class Change(NamedTuple):
    """Another depth.

    Attributes:
        depth: from now on.
        reason: in words.
    """

    depth: int
    reason: str


class _Trial(NamedTuple):
    """More places that have to prove themselves: how many there were before, how long a wait was, and how much of the time they took."""

    before: int
    stall_seconds: float
    share: float


class DepthController:
    """The policy. Thread safety: one caller at a time."""

    def __init__(self) -> None:
        self._depth = 0
        self._trial: _Trial | None = None
        self._quiet_until = -math.inf
        self._patience = CALM_SECONDS
        self._restart(0.0, 0.0)

    def _restart(self, at: float, stalled: float) -> None:
        """Look anew from here on."""
        self._from, self._stalled_from = at, stalled
        self._stalls = 0
        self._least_ready = MOST_DEPTH
        self._was_full = False

    def decide(self, at: float, stalled: float, ready: int, depth: int, most: Callable[[], int]) -> Change | None:
        """One more batch is ready. None: go on as it is.

        Args:
            at: when, in seconds of the run's clock.
            stalled: seconds that the consumer has waited in `next()` so far.
            ready: batches that are ready before this one and not taken yet.
            depth: the present number of places for these.
            most: how many there may be.
        """
        if depth != self._depth:  # the first look, or somebody else changed it
            self._depth, self._trial = depth, None
            self._restart(at, stalled)
        self._least_ready = min(self._least_ready, ready)
        if ready == 0 and self._was_full:
            self._stalls += 1
            self._was_full = False
        if ready < depth:
            return None
        self._was_full = True
        seconds, lost = max(at - self._from, 1e-9), stalled - self._stalled_from
        change = self._judge(at, seconds, lost) or self._grow(at, seconds, lost, depth, most) or self._shrink(seconds, depth)
        if change is not None:
            self._depth = change.depth
        if change is not None or seconds >= CALM_SECONDS:
            self._restart(at, stalled)
        return change

    def _judge(self, at: float, seconds: float, lost: float) -> Change | None:
        """Undo what did not pay."""
        trial = self._trial
        if trial is None or (self._stalls < STALLS and seconds < CALM_SECONDS):
            return None
        self._trial = None
        share, each = lost / seconds, lost / max(1, self._stalls)
        if self._stalls < STALLS or each < WORTH * trial.stall_seconds or share < WORTH * trial.share:
            return None
        self._quiet_until = at + self._patience
        self._patience = min(MOST_PATIENCE_SECONDS, 2 * self._patience)
        return Change(trial.before, f"more brought nothing: the consumer still waits {_percent(share)} of the time")

    def _grow(self, at: float, seconds: float, lost: float, depth: int, most: Callable[[], int]) -> Change | None:
        if self._trial is not None or self._stalls < STALLS or lost < LEAST_STALL * seconds or at < self._quiet_until:
            return None
        target = min(GROWTH * depth, most())
        if target <= depth:
            return None
        self._trial = _Trial(depth, lost / self._stalls, lost / seconds)
        return Change(
            target,
            f"the consumer waits {_percent(lost / seconds)} of the time, {self._stalls} times after all {depth} places had been filled",
        )

    def _shrink(self, seconds: float, depth: int) -> Change | None:
        if seconds < CALM_SECONDS or self._least_ready < 2 or depth <= FIRST_DEPTH:
            return None
        self._trial = None
        target = max(FIRST_DEPTH, depth - self._least_ready // 2)
        return Change(target, f"never fewer than {self._least_ready} were ready in {seconds:.0f} s")


def _percent(part: float) -> str:
    return f"{100 * part:.1f} %"
