"""From the arguments of a loader to the parts of a run."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from prefetchshard.base.clock import Clock
from prefetchshard.base.config import HOST, PerDevice, Settings
from prefetchshard.base.errors import ConfigError, PrefetchError, UsedUpError
from prefetchshard.base.jax_context import JaxContext, x64_enabled
from prefetchshard.base.position import Position, StartPoint
from prefetchshard.base.specs import LeafSpec
from prefetchshard.building.batch_limits import IN_FLIGHT, BatchLimits
from prefetchshard.leaves.copying import private_copy
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
from prefetchshard.reading.reading_plan import MOST_IN_FLIGHT, Reader, ReadingPlan, cpu_count
from prefetchshard.reading.row_dealer import RowDealer
from prefetchshard.reading.sequencer import Sequencer
from prefetchshard.reading.user_functions import UserFunctions
from prefetchshard.reading.writing import Writer
from prefetchshard.resuming.handed_out import check_one_shot, check_rows, cursor_of, fingerprint_of, next_run
from prefetchshard.resuming.replay import ReplayedSource
from prefetchshard.running.run import Run, new_queue
from prefetchshard.sharding.batch_tree import in_brackets, leaf_paths, path_text
from prefetchshard.sharding.rules import ShardingRules, resolve
from prefetchshard.sources import Source, recognise
from prefetchshard.sources.arrays import Arrays
from prefetchshard.sources.asynchronous import AsyncStream, FromThisLoop
from prefetchshard.sources.dataset import Dataset
from prefetchshard.sources.device_arrays import DeviceArrays
from prefetchshard.sources.iterables import set_epoch
from prefetchshard.staging.aliased import Staging
from prefetchshard.staging.pinned import choose_staging

_jax: Any = jax

MOST_WORKERS = 16
"""More threads bring nothing or lose: they wait for each other to give the interpreter's lock back."""


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
        self.batch_size = self._global_rows()
        self.workers = self._choose_workers()
        self._check_source()
        self._check_rows()
        self._device_transform = None if settings.device_transform is None else DeviceTransform(settings.device_transform, settings.seed)
        self._order = self._make_order()
        self._specs: dict[bool, tuple[LeafSpec, ...]] = {}  # by whether x64 is in force: the dtypes depend on it
        self._device = self._rules.device()
        self._limits = self._make_limits()
        self._ring: Staging | None = None
        self._device_rows: tuple[bool, DeviceRows] | None = None  # by whether x64 is in force
        self.fingerprint = fingerprint_of(settings, self._source, self.batch_size)
        self.cursor = StartPoint(resumes_by="replay" if self._order is None else "index")
        self.last_run: Run | None = None
        self._check_arrays()

    # -- checks

    def _global_rows(self) -> int | None:
        size = self._settings.batch_size
        if not isinstance(size, PerDevice):
            return size
        split = self._rules.batch_split()
        if split is None:
            raise ConfigError("ps.PerDevice needs a sharding that is known here; with a callable sharding give batch_size as a number")
        return size.rows * split

    def _check_source(self) -> None:
        settings = self._settings
        if isinstance(self._source, DeviceArrays) and (settings.transform is not None or settings.collate is not None):
            name = "transform" if settings.transform is not None else "collate"
            raise ConfigError(
                f"{name} runs on the host, and the rows of ps.OnDevice never come there: use device_transform, or pass the arrays themselves"
            )
        if isinstance(self._source, (Arrays, Dataset)):
            return
        if settings.shuffle:
            raise ConfigError(
                "shuffle=True needs random access (arrays, or a dataset with __len__ and __getitem__), and the source is "
                f"{'an ' if self._source.kind[0] in 'aeiou' else 'a '}{self._source.kind}; shuffle in the source, or pass a dataset"
            )
        if self._source.one_shot and settings.epochs != 1:
            raise ConfigError(
                f"epochs={settings.epochs} over a one-shot iterator, which can be read once: pass a function that makes a new one each epoch"
            )

    def _check_rows(self) -> None:
        split = self._rules.batch_split()
        size, k = self.batch_size, self._settings.microbatches or 1
        if size is None or self._settings.collate is not None:
            return
        if size % k:
            raise ConfigError(f"microbatches={k}: batch_size={size} cannot be cut into {k} equal pieces")
        if split is not None and (size // k) % split:
            pieces = f"each of the {k} microbatches has {size // k} rows" if k > 1 else f"batch_size={size}"
            raise ConfigError(f"{pieces}, and the sharding {self._rules!r} cuts the rows into {split}: use a multiple of {split * k}")

    def _check_arrays(self) -> None:
        source, settings = self._source, self._settings
        if not isinstance(source, Arrays):
            return
        if settings.epochs is None and (self._order is None or self._order.steps() == 0):
            raise ConfigError(f"the source has {source.length} rows, fewer than a batch, and epochs=None would go on without one for ever")
        self._plan_arrays(x64_enabled())

    def _plan_arrays(self, x64: bool) -> None:
        """Where batches are rows of arrays, what they look like, and whether they can be placed, is known before any is read."""
        source, settings = self._source, self._settings
        if not isinstance(source, Arrays) or settings.transform is not None or settings.collate is not None:
            return
        tree: Any = source.tree
        if settings.pad is not None and hasattr(tree, "keys"):
            check_mask_key(settings.pad, tree)
        tree_of_arrays = self._rules.flatten_arrays(tree)
        planner = self._planner(x64, _nothing if isinstance(source, DeviceArrays) else self._limits.fit)
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
        planner = self._number_planner(rows, x64, self._limits.fit)
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

    # -- choices

    def _choose_workers(self) -> int:
        if self._settings.workers != "auto":
            return self._settings.workers
        if isinstance(self._source, DeviceArrays):
            return 1  # which writes row numbers
        cpus = cpu_count()
        if isinstance(self._source, Arrays) and self._settings.transform is None:
            return min(MOST_WORKERS, cpus)
        return min(MOST_WORKERS, max(4, cpus))  # users' code waits for files and networks more than it computes

    def _make_limits(self) -> BatchLimits:
        # A batch that is short waits until the source was asked for the one after it, for which there must be room
        holds_back = not isinstance(self._source, (Arrays, Dataset)) and self.batch_size is None and self._settings.pad is None
        platform = self._device.platform
        return BatchLimits(
            self._settings,
            in_flight=IN_FLIGHT.get(platform, MOST_IN_FLIGHT),
            read_at_once=self._batches_read_at_once(),
            least_slots=2 if holds_back else 1,
            small_go_in_bursts=platform == "cpu",
        )

    def _batches_read_at_once(self) -> int:
        """Host batches being read, or read and not on their way yet."""
        hooks = self._settings.transform is not None or self._settings.collate is not None
        if isinstance(self._source, Arrays) and self._settings.transform is None:
            return 1 + self.workers  # a batch may be one worker's
        if isinstance(self._source, (Arrays, Dataset)):
            return 2 if self.batch_size is not None else 1 + self.workers
        if hooks and self.batch_size is None:
            return 1 + self.workers
        # Where the source always goes on while the last item is still being copied, one more covers the waits for the interpreter's lock.
        return 2 if hooks or not self._settings.reuses_buffers else 1

    @property
    def ahead(self) -> int:
        """The most batches that are ever pulled from the source and not delivered."""
        return self._limits.now.ahead

    def _staging(self) -> Staging:
        """The ring, made for the first run and kept between runs."""
        if self._ring is None:
            self._ring = choose_staging(self._device, self._limits.now.slots)
        return self._ring

    def _make_order(self) -> EpochOrder | None:
        if not isinstance(self._source, (Arrays, Dataset)):
            return None
        settings = self._settings
        drop = settings.remainder == "drop" and self.batch_size is not None
        order = EpochOrder(self._source.length, self.batch_size or 1, drop=drop, shuffle=settings.shuffle, seed=settings.seed)
        if settings.remainder == "error" and self.batch_size and order.length % self.batch_size:
            leaves = in_brackets(leaf_paths(self._source.tree)) if isinstance(self._source, Arrays) else ""
            raise ConfigError(
                f"the source{leaves} has {order.length} rows, no multiple of batch_size={self.batch_size}, and remainder='error': the last batch "
                f"would have {order.length % self.batch_size}; drop it (remainder='drop') or fill it up under a mask (remainder='pad')"
            )
        return order

    def _planner(self, x64: bool, on_bytes: Callable[[int, int], object]) -> Planner:
        settings = self._settings
        return Planner(
            self._rules,
            rows=self.batch_size,
            pad=settings.pad,
            microbatches=settings.microbatches,
            narrow=settings.narrow,
            x64=x64,
            on_bytes=on_bytes,
        )

    def _number_planner(self, rows: DeviceRows, x64: bool, on_bytes: Callable[[int, int], object]) -> Planner:
        return RowNumberPlanner(
            rows.rules,
            rows=self.batch_size,
            pad=None,
            microbatches=None,
            narrow="check",
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
        planner = self._planner(context.x64, fit) if rows is None else self._number_planner(rows, context.x64, fit)
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
        home = self._source.home if isinstance(self._source, AsyncStream) else None
        sequencer = Sequencer(
            queue,
            planner,
            staging,
            meters,
            start,
            batch_size=self.batch_size,
            remainder=settings.policy,
            is_endless=settings.epochs is None,
            home_thread=None if home is None else home.thread,
        )
        run = Run(
            self._reader(plan, Writer(planner, staging, self._keep()), self._source if rows is None else rows.numbers),
            sequencer,
            Placer(device_transform, context, clock, gather=rows),
            outbox,
            pace=transfers,
            meters=meters,
            staging=staging,
            workers=self.workers,
            context=context,
            clock=clock,
        )
        self.last_run = run
        return run

    def _keep(self) -> Callable[[Any], Any]:
        """How what stays on the host is kept from being overwritten by the source."""
        source = self._source
        if not self._settings.reuses_buffers or (isinstance(source, Dataset) and source.shares_items):
            return lambda value: value
        return private_copy if isinstance(source, (Arrays, Dataset)) else functools.partial(private_copy, deep=True)

    def _reader(self, plan: ReadingPlan, writer: Writer, source: Source) -> Reader:
        if isinstance(source, (Arrays, Dataset)):
            assert self._order is not None
            rules = writer.planner.rules
            tree = rules.flatten_arrays(source.tree) if isinstance(source, Arrays) and self._settings.transform is None else None
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
        cursor = cursor_of(state, self.fingerprint)
        if self._order is not None:
            check_rows(cursor, self._order, self._settings, self.batch_size)
        elif self.one_shot:
            check_one_shot(cursor, self._given)
        self.cursor = cursor

    def ended(self, start: StartPoint, last: Position | None) -> StartPoint:
        """A run ended by itself: the loader stands at the beginning of the next one, which is returned."""
        following = next_run(start, last, self._settings.epochs)
        if start.run >= self.cursor.run:
            self.cursor = following
        return following

    # -- looking

    @property
    def one_shot(self) -> bool:
        return not isinstance(self._source, (Arrays, Dataset)) and self._source.one_shot

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
        home = self._source.home if isinstance(self._source, AsyncStream) else None
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
            self._specs[x64] = placed.spec() if self._device_transform is None else self._spec_of(placed.finished())
        return self._specs[x64]

    def remember_spec(self, placed: PlacedBatch, *, x64: bool) -> None:
        """As `learn_spec`, of a batch that is handed out: where it cannot be taken apart (odd things kept on the host) nothing is learnt."""
        with contextlib.suppress(ValueError, TypeError):
            self.learn_spec(placed, x64=x64)

    def _spec_of(self, batch: Any) -> tuple[LeafSpec, ...]:
        found: list[LeafSpec] = []
        for keys, leaf in _jax.tree_util.tree_flatten_with_path(batch)[0]:
            if isinstance(leaf, jax.Array):
                found.append(leaf_spec(path_text(keys), leaf.shape, leaf.dtype, leaf.sharding))
            else:
                found.append(LeafSpec(path_text(keys), getattr(leaf, "shape", ()), getattr(leaf, "dtype", np.dtype(object)), HOST, 0))
        return tuple(found)

    def steps(self) -> int:
        """Steps of the run that would begin now.

        Raises:
            TypeError: not known.
        """
        epochs = self._settings.epochs
        if epochs is None:
            raise TypeError("a loader with epochs=None has no length")
        cursor = self.cursor
        left = cursor.run_epoch + epochs - cursor.epoch
        if self._order is not None:
            if left <= 0:
                return 0
            done = cursor.rows if self.batch_size is not None else cursor.batches
            steps = self._order.steps(done) + (left - 1) * self._order.steps()
            return steps - sum(self._drops_last(self._order, cursor.epoch + i) for i in range(left))
        assert not isinstance(self._source, (Arrays, Dataset))
        length = self._source.length
        if length is None:
            raise TypeError(f"a loader over {self.describe()} has no length")
        each = length if self.batch_size is None else length // self.batch_size
        if self.batch_size is not None and self._settings.remainder != "drop":
            each = -(-length // self.batch_size)
        done = cursor.batches
        if self.batch_size is not None and left > 0:  # it may have had another batch size up to here
            done = each - max(0, length - cursor.rows) // self.batch_size
            if self._settings.remainder != "drop":
                done = each - -(-max(0, length - cursor.rows) // self.batch_size)
        return max(0, left * each - done)

    def _drops_last(self, order: EpochOrder, epoch: int) -> bool:
        """Whether the last batch of an epoch is dropped as shorter than the first of the run: told of lists, which can be looked at."""
        source, settings = self._source, self._settings
        looks = self.batch_size is None and settings.remainder == "drop" and settings.transform is None
        if not looks or not isinstance(source, Dataset) or not source.shares_items or order.length < 2:
            return False
        places = ((self.cursor.run_epoch, 0), (epoch, order.length - 1))
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
        source = self._source
        if isinstance(source, (Arrays, Dataset)):
            unit = "rows" if self.batch_size is not None else "batches"
            return f"{source.kind} of {source.length} {unit}"
        article = "a one-shot" if source.one_shot else "an" if source.kind[0] in "aeiou" else "a"
        return f"{article} {source.kind}"

    def rest(self) -> str:
        """Where it stands while no run is live, in words."""
        cursor = self.cursor
        return f"at rest before run {cursor.run}, epoch {cursor.epoch}, step {cursor.step}"


def _nothing(host_bytes: int, device_bytes: int) -> None:
    del host_bytes, device_bytes


def _host_plan(planner: Planner, batch: Any) -> HostPlan:
    leaves, tree = planner.rules.flatten(batch)
    return planner.for_batch(planner.as_host_leaves(leaves, tree), tree)
