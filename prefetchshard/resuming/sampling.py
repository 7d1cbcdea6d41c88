"""A hash over a few bytes of a few items, to detect whether a source that is read again is still the same."""

from __future__ import annotations

import contextlib
from typing import Any, cast

import jax
import numpy as np

from prefetchshard.base.cycles import cycle_in
from prefetchshard.base.memory import AnyArray
from prefetchshard.leaves.copying import SMALL_BYTES

SAMPLED_ITEMS = 8
"""About the number of items hashed per batch, fewer than twice as many; hashing one costs microseconds."""
SAMPLED_BYTES = 512
"""The number of bytes hashed per item, over all its leaves: enough to cover nearly every row of a batch."""
_LEAVES = 8
"""The number of leaves of an item whose bytes are hashed."""
_OBJECTS = 4
_PLAIN = (str, bytes, int, float, bool)


def is_sampled(row: int, size: int) -> bool:
    """Whether to hash the item at this row of a batch of `size`: rows spread over the batch, including the last one."""
    return row == size - 1 or (row + 1) % max(1, size // SAMPLED_ITEMS) == 0


def add_item(digest: Any, item: Any) -> None:
    """Add the shapes of an item's leaves, and bytes spread over them."""
    try:
        # What holds itself is refused when the batch is taken apart
        leaves: list[Any] = [] if cycle_in(item) else jax.tree_util.tree_leaves(item)
    except (ValueError, TypeError):  # a dict whose keys have no order
        leaves = [item]
    digest.update(repr([getattr(leaf, "shape", None) for leaf in leaves]).encode())
    leaves = leaves[:: -(-len(leaves) // _LEAVES) or 1]
    for leaf in leaves:
        if isinstance(leaf, np.ndarray):
            _add_array(digest, cast("AnyArray", leaf), SAMPLED_BYTES // len(leaves))
        elif isinstance(leaf, np.generic):
            digest.update(leaf.tobytes())
        elif type(leaf) in _PLAIN:
            _add_objects(digest, [leaf])
        elif not isinstance(leaf, jax.Array) and hasattr(leaf, "__array__"):  # no transfer back from a device
            with contextlib.suppress(Exception):  # another library's type may raise; the loader reports that when it reads the item
                _add_array(digest, np.asarray(leaf), SAMPLED_BYTES // len(leaves))


def _add_array(digest: Any, array: AnyArray, budget: int) -> None:
    if array.dtype.hasobject:
        _add_objects(digest, array.reshape(-1)[:: max(1, array.size // _OBJECTS)].tolist())
    elif type(array) is np.ndarray and (array.flags.c_contiguous or array.nbytes <= SMALL_BYTES):
        # However a small one lies: that may be a copy here, and not where the source is read again
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        # An odd stride, so that it does not hit only the lowest byte of each number
        digest.update(flat[:: (flat.size // budget) | 1].tobytes())
    else:  # not contiguous, or a subclass: take some numbers, without copying all of them
        array = np.asarray(array)
        digest.update(array.flat[:: max(1, array.nbytes // budget)].tobytes())


def _add_objects(digest: Any, values: list[Any]) -> None:
    some = [value[:64] if isinstance(value, (str, bytes)) else value for value in values[:: max(1, len(values) // _OBJECTS)]]
    digest.update("".join(repr(value) for value in some if type(value) in _PLAIN).encode("utf-8", "surrogatepass"))
