"""The naive loop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench.data import Workload
from bench.loaders import host_batches
from bench.place import Place


def start(workload: Workload, place: Place, workers: int) -> Iterator[Any]:
    return map(place.put, host_batches(workload, place))
