"""How many batches may be where, in one loader: from its settings, and from the bytes that batches turn out to take."""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec

from prefetchshard.base.config import Settings
from prefetchshard.base.limits import Limits, within_bytes
from prefetchshard.placing.depth import FIRST_DEPTH, MOST_DEPTH

IN_FLIGHT = {"cpu": 2}
"""Transfers under way at once, where that is not `MOST_IN_FLIGHT`."""

SMALL_BYTES = 1 << 18
"""Batches up to this size go in bursts on the CPU backend, where nothing of them is waited for."""

SMALL_SLOTS = 5
"""At least so many for batches that go in bursts."""


class ReadAtOnce(msgspec.Struct, frozen=True):
    """Host batches that are being read, or are read and not on their way yet.

    Attributes:
        least: of them, however few the threads.
        threads_a_batch: so many threads work on one batch, and further ones need another; None: more batches help nobody.
    """

    least: int
    threads_a_batch: int | None = None

    def by(self, workers: int) -> int:
        """How many, where there are so many threads."""
        return self.least if self.threads_a_batch is None else max(self.least, 1 + math.ceil(workers / self.threads_a_batch))


class _Sizes(NamedTuple):
    """Bytes of the largest batch, on the host and on one device; 0: not known yet."""

    host: int = 0
    device: int = 0


class BatchLimits:
    """The limits of a loader. They follow the largest batch so far, and never widen again after a large one.

    Holds no source: a run that ended would keep it alive through this.

    Args:
        settings: of the loader.
        most_depth: batches that a run may keep ready on the devices, at times.
        depth_bytes: that these take on each device, at most, where the depth grows, though at least `FIRST_DEPTH` are kept.
        depth_grows: a run may keep more batches ready than at its beginning.
        in_flight: transfers under way at once.
        read_at_once: how many host batches there are by the number of threads.
        most_workers: so many threads a run may have at times.
        least_slots: batches that must be on the host at once for the run to go on.
        small_go_in_bursts: small batches wait for nothing, so that handing over is what they cost.

    Attributes:
        now: the limits in force, where a run has the most threads and the greatest depth.
        depth_grows: as above.
        rows_on_devices_bytes: of a batch on one device, where what is planned is row numbers (`OnDevice`); else 0.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        most_depth: int,
        depth_bytes: float,
        depth_grows: bool,
        in_flight: int,
        read_at_once: ReadAtOnce,
        most_workers: int,
        least_slots: int,
        small_go_in_bursts: bool,
    ) -> None:
        self._settings = settings
        self._most_depth = most_depth
        self._depth_bytes = depth_bytes
        self.depth_grows = depth_grows
        self._in_flight = in_flight
        self._read_at_once = read_at_once
        self._most_workers = most_workers
        self._least_slots = least_slots
        self._small_go_in_bursts = small_go_in_bursts
        self._largest = _Sizes()  # of the batches that fitted
        self.rows_on_devices_bytes = 0
        self.now = Limits(most_depth, in_flight, in_flight + read_at_once.by(most_workers)).kept_to(settings.read_ahead)

    @property
    def is_small(self) -> bool:
        """Whether all batches so far were small, on a backend where they go in bursts."""
        return self._are_small(self._largest)

    def _are_small(self, largest: _Sizes) -> bool:
        return self._small_go_in_bursts and largest.host <= SMALL_BYTES

    def fit(self, host_bytes: int, device_bytes: int) -> Limits:
        """The limits that keep to the bounds in bytes with batches of this size, and of those before.

        Args:
            host_bytes: of a batch on the host.
            device_bytes: of a batch on one device; 0 where it is not known yet.

        Raises:
            ConfigError: not even the least fits; gives the numbers. The limits stay, as the batches before this one are still delivered.
        """
        known, on_device = self._largest, (self.rows_on_devices_bytes or device_bytes) if device_bytes else 0
        largest = _Sizes(max(known.host, host_bytes), max(known.device, on_device))
        self.now = self._limits(self._most_workers, self._most_depth, largest)
        self._largest = largest
        return self.now

    def of(self, workers: int, depth: int | None = None) -> Limits:
        """The limits of a run that has so many threads and keeps so many batches ready, if it may; None: as many as it may."""
        return self._limits(workers, self._most_depth if depth is None else min(depth, self._most_depth), self._largest)

    @property
    def could_grow(self) -> bool:
        """Whether a run would come to keep more batches ready if its depth followed what it needs."""
        largest = self._largest
        return not self.depth_grows and self._fitting(self._grown(MOST_DEPTH, largest), self.now.slots, largest).depth > self.now.depth

    def _limits(self, workers: int, depth: int, largest: _Sizes) -> Limits:
        slots = self._in_flight + self._read_at_once.by(workers)
        if self._are_small(largest):
            slots = max(slots, SMALL_SLOTS)
        return self._fitting(self._grown(depth, largest) if self.depth_grows else depth, slots, largest)

    def _grown(self, depth: int, largest: _Sizes) -> int:
        """So many batches, or as many of them as there is memory for, and as `read_ahead` lets be filled with one more waiting."""
        if self._settings.read_ahead is not None:
            depth = min(depth, max(FIRST_DEPTH, self._settings.read_ahead - 1))
        if not largest.device:
            return depth
        return int(min(depth, max(FIRST_DEPTH, self._depth_bytes / largest.device)))  # bytes may be infinite

    def _fitting(self, depth: int, slots: int, largest: _Sizes) -> Limits:
        settings = self._settings
        return within_bytes(
            Limits(depth, self._in_flight, slots).kept_to(settings.read_ahead),
            batch_bytes=largest.host,
            device_bytes=largest.device,
            host_memory=settings.host_memory,
            device_memory=settings.device_memory,
            least_slots=self._least_slots,
        )

    def workers_with_room(self, workers: int) -> int:
        """So many of these threads, at least one, as have room for what they make."""
        each = self._read_at_once.threads_a_batch
        return workers if each is None else max(1, min(workers, each * self.of(workers).slots))
