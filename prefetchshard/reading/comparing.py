"""Compares items that a source returned, leaf by leaf and bit by bit."""

from __future__ import annotations

from typing import Any

import numpy as np

from prefetchshard.base.errors import LeafTypeError, NarrowingError
from prefetchshard.base.jax_types import tree_flatten_with_path
from prefetchshard.leaves.converting import as_array
from prefetchshard.sharding.batch_tree import path_text

MOST_LETTERS = 200
"""A longer value is cut off in messages."""


def difference(got: Any, wanted: Any) -> str | None:
    """A text that says where two items differ; None if they do not."""
    (ours, our_tree), (theirs, their_tree) = (tree_flatten_with_path(item) for item in (got, wanted))
    if our_tree != their_tree:
        return f"{our_tree} and not {their_tree}"
    for (path, one), (_, other) in zip(ours, theirs, strict=True):
        if not _same(one, other):
            return f"{f'leaf {path_text(path)}' if path else 'it'} is {_short_repr(one)} and not {_short_repr(other)}"
    return None


def _same(one: Any, other: Any) -> bool:
    try:
        left, right = as_array(one), as_array(other)
    except (LeafTypeError, NarrowingError):  # text, objects
        return bool(np.all(one == other))
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()


def _short_repr(leaf: Any) -> str:
    text = " ".join(repr(leaf).split())
    return text if len(text) < MOST_LETTERS else f"{text[:MOST_LETTERS]}..."
