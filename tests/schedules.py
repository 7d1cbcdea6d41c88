"""Random schedules: a source, settings, a fault and a consumer, all drawn from a seed, and a model in plain Python of what must come.

A row is known by its number, from which the values of its leaves follow. So the model says for each batch which rows it holds, and
nothing that is lost, doubled, changed or out of order goes unnoticed. `run(draw(seed))` raises AssertionError where they differ.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import dis
import functools
import gc
import itertools
import queue
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from types import FrameType
from typing import Any
from unittest import mock

import anyio
import anyio.lowlevel
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import prefetchshard as ps
from prefetchshard.testing import poisoned_staging
from support import (
    HANG_SECONDS,
    PACKAGE,
    Thread,
    _drops_exceptions,
    _looks_for_signals,
    ended,
    loader_threads,
    stacks,
    threads_left,
    wait_until,
)

P = PartitionSpec
BATCH = 16
"""Rows of a batch: few shapes, so that what JAX compiles is compiled once."""
BOUND_SECONDS = 20.0
"""How long closing may take on a busy machine; a thread that is given up on takes longer (`conftest.patient`)."""
STANDARD_LIBRARY = tuple(module.__file__ for module in (contextlib, queue, threading))


# -- what is drawn

INDEXED = ("arrays", "list", "dataset", "dataset of many", "on device")
ONE_SHOT = ("iterator", "prepared iterator", "generator", "stateful iterator", "async generator")
AGAIN = ("iterable", "stateful iterable", "async iterable")
FACTORIES = ("factory", "async factory")
KINDS = (*INDEXED, *ONE_SHOT, *AGAIN, *FACTORIES)
OWN_NEXT = ("iterator", "prepared iterator", "stateful iterator", "iterable", "stateful iterable", "async iterable")
"""Where `StopIteration` out of the source is the end."""
ARRAYS = ("arrays", "on device")

ERRORS: dict[str, Callable[[], BaseException]] = {
    "ValueError": lambda: ValueError("planted"),
    "IndexError": lambda: IndexError("planted"),
    "BaseException": lambda: Bare("planted"),
    "KeyboardInterrupt": KeyboardInterrupt,
    "SystemExit": lambda: SystemExit(3),
    "StopIteration": lambda: StopIteration(7),
    "StopAsyncIteration": StopAsyncIteration,
    "GeneratorExit": GeneratorExit,
    "CancelledError": asyncio.CancelledError,
}
CONTROL_FLOW = ("StopIteration", "StopAsyncIteration", "GeneratorExit", "CancelledError")
ENDS_OF_ITERATORS = ("StopIteration", "StopAsyncIteration")
CONSUMERS = (
    "for",
    "asyncio",
    "trio",
    "for, then asyncio",
    "cancelled on asyncio",
    "cancelled on trio",
    "threads",
    "break",
    "close",
    "close from another thread",
    "garbage",
    "resume",
    "Ctrl-C",
)


class Bare(BaseException):
    pass


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """What happens to one item of the source.

    Attributes:
        what: "raise", "gate" (it waits until all batches before it were taken), "shape" or "dtype" (another one), "None".
        where: "source", "transform", "collate" or "device_transform".
        at: the number of the item.
        epoch: of a factory, which knows it; elsewhere it happens whenever the item is asked for.
        error: a name in `ERRORS`.
    """

    what: str
    where: str
    at: int
    epoch: int = 0
    error: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """One program: what is read, how, what goes wrong, and who takes the batches.

    Attributes:
        sizes: rows of each item: 1 where the items are examples.
        by_rows: whether they are examples, so that there is a batch size.
        stops: after how many batches in all the consumer stops, resumes, or closes.
    """

    seed: int
    kind: str
    sizes: tuple[int, ...]
    by_rows: bool
    sharding: str
    remainder: str | None
    shuffle: bool
    epochs: int
    transform: str | None
    collates: bool
    transforms_on_devices: bool
    microbatches: int | None
    leaves: str
    reuses: bool
    poisons: bool
    hands_over: bool
    looks: bool
    options: tuple[tuple[str, Any], ...]
    fault: Fault | None
    consumer: str
    stops: tuple[int, ...]

    @property
    def rows(self) -> int:
        return sum(self.sizes)

    def __str__(self) -> str:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        values |= {"sizes": f"{len(self.sizes)} examples" if self.by_rows else list(self.sizes), "options": dict(self.options)}
        return f"schedule {self.seed}:\n" + "\n".join(f"    {name}: {value}" for name, value in values.items())


def draw(seed: int) -> Schedule:
    """The schedule of a seed."""
    chance = random.Random(seed)
    kind = chance.choice(KINDS)
    by_rows = kind in ARRAYS or chance.random() < 0.6
    sharding = chance.choice(["none", "split", "replicated", "4x2", "by leaf", "host leaf"][: 5 if kind == "on device" else 6])
    epochs = 1 if kind in ONE_SHOT else chance.choice([1, 1, 2, 3])
    shuffle = kind in INDEXED and chance.random() < 0.4
    microbatches = 2 if chance.random() < 0.15 else None
    remainder = chance.choice([None, None, "drop", "pad", "error", "keep"])
    sizes = (
        _example_rows(chance, kind, sharding, remainder, microbatches) if by_rows else _batch_rows(chance, shuffle, remainder, microbatches)
    )
    hooks = kind != "on device"
    plain = {
        "seed": seed,
        "kind": kind,
        "sizes": sizes,
        "by_rows": by_rows,
        "sharding": sharding,
        "remainder": remainder,
        "shuffle": shuffle,
        "epochs": epochs,
        "transform": chance.choice([None, None, "new", "in place"]) if hooks else None,
        "collates": hooks and by_rows and chance.random() < 0.25,
        "transforms_on_devices": sharding != "host leaf" and chance.random() < 0.15,
        "microbatches": microbatches,
        "leaves": "jax" if not by_rows and sharding != "host leaf" and chance.random() < 0.1 else "numpy",
    }
    plain["reuses"] = plain["leaves"] == "numpy" and kind not in (*ARRAYS, "list") and chance.random() < 0.3
    schedule = Schedule(
        **plain,
        poisons=chance.random() < 0.2,
        hands_over=chance.random() < 0.3,
        looks=chance.random() < 0.1,
        options=tuple(sorted(_options(chance, plain).items())),
        fault=None,
        consumer=chance.choice(CONSUMERS),
        stops=(),
    )
    schedule = dataclasses.replace(schedule, fault=_fault(chance, schedule))
    return dataclasses.replace(schedule, stops=tuple(sorted(chance.randrange(len(model(schedule).batches) + 1) for _ in range(2))))


def _example_rows(chance: random.Random, kind: str, sharding: str, remainder: str | None, microbatches: int | None) -> tuple[int, ...]:
    rows = BATCH * chance.choice([1, 2, 3, 4, 5]) + chance.choice([0, 0, 3, 8, 15])
    if remainder == "error" and kind in INDEXED:
        rows -= rows % BATCH
    if remainder == "keep":  # with a batch size: where the rows fit
        rows -= rows % (BATCH if microbatches else 1 if sharding == "replicated" else 8)
    if chance.random() < 0.05:
        rows = chance.choice([0, 5]) if remainder != "keep" else 0
    return (1,) * (0 if remainder == "error" and kind in INDEXED and rows < BATCH else rows)


def _batch_rows(chance: random.Random, shuffle: bool, remainder: str | None, microbatches: int | None) -> tuple[int, ...]:
    count = chance.choice([0, 1, 2, 3, 4, 5, 6])
    if not shuffle and not microbatches and remainder in (None, "keep") and chance.random() < 0.3:
        return tuple(chance.choice([8, 16, 24]) for _ in range(count))  # buckets
    short = chance.choice([3, 8, 15]) if count and not shuffle and chance.random() < 0.4 else 0
    return (BATCH,) * count + ((short,) if short else ())


def _options(chance: random.Random, plain: dict[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = {"depth": chance.choice([1, 2, 2, 5]), "epochs": plain["epochs"]}
    if plain["by_rows"]:
        options["batch_size"] = BATCH
    if plain["remainder"] is not None:
        options["remainder"] = plain["remainder"]
    if plain["shuffle"]:
        options |= {"shuffle": True, "seed": chance.randrange(2**40)}
    if plain["microbatches"]:
        options["microbatches"] = plain["microbatches"]
    if chance.random() < 0.8:
        options["workers"] = chance.choice([1, 1, 2, 3, 5])
    if not plain["reuses"] and chance.random() < 0.5:
        options["reuses_buffers"] = False
    if plain["kind"] != "on device":
        options |= {name: chance.choice([1200, "1MiB"]) for name in ("host_memory", "device_memory") if chance.random() < 0.1}
    if plain["kind"].startswith("stateful") and chance.random() < 0.5:
        options["snapshot_every"] = chance.choice([2, 3, None])
    return options


def _fault(chance: random.Random, schedule: Schedule) -> Fault | None:
    kind, by_rows = schedule.kind, schedule.by_rows
    if not schedule.sizes or (by_rows and schedule.rows < BATCH) or chance.random() < 0.35:
        return None
    places = ["source"] * 3 if kind not in (*ARRAYS, "list") else []
    places += ["transform"] if schedule.transform else []
    places += ["collate"] if schedule.collates else []
    places += ["device_transform"] if schedule.transforms_on_devices and chance.random() < 0.5 else []
    if not places:
        return None
    where = chance.choice(places)
    what = chance.choice(["raise", "raise", "raise", "gate", *_oddities(schedule, where)])
    if where == "device_transform":
        what = "raise"
    count = len(schedule.sizes)
    if not by_rows and (what in ("shape", "dtype") or where == "transform"):
        full = [i for i, size in enumerate(schedule.sizes) if size == BATCH]
        if not full or (what == "shape" and 0 in full):  # what is padded is told by the first batch
            return None
        at = chance.choice(full)
    elif by_rows and where in ("transform", "collate") or what in ("shape", "dtype", "None"):
        at = chance.randrange(count - count % BATCH if by_rows else count)  # not in rows that may be left out before it is noticed
    else:
        at = chance.randrange(count)
    names = [name for name in ERRORS if not (where == "source" and kind in OWN_NEXT and name in ENDS_OF_ITERATORS)]
    epoch = chance.randrange(schedule.epochs) if kind in FACTORIES and where == "source" else 0
    return Fault(what=what, where=where, at=at, epoch=epoch, error=chance.choice(names) if what == "raise" else "")


def _oddities(schedule: Schedule, where: str) -> list[str]:
    """What an item may be instead, where that is for the library to tell, and not for a hook of the user's."""
    if schedule.collates or schedule.reuses or where not in ("source", "transform"):
        return []
    if where == "transform":
        return ["None"]
    return ["shape", "dtype", *([] if schedule.transform else ["None"])]


