"""What a batch looks like: shape, dtype, sharding and bytes of each leaf."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import numpy as np


class LeafSpec(msgspec.Struct, frozen=True):
    """One leaf of a batch.

    Attributes:
        path: where it is in the batch, e.g. `meta.name`; empty for a batch that is one array.
        shape: global, `(rows, *example)`, or `(microbatches, rows / microbatches, *example)`.
        dtype: on the devices.
        sharding: a `jax.sharding.Sharding`, or `ps.HOST`.
        bytes_per_device: what one device holds of it.

    Example:
        spec = ps.Loader({"x": np.zeros((64, 3), np.float32)}, P("data"), batch_size=16).spec()
        assert spec["x"].shape == (16, 3)
    """

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    sharding: Any
    bytes_per_device: int


class BatchSpec(Mapping[str, LeafSpec]):
    """What the batches of a loader look like: a mapping from path to `LeafSpec`.

    Attributes:
        ahead: the most batches that are ever pulled from the source and not yet delivered; with `read_ahead` just so many.
        bytes_per_device: what one device holds of one batch.

    Example:
        spec = ps.Loader({"x": np.zeros((64, 3), np.float32)}, P("data"), batch_size=16).spec()
        assert list(spec) == ["x"]
        print(spec.bytes_per_device, spec)
    """

    def __init__(self, leaves: tuple[LeafSpec, ...], ahead: int) -> None:
        self._leaves = {leaf.path: leaf for leaf in leaves}
        self.ahead = ahead

    @property
    def bytes_per_device(self) -> int:
        return sum(leaf.bytes_per_device for leaf in self._leaves.values())

    def __getitem__(self, path: str) -> LeafSpec:
        try:
            return self._leaves[path]
        except KeyError:
            raise KeyError(f"{path!r} is no leaf; the leaves are {', '.join(map(repr, self._leaves))}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._leaves)

    def __len__(self) -> int:
        return len(self._leaves)

    def __repr__(self) -> str:
        lines = [
            f"  {leaf.path or '(the batch itself)'}: {leaf.dtype}{list(leaf.shape)}, {leaf.sharding}, {leaf.bytes_per_device:,} bytes a device"
            for leaf in self._leaves.values()
        ]
        return "\n".join([f"BatchSpec: {self.bytes_per_device:,} bytes a device, at most {self.ahead} batches ahead", *lines])
