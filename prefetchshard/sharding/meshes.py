"""Meshes, and how a sharding splits rows: into how many pieces, and which of them this process holds."""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from prefetchshard.base.codec import shown
from prefetchshard.base.errors import ConfigError
from prefetchshard.base.jax_types import Device, Index, OnDevices, process_index
from prefetchshard.base.jax_types import devices as all_devices
from prefetchshard.base.jax_types import make_mesh as make_device_mesh

if TYPE_CHECKING:
    from collections.abc import Sequence


class ProcessShard(NamedTuple):
    """The part of the rows that a process reads: shard `index` of `count` equal ones. Processes with the same index read the same rows."""

    index: int  # pyright: ignore[reportIncompatibleMethodOverride] - the standard names; nobody needs the tuple methods
    count: int  # pyright: ignore[reportIncompatibleMethodOverride]


def make_mesh(axes: Mapping[str, int], devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh with axes of type Auto, its devices ordered to suit the interconnect.

    Args:
        axes: size of each axis by name; one may be -1, which means all remaining devices.
        devices: the devices to use, all of them; default: all devices of all processes.

    Raises:
        ConfigError: `axes` is no mapping from names to sizes, the product of the sizes is not the number of devices, two sizes are -1,
            one is zero, or there is no axis; or `devices` are no devices.

    Example:
        mesh = ps.make_mesh({"data": -1, "model": 2})
        assert mesh.shape["data"] == jax.device_count() // 2
    """
    chosen = all_devices() if devices is None else _checked_devices(devices)
    sizes = _whole_sizes(axes, len(chosen))
    return make_device_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes), devices=chosen)


def _checked_devices(devices: Any) -> list[Device]:
    given: list[Any] | None = (
        None if isinstance(devices, str) or not isinstance(devices, Iterable) else list(cast("Iterable[Any]", devices))
    )
    if given is None or not all(hasattr(one, "platform") and hasattr(one, "process_index") for one in given):
        raise ConfigError(f"make_mesh(devices={devices!r}): a list of devices, such as jax.devices()")
    if len(set(given)) != len(given):
        raise ConfigError(f"make_mesh(devices={devices!r}): a device is in it twice")
    return given


def _whole_sizes(axes: Mapping[str, int], devices: int) -> dict[str, int]:
    _check_axes(axes, devices)
    known = math.prod(size for size in axes.values() if size != -1)
    free = -1 in axes.values()
    if (devices % known) if free else (known != devices):
        wanted = f"a multiple of {known}" if free else f"{known}"
        raise ConfigError(f"make_mesh({dict(axes)}) needs {wanted} devices, there are {devices}; change a size, or let one axis be -1")
    return {name: devices // known if size == -1 else int(size) for name, size in axes.items()}


def _check_axes(axes: Mapping[str, int], devices: int) -> None:
    if not isinstance(axes, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may be untyped
        raise ConfigError(f"make_mesh({axes!r}): a size for each axis by name, e.g. make_mesh({{'data': -1}})")
    if not axes:
        raise ConfigError("make_mesh({}): at least one axis, e.g. make_mesh({'data': -1})")
    for name, size in axes.items():
        if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance] - as above
            raise ConfigError(f"make_mesh: the axis {name!r} of size {size!r} is no string")
        if isinstance(size, bool) or not isinstance(size, numbers.Integral) or (size < 1 and size != -1):  # pyright: ignore[reportUnnecessaryIsInstance] - as above
            raise ConfigError(f"make_mesh: axis {name!r} has size {size!r}; a size is a positive int, or -1 for what is left")
    if list(axes.values()).count(-1) > 1:
        raise ConfigError(f"make_mesh({dict(axes)}): only one axis may be -1")
    if not devices:
        raise ConfigError(f"make_mesh({dict(axes)}): the list of devices is empty")


def axis_names(entry: Any) -> tuple[Any, ...]:
    """The mesh axes in one entry of a PartitionSpec: none for None, several for a tuple.

    Raises:
        ConfigError: the entry is `PartitionSpec.UNCONSTRAINED`, which says nothing about where data goes.
    """
    if entry is None:
        return ()
    if entry is PartitionSpec.UNCONSTRAINED:
        raise ConfigError("PartitionSpec.UNCONSTRAINED cannot place data: name the mesh axes, or None")
    return (*entry,) if isinstance(entry, tuple | list) else (entry,)  # pyright: ignore[reportUnknownVariableType]


def spec_axes(spec: PartitionSpec) -> tuple[Any, ...]:
    """All mesh axes in a spec, in order."""
    return tuple(name for entry in tuple(spec) for name in axis_names(entry))


def axis_size(mesh: Mesh, entry: Any) -> int:
    """The number of pieces into which an entry of a PartitionSpec splits an axis of an array."""
    return math.prod(mesh.shape[name] for name in axis_names(entry))


def check_spec(spec: PartitionSpec, mesh: Mesh) -> None:
    """Check that a spec can be used with a mesh.

    Raises:
        ConfigError: it names an axis that the mesh does not have, or one axis twice, or is unconstrained.
    """
    names = spec_axes(spec)
    for name in names:
        if name not in mesh.shape:
            near = difflib.get_close_matches(str(name), [str(axis) for axis in mesh.shape], n=1, cutoff=0.0)
            raise ConfigError(
                f"{spec_text(spec)} names the axis {name!r}, the mesh has {mesh_text(mesh)}; did you mean {near[0] if near else None!r}?"
            )
        if names.count(name) > 1:
            raise ConfigError(f"{spec_text(spec)} uses the axis {name!r} of the mesh {mesh_text(mesh)} twice")


def split_count(sharding: Sharding, ndim: int, axis: int = 0) -> int:
    """The number of distinct pieces into which a sharding splits an axis of an array of `ndim` axes."""
    if isinstance(sharding, NamedSharding):
        return axis_size(mesh_of(sharding), sharding.spec[axis]) if axis < len(sharding.spec) else 1
    if sharding.is_fully_replicated or axis >= ndim:
        return 1
    devices = len(devices_of(sharding))  # a multiple of the pieces along any axis, so this shape can be split
    return devices // sharding.shard_shape((devices,) * ndim)[axis]


def row_split(sharding: Sharding) -> int:
    """The number of pieces into which a sharding splits axis 0, for an array of unknown rank."""
    if isinstance(sharding, NamedSharding) or sharding.is_fully_replicated:
        return split_count(sharding, 1)
    for ndim in range(1, 9):
        try:
            return split_count(sharding, ndim)
        except ValueError:
            continue
    raise ConfigError(f"{sharding} does not say into how many pieces it splits axis 0; use a NamedSharding")


def process_data_shard(mesh: Mesh, spec: PartitionSpec) -> ProcessShard:
    """The part of the rows that this process reads, for sources that are sharded by index and count.

    It follows from the devices that hold each piece of axis 0, not from the number of processes: processes that differ only along a
    mesh axis that does not split rows read the same rows.

    Raises:
        ConfigError: this process has no device in the mesh, or the rows of two processes overlap only in part; or `mesh` is no mesh with
            devices, or `spec` no `PartitionSpec` of its axes.

    Example:
        shard = ps.process_data_shard(ps.make_mesh({"data": -1}), P("data"))
        rows = np.arange(64)[shard.index :: shard.count]  # what this process reads
    """
    if not isinstance(mesh, Mesh):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may be untyped
        raise ConfigError(f"process_data_shard: mesh={shown(mesh)} is no jax.sharding.Mesh; of a NamedSharding pass sharding.mesh")
    if not isinstance(spec, PartitionSpec):  # pyright: ignore[reportUnnecessaryIsInstance] - as above
        raise ConfigError(f"process_data_shard: spec={shown(spec)} is no PartitionSpec, such as P({mesh.axis_names[0]!r})")
    check_spec(spec, mesh)
    shape = tuple(axis_size(mesh, entry) for entry in tuple(spec)) or (1,)
    pieces: dict[int, set[int]] = {}
    for device, index in index_map(NamedSharding(mesh, spec), shape).items():
        pieces.setdefault(device.process_index, set()).add(index[0].start or 0)
    return process_shard({process: frozenset(held) for process, held in pieces.items()}, process_index())


def process_shard(pieces: Mapping[int, frozenset[int]], process: int) -> ProcessShard:
    """The shard of one process, computed from the pieces of axis 0 that each process holds."""
    if process not in pieces:
        raise ConfigError(f"process {process} has no device in the mesh; it cannot take part")
    shares = sorted({tuple(sorted(held)) for held in pieces.values()})
    if sum(map(len, shares)) != len({piece for share in shares for piece in share}):
        raise ConfigError(
            f"processes hold rows that overlap only in part ({shares}, in pieces of axis 0), so that no index and count describe them; "
            f"order the devices of the mesh so that each process has whole pieces"
        )
    return ProcessShard(shares.index(tuple(sorted(pieces[process]))), len(shares))


def spec_text(spec: PartitionSpec) -> str:
    """The spec as code: `P('data', None)`."""
    return f"P({', '.join(repr(entry) for entry in tuple(spec))})"


def mesh_text(mesh: Mesh) -> str:
    """Axes and sizes: `{'data': 4, 'model': 2}`."""
    return str(dict(mesh.shape))


def sharding_text(sharding: Sharding) -> str:
    """A short description: `P('data') on the mesh {'data': 8}`, `device 3 (cpu)`."""
    if isinstance(sharding, NamedSharding):
        memory = "" if sharding.memory_kind in (None, "device") else f", {sharding.memory_kind}"
        return f"{spec_text(sharding.spec)} on the mesh {mesh_text(mesh_of(sharding))}{memory}"
    if isinstance(sharding, SingleDeviceSharding):
        (device,) = devices_of(sharding)
        return f"device {device.id} ({device.platform})"
    return str(sharding)


def devices_of(sharding: OnDevices) -> list[Device]:
    """The devices of a sharding, in all processes, sorted by id."""
    return sorted(sharding.device_set, key=lambda device: device.id)


def is_on_cpu(sharding: OnDevices) -> bool:
    """Whether the devices belong to the CPU backend."""
    return next(iter(sharding.device_set)).platform == "cpu"


def index_map(sharding: OnDevices, shape: tuple[int, ...]) -> Mapping[Device, Index]:
    """The slice of an array that each device holds."""
    return sharding.devices_indices_map(shape)


def mesh_of(sharding: NamedSharding) -> Mesh:
    """The mesh of a NamedSharding.

    Raises:
        ConfigError: the mesh is abstract and has no devices.
    """
    mesh = sharding.mesh
    if not isinstance(mesh, Mesh):
        raise ConfigError(f"{sharding} is over an abstract mesh, which has no devices; use a jax.sharding.Mesh")
    return mesh
