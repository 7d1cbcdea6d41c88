"""SPDL: a pipeline of the user's own functions. A failure stops it (by default it would drop the item)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from spdl.pipeline import PipelineBuilder

from bench.data import Workload
from bench.loaders import host_batches
from bench.place import Place


def start(workload: Workload, place: Place, workers: int) -> Iterator[Any]:
    if workload.kind == "batches":
        builder = PipelineBuilder().add_source(host_batches(workload, place))
    else:
        builder = PipelineBuilder().add_source(itertools.count()).pipe(workload.make, concurrency=workers, output_order="input")
    return _run(builder.pipe(place.put, output_order="input").add_sink(2).build(num_threads=workers + 1, max_failures=0))


def _run(pipeline: Any) -> Iterator[Any]:
    with pipeline.auto_stop():
        yield from pipeline
