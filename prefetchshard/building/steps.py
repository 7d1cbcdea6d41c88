"""How many steps a run has, as far as that is known before it."""

from __future__ import annotations

from typing import Any

from prefetchshard.base.config import Settings
from prefetchshard.base.errors import PrefetchError
from prefetchshard.base.jax_context import x64_enabled
from prefetchshard.base.position import StartPoint
from prefetchshard.building.batch_specs import BatchSpecs
from prefetchshard.building.choices import describe
from prefetchshard.ordering.epoch_order import EpochOrder
from prefetchshard.planning.plan import HostPlan
from prefetchshard.planning.planner import Planner
from prefetchshard.sources import Source


def steps_of_run(
    source: Source, settings: Settings, batch_size: int | None, order: EpochOrder | None, specs: BatchSpecs, start: StartPoint
) -> int:
    """Steps of the run that begins at `start`.

    Raises:
        TypeError: not known.
    """
    if settings.epochs is None:
        raise TypeError("a loader with epochs=None has no length")
    left = max(0, start.run_epoch + settings.epochs - start.epoch)
    if order is not None:
        if not left:
            return 0
        steps = order.steps(start.rows if batch_size is not None else start.batches) + (left - 1) * order.steps()
        return steps - sum(_drops_last(source, settings, batch_size, order, specs, start, start.epoch + i) for i in range(left))
    length = source.length
    if length is None:
        raise TypeError(f"a loader over {describe(source, batch_size)} has no length")
    if batch_size is None:
        return max(0, left * length - start.batches)
    # The epoch may have had another batch size up to here, so its rows tell what is left of it
    more = 0 if settings.remainder == "drop" else batch_size - 1
    return 0 if not left else (left - 1) * ((length + more) // batch_size) + (max(0, length - start.rows) + more) // batch_size


def _drops_last(
    source: Source, settings: Settings, batch_size: int | None, order: EpochOrder, specs: BatchSpecs, start: StartPoint, epoch: int
) -> bool:
    """Whether the last batch of an epoch is dropped as shorter than the first of the run: told of lists, which can be looked at."""
    looks = batch_size is None and settings.remainder == "drop" and settings.transform is None
    if not looks or source.is_numbered is False or not source.shares_items or order.length < 2:
        return False
    places = ((start.run_epoch, 0), (epoch, order.length - 1))
    first, last = (order.rows(epoch, place, place + 1) for epoch, place in places)
    batches = [source.read(row.start if isinstance(row, slice) else int(row[0])) for row in (first, last)]
    planner = specs.planner(x64_enabled())
    try:
        first, last = (_host_plan(planner, batch) for batch in batches)
    except PrefetchError:  # the run will say it
        return False
    return first.tree == last.tree and None not in (first.rows, last.rows) and (last.rows or 0) < (first.rows or 0)


def _host_plan(planner: Planner, batch: Any) -> HostPlan:
    leaves, tree = planner.rules.flatten(batch)
    return planner.for_batch(planner.as_host_leaves(leaves, tree), tree)
