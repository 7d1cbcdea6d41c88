"""prefetchshard."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import prefetchshard as ps
from bench.data import Workload
from bench.place import Place


def start(workload: Workload, place: Place, workers: int | ps.Processes) -> Iterator[Any]:
    if workload.kind == "batches":
        return iter(ps.prefetch(workload.batches(), place.sharding, reuses_buffers=workload.gives == "refilled", workers=workers))
    loader = ps.Loader(
        workload.data if workload.kind == "arrays" else workload.dataset,
        place.sharding,
        batch_size=workload.batch_size,
        transform=workload.transform,
        collate=workload.collate,
        shuffle=True,
        epochs=None,
        workers=workers,
    )
    return iter(loader)
