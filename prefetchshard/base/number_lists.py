"""Lists of plain numbers, such as token ids: each counts as one array, not as a container of numbers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import numpy as np

NUMPY_SCALARS: frozenset[type] = frozenset(cast("Any", kind) for kind in np.sctypeDict.values() if issubclass(kind, (np.bool_, np.number)))
"""The types of NumPy's scalars, which have a dtype and a shape like arrays."""

NUMBERS: frozenset[type] = frozenset({bool, int, float, complex})
_MOST_AXES = 64
"""Of a NumPy array."""


def is_number_list(node: Any) -> bool:
    """Whether `node` is a list of numbers, or of lists of numbers and so on, ragged or not, with a number in it.

    A tuple is no such list: JAX and the loaders of other libraries use tuples for parts that belong together. Nor is a list of NumPy's
    scalars, each of which has a dtype and a shape as an array has.
    """
    return type(node) is list and _has_numbers(cast("list[Any]", node), 1) is True


def _has_numbers(values: list[Any], axes: int) -> bool | None:
    """Whether there is a number in it; None where there is something else, or it is nested too deep for an array."""
    kinds = set(map(type, values))
    if kinds <= NUMBERS:
        return bool(values)
    others = kinds - NUMBERS
    if axes > _MOST_AXES or not all(kind is list or _is_number(kind) for kind in others):
        return None
    found = len(kinds) > 1 or list not in kinds
    if list in kinds:
        for value in values:
            if type(value) is list:
                below = _has_numbers(cast("list[Any]", value), axes + 1)
                if below is None:
                    return None
                found = found or below
    return found


def _is_number(kind: type) -> bool:
    """Whether a type is a kind of Python's numbers, such as an enum; some of NumPy's scalars are, too."""
    return issubclass(kind, (int, float, complex)) and not issubclass(kind, np.generic)


def ragged_at(values: list[Any]) -> str:
    """Where a list of numbers is ragged, in words: the first two parts of one list that differ in shape."""
    shapes = [_shape(value) for value in values]
    for i, shape in enumerate(shapes):
        if shape != shapes[0]:
            return f"[0] has shape {shapes[0]}, [{i}] has shape {shape}"
    return next((f"in [{i}], {ragged_at(value)}" for i, value in enumerate(values) if _is_ragged(value)), "its parts differ in shape")


def _is_ragged(value: Any) -> bool:
    if type(value) is not list:
        return False
    values = cast("list[Any]", value)
    return len(set(map(_shape, values))) > 1 or any(map(_is_ragged, values))


def _shape(value: Any) -> tuple[int, ...]:
    """Of a list, by the first part of each of its lists."""
    sizes: list[int] = []
    while type(value) is list:
        values = cast("list[Any]", value)
        sizes.append(len(values))
        value = values[0] if values else None
    return tuple(sizes)


def numbers_in(values: Iterable[Any]) -> Iterable[Any]:
    """All numbers of a nested list."""
    for value in values:
        if type(value) is list:
            yield from numbers_in(cast("list[Any]", value))
        else:
            yield value
