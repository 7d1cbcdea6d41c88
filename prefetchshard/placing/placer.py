"""Dispatches the transfer of a host batch, waits for it, and makes what the consumer gets."""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from prefetchshard.base.faults import note, safe_to_raise
from prefetchshard.base.jax_context import JaxContext
from prefetchshard.base.jax_types import as_jax_array, jit, wrap_key_data
from prefetchshard.leaves.on_devices import computable, from_movable, is_jax_array, is_key, to_movable
from prefetchshard.measuring.profiling import annotate, is_taken, leave
from prefetchshard.measuring.recorder import Recorder
from prefetchshard.placing.device_transform import DeviceTransform, stand_in, step_value
from prefetchshard.placing.placed_batch import PlacedBatch
from prefetchshard.placing.transfer import Owned, explicit, made_again, put
from prefetchshard.planning.array_copies import ArrayCopy
from prefetchshard.planning.host_batch import HostBatch
from prefetchshard.planning.packing import Packing
from prefetchshard.planning.plan import MASK, Kind, Plan
from prefetchshard.sharding.leaf_sharding import replicated_like

_jnp: Any = jnp
_lax: Any = jax.lax


LOOK_BYTES = 1 << 20
"""Of a batch. Smaller ones say nothing about a device's bandwidth."""

LOOK_EVERY = 8
"""Of so many transfers one is looked at device by device: finding the pieces of a leaf costs 26 us (eight devices)."""


class PendingTransfer:
    """A transfer on its way.

    Attributes:
        host: what is put.
        arrays: on their way; `Deferred` where the consumer's thread has yet to dispatch one.
        step: for the key of a `device_transform`.
        is_late: whether there is a `Deferred` among the arrays.
    """

    __slots__ = ("arrays", "host", "is_late", "step")

    def __init__(self, host: HostBatch, arrays: list[Any], step: Any, *, is_late: bool) -> None:
        self.host = host
        self.arrays = arrays
        self.step = step
        self.is_late = is_late


class Deferred:
    """A leaf that lies on several devices, and on which they compute before it is as it shall be: moved, padded, or cut."""

    __slots__ = ("_index", "_is_own", "_path", "_plan", "_shape", "_sharding", "_value")

    def __init__(self, plan: Plan, n: int, value: Any, *, is_own: bool) -> None:
        self._plan = plan
        self._index = plan.put.indices[n]
        self._shape = plan.put.shapes[n]
        self._sharding = plan.put.shardings[n]
        self._path = plan.put.paths[n]
        self._value = value
        self._is_own = is_own

    def put(self) -> Any:
        with explicit():
            value = _device_leaf(self._plan, self._index, self._shape, self._value)
        value = Owned(value) if self._is_own and value is self._value else value
        return put([value], [self._sharding], paths=[self._path])[0]


