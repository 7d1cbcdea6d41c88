"""flax.jax_utils.prefetch_to_device: the devices become a leading axis, as for pmap. It copies each leaf itself (np.stack)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
from flax import jax_utils

from bench.data import Workload
from bench.place import Place


def start(workload: Workload, place: Place, workers: int) -> Iterator[Any]:
    return _prefetch(workload.batches(), place)


def put(batch: Any, place: Place) -> Any:
    return next(_prefetch(iter([batch]), place))


def _prefetch(batches: Iterator[Any], place: Place) -> Iterator[Any]:
    count = len(place.devices)

    def split(batch: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.reshape(count, -1, *leaf.shape[1:]), batch)

    return jax_utils.prefetch_to_device(map(split, batches), 2, devices=place.devices)
