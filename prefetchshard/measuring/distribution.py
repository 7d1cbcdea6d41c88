"""How durations are spread: counted in buckets of equal ratio, so that counts of two moments can be subtracted."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

from prefetchshard.base.memory import AnyArray

LEAST_SECONDS = 1e-7
"""Everything shorter is in the first bucket."""

PER_OCTAVE = 32
"""Buckets from a duration to twice that: a quantile is off by 1.1 % at most."""

BUCKETS = 40 * PER_OCTAVE
"""Up to 30 hours."""


class Distribution(msgspec.Struct, frozen=True):
    """Durations, in seconds.

    Attributes:
        count: how many.
        total: their sum.
        largest: the longest one; of a difference of two moments, where the earlier one had it already: the longest that its bucket allows.
        largest_step: the step of the batch that had it; -1 where none had.
        buckets: how many in each bucket of equal ratio, by its number; what quantiles are worked out from.
    """

    count: int = 0
    total: float = 0.0
    largest: float = 0.0
    largest_step: int = -1
    buckets: dict[int, int] = {}

    @property
    def mean(self) -> float:
        """Seconds; 0.0 where there is none."""
        return self.total / self.count if self.count else 0.0

    def quantile(self, share: float) -> float:
        """The duration that this share of all is not longer than, in seconds, to 1.1 %; 0.0 where there is none."""
        rank, seen = max(1, math.ceil(share * self.count)), 0
        for bucket in sorted(self.buckets):
            seen += self.buckets[bucket]
            if seen >= rank:
                return min(middle_of(bucket), self.largest)
        return self.largest

    @property
    def p50(self) -> float:
        """The median, in seconds."""
        return self.quantile(0.5)

    @property
    def p90(self) -> float:
        """Nine of ten are not longer; seconds."""
        return self.quantile(0.9)

    @property
    def p99(self) -> float:
        """Ninety-nine of a hundred are not longer; seconds."""
        return self.quantile(0.99)

    def __sub__(self, earlier: Distribution) -> Distribution:
        """What was added since an earlier moment."""
        left = {bucket: more for bucket, count in self.buckets.items() if (more := count - earlier.buckets.get(bucket, 0)) > 0}
        is_new = self.largest > earlier.largest
        largest = self.largest if is_new else min(self.largest, upper_of(max(left))) if left else 0.0
        return Distribution(self.count - earlier.count, self.total - earlier.total, largest, self.largest_step if is_new else -1, left)

    def to_dict(self) -> dict[str, Any]:
        """Its numbers, without the buckets."""
        names = ("count", "total", "mean", "p50", "p90", "p99", "largest", "largest_step")
        return {name: getattr(self, name) for name in names}


class Durations:
    """Durations as they are added. Thread safety: one thread at a time."""

    __slots__ = ("_counts", "count", "largest", "largest_step", "total")

    def __init__(self) -> None:
        self._counts = np.zeros(BUCKETS, np.int64)
        self.count = 0
        self.total = 0.0
        self.largest = 0.0
        self.largest_step = -1

    def add(self, seconds: AnyArray, steps: Iterable[int]) -> None:
        """Add several; `steps`: of their batches."""
        if not len(seconds):
            return
        self._counts += np.bincount(bucket_of(seconds), minlength=BUCKETS)
        self.count += len(seconds)
        self.total += float(seconds.sum())
        at = int(seconds.argmax())
        if seconds[at] > self.largest or self.largest_step < 0:
            self.largest = float(seconds[at])
            self.largest_step = list(steps)[at]

    def now(self) -> Distribution:
        """What was added so far, as a value."""
        used = np.flatnonzero(self._counts)
        buckets = dict(zip(used.tolist(), self._counts[used].tolist(), strict=True))
        return Distribution(self.count, self.total, self.largest, self.largest_step, buckets)


def bucket_of(seconds: AnyArray) -> AnyArray:
    """The number of each duration's bucket."""
    return (np.log2(np.maximum(seconds, LEAST_SECONDS) / LEAST_SECONDS) * PER_OCTAVE).astype(np.int64).clip(0, BUCKETS - 1)


def middle_of(bucket: int) -> float:
    """Seconds; the geometric middle of a bucket."""
    return LEAST_SECONDS * 2.0 ** ((bucket + 0.5) / PER_OCTAVE) if bucket else 0.0


def upper_of(bucket: int) -> float:
    """Seconds; where a bucket ends."""
    return LEAST_SECONDS * 2.0 ** ((bucket + 1) / PER_OCTAVE)
