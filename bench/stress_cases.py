"""Random data, sources and settings for the stress program, from a seed alone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from numpy.typing import NDArray

import prefetchshard as ps
from bench.stress_sums import HALVES, Sums, host_sums

_jax: Any = jax

Array = NDArray[Any]
Random = np.random.Generator
Wrap = Callable[[Sequence[Any]], Any]

DTYPES = [
    np.dtype(name)
    for name in (
        *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "float16", "float32", "complex64"),
        *("int64", "uint64", "float64", ">f4", ">i2"),  # converted on the way
    )
] + [np.dtype(getattr(ml_dtypes, name)) for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", *HALVES)]

NARROWED = {"int64": np.int32, "uint64": np.uint32, "float64": np.float32}

SIZES = {"tiny": (1 << 12, 2 << 10), "medium": (1 << 20, 64 << 10), "large": (24 << 20, 1 << 20)}
"""Bytes of a batch at most, and of its rows."""

MOST_BATCHES = {"tiny": 24, "medium": 12, "large": 5, "many": 16}

MOST_PIECES = 4


class Pair(NamedTuple):
    row: Any
    rest: Any


def _nested(leaves: Sequence[Any]) -> Any:
    return {"row": leaves[0], "meta": {f"m{i}": leaf for i, leaf in enumerate(leaves[1:])}}


def _mapping(leaves: Sequence[Any]) -> Any:
    return {"row": leaves[0], **{f"x{i}": leaf for i, leaf in enumerate(leaves[1:])}}


def _pair(leaves: Sequence[Any]) -> Any:
    return Pair(leaves[0], {f"r{i}": leaf for i, leaf in enumerate(leaves[1:])})


WRAPS: dict[str, Wrap] = {"dict": _mapping, "nested dict": _nested, "tuple": tuple, "named tuple": _pair}


class Data:
    """The rows of a case: leaf 0 is the number of the row.

    Attributes:
        leaves: `(length, *example)` each.
        wrap: puts leaves together to a tree.
        order: which leaf comes when in the flattened tree.
    """

    def __init__(self, leaves: list[Array], wrap: Wrap) -> None:
        self.leaves = leaves
        self.wrap = wrap
        self.order: list[int] = _jax.tree.leaves(wrap(list(range(len(leaves)))))
        self.length = len(leaves[0])
        self._sums = [host_sums(leaf.astype(target)) for leaf, target in zip(leaves, self.targets, strict=True)]

    @property
    def targets(self) -> list[np.dtype[Any]]:
        """The dtypes on the devices."""
        return [np.dtype(NARROWED.get(leaf.dtype.name, leaf.dtype.newbyteorder("="))) for leaf in self.leaves]

    @property
    def row_bytes(self) -> int:
        """Of one row as it is staged."""
        return sum(math.prod(leaf.shape[1:]) * target.itemsize for leaf, target in zip(self.leaves, self.targets, strict=True))

    def batch(self, rows: Any) -> Any:
        return self.wrap([leaf[rows] for leaf in self.leaves])

    def sums(self, leaf: int, rows: Array, valid: int, padding: float) -> Sums:
        """What the sums of a leaf have to be in a batch: of these rows up to `valid`, then of padding."""
        found = self._sums[leaf][np.clip(rows, 0, self.length - 1)]
        if valid < len(rows):
            blank = np.full((1, *self.leaves[leaf].shape[1:]), padding, self.targets[leaf])
            found[valid:] = host_sums(blank)[0]
        return found


@dataclasses.dataclass
class Case:
    """One loader, and how it is used.

    Attributes:
        kind: of the source.
        data: its rows.
        sizes: rows of each batch of an epoch, where the source makes the batches; else empty.
        batch_size: rows of a full batch.
        sharding: for the loader.
        rowless: leaves that come as they are, neither cut nor padded: of batches that the source makes, those that stay on the host, and
            those that are not split while others are.
        options: for the loader.
        make_source: makes the source anew.
        keep: batches that the consumer holds on to; None: all of them.
        donates: the consumer donates each batch to a function.
        busy: the devices work between the batches.
        stops: after so many batches a run is broken off, and the next one begins.
        leaves_by: how it is broken off: "close", "drop", or "state": the next run goes on from there.
    """

    kind: str
    size: str
    data: Data
    sizes: list[int]
    batch_size: int
    sharding: Any
    rowless: set[int]
    options: dict[str, Any]
    make_source: Callable[[], Any]
    keep: int | None
    donates: bool
    busy: bool
    stops: list[int]
    leaves_by: str

    @property
    def pads(self) -> bool:
        return isinstance(self.options.get("remainder"), ps.Pad)

    @property
    def padding(self) -> float:
        return self.options["remainder"].value if self.pads else 0

    def rows_of_epoch(self) -> int:
        """Rows of an epoch that reach the consumer."""
        if self.options["remainder"] != "drop":
            return self.data.length
        if self.sizes:
            return sum(self.sizes) - (self.sizes[-1] if self.sizes[-1] < self.sizes[0] else 0)
        return self.data.length - self.data.length % self.batch_size

    def loader(self, **more: Any) -> ps.Loader:
        sized = {} if self.sizes else {"batch_size": self.batch_size}
        return ps.Loader(self.make_source(), self.sharding, **sized, **self.options, **more)

    def __str__(self) -> str:
        leaves = ", ".join(f"{leaf.dtype}{list(leaf.shape[1:])}" for leaf in self.data.leaves[:6])
        more = f" and {len(self.data.leaves) - 6} more" if len(self.data.leaves) > 6 else ""
        use = f"keep={self.keep} donates={self.donates} busy={self.busy} stops={self.stops} by {self.leaves_by}"
        options = " ".join(f"{key}={value}" for key, value in self.options.items())
        sizes = f"batches of {self.sizes}" if self.sizes else f"batch_size={self.batch_size}"
        return f"{self.kind}, {self.size}, {self.data.length} rows of {leaves}{more}; {sizes} {options}; {use}"


# -- data


def _random_leaf(random: Random, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    if dtype.kind == "b":
        return random.integers(0, 2, shape).astype(bool)
    if dtype.name in HALVES:
        return random.integers(0, 8, shape).astype(dtype)
    if dtype.name in ("int64", "uint64"):
        return random.integers(0, 1 << 31, shape).astype(dtype)
    if dtype.name == "float64":
        return random.standard_normal(shape)
    return np.frombuffer(random.bytes(math.prod(shape) * dtype.itemsize), dtype).reshape(shape)


def _laid_out(random: Random, leaf: Array) -> Array:
    """The same values in memory of another order, now and then."""
    way = random.integers(0, 8)
    if way == 0 and leaf.ndim > 1:
        return np.asfortranarray(leaf)
    if way == 1 and leaf.ndim > 1:
        return np.repeat(leaf, 2, axis=-1)[..., ::2]
    if way == 2:
        return np.ascontiguousarray(leaf[::-1])[::-1]
    return leaf.copy()


def _example_shape(random: Random, row_bytes: int, itemsize: int) -> tuple[int, ...]:
    count = max(1, int(row_bytes / itemsize * random.uniform(0.3, 1.0)))
    ndim = int(random.integers(0, 4)) if count <= 4 else int(random.integers(1, 4))
    shape: list[int] = []
    for _ in range(ndim - 1):
        shape.append(int(random.integers(1, 5)))
        count = max(1, count // shape[-1])
    return (*shape, max(1, count)) if ndim else ()


def _make_data(random: Random, size: str, length: int, row_bytes: int) -> Data:
    count = int(random.integers(6, 25)) if size == "many" else int(random.integers(1, 5))
    leaves: list[Array] = [np.arange(length, dtype=np.int32)]
    signatures: list[tuple[np.dtype[Any], tuple[int, ...]]] = []
    for _ in range(count):
        if len(signatures) < 4:  # after that one of those before: each costs compilations
            dtype = DTYPES[random.integers(len(DTYPES))]
            signatures.append((dtype, _example_shape(random, row_bytes // count, dtype.itemsize)))
        dtype, shape = signatures[-1] if len(leaves) <= 4 else signatures[random.integers(4)]
        leaves.append(_laid_out(random, _random_leaf(random, (length, *shape), dtype)))
    return Data(leaves, WRAPS[str(random.choice(list(WRAPS)))])


# -- where it goes


def _mesh(count: int, shape: tuple[int, ...], names: tuple[str, ...]) -> Mesh:
    return Mesh(np.array(_jax.devices()[:count]).reshape(shape), names)


def _choose_sharding(random: Random, data: Data, *, may_keep: bool) -> tuple[Any, int, set[int]]:
    """The sharding of a case, into how many pieces it cuts the rows, and which leaves it does not cut while it cuts others.

    Args:
        random: chooses.
        data: of the case.
        may_keep: leaves may stay on the host.
    """
    total = len(_jax.devices())
    count = int(random.choice([n for n in range(1, total + 1) if total % n == 0]))
    way = str(random.choice(["rows", "rows", "none", "replicated", "one device", "two axes", "mixed", "host" if may_keep else "rows"]))
    rows = NamedSharding(_mesh(count, (count,), ("data",)), PartitionSpec("data"))
    copies = NamedSharding(rows.mesh, PartitionSpec())
    if way == "none":
        return None, total, set()
    if way == "replicated":
        return copies, 1, set()
    if way == "one device":
        return SingleDeviceSharding(_jax.devices()[random.integers(total)]), 1, set()
    if way == "two axes" and count % 2 == 0:
        return data.wrap([_two_axes(leaf, count) for leaf in data.leaves]), count // 2, set()
    if way in ("mixed", "host"):
        others = {i for i in range(1, len(data.leaves)) if random.random() < 0.5}
        other = copies if way == "mixed" else ps.HOST
        return data.wrap([other if i in others else rows for i in range(len(data.leaves))]), count, others
    return rows, count, set()


def _two_axes(leaf: Array, count: int) -> NamedSharding:
    mesh = _mesh(count, (count // 2, 2), ("data", "model"))
    if leaf.ndim > 1 and leaf.shape[-1] % 2 == 0:
        return NamedSharding(mesh, PartitionSpec("data", *(None,) * (leaf.ndim - 2), "model"))
    return NamedSharding(mesh, PartitionSpec("data"))


# -- sources


class Rows:
    """A dataset; its examples are views of the data."""

    def __init__(self, data: Data) -> None:
        self._data = data

    def __len__(self) -> int:
        return self._data.length

    def __getitem__(self, row: int) -> Any:
        return self._data.batch(row)


class ManyRows(Rows):
    """A dataset that is asked for many rows at once."""

    def __getitems__(self, rows: list[int]) -> list[Any]:
        return [self[row] for row in rows]


class _Items:
    """Examples or batches, which lie in one buffer that is overwritten, or are views of the data.

    Args:
        data: the rows.
        parts: which rows, or which row, make each item.
        reuses: they are made in one buffer.
    """

    def __init__(self, data: Data, parts: Sequence[slice | int], *, reuses: bool) -> None:
        self._data = data
        self._parts = parts
        self._reuses = reuses

    def items(self) -> Iterator[Any]:
        leaves = self._data.leaves
        most = max((part.stop - part.start for part in self._parts if isinstance(part, slice)), default=1)
        buffers = [np.empty((most, *leaf.shape[1:]), leaf.dtype) for leaf in leaves]
        for part in self._parts:
            if not self._reuses:
                yield self._data.batch(part)
                continue
            count = part.stop - part.start if isinstance(part, slice) else 1
            for buffer, leaf in zip(buffers, leaves, strict=True):
                buffer[:count] = leaf[part]
            yield self._data.wrap([buffer[:count] if isinstance(part, slice) else buffer[0] for buffer in buffers])
            for buffer in buffers:
                buffer.reshape(-1).view(np.uint8).fill(1)


class Pulled(_Items):
    """An iterable."""

    def __iter__(self) -> Iterator[Any]:
        return self.items()


class PulledInLoop(_Items):
    """An async iterable."""

    async def __aiter__(self) -> AsyncIterator[Any]:
        for item in self.items():
            yield item


def _batches_of(random: Random, length: int, batch_size: int, split: int, *, vary: bool) -> list[int]:
    """Rows of each batch of an epoch that the source cuts itself."""
    if not vary:
        sizes = [batch_size] * (length // batch_size)
        return [*sizes, length % batch_size] if length % batch_size else sizes
    choices = [max(split, batch_size // part // split * split) for part in (1, 2, 3)]
    cut: list[int] = []
    while length - sum(cut) >= min(choices):
        cut.append(int(random.choice([size for size in choices if size <= length - sum(cut)])))
    return cut


def _source(kind: str, data: Data, sizes: list[int], sharding: Any) -> Callable[[], Any]:
    ends = np.cumsum([0, *sizes]).tolist()
    parts = [slice(start, stop) for start, stop in zip(ends, ends[1:], strict=False)]
    rows = list(range(data.length))
    named = [one for one in _jax.tree.leaves(sharding) if isinstance(one, NamedSharding)]
    names = named[0].mesh.axis_names if named else ("data",) if sharding is None else ()
    made: dict[str, Callable[[], Any]] = {
        "arrays": lambda: data.wrap(data.leaves),
        "on devices": lambda: ps.OnDevice(data.wrap(data.leaves)),
        "split rows": lambda: ps.OnDevice(data.wrap(data.leaves), PartitionSpec(names)),
        "dataset": lambda: Rows(data),
        "many rows": lambda: ManyRows(data),
        "list": lambda: [data.batch(row) for row in rows],
        "examples": lambda: Pulled(data, rows, reuses=True),
        "factory": lambda: lambda: iter(Pulled(data, rows, reuses=True)),
        "async examples": lambda: PulledInLoop(data, rows, reuses=True),
        "batches": lambda: Pulled(data, parts, reuses=True),
        "existing": lambda: Pulled(data, parts, reuses=False),
        "async batches": lambda: PulledInLoop(data, parts, reuses=True),
        "list of batches": lambda: [data.batch(part) for part in parts],
        "lengths": lambda: Pulled(data, parts, reuses=True),
    }
    return made[kind]


ON_DEVICES = ("on devices", "split rows")
BY_INDEX = ("arrays", *ON_DEVICES, "dataset", "many rows", "list")
BY_BATCH = ("batches", "existing", "async batches", "list of batches", "lengths")
KINDS = (*BY_INDEX, "examples", "factory", "async examples", *BY_BATCH)
WEIGHTS = {"arrays": 6.0, "existing": 2.0, "batches": 2.0, "on devices": 0.5, "split rows": 0.5}


# -- all together


def make_case(random: Random) -> Case:
    """A case: all from this generator."""
    weights = np.array([WEIGHTS.get(kind, 1.0) for kind in KINDS])
    kind = str(random.choice(KINDS, p=weights / weights.sum()))
    slow = kind in ("list", "examples", "factory", "async examples", "dataset", "many rows")  # a Python call a row
    size = str(random.choice(["tiny", "medium", "large", "many"], p=[0.25, 0.35, 0.2, 0.2]))
    most, most_row = SIZES["tiny" if size == "many" else size]
    row_bytes = int(random.uniform(0.1, 1.0) * most_row) + 8
    rows = int(np.clip(most * random.uniform(0.4, 1.0) / row_bytes, 8, 128 if slow else 1024))
    length = max(rows, MOST_PIECES * len(_jax.devices())) + int(rows * random.uniform(0.0, MOST_BATCHES[size] / 2))
    data = _make_data(random, size, length, row_bytes)
    sharding, split, uncut = _choose_sharding(random, data, may_keep=kind not in ON_DEVICES)
    pieces = int(random.choice([1, 1, 2, MOST_PIECES]))
    unit = split * pieces
    batch_size = max(unit, rows // unit * unit)
    sizes = _batches_of(random, length, batch_size, unit, vary=kind == "lengths") if kind in BY_BATCH else []
    if kind == "lengths":
        data = Data([leaf[: sum(sizes)] for leaf in data.leaves], data.wrap)
    options = _options(random, kind, data, sizes, batch_size, pieces)
    donates = bool(random.random() < 0.2)
    return Case(
        kind=kind,
        size=size,
        data=data,
        sizes=sizes,
        batch_size=sizes[0] if sizes else batch_size,
        sharding=sharding,
        rowless=uncut if sizes else set(),
        options=options,
        make_source=_source(kind, data, sizes, sharding),
        keep=0 if donates else [0, 1, 3, 6, None][random.integers(5)],
        donates=donates,
        busy=bool(random.random() < 0.3),
        stops=[int(random.integers(0, 6)) for _ in range(int(random.choice([0, 0, 1, 2])))],
        leaves_by=str(random.choice(["close", "drop", "state"])),
    )


def _options(random: Random, kind: str, data: Data, sizes: list[int], batch_size: int, pieces: int) -> dict[str, Any]:
    options: dict[str, Any] = {"depth": int(random.integers(1, 5)), "epochs": int(random.integers(1, 4))}
    options["remainder"] = ps.Pad(value=int(random.integers(0, 2))) if random.random() < 0.5 and kind != "lengths" else "drop"
    if (sizes and kind == "lengths") or (not sizes and data.length % batch_size == 0):  # else the last batch may not fit its sharding
        options["remainder"] = "keep" if random.random() < 0.3 else options["remainder"]
    if not sizes and data.length % batch_size == 0 and random.random() < 0.5:
        options["remainder"] = "error"
    if pieces > 1:
        options["microbatches"] = pieces
    if random.random() < 0.5:
        options["workers"] = int(random.integers(1, 9))
    if random.random() < 0.3:
        batch_bytes = max(sizes, default=batch_size) * (data.row_bytes + 1)
        options["host_memory"] = int(batch_bytes * random.uniform(2.0 if sizes and options["remainder"] != "keep" else 1.0, 4.0))
    if kind in BY_INDEX:
        options |= {"shuffle": bool(random.random() < 0.6), "seed": int(random.integers(0, 1 << 40))}
    if kind == "existing":
        options["reuses_buffers"] = bool(random.random() < 0.5)
    if random.random() < 0.15 and kind not in ON_DEVICES:
        options["transform"] = _same
    if random.random() < 0.2:
        options["device_transform"] = _same
    return options | _processes(random, kind, options)


def _processes(random: Random, kind: str, options: dict[str, Any]) -> dict[str, Any]:
    """Now and then worker processes, where there is something for them to do."""
    if random.random() < 0.25 and (kind in ("dataset", "many rows", "list") or "transform" in options):
        return {"workers": ps.Processes(int(random.integers(1, 3)))}
    return {}


def _same(batch: Any) -> Any:
    return batch
