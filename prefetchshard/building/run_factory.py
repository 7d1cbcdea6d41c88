"""From the arguments of a loader to the parts of a run."""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from prefetchshard.base.clock import Clock
from prefetchshard.base.config import Processes, Settings
from prefetchshard.base.cpus import cpu_count
from prefetchshard.base.errors import UsedUpError
from prefetchshard.base.event_loop import HomeLoop, running_loop
from prefetchshard.base.jax_context import JaxContext
from prefetchshard.base.position import Position, StartPoint
from prefetchshard.base.specs import LeafSpec
from prefetchshard.building.batch_specs import BatchSpecs
from prefetchshard.building.checks import check_endless, check_last_rows, check_rows, check_source, global_rows
from prefetchshard.building.choices import Workers, choose_workers, describe, first_depth, keeper, make_limits, make_order, takes_processes
from prefetchshard.building.measured_load import measure_of
from prefetchshard.building.other_names import refuse_as_sharding
from prefetchshard.building.room import Room
from prefetchshard.building.steps import steps_of_run
from prefetchshard.measuring.recorder import Recorder
from prefetchshard.measuring.setup import Setup
from prefetchshard.placing.device_transform import DeviceTransform
from prefetchshard.placing.placed_batch import PlacedBatch
from prefetchshard.placing.placer import Placer
from prefetchshard.placing.transfer_loops import ReadyQueue, TransferLimits
from prefetchshard.queues.bounded_queue import BoundedQueue, CountedQueue
from prefetchshard.reading.controller import Bounds, Controller
from prefetchshard.reading.crew import Control, Crew
from prefetchshard.reading.item_dealer import ItemDealer
from prefetchshard.reading.reading_plan import HostQueue, Reader, ReadingPlan
from prefetchshard.reading.row_dealer import RowDealer
from prefetchshard.reading.sequencer import Sequencer
from prefetchshard.reading.user_functions import UserFunctions
from prefetchshard.reading.writing import Writer
from prefetchshard.resuming.handed_out import check_one_shot, fingerprint_of, next_run, rows_left, start_point_of
from prefetchshard.resuming.replay import ReplayedSource
from prefetchshard.running.run import Run
from prefetchshard.sharding.rules import ShardingRules, resolve
from prefetchshard.sources import Source, recognise
from prefetchshard.sources.asynchronous import AsyncStream
from prefetchshard.sources.epochs import set_epoch
from prefetchshard.sources.iterables import FactoryStream, refuse_used_up
from prefetchshard.sources.loops import Loops
from prefetchshard.sources.rebatch import RebatchedStream
from prefetchshard.staging.layout import Staging
from prefetchshard.staging.pinned import choose_staging
from prefetchshard.streaming.choosing import CopyChoice

_log = logging.getLogger(__name__)

WIDE_BYTES = 4
"""Numbers of this size and larger could often be sent as smaller ones."""


class Parts(NamedTuple):
    """What a run reads and where that goes, for who does the same without a loader.

    Attributes:
        source: as its kind.
        settings: of the loader.
        rules: where each leaf goes.
        batch_size: rows of one step; None where the source makes the batches.
        new_loops: makes what an async source is pulled in.
    """

    source: Source
    settings: Settings
    rules: ShardingRules
    batch_size: int | None
    new_loops: Callable[[], Loops]