# -- the model


@dataclasses.dataclass(frozen=True)
class Want:
    """A batch that must come: the numbers of its rows, and what was done to them."""

    epoch: int
    ids: tuple[int, ...]
    first_of: int
    """The number of its first item, where the source makes the batches."""
    padded: int = 0
    odd: str = ""


@dataclasses.dataclass(frozen=True)
class Model:
    """What must come of a schedule.

    Attributes:
        batches: in order.
        error: what comes after them: None (the end), "planted", or a type.
        refused: whether that comes from `Loader` itself.
        before_gate: the batches that must come while the gate is closed; None without one.
    """

    batches: tuple[Want, ...]
    error: str | type[BaseException] | None = None
    refused: bool = False
    before_gate: int | None = None


@functools.cache
def order(count: int, seed: int, epochs: int) -> tuple[tuple[int, ...], ...]:
    """The order of each epoch, as read alone and without any fault."""
    if count == 0:
        return ((),) * epochs
    loader = ps.Loader({"id": np.arange(count)}, ps.HOST, batch_size=count, shuffle=True, seed=seed, epochs=epochs)
    orders = tuple(tuple(np.asarray(batch["id"]).tolist()) for batch in loader)
    assert len(orders) == epochs
    assert all(sorted(each) == list(range(count)) for each in orders)
    return orders


