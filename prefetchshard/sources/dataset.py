"""Datasets with random access: `__len__` and `__getitem__`, called by several threads at once."""

from __future__ import annotations

from collections import deque
from typing import Any, Literal

from prefetchshard.base.errors import SourceError


class Dataset:
    """A dataset, read by row number.

    Attributes:
        length: `len(dataset)` when the loader was made.
        reads_many: the dataset has `__getitems__`.
        shares_items: the dataset never overwrites an item that it returned. False: items may be in a buffer that it reuses.
    """

    kind = "dataset"
    is_numbered: Literal[True] = True
    one_shot: Literal[False] = False
    home: None = None
    is_memory: Literal[False] = False
    stays_on_devices: bool = False
    tree: None = None

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.length = len(dataset)
        many = getattr(dataset, "__getitems__", None)
        self._many = many if callable(many) else None
        self.reads_many = self._many is not None
        self.shares_items = isinstance(dataset, (list, tuple, deque))

    def read(self, row: int) -> Any:
        """The example at this row."""
        return self.dataset[row]

    def read_many(self, rows: list[int]) -> list[Any]:
        """The examples at these rows, in this order, from one call of `__getitems__`.

        Raises:
            SourceError: `__getitems__` returned a different number of examples.
        """
        assert self._many is not None
        given: Any = self._many(rows)
        examples: list[Any] = list(given)
        if len(examples) != len(rows):
            raise SourceError(f"{type(self.dataset).__qualname__}.__getitems__ was asked for {len(rows)} rows and returned {len(examples)}")
        return examples