class DeviceLooks:
    """Sees how long single devices wait for their part of a batch, where it goes to several. Thread safety: one thread."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._transfers = 0

    def look(self, flight: PendingTransfer) -> None:
        """Wait for the part of one device, now and then, for another one each time.

        Only the device that is waited for first is seen: another one may have been done before it.
        """
        self._transfers += 1
        turn, rest = divmod(self._transfers, LOOK_EVERY)
        if rest:
            return
        arrays = [array for array in flight.arrays if type(array) is not Deferred]
        devices = sorted({device for array in arrays for device in array.sharding.addressable_devices}, key=lambda device: device.id)
        if len(devices) < 2:
            return
        device = devices[turn % len(devices)]
        pieces = [shard.data for array in arrays for shard in array.addressable_shards if shard.device == device]
        times, was_waiting = flight.host.times, not all(piece.is_ready() for piece in pieces)
        for piece in pieces:
            piece.block_until_ready()
        if was_waiting:  # else it is not known when it was done
            seconds = self._recorder.clock() - times.dispatch_at
            self._recorder.add_device(str(device), sum(piece.nbytes for piece in pieces), seconds)


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

    Args:
        device_transform: or None.
        context: the caller's JAX settings, in force where this is called; the context variables are those where this is made.
        recorder: measures transfers.
        gather: where row numbers are transferred, and the rows gathered on the devices.
    """

    def __init__(
        self,
        device_transform: DeviceTransform | None,
        context: JaxContext,
        recorder: Recorder,
        *,
        gather: RowGather | None = None,
    ) -> None:
        self._device_transform = device_transform
        self._gather = gather
        self._context = context
        self._recorder = recorder
        self._devices = DeviceLooks(recorder)
        self._variables = contextvars.copy_context()

    def dispatch(self, host: HostBatch) -> PendingTransfer:
        """Dispatch the transfer of a batch; one call for all its leaves."""
        times = host.times
        times.step = host.position.after.step - 1
        self._recorder.transferring = ("dispatching", times, threading.get_ident())
        annotation = annotate("dispatching", step=times.step) if is_taken() else None
        try:
            if not self._context.sets_aside:
                return self._dispatch(host)
            with self._context.set_aside():
                return self._dispatch(host)
        finally:
            leave(annotation)

    def _dispatch(self, host: HostBatch) -> PendingTransfer:
        leaves, shardings, paths = _to_put(host)
        if host.plan.microbatches is not None:
            host.plan.cut_on_host(host.passed)
        wants_key = self._device_transform is not None and self._device_transform.wants_key and bool(shardings)
        if wants_key:
            leaves.append(step_value(host.position.step))
            shardings = [*shardings, replicated_like(shardings[0])]
            paths = [*paths, "(step)"]
        clock, times = self._recorder.clock, host.times
        times.bytes, times.rows = host.plan.nbytes, host.rows
        times.dispatch_at = clock()
        is_late = host.plan.has_device_leaves and any(type(leaf) is Deferred for leaf in leaves)
        arrays = _put_but_late(leaves, shardings, paths) if is_late else put(leaves, shardings, paths=paths)
        step = arrays.pop() if wants_key else None if self._device_transform is None else step_value(host.position.step)
        times.dispatched_at = clock()
        return PendingTransfer(host, arrays, step, is_late=is_late)

    def wait(self, flight: PendingTransfer) -> None:
        """Wait until a transfer is ready, and note when that was; once."""
        times = flight.host.times
        if times.ready_at:
            return
        self._recorder.transferring = ("waiting", times, threading.get_ident())
        annotation = annotate("transferring", step=times.step) if is_taken() else None
        try:
            if times.bytes >= LOOK_BYTES:
                self._devices.look(flight)
            for array in flight.arrays:
                if type(array) is not Deferred:
                    array.block_until_ready()
        finally:
            leave(annotation)
        times.ready_at = self._recorder.clock()

    def land(self, flight: PendingTransfer) -> PlacedBatch:
        """Put the batch of a transfer that is ready together."""
        host, recorder = flight.host, self._recorder
        recorder.transferring = ("finishing", host.times, threading.get_ident())
        if host.memory is not None:
            host.memory.release()
            host.memory = None
        plan = host.plan if self._gather is None else self._gather.plan
        is_late = flight.is_late or self._is_late(plan)
        batch = None if is_late else self._batch(flight, may_donate=True)
        placed = PlacedBatch(batch, host.position, host.times, host.plan.nbytes, host.rows, plan.spec)
        if is_late:
            placed.finish = partial(self._late_batch, flight)
        recorder.transferring = None
        return placed

    def _is_late(self, plan: Plan) -> bool:
        """Whether the rest is for the consumer's thread, which dispatches the training step.

        What devices compute together they begin in the same order on each; two threads that dispatch at once may mix the orders up, and
        the devices then wait for each other for ever.
        """
        gather_is_late = self._gather is not None and self._gather.is_late
        return gather_is_late or (self._device_transform is not None and plan.spans_devices)

    def _batch(self, flight: PendingTransfer, *, may_donate: bool) -> Any:
        host = flight.host
        arrays = flight.arrays
        plan = host.plan if self._gather is None else self._gather.plan
        if flight.is_late or host.plan.packing is not None or self._gather is not None:
            with self._context.set_aside():
                arrays = [array.put() if type(array) is Deferred else array for array in arrays] if flight.is_late else arrays
                arrays = arrays if host.plan.packing is None else _unpacked(host.plan.packing, arrays)
                arrays = arrays if self._gather is None else self._gather(arrays)
        if self._device_transform is None:
            return plan.assemble(arrays, host.passed)
        stand_ins = {index: stand_in(index, value) for index, value in host.passed.items()}
        return self._device_transform(plan.assemble(arrays, stand_ins), host.passed, flight.step, may_donate=may_donate)

    def _late_batch(self, flight: PendingTransfer) -> Any:
        """As `_batch`, in the consumer's thread, where other settings and context variables may be in force.

        What Ctrl-C cuts off there is done once more, with the same arrays.
        """
        try:
            with contextlib.nullcontext() if self._context.is_in_force() else self._context.in_force():
                return self._variables.copy().run(partial(self._batch, flight, may_donate=False))
        except BaseException as error:  # noqa: BLE001 - raised again
            raise noted(error, flight.host)  # noqa: B904 - it is that error, or has it as its cause


