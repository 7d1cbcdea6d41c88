"""What JAX keeps for each thread: read in the caller's thread, put in force in every thread of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax.sharding import Mesh

_MANAGERS: dict[str, Callable[[Any], AbstractContextManager[Any]]] = {
    "jax_enable_x64": jax.enable_x64,
    "jax_default_device": jax.default_device,
    "jax_default_matmul_precision": jax.default_matmul_precision,
    "jax_numpy_dtype_promotion": jax.numpy_dtype_promotion,
    "jax_numpy_rank_promotion": jax.numpy_rank_promotion,
    "jax_default_prng_impl": jax.default_prng_impl,
    "jax_threefry_partitionable": jax.threefry_partitionable,
    "jax_debug_nans": jax.debug_nans,
    "jax_debug_infs": jax.debug_infs,
    "jax_log_compiles": jax.log_compiles,
    "jax_transfer_guard_host_to_device": jax.transfer_guard_host_to_device,
    "jax_transfer_guard_device_to_device": jax.transfer_guard_device_to_device,
    "jax_transfer_guard_device_to_host": jax.transfer_guard_device_to_host,
}


def _value(name: str) -> Any:
    return getattr(jax.config, name, None)


def x64_enabled() -> bool:
    """Whether 64-bit types are in force in this thread."""
    return bool(_value("jax_enable_x64"))


def mesh_in_force() -> Mesh | None:
    """The mesh of `jax.set_mesh` in this thread, if there is one."""
    mesh = jax.sharding.get_mesh()
    return None if mesh.empty else mesh


class JaxContext:
    """The thread-local settings of JAX as they were where this was made."""

    def __init__(self) -> None:
        self._values = {name: _value(name) for name in _MANAGERS}
        self.mesh = mesh_in_force()

    @property
    def x64(self) -> bool:
        return bool(self._values["jax_enable_x64"])

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        """Put them in force in this thread; what is as it should be already is left alone."""
        with contextlib.ExitStack() as stack:
            for name, value in self._values.items():
                if _value(name) != value:
                    stack.enter_context(_MANAGERS[name](value))
            if self.mesh is not None:
                stack.enter_context(jax.set_mesh(self.mesh))
            yield
