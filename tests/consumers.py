"""The ways to consume a loader, so that one test body proves a promise for each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import anyio
import jax
import numpy as np

import prefetchshard as ps

BACKENDS = ("asyncio", "trio")
WAYS = ("sync", *BACKENDS)

Seen = list[tuple[Any, ps.Position]]


class Consume(Protocol):
    """Runs through a loader (or goes on with one of its runs). Returns each batch with its position."""

    def __call__(self, source: Any, limit: int | None = None) -> Seen: ...


def consumer(way: str) -> Consume:
    """By a `for` loop, or by an `async for` loop on one of the backends."""
    if way == "sync":
        return _sync
    return lambda source, limit=None: anyio.run(_async, source, limit, backend=way)


def _sync(source: Any, limit: int | None = None) -> Seen:
    iterator = source if isinstance(source, ps.LoaderIterator) else iter(source)
    seen: Seen = []
    while limit is None or len(seen) < limit:
        try:
            batch = next(iterator)
        except StopIteration:
            break
        seen.append((batch, position_of(iterator)))
    return seen


async def _async(source: Any, limit: int | None) -> Seen:
    iterator = source if isinstance(source, ps.LoaderIterator) else aiter(source)
    seen: Seen = []
    while limit is None or len(seen) < limit:
        try:
            batch = await anext(iterator)
        except StopAsyncIteration:
            break
        seen.append((batch, position_of(iterator)))
    return seen


def position_of(iterator: ps.LoaderIterator) -> ps.Position:
    """The position of the batch that was just handed out."""
    assert iterator.position is not None
    return iterator.position


def batches(seen: Seen) -> list[Any]:
    return [batch for batch, _ in seen]


def values(tree: Any) -> Any:
    """The leaves of a batch, or of several, as NumPy arrays."""
    return jax.tree.map(np.asarray, tree)


def joined(seen: Seen, pick: Callable[[Any], Any] = lambda batch: batch) -> np.ndarray:
    """The rows of a leaf, one batch after the other."""
    leaves = [np.asarray(pick(batch)) for batch, _ in seen]
    return np.concatenate(leaves) if leaves else np.zeros(0)


def places(seen: Seen) -> list[tuple[int, int, int, int, bool]]:
    """(epoch, step, batches, rows, ends_epoch) of each."""
    return [(p.epoch, p.step, p.batches, p.rows, p.ends_epoch) for _, p in seen]
