"""What the batches of a loader look like: known before anything is read where the source is arrays, else learnt from the first batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from prefetchshard.base.config import HOST, Settings
from prefetchshard.base.jax_context import x64_enabled
from prefetchshard.base.jax_types import tree_flatten_with_path
from prefetchshard.base.specs import LeafSpec
from prefetchshard.building.batch_limits import BatchLimits
from prefetchshard.on_device.store import DeviceRows, RowNumberPlanner
from prefetchshard.placing.placed_batch import PlacedBatch
from prefetchshard.planning.plan import Plan, check_mask_key, leaf_spec
from prefetchshard.planning.planner import Planner
from prefetchshard.sharding.batch_tree import path_text
from prefetchshard.sharding.rules import ShardingRules
from prefetchshard.sources import Source
from prefetchshard.sources.device_arrays import DeviceArrays


def _nothing(host_bytes: int, device_bytes: int) -> None:
    del host_bytes, device_bytes


class BatchSpecs:
    """The specs of a loader's batches, one for each setting of x64: the dtypes depend on it.

    Args:
        source: of the rows.
        rules: what `sharding=` said.
        settings: of the loader.
        batch_size: global rows of a batch; None where the source makes the batches.
        limits: that batches must keep to.

    Raises:
        PlacementError: rows of arrays do not fit their sharding.
        ConfigError: they do not fit the memory, or the mask has no name.
    """

    def __init__(self, source: Source, rules: ShardingRules, settings: Settings, batch_size: int | None, limits: BatchLimits) -> None:
        self._source = source
        self._rules = rules
        self._settings = settings
        self._batch_size = batch_size
        self._limits = limits
        self._specs: dict[bool, tuple[LeafSpec, ...]] = {}
        self._device_rows: tuple[bool, DeviceRows] | None = None
        self._plan_arrays(x64_enabled())

    # -- arrays

    def _plan_arrays(self, x64: bool) -> None:
        """Where batches are rows of arrays, what they look like, and whether they can be placed, is known before any is read."""
        source, settings = self._source, self._settings
        if source.is_memory is False or settings.transform is not None or settings.collate is not None:
            return
        tree: Any = source.tree
        if settings.pad is not None and hasattr(tree, "keys"):
            check_mask_key(settings.pad, tree)
        tree_of_arrays = self._rules.flatten_arrays(tree)
        planner = self.planner(x64, _nothing if source.stays_on_devices else self._limits.fit)
        plan = planner.placed(host := planner.for_arrays(source.leaves, tree_of_arrays), host.rows)
        last = source.length % host.rows if host.rows else 0
        if last and settings.policy == "keep":
            planner.placed(host, last)
        if isinstance(source, DeviceArrays):
            self._plan_device_rows(source, plan, x64)
        if settings.device_transform is None:
            self._specs[x64] = plan.spec()

    def _plan_device_rows(self, source: DeviceArrays, plan: Plan, x64: bool) -> None:
        """Where the rows are gathered on the devices: where the arrays lie there, and that there is room for them."""
        rows = DeviceRows(source, plan)
        self._device_rows = x64, rows
        self._limits.rows_on_devices_bytes = sum(leaf.bytes_per_device for leaf in plan.spec())
        planner = self.planner(x64, self._limits.fit, rows)
        planner.placed(host := planner.for_arrays(rows.numbers.leaves, rows.rules.flatten_arrays(rows.numbers.tree)), host.rows)
        rows.check_memory(self._limits.now.depth + self._limits.now.in_flight + 1)

    def rows_on_devices(self, x64: bool) -> DeviceRows | None:
        """The arrays on the devices, put there by the first run; by a later one anew where other dtypes are in force."""
        if self._device_rows is None:
            return None
        if self._device_rows[0] != x64:
            self._plan_arrays(x64)
        rows = self._device_rows[1]
        rows.put(self._settings.narrow)
        return rows

    # -- any source

    def planner(self, x64: bool, on_bytes: Callable[[int, int], object] = _nothing, rows: DeviceRows | None = None) -> Planner:
        """Plans batches; of row numbers, where the rows are gathered on the devices."""
        settings = self._settings
        make = Planner if rows is None else RowNumberPlanner
        return make(
            self._rules if rows is None else rows.rules,
            rows=self._batch_size,
            pad=settings.pad if rows is None else None,
            microbatches=settings.microbatches if rows is None else None,
            narrow=settings.narrow,
            x64=x64,
            on_bytes=on_bytes,
        )

    def known(self) -> tuple[LeafSpec, ...] | None:
        x64 = x64_enabled()
        if x64 not in self._specs:
            self._plan_arrays(x64)
        return self._specs.get(x64)

    def learn(self, placed: PlacedBatch, *, x64: bool) -> tuple[LeafSpec, ...]:
        """The spec of the batches, from one of them, which is made already; while x64 was in force or not."""
        if x64 not in self._specs:
            self._specs[x64] = placed.spec() if self._settings.device_transform is None else _spec_of(placed.batch)
        return self._specs[x64]

    def remember(self, placed: PlacedBatch, *, x64: bool) -> None:
        """As `learn`, of a batch that is handed out: where it cannot be taken apart (odd things kept on the host) nothing is learnt."""
        with contextlib.suppress(ValueError, TypeError):
            self.learn(placed, x64=x64)


def _spec_of(batch: Any) -> tuple[LeafSpec, ...]:
    found: list[LeafSpec] = []
    for keys, leaf in tree_flatten_with_path(batch)[0]:
        if isinstance(leaf, jax.Array):
            found.append(leaf_spec(path_text(keys), leaf.shape, leaf.dtype, leaf.sharding))
        else:
            found.append(LeafSpec(path_text(keys), getattr(leaf, "shape", ()), getattr(leaf, "dtype", np.dtype(object)), HOST, 0))
    return tuple(found)
