"""What JAX keeps for each thread: read in the caller's thread, put in force in every thread of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any

import jax
from jax.sharding import Mesh

from prefetchshard.base.errors import ConfigError
from prefetchshard.base.older_mesh import older_mesh, under_older_mesh

_NAMES = (
    "allow_f16_reductions",
    "array_garbage_collection_guard",
    "check_tracer_leaks",
    "debug_infs",
    "debug_key_reuse",
    "debug_nans",
    "default_device",
    "default_matmul_precision",
    "default_prng_impl",
    "disable_jit",
    "enable_checks",
    "enable_custom_prng",
    "enable_x64",
    "explain_cache_misses",
    "legacy_prng_key",
    "log_compiles",
    "numpy_dtype_promotion",
    "numpy_rank_promotion",
    "remove_size_one_mesh_axis_from_type",
    "softmax_custom_jvp",
    "threefry_partitionable",
    "transfer_guard_device_to_device",
    "transfer_guard_device_to_host",
    "transfer_guard_host_to_device",
)
# Not among them: `no_tracing`, `no_execution` and `thread_guard`, which say what the caller's own thread must not do.
_MANAGERS: dict[str, Callable[[Any], AbstractContextManager[Any]]] = {
    f"jax_{name}": getattr(jax, name) for name in _NAMES if hasattr(jax, name) and hasattr(jax.config, f"jax_{name}")
}
_values_of: Callable[[Any], tuple[Any, ...]] = attrgetter(*_MANAGERS)

_OUR_OWN: dict[str, Any] = {
    "jax_check_tracer_leaks": False,
    "jax_debug_infs": False,
    "jax_debug_nans": False,
    "jax_disable_jit": False,
    "jax_numpy_dtype_promotion": "standard",
    "jax_numpy_rank_promotion": "allow",
}
"""Under which the functions run that we jit ourselves: they move data as it is, NaNs and all, to where it shall be."""


def x64_enabled() -> bool:
    """Whether 64-bit types are in force in this thread."""
    return bool(getattr(jax.config, "jax_enable_x64", False))


def mesh_in_force() -> Mesh | None:
    """The mesh of `jax.set_mesh` in this thread, else that of a `with mesh:` block, if there is one."""
    return _set_mesh() or older_mesh()


def _set_mesh() -> Mesh | None:
    try:
        mesh = jax.sharding.get_mesh()
    except ValueError as error:
        raise ConfigError(
            "a loader is made and read outside functions that JAX traces (jit, grad, scan and the like): pass its batches to them"
        ) from error
    return None if mesh.empty else mesh


class JaxContext:
    """The thread-local settings of JAX as they were where this was made.

    Attributes:
        mesh: of `jax.set_mesh`.
        sets_aside: whether some of them must not be in force for work of our own; see `set_aside`.

    Thread safety: immutable; equal where all settings are.
    """

    def __init__(self) -> None:
        self._values = _values_of(jax.config)
        self.mesh = _set_mesh()
        self._older_mesh = older_mesh()
        self.x64 = x64_enabled()
        given = dict(zip(_MANAGERS, self._values, strict=True))
        self._aside = [(_MANAGERS[name], value) for name, value in _OUR_OWN.items() if name in given and given[name] != value]
        self.sets_aside = bool(self._aside) or self.mesh is not None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, JaxContext) and self._as_tuple() == other._as_tuple()

    def __hash__(self) -> int:
        return hash(self._as_tuple())

    def _as_tuple(self) -> tuple[Any, ...]:
        return self._values, self.mesh, self._older_mesh

    def is_in_force(self) -> bool:
        """Whether this thread has these settings. Half the cost of making another one to compare with."""
        return self._values == _values_of(jax.config) and self.mesh == _set_mesh() and self._older_mesh == older_mesh()

    def set_aside(self) -> AbstractContextManager[Any]:
        """A context for jitted functions of our own: settings that the caller made for his functions, such as NaN checks, are off in it."""
        if not self.sets_aside:
            return contextlib.nullcontext()
        stack = contextlib.ExitStack()
        for manager, value in self._aside:
            stack.enter_context(manager(value))
        if self.mesh is not None:
            stack.enter_context(jax.set_mesh(None))
        return stack

    @contextlib.contextmanager
    def in_force(self) -> Generator[None]:
        """Put them in force in this thread, all of them: what is changed for the whole process later does not reach it."""
        with contextlib.ExitStack() as stack:
            for manager, value in zip(_MANAGERS.values(), self._values, strict=True):
                stack.enter_context(manager(value))
            stack.enter_context(jax.set_mesh(self.mesh))
            stack.enter_context(under_older_mesh(self._older_mesh))
            yield