def _to_put(host: HostBatch) -> tuple[list[Any], list[Any], list[str]]:
    """What is put of a batch, where it goes, and its paths: the slab of the packed leaves first, where there is one."""
    plan, memory = host.plan, host.memory
    if plan.packing is None or memory is None:
        return [_leaf_to_put(host, n) for n in range(len(plan.put.indices))], plan.put.shardings, plan.put.paths
    others = plan.packing.others
    shardings = [plan.packing.sharding, *(plan.put.shardings[n] for n in others)]
    return [memory.slab, *(_leaf_to_put(host, n) for n in others)], shardings, ["(small leaves)", *(plan.put.paths[n] for n in others)]


def _put_but_late(leaves: list[Any], shardings: list[Any], paths: list[str]) -> list[Any]:
    """Put those leaves that need not wait for the consumer's thread."""
    now = [n for n, leaf in enumerate(leaves) if type(leaf) is not Deferred]
    placed = put([leaves[n] for n in now], [shardings[n] for n in now], paths=[paths[n] for n in now])
    arrays = list(leaves)
    for n, array in zip(now, placed, strict=True):
        arrays[n] = array
    return arrays


def _leaf_to_put(host: HostBatch, n: int) -> Any:
    plan, memory = host.plan, host.memory
    index, shape = plan.put.indices[n], plan.put.shapes[n]
    if index == MASK:
        assert host.mask is not None
        return host.mask.reshape(shape)
    if memory is not None and plan.leaves[index].kind is Kind.STAGED:
        view = memory.views[n]
        return view if view.shape == shape else view.reshape(shape)
    value = host.passed.pop(index)
    is_own = type(value) is ArrayCopy
    if is_own:
        if not _is_to_change(value, shape, plan.put.shardings[n]):
            return value
        with explicit():
            value = made_again(value)
    if is_jax_array(value) and len(value.sharding.device_set) > 1 and _is_to_change(value, shape, plan.put.shardings[n]):
        return Deferred(plan, n, value, is_own=is_own)
    with explicit():
        made = _device_leaf(plan, index, shape, value)
    return Owned(made) if is_own and made is value else made


def _is_to_change(value: Any, shape: tuple[int, ...], sharding: Any) -> bool:
    return value.shape != shape or not value.sharding.is_equivalent_to(sharding, len(shape))


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
        value = _stacked_keys(value)
    missing = plan.rows - value.shape[0] if leaf.has_rows and plan.rows is not None else 0
    if value.shape == shape and missing <= 0:
        return value
    movable = to_movable(computable(value))
    padding = b"" if leaf.padding is None else leaf.padding.tobytes()
    return Owned(from_movable(_filled(movable, max(0, missing), padding, shape), value.dtype))


def _fill(value: Any, missing: int, padding: bytes, shape: tuple[int, ...]) -> Any:
    """An array with so many rows more, in another shape. What fills them is of its own type, weak or not."""
    if missing:
        rows = (missing, *value.shape[1:])
        if is_key(value):
            filling = _jnp.repeat(value[-1:], missing, axis=0)  # any valid key: its rows are masked
        else:
            filling = _lax.full_like(value, np.ndarray((), value.dtype, padding), shape=rows)
        value = _jnp.concatenate([value, filling])
    return _jnp.reshape(value, shape)


_filled = jit(_fill, static_argnums=(1, 2, 3))  # one function: what it makes by itself lies where its array does, so nothing is moved


def _stacked_keys(keys: list[Any]) -> Any:
    """The keys of examples as one array."""
    wholes = [key.whole for key in keys if type(key) is ArrayCopy and key.whole is not None]
    if len(wholes) < len(keys):
        return _jnp.stack([made_again(key) if type(key) is ArrayCopy else key for key in keys])
    return wrap_key_data(as_jax_array(np.stack(wholes)), impl=keys[0].key_impl)


def noted(error: BaseException, host: HostBatch) -> BaseException:
    """The error as the consumer gets it, with a note that says which batch was being placed."""
    return note(safe_to_raise(error, "placing"), "placing", host.position)