@functools.cache
def model(schedule: Schedule) -> Model:
    """What must come of it, by the rules that the README states."""
    options = dict(schedule.options)
    count = len(schedule.sizes)
    orders = order(count, options["seed"], schedule.epochs) if schedule.shuffle else (tuple(range(count)),) * schedule.epochs
    batches: list[Want] = []
    for epoch, numbers in enumerate(orders):
        made, end = (_batches_of_rows if schedule.by_rows else _batches_of_items)(schedule, epoch, numbers)
        fault = _first_struck(schedule, made, epoch, end)
        if schedule.fault is not None and fault is not None:
            before = len(batches) + fault
            if schedule.fault.what == "gate":
                rest = model(dataclasses.replace(schedule, fault=None))
                return dataclasses.replace(rest, before_gate=before)
            batches += made[:fault]
            return Model(tuple(batches), _error(schedule.fault))
        batches += made
        if end is not None:
            return Model(tuple(batches), end, refused=end is ps.ConfigError)
    return Model(tuple(batches))


def _error(fault: Fault) -> str | type[BaseException]:
    return {"raise": "planted", "None": ps.PrefetchError}.get(fault.what, ps.BatchError)


def _batches_of_rows(schedule: Schedule, epoch: int, numbers: tuple[int, ...]) -> tuple[list[Want], type[BaseException] | None]:
    parts = [numbers[start : start + BATCH] for start in range(0, len(numbers), BATCH)]
    made = [Want(epoch, part, part[0]) for part in parts]
    if not made or len(parts[-1]) == BATCH or schedule.remainder == "keep":
        return made, None
    last = made.pop()
    if schedule.remainder == "pad":
        return [*made, dataclasses.replace(last, padded=BATCH - len(last.ids))], None
    if schedule.remainder == "error":
        return made, ps.BatchError
    if made:
        return made, None
    return made, ps.ConfigError if schedule.kind in INDEXED else ps.BatchError  # nothing but rows that were dropped


def _batches_of_items(schedule: Schedule, epoch: int, numbers: tuple[int, ...]) -> tuple[list[Want], type[BaseException] | None]:
    ends = list(itertools.accumulate(schedule.sizes))
    fault = schedule.fault
    made = [Want(epoch, tuple(range(ends[i] - schedule.sizes[i], ends[i])), i) for i in numbers]
    if fault is not None and fault.what in ("shape", "dtype") and (schedule.kind not in FACTORIES or fault.epoch == epoch):
        made = [dataclasses.replace(want, odd=fault.what if want.first_of == fault.at else "") for want in made]
    first, last = (len(made[0].ids), len(made[-1].ids)) if made else (0, 0)
    if schedule.remainder in (None, "keep"):
        fits = [i for i, want in enumerate(made) if len(want.ids) % _pieces(schedule)]
        return (made[: fits[0]], ps.PlacementError) if fits else (made, None)
    if last >= first:
        return made, None
    if schedule.remainder == "pad":
        return [*made[:-1], dataclasses.replace(made[-1], padded=first - last)], None
    return made[:-1], ps.BatchError if schedule.remainder == "error" else None


def _pieces(schedule: Schedule) -> int:
    """Into how many pieces the rows are split."""
    return (schedule.microbatches or 1) * {"4x2": 4, "by leaf": 4, "replicated": 1}.get(schedule.sharding, 8)


def _first_struck(schedule: Schedule, made: list[Want], epoch: int, end: type[BaseException] | None) -> int | None:
    """How many batches of an epoch come before the fault; None: it does not come in this epoch."""
    fault = schedule.fault
    if fault is None or (schedule.kind in FACTORIES and fault.where == "source" and epoch != fault.epoch):
        return None
    if fault.where == "device_transform":
        return 0 if made else None
    if not schedule.by_rows:
        if fault.what in ("shape", "dtype"):
            return None  # it comes as it is
        struck = [i for i, want in enumerate(made) if want.first_of == fault.at]
        if struck:
            return struck[0]
        if end is ps.PlacementError and fault.at != len(made):
            return None  # after a batch that could not be placed
        return len(made) if fault.where == "source" else None  # in a batch that is left out, or could not be placed
    struck = [i for i, want in enumerate(made) if fault.at in want.ids]
    if struck:
        return struck[0]
    return len(made) if schedule.kind not in INDEXED and fault.where == "source" else None


# -- values


def example_of(schedule: Schedule, row: int, epoch: int) -> dict[str, Any]:
    """What the source has in a row."""
    made = {"id": np.array(row, np.int32), "x": np.array([row + 0.5 + 1000 * epoch, -row], np.float32)}
    return {**made, "t": f"row {row}"} if schedule.sharding == "host leaf" else made


