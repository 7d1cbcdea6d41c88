"""The plan of full batches from one that may be short: what a run that goes on has in place of the first batch."""

from __future__ import annotations

from typing import Any

from prefetchshard.base.errors import PlacementError
from prefetchshard.leaves.on_devices import is_jax_array
from prefetchshard.planning.planner import Plan, Planner, splits_rows
from prefetchshard.sharding.batch_tree import BatchTree


class Rowed:
    """Says of each leaf of a batch whether it has rows, as a plan does."""

    def __init__(self, structure: BatchTree, rows: int, with_rows: set[int]) -> None:
        self.structure = structure
        self.rows = rows
        self.leaves = [RowedLeaf(i in with_rows) for i in range(len(structure))]


class RowedLeaf:
    """See `Rowed`."""

    def __init__(self, has_rows: bool) -> None:
        self.has_rows = has_rows


def plan_full(planner: Planner, values: list[Any], structure: BatchTree, rows: int, has: int | None = None) -> Plan:
    """The plan of batches of so many rows, from a batch of this structure that may have fewer, or more.

    Args:
        planner: of the run.
        values: the leaves of the batch, from `as_host_leaves`.
        structure: of the batch.
        rows: of a full batch.
        has: rows of this one, where that is known.
    """
    hosts = planner.rules.on_host(structure)
    placed = [i for i, (value, host) in enumerate(zip(values, hosts, strict=True)) if not host and getattr(value, "shape", ())]
    sizes = {values[i].shape[0] for i in placed}
    for size in sorted(sizes if has is None else sizes & {has}, key=lambda size: size != rows):
        with_rows = {i for i in placed if values[i].shape[0] == size}
        if len(sizes) == 1 or _holds(planner, values, structure, rows, with_rows):
            return planner.for_batch(values, structure, Rowed(structure, rows, with_rows))
    return planner.for_batch(values, structure)


def _holds(planner: Planner, values: list[Any], structure: BatchTree, rows: int, with_rows: set[int]) -> bool:
    """Whether a batch would have rows in these leaves, if it were full: all leaves that are split along axis 0 are among them."""
    shapes = [(rows, *value.shape[1:]) if i in with_rows else getattr(value, "shape", ()) for i, value in enumerate(values)]
    dtypes = [value.dtype if is_jax_array(value) or hasattr(value, "dtype") else None for value in values]
    try:
        found = planner.rules.shardings(structure, shapes, dtypes)
    except PlacementError:
        return False
    split = {i for i, (sharding, shape) in enumerate(zip(found, shapes, strict=True)) if splits_rows(sharding, len(shape))}
    return bool(split) and split <= with_rows
