"""The transfer stage: takes host batches, puts them on the devices, and hands on what is ready."""

from __future__ import annotations

import contextlib
import contextvars
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp

from prefetchshard.base.batches import HostBatch, PlacedBatch
from prefetchshard.base.clock import Clock
from prefetchshard.base.faults import note, safe_to_raise
from prefetchshard.base.jax_context import JaxContext
from prefetchshard.leaves.on_devices import from_movable, is_jax_array, is_key, to_movable
from prefetchshard.measuring.stats import Meters
from prefetchshard.placing.device_transform import DeviceTransform, stand_in, step_value
from prefetchshard.placing.transfer import explicit, put
from prefetchshard.planning.packing import Packing
from prefetchshard.planning.planner import MASK, Kind, Plan
from prefetchshard.queues.bounded_queue import EMPTY, BoundedQueue
from prefetchshard.sharding.leaf_sharding import replicated_like

_jax: Any = jax
_jnp: Any = jnp

HostQueue: TypeAlias = BoundedQueue[HostBatch[Plan]]
ReadyQueue: TypeAlias = BoundedQueue[PlacedBatch]
PendingQueue: TypeAlias = "BoundedQueue[PendingTransfer]"


class TransferLimits:
    """How transfers are made.

    Attributes:
        in_flight: transfers that may be on their way at once; what a batch takes may show that it must be fewer.
        waits_apart: whether one thread dispatches transfers and another waits for them, so that no wait delays the next dispatch. Not
            where a transfer is done when its dispatch returns (the CPU backend): there a second thread is only one more hand-over.
    """

    __slots__ = ("in_flight", "waits_apart")

    def __init__(self, in_flight: int, *, waits_apart: bool) -> None:
        self.in_flight = in_flight
        self.waits_apart = waits_apart


class PendingTransfer:
    """A transfer on its way.

    Attributes:
        host: what is put.
        arrays: on their way; `Deferred` where the consumer's thread has yet to dispatch one.
        step: for the key of a `device_transform`.
        dispatched_at: seconds of the run's clock.
        is_late: whether there is a `Deferred` among the arrays.
    """

    __slots__ = ("arrays", "dispatched_at", "host", "is_late", "step")

    def __init__(self, host: HostBatch[Plan], arrays: list[Any], step: Any, dispatched_at: float, *, is_late: bool) -> None:
        self.host = host
        self.arrays = arrays
        self.step = step
        self.dispatched_at = dispatched_at
        self.is_late = is_late


class Deferred:
    """A leaf that lies on several devices, and on which they compute before it is as it shall be: moved, padded, or cut."""

    __slots__ = ("_index", "_path", "_plan", "_shape", "_sharding", "_value")

    def __init__(self, plan: Plan, n: int, value: Any) -> None:
        self._plan = plan
        self._index = plan.put_order[n]
        self._shape = plan.put_shapes[n]
        self._sharding = plan.put_shardings[n]
        self._path = plan.put_paths[n]
        self._value = value

    def put(self) -> Any:
        with explicit():
            value = _device_leaf(self._plan, self._index, self._shape, self._value)
        return put([value], [self._sharding], paths=[self._path])[0]


class RowGather(Protocol):
    """Makes the arrays of a batch from the numbers of its rows, which were transferred in their place (`OnDevice`).

    Attributes:
        plan: of the batches.
        is_late: it is for the consumer's thread, which dispatches the training step.
    """

    plan: Plan
    is_late: bool

    def __call__(self, numbers: Sequence[Any]) -> list[Any]:
        """Dispatch it. The arrays are in the put order of the plan."""
        ...