def batch_of(schedule: Schedule, rows: tuple[int, ...], epoch: int) -> dict[str, Any]:
    """What the source has in several rows."""
    ids = np.array(rows, np.int32)
    made: dict[str, Any] = {"id": ids, "x": np.stack([ids + np.float32(0.5 + 1000 * epoch), -ids], axis=-1).astype(np.float32)}
    return {**made, "t": np.array([f"row {row}" for row in rows], "<U8")} if schedule.sharding == "host leaf" else made


def made_odd(item: dict[str, Any], odd: str) -> dict[str, Any]:
    if odd == "shape":
        return {**item, "x": np.concatenate([item["x"], item["x"]], axis=-1)}
    return {**item, "x": item["x"].astype(np.int32)} if odd == "dtype" else item


def check_batch(schedule: Schedule, want: Want, batch: Any) -> None:
    """Each leaf of a batch, and its padding."""
    epoch = want.epoch if schedule.kind in FACTORIES else 0
    right = made_odd(batch_of(schedule, want.ids, epoch), want.odd)
    if schedule.transform:
        right["x"] = right["x"] + 1
    if schedule.transforms_on_devices:
        right["x"] = right["x"] * 2
    valid = len(want.ids)
    unpadded = ("t",) if schedule.collates or not schedule.by_rows else ()  # a leaf on the host that is not made of examples
    if schedule.remainder == "pad":
        mask = np.asarray(batch["mask"]).reshape(-1)
        assert mask.tolist() == [True] * valid + [False] * want.padded, mask
    assert set(batch) == {*right, *(["mask"] if schedule.remainder == "pad" else [])}
    for name, leaf in right.items():
        got = np.asarray(batch[name])
        got = got.reshape(-1, *leaf.shape[1:])
        assert len(got) == valid + (0 if name in unpadded else want.padded), (name, got.shape)
        assert name == "t" or got.dtype == leaf.dtype, (name, got.dtype)
        assert got[:valid].tolist() == leaf.tolist(), f"leaf {name}: {got[:valid].tolist()}, not {leaf.tolist()}"
        assert name == "t" or not got[valid:].any(), f"leaf {name} is not padded by zeros"
    if schedule.microbatches:
        assert batch["id"].shape == (2, (valid + want.padded) // 2)


@functools.cache
def mesh(*sizes: int) -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(sizes), ("data", "model")[: len(sizes)])


def sharding_of(schedule: Schedule) -> Any:
    split = NamedSharding(mesh(8), P("data"))
    return {
        "none": None,
        "split": split,
        "replicated": NamedSharding(mesh(8), P()),
        "4x2": NamedSharding(mesh(4, 2), P("data")),
        "by leaf": {"id": NamedSharding(mesh(4, 2), P("data")), "x": NamedSharding(mesh(4, 2), P("data", "model"))},
        "host leaf": {"id": split, "x": split, "t": ps.HOST},
    }[schedule.sharding]


def twice(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "x": batch["x"] * 2}


# -- sources and hooks that do as the schedule says


