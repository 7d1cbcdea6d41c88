"""What is loaded: the data, how a batch of it is made, and what must arrive.

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
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple

import numpy as np

Batch = dict[str, np.ndarray]

ROW_BYTES = 224 * 224 * 3
EXISTING = 8  # batches that the source of wrapped-existing goes round in


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
    labelled = True

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

    def samples(self) -> list[Batch]:
        """A batch of each shape that occurs, so that the step can be compiled before anything is measured."""
        return [self.make(0)]

    def probe(self, batch: Any) -> Probe:
        """Reads of a batch, host or device, of any number of leading axes, what is checked of every row."""
        image, lead = batch["image"], batch["label"].ndim
        where = (slice(None),) * lead
        return Probe(batch["label"], image[(*where, 0, 0, 0)], image[(*where, -1, -1, -1)])


class Images(Workload):
    """uint8 images [rows, 224, 224, 3] in memory, random rows."""

    kind = "arrays"

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes.image_rows, sizes.image_batch * sizes.devices)
        images = np.random.default_rng(0).integers(0, 256, (self.length, 224, 224, 3), np.uint8)
        self.data = {"image": images, "label": np.arange(self.length, dtype=np.int32)}
        self.dataset = Rows(self.data)


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


def prepare(example: Batch) -> Batch:
    """Normalise, flip every other image; and some Python that holds the GIL, as decoding metadata or augmenting in Python does."""
    brightness = 0
    for value in example["image"][0].ravel().tolist() * 4:
        brightness = (brightness * 31 + value) & 0xFFFF
    image = (example["image"].astype(np.float32) - 127.5) / 64.0
    if example["label"] % 2:
        image = image[:, ::-1]
    return {"image": image, "label": example["label"], "brightness": np.int32(brightness)}


class Examples(Workload):
    """A dataset of small images [32, 32, 3], one at a time, with a transform in Python."""

    kind = "examples"
    transform = staticmethod(prepare)

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(8192 if sizes.example_batch >= 256 else 2048, sizes.example_batch * sizes.devices)
        images = np.random.default_rng(0).integers(0, 256, (self.length, 32, 32, 3), np.uint8)
        self.data = {"image": images, "label": np.arange(self.length, dtype=np.int32)}
        self.dataset = Rows(self.data)

    def make_of(self, rows: np.ndarray) -> Batch:
        examples = [prepare(self.dataset[row]) for row in rows]
        return {name: np.stack([example[name] for example in examples]) for name in examples[0]}


class Texts:
    """Token rows of varying length."""

    def __init__(self, length: int) -> None:
        random = np.random.default_rng(0)
        lengths = np.clip(random.lognormal(4.5, 0.8, length).astype(np.int64), 8, 512)
        self._ends = np.cumsum(lengths)
        self._starts = self._ends - lengths
        self._tokens = random.integers(1, 50_000, int(self._ends[-1]), np.int32)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, row: int) -> Batch:
        return {"tokens": self._tokens[self._starts[row] : self._ends[row]], "label": np.int32(row)}


def pad(examples: list[Batch]) -> Batch:
    """Pads to the next multiple of 64 tokens."""
    lengths = np.array([len(example["tokens"]) for example in examples], np.int32)
    tokens = np.zeros((len(examples), -(-int(lengths.max()) // 64) * 64), np.int32)
    for row, example in zip(tokens, examples, strict=True):
        row[: len(example["tokens"])] = example["tokens"]
    return {"tokens": tokens, "length": lengths, "label": np.array([example["label"] for example in examples], np.int32)}


class Text(Workload):
    """Text of varying length, padded in `collate`."""

    kind = "examples"
    collate = staticmethod(pad)

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(8192, sizes.text_batch * sizes.devices)
        self.dataset = Texts(self.length)

    def make_of(self, rows: np.ndarray) -> Batch:
        return pad([self.dataset[row] for row in rows])

    def samples(self) -> list[Batch]:
        batch = self.make(0)
        rows = len(batch["label"])
        return [{**batch, "tokens": np.zeros((rows, length), np.int32)} for length in range(64, 513, 64)]

    def probe(self, batch: Any) -> Probe:
        return Probe(batch["label"], batch["tokens"][..., 0], batch["length"])


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
