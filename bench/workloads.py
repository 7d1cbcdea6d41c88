"""The workloads by name."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from bench.data import ROW_BYTES, Batch, Probe, Rows, Sizes, Workload
from bench.examples import Examples, Text

EXISTING = 8  # batches that the source of wrapped-existing goes round in


class Images(Workload):
    """uint8 images [rows, 224, 224, 3] in memory, random rows."""

    kind = "arrays"

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes.image_rows, sizes.image_batch * sizes.devices)
        images = np.random.default_rng(0).integers(0, 256, (self.length, 224, 224, 3), np.uint8)
        self.data = {"image": images, "label": np.arange(self.length, dtype=np.int32)}
        self.dataset = Rows(self.data)

    def probes(self) -> Probe:
        return self.probe(self.data)


class Fresh(Images):
    """The same images from an iterator that makes each batch anew."""

    kind = "batches"


class Existing(Images):
    """The same images from an iterator that goes round in batches which exist."""

    kind = "batches"
    gives = "kept"

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.existing = [self.make(step) for step in range(EXISTING)]

    def rows(self, step: int) -> np.ndarray:
        return self.order.rows(step % EXISTING)

    def batches(self) -> Iterator[Batch]:
        return itertools.cycle(self.existing)


class Leaves(Workload):
    """Batches of small leaves, which the source refills; the number of the batch stands at the start of each leaf."""

    kind = "batches"
    gives = "refilled"
    labelled = False

    def __init__(self, sizes: Sizes, leaves: dict[str, tuple[tuple[int, ...], type]]) -> None:
        rows = -(-64 // sizes.devices) * sizes.devices
        super().__init__(rows, rows)
        self._leaves = {name: ((rows, *shape), dtype) for name, (shape, dtype) in leaves.items()}

    def make(self, step: int) -> Batch:
        batch = {}
        for number, (name, (shape, dtype)) in enumerate(self._leaves.items()):
            batch[name] = np.full(shape, number, dtype)
            batch[name].flat[0] = step % 2**24
        return batch

    def batches(self) -> Iterator[Batch]:
        batch = self.make(0)
        starts = [leaf.reshape(-1) for leaf in batch.values()]
        for step in itertools.count():
            for start in starts:
                start[0] = step % 2**24
            yield batch


SMALL = {f"leaf{number:02}": ((16,), np.int32) for number in range(40)}
TINY = {"x": ((16,), np.float32), "y": ((), np.int32)}

WORKLOADS: dict[str, Callable[[Sizes], Workload]] = {
    "images": Images,
    "images-step": Images,
    "wrapped-existing": Existing,
    "wrapped-fresh": Fresh,
    "small": partial(Leaves, leaves=SMALL),
    "examples": Examples,
    "tiny": partial(Leaves, leaves=TINY),
    "text": Text,
}
GROUPS = {"wrapped": ("wrapped-existing", "wrapped-fresh")}


def _images(sizes: Sizes) -> str:
    rows = sizes.image_batch * sizes.devices
    return f"{rows} uint8 images [224, 224, 3] a batch, {rows * ROW_BYTES / 2**20:.1f} MiB"


ABOUT: dict[str, Callable[[Sizes], str]] = {
    "images": lambda sizes: f"{_images(sizes)}, random rows of an array",
    "images-step": lambda sizes: f"{_images(sizes)}, random rows of an array, and a step that computes",
    "wrapped-existing": lambda sizes: f"{_images(sizes)}, from an iterator over batches that exist",
    "wrapped-fresh": lambda sizes: f"{_images(sizes)}, from an iterator that makes each batch",
    "small": lambda sizes: "40 leaves [64, 16] int32 a batch, from an iterator that refills them",
    "examples": lambda sizes: f"{sizes.example_batch * sizes.devices} float32 images [32, 32, 3] a batch, each made by a Python transform",
    "tiny": lambda sizes: "2 leaves a batch, [64, 16] float32 and [64] int32, from an iterator that refills them",
    "text": lambda sizes: f"{sizes.text_batch * sizes.devices} texts of 8 to 512 tokens a batch, padded to a multiple of 64",
}
"""What each is, in words."""