class Acts:
    """The items of a schedule, with its fault; its gate; and its error, one object.

    Thread safety: every method may be called from any thread.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        fault = self.fault = schedule.fault
        self.error = ERRORS[fault.error]() if fault is not None and fault.error else None
        self.gate = threading.Event()
        ends = list(itertools.accumulate(schedule.sizes))
        self._rows = [tuple(range(end - size, end)) for end, size in zip(ends, schedule.sizes, strict=True)]
        self._local = threading.local()

    def strike(self, where: str, item: int, epoch: int) -> None:
        """What is to happen before the item is given."""
        fault = self.fault
        if fault is None or fault.where != where or fault.at != item or (epoch != fault.epoch and self.schedule.kind in FACTORIES):
            return
        if self.error is not None:
            raise self.error
        if fault.what == "gate":
            assert self.gate.wait(2 * HANG_SECONDS), "the gate was not opened"

    async def strike_in_loop(self, item: int, epoch: int) -> None:
        """The same in an async source, which must not block its loop."""
        await anyio.lowlevel.checkpoint()
        fault = self.fault
        if fault is not None and fault.what == "gate" and (fault.at, fault.epoch) == (item, epoch):
            while not self.gate.is_set():  # noqa: ASYNC110 - other threads open it
                await anyio.sleep(0.001)
        self.strike("source", item, epoch)

    def item(self, number: int, epoch: int, buffers: Any) -> Any:
        """An item as the source makes it; `buffers` holds the memory that it uses again."""
        schedule, fault = self.schedule, self.fault
        epoch = epoch if schedule.kind in FACTORIES else 0
        made = example_of(schedule, number, epoch) if schedule.by_rows else batch_of(schedule, self._rows[number], epoch)
        if (
            fault is not None
            and fault.where == "source"
            and fault.at == number
            and (epoch == fault.epoch or schedule.kind not in FACTORIES)
        ):
            if fault.what == "None":
                return None
            made = made_odd(made, fault.what)
        if schedule.reuses:
            made = self._again(made, buffers)
        return jax.tree.map(jax.device_put, made) if schedule.leaves == "jax" else made

    def _again(self, made: dict[str, Any], buffers: Any) -> dict[str, Any]:
        held = vars(buffers).setdefault("held", {})
        for name in ("id", "x"):
            key = (name, made[name].shape)
            into = held.setdefault(key, np.empty_like(made[name]))
            into[...] = made[name]
            made = {**made, name: into}
        return made

    def by_number(self, number: int) -> Any:
        self.strike("source", number, 0)
        return self.item(number, 0, self._local)

    def stream(self, epoch: int, start: int = 0) -> Iterator[Any]:
        buffers = threading.local()
        buffers.held = {}
        memory = Memory()
        for number in range(start, len(self.schedule.sizes)):
            self.strike("source", number, epoch)
            yield self.item(number, epoch, memory)

    async def astream(self, epoch: int) -> AsyncIterator[Any]:
        memory = Memory()
        for number in range(len(self.schedule.sizes)):
            await self.strike_in_loop(number, epoch)
            yield self.item(number, epoch, memory)

    def transform(self, item: Any) -> Any:
        ids = np.asarray(item["id"]).reshape(-1)
        self._strike_at(ids, "transform")
        if self._is_none(ids, "transform"):
            return None
        if self.schedule.transform == "in place" and isinstance(item["x"], np.ndarray):
            item["x"] += 1
            return item
        return {**item, "x": item["x"] + np.asarray(1, item["x"].dtype)}

    def collate(self, examples: Any) -> Any:
        made = examples
        if isinstance(examples, list):
            made = {name: np.stack([np.asarray(example[name]) for example in examples]) for name in examples[0]}
        self._strike_at(made["id"], "collate")
        return made

    def device_transform(self, batch: Any) -> Any:
        self.strike("device_transform", self.fault.at if self.fault else 0, 0)
        return twice(batch)

    def _strike_at(self, ids: np.ndarray, where: str) -> None:
        if self._is_struck(ids, where):
            assert self.fault is not None
            self.strike(where, self.fault.at, self.fault.epoch)

    def _is_none(self, ids: np.ndarray, where: str) -> bool:
        return self.fault is not None and self.fault.what == "None" and self._is_struck(ids, where)

    def _is_struck(self, ids: np.ndarray, where: str) -> bool:
        fault = self.fault
        return fault is not None and fault.where == where and self._rows[fault.at][0] in ids


class Memory:
    """Holds the arrays that a stream uses again."""


class Numbered:
    def __init__(self, acts: Acts) -> None:
        self.acts = acts

    def __len__(self) -> int:
        return len(self.acts.schedule.sizes)

    def __getitem__(self, number: int) -> Any:
        return self.acts.by_number(number)


class Many(Numbered):
    def __getitems__(self, numbers: list[int]) -> list[Any]:
        if self.acts.schedule.reuses:
            return [jax.tree.map(np.array, self[number]) for number in numbers]
        return [self[number] for number in numbers]


class OwnNext:
    """An iterator that is no generator, and can say where it stands."""

    def __init__(self, acts: Acts) -> None:
        self.acts = acts
        self.at = 0
        self.memory = Memory()

    def __iter__(self) -> OwnNext:
        return self

    def __next__(self) -> Any:
        if self.at >= len(self.acts.schedule.sizes):
            raise StopIteration
        at, self.at = self.at, self.at + 1
        self.acts.strike("source", at, 0)
        return self.acts.item(at, 0, self.memory)


class Stateful(OwnNext):
    def get_state(self) -> dict[str, Any]:
        return {"at": self.at}

    def set_state(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Prepared:
    """An iterator that sets itself up when it is asked for one."""

    def __init__(self, acts: Acts) -> None:
        self.acts = acts

    def __iter__(self) -> Prepared:
        self.items = OwnNext(self.acts)
        return self

    def __next__(self) -> Any:
        return next(self.items)


class Again:
    def __init__(self, begin: Callable[[], Any]) -> None:
        self.begin = begin

    def __iter__(self) -> Any:
        return self.begin()


class AsyncAgain:
    """An async iterable whose iterators are no generators."""

    def __init__(self, acts: Acts) -> None:
        self.acts = acts

    def __aiter__(self) -> AsyncNext:
        return AsyncNext(self.acts)


class AsyncNext:
    def __init__(self, acts: Acts) -> None:
        self.items = OwnNext(acts)

    def __aiter__(self) -> AsyncNext:
        return self

    async def __anext__(self) -> Any:
        items = self.items
        if items.at < len(items.acts.schedule.sizes):
            at, items.at = items.at, items.at + 1
            await items.acts.strike_in_loop(at, 0)
            return items.acts.item(at, 0, items.memory)
        raise StopAsyncIteration


def source_of(acts: Acts) -> Any:
    """A new source, which acts by the schedule."""
    schedule = acts.schedule
    numbers = range(len(schedule.sizes))

    def arrays() -> Any:
        made = batch_of(schedule, tuple(numbers), 0)
        return ps.OnDevice(made) if schedule.kind == "on device" else made

    makers: dict[str, Callable[[], Any]] = {
        "arrays": arrays,
        "on device": arrays,
        "list": lambda: [acts.item(number, 0, Memory()) for number in numbers],
        "dataset": lambda: Numbered(acts),
        "dataset of many": lambda: Many(acts),
        "iterator": lambda: OwnNext(acts),
        "prepared iterator": lambda: Prepared(acts),
        "generator": lambda: acts.stream(0),
        "stateful iterator": lambda: Stateful(acts),
        "async generator": lambda: acts.astream(0),
        "iterable": lambda: Again(lambda: OwnNext(acts)),
        "stateful iterable": lambda: Again(lambda: Stateful(acts)),
        "async iterable": lambda: AsyncAgain(acts),
        "factory": lambda: lambda epoch: acts.stream(epoch),
        "async factory": lambda: lambda epoch: acts.astream(epoch),
    }
    return makers[schedule.kind]()


# -- Ctrl-C


class Struck(KeyboardInterrupt):
    """The one that the consumer is interrupted by, not one that the source raises."""


class Strikes:
    """Ctrl-C at random places: where the interpreter looks for signals in the package, or in the standard library called from there."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self.count = 0

    def call(self, function: Callable[[], Any]) -> Any:
        """Calls it, and interrupts it in most calls.

        Raises:
            Struck: it was interrupted.
        """
        left, last, struck = self._chance.choice([0, self._chance.randrange(1, 12), self._chance.randrange(1, 120)]), "", False

        def trace(frame: FrameType, event: str, arg: object) -> Any:
            nonlocal left, last, struck
            if event == "call" and not _is_ours(frame):
                return None
            frame.f_trace_opcodes = True
            if event == "call":
                last = "RESUME"
            if event == "opcode":
                now = dis.opname[frame.f_code.co_code[frame.f_lasti]]
                if _looks_for_signals(last, now):
                    left -= 1
                    if left == 0:
                        if _drops_exceptions(frame):
                            left = 1
                        else:
                            struck = True
                            sys.settrace(None)
                            raise Struck
                last = now
            return trace

        if left == 0:
            return function()
        sys.settrace(trace)
        try:
            answer = function()
        except Struck:
            self.count += 1
            raise
        finally:
            sys.settrace(None)
        assert not struck, "Ctrl-C was swallowed"
        return answer