class Placer:
    """Dispatches transfers, waits for them, and makes what the consumer gets.

    Batches come here in order, and what was dropped is known to be: so here they get their numbers for good.

    Args:
        device_transform: or None.
        context: the caller's JAX settings, in force where this is called; the context variables are those where this is made.
        clock: monotonic seconds.
        step: of the first batch.
        epoch: of the first batch.
        rows: of that epoch before it.
        gather: where row numbers are transferred, and the rows gathered on the devices.
    """

    def __init__(
        self,
        device_transform: DeviceTransform | None,
        context: JaxContext,
        clock: Clock,
        *,
        step: int,
        epoch: int,
        rows: int,
        gather: RowGather | None = None,
    ) -> None:
        self._device_transform = device_transform
        self._gather = gather
        self._context = context
        self._clock = clock
        self._step = step
        self._rows_epoch = epoch
        self._rows = rows
        self._variables = contextvars.copy_context()

    def dispatch(self, host: HostBatch[Plan]) -> PendingTransfer:
        """Dispatch the transfer of a batch; one call for all its leaves."""
        host.position.step = self._step
        self._step += 1
        with self._context.set_aside():
            return self._dispatch(host)

    def _dispatch(self, host: HostBatch[Plan]) -> PendingTransfer:
        leaves, shardings, paths = _to_put(host)
        if host.plan.microbatches is not None:
            host.plan.cut_on_host(host.passed)
        wants_key = self._device_transform is not None and self._device_transform.wants_key and bool(shardings)
        if wants_key:
            leaves.append(step_value(host.position.step))
            shardings = [*shardings, replicated_like(shardings[0])]
            paths = [*paths, "(step)"]
        began = self._clock()
        is_late = any(type(leaf) is Deferred for leaf in leaves)
        arrays = _put_but_late(leaves, shardings, paths) if is_late else put(leaves, shardings, paths=paths)
        step = arrays.pop() if wants_key else step_value(host.position.step)
        return PendingTransfer(host, arrays, step, began, is_late=is_late)

    def land(self, flight: PendingTransfer) -> PlacedBatch:
        """Wait until a transfer is ready, and put its batch together."""
        for array in flight.arrays:
            if type(array) is not Deferred:
                array.block_until_ready()
        host = flight.host
        ready_at = self._clock()
        if host.memory is not None:
            host.memory.release()
            host.memory = None
        plan = self._plan_of(host)
        is_late = flight.is_late or self._is_late(plan)
        batch = None if is_late else self._batch(flight)
        placed = PlacedBatch(batch, host.position, flight.dispatched_at, host.plan.nbytes, host.rows, plan.spec)
        placed.ready_at = ready_at
        if is_late:
            placed.finish_by(partial(self._late_batch, flight))
        self._count_rows(host)
        return placed

    def _is_late(self, plan: Plan) -> bool:
        """Whether the rest is for the consumer's thread, which dispatches the training step.

        What devices compute together they begin in the same order on each; two threads that dispatch at once may mix the orders up, and
        the devices then wait for each other for ever.
        """
        gather_is_late = self._gather is not None and self._gather.is_late
        return gather_is_late or (self._device_transform is not None and plan.spans_devices)

    def _plan_of(self, host: HostBatch[Plan]) -> Plan:
        """The plan of the batch that the consumer gets."""
        return host.plan if self._gather is None else self._gather.plan

    def _batch(self, flight: PendingTransfer) -> Any:
        host = flight.host
        arrays = flight.arrays
        plan = self._plan_of(host)
        if flight.is_late or host.plan.packing is not None or self._gather is not None:
            with self._context.set_aside():
                arrays = [array.put() if type(array) is Deferred else array for array in arrays] if flight.is_late else arrays
                arrays = arrays if host.plan.packing is None else _unpacked(host.plan.packing, arrays)
                arrays = arrays if self._gather is None else self._gather(arrays)
        if self._device_transform is None:
            return plan.assemble(arrays, host.passed)
        stand_ins = {index: stand_in(index, value) for index, value in host.passed.items()}
        return self._device_transform(plan.assemble(arrays, stand_ins), host.passed, flight.step)

    def _late_batch(self, flight: PendingTransfer) -> Any:
        """As `_batch`, in the consumer's thread, where other settings and context variables may be in force."""
        try:
            with contextlib.nullcontext() if JaxContext() == self._context else self._context.in_force():
                return self._variables.copy().run(self._batch, flight)
        except BaseException as error:  # noqa: BLE001 - raised again
            raise _noted(error, flight.host)  # noqa: B904 - it is that error, or has it as its cause

    def _count_rows(self, host: HostBatch[Plan]) -> None:
        """Batches of the source's own making are counted here, where they come in order."""
        position = host.position
        if position.rows == 0:
            if position.epoch != self._rows_epoch:
                self._rows_epoch, self._rows = position.epoch, 0
            position.first_row = self._rows
            self._rows += host.rows
            position.rows = self._rows


