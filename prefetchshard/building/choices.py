"""What a loader chooses by itself: threads, order, room."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import msgspec

from prefetchshard.base.cgroups import memory_limit, physical_bytes
from prefetchshard.base.config import Processes, Settings
from prefetchshard.base.cpus import cpu_count
from prefetchshard.base.device_memory import memory_told
from prefetchshard.base.errors import ConfigError
from prefetchshard.base.jax_types import local_devices
from prefetchshard.base.limits import MOST_IN_FLIGHT, MOST_WAITING
from prefetchshard.building.batch_limits import IN_FLIGHT, BatchLimits, ReadAtOnce
from prefetchshard.building.checks import check_last_rows
from prefetchshard.leaves.copying import private_copy
from prefetchshard.ordering.epoch_order import EpochOrder
from prefetchshard.placing.depth import FIRST_DEPTH, MOST_DEPTH
from prefetchshard.reading.full_rows import too_few
from prefetchshard.sharding.batch_tree import in_brackets, leaf_paths
from prefetchshard.sharding.rules import ShardingRules
from prefetchshard.sources import Source

MOST_AT_WORK = 16
"""More threads that compute or copy bring nothing or lose: they wait for each other to give the interpreter's lock back."""

MOST_WHOLE = 16
"""The same where each needs the room of a whole batch."""

DEPTH_SHARE = 1 / 16
"""Of a device's memory, what `depth="auto"` fills at most with batches that are ready: the rest belongs to the training step."""

FIRST_COPYING = 8
"""Threads that copy arrays, at the beginning. More seldom bring more, as memory is then what is slow."""

FIRST_READING = 4
"""Threads that run the user's code, at the beginning: it waits more often than it computes, and it may hold the interpreter's lock."""


class Workers(msgspec.Struct, frozen=True):
    """How many reader threads there are, each with a process where there are such.

    Attributes:
        first: when a run begins.
        for_work: the most that compute.
        most: of all.
        are_controlled: their number changes while a run goes on.
    """

    first: int
    for_work: int
    most: int
    are_controlled: bool


def choose_workers(source: Source, settings: Settings, batch_size: int | None) -> Workers:
    """Reader threads, by what they have to do."""
    if isinstance(settings.workers, Processes):
        return _fixed(settings.workers.n)
    if settings.workers != "auto":
        return _fixed(settings.workers)
    if source.stays_on_devices:
        return _fixed(1)  # which writes row numbers
    for_work = min(MOST_AT_WORK, cpu_count())
    if source.is_memory and settings.transform is None:
        return Workers(min(FIRST_COPYING, for_work), for_work, for_work, are_controlled=for_work > 1)
    if source.is_numbered is False and settings.transform is None and settings.collate is None:
        return _fixed(min(MOST_AT_WORK, max(FIRST_READING, for_work)))  # the source's thread is what takes time; these help to copy
    most = MOST_WHOLE if batch_size is None else MOST_WAITING
    return Workers(FIRST_READING, for_work, most, are_controlled=True)


def _fixed(workers: int) -> Workers:
    return Workers(workers, workers, workers, are_controlled=False)


def takes_processes(source: Source, settings: Settings) -> bool:
    """Whether there are worker processes: asked for, and with something to do beside copying."""
    if not isinstance(settings.workers, Processes) or source.stays_on_devices:
        return False
    if source.is_memory:
        return settings.transform is not None
    return source.is_numbered is True or settings.transform is not None or settings.collate is not None


def make_order(source: Source, settings: Settings, rules: ShardingRules, batch_size: int | None) -> EpochOrder | None:
    """The order of the rows; None where items are pulled.

    Raises:
        ConfigError: the rows make no whole batches, and remainder="error"; or no batch at all, and remainder="drop"; or a last one that
            its sharding cannot split, and remainder="keep".
    """
    if source.is_numbered is False:
        return None
    drop = settings.policy == "drop" and batch_size is not None
    order = EpochOrder(source.length, batch_size or 1, drop=drop, shuffle=settings.shuffle, seed=settings.seed)
    if batch_size is not None and order.length % batch_size:
        leaves = in_brackets(leaf_paths(source.tree)) if source.is_memory else ""
        check_last_rows(f"the source{leaves} has {order.length} rows", order.length % batch_size, settings, rules, batch_size)
        if drop and order.length < batch_size:
            raise ConfigError(f"the source{leaves} gives no batch: {too_few(order.length, batch_size)}")
    return order


