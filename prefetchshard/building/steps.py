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
from prefetchshard.planning.planner import Planner
from prefetchshard.sources import Source

MOST_EPOCHS = 1024
"""The last batch of each of so many shuffled epochs is looked up; that takes some tens of milliseconds."""


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
        return steps - _left_out(source, settings, batch_size, order, specs, start, left)
    length = source.length
    if length is None:
        raise TypeError(f"a loader over {describe(source, batch_size)} has no length")
    if batch_size is None:
        return max(0, left * length - start.batches)
    # The epoch may have had another batch size up to here, so its rows tell what is left of it
    more = 0 if settings.policy == "drop" else batch_size - 1
    return 0 if not left else (left - 1) * ((length + more) // batch_size) + (max(0, length - start.rows) + more) // batch_size


def _left_out(
    source: Source, settings: Settings, batch_size: int | None, order: EpochOrder, specs: BatchSpecs, start: StartPoint, epochs: int
) -> int:
    """How many epochs leave out their last batch as shorter than the first of the run: told of lists, which can be looked at.

    Raises:
        TypeError: the order is shuffled, and there are too many epochs to look at each.
    """
    looks = batch_size is None and settings.policy == "drop" and settings.transform is None
    if not looks or source.is_numbered is False or not source.shares_items or order.length < 2:
        return 0
    planner = specs.planner(x64_enabled())
    try:
        rows = [_rows(planner, source.read(i)) for i in range(order.length)]
    except PrefetchError:  # the run will say it
        return 0
    first = start.batch_rows
    if first is None:
        first = rows[_item(order, start.run_epoch, 0)]
    short = {i for i, count in enumerate(rows) if count is not None and first is not None and count < first}
    if not short:
        return 0
    if not order.shuffle:
        return epochs if order.length - 1 in short else 0
    if epochs > MOST_EPOCHS:
        raise TypeError(
            f"a loader over {epochs} shuffled epochs of batches of different sizes, under remainder='drop', has no length that can be told "
            f"before it runs"
        )
    return sum(_item(order, start.epoch + i, order.length - 1) in short for i in range(epochs))


def _item(order: EpochOrder, epoch: int, place: int) -> int:
    rows = order.rows(epoch, place, place + 1)
    return rows.start if isinstance(rows, slice) else int(rows[0])


def _rows(planner: Planner, batch: Any) -> int | None:
    leaves, tree = planner.rules.flatten(batch)
    return planner.for_batch(planner.as_host_leaves(leaves, tree), tree).rows
