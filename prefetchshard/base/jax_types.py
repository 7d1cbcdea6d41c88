"""JAX's own functions under full types.

Devices and tree structures come from JAX's compiled part, so JAX leaves them, and what takes or returns them, without a type. Each
function here is the one of JAX itself: calling it by this name costs nothing more. What JAX types by itself is used directly.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, cast

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, Sharding

Shape = tuple[int, ...]
Index = tuple[slice, ...]
Keys = tuple[Any, ...]
"""The way to a leaf of a tree: `DictKey`, `SequenceKey`, `GetAttrKey`, ..."""

IsLeaf = Callable[[Any], bool]


class Device(Protocol):
    """A device of any backend."""

    @property
    def id(self) -> int: ...
    @property
    def platform(self) -> str: ...
    @property
    def process_index(self) -> int: ...
    def memory_stats(self) -> dict[str, int] | None: ...
    def default_memory(self) -> Any: ...


class OnDevices(Protocol):
    """A sharding, as seen by who asks for its devices."""

    @property
    def device_set(self) -> set[Device]: ...
    def devices_indices_map(self, global_shape: Shape, /) -> Mapping[Device, Index]: ...


class TreeDef(Protocol):
    """The containers of a tree, without its leaves (`jax.tree_util.PyTreeDef`)."""

    @property
    def num_leaves(self) -> int: ...
    def unflatten(self, leaves: Iterable[Any], /) -> Any: ...
    def flatten_up_to(self, tree: Any, /) -> list[Any]: ...


class Jitted(Protocol):
    """A function that `jax.jit` made."""

    def __call__(self, *args: Any) -> Any: ...
    def trace(self, *args: Any) -> Any: ...


class _Config(Protocol):
    """The settings that this package reads; JAX looks them up anew at each access."""

    jax_default_device: Device | str | None
    jax_disable_jit: bool
    jax_transfer_guard_device_to_host: str | None
    jax_transfer_guard_host_to_device: str | None


class _Jit(Protocol):
    def __call__(
        self,
        function: Callable[..., Any],
        /,
        *,
        out_shardings: Any = ...,
        donate_argnums: Sequence[int] = ...,
        static_argnums: Sequence[int] = ...,
    ) -> Jitted: ...


class _DevicePut(Protocol):
    def __call__(self, x: Any, device: Any = ..., /, *, may_alias: bool = ...) -> Any: ...


class _Flatten(Protocol):
    def __call__(self, tree: Any, *, is_leaf: IsLeaf | None = ...) -> tuple[list[Any], TreeDef]: ...


class _FlattenWithPath(Protocol):
    def __call__(
        self, tree: Any, *, is_leaf: Callable[..., bool] | None = ..., is_leaf_takes_path: bool = ...
    ) -> tuple[list[tuple[Keys, Any]], TreeDef]: ...


class _Structure(Protocol):
    def __call__(self, tree: Any, *, is_leaf: IsLeaf | None = ...) -> TreeDef: ...


class _LocalDevices(Protocol):
    def __call__(self, *, backend: str | None = ...) -> list[Device]: ...


class _MakeMesh(Protocol):
    def __call__(self, sizes: Shape, names: Sequence[str], /, *, axis_types: tuple[AxisType, ...], devices: Sequence[Device]) -> Mesh: ...


class _WrapKeyData(Protocol):
    def __call__(self, bits: jax.Array, /, *, impl: Any) -> jax.Array: ...


class _PsumScatter(Protocol):
    def __call__(self, x: jax.Array, axis_name: Any, /, *, scatter_dimension: int, tiled: bool) -> jax.Array: ...


class _FloatInfo(Protocol):
    @property
    def bits(self) -> int: ...


_jax = cast("Any", jax)
_jnp = cast("Any", jnp)

config = cast("_Config", jax.config)

device_set: Callable[[Sharding], set[Device]] = operator.attrgetter("device_set")

devices: Callable[[], list[Device]] = _jax.devices
local_devices: _LocalDevices = _jax.local_devices
device_count: Callable[[], int] = _jax.device_count
process_index: Callable[[], int] = _jax.process_index
make_mesh: _MakeMesh = _jax.make_mesh

tree_flatten: _Flatten = _jax.tree_util.tree_flatten
tree_flatten_with_path: _FlattenWithPath = _jax.tree_util.tree_flatten_with_path
tree_structure: _Structure = _jax.tree_util.tree_structure

jit: _Jit = _jax.jit
device_put: _DevicePut = _jax.device_put
block_until_ready: Callable[[Any], Any] = _jax.block_until_ready
make_array_from_callback: Callable[[Shape, Sharding, Callable[[Index], Any]], jax.Array] = _jax.make_array_from_callback
wrap_key_data: _WrapKeyData = _jax.random.wrap_key_data
is_subdtype: Callable[[Any, Any], bool] = _jax.dtypes.issubdtype
finfo: Callable[[Any], _FloatInfo] = _jnp.finfo

with_sharding_constraint: Callable[[jax.Array, Sharding], jax.Array] = _jax.lax.with_sharding_constraint
psum: Callable[[jax.Array, Any], jax.Array] = _jax.lax.psum
psum_scatter: _PsumScatter = _jax.lax.psum_scatter
as_jax_array: Callable[[Any], jax.Array] = _jnp.asarray
reshape: Callable[[jax.Array, Shape], jax.Array] = _jnp.reshape
zeros: Callable[[Shape, Any], jax.Array] = _jnp.zeros
zeros_like: Callable[[jax.Array], jax.Array] = _jnp.zeros_like
