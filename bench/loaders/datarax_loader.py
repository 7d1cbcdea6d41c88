"""datarax.prefetch_to_device around an iterator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from datarax import prefetch_to_device

from bench.data import Workload
from bench.loaders import host_batches
from bench.place import Place


def start(workload: Workload, place: Place, workers: int) -> Iterator[Any]:
    return prefetch_to_device(host_batches(workload, place), size=2, device=place.sharding)