def _to_put(host: HostBatch[Plan]) -> tuple[list[Any], list[Any], list[str]]:
    """What is put of a batch, where it goes, and its paths: the slab of the packed leaves first, where there is one."""
    plan, memory = host.plan, host.memory
    if plan.packing is None or memory is None:
        return [_leaf_to_put(host, n) for n in range(len(plan.put_order))], plan.put_shardings, plan.put_paths
    others = plan.packing.others
    shardings = [plan.packing.sharding, *(plan.put_shardings[n] for n in others)]
    return [memory.slab, *(_leaf_to_put(host, n) for n in others)], shardings, ["(small leaves)", *(plan.put_paths[n] for n in others)]


def _put_but_late(leaves: list[Any], shardings: list[Any], paths: list[str]) -> list[Any]:
    """Put those leaves that need not wait for the consumer's thread."""
    now = [n for n, leaf in enumerate(leaves) if type(leaf) is not Deferred]
    placed = put([leaves[n] for n in now], [shardings[n] for n in now], paths=[paths[n] for n in now])
    arrays = list(leaves)
    for n, array in zip(now, placed, strict=True):
        arrays[n] = array
    return arrays


def _leaf_to_put(host: HostBatch[Plan], n: int) -> Any:
    plan, memory = host.plan, host.memory
    index, shape = plan.put_order[n], plan.put_shapes[n]
    if memory is not None and (index == MASK or plan.leaves[index].kind is Kind.STAGED):
        view = memory.views[n]
        return view if view.shape == shape else view.reshape(shape)
    value = host.passed.pop(index)
    if is_jax_array(value) and len(value.sharding.device_set) > 1 and _is_to_change(value, shape, plan.put_shardings[n]):
        return Deferred(plan, n, value)
    with explicit():
        return _device_leaf(plan, index, shape, value)


def _is_to_change(value: Any, shape: tuple[int, ...], sharding: Any) -> bool:
    return value.shape != shape or not value.sharding.is_equivalent_to(sharding, value.ndim)


def _unpacked(packing: Packing, arrays: list[Any]) -> list[Any]:
    """All arrays of a batch in the order of its plan."""
    cut: list[Any] = packing.unpack(arrays[0])
    if not packing.others:
        return cut
    whole: list[Any] = [None] * (len(packing.places) + len(packing.others))
    for n, array in zip((*packing.places, *packing.others), (*cut, *arrays[1:]), strict=True):
        whole[n] = array
    return whole


def _device_leaf(plan: Plan, index: int, shape: tuple[int, ...], value: Any) -> Any:
    """A leaf that is on devices already, with its padding rows and in its microbatches."""
    leaf = plan.leaves[index]
    if leaf.kind is Kind.KEYS:
        value = _jnp.stack(value)
    if leaf.has_rows and plan.rows is not None and value.shape[0] < plan.rows:
        missing = plan.rows - value.shape[0]
        if is_key(value):
            filling = _jnp.repeat(value[-1:], missing, axis=0)  # any valid key: its rows are masked
        else:
            filling = _jnp.full((missing, *value.shape[1:]), leaf.padding)
        value = from_movable(_jnp.concatenate([to_movable(value), to_movable(filling)]), value.dtype)
    return value if value.shape == shape else _jnp.reshape(value, shape)


def transfer_bodies(
    inbox: HostQueue, placer: Placer, outbox: ReadyQueue, meters: Meters, pace: TransferLimits
) -> list[tuple[str, Callable[[], None]]]:
    """What the threads that call JAX do: a name and a function each."""
    if not pace.waits_apart:
        return [("transfer", lambda: transfer(inbox, placer, outbox, meters, pace))]
    flights: PendingQueue = BoundedQueue(pace.in_flight, held_until_release=True)
    return [
        ("dispatch", lambda: dispatch(inbox, placer, flights, pace)),
        ("transfer", lambda: land(flights, placer, inbox, outbox, meters)),
    ]


