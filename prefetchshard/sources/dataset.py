"""Datasets with random access: `__len__` and `__getitem__`, called by several threads at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Literal

from prefetchshard.base.errors import SourceError
from prefetchshard.sources.epochs import set_epoch, takes_epoch


class Dataset:
    """A dataset, read by row number.

    Attributes:
        dataset: the user's.
        length: `len(dataset)` when the loader was made.
        reads_many: the dataset has `__getitems__`.
        shares_items: the dataset never overwrites an item that it returned. False: items may be in a buffer that it reuses.
        takes_epoch: the dataset has `set_epoch`.
        was_watched: its first reads were; see `reading/first_reads.py`.
        unsafe: why several threads must not read it; None if nothing is known against that.
        told: what it was told of the epoch, for instances in other processes; None before that.
    """

    kind = "dataset"
    is_numbered: Literal[True] = True
    one_shot: Literal[False] = False
    is_memory: Literal[False] = False
    stays_on_devices: bool = False
    tree: None = None

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.length = length_of(dataset)
        self.reads_many = callable(getattr(dataset, "__getitems__", None))
        self.shares_items = isinstance(dataset, (list, tuple, deque))
        self.takes_epoch = takes_epoch(dataset)
        self.was_watched = False
        self.unsafe: str | None = None
        self.told: tuple[int, int | None] | None = None

    def read(self, row: int) -> Any:
        """The example at this row."""
        return self.dataset[row]

    def read_many(self, rows: list[int]) -> list[Any]:
        """The examples at these rows, in this order, from one call of `__getitems__`.

        Raises:
            SourceError: `__getitems__` returned a different number of examples.
        """
        return ask_many(self.dataset, rows)

    def size_now(self) -> int:
        """`len(dataset)` as it is now."""
        return len(self.dataset)

    def set_epoch(self, epoch: int, run_epoch: int | None) -> None:
        """Tell the dataset, while no thread reads it; see `epochs.set_epoch`."""
        self.told = set_epoch(self.dataset, epoch, run_epoch), None

    def leave(self) -> None:
        """The thread that calls this reads no more."""


def length_of(dataset: Any) -> int:
    """`len(dataset)`; what it raises has a note that names the dataset."""
    try:
        return len(dataset)
    except Exception as error:
        error.add_note(f"prefetchshard: while asking the source, a {type(dataset).__module__}.{type(dataset).__qualname__}, for its len()")
        raise


def ask_many(dataset: Any, rows: list[int]) -> list[Any]:
    """What `__getitems__` returns for these rows.

    Raises:
        SourceError: another number of examples.
    """
    many: Callable[[list[int]], Any] = dataset.__getitems__
    found = many(rows)
    if found is None:
        raise SourceError(f"{type(dataset).__qualname__}.__getitems__ returned None, and is to return a list of {len(rows)} examples")
    examples: list[Any] = list(found)
    if len(examples) != len(rows):
        raise SourceError(f"{type(dataset).__qualname__}.__getitems__ was asked for {len(rows)} rows and returned {len(examples)}")
    return examples
