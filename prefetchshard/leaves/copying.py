"""Copies the values that a source or a user's function returned, and detects when no copy is needed."""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable
from typing import Any, cast

import jax
import numpy as np

from prefetchshard.base.cycles import cycle_in, root_only
from prefetchshard.base.errors import BatchError, SourceError
from prefetchshard.base.jax_types import tree_flatten, tree_structure
from prefetchshard.base.memory import AnyArray
from prefetchshard.leaves.converting import NUMPY_SCALARS, is_a
from prefetchshard.leaves.on_devices import is_jax_array, may_change, private_array

_LEAF = tree_structure(0)
SMALL_BYTES = 1 << 16
"""Copying so much takes a few microseconds: less than waking the thread that would read it."""
_PART_BYTES = 64
"""What a value or a container counts for, beside its contents: so a look at one that holds itself ends too."""
_ATOMS = NUMPY_SCALARS | {str, bytes, bool, int, float, complex, type(None)}
_IMMUTABLE = (str, bytes, bool, int, float, complex, type(None), np.generic, jax.Array)


def private_copy(value: Any, *, deep: bool = False, jax_arrays: bool = True) -> Any:
    """A copy of the value that shares no array, tensor, list or dict with it.

    Args:
        value: anything.
        deep: copy other objects too, with `copy.deepcopy`.
        jax_arrays: copy jax.Arrays that may share memory with a NumPy array. False: nobody writes that memory.

    Raises:
        SourceError: `deep` is set and an object cannot be copied.
    """
    kind: Any = type(value)  # pyright: ignore[reportUnknownVariableType]
    if kind is dict:  # fast path: most examples are dicts, and this spares a call for each number and array
        copies: dict[Any, Any] = {}
        for key, part in value.items():
            of: Any = type(part)  # pyright: ignore[reportUnknownVariableType]
            if of is np.ndarray and not part.dtype.hasobject:
                copies[key] = part.copy()
            else:
                copies[key] = part if of in _ATOMS else private_copy(part, deep=deep, jax_arrays=jax_arrays)
        return copies
    if kind in _ATOMS:
        return value
    if _is_immutable(value):
        return private_array(value) if jax_arrays and is_jax_array(value) else value
    if is_a(value, np.ndarray):
        return _own_array(value, deep, jax_arrays)
    if kind is list or kind is tuple:
        parts: list[Any] = [private_copy(v, deep=deep, jax_arrays=jax_arrays) for v in value]
        return parts if kind is list else tuple(parts)
    if kind is memoryview:
        copied: Any = np.array(value)
        return memoryview(copied)
    children = children_of(value)
    if children is not None:
        parts, rebuild = children
        return rebuild([private_copy(part, deep=deep, jax_arrays=jax_arrays) for part in parts])
    return _own_object(value, deep)


def is_small(value: Any) -> bool:
    """Whether it is made of plain values, NumPy arrays, and Python's own containers, of at most `SMALL_BYTES` together.

    Then `private_copy` copies it fast, and without the help of other libraries.
    """
    left = SMALL_BYTES
    parts = [value]
    while parts:
        part = parts.pop()
        kind = cast("Any", type(part))
        left -= _PART_BYTES
        if kind is np.ndarray and not part.dtype.hasobject:
            left -= part.nbytes
        elif kind is str or kind is bytes:
            left -= len(part)
        elif kind is dict:
            parts.extend(part.values())
        elif kind is list or kind is tuple or (is_a(part, tuple) and hasattr(kind, "_fields")):
            parts.extend(part)
        elif kind not in _ATOMS:
            return False
        if left < 0:
            return False
    return True


def not_copied(item: Any, error: RecursionError) -> Exception:
    """What to raise where copying an item led to this error: one that says where the item holds itself, if it does."""
    cycle = cycle_in(item)
    return error if cycle is None else BatchError(f"an item of the source cannot be copied: {cycle}")


def _base_references(array: AnyArray) -> int:
    return sys.getrefcount(array.base)


_counts_references = sys.implementation.name == "cpython" and getattr(sys, "_is_gil_enabled", lambda: True)()
_ALONE = next(map(sys.getrefcount, [np.empty(1)]))  # of an array that only one list refers to
_BASE_ALONE = _base_references(np.empty(1)[:])  # of a base that only one view refers to


def are_unshared(leaves: list[Any]) -> bool:
    """Whether only this list refers to the memory of these leaves, so that nobody else can overwrite it.

    Uses CPython's reference counts; False on interpreters where these are not exact.
    """
    if not _counts_references:
        return False
    counts = list(map(sys.getrefcount, leaves))  # first: any local variable for a leaf would add a reference
    return all(_is_unshared(leaf, count) for leaf, count in zip(leaves, counts, strict=True))


def _is_unshared(leaf: Any, references: int) -> bool:
    if type(leaf) is not np.ndarray:
        return _is_immutable(leaf) and not (is_jax_array(leaf) and may_change(leaf))
    if references != _ALONE or leaf.dtype.hasobject or weakref.getweakrefcount(leaf):
        return False
    if leaf.flags.owndata:
        return True
    is_alone = _base_references(leaf) == _BASE_ALONE
    base = leaf.base
    return is_alone and type(base) is np.ndarray and base.flags.owndata and not weakref.getweakrefcount(base)


def _is_immutable(value: Any) -> bool:
    return is_a(value, _IMMUTABLE) and not is_a(value, np.void)  # np.void is a view of memory


def _own_array(array: AnyArray, deep: bool, jax_arrays: bool) -> AnyArray:
    copied = array.copy()
    if array.dtype == object:
        for index, value in np.ndenumerate(array):
            copied[index] = private_copy(value, deep=deep, jax_arrays=jax_arrays)
    return copied


def _own_object(value: Any, deep: bool) -> Any:
    for way in ("clone", "copy"):  # methods of tensors; deepcopy raises on tensors with a gradient
        if callable(getattr(value, way, None)) and (isinstance(value, np.void) or hasattr(value, "__array__")):
            return getattr(value, way)()
    if not deep:
        return value
    try:
        return copy.deepcopy(value)
    except Exception as error:
        raise SourceError(
            f"an item of type {type(value).__qualname__} cannot be copied, so it cannot be kept while the source goes on; "
            f"if the source makes a new object for each item, say so: reuses_buffers=False"
        ) from error


def children_of(value: Any) -> tuple[list[Any], Callable[[list[Any]], Any]] | None:
    """The children of a container and a function that rebuilds it from new ones; None if JAX does not see a container."""
    parts, tree = tree_flatten(value, is_leaf=root_only())
    return None if tree == _LEAF else (parts, tree.unflatten)
