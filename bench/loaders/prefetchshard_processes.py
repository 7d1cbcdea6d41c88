"""prefetchshard with worker processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import prefetchshard as ps
from bench.data import Workload
from bench.loaders import NotApplicable, prefetchshard_loader
from bench.place import Place


def start(workload: Workload, place: Place, workers: int) -> Iterator[Any]:
    if workload.kind != "examples":
        raise NotApplicable("whole arrays and batches that exist are only copied, which threads do")
    return prefetchshard_loader.start(workload, place, ps.Processes(workers))
