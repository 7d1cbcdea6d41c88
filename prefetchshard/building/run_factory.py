"""From the arguments of a loader to the parts of a run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from prefetchshard.base.clock import Clock
from prefetchshard.base.config import HOST, Settings
from prefetchshard.base.errors import PrefetchError, UsedUpError
from prefetchshard.base.jax_context import JaxContext, x64_enabled
from prefetchshard.base.jax_types import tree_flatten_with_path
from prefetchshard.base.position import Position, StartPoint
from prefetchshard.base.specs import LeafSpec
from prefetchshard.building.checks import check_endless, check_rows, check_source, global_rows
from prefetchshard.building.choices import choose_workers, describe, keeper, make_limits, make_order
from prefetchshard.measuring.stats import Meters
from prefetchshard.on_device.store import DeviceRows, RowNumberPlanner
from prefetchshard.ordering.epoch_order import EpochOrder
from prefetchshard.placing.device_transform import DeviceTransform
from prefetchshard.placing.placed_batch import PlacedBatch
from prefetchshard.placing.placer import Placer
from prefetchshard.placing.transfer_loops import TransferLimits
from prefetchshard.planning.plan import HostPlan, Plan, check_mask_key, leaf_spec
from prefetchshard.planning.planner import Planner
from prefetchshard.reading.item_dealer import ItemDealer
from prefetchshard.reading.reading_plan import Reader, ReadingPlan
from prefetchshard.reading.row_dealer import RowDealer
from prefetchshard.reading.sequencer import Sequencer
from prefetchshard.reading.user_functions import UserFunctions
from prefetchshard.reading.writing import Writer
from prefetchshard.resuming.handed_out import check_one_shot, check_rows_left, fingerprint_of, next_run, start_point_of
from prefetchshard.resuming.replay import ReplayedSource
from prefetchshard.running.run import Run, new_queue
from prefetchshard.sharding.batch_tree import path_text
from prefetchshard.sharding.rules import ShardingRules, resolve
from prefetchshard.sources import Source, recognise
from prefetchshard.sources.asynchronous import FromThisLoop
from prefetchshard.sources.device_arrays import DeviceArrays
from prefetchshard.sources.iterables import set_epoch
from prefetchshard.staging.aliased import Staging
from prefetchshard.staging.pinned import choose_staging


class RunFactory:
    """Everything that is fixed where the loader is made, and where it stands between its runs.

    Args:
        source: the user's.
        sharding: the user's.
        settings: checked by themselves.
        clock: monotonic seconds.
    """

    def __init__(self, source: Any, sharding: Any, settings: Settings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._pid = os.getpid()
        self._given = source
        self._source = recognise(source, batched=settings.batch_size is not None)
        self._rules: ShardingRules = resolve(sharding)
        self.batch_size = global_rows(settings, self._rules)
        self.workers = choose_workers(self._source, settings)
        check_source(self._source, settings)
        check_rows(self._rules, settings, self.batch_size)
        self._device_transform = None if settings.device_transform is None else DeviceTransform(settings.device_transform, settings.seed)
        self._order = make_order(self._source, settings, self.batch_size)
        self._specs: dict[bool, tuple[LeafSpec, ...]] = {}  # by whether x64 is in force: the dtypes depend on it
        self._device = self._rules.device()
        self._limits = make_limits(self._source, settings, batch_size=self.batch_size, workers=self.workers, platform=self._device.platform)
        self._ring: Staging | None = None
        self._device_rows: tuple[bool, DeviceRows] | None = None  # by whether x64 is in force
        self.fingerprint = fingerprint_of(settings, self._source, self.batch_size)
        self.next_start = StartPoint(resumes_by="replay" if self._order is None else "index")
        self.last_run: Run | None = None
        check_endless(self._source, settings, self._order)
        self._plan_arrays(x64_enabled())

    # -- what is known before anything is read

    def _plan_arrays(self, x64: bool) -> None:
        """Where batches are rows of arrays, what they look like, and whether they can be placed, is known before any is read."""
        source, settings = self._source, self._settings
        if source.is_memory is False or settings.transform is not None or settings.collate is not None:
            return
        tree: Any = source.tree
        if settings.pad is not None and hasattr(tree, "keys"):
            check_mask_key(settings.pad, tree)
        tree_of_arrays = self._rules.flatten_arrays(tree)
        planner = self._planner(x64, _nothing if source.stays_on_devices else self._limits.fit)
        plan = planner.placed(host := planner.for_arrays(source.leaves, tree_of_arrays), host.rows)
        if isinstance(source, DeviceArrays):
            self._plan_device_rows(source, plan, x64)
        if settings.device_transform is None:
            self._specs[x64] = plan.spec()

    def _plan_device_rows(self, source: DeviceArrays, plan: Plan, x64: bool) -> None:
        """Where the rows are gathered on the devices: where the arrays lie there, and that there is room for them."""
        rows = DeviceRows(source, plan)
        self._device_rows = x64, rows
        self._limits.rows_on_devices_bytes = sum(leaf.bytes_per_device for leaf in plan.spec())
        planner = self._planner(x64, self._limits.fit, rows)
        planner.placed(host := planner.for_arrays(rows.numbers.leaves, rows.rules.flatten_arrays(rows.numbers.tree)), host.rows)
        rows.check_memory(self._limits.now.depth + self._limits.now.in_flight + 1)

    def _rows_on_devices(self, x64: bool) -> DeviceRows | None:
        """The arrays on the devices, put there by the first run; by a later one anew where other dtypes are in force."""
        if self._device_rows is None:
            return None
        if self._device_rows[0] != x64:
            self._plan_arrays(x64)
        rows = self._device_rows[1]
        rows.put(self._settings.narrow)
        return rows

    @property
    def ahead(self) -> int:
        """The most batches that are ever pulled from the source and not delivered."""
        return self._limits.now.ahead

    def _staging(self) -> Staging:
        """The ring, made for the first run and kept between runs."""
        if self._ring is None:
            self._ring = choose_staging(self._device, self._limits.now.slots)
        return self._ring

    def _planner(self, x64: bool, on_bytes: Callable[[int, int], object], rows: DeviceRows | None = None) -> Planner:
        """Plans batches; of row numbers, where the rows are gathered on the devices."""
        settings = self._settings
        make = Planner if rows is None else RowNumberPlanner
        return make(
            self._rules if rows is None else rows.rules,
            rows=self.batch_size,
            pad=settings.pad if rows is None else None,
            microbatches=settings.microbatches if rows is None else None,
            narrow=settings.narrow,
            x64=x64,
            on_bytes=on_bytes,
        )

    # -- a run

    def build(self, start: StartPoint) -> Run:
        """The parts of a run that begins at `start`, under the JAX settings in force in this thread."""
        settings, context, clock = self._settings, JaxContext(), self._clock
        rows = self._rows_on_devices(context.x64)
        staging = self._staging()
        device_transform = None if self._device_transform is None else self._device_transform.under(context)
        limits, now = self._limits, self._limits.now
        queue = new_queue(now.slots, clock, held_until_release=True)
        outbox = new_queue(now.depth, clock)
        transfers = TransferLimits(now.in_flight, waits_apart=self._device.platform != "cpu")

        def fit(host_bytes: int, device_bytes: int) -> None:
            fitting = limits.fit(host_bytes, device_bytes)
            queue.capacity, outbox.capacity, transfers.in_flight = fitting.slots, fitting.depth, fitting.in_flight
            queue.in_bursts = outbox.in_bursts = limits.is_small
            queue.senders.wake()  # there may be more room

        meters = Meters()
        planner = self._planner(context.x64, fit, rows)
        plan = ReadingPlan(
            functions=UserFunctions(settings.transform, settings.collate, settings.seed),
            out=queue,
            meters=meters,
            start=start,
            epochs=settings.epochs,
            batch_size=self.batch_size,
            remainder=settings.policy,
            workers=self.workers,
            reuses_buffers=settings.reuses_buffers,
            clock=clock,
        )
        sequencer = Sequencer(
            queue,
            planner,
            staging,
            meters,
            start,
            batch_size=self.batch_size,
            remainder=settings.policy,
            is_endless=settings.epochs is None,
        )
        run = Run(
            self._reader(plan, Writer(planner, staging, keeper(self._source, settings)), self._source if rows is None else rows.numbers),
            sequencer,
            Placer(device_transform, context, clock, gather=rows),
            outbox,
            transfer_limits=transfers,
            meters=meters,
            staging=staging,
            workers=self.workers,
            context=context,
            clock=clock,
        )
        self.last_run = run
        return run

    def _reader(self, plan: ReadingPlan, writer: Writer, source: Source) -> Reader:
        if source.is_numbered is True:
            assert self._order is not None
            rules = writer.planner.rules
            tree = rules.flatten_arrays(source.tree) if source.is_memory is True and self._settings.transform is None else None
            return RowDealer(plan, writer, source, self._order, tree)
        given = self._given.iterable if isinstance(self._given, FromThisLoop) else self._given
        replayed = ReplayedSource(source, plan.start, plan.batch_size, self._settings.snapshot_every, plan.meters, plan.clock)
        return ItemDealer(plan, writer, replayed, lambda epoch: set_epoch(given, epoch))

    def go_on_from(self, state: object) -> None:
        """Let the next run begin where a state was saved.

        Raises:
            ConfigError: it is no state.
            StateError: it does not fit this loader.
        """
        start = start_point_of(state, self.fingerprint)
        if self._order is not None:
            check_rows_left(start, self._order, self._settings, self.batch_size)
        elif self.one_shot:
            check_one_shot(start, self._given)
        self.next_start = start

    def ended(self, start: StartPoint, last: Position | None) -> StartPoint:
        """A run ended by itself: the loader stands at the beginning of the next one, which is returned."""
        following = next_run(start, last, self._settings.epochs)
        if start.run >= self.next_start.run:
            self.next_start = following
        return following

    # -- looking

    @property
    def one_shot(self) -> bool:
        return self._source.one_shot

    def check_process(self) -> None:
        """Whether this is the process that made the loader.

        Raises:
            UsedUpError: it was carried into a forked child.
        """
        if self._pid != os.getpid():
            raise UsedUpError(
                "this loader was made in the parent of this forked process; make a new one here, after a spawn rather than a fork"
            )

    def check_thread(self) -> None:
        """Whether this thread may wait for a batch.

        Raises:
            RuntimeError: it is the thread of the event loop that has to produce it.
        """
        home = self._source.home
        if home is not None and home.runs_here():
            raise RuntimeError(
                "the source is bound to the event loop of this thread (ps.from_this_loop), so waiting here would block the loop that has "
                "to produce the batch: use `async for`, or consume in another thread"
            )

    def known_spec(self) -> tuple[LeafSpec, ...] | None:
        x64 = x64_enabled()
        if x64 not in self._specs:
            self._plan_arrays(x64)
        return self._specs.get(x64)

    def learn_spec(self, placed: PlacedBatch, *, x64: bool) -> tuple[LeafSpec, ...]:
        """The spec of the batches, from one of them, made while x64 was in force or not."""
        if x64 not in self._specs:
            self._specs[x64] = placed.spec() if self._device_transform is None else _spec_of(placed.finished())
        return self._specs[x64]

    def remember_spec(self, placed: PlacedBatch, *, x64: bool) -> None:
        """As `learn_spec`, of a batch that is handed out: where it cannot be taken apart (odd things kept on the host) nothing is learnt."""
        with contextlib.suppress(ValueError, TypeError):
            self.learn_spec(placed, x64=x64)

    def steps(self) -> int:
        """Steps of the run that would begin now.

        Raises:
            TypeError: not known.
        """
        epochs = self._settings.epochs
        if epochs is None:
            raise TypeError("a loader with epochs=None has no length")
        start = self.next_start
        left = start.run_epoch + epochs - start.epoch
        if self._order is not None:
            if left <= 0:
                return 0
            done = start.rows if self.batch_size is not None else start.batches
            steps = self._order.steps(done) + (left - 1) * self._order.steps()
            return steps - sum(self._drops_last(self._order, start.epoch + i) for i in range(left))
        length = self._source.length
        if length is None:
            raise TypeError(f"a loader over {self.describe()} has no length")
        each = length if self.batch_size is None else length // self.batch_size
        if self.batch_size is not None and self._settings.remainder != "drop":
            each = -(-length // self.batch_size)
        done = start.batches
        if self.batch_size is not None and left > 0:  # it may have had another batch size up to here
            done = each - max(0, length - start.rows) // self.batch_size
            if self._settings.remainder != "drop":
                done = each - -(-max(0, length - start.rows) // self.batch_size)
        return max(0, left * each - done)

    def _drops_last(self, order: EpochOrder, epoch: int) -> bool:
        """Whether the last batch of an epoch is dropped as shorter than the first of the run: told of lists, which can be looked at."""
        source, settings = self._source, self._settings
        looks = self.batch_size is None and settings.remainder == "drop" and settings.transform is None
        if not looks or source.is_numbered is False or not source.shares_items or order.length < 2:
            return False
        places = ((self.next_start.run_epoch, 0), (epoch, order.length - 1))
        first, last = (order.rows(epoch, place, place + 1) for epoch, place in places)
        batches = [source.read(row.start if isinstance(row, slice) else int(row[0])) for row in (first, last)]
        planner = self._planner(x64_enabled(), _nothing)
        try:
            first, last = (_host_plan(planner, batch) for batch in batches)
        except PrefetchError:  # the run will say it
            return False
        return first.tree == last.tree and None not in (first.rows, last.rows) and (last.rows or 0) < (first.rows or 0)

    def describe(self) -> str:
        """The source in words."""
        return describe(self._source, self.batch_size)

    def rest(self) -> str:
        """Where it stands while no run is live, in words."""
        start = self.next_start
        return f"at rest before run {start.run}, epoch {start.epoch}, step {start.step}"


def _spec_of(batch: Any) -> tuple[LeafSpec, ...]:
    found: list[LeafSpec] = []
    for keys, leaf in tree_flatten_with_path(batch)[0]:
        if isinstance(leaf, jax.Array):
            found.append(leaf_spec(path_text(keys), leaf.shape, leaf.dtype, leaf.sharding))
        else:
            found.append(LeafSpec(path_text(keys), getattr(leaf, "shape", ()), getattr(leaf, "dtype", np.dtype(object)), HOST, 0))
    return tuple(found)


def _nothing(host_bytes: int, device_bytes: int) -> None:
    del host_bytes, device_bytes


def _host_plan(planner: Planner, batch: Any) -> HostPlan:
    leaves, tree = planner.rules.flatten(batch)
    return planner.for_batch(planner.as_host_leaves(leaves, tree), tree)
