"""Grain with worker processes, for transforms that hold the GIL."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import grain
from absl import flags

from bench.data import Workload
from bench.loaders import NotApplicable
from bench.loaders.grain_examples import examples, on_devices
from bench.place import Place


def start(workload: Workload, place: Place, workers: int) -> Iterator[Any]:
    if workload.kind != "examples":
        raise NotApplicable("nothing here holds the GIL, and each process would get its own copy of the data")
    if not flags.FLAGS.is_parsed():  # which Grain asks for before it starts processes
        flags.FLAGS(sys.argv[:1])
    dataset = examples(workload).to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=1))
    dataset = dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=2))
    return on_devices(dataset, place)
