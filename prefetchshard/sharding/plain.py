"""Makes containers of a batch plain: mappings that JAX does not know become dicts, and one that holds itself is refused."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
from jax.tree_util import DictKey

from prefetchshard.base.cycles import MOST_LEVELS, in_words, root_only
from prefetchshard.base.errors import BatchError, PlacementError
from prefetchshard.base.jax_types import TreeDef, tree_flatten_with_path
from prefetchshard.base.number_lists import NUMBERS, NUMPY_SCALARS, is_number_list
from prefetchshard.sharding.batch_tree import LEAF, path_text

Keys = tuple[Any, ...]

_LEAVES = NUMBERS | NUMPY_SCALARS | {np.ndarray, str, bytes, type(None)}


def as_plain(batch: Any, stays_whole: Callable[[Keys], bool]) -> Any:
    """The batch with a dict in place of each mapping whose type is not registered with JAX; the batch itself where there is none.

    Args:
        batch: any value.
        stays_whole: whether what lies at these keys is kept as it is, whatever it holds.

    Raises:
        BatchError: a container holds itself; names its path.
        PlacementError: JAX cannot take a container apart.
    """
    return _plain(batch, stays_whole, (), ())


def _plain(node: Any, stays_whole: Callable[[Keys], bool], keys: Keys, above: tuple[Any, ...]) -> Any:
    if type(node) in _LEAVES or stays_whole(keys) or is_number_list(node):
        return node
    _refuse_cycle(node, keys, above)
    children, tree = _one_level(node, keys)
    if tree == LEAF and not isinstance(node, Mapping):
        return node
    above = (*above, cast("Any", node))
    if tree == LEAF:
        mapping: Any = node  # pyright: ignore[reportUnknownVariableType]
        return {key: _plain(mapping[key], stays_whole, (*keys, DictKey(key)), above) for key in mapping}
    parts = [part for _, part in children]
    plain = [_plain(part, stays_whole, (*keys, *key), above) for key, part in children]
    return cast("Any", node) if all(map(operator.is_, parts, plain)) else tree.unflatten(plain)


def _one_level(node: Any, keys: Keys) -> tuple[list[tuple[Keys, Any]], TreeDef]:
    """What a container holds; a leaf holds itself."""
    try:
        return tree_flatten_with_path(node, is_leaf=root_only())
    except (ValueError, TypeError) as error:
        where = f" at {path_text(keys)!r}" if keys else ""
        raise PlacementError(f"JAX cannot take the batch apart{where}: {_unsortable(node) or error}") from error


def _unsortable(node: Any) -> str | None:
    """An error text for a dict whose keys cannot be sorted."""
    if not isinstance(node, dict):
        return None
    names = list(cast("dict[Any, Any]", node))
    try:
        sorted(names)
    except TypeError:
        return f"a dict has the keys {names}, and JAX sorts keys: make them of one type, or keep the dict on the host (ps.HOST)"
    return None


def _refuse_cycle(node: Any, keys: Keys, above: tuple[Any, ...]) -> None:
    if len(above) >= MOST_LEVELS:
        raise BatchError(f"the batch cannot be taken apart: its containers are nested more than {MOST_LEVELS} levels deep")
    if any(node is one for one in above):
        raise BatchError(f"the batch cannot be taken apart: {in_words(node, path_text(keys))}; leave it out")
