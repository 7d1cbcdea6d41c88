"""The functions that users hand in: `transform` with its generator, and `collate`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from prefetchshard.order import seed_sequence
from prefetchshard.sources.iterables import takes_parameter


class Hooks:
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
            return self.transform(item)
        return self.transform(item, rng=np.random.Generator(np.random.PCG64(seed_sequence(self._seed, epoch, row))))
