"""torch DataLoader with worker processes, which batch into shared memory; a thread puts the batches on the devices.

The workers are forked before they could be needed, and never touch JAX: so the data is shared, not copied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import torch
from torch.utils.data import DataLoader, default_collate

from bench.data import Workload
from bench.loaders import no_iterators
from bench.loaders.thread import in_thread
from bench.place import Place

HELD = 4  # batches whose host memory is kept until their transfer has surely ended


def start(workload: Workload, place: Place, workers: int) -> Iterator[Any]:
    return in_thread(put(loader(workload, workers), place, wait=False))


def loader(workload: Workload, workers: int, *, pinned: bool = False) -> DataLoader:
    no_iterators(workload, "the iterator lives in the training process, DataLoader's workers are other processes")
    return DataLoader(
        _Examples(workload),
        batch_sampler=_Order(workload),
        num_workers=workers,
        prefetch_factor=2,
        pin_memory=pinned,
        collate_fn=_Collate(workload),
        multiprocessing_context="fork",
    )


def put(batches: DataLoader, place: Place, *, wait: bool) -> Iterator[Any]:
    held: deque[Any] = deque(maxlen=HELD)
    for tensors in batches:
        batch = place.put({name: tensor.numpy() for name, tensor in tensors.items()})
        if wait:
            jax.block_until_ready(batch)
        held.append(tensors)
        yield batch


class _Order:
    """The rows of each batch, without end, so that the workers are started once."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload

    def __iter__(self) -> Iterator[list[int]]:
        step = 0
        while True:
            yield self._workload.rows(step).tolist()
            step += 1


class _Examples:
    def __init__(self, workload: Workload) -> None:
        self._dataset, self._transform = workload.dataset, workload.transform

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, row: int) -> Any:
        example = self._dataset[row]
        if self._transform is not None:
            example = self._transform(example)
        return {name: leaf if leaf.flags.c_contiguous else leaf.copy() for name, leaf in example.items()}  # torch knows no negative strides


class _Collate:
    def __init__(self, workload: Workload) -> None:
        self._collate = workload.collate

    def __call__(self, examples: list[Any]) -> dict[str, torch.Tensor]:
        if self._collate is not None:
            return {name: torch.from_numpy(np.ascontiguousarray(leaf)) for name, leaf in self._collate(examples).items()}
        return default_collate(examples)
