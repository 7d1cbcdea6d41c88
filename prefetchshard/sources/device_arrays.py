"""Arrays that stay on the devices: the public wrapper `OnDevice`, and its source."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from prefetchshard.base.cycles import cycle_in
from prefetchshard.base.errors import ConfigError
from prefetchshard.base.jax_types import is_subdtype, tree_flatten_with_path
from prefetchshard.base.memory import AnyArray
from prefetchshard.leaves.converting import as_array, is_numeric, is_torch
from prefetchshard.leaves.on_devices import is_traced
from prefetchshard.sharding.batch_tree import path_text
from prefetchshard.sources.arrays import Arrays, find_arrays, name_of_type

MOST_ROWS = 2**31 - 1
"""The devices index rows with 32-bit numbers."""


class OnDevice:
    """Arrays that fit into the memory of the devices, as a source: `ps.Loader(ps.OnDevice({"x": x, "y": y}), batch_size=...)`.

    They are put on the devices once, when the first run of the loader begins. From then on the host sends only the row numbers of each
    step, and the devices gather the rows. Order, values, remainder, mask, positions and states are the same as for arrays in host
    memory. The loader keeps the arrays between its runs; they are freed when the loader is garbage-collected.

    Args:
        arrays: a NumPy array or a jax.Array, or a mapping, tuple or registered container of them, with a common leading size. A
            jax.Array that already has the right sharding is used without a copy; do not donate or delete it while the loader lives.
        sharding: the sharding of the arrays. None: replicated over the devices of the loader's batches. Else a `PartitionSpec` (with
            the mesh of the loader's sharding), a `NamedSharding` of that mesh, or a pytree prefix of these, in which None means
            replicated too. If it splits rows, each
            device holds only its part, and every step moves rows between devices; the thread that takes the batch then dispatches
            the gather.

    Raises:
        ConfigError: the arrays differ in leading size, or no device can hold one of them.

    Example:
        arrays = ps.OnDevice({"x": np.zeros((64, 3), np.float32)})
        for batch in ps.Loader(arrays, P("data"), batch_size=16, shuffle=True):
            assert batch["x"].shape == (16, 3)
    """

    def __init__(self, arrays: Any, sharding: Any = None) -> None:
        self.source = DeviceArrays(arrays, sharding)

    def __repr__(self) -> str:
        return f"OnDevice({self.source.length} rows)"


class DeviceArrays(Arrays):
    """The source behind `OnDevice`.

    Attributes:
        given: the user's arrays. `leaves` has arrays of the same shapes and dtypes, without memory of their own for a jax.Array.
        sharding: the user's sharding of the arrays.
    """

    kind = "device arrays"
    stays_on_devices: bool = True

    def __init__(self, tree: Any, sharding: Any) -> None:
        cycle = cycle_in(tree)
        if cycle is not None:
            raise ConfigError(f"ps.OnDevice: the arrays cannot be taken apart: {cycle}")
        found = None if hasattr(tree, "__next__") else find_arrays(jax.tree.map(_as_numpy, tree))
        if found is None:
            raise ConfigError(
                f"ps.OnDevice takes a NumPy array or a jax.Array, or a mapping, tuple or registered container of them, not a {name_of_type(tree)}"
            )
        paths = [path_text(keys) for keys, _ in tree_flatten_with_path(tree)[0]]
        self.given: list[Any] = [as_array(leaf) if is_torch(leaf) else leaf for leaf in jax.tree.leaves(tree)]
        self._paths = paths
        self.check_alive()
        for path, leaf in zip(paths, found.leaves, strict=True):
            if isinstance(leaf, np.ma.MaskedArray) or not is_numeric(leaf.dtype):
                raise ConfigError(
                    f"ps.OnDevice: array {path or '(the source itself)'} ({type(leaf).__name__} of dtype {leaf.dtype}) cannot be held by a "
                    f"device: leave it out or encode it, or pass the arrays themselves, which are read from host memory (ps.HOST keeps such "
                    f"a leaf there)"
                )
        if found.length > MOST_ROWS:
            raise ConfigError(f"ps.OnDevice: {found.length} rows, and at most {MOST_ROWS} can be told by a 32-bit number")
        super().__init__(found.tree, found.leaves, found.length)
        self.sharding = sharding

    def check_alive(self) -> None:
        """Check that no array was deleted since.

        Raises:
            ConfigError: one was.
        """
        for path, leaf in zip(self._paths, self.given, strict=True):
            if isinstance(leaf, jax.Array) and leaf.is_deleted():
                raise ConfigError(
                    f"ps.OnDevice: array {path or '(the source itself)'} was deleted, most likely donated to a jitted function: pass another one"
                )


def _as_numpy(leaf: Any) -> AnyArray:
    """A NumPy array of this shape and dtype: for a jax.Array a broadcast zero, which takes no memory."""
    if not isinstance(leaf, jax.Array):
        return leaf
    if is_traced(leaf):
        raise ConfigError("ps.OnDevice: a traced array has no values yet: make the loader outside jit and the like")
    dtype: Any = leaf.dtype
    if is_subdtype(dtype, jax.dtypes.prng_key):
        raise ConfigError(f"ps.OnDevice: an array of {dtype} has no rows that can be gathered bit by bit; pass `jax.random.key_data(keys)`")
    zero: AnyArray = np.zeros((), dtype)
    return np.broadcast_to(zero, leaf.shape)
