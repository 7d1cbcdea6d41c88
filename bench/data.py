"""What a workload is: data, how a batch of it is made, and what must arrive.

A workload is one of three kinds:

- "arrays": arrays in memory, of which random rows make a batch;
- "examples": a dataset with random access and a transform for each example, which is Python;
- "batches": an iterator that yields batches already, so that only one thread at a time can be inside the source.

Row numbers travel along as the leaf "label", so that what arrives can be checked whatever the order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np

Batch = dict[str, np.ndarray]

ROW_BYTES = 224 * 224 * 3  # of one image


@dataclass(frozen=True)
class Sizes:
    """How large the work is: `image_rows` rows of images in all, `image_batch` of them a device and step, and so on."""

    devices: int
    image_rows: int
    image_batch: int
    example_batch: int
    text_batch: int

    @classmethod
    def choose(cls, platform: str, devices: int, mib: float | None = None, rows: int | None = None) -> Sizes:
        """Full size on an accelerator; on CPUs as much as two cores do in seconds. `mib`: MiB of images a device and step."""
        large = platform != "cpu"
        mib = mib or (36.75 if large else 1.15)
        image_batch = max(1, round(mib * 2**20 / ROW_BYTES))
        return cls(devices, rows or (8192 if large else 1024), image_batch, 256 if large else 32, 64 if large else 8)


class Order:
    """Which rows make batch k: a permutation of all rows an epoch, without end."""

    def __init__(self, length: int, batch_size: int) -> None:
        self.steps = length // batch_size
        self._batch_size = batch_size
        self._permutation = lru_cache(4)(lambda epoch: np.random.default_rng((0, epoch)).permutation(length))

    def rows(self, step: int) -> np.ndarray:
        epoch, step = divmod(step, self.steps)
        return self._permutation(epoch)[step * self._batch_size : (step + 1) * self._batch_size]


class Probe(NamedTuple):
    """What is read of each row of each batch, on the devices: its number and two of its values."""

    label: Any
    first: Any
    last: Any


class Rows:
    """Arrays as a dataset of examples, for loaders that want one."""

    def __init__(self, data: Batch) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data["label"])

    def __getitem__(self, row: int) -> Batch:
        return {name: leaf[row] for name, leaf in self.data.items()}


class Workload:
    """One workload. Every loader sees the same."""

    kind: Literal["arrays", "examples", "batches"]
    gives: Literal["fresh", "kept", "refilled"] = "fresh"
    """Of "batches": "fresh", each batch is new memory; "kept", the source's own arrays, which stay as they are; "refilled", the source
    overwrites what it yielded."""
    data: Batch
    dataset: Any
    transform: Callable[[Any], Any] | None = None
    collate: Callable[[list[Any]], Batch] | None = None
    labelled = True  # rows carry their number
    varies = False  # the size of a batch

    def __init__(self, length: int, batch_size: int) -> None:
        self.batch_size = batch_size
        self.length = max(2, -(-length // batch_size)) * batch_size  # whole batches, so that an epoch leaves no remainder
        self.order = Order(self.length, batch_size)

    def rows(self, step: int) -> np.ndarray:
        """The rows of batch `step`, where the workload says the order: of "batches" always, else where a loader has none of its own."""
        return self.order.rows(step)

    def make(self, step: int) -> Batch:
        """Batch `step` in fresh memory, as a user would write it."""
        return self.make_of(self.rows(step))

    def make_of(self, rows: np.ndarray) -> Batch:
        """The batch that these rows make."""
        return {name: leaf[rows] for name, leaf in self.data.items()}

    def batches(self) -> Iterator[Batch]:
        """The iterator of "batches"; without end."""
        return map(self.make, itertools.count())

    def probes(self) -> Probe:
        """What must be read of row 0, 1, 2 ... of the data."""
        return self.probe(self.make_of(np.arange(self.length)))

    def samples(self) -> list[Batch]:
        """A batch of each shape that occurs, so that the step can be compiled before anything is measured."""
        return [self.make(0)]

    def probe(self, batch: Any) -> Probe:
        """Reads of a batch, host or device, with any number of leading axes, what is checked of every row."""
        image, lead = batch["image"], batch["label"].ndim
        where = (slice(None),) * lead
        return Probe(batch["label"], image[(*where, 0, 0, 0)], image[(*where, -1, -1, -1)])
