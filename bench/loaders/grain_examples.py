"""Grain from examples: shuffled, mapped, batched by Grain, read by threads. Around an iterator: a class of the user's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grain

from bench.data import Workload
from bench.loaders import host_batches
from bench.place import Place


def start(workload: Workload, place: Place, workers: int) -> Iterator[Any]:
    if workload.kind == "batches":
        return on_devices(IteratorDataset(lambda: host_batches(workload, place)), place)
    return on_devices(threaded(examples(workload), workers), place)


def examples(workload: Workload) -> grain.MapDataset:
    """Batches of the workload's examples in a new order each epoch, without end."""
    dataset = grain.MapDataset.source(workload.dataset).shuffle(seed=0).repeat()
    if workload.transform is not None:
        dataset = dataset.map(workload.transform)
    return dataset.batch(workload.batch_size, batch_fn=workload.collate)


def threaded(dataset: grain.MapDataset, workers: int) -> grain.IterDataset:
    return dataset.to_iter_dataset(grain.ReadOptions(num_threads=workers, prefetch_buffer_size=workers))


def on_devices(dataset: grain.IterDataset, place: Place) -> Iterator[Any]:
    return iter(grain.experimental.device_put(dataset, place.sharding, cpu_buffer_size=4, device_buffer_size=2))


class IteratorDataset(grain.IterDataset):
    """What a user must write to get an iterator into Grain."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self._make = make

    def __iter__(self) -> grain.DatasetIterator:
        return _Iterator(self._make)


class _Iterator(grain.DatasetIterator):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self._make = make
        self._batches = make()
        self._taken = 0

    def __next__(self) -> Any:
        batch = next(self._batches)
        self._taken += 1
        return batch

    def get_state(self) -> dict[str, Any]:
        return {"taken": self._taken}

    def set_state(self, state: dict[str, Any]) -> None:
        self._batches = self._make()
        for _ in range(state["taken"]):
            next(self._batches)
