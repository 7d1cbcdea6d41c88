"""How many batches may be where, from counts and from bytes. Pure arithmetic."""

from __future__ import annotations

import math
import numbers
import re

import msgspec

from prefetchshard.base.codec import shown
from prefetchshard.base.errors import ConfigError

MOST_IN_FLIGHT = 3
"""Transfers under way at once: while the loop waits for one the next is under way already, and a third covers the wake-up between."""

MOST_WAITING = 48
"""Reader threads that wait, for files or networks, at most, where nobody says how many."""

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "TIB": 1 << 40,
}


def parse_bytes(name: str, value: object) -> int | None:
    """A size in bytes from a number or a text such as "2GiB" or "500 MB"; None stays None.

    Raises:
        ConfigError: it is no positive size.
    """
    if value is None:
        return None
    if not isinstance(value, bool) and isinstance(value, numbers.Integral) and int(value) > 0:
        return int(value)
    if isinstance(value, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
        if found and found[2].upper() in _UNITS:
            size = float(found[1]) * _UNITS[found[2].upper()]
            if math.isfinite(size) and size >= 1:
                return int(size)
    raise ConfigError(f'{name}={shown(value)}: a positive number of bytes, or a text such as "2GiB" or "500MB"')


class Limits(msgspec.Struct, frozen=True):
    """Attributes:
    depth: batches ready on the devices ahead of the one in use.
    in_flight: transfers on their way at once.
    slots: batches on the host: being read, read, or in a transfer that is not ready yet.
    read_ahead: the most batches that may be pulled from the source and not delivered; None: as many as the others allow.
    """

    depth: int
    in_flight: int
    slots: int
    read_ahead: int | None = None

    @property
    def ahead(self) -> int:
        """The most batches that are ever pulled from the source and not delivered."""
        if self.read_ahead is None:
            return self.depth + self.in_flight + self.slots
        return min(self.read_ahead, self.depth + self.slots)  # a place on the host is then held until there is one on the devices

    def kept_to(self, read_ahead: int | None) -> Limits:
        """These, with no part of them larger than the whole may be."""
        if read_ahead is None:
            return self
        return Limits(min(self.depth, read_ahead), min(self.in_flight, read_ahead), min(self.slots, read_ahead), read_ahead)


def within_bytes(
    wanted: Limits, *, batch_bytes: int, device_bytes: int, host_memory: int | None, device_memory: int | None, least_slots: int = 1
) -> Limits:
    """The limits that keep to the bounds in bytes.

    Args:
        wanted: from the counts.
        batch_bytes: of one batch on the host.
        device_bytes: of one batch on one device.
        host_memory: bound on all batches on the host, bytes.
        device_memory: bound on what is ahead of the batch in use on each device, bytes.
        least_slots: batches that must be on the host at once for the run to go on.

    Raises:
        ConfigError: not even the least fits; gives the numbers.
    """
    depth, in_flight, slots = wanted.depth, wanted.in_flight, wanted.slots
    if device_memory is not None and device_bytes:
        fitting = device_memory // device_bytes
        if fitting < 2:
            raise ConfigError(
                f"device_memory={device_memory:,} bytes: a batch takes {device_bytes:,} bytes on each device, and at least two are there "
                f"beside the one in use (one ready, one on its way): {2 * device_bytes:,}; raise the bound or make the batches smaller"
            )
        in_flight = min(in_flight, fitting - 1)
        depth = min(depth, fitting - in_flight)
    if host_memory is not None and batch_bytes:
        slots = min(slots, host_memory // batch_bytes)
        if slots < least_slots:
            two = f", and two are there at once where one may be the last and short: {2 * batch_bytes:,}" if least_slots > 1 else ""
            raise ConfigError(
                f"host_memory={host_memory:,} bytes: one batch takes {batch_bytes:,} on the host{two}; raise the bound or make the batches smaller"
            )
    return Limits(depth, min(in_flight, slots), slots, wanted.read_ahead)
