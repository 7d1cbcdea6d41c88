"""The mesh of a `with mesh:` block, which JAX had before `jax.set_mesh` and still has.

JAX has no public name for it that does not warn, so this reads and writes what `Mesh.__enter__` and `Mesh.__exit__` do. Where a version
of JAX has these no more, there is no such mesh.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Generator
from typing import Any

from jax.sharding import Mesh


def _find(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None


_resources = _find("jax._src.mesh", "thread_resources")  # of each thread
_nothing = _find("jax._src.mesh", "EMPTY_ENV")
_in_jit_key = _find("jax._src.config", "mesh_context_manager")
_is_known = None not in (_resources, _nothing, _in_jit_key)


def older_mesh() -> Mesh | None:
    """The mesh of the innermost `with mesh:` block of this thread, if it is in one."""
    if not _is_known:
        return None
    mesh: Mesh = _resources.env.physical_mesh
    return None if mesh.empty else mesh


@contextlib.contextmanager
def under_older_mesh(mesh: Mesh | None) -> Generator[None]:
    """As `with mesh:` in this thread, without JAX's warning that there is a newer way; None: as in no such block."""
    if not _is_known or mesh == older_mesh():
        yield
        return
    _enter(_nothing if mesh is None else _nothing.with_mesh(mesh))
    try:
        yield
    finally:
        _resources.stack.pop()
        _tell_jit()


def _enter(env: Any) -> None:
    _resources.stack.append(env)
    _tell_jit()


def _tell_jit() -> None:
    _resources.env = _resources.stack[-1]
    meshes = [env.physical_mesh for env in _resources.stack]
    _in_jit_key.set_local(tuple([mesh for mesh in meshes if not mesh.empty]))
