"""The workloads of single examples: a Python transform, and text that is padded."""

from __future__ import annotations

from typing import Any

import numpy as np

from bench.data import Batch, Probe, Rows, Sizes, Workload


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
    varies = True

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
