"""Stacks values that stay on the host into the arrays of a batch."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from prefetchshard.base.cycles import root_only
from prefetchshard.base.errors import BatchError
from prefetchshard.base.jax_types import tree_structure
from prefetchshard.base.memory import AnyArray
from prefetchshard.leaves.converting import is_a
from prefetchshard.leaves.copying import children_of


def stack_on_host(values: list[Any], path: str, rows: int | None = None) -> Any:
    """Stack values that stay on the host into NumPy arrays `(rows, ...)`.

    A container keeps its structure, with an array for each leaf. A list counts as a value. Lists, text and other objects go into an
    array of dtype object, so that no text is cut to a common width.

    Args:
        values: one for each example.
        path: path of the leaf, for error messages.
        rows: pad to this many rows, see `pad_on_host`; None: no padding.

    Raises:
        BatchError: the values are containers of different structure.
    """
    first = values[0]
    if first is not None and type(first) is not list and (type(first) is dict or children_of(first) is not None):
        stacked = _stack_containers(values, path)
    else:
        stacked = _stack_values(values)
    return stacked if rows is None or rows == len(values) else pad_on_host(stacked, rows)


def pad_on_host(stacked: Any, rows: int) -> Any:
    """Pad what `stack_on_host` returned to `rows` rows.

    The padding is 0 for numbers, empty text of the first value's type for text, None for other objects, and masked values for masked
    arrays.
    """
    kind = cast("Any", type(stacked))
    if kind is dict:
        return {key: pad_on_host(part, rows) for key, part in stacked.items()}
    if not is_a(stacked, np.ndarray):
        parts, rebuild = cast("Any", children_of(stacked))
        return rebuild([pad_on_host(part, rows) for part in parts])
    if len(stacked) == rows:
        return stacked
    whole = blank(stacked, (rows, *stacked.shape[1:]))
    if stacked.dtype == object and stacked.ndim == 1 and len(stacked) and isinstance(stacked[0], (str, bytes)):
        whole[:] = type(stacked[0])()
    whole[: len(stacked)] = stacked
    return whole


def blank(like: AnyArray, shape: tuple[int, ...]) -> AnyArray:
    """An array of this shape, with the type and dtype of `like`, filled with padding: 0, empty text, None, or masked values."""
    if like.dtype == object:
        return np.empty(shape, object)
    if isinstance(like, np.ma.MaskedArray):
        masked = np.ma.array(np.zeros(shape, like.dtype), mask=True)
        masked.fill_value = like.fill_value
        return masked
    return np.zeros(shape, like.dtype).view(type(like))


def _stack_containers(values: list[Any], path: str) -> Any:
    first: Any = values[0]
    kind = cast("Any", type(first))
    if kind is dict:
        if any(type(v) is not dict or v.keys() != first.keys() for v in values):
            raise _other_form(path)
        return {k: stack_on_host([v[k] for v in values], f"{path}.{k}") for k in first}
    forms = [tree_structure(v, is_leaf=root_only()) for v in values]
    if any(form != forms[0] for form in forms):
        raise _other_form(path)
    parts = zip(*(forms[0].flatten_up_to(v) for v in values), strict=True)
    return forms[0].unflatten([stack_on_host(list(part), f"{path}[{i}]") for i, part in enumerate(parts)])


def _other_form(path: str) -> BatchError:
    return BatchError(
        f"leaf {path or '(the example itself)'}: the containers that stay on the host differ in form among the examples of a batch; give them "
        f"the same keys, or put each in a list ([value]), which is kept as it is"
    )


def _stack_values(values: list[Any]) -> AnyArray:
    first = values[0]
    if all(type(v) is type(first) for v in values):
        if is_a(first, np.ndarray) and all(v.shape == first.shape and v.dtype == first.dtype for v in values):
            return np.ma.stack(values) if is_a(first, np.ma.MaskedArray) else np.stack(values)
        if is_a(first, np.generic) and not is_a(first, (np.str_, np.bytes_)) and all(v.dtype == first.dtype for v in values):
            return np.array(values)
        if isinstance(first, (bool, float, complex)) or (isinstance(first, int) and all(-(2**63) <= v < 2**63 for v in values)):
            return np.array(values)
    objects = np.empty(len(values), object)
    for i, value in enumerate(values):  # `objects[:] = values` would unpack nested sequences
        objects[i] = value
    return objects
