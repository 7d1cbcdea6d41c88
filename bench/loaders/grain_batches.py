"""Grain where each item of the source is a whole batch, which the user's code makes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import grain

from bench.data import Workload
from bench.loaders import no_iterators
from bench.loaders.grain_examples import on_devices, threaded
from bench.place import Place


def start(workload: Workload, place: Place, workers: int) -> Iterator[Any]:
    no_iterators(workload, "an iterator has no random access: the same as grain")
    return on_devices(threaded(grain.MapDataset.source(_Batches(workload)), workers), place)


class _Batches:
    def __init__(self, workload: Workload) -> None:
        self._workload = workload

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, step: int) -> Any:
        return self._workload.make(int(step))
