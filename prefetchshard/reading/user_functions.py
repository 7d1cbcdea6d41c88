"""The functions that users hand in: `transform` with its generator, and `collate`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from prefetchshard.base.errors import SourceError
from prefetchshard.base.signatures import takes_parameter
from prefetchshard.ordering.epoch_order import seed_sequence


class UserFunctions:
    """`transform` and `collate` of a loader.

    Args:
        transform: on one example, or on a batch where the source makes the batches; gets `rng=` where it has a parameter of that name.
        collate: from a list of examples (from the gathered batch of arrays) to a batch.
        seed: of the generators.
    """

    def __init__(self, transform: Callable[..., Any] | None, collate: Callable[[Any], Any] | None, seed: int) -> None:
        self.transform = transform
        self.collate = collate
        self._seed = seed
        self._wants_rng = transform is not None and takes_parameter(transform, "rng")

    def transformed(self, item: Any, epoch: int, row: int) -> Any:
        """The item after `transform`; its generator depends on seed, epoch and row alone, so any worker on any machine draws the same."""
        assert self.transform is not None
        if not self._wants_rng:
            return _returned(self.transform(item), "transform")
        rng = np.random.Generator(np.random.PCG64(seed_sequence(self._seed, epoch, row)))
        return _returned(self.transform(item, rng=rng), "transform")

    def collated(self, examples: Any) -> Any:
        """The batch that `collate` makes."""
        assert self.collate is not None
        return _returned(self.collate(examples), "collate")


def _returned(value: Any, by: str) -> Any:
    if value is None:
        raise SourceError(f"{by} returned None; it must return its result, also where it changes what it was given in place")
    return value
