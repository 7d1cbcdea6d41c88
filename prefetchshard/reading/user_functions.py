"""The functions that users hand in: `transform` with its generator, and `collate`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Never

import numpy as np

from prefetchshard.base.errors import SourceError
from prefetchshard.base.signatures import takes_parameter
from prefetchshard.ordering.epoch_order import seed_sequence
from prefetchshard.sharding.rules import NoLeavesError


class UserFunctions:
    """`transform` and `collate` of a loader.

    Args:
        transform: on one example, or on a batch where the source makes the batches; gets `rng=` where it has a parameter of that name.
        collate: from a list of examples (from the gathered batch of arrays) to a batch.
        seed: of the generators.
        makes_examples: `transform` gets examples, not batches.

    Attributes:
        example_by: the function that an example comes from; None: the source.
        batch_by: the function that a whole batch comes from; None: the source.
        seed: as above.
        wants_rng: `transform` gets a generator.
    """

    def __init__(
        self, transform: Callable[..., Any] | None, collate: Callable[[Any], Any] | None, seed: int, *, makes_examples: bool = True
    ) -> None:
        self.transform = transform
        self.collate = collate
        self.example_by = None if transform is None else "transform"
        self.batch_by = self.example_by if collate is None else "collate"
        self.seed = seed
        self._item = "the example at row" if makes_examples else "batch"
        self.wants_rng = transform is not None and takes_parameter(transform, "rng")

    def transformed(self, item: Any, epoch: int, row: int) -> Any:
        """The item after `transform`; its generator depends on seed, epoch and row alone, so any worker on any machine draws the same."""
        assert self.transform is not None
        if not self.wants_rng:
            made = self.transform(item)
            return made if made is not None else self._nothing("transform", f" for {self._item} {row}")
        rng = np.random.Generator(np.random.PCG64(seed_sequence(self.seed, epoch, row)))
        made = self.transform(item, rng=rng)
        return made if made is not None else self._nothing("transform", f" for {self._item} {row}")

    def collated(self, examples: Any) -> Any:
        """The batch that `collate` makes."""
        assert self.collate is not None
        made = self.collate(examples)
        return made if made is not None else self._nothing("collate", "")

    def refuse_none(self, by: str, row: int | None) -> Never:
        """Raise what a function is told that returned None in a worker process; for the item at `row`, or for a batch."""
        self._nothing(by, "" if row is None else f" for {self._item} {row}")

    def _nothing(self, by: str, of: str) -> Never:
        raise SourceError(f"{by} returned None{of}; it must return its result, also where it changes what it was given in place")


def no_leaves(found: NoLeavesError, what: str, by: str | None) -> SourceError:
    """The error for an example or a batch without leaves.

    Args:
        found: what flattening it raised.
        what: which one it is.
        by: the function that returned it; None: the source gave it.
    """
    if by is None:
        return SourceError(f"the source gave no leaves for {what}: {found}; is a `return` missing?")
    return SourceError(f"{by} returned no leaves for {what}: {found}; is a `return` missing in it?")
