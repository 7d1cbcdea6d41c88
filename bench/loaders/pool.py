"""A pool of threads that make batches, and a thread that puts them in order: the best that is written by hand."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from bench.data import Workload
from bench.loaders import no_iterators
from bench.loaders.thread import in_thread
from bench.place import Place


def start(workload: Workload, place: Place, workers: int) -> Iterator[Any]:
    no_iterators(workload, "an iterator leaves a pool nothing to share: the same as thread")
    return in_thread(_batches(workload, place, workers))


def _batches(workload: Workload, place: Place, workers: int) -> Iterator[Any]:
    with ThreadPoolExecutor(workers) as pool:
        made: deque[Future[Any]] = deque()
        for step in itertools.count():
            made.append(pool.submit(workload.make, step))
            if len(made) > workers:
                yield place.put(made.popleft().result())
