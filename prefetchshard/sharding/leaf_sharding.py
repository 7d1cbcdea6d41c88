"""Checks that a sharding fits a leaf, and derives shardings from others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from prefetchshard.base.config import HOST, HostType
from prefetchshard.base.errors import ConfigError, PlacementError
from prefetchshard.sharding.meshes import axis_names, axis_size, devices_of, index_map, mesh_of, sharding_text, split_count

if TYPE_CHECKING:
    from collections.abc import Sequence

Shape = tuple[int, ...]


def fit(sharding: Sharding, path: str, shape: Shape, *, named: bool) -> Sharding:
    """The sharding of a leaf, from the rule that applies to it.

    Args:
        sharding: the rule.
        path: of the leaf.
        shape: global shape of the leaf.
        named: the rule was written for this leaf itself, so a spec with more axes than the leaf is an error instead of being cut off.

    Raises:
        PlacementError: it does not fit; the message names path, shape, spec and mesh, and says what to change.
    """
    if not isinstance(sharding, NamedSharding):
        return _accepted(sharding, path, shape)
    entries: tuple[Any, ...] = tuple(sharding.spec)
    if len(entries) > len(shape):
        if named:
            raise PlacementError(
                f"{_unfit(sharding, path, shape)}: the leaf has rank {len(shape)}, the spec speaks of {len(entries)} axes; "
                f"give this leaf a spec of at most {len(shape)}"
            )
        entries = entries[: len(shape)]
        sharding = _respec(sharding, entries)
    for axis, entry in enumerate(entries):
        multiple = axis_size(mesh_of(sharding), entry)
        if shape[axis] % multiple:
            raise _indivisible(sharding, path, shape, axis=axis, multiple=multiple)
    return sharding


def _accepted(sharding: Sharding, path: str, shape: Shape) -> Sharding:
    try:
        sharding.shard_shape(shape)
    except ValueError as error:
        raise PlacementError(f"{_unfit(sharding, path, shape)}: {error}") from error
    return sharding


def _unfit(sharding: Sharding, path: str, shape: Shape) -> str:
    return f"leaf {path or '(the batch itself)'}: shape {shape} does not fit {sharding_text(sharding)}"


def _indivisible(sharding: NamedSharding, path: str, shape: Shape, *, axis: int, multiple: int) -> PlacementError:
    names = " x ".join(repr(name) for name in axis_names(sharding.spec[axis]))
    way_out = (
        "choose such a batch_size; a short batch is filled up with remainder='pad', a last one left out with remainder='drop'"
        if axis == 0
        else "pad or crop that axis in `transform`, or take it out of the spec of this leaf"
    )
    return PlacementError(
        f"{_unfit(sharding, path, shape)}: axis {axis} ({shape[axis]}) must be a multiple of {multiple} ({names}); {way_out}"
    )


def _respec(sharding: NamedSharding, entries: Sequence[Any]) -> NamedSharding:
    return NamedSharding(mesh_of(sharding), PartitionSpec(*entries), memory_kind=sharding.memory_kind)


def replicated_like(sharding: Sharding) -> Sharding:
    """The fully replicated sharding over the devices of another one, in the same memory kind."""
    if isinstance(sharding, NamedSharding):
        return _respec(sharding, ())
    if isinstance(sharding, SingleDeviceSharding):
        return sharding
    return NamedSharding(Mesh(np.array(devices_of(sharding)), ("devices",)), PartitionSpec(), memory_kind=sharding.memory_kind)


def with_leading_axis(sharding: Sharding) -> Sharding:
    """The sharding of `(k, rows / k, ...)` from that of `(rows, ...)`: each of the k microbatches is split as the batch was.

    Raises:
        ConfigError: the sharding is over several devices and no NamedSharding.
    """
    if isinstance(sharding, NamedSharding):
        entries: tuple[Any, ...] = tuple(sharding.spec)
        return _respec(sharding, (None, *entries)) if entries else sharding
    if isinstance(sharding, SingleDeviceSharding):
        return sharding
    raise ConfigError(f"microbatches need a NamedSharding, not {sharding!r}")


def rows_like(shardings: Sequence[Sharding | HostType], shapes: Sequence[Shape]) -> Sharding | HostType:
    """The sharding of an array with one value per row, `(rows,)`: split like axis 0 of the first leaf whose rows are split.

    If no leaf is split, the array is replicated over the devices of the first leaf; if all leaves stay on the host, so does the array.
    """
    placed = [(sharding, len(shape)) for sharding, shape in zip(shardings, shapes, strict=True) if sharding is not HOST]
    for sharding, ndim in placed:
        if ndim and split_count(sharding, ndim) > 1:
            return _axis_0(sharding, ndim)
    return replicated_like(placed[0][0]) if placed else HOST


def _axis_0(sharding: Sharding, ndim: int) -> Sharding:
    if isinstance(sharding, NamedSharding):
        return _respec(sharding, (sharding.spec[0],))
    pieces = split_count(sharding, ndim)
    holders: dict[int, list[Any]] = {}
    shape = (pieces, *(split_count(sharding, ndim, axis) for axis in range(1, ndim)))
    for device, index in index_map(sharding, shape).items():
        holders.setdefault(index[0].start or 0, []).append(device)
    mesh = Mesh(np.array([holders[piece] for piece in range(pieces)]), ("rows", "copies"))
    return NamedSharding(mesh, PartitionSpec("rows"), memory_kind=sharding.memory_kind)
