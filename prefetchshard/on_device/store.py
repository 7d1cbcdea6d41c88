"""Puts arrays on the devices, and makes the row numbers that a run reads in their place.

A run over such arrays reads a hidden source of row numbers (-1: padding), which are batched and transferred like any other batch. The
devices then gather the rows (`gathering.py`). If rows are split over devices, the gather is a collective operation. Programs with
collectives must be dispatched to all devices in one order, or the devices deadlock. So the consumer's thread, which dispatches the
training step, must dispatch such a gather too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from prefetchshard.base.config import HOST, Narrow
from prefetchshard.base.device_memory import memory_told
from prefetchshard.base.errors import ConfigError, NarrowingError, PlacementError
from prefetchshard.base.jax_types import block_until_ready, device_put, make_array_from_callback, zeros
from prefetchshard.base.memory import AnyArray
from prefetchshard.leaves.narrowing import store
from prefetchshard.on_device.gathering import gathers_of
from prefetchshard.placing.transfer import explicit
from prefetchshard.planning.plan import Leaf, Plan
from prefetchshard.planning.planner import Planner
from prefetchshard.sharding.leaf_sharding import fit, replicated_like
from prefetchshard.sharding.meshes import axis_names, axis_size, devices_of, is_on_cpu, mesh_of, row_split, sharding_text
from prefetchshard.sharding.rules import ShardingRules, resolve
from prefetchshard.sources.arrays import Arrays
from prefetchshard.sources.device_arrays import DeviceArrays
from prefetchshard.staging.layout import aligned_bytes, nbytes_of

PADDING = -1
"""The row number of padding."""


class RowNumberPlanner(Planner):
    """Plans batches of row numbers."""

    def _set_padding(self, leaf: Leaf, rows: int | None) -> None:
        del rows
        leaf.padding = np.array(PADDING, leaf.target)


class DeviceRows:
    """Arrays on the devices, and the gather of each batch's rows from them.

    Args:
        source: the user's arrays.
        plan: the plan of the batches.

    Attributes:
        plan: the plan of the batches.
        numbers: the hidden source of row numbers, one array for each set of devices.
        rules: the shardings of the row numbers.
        is_late: the consumer's thread must dispatch the gather: it moves rows between devices, or runs on several CPU devices, where
            the backend can deadlock if two threads dispatch programs over several devices.

    Raises:
        ConfigError: the shardings of the arrays and of the batches are incompatible; the message names the leaf.

    Thread safety: call it from one thread at a time.
    """

    def __init__(self, source: DeviceArrays, plan: Plan) -> None:
        self.plan = plan
        self._source = source
        self._placements = _placements(source, plan)
        self._stores: list[Any] = []
        self._gathers = gathers_of(plan, [placement.sharding for placement in self._placements])
        where = tuple([gather.numbers_at for gather in self._gathers])
        number = np.arange(source.length, dtype=np.int32)
        self.numbers = Arrays((number,) * len(where), [number] * len(where), source.length)
        self.rules: ShardingRules = resolve(where)
        moves_rows = any(placement.is_split for placement in self._placements)
        self.is_late = moves_rows or (plan.spans_devices and is_on_cpu(plan.put.shardings[0]))

    def check_memory(self, batches: int) -> None:
        """Check that each device has room for the arrays and for this number of batches.

        Raises:
            ConfigError: a device has too little; the message gives the bytes.
        """
        if self._stores:
            return
        needs: dict[Any, int] = {}
        for placement, leaf in zip(self._placements, self._source.given, strict=True):
            for device in devices_of(placement.sharding):
                needs[device] = needs.get(device, 0) + (0 if placement.is_placed(leaf) else placement.bytes_per_device)
        of_batch = sum(spec.bytes_per_device for spec in self.plan.spec())
        for device, need in needs.items():
            free = free_bytes(device)
            if free is not None and need + batches * of_batch > free:
                raise ConfigError(
                    f"ps.OnDevice: the arrays take {need:,} bytes on {device}, and {batches} batches of {of_batch:,} bytes are there beside "
                    f"them, {need + batches * of_batch:,} in all; {free:,} bytes are free. Split the rows over the devices "
                    f"(ps.OnDevice(..., sharding=PartitionSpec(...))), or pass the arrays themselves, which are read from host memory"
                )

    def put(self, narrow: Narrow) -> None:
        """Put the arrays on the devices, unless they are there already, and wait for the transfer.

        Raises:
            NarrowingError: a value does not fit into 32 bits; the message names leaf and row.
        """
        if not self._stores:
            self._source.check_alive()
            with explicit():
                stores = [placement.put(leaf, narrow) for placement, leaf in zip(self._placements, self._source.given, strict=True)]
            self._stores = block_until_ready(stores)

    def check_rows(self, rows: int) -> None:
        """Check that a last batch of so many rows, which is kept as it is, can be split as the others are.

        Raises:
            PlacementError: it cannot; the message names the leaf.
        """
        pieces = self.plan.microbatches or 1
        for leaf in self.plan.leaves:
            fit(leaf.sharding, leaf.path, (rows // pieces if rows % pieces == 0 else rows, *leaf.shape[1:]), named=False)
        if rows % pieces:
            raise PlacementError(f"microbatches={pieces}: a last batch of {rows} rows cannot be cut into {pieces} equal pieces")

    def __call__(self, numbers: Sequence[Any]) -> list[Any]:
        """Dispatch the gather of a batch.

        Args:
            numbers: the row numbers of the batch, one array for each set of devices.

        Returns:
            The arrays of the batch, in the put order of its plan.
        """
        if len(numbers[0]) != self.plan.rows:
            self.check_rows(len(numbers[0]))
        arrays: list[Any] = [None] * len(self.plan.put.indices)
        for gather, some in zip(self._gathers, numbers, strict=True):
            for n, array in zip(gather.members, gather(some, self._stores), strict=True):
                arrays[n] = array
        return arrays


def free_bytes(device: Any) -> int | None:
    """Free memory of a device in bytes; None if its backend does not tell."""
    told = memory_told(device)
    return told["bytes_limit"] - told.get("bytes_in_use", 0) if "bytes_limit" in told else None


# -- placement of the arrays


class _Place:
    """The placement of one array.

    Attributes:
        path: path of the leaf.
        sharding: sharding of the array.
        shape: `(rows, *example)`, padded to a number of rows that can be split equally.
        dtype: dtype on the devices.
        is_split: rows are split, so no device holds all of them.
    """

    def __init__(self, path: str, sharding: Sharding, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        pieces = row_split(sharding)
        self.path = path
        self.sharding = sharding
        self.shape = (-(-shape[0] // pieces) * pieces, *shape[1:])
        self.dtype = dtype
        self.is_split = pieces > 1

    @property
    def bytes_per_device(self) -> int:
        return nbytes_of(self.sharding.shard_shape(self.shape), self.dtype)

    def is_placed(self, leaf: Any) -> bool:
        """Whether the user's array already has this placement."""
        placed: Any = self.sharding
        return (
            isinstance(leaf, jax.Array)
            and leaf.shape == self.shape
            and leaf.dtype == self.dtype
            and bool(leaf.sharding.is_equivalent_to(placed, leaf.ndim))
        )

    def put(self, leaf: Any, narrow: Narrow) -> Any:
        if self.is_placed(leaf):
            return leaf
        if isinstance(leaf, jax.Array):
            if leaf.dtype != self.dtype:
                raise ConfigError(
                    f"ps.OnDevice: leaf {self.path or '(the batch itself)'} is a jax.Array of {leaf.dtype}, which would become {self.dtype} while "
                    f"x64 is off: cast it, or pass it as a NumPy array, whose values are checked"
                )
            more = self.shape[0] - leaf.shape[0]
            if more:
                leaf = jnp.concatenate([leaf, zeros((more, *leaf.shape[1:]), leaf.dtype)])
            return device_put(leaf, self.sharding)
        pieces: dict[Any, AnyArray] = {}  # devices that hold the same rows share the copy on the host

        def piece(index: tuple[slice, ...]) -> AnyArray:
            key = tuple((part.start, part.stop) for part in index)
            if key not in pieces:
                pieces[key] = self._piece(leaf, index, narrow)
            return pieces[key]

        return make_array_from_callback(self.shape, self.sharding, piece)

    def _piece(self, leaf: AnyArray, index: tuple[slice, ...], narrow: Narrow) -> AnyArray:
        """A copy of a part of the array; the CPU backend may alias its memory."""
        start, stop, _ = index[0].indices(self.shape[0])
        some = leaf[(slice(start, min(stop, len(leaf))), *index[1:])]
        shape = (stop - start, *some.shape[1:])
        part = np.ndarray(shape, self.dtype, aligned_bytes(nbytes_of(shape, self.dtype)))
        part[len(some) :] = np.zeros((), self.dtype)
        try:
            store(part[: len(some)], some, path=self.path, policy=narrow, row=start)
        except NarrowingError as error:  # its text names a row of a batch
            raise NarrowingError(str(error).replace("of the batch", "of the arrays")) from None
        return part