def dispatch(inbox: HostQueue, placer: Placer, flights: PendingQueue, pace: TransferLimits) -> None:
    """Dispatch the transfer of each host batch as it comes.

    Args:
        inbox: host batches, in order.
        placer: does what has to do with devices.
        flights: transfers on their way.
        pace: how many may be on their way at once.
    """
    failure: BaseException | None = None
    try:
        while True:
            flights.capacity = pace.in_flight
            ticket = flights.reserve()
            if ticket is None:
                break
            host = inbox.take_nowait() if inbox.wait_ready() else EMPTY
            if host is EMPTY:
                ticket.withdraw()
                if inbox.is_over():
                    break
                continue
            try:
                ticket.send(_dispatch(placer, host))
            except BaseException:
                ticket.withdraw()
                raise
        failure = inbox.failure
    except BaseException as error:  # noqa: BLE001 - a thread has no caller: the queue is the way out
        failure = error
        inbox.refuse()
    flights.end(failure)
    del failure  # its traceback holds this frame


def land(flights: PendingQueue, placer: Placer, inbox: HostQueue, outbox: ReadyQueue, meters: Meters) -> None:
    """Wait for each transfer, and hand on what is ready.

    Args:
        flights: transfers on their way, in order.
        placer: does what has to do with devices.
        inbox: where the host batches came from; their places are released when their transfers are ready.
        outbox: ready batches.
        meters: what is measured.
    """
    failure: BaseException | None = None
    try:
        while flights.wait_ready() and not outbox.cancelled:
            flight = flights.take_nowait()
            if flight is EMPTY:
                continue
            placed = _land(placer, flight, inbox, meters)
            flights.release()
            if not outbox.put(placed):
                break
        failure = flights.failure
    except BaseException as error:  # noqa: BLE001 - as above
        failure = error
    flights.cancel()
    inbox.cancel()
    outbox.end(failure)
    flights.clear()
    inbox.clear()  # a failure is where it will be taken, and nowhere else
    del failure  # as above


def transfer(inbox: HostQueue, placer: Placer, outbox: ReadyQueue, meters: Meters, pace: TransferLimits) -> None:
    """Move batches from the host to the devices until there are no more, or none is wanted.

    Args:
        inbox: host batches, in order; their places are released when their transfers are ready.
        placer: does what has to do with devices.
        outbox: ready batches.
        meters: what is measured.
        pace: how many transfers may be on their way at once.
    """
    flying: deque[PendingTransfer] = deque()
    failure: BaseException | None = None
    try:
        while not outbox.cancelled:
            if len(flying) < pace.in_flight and (inbox.has_ready() or not flying):
                if not flying and not inbox.wait_ready():
                    break
                host = inbox.take_nowait()
                if host is not EMPTY:
                    flying.append(_dispatch(placer, host))
            elif not _deliver(placer, flying, inbox, outbox, meters):
                break
        failure = inbox.failure
    except BaseException as error:  # noqa: BLE001 - a thread has no caller: the queue is the way out
        failure = error
    try:
        while flying and not outbox.cancelled:  # placed before the fault
            if not _deliver(placer, flying, inbox, outbox, meters):
                break
    except BaseException as error:  # noqa: BLE001 - as above; it comes first
        failure = error
    inbox.cancel()
    outbox.end(failure)
    inbox.clear()  # a failure is where it will be taken, and nowhere else
    del failure  # its traceback holds this frame


def _dispatch(placer: Placer, host: HostBatch[Plan]) -> PendingTransfer:
    try:
        return placer.dispatch(host)
    except BaseException as error:  # noqa: BLE001 - raised again
        raise _noted(error, host)  # noqa: B904 - it is that error, or has it as its cause


def _noted(error: BaseException, host: HostBatch[Plan]) -> BaseException:
    return note(safe_to_raise(error, "placing"), "placing", host.position)


def _deliver(placer: Placer, flying: deque[PendingTransfer], inbox: HostQueue, outbox: ReadyQueue, meters: Meters) -> bool:
    try:
        placed = _land(placer, flying.popleft(), inbox, meters)
    except BaseException:
        flying.clear()  # none of them may come without this one
        raise
    return outbox.put(placed)


def _land(placer: Placer, flight: PendingTransfer, inbox: HostQueue, meters: Meters) -> PlacedBatch:
    try:
        placed = placer.land(flight)
    except BaseException as error:  # noqa: BLE001 - raised again
        raise _noted(error, flight.host)  # noqa: B904 - it is that error, or has it as its cause
    inbox.release()
    meters.transfer_seconds += placed.ready_at - placed.dispatched_at
    return placed