def make_limits(source: Source, settings: Settings, *, batch_size: int | None, workers: Workers, device: Any) -> BatchLimits:
    """How many batches may be where.

    Args:
        source: of the loader.
        settings: likewise.
        batch_size: rows of a step.
        workers: reader threads.
        device: the first that gets batches.

    Raises:
        ConfigError: `read_ahead` is so small that the run could not go on.
    """
    # A batch that is short waits until the source was asked for the one after it, for which there must be room
    holds_back = source.is_numbered is False and batch_size is None and settings.policy != "keep"
    if holds_back and settings.read_ahead == 1:
        raise ConfigError(
            f"read_ahead=1: under remainder={settings.remainder!r} a batch with fewer rows than the first is not delivered before the source "
            f"was asked for the next one, which tells whether it is the last; read_ahead=2 is the least here"
        )
    platform: str = device.platform
    grows = settings.depth == "auto" and not source.stays_on_devices  # which always takes the same time
    return BatchLimits(
        settings,
        most_depth=MOST_DEPTH if grows else first_depth(settings),
        depth_bytes=memory_bytes(device) * DEPTH_SHARE,
        depth_grows=grows,
        in_flight=IN_FLIGHT.get(platform, MOST_IN_FLIGHT),
        read_at_once=_batches_read_at_once(source, settings, batch_size, workers.most),
        most_workers=workers.most,
        least_slots=2 if holds_back else 1,
        small_go_in_bursts=platform == "cpu",
    )


def first_depth(settings: Settings) -> int:
    """Batches that the first run of a loader keeps ready to begin with."""
    return FIRST_DEPTH if settings.depth == "auto" else settings.depth


def memory_bytes(device: Any) -> float:
    """Memory of a device; infinite where nobody tells. Of one that does not tell, such as those of the CPU backend, it is the host's, as far
    as this process may use it, of which each device has an equal part."""
    return memory_told(device).get("bytes_limit") or host_bytes() / len(local_devices(backend=device.platform))


@functools.cache
def host_bytes() -> float:
    """Memory that this process may use; infinite where nobody tells. Asked once: it takes 0.7 ms, beside 1.2 for the rest of making a loader."""
    limit, physical = memory_limit(), physical_bytes()
    return min(math.inf if limit is None else limit.limit_bytes, physical or math.inf)


def _batches_read_at_once(source: Source, settings: Settings, batch_size: int | None, processes: int) -> ReadAtOnce:
    """Host batches being read, or read and not on their way yet."""
    has_functions = settings.transform is not None or settings.collate is not None
    if takes_processes(source, settings):  # what a process does at once may be a whole batch, and the next one may be asked for already
        return ReadAtOnce(1 + (2 * processes if source.is_numbered is True else processes))
    if source.is_memory and settings.transform is None:
        return ReadAtOnce(1, threads_a_batch=1)  # a batch may be one worker's
    if source.is_numbered is True or has_functions:
        return ReadAtOnce(2, threads_a_batch=batch_size or 1)
    # Where the source always goes on while the last item is still being copied, one more covers the waits for the interpreter's lock.
    return ReadAtOnce(1 if settings.reuses_buffers else 2)


def keeper(source: Source, settings: Settings) -> Callable[[Any], Any] | None:
    """How what stays on the host is kept from being overwritten by the source, or by functions that reuse a buffer; None: it is not."""
    has_functions = settings.transform is not None or settings.collate is not None
    if not settings.reuses_buffers or (source.shares_items and not has_functions):
        return None
    return private_copy if source.is_numbered is True else functools.partial(private_copy, deep=True)


def describe(source: Source, batch_size: int | None) -> str:
    """The source in words."""
    if source.is_numbered is True:
        return f"{source.kind} of {source.length} {'batches' if batch_size is None else 'rows'}"
    article = "a one-shot" if source.one_shot else "an" if source.kind[0] in "aeiou" else "a"
    return f"{article} {source.kind}"