def _placements(source: DeviceArrays, plan: Plan) -> list[_Place]:
    shardings = _store_shardings(source, plan)
    placements: list[_Place] = []
    for leaf, stored, array in zip(plan.leaves, shardings, source.leaves, strict=True):
        batch: Any = leaf.sharding
        _check_together(leaf.path, stored, batch)
        # Several shardings can name the same single device: use the batch's form, as the gather does.
        where = replicated_like(batch) if len(batch.device_set) == 1 else stored
        placements.append(_Place(leaf.path, where, array.shape, leaf.target))
    return placements


def _store_shardings(source: DeviceArrays, plan: Plan) -> list[Any]:
    for leaf in plan.leaves:
        if leaf.sharding is HOST:
            raise ConfigError(
                f"ps.OnDevice: leaf {leaf.path or '(the batch itself)'} is to stay on the host (ps.HOST), and its array on the devices; leave it "
                f"out, or pass the arrays themselves, which are read from host memory"
            )
    one_device = all(len(devices_of(leaf.sharding)) == 1 for leaf in plan.leaves)
    if source.sharding is None or (one_device and _is_bare(source.sharding)):
        return [replicated_like(leaf.sharding) for leaf in plan.leaves]
    rules = _rules_of(source.sharding, [leaf.sharding for leaf in plan.leaves])
    pieces = rules.batch_split() or 1
    rows = -(-source.length // pieces) * pieces
    structure = rules.flatten_arrays(source.tree)
    return rules.shardings(structure, [(rows, *leaf.shape[1:]) for leaf in source.leaves], [leaf.target for leaf in plan.leaves])


def _is_bare(sharding: Any) -> bool:
    """Whether a sharding consists of PartitionSpecs, without a mesh."""
    rules: list[Any] = jax.tree.leaves(sharding, is_leaf=lambda node: isinstance(node, PartitionSpec))  # pyright: ignore[reportUnknownLambdaType]
    return all(isinstance(rule, PartitionSpec) for rule in rules)


def _rules_of(sharding: Any, batches: Sequence[Any]) -> ShardingRules:
    """The user's sharding of the arrays; bare specs refer to the mesh of the batches."""
    meshes = {mesh_of(one) for one in batches if isinstance(one, NamedSharding)}
    try:
        if len(meshes) != 1:
            return resolve(sharding, none_replicates=True)
        with jax.set_mesh(next(iter(meshes))):
            return resolve(sharding, none_replicates=True)
    except ConfigError as error:
        raise ConfigError(f"ps.OnDevice: {error}") from None  # the loader has a `sharding` of its own


def _check_together(path: str, stored: Any, batch: Any) -> None:
    """Check that rows can be gathered from the array's sharding into the batch's."""
    name = path or "(the batch itself)"
    if stored is HOST:
        raise ConfigError(f"ps.OnDevice: leaf {name}: its array is to lie on devices, so ps.HOST is no sharding for it")
    for sharding in (stored, batch):
        if not isinstance(sharding, (NamedSharding, SingleDeviceSharding)):
            raise ConfigError(f"ps.OnDevice: leaf {name}: pass a NamedSharding or a SingleDeviceSharding, not {sharding!r}")
        if sharding.memory_kind not in (None, "device", batch.memory_kind) or not sharding.is_fully_addressable:
            raise ConfigError(f"ps.OnDevice: leaf {name}: {sharding_text(sharding)} is not in the memory of this process's devices")
    if stored.device_set != batch.device_set or (
        isinstance(stored, NamedSharding) and isinstance(batch, NamedSharding) and mesh_of(stored) != mesh_of(batch)
    ):
        raise ConfigError(
            f"ps.OnDevice: leaf {name}: its array is placed by {sharding_text(stored)}, its batches by {sharding_text(batch)}; both must be of "
            f"one mesh"
        )
    if isinstance(batch, NamedSharding) and isinstance(stored, NamedSharding):
        _check_example_axes(name, stored, batch)


def _check_example_axes(name: str, stored: NamedSharding, batch: NamedSharding) -> None:
    mesh = mesh_of(batch)
    for axis in range(1, len(stored.spec)):
        held, wanted = stored.spec[axis], batch.spec[axis] if axis < len(batch.spec) else None
        if axis_size(mesh, held) > 1 and axis_names(held) != axis_names(wanted):
            raise ConfigError(
                f"ps.OnDevice: leaf {name}: axis {axis} is split over {held!r} where the array lies, and over {wanted!r} in the batch: split it "
                f"alike, or leave it whole in ps.OnDevice(sharding=...)"
            )
