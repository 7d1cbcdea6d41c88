"""Sources of every kind that do what a test says before each item: fail, block, or note that they were asked."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np

Act = Callable[[int], object]
ROWS = 8


def batch(i: int) -> np.ndarray:
    return np.full(ROWS, i, np.int32)


def first(value: Any) -> int:
    """The number that `batch` put into a batch."""
    return int(np.asarray(value)[0])


def nothing(i: int) -> None:
    del i


class OpenSource:
    """An iterator over batches 0, 1, ...; notes when it is closed."""

    def __init__(self, count: int, act: Act = nothing) -> None:
        self.count = count
        self.act = act
        self.asked = 0
        self.closed = 0
        self.closed_in = ""

    def __iter__(self) -> Iterator[np.ndarray]:
        return self

    def __next__(self) -> np.ndarray:
        i = self.asked
        self.asked += 1
        if i >= self.count:
            raise StopIteration
        self.act(i)
        return batch(i)

    def close(self) -> None:
        self.closed += 1
        self.closed_in = threading.current_thread().name


class Iterable:
    """Can be iterated again; remembers the iterators that it gave out, and whether it was closed itself."""

    def __init__(self, count: int, act: Act = nothing) -> None:
        self.count = count
        self.act = act
        self.given: list[OpenSource] = []
        self.closed = 0

    def __iter__(self) -> OpenSource:
        self.given.append(OpenSource(self.count, self.act))
        return self.given[-1]

    def close(self) -> None:
        self.closed += 1


def generator(count: int, act: Act = nothing) -> Iterator[np.ndarray]:
    for i in range(count):
        act(i)
        yield batch(i)


def factory(count: int, act: Act = nothing) -> Callable[[], Iterator[np.ndarray]]:
    return lambda: generator(count, act)


class Dataset:
    """Batches by number; closing it is the user's business."""

    def __init__(self, count: int, act: Act = nothing) -> None:
        self.count = count
        self.act = act
        self.closed = 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> np.ndarray:
        self.act(i)
        return batch(i)

    def close(self) -> None:
        self.closed += 1


class Manyset(Dataset):
    """Gives several at once."""

    def __getitems__(self, rows: list[int]) -> list[np.ndarray]:
        return [self[row] for row in rows]


class Examples(Dataset):
    """Single examples by number."""

    def __getitem__(self, i: int) -> Any:
        self.act(i)
        return np.int32(i)


async def async_generator(count: int, act: Act = nothing, make: Callable[[int], Any] = batch) -> AsyncIterator[Any]:
    for i in range(count):
        act(i)
        yield make(i)


class OpenAsyncIterator:
    """An async iterator that is no generator."""

    def __init__(self, count: int, act: Act = nothing) -> None:
        self.items = OpenSource(count, act)

    def __aiter__(self) -> AsyncIterator[np.ndarray]:
        return self

    async def __anext__(self) -> np.ndarray:
        if self.items.asked >= self.items.count:
            raise StopAsyncIteration
        return next(self.items)


class AsyncIterable:
    """Can be iterated again."""

    def __init__(self, count: int, act: Act = nothing) -> None:
        self.count = count
        self.act = act

    def __aiter__(self) -> AsyncIterator[np.ndarray]:
        return async_generator(self.count, self.act)


STREAMS: dict[str, Callable[..., Any]] = {
    "iterator": OpenSource,
    "iterable": Iterable,
    "generator": generator,
    "factory": factory,
    "async generator": async_generator,
    "async iterator": OpenAsyncIterator,
    "async iterable": AsyncIterable,
}
SOURCES: dict[str, Callable[..., Any]] = {**STREAMS, "dataset": Dataset, "dataset of many": Manyset}
"""By kind: from a number of batches, and what is done before each, to a source."""


class Gate:
    """An act that blocks at item `at` until it is opened."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.inside = threading.Event()
        self.opened = threading.Event()

    def __call__(self, i: int) -> None:
        if i == self.at:
            self.inside.set()
            self.opened.wait()

    def open(self) -> None:
        self.opened.set()