def _is_ours(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename in STANDARD_LIBRARY:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(str(PACKAGE))


# -- consumers


class Trial:
    """A schedule that is being run: makes its loaders, and compares what comes with the model.

    Thread safety: each method may be called from any thread; batches are compared in the order in which they are recorded.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.model = model(schedule)
        self.acts = Acts(schedule)
        self.chance = random.Random(f"{schedule.seed} consumer")
        self.kept: list[Any] = []
        self.open_gate()

    @property
    def wanted(self) -> tuple[Want, ...]:
        return self.model.batches

    def loader(self, state: ps.LoaderState | None = None) -> ps.Loader:
        schedule = self.schedule
        options = dict(schedule.options)
        if state is not None:  # with what does not change the batches
            options |= {"depth": self.chance.choice([1, 2, 4]), "workers": self.chance.choice([1, 2, 4])}
        if schedule.transform:
            options["transform"] = self.acts.transform
        if schedule.collates:
            options["collate"] = self.acts.collate
        if schedule.transforms_on_devices:
            options["device_transform"] = self.acts.device_transform
        return ps.Loader(source_of(self.acts), sharding_of(schedule), state=state, **options)

    def iterator(self, loader: ps.Loader) -> ps.LoaderIterator:
        self.look(loader)
        return iter(loader)

    def look(self, loader: ps.Loader) -> None:
        """Asks what a batch looks like, where that can be told: no batch is lost by it."""
        if self.schedule.looks and self.wanted and self.model.before_gate != 0 and not self.kept:
            assert loader.spec()["id"].dtype == np.int32

    def open_gate(self) -> None:
        """Opens it, where all batches before it were taken."""
        if self.model.before_gate is not None and len(self.kept) >= self.model.before_gate:
            self.acts.gate.set()

    def take(self, batch: Any, iterator: ps.LoaderIterator) -> None:
        """The next batch came."""
        number = len(self.kept)
        assert number < len(self.wanted), f"batch {number} came after the last"
        want = self.wanted[number]
        try:
            check_batch(self.schedule, want, batch)
        except AssertionError as error:
            error.add_note(f"in batch {number} of {len(self.wanted)}")
            raise
        self.kept.append(batch)
        position = iterator.position
        assert position is not None
        assert (position.step, position.epoch) == (number, want.epoch)
        state = iterator.state()
        assert (state.step, state.epoch) == (number + 1, want.epoch)
        assert state.batches == sum(other.epoch == want.epoch for other in self.wanted[: number + 1])
        self.open_gate()

    def is_right(self, error: BaseException | None) -> bool:
        """Whether it is what must come after the last batch."""
        right = self.model.error
        if right is None or error is None:
            return right is None and error is None
        if isinstance(right, type):
            return isinstance(error, right)
        planted = self.acts.error
        return error.__cause__ is planted and isinstance(error, RuntimeError) if self._is_control_flow() else error is planted

    def _is_control_flow(self) -> bool:
        fault = self.schedule.fault
        return fault is not None and fault.error in CONTROL_FLOW

    def end(self, error: BaseException | None, iterator: ps.LoaderIterator) -> None:
        """Nothing more came."""
        if error is not None and not self.is_right(error):
            raise error
        assert len(self.kept) == len(self.wanted), f"{len(self.kept)} batches came, not {len(self.wanted)}; then {error!r}"
        assert self.is_right(error), f"after the last batch came {error!r}, not {self.model.error}"
        if error is not None:
            assert iterator.state().step == len(self.kept)
        for _ in range(2):
            assert self.is_right(caught(lambda: next(iterator)))
        self.unchanged()

    def unchanged(self) -> None:
        """What was handed out is still what it was."""
        for want, batch in zip(self.wanted, self.kept, strict=False):
            check_batch(self.schedule, want, batch)


def caught(step: Callable[[], object]) -> BaseException | None:
    """What a call raised; None at the end of the data."""
    try:
        step()
    except (StopIteration, StopAsyncIteration):
        return None
    except BaseException as error:  # noqa: BLE001 - any kind is planted
        return error
    raise AssertionError("a batch came after the last")


def some(trial: Trial, iterator: ps.LoaderIterator, limit: int | None = None) -> tuple[bool, BaseException | None]:
    """Takes batches, until there are so many in all. Whether the run ended before, and by what."""
    while limit is None or len(trial.kept) < limit:
        try:
            batch = next(iterator)
        except StopIteration:
            return True, None
        except BaseException as error:  # noqa: BLE001 - any kind is planted
            return True, error
        trial.take(batch, iterator)
    return False, None


async def asome(trial: Trial, iterator: ps.LoaderIterator, limit: int | None = None) -> tuple[bool, BaseException | None]:
    while limit is None or len(trial.kept) < limit:
        try:
            batch = await anext(iterator)
        except StopAsyncIteration:
            return True, None
        except BaseException as error:  # noqa: BLE001 - any kind is planted
            return True, error
        trial.take(batch, iterator)
    return False, None


def closed_soon(trial: Trial, close: Callable[[], object], iterator: ps.LoaderIterator) -> None:
    """Closes in bounded time; a gate is opened as soon as closing has begun."""

    def open_gate() -> None:
        wait_until(lambda: not repr(iterator).startswith("<LoaderIterator live"))
        trial.acts.gate.set()

    opener = Thread(open_gate)
    began = time.monotonic()
    close()
    took = time.monotonic() - began
    opener.returned()
    assert took < BOUND_SECONDS, f"closing took {took:.1f} s"


def by_for(trial: Trial) -> None:
    loader = trial.loader()
    iterator = trial.iterator(loader)
    _, error = some(trial, iterator)
    trial.end(error, iterator)


def on_loop(backend: str) -> Callable[[Trial], None]:
    async def main(trial: Trial) -> None:
        async with trial.loader() as loader:
            iterator = aiter(loader)
            _, error = await asome(trial, iterator)
            trial.end(error, iterator)

    return lambda trial: anyio.run(main, trial, backend=backend)


def for_then_asyncio(trial: Trial) -> None:
    loader = trial.loader()
    iterator = trial.iterator(loader)
    ended, error = some(trial, iterator, trial.schedule.stops[0])
    if not ended:
        _, error = anyio.run(asome, trial, iterator)
    trial.end(error, iterator)


def cancelled_on(backend: str) -> Callable[[Trial], None]:
    """A wait for a batch is cancelled after some turns of the loop; the loop goes on."""

    async def cancel(scope: anyio.CancelScope, turns: int) -> None:
        for _ in range(turns):
            await anyio.lowlevel.checkpoint()
        scope.cancel()

    async def main(trial: Trial) -> None:
        async with trial.loader() as loader, anyio.create_task_group() as tasks:
            iterator = aiter(loader)
            is_over, error, tries = False, None, 0
            while not is_over:
                tries += 1
                with anyio.CancelScope() as scope:
                    if tries < 60:
                        tasks.start_soon(cancel, scope, trial.chance.choice([0, 1, 2, 3, 5, 50]))
                    batch = None
                    try:
                        batch = await anext(iterator)
                    except StopAsyncIteration:
                        is_over = True
                    except anyio.get_cancelled_exc_class():
                        raise
                    except BaseException as raised:  # noqa: BLE001 - any kind is planted
                        is_over, error = True, raised
                    if batch is not None:
                        trial.take(batch, iterator)
            trial.end(error, iterator)

    return lambda trial: anyio.run(main, trial, backend=backend)


def by_threads(trial: Trial) -> None:
    """Several threads take from one iterator: each batch goes to one of them, and each hears of the end."""
    loader = trial.loader()
    iterator = trial.iterator(loader)
    count = trial.chance.choice([2, 3])
    start = threading.Barrier(count)
    lock = threading.Lock()
    came: list[Any] = []

    def consume() -> tuple[list[Any], BaseException | None]:
        mine: list[Any] = []
        start.wait()
        try:
            for batch in iterator:
                mine.append(batch)
                with lock:
                    came.append(batch)
                    if trial.model.before_gate is not None and len(came) >= trial.model.before_gate:
                        trial.acts.gate.set()
        except BaseException as error:  # noqa: BLE001 - any kind is planted
            return mine, error
        return mine, None

    threads = [Thread(consume) for _ in range(count)]
    parts = [thread.returned() for thread in threads]
    wanted = [(want.epoch if trial.schedule.kind in FACTORIES else 0, want.ids) for want in trial.wanted]
    for mine, error in parts:
        if error is not None and not trial.is_right(error):
            raise error
        assert trial.is_right(error), f"a thread got {error!r} after the last batch, not {trial.model.error}"
        rest = iter(wanted)
        assert all(key_of(trial, batch) in rest for batch in mine), "a thread got batches out of order"
    keys = [key_of(trial, batch) for mine, _ in parts for batch in mine]
    assert Counter(keys) == Counter(wanted), f"came {keys}, not {wanted}"
    by_key = dict(zip(wanted, trial.wanted, strict=True))
    for mine, _ in parts:
        for batch in mine:
            check_batch(trial.schedule, by_key[key_of(trial, batch)], batch)
    assert iterator.stats().batches == len(wanted)
    position = iterator.position
    assert (-1 if position is None else position.step) == len(wanted) - 1


def key_of(trial: Trial, batch: Any) -> tuple[int, tuple[int, ...]]:
    """Which batch it is: the epoch, where its values tell, and the numbers of its rows."""
    mask = np.asarray(batch["mask"]).reshape(-1) if "mask" in batch else slice(None)
    ids = np.asarray(batch["id"]).reshape(-1)[mask]
    x = np.asarray(batch["x"]).reshape(len(np.asarray(batch["id"]).reshape(-1)), -1)[mask]
    return int(x[0, 0] // (2 if trial.schedule.transforms_on_devices else 1)) // 1000, tuple(ids.tolist())


def by_break(trial: Trial) -> None:
    """The loop is left, and nobody holds its iterator any more."""
    with trial.loader() if trial.chance.random() < 0.5 else contextlib.nullcontext(trial.loader()) as loader:
        trial.look(loader)
        if trial.schedule.stops[0] > 0:
            for count, batch in enumerate(loader, 1):
                trial.kept.append(batch)
                trial.open_gate()
                if count == trial.schedule.stops[0]:
                    break
        trial.acts.gate.set()
    assert loader.state().step == len(trial.kept) == trial.schedule.stops[0]
    trial.unchanged()


def by_close(trial: Trial) -> None:
    loader = trial.loader()
    iterator = trial.iterator(loader)
    over, error = some(trial, iterator, trial.schedule.stops[0])
    if over:
        trial.end(error, iterator)
        return
    state = iterator.state()
    closed_soon(trial, iterator.close if trial.chance.random() < 0.5 else loader.close, iterator)
    assert ended(iterator)
    assert iterator.state() == state
    trial.unchanged()


def by_close_from_another_thread(trial: Trial) -> None:
    """While this one takes batches, or waits for one."""
    loader = trial.loader()
    iterator = trial.iterator(loader)
    stop = trial.schedule.stops[0]
    gated = trial.model.before_gate is not None

    def close() -> None:
        wait_until(lambda: len(trial.kept) >= stop or not repr(iterator).startswith("<LoaderIterator live"))
        closed_soon(trial, iterator.close, iterator)

    closer = Thread(close)
    _, error = some(trial, iterator)
    closer.returned()
    if gated:
        trial.acts.gate.set()
    if error is not None:
        trial.end(error, iterator)
    else:
        assert ended(iterator) or trial.model.error is not None
        assert len(trial.kept) >= stop or len(trial.kept) == len(trial.wanted)
        trial.unchanged()


def by_garbage(trial: Trial) -> None:
    """The iterator is in a cycle that nobody holds."""

    def use() -> None:
        cycle: list[Any] = [trial.iterator(trial.loader())]
        cycle.append(cycle)
        over, error = some(trial, cycle[0], trial.schedule.stops[0])
        if over:
            trial.end(error, cycle[0])

    use()
    gc.collect(1)
    trial.acts.gate.set()
    trial.unchanged()


def by_resume(trial: Trial) -> None:
    """Broken off, and gone on with in a new loader over a new source; twice."""
    state: ps.LoaderState | None = None
    for stop in (*trial.schedule.stops, None):
        loader = trial.loader(state)
        iterator = iter(loader)
        if state is not None:
            assert iterator.state() == state
        over, error = some(trial, iterator, stop)
        if over:
            trial.end(error, iterator)
            return
        saved = iterator.state()
        state = ps.LoaderState.decode(saved.encode())
        assert state == saved
        closed_soon(trial, iterator.close, iterator)
        trial.acts.gate.clear()
        trial.open_gate()
    raise AssertionError("the run did not end")


def by_interrupts(trial: Trial) -> None:
    """Ctrl-C at random moments in `iter`, in `next` and in `close`; the same iterator goes on and still gives every batch."""
    strikes = Strikes(trial.chance)
    loader = trial.loader()

    def again(function: Callable[[], Any]) -> Any:
        for _ in range(20):
            try:
                return strikes.call(function)
            except Struck:
                pass
        return function()

    iterator = again(lambda: iter(loader))
    stop = trial.chance.choice([None, trial.schedule.stops[0]])
    while stop is None or len(trial.kept) < stop:
        try:
            batch = again(iterator.__next__)
        except StopIteration:
            return trial.end(None, iterator)
        except BaseException as error:  # noqa: BLE001 - any kind is planted
            return trial.end(error, iterator)
        trial.take(batch, iterator)
    trial.acts.gate.set()
    closed_soon(trial, lambda: (again(iterator.close), iterator.close()), iterator)
    assert ended(iterator)
    return trial.unchanged()


BY_CONSUMER: dict[str, Callable[[Trial], None]] = {
    "for": by_for,
    "asyncio": on_loop("asyncio"),
    "trio": on_loop("trio"),
    "for, then asyncio": for_then_asyncio,
    "cancelled on asyncio": cancelled_on("asyncio"),
    "cancelled on trio": cancelled_on("trio"),
    "threads": by_threads,
    "break": by_break,
    "close": by_close,
    "close from another thread": by_close_from_another_thread,
    "garbage": by_garbage,
    "resume": by_resume,
    "Ctrl-C": by_interrupts,
}


def run(schedule: Schedule) -> None:
    """Runs it, in a thread of its own, so that one that hangs is told.

    Raises:
        AssertionError: what came is not what must come, or something hangs, or a thread is left.
    """
    trial = Trial(schedule)
    with contextlib.ExitStack() as stack:
        if schedule.hands_over:
            stack.enter_context(mock.patch("prefetchshard.reading.batch_copying.HAND_OVER_SECONDS", -1.0))
        rings = stack.enter_context(poisoned_staging()) if schedule.poisons else []
        consumer = Thread(lambda: _consume(trial))
        consumer.join(HANG_SECONDS)
        if consumer.is_alive():
            words = stacks(threading.enumerate())
            trial.acts.gate.set()
            raise AssertionError(f"hangs\n{schedule}\n{words}")
        error = consumer.error
        while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        if error is not None:
            trial.acts.gate.set()
            raise AssertionError(f"{type(error).__name__}: {error}\n{schedule}\n{model(schedule)}") from error
        if trial.acts.error is not None:
            trial.acts.error.__traceback__ = None  # it holds the iterator, which a KeyboardInterrupt does not end
        left = threads_left() if loader_threads() else []
        assert not left, f"threads are left\n{schedule}\n{stacks(left)}"
        for ring in rings:
            ring.check()


def _consume(trial: Trial) -> None:
    """Not the trial, and nothing that it holds, outlives the call."""
    if trial.model.refused:
        try:
            trial.loader()
        except ps.ConfigError:
            return
        raise AssertionError("the loader was not refused")
    BY_CONSUMER[trial.schedule.consumer](trial)
