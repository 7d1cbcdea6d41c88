"""Arrays in host memory or in memory-mapped files; rows are gathered straight into the staging slot."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, cast

import jax
import numpy as np

from prefetchshard.base.config import Narrow
from prefetchshard.base.cycles import cycle_in
from prefetchshard.base.errors import ConfigError
from prefetchshard.base.jax_types import tree_flatten_with_path, tree_structure
from prefetchshard.base.memory import AnyArray
from prefetchshard.leaves.converting import as_array, is_torch
from prefetchshard.leaves.copying import private_copy
from prefetchshard.leaves.narrowing import store
from prefetchshard.sharding.batch_tree import path_text
from prefetchshard.sources.tables import is_column
from prefetchshard.streaming.copies import Copies

Rows = slice | AnyArray


class Arrays:
    """A tree of arrays with a common leading size.

    Attributes:
        is_numbered: rows are read by number.
        is_memory: rows lie in arrays and are copied straight into batches.
        stays_on_devices: the arrays are on the devices.
        shares_items: the source never overwrites an item that it returned. False: items may be in a buffer that it reuses.
        one_shot: it can be read only once.
        length: number of rows.
        leaves: the arrays, in the order of the tree's leaves.
    """

    kind = "arrays"
    is_numbered: Literal[True] = True
    one_shot: Literal[False] = False
    is_memory: Literal[True] = True
    stays_on_devices: bool = False
    shares_items: Literal[False] = False

    def __init__(self, tree: Any, leaves: list[AnyArray], length: int) -> None:
        self.tree = tree
        self.leaves = leaves
        self.length = length
        self._treedef = tree_structure(tree)

    def unflatten(self, leaves: list[Any]) -> Any:
        """A tree of the source's structure with new leaves."""
        return self._treedef.unflatten(leaves)

    def read(self, row: int) -> Any:
        """A copy of one example, so that a transform that changes it in place does not change the source."""
        return self.unflatten([private_copy(leaf[row]) for leaf in self.leaves])

    def gathered(self, rows: Rows) -> Any:
        """The rows as a new batch."""
        return self.unflatten(
            [private_copy(leaf[rows]) if isinstance(rows, slice) or leaf.dtype.hasobject else leaf[rows] for leaf in self.leaves]
        )


def gather(source: AnyArray, rows: Rows, view: AnyArray, *, path: str, policy: Narrow, first_row: int, copies: Copies) -> None:
    """Copy rows of `source` `(length, *example)` into `view` `(rows, *example)`, in one pass where no value changes its dtype."""
    if isinstance(rows, slice) or source.dtype != view.dtype:
        store(view, source[rows], path=path, policy=policy, row=first_row, copies=copies)
    else:
        copies.take(view, source, rows)


def find_arrays(source: Any) -> Arrays | None:
    """The source as `Arrays`; None if it is another kind. Tensors of torch are arrays, read from their own memory.

    Raises:
        ConfigError: it looks like arrays, but cannot be used as such; the message says what to change.
        LeafTypeError: a torch tensor that is no plain array.
    """
    if isinstance(source, jax.Array):
        raise ConfigError(
            "the source is a jax.Array: its rows would come back to the host to be sent again; pass np.asarray(source), "
            "or a list of batches if each item is one"
        )
    if isinstance(source, np.ndarray):
        return _checked(source, [source], [""])
    if is_torch(source):
        array = as_array(source)
        return _checked(array, [array], [""])
    if isinstance(source, list) or not _is_container(source):
        return None
    cycle = cycle_in(source)
    if cycle is not None:
        raise ConfigError(f"the source cannot be taken apart: {cycle}")
    try:
        paths_and_leaves, treedef = tree_flatten_with_path(source, is_leaf=partial(_is_list_below, source))
    except ValueError as error:
        raise ConfigError(f"JAX cannot take the source apart: {error} Give each mapping in it keys of one type") from error
    paths = [path_text(path) for path, _ in paths_and_leaves]
    leaves = [leaf for _, leaf in paths_and_leaves]
    if any(map(is_torch, leaves)):
        leaves = [as_array(leaf, path) if is_torch(leaf) else leaf for path, leaf in zip(paths, leaves, strict=True)]
        source = treedef.unflatten(leaves)
    if leaves and all(isinstance(leaf, np.ndarray) for leaf in leaves):
        return _checked(source, leaves, paths)
    if isinstance(source, Mapping) or any(isinstance(leaf, (np.ndarray, jax.Array)) or is_column(leaf) for leaf in leaves):
        _refuse(source, paths, leaves)
    return None


def _is_list_below(source: Any, node: Any) -> bool:
    return node is not source and isinstance(node, list)


def _is_container(source: Any) -> bool:
    """Whether it is a tuple, a container known to JAX, or any mapping: for one unknown to JAX, `_refuse` names its type."""
    if isinstance(source, (Mapping, tuple)):
        return True
    return not hasattr(source, "__next__") and not jax.tree_util.all_leaves([source]) and source is not None


def name_of_type(value: object) -> str:
    return type(value).__qualname__


def _refuse(source: Any, paths: list[str], leaves: list[Any]) -> None:
    what_it_is = name_of_type(source)
    odd = next(((p, leaf) for p, leaf in zip(paths, leaves, strict=True) if not isinstance(leaf, np.ndarray)), None)
    if isinstance(source, Mapping) and (odd is None or not paths or odd[1] is source):
        raise ConfigError(
            f"the source is a mapping of type {what_it_is} without arrays that JAX can see; "
            f"pass dict(source), with NumPy arrays of one leading size as its values (`np.asarray` makes one)"
        )
    assert odd is not None
    path, leaf = odd
    kind = cast("Any", type(leaf))
    what = "a list" if kind is list else f"a {kind.__module__}.{kind.__qualname__}"
    raise ConfigError(
        f"the source is a {what_it_is} whose entry {path!r} is {what}, not a NumPy array: make every entry an array of "
        f"one leading size (`np.asarray` makes one, in memory), or pass a list of examples, or a list of batches without batch_size"
    )


def _checked(tree: Any, leaves: list[AnyArray], paths: list[str]) -> Arrays:
    arrays: list[AnyArray] = []
    for path, leaf in zip(paths, leaves, strict=True):
        if leaf.ndim == 0:
            raise ConfigError(f"array {path or '(the source)'} has no axis of rows: its shape is ()")
        arrays.append(leaf if isinstance(leaf, (np.ma.MaskedArray, np.recarray)) else leaf.view(np.ndarray))
    lengths = {path or "(the source)": leaf.shape[0] for path, leaf in zip(paths, arrays, strict=True)}
    if len(set(lengths.values())) != 1:
        raise ConfigError(
            f"the arrays differ in their leading size: {lengths}; all must have one row an example "
            f"(a tuple or mapping is read as columns; pass a list for separate items)"
        )
    return Arrays(tree, arrays, arrays[0].shape[0])
