"""A hash over a few bytes of a batch on the host, by which a source that was read again is told from another one."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from prefetchshard.base.batches import Memory
from prefetchshard.planning.planner import Plan

SAMPLED_BYTES = 512
"""Of a batch, over its leaves: enough to meet nearly every row, few enough to cost microseconds."""
_LEAVES = 8
"""Of a batch with more leaves only every so manyth gives its bytes."""
_OBJECTS = 4
_PLAIN = (str, bytes, int, float, bool)


def sample_of(plan: Plan, memory: Memory | None, passed: dict[int, Any]) -> bytes:
    """Sixteen bytes that depend on the shapes of a finished batch, and on bytes from all over its leaves on the host."""
    if memory is not None and len(plan.staged) == len(plan.leaves) <= _LEAVES:
        return _of_staged(memory.views[: len(plan.leaves)])
    views = iter(memory.views if memory is not None else ())
    staged = {index: next(views) for index in plan.staged}
    values = [staged[index] if index in staged else passed.get(index) for index in range(len(plan.leaves))]
    parts = [repr([getattr(value, "shape", None) for value in values]).encode()]
    some = values[:: -(-len(values) // _LEAVES) or 1]
    parts += [_some_bytes(value, SAMPLED_BYTES // len(some)) for value in some]
    return hashlib.blake2b(b"\n".join(parts), digest_size=16).digest()


def _of_staged(views: Sequence[np.ndarray[Any, Any]]) -> bytes:
    """As below, where all leaves are contiguous and of numbers: this is on the path of every batch of an iterator."""
    digest = hashlib.blake2b(repr([view.shape for view in views]).encode(), digest_size=16)
    budget = SAMPLED_BYTES // len(views)
    for view in views:
        digest.update(_spread(view, budget))
    return digest.digest()


def _some_bytes(value: Any, budget: int) -> bytes:
    if isinstance(value, np.ndarray):
        return _of_array(value, budget)
    if isinstance(value, list | tuple):
        return _of_objects(value)
    return _of_objects([value])


def _of_array(array: Any, budget: int) -> bytes:
    if array.dtype.hasobject:
        return _of_objects(array.reshape(-1)[:: max(1, array.size // _OBJECTS)].tolist())
    array = np.asarray(array)  # of a masked array or a recarray, its numbers
    if not array.flags.c_contiguous:
        array = np.ascontiguousarray(array)
    return _spread(array, budget)


def _spread(array: Any, budget: int) -> bytes:
    """About so many bytes from all over a contiguous array."""
    flat = array.reshape(-1).view(np.uint8)
    # An odd stride, so that not only the lowest byte of each number is met.
    return flat[:: (flat.size // budget) | 1].tobytes()


def _of_objects(values: Any) -> bytes:
    some = [value[:64] if isinstance(value, (str, bytes)) else value for value in values[:: max(1, len(values) // _OBJECTS)]]
    return "".join(repr(value) for value in some if type(value) in _PLAIN).encode("utf-8", "surrogatepass")
