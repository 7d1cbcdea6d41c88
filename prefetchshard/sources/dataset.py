"""Datasets with random access: `__len__` and `__getitem__`, asked by several threads at once."""

from __future__ import annotations

from typing import Any

from prefetchshard.errors import SourceError


class Dataset:
    """Rows asked by number.

    Attributes:
        length: `len(dataset)` where the loader was made.
    """

    kind = "dataset"

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.length = len(dataset)
        many = getattr(dataset, "__getitems__", None)
        self._many = many if callable(many) else None
        self.shares_items = isinstance(dataset, (list, tuple))  # its items stay what they are; others may be made in a reused buffer

    def read(self, rows: list[int]) -> list[Any]:
        """The examples at these rows, in this order.

        Raises:
            SourceError: `__getitems__` returned another number of examples.
        """
        if self._many is None:
            get = self.dataset.__getitem__
            return [get(row) for row in rows]
        examples = list(self._many(rows))
        if len(examples) != len(rows):
            raise SourceError(f"{type(self.dataset).__qualname__}.__getitems__ was asked for {len(rows)} rows and returned {len(examples)}")
        return examples