class RunFactory:
    """Everything that is fixed where the loader is made, and where it stands between its runs.

    Args:
        source: the user's.
        sharding: the user's.
        host: paths of leaves that stay on the host, as the user gave them.
        settings: checked by themselves.
        clock: monotonic seconds.
    """

    def __init__(self, source: Any, sharding: Any, host: Any, settings: Settings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._cpus = cpu_count()  # which reads some files
        self._pid = os.getpid()
        self._given = source
        refuse_as_sharding(sharding)
        refuse_used_up(source)
        self._source = recognise(source, batched=settings.batch_size is not None)
        self._pulled = self._source.inner if isinstance(self._source, RebatchedStream) else self._source
        self._may_be_async = isinstance(self._pulled, (AsyncStream, FactoryStream))
        self._made_in = self.loop_here()
        rules: ShardingRules = resolve(sharding, host)
        self.batch_size = global_rows(settings, rules)
        self._workers: Workers = choose_workers(self._source, settings, self.batch_size)
        self._last_crew: tuple[Crew, Controller] | None = None  # of the run that was made last
        self._last_room: Room | None = None  # likewise
        self.stall_warning_seconds = settings.stall_warning_seconds
        check_source(self._source, settings)
        check_rows(rules, settings, self.batch_size)
        self._device_transform = None if settings.device_transform is None else DeviceTransform(settings.device_transform, settings.seed)
        self._order = make_order(self._source, settings, rules, self.batch_size)
        self._rules = rules
        self._device = rules.device()
        self._limits = make_limits(self._source, settings, batch_size=self.batch_size, workers=self._workers, device=self._device)
        self._ring: Staging | None = None
        self.fingerprint = fingerprint_of(settings, self._source, self.batch_size)
        self.next_start = StartPoint(resumes_by="replay" if self._order is None else "index")
        check_endless(self._source, settings, self._order)
        self.specs = BatchSpecs(self._source, rules, settings, self.batch_size, self._limits)

    @property
    def ahead(self) -> int:
        """The most batches that are ever pulled from the source and not delivered."""
        return self._limits.now.ahead

    @property
    def parts(self) -> Parts:
        """What its runs read, and where that goes."""
        return Parts(self._source, self._settings, self._rules, self.batch_size, lambda: self._loops(None))

    def _staging(self) -> Staging:
        """The ring, made for the first run and kept between runs."""
        if self._ring is None:
            self._ring = choose_staging(self._device, self._limits.now.slots)
        return self._ring

    # -- a run

    def loop_here(self) -> HomeLoop | None:
        """The event loop that runs in this thread, where the source may be an async one."""
        return running_loop() if self._may_be_async else None

    def _loops(self, began_in: HomeLoop | None) -> Loops:
        loops = Loops([], began_in, self._made_in, reuses_buffers=self._settings.reuses_buffers)
        if isinstance(self._pulled, AsyncStream):  # what a factory makes is known when it is called
            loops.home = self._pulled.home_in(began_in)
        return loops

    def build(self, start: StartPoint, began_in: HomeLoop | None = None) -> Run:
        """The parts of a run that begins at `start`, under the JAX settings in force in this thread.

        Args:
            start: where it begins.
            began_in: the event loop in which `aiter` begins it.
        """
        settings, context, clock = self._settings, JaxContext(), self._clock
        rows = self.specs.rows_on_devices(context.x64)
        staging = self._staging()
        device_transform = None if self._device_transform is None else self._device_transform.under(context)
        limits, crew = self._limits, Crew(self._first_workers())
        depth = self._first_depth()
        now = limits.of(crew.wanted, depth)
        recorder = Recorder(clock)
        recorder.warm_up = now.ahead
        recorder.setup = self.setup(crew.wanted)
        outbox: ReadyQueue = BoundedQueue(now.depth, clock=clock)
        queue: HostQueue
        if now.read_ahead is None:
            queue = BoundedQueue(now.slots, held_until_release=True, clock=clock)
        else:
            queue = CountedQueue(now.slots, now.read_ahead, outbox, clock=clock)
        transfers = TransferLimits(now.in_flight)
        choice = CopyChoice(self._device.platform)
        room = Room(limits, crew, depth, queue, outbox, transfers, recorder)
        # It holds the crew and the transfers. Would these hold it, what a run has measured would stay until the garbage collector comes
        this = weakref.ref(room)
        if limits.depth_grows:
            transfers.watch = lambda: None if (held := this()) is None else held.watch()
            self._last_room = room

        def fit(host_bytes: int, device_bytes: int) -> None:
            limits.fit(host_bytes, device_bytes)
            queue.in_bursts = outbox.in_bursts = limits.is_small
            room.resize()
            choice.batches_take(host_bytes)

        in_processes = takes_processes(self._source, settings)
        if isinstance(settings.workers, Processes) and not in_processes:
            _log.debug("%s has nothing to do but copy: the source is read by %d threads", settings.workers, crew.wanted)
        if self._workers.are_controlled:
            self._control(crew, recorder, queue, outbox, lambda: None if (held := this()) is None else held.resize())
        planner = self.specs.planner(context.x64, fit, rows)
        plan = ReadingPlan(
            functions=UserFunctions(settings.transform, settings.collate, settings.seed, makes_examples=self.batch_size is not None),
            out=queue,
            recorder=recorder,
            start=start,
            epochs=settings.epochs,
            batch_size=self.batch_size,
            remainder=settings.policy,
            crew=crew,
            read_ahead=settings.read_ahead,
            reuses_buffers=settings.reuses_buffers,
            in_processes=in_processes,
        )
        sequencer = Sequencer(
            queue,
            planner,
            staging,
            recorder,
            start,
            batch_size=self.batch_size,
            remainder=settings.policy,
            is_endless=settings.epochs is None,
        )
        loops = self._loops(began_in)
        writer = Writer(planner, staging, keeper(self._source, settings), choice.copies)
        return Run(
            self._reader(plan, writer, self._source if rows is None else rows.numbers, loops),
            sequencer,
            Placer(device_transform, context, recorder, gather=rows),
            outbox,
            transfer_limits=transfers,
            recorder=recorder,
            staging=staging,
            context=context,
            loops=loops if self._may_be_async else None,
            copy_choice=choice,
        )

    def _first_workers(self) -> int:
        """How many threads the next run begins with: what the last one found out, but not so few that the first batch comes later for it."""
        first = self._workers.first
        if self._last_crew is None:
            return first
        crew, controller = self._last_crew
        return crew.wanted if controller.is_lock_bound else max(first, crew.wanted)

    def _first_depth(self) -> int:
        """How many batches the next run keeps ready: as many as the last one found out."""
        return first_depth(self._settings) if self._last_room is None else self._last_room.depth

    def _control(self, crew: Crew, recorder: Recorder, queue: HostQueue, outbox: ReadyQueue, resize: Callable[[], None]) -> None:
        """Let the number of threads follow what the run needs."""
        limits, workers = self._limits, self._workers

        def bounds() -> Bounds:
            most = limits.workers_with_room(workers.most)
            return Bounds(min(workers.for_work, most), most)

        measure = measure_of(recorder, queue, outbox)
        controller = Controller(measure())
        crew.control = Control(controller.decide, measure, bounds, resize, recorder.clock)
        self._last_crew = crew, controller

    def _reader(self, plan: ReadingPlan, writer: Writer, source: Source, loops: Loops) -> Reader:
        if source.is_numbered is True:
            assert self._order is not None
            rules = writer.planner.rules
            gathers = source.is_memory is True and plan.functions.transform is None and plan.functions.collate is None
            tree = rules.flatten_arrays(source.tree) if gathers else None
            return RowDealer(plan, writer, source, self._order, tree)
        given = self._given
        replayed = ReplayedSource(source, plan.start, plan.batch_size, self._settings.snapshot_every, plan.recorder)
        start = plan.start

        def tell_epoch(epoch: int) -> None:
            set_epoch(given, epoch, start.run_epoch if epoch == start.epoch else None)

        return ItemDealer(plan, writer, replayed, tell_epoch, loops)

    def go_on_from(self, state: object) -> None:
        """Let the next run begin where a state was saved.

        Raises:
            ConfigError: it is no state.
            StateError: it does not fit this loader.
        """
        start = start_point_of(state, self.fingerprint)
        if self._order is not None:
            left = rows_left(start, self._order, self.batch_size)
            if self.batch_size is not None and left % self.batch_size:
                what = f"{left} rows of epoch {start.epoch} are left"
                check_last_rows(what, left % self.batch_size, self._settings, self._rules, self.batch_size)
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

    def setup(self, workers: int, batch: PlacedBatch | None = None) -> Setup:
        """How the loader was made, for advice.

        Args:
            workers: reader threads.
            batch: one of its batches; None: there is none yet.
        """
        settings, source = self._settings, self._source
        leaves: Sequence[LeafSpec] = ()
        with contextlib.suppress(ValueError, TypeError):  # of odd things that are kept on the host
            leaves = () if batch is None else batch.spec()
        total = sum(leaf.bytes_per_device for leaf in leaves)
        wide = sum(
            leaf.bytes_per_device for leaf in leaves if getattr(leaf.dtype, "kind", "V") in "iuf" and leaf.dtype.itemsize >= WIDE_BYTES
        )
        return Setup(
            source=source.kind,
            is_numbered=source.is_numbered is True,
            is_memory=source.is_memory is True,
            workers=workers,
            processes=workers if takes_processes(source, settings) else 0,
            has_functions=settings.transform is not None or settings.collate is not None,
            reuses_buffers=settings.reuses_buffers,
            depth_could_grow=not source.stays_on_devices and self._limits.could_grow,
            cpus=self._cpus,
            platform=self._device.platform,
            leaves=sum(leaf.bytes_per_device > 0 for leaf in leaves),
            wide_share=wide / total if total else 0.0,
        )

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

    def steps(self) -> int:
        """Steps of the run that would begin now.

        Raises:
            TypeError: not known.
        """
        return steps_of_run(self._source, self._settings, self.batch_size, self._order, self.specs, self.next_start)

    def describe(self) -> str:
        """The source in words."""
        return describe(self._source, self.batch_size)

    def rest(self) -> str:
        """Where it stands while no run is live, in words."""
        start = self.next_start
        return f"at rest before run {start.run}, epoch {start.epoch}, step {start.step}"
