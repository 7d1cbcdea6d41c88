"""What is done with a batch on the devices after its transfer: `device_transform`, dispatched and handed on unfinished."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np

from prefetchshard.base.errors import LeafTypeError, SourceError
from prefetchshard.base.jax_context import JaxContext
from prefetchshard.base.jax_types import TreeDef, config, device_put, is_subdtype, jit, tree_flatten, tree_flatten_with_path
from prefetchshard.base.signatures import takes_parameter
from prefetchshard.sharding.batch_tree import path_text
from prefetchshard.sharding.leaf_sharding import replicated_like

MOST_COMPILED = 1024
"""Shapes that never come back must not pile up. Far more than the shapes of bucketed text: compiling one anew takes a tenth of a second."""


_VALUES = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)


@jax.tree_util.register_pytree_node_class
class HostStandIn:
    """Stands for a leaf that stays on the host: to a jitted function it is structure, not data.

    Containers may look at what they hold when they are made, so it has the shape and dtype of the leaf.
    """

    def __init__(self, index: int, value: Any) -> None:
        self.index = index
        for name in ("shape", "ndim", "dtype"):
            if hasattr(value, name):
                setattr(self, name, getattr(value, name))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HostStandIn) and other.index == self.index

    def __hash__(self) -> int:
        return self.index

    def tree_flatten(self) -> tuple[tuple[()], HostStandIn]:
        return (), self

    @classmethod
    def tree_unflatten(cls, itself: HostStandIn, children: tuple[()]) -> HostStandIn:
        del children
        return itself


class DeviceTransform:
    """A user's function, jitted once, that gets every batch on the devices.

    Its `key` parameter, where it has one, gets `fold_in(key(seed), step)`: the same after a resume and on any number of devices.
    Input buffers on one device are donated where an output of the same shape and dtype can take their place. Under `jax.disable_jit()`
    it is called as it is, and sees values.

    Args:
        function: `batch -> batch`, or `(batch, key=) -> batch`; leaves that stay on the host pass through it as opaque structure.
        seed: of the keys.
    """

    def __init__(self, function: Callable[..., Any], seed: int) -> None:
        self._function = function
        self._seed = seed
        self.wants_key = takes_parameter(function, "key")
        self._lock = threading.Lock()  # guards what is added to _compiled; runs of a loader share it
        self._compiled: dict[Any, Callable[..., Any]] = {}
        self._context: JaxContext | None = None

    def under(self, context: JaxContext) -> DeviceTransform:
        """The same for a run under these settings; what was compiled is shared."""
        other = copy.copy(self)
        other._context = context
        return other

    def __call__(self, batch: Any, on_host: dict[int, Any], step: Any, *, may_donate: bool) -> Any:
        """Dispatch it.

        Args:
            batch: of jax.Arrays, with `stand_in(i, leaf)` in place of leaves that stay on the host.
            on_host: those leaves.
            step: the step as a uint32 array on the devices of the batch, where a key is wanted.
            may_donate: whether the arrays are not needed again, also where Ctrl-C cuts it off.
        """
        leaves, tree = tree_flatten(batch)
        signature = (self._context, may_donate, tree, tuple((leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves))
        run = self._compiled.get(signature)
        if run is None:
            run = self._jit(tree, leaves, step, may_donate)
            with self._lock:
                self._compiled[signature] = run
                while len(self._compiled) > MOST_COMPILED:
                    del self._compiled[next(iter(self._compiled))]
        result = run(step, *leaves)
        if on_host:
            result = jax.tree.map(partial(_put_back, on_host), result, is_leaf=_is_stand_in)
        return result

    def _jit(self, tree: TreeDef, leaves: list[Any], step: Any, may_donate: bool) -> Callable[..., Any]:
        def run(step: Any, *leaves: Any) -> Any:
            batch = tree.unflatten(leaves)
            keys = {"key": jax.random.fold_in(_key(self._seed), step)} if self.wants_key else {}
            result = self._function(batch, **keys)
            _check(result)
            return result

        if config.jax_disable_jit:
            where = replicated_like(leaves[0].sharding) if leaves else None

            def run_on_values(step: Any, *leaves: Any) -> Any:
                return jax.tree.map(partial(_committed, where), run(step, *leaves))

            return run_on_values
        # Traced here, and not a second time when it is called. Its leaves alone: containers may refuse what stands in for arrays.
        outputs = [(out.shape, out.dtype) for out in jit(run).trace(step, *leaves).jaxpr.out_avals]
        donated: list[int] = []
        alone = may_donate and all(len(leaf.sharding.device_set) == 1 for leaf in leaves)
        for i, leaf in enumerate(leaves if alone else ()):
            kind = (leaf.shape, leaf.dtype)
            if kind in outputs and not is_subdtype(leaf.dtype, jax.dtypes.prng_key):
                outputs.remove(kind)
                donated.append(i + 1)
        return jit(run, donate_argnums=tuple(donated))


def _key(seed: int) -> Any:
    """The key of a seed of any size: JAX itself leaves out all but 32 bits while x64 is off."""
    key = jax.random.key(seed & 0xFFFFFFFF)
    while seed := seed >> 32:
        key = jax.random.fold_in(key, seed & 0xFFFFFFFF)
    return key


def _check(result: Any) -> None:
    """Check what the function returned.

    Raises:
        SourceError: it has no leaves.
        LeafTypeError: a leaf is no array and no number.
    """
    found = tree_flatten_with_path(result, is_leaf=_is_stand_in)[0]
    if not found:
        raise SourceError(f"device_transform returned {result!r}, without leaves; it must return the batch")
    for keys, leaf in found:
        if not isinstance(leaf, _VALUES) and not hasattr(leaf, "__jax_array__") and not _is_stand_in(leaf):
            what = f"an object of type {type(leaf).__module__}.{type(leaf).__qualname__}, which device_transform returned,"
            raise LeafTypeError(path_text(keys), what, "return arrays and numbers, and add other values in the loop")


def _committed(where: Any, value: Any) -> Any:
    """What came out of a function that was not jitted, as it would if it were."""
    return value if isinstance(value, jax.Array) and value.committed else device_put(value, where)


def _is_stand_in(part: Any) -> bool:
    return isinstance(part, HostStandIn)


def _put_back(on_host: dict[int, Any], part: Any) -> Any:
    return on_host[part.index] if isinstance(part, HostStandIn) else part


def stand_in(index: int, value: Any) -> Any:
    """What stands for a leaf that stays on the host while a batch goes through a jitted function."""
    return HostStandIn(index, value)


def step_value(step: int) -> Any:
    """A step as the scalar that goes to the devices with its batch."""
    return np.array(step % (1 << 32), np.uint32)
