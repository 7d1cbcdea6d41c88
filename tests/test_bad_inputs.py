"""Bad inputs of the public names, one a row: what is raised, what it says, and when; no earlier moment is missed, and nothing is lost.

A row says its moment: where the object is made, at `iter`, or at `next` after so many good batches. Bad inputs that have tests of their
own: names of other libraries (test_other_names), leaves that no device holds (test_leaves), bytes of states (test_state).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import math
import types
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import prefetchshard as ps
from prefetchshard.testing import check_source
from support import threads_left

MADE: Final = "where it is made"
ITER: Final = "at iter"
NEVER: Final = "never"
P = PartitionSpec
X = np.zeros((16, 4), np.float32)
BATCH = {"x": X[:8], "y": np.zeros(8, np.int32)}
HUGE = 10**5000  # Python writes no integer of so many digits
LESS = -HUGE


class Row(NamedTuple):
    """Attributes:
    name: for the id of the test.
    when: MADE, ITER, or how many good batches come before the error.
    kind: the exact type.
    says: parts of the text and of its notes, in this order; `...` stands between them.
    call: makes a loader, or what else is refused.
    """

    name: str
    when: str | int
    kind: type[BaseException]
    says: str
    call: Callable[[], Any]


class Counted:
    """An iterator that knows how often it was asked."""

    def __init__(self, items: Any) -> None:
        self.asked = 0
        self._items = iter(items)
        OPENED.append(self)

    def __iter__(self) -> Counted:
        return self

    def __next__(self) -> Any:
        self.asked += 1
        return next(self._items)


OPENED: list[Counted] = []
"""The iterators that the row of the running test made."""


def outcome(call: Callable[[], Any]) -> tuple[BaseException | None, str | int]:
    """What is raised, and when."""
    try:
        made = call()
    except Exception as error:  # noqa: BLE001 - the rows say which
        return error, MADE
    if not isinstance(made, ps.Loader):
        return None, NEVER
    try:
        iterator = iter(made)
    except Exception as error:  # noqa: BLE001 - as above
        return error, ITER
    with contextlib.closing(iterator):
        for count in range(20):
            try:
                next(iterator)
            except StopIteration:
                break
            except Exception as error:  # noqa: BLE001 - as above
                return error, count
    return None, NEVER


def batches(*items: Any) -> Counted:
    return Counted(items or (BATCH, BATCH))


def pre(**options: Any) -> Any:
    """A loader over an iterator of batches."""
    return ps.prefetch(batches(), **{"sharding": P("data"), **options})


def rows(**options: Any) -> Any:
    """A loader over an iterator of examples."""
    return ps.Loader(Counted({"x": x} for x in X), **{"sharding": P("data"), "batch_size": 8, **options})


def arrays(source: Any = X, **options: Any) -> Any:
    return ps.Loader(source, **{"sharding": P("data"), "batch_size": 8, **options})


def late(call: Any, *args: Any, **options: Any) -> Callable[[], Any]:
    return functools.partial(call, *args, **options)


def named(value: Any) -> str:
    """The value as code, at most 40 characters of it."""
    return "10**5000" if value is HUGE else "-10**5000" if value is LESS else repr(value).replace("\n", "")[:40]


# --- settings: every argument of a loader by itself

COUNT = "an integer, at least 1"
NO_COUNTS = ("8", b"8", 8.0, math.nan, math.inf, 1j, True, np.True_, np.float32(8), [8], np.array([8]), 0, -1, LESS)
NO_BYTES = ("", "much", "2XB", "-1", "0GB", "1e9", "nan", b"2GiB", "9" * 400 + "TB", 0, -1, 1.5, math.nan, True, [1], np.float32(3), LESS)
NO_SWITCHES = ("True", 1, 0, None, [], np.True_)
REMAINDERS = "one of 'auto', 'drop', 'keep', 'error', 'pad' or ps.Pad(...)"
NO_FUNCTIONS = ("f", 3, 0, True, [], {}, X)

SETTINGS: list[tuple[str, str, tuple[Any, ...]]] = [
    ("batch_size", COUNT, NO_COUNTS),
    ("batch_size", "an integer from 1 to 9223372036854775807", (2**63, HUGE)),
    ("depth", COUNT, (*NO_COUNTS, None)),
    ("read_ahead", f"{COUNT}; None: as far as the other settings allow", NO_COUNTS),
    ("workers", f"{COUNT}; 'auto' to choose", (*NO_COUNTS, None, "many", "Auto")),
    ("workers", "an integer from 1 to 1024; 'auto' to choose", (1025, HUGE)),
    ("epochs", f"{COUNT}; None for ever", NO_COUNTS),
    ("microbatches", COUNT, NO_COUNTS),
    ("snapshot_every", f"{COUNT}; None: never", NO_COUNTS),
    ("stall_warning_seconds", "a positive number of seconds; None: never", (0, -1, -0.5, math.nan, "60", True, HUGE, [1])),
    ("seed", "an integer, at least 0", (-1, LESS, 1.5, None, "1", True, math.nan, np.float64(1), [1])),
    ("device_memory", 'a positive number of bytes, or a text such as "2GiB" or "500MB"', NO_BYTES),
    ("host_memory", 'a positive number of bytes, or a text such as "2GiB" or "500MB"', NO_BYTES),
    ("shuffle", "True or False", NO_SWITCHES),
    ("reuses_buffers", "True or False", NO_SWITCHES),
    ("remainder", REMAINDERS, ("all", "", "DROP", "keep ", None, True, 0, b"drop", [], ps.Pad)),
    ("narrow", "one of 'check', 'error', 'allow'", ("ignore", "", None, True, 1, {}, b"check")),
    ("transform", "a function", NO_FUNCTIONS),
    ("collate", "a function", NO_FUNCTIONS),
    ("device_transform", "a function", NO_FUNCTIONS),
    ("host", "paths of leaves as strings, such as host=('text', 'meta.id'), and", (0, 1.5, True, b"x", ["x", 1], [None], {"x": 1}, ..., X)),
]


def settings() -> Iterator[Row]:
    for (name, allowed, values), make in itertools.product(SETTINGS, (pre, rows)):
        for value in values:
            text = named(value)
            says = f"{name}={text}: {allowed}" if len(text) < 40 and "10**" not in text else f"{name}= ... : {allowed}"
            yield Row(f"{name}={text} of {make.__name__}", MADE, ps.ConfigError, says, late(make, **{name: value}))


STATE = ps.Loader(X, P("data"), batch_size=8, shuffle=True).state()
OF_BATCHES = ps.prefetch([BATCH], P("data")).state()


def two(example: Any, more: Any) -> Any:
    return example, more


def rng_first(rng: Any, example: Any) -> Any:
    return rng, example


async def coroutine(value: Any) -> Any:
    return value


def generator(value: Any) -> Any:
    yield value


class Awaits:
    async def __call__(self, value: Any) -> Any:
        return value


ASYNC = "is an async function, and nobody awaits it"
CALLED = [
    ("transform", "one example", lambda: 1, "too many positional arguments"),
    ("transform", "one example", two, "missing a required argument: 'more'"),
    ("transform", "one example and rng=", rng_first, "multiple values for argument 'rng'"),
    ("transform", "one example", lambda x, *, scale: x * scale, "missing a required", "'scale'"),
    ("collate", "a list of examples", lambda: 1, "too many positional arguments"),
    ("collate", "a list of examples", two, "missing a required argument: 'more'"),
    ("collate", "a list of examples", functools.partial(two, 1, 2), "too many positional arguments"),
    ("device_transform", "one batch", lambda: 1, "too many positional arguments"),
    ("device_transform", "one batch", two, "missing a required argument: 'more'"),
    ("device_transform", "one batch and key=", lambda key, batch: batch, "multiple values for argument 'key'"),
]


def functions() -> Iterator[Row]:
    for i, (name, gets, function, *why) in enumerate(CALLED):
        says = f"{name} is called with {gets}, and cannot be: ... {' ... '.join(why)} ... functools.partial"
        yield Row(f"{name} that is called otherwise, {i}", MADE, ps.ConfigError, says, late(rows, **{name: function}))
    for name, function in itertools.product(
        ("transform", "collate", "device_transform"), (coroutine, functools.partial(coroutine), Awaits())
    ):
        kind = type(function).__name__
        yield Row(f"{name} that is async, a {kind}", MADE, ps.ConfigError, f"{name} {ASYNC}", late(rows, **{name: function}))
    for name in ("transform", "collate", "device_transform"):
        yield Row(f"{name} that yields", MADE, ps.ConfigError, f"{name} is a generator function", late(rows, **{name: generator}))


def combinations() -> list[Row]:
    bad, one_shot, more = ps.ConfigError, "a one-shot iterator, which can be read once: pass a function", X[:12]
    leaf, source = ps.LeafTypeError, ps.SourceError
    return [
        Row("collate without batch_size", MADE, bad, "collate ... needs batch_size=... ... `transform`", late(pre, collate=list)),
        Row("shuffle of batches", MADE, bad, "shuffle=True needs random access ... an iterator ... a dataset", late(pre, shuffle=True)),
        Row("shuffle of examples", MADE, bad, "shuffle=True needs random access", late(rows, shuffle=True)),
        Row("epochs=2 of an iterator", MADE, bad, f"epochs=2 over {one_shot}", late(pre, epochs=2)),
        Row("epochs=None of an iterator", MADE, bad, f"epochs=None over {one_shot}", late(rows, epochs=None)),
        Row("read_ahead=1 with a remainder", MADE, bad, "read_ahead=1: ... read_ahead=2", late(pre, read_ahead=1, remainder="drop")),
        Row("epochs=None of no rows", MADE, bad, "0 rows ... epochs=None", late(arrays, X[:0], epochs=None)),
        Row("epochs=None of no batches", 0, bad, "epochs=None ... the source is empty", lambda: ps.prefetch([], P("data"), epochs=None)),
        Row("batch_size above the arrays", MADE, bad, "16 rows are fewer than batch_size=64 ... smaller", late(arrays, batch_size=64)),
        Row("batch_size above the dataset", MADE, bad, "16 rows are fewer than batch_size=64", late(arrays, list(X), batch_size=64)),
        Row("batch_size above the iterator", 0, ps.BatchError, "16 rows are fewer than batch_size=64", late(rows, batch_size=64)),
        Row("remainder=error of arrays", MADE, bad, "12 rows ... remainder='error' ... 'drop'", late(arrays, more, remainder="error")),
        Row("remainder=error of a dataset", MADE, bad, "12 rows ... remainder='error'", late(arrays, list(more), remainder="error")),
        Row("remainder=error of an iterator", 1, ps.BatchError, "12 rows ... 'error'", late(arrays, iter(more), remainder="error")),
        Row("batch_size that does not divide", MADE, bad, "batch_size=12 ... use a multiple of 8", late(rows, batch_size=12)),
        Row("microbatches that do not divide", MADE, bad, "microbatches=3: batch_size=8 cannot be cut", late(rows, microbatches=3)),
        Row("microbatches of too few rows", MADE, bad, "2 microbatches has 4 rows ... multiple of 16", late(rows, microbatches=2)),
        Row("microbatches of a batch", 0, ps.PlacementError, "microbatches=3: 8 rows cannot be cut", late(pre, microbatches=3)),
        Row("PerDevice and a callable", MADE, bad, "ps.PerDevice needs a sharding", late(rows, batch_size=ps.PerDevice(1), sharding=ruled)),
        Row("PerDevice above all", MADE, bad, "batch_size=PerDevice ... at most", late(rows, batch_size=ps.PerDevice(2**62))),
        Row("the class PerDevice", MADE, bad, "batch_size=<class ... an integer", late(rows, batch_size=ps.PerDevice)),
        Row("host_memory below a batch of arrays", MADE, bad, "host_memory=1 bytes: one batch takes 128", late(arrays, host_memory=1)),
        Row("host_memory below a batch", 0, bad, "host_memory=1 bytes: one batch takes 160", late(pre, host_memory=1)),
        Row("device_memory below a batch of arrays", MADE, bad, "device_memory=31 bytes: ... 32", late(arrays, device_memory=31)),
        Row("device_memory below a batch", 0, bad, "device_memory=1 bytes ... raise the bound", late(pre, device_memory=1)),
        Row("more rows than memory", 0, MemoryError, "choose a smaller batch_size", late(rows, batch_size=2**62, remainder="pad")),
        Row("narrow=error of arrays", MADE, ps.NarrowingError, "float64 ... narrow='error'", late(arrays, X.astype(float), narrow="error")),
        Row("a value too large", 0, ps.NarrowingError, "leaf n: ... does not fit int32", lambda: pre_of({"n": np.full(8, 2**40)})),
        Row("no keyword of that name", MADE, ps.ArgumentError, "no argument 'dept': did you mean depth=2?", late(pre, dept=2)),
        Row("a keyword of another library", MADE, ps.ArgumentError, "'num_workers': write workers=2", late(rows, num_workers=2)),
        Row("no source", MADE, ps.ArgumentError, "Loader needs a source", ps.prefetch),
        Row("three values", MADE, ps.ArgumentError, "write batch_size=8", lambda: ps.Loader(batches(), P("data"), 8)),  # type: ignore[call-arg, misc]
        Row("None from transform", 0, source, "transform returned None for ... row 0", late(rows, transform=lambda x: None, workers=1)),
        Row("None from transform of batches", 0, source, "transform returned None for batch 0", late(pre, transform=lambda x: None)),
        Row("None from collate", 0, source, "collate returned None", late(rows, collate=lambda x: None)),
        Row("None from device_transform", 0, source, "device_transform returned None", late(pre, device_transform=lambda x: None)),
        Row("{} from transform", 0, source, "transform returned no leaves ... row 0", late(rows, transform=lambda x: {}, workers=1)),
        Row("{} from device_transform", 0, source, "device_transform returned {}", late(pre, device_transform=lambda x: {})),
        Row("text from transform", 0, leaf, "str 'a' cannot be put", late(rows, transform=lambda x: "a")),
        Row("text from device_transform", 0, leaf, "leaf a: ... str, which device_transform", late(pre, device_transform=texts)),
        Row("a coroutine from transform", 0, leaf, "a coroutine ... async", late(rows, transform=lambda x: opened())),
        Row("StopIteration from transform", 0, source, "StopIteration ... transforming", late(rows, transform=raising(StopIteration()))),
        Row("an error from transform", 0, ZeroDivisionError, "while transforming batch 0", late(rows, transform=lambda x: 1 / 0)),
        Row("an error from collate", 0, ZeroDivisionError, "while collating batch 0", late(rows, collate=lambda x: 1 / 0)),
        Row("an error from device_transform", 0, ZeroDivisionError, "while placing batch 0", late(pre, device_transform=lambda x: 1 / 0)),
        Row("collate of other rows", 0, ps.BatchError, "differ in rows: {'a': 8, 'b': 4}", late(rows, collate=unequal)),
    ]


def unequal(examples: Any) -> Any:
    return {"a": X[:8], "b": X[:4]}


def texts(batch: Any) -> Any:
    return {"a": "text", "x": batch["x"]}


def opened() -> Any:
    """A coroutine that is closed, so that Python does not warn that nobody awaited it."""
    made = coroutine(1)
    made.close()
    return made


def ruled(path: str, shape: tuple[int, ...], dtype: Any) -> Any:
    return P("data")


def pre_of(*items: Any, **options: Any) -> Any:
    return ps.prefetch(batches(*items), **{"sharding": P("data"), **options})


# --- sources


class Sized:
    def __len__(self) -> int:
        return 16


class Dataset(Sized):
    def __getitem__(self, row: int) -> Any:
        return X[row]


def like(base: type = Dataset, **methods: Any) -> Any:
    """An object of a class with these methods."""
    return type("Odd", (base,), methods)()


def raising(error: BaseException) -> Callable[..., Any]:
    def function(*_: Any, **__: Any) -> Any:
        raise error

    return function


def used_up() -> Any:
    made = generator(BATCH)
    assert len(list(made)) == 1
    return made


async def yields() -> Any:
    yield BATCH


def used_up_async() -> Any:
    async def use() -> Any:
        made = yields()
        assert len([item async for item in made]) == 1
        return made

    return asyncio.run(use())


def needs(path: str) -> Any:
    return path


def positional(epoch: int, /) -> Any:
    return epoch


class Needs:
    def __init__(self, path: str) -> None:
        self.path = path

    def __iter__(self) -> Iterator[Any]:
        return iter([BATCH])


NOT_ONE = "pass arrays, a dataset, an iterable of batches or examples, or a function that returns one"
NO_SOURCES: dict[str, tuple[type[BaseException], str, Callable[[], Any]]] = {
    "None": (ps.ConfigError, f"the source is None; {NOT_ONE}", lambda: None),
    "int": (ps.ConfigError, f"builtins.int is no source ... {NOT_ONE}", lambda: 5),
    "float": (ps.ConfigError, "builtins.float is no source", lambda: 1.5),
    "bool": (ps.ConfigError, "builtins.bool is no source", lambda: True),
    "module": (ps.ConfigError, "builtins.module is no source", lambda: math),
    "namespace": (ps.ConfigError, "types.SimpleNamespace is no source", lambda: types.SimpleNamespace(x=X)),
    "device": (ps.ConfigError, "Device is no source", lambda: jax.devices()[0]),
    "sharding": (ps.ConfigError, "NamedSharding is no source", lambda: NamedSharding(ps.make_mesh({"data": -1}), P("data"))),
    "mesh": (
        ps.ConfigError,
        "the source, Mesh, is called once an epoch without arguments, and cannot be",
        lambda: ps.make_mesh({"data": -1}),
    ),
    "struct": (ps.ConfigError, "ShapeDtypeStruct is no source", lambda: jax.ShapeDtypeStruct((8,), np.float32)),
    "scalar": (ps.ConfigError, "numpy.float32 is no source", lambda: np.float32(3)),
    "state": (ps.ConfigError, "LoaderState is no source", lambda: STATE),
    "PerDevice": (ps.ConfigError, "PerDevice is no source", lambda: ps.PerDevice(3)),
    "only len": (ps.ConfigError, "has none of __getitem__ with __len__", Sized),
    "no len": (ps.ConfigError, "has none of __getitem__ with __len__", lambda: like(object, __getitem__=lambda self, row: X[row])),
    "coroutine": (ps.ConfigError, "coroutine is no source: an async function returned it; await it", opened),
    "async function": (ps.ConfigError, "the source, coroutine, is an async function; make it an async generator", lambda: coroutine),
    "async partial": (ps.ConfigError, "is an async function", lambda: functools.partial(coroutine, 1)),
    "async function in its own loop": (ps.ConfigError, "coroutine, is an async function", lambda: ps.in_own_loop(coroutine)),
    "function of a path": (ps.ConfigError, "the source, needs, ... argument: 'path'; pass what it makes, or a lambda", lambda: needs),
    "function of epoch by position": (ps.ConfigError, "without arguments, and cannot be: ... 'epoch'", lambda: positional),
    "function of more than epoch": (ps.ConfigError, "with epoch=, and cannot be: ... 'path'", lambda: lambda epoch, path: [path, epoch]),
    "class of no source": (ps.ConfigError, "the class ... Sized, whose objects are no source", lambda: Sized),
    "class of a path": (ps.ConfigError, "the source, Needs, ... 'path'", lambda: Needs),
    "used-up generator": (ps.UsedUpError, "the generator generator, was read to its end ... make a new one", used_up),
    "used-up async generator": (ps.UsedUpError, "the generator yields, was read to its end", used_up_async),
    "used-up generator in its own loop": (ps.UsedUpError, "yields, was read", lambda: ps.in_own_loop(used_up_async())),
    "negative len": (ValueError, "__len__() should return >= 0 ... the source, a", lambda: like(__len__=lambda self: -1)),
    "float len": (TypeError, "'float' object cannot ... the source, a", lambda: like(__len__=lambda self: 1.5)),
    "None as len": (TypeError, "'NoneType' object cannot ... Odd, for its len()", lambda: like(__len__=lambda self: None)),
    "huge len": (OverflowError, "cannot fit ... Odd, for its len()", lambda: like(__len__=lambda self: 2**70)),
    "len that raises": (KeyError, "own ... Odd, for its len()", lambda: like(__len__=raising(KeyError("own")))),
    "len that is a number": (TypeError, "not callable ... Odd, for its len()", lambda: like(__len__=5)),
    "per_worker of None": (ps.ConfigError, "ps.per_worker returned a NoneType, which is no dataset", lambda: ps.per_worker(lambda: None)),
    "per_worker of an iterator": (
        ps.ConfigError,
        "returned a list_iterator, which is no dataset",
        lambda: ps.per_worker(lambda: iter([1])),
    ),
    "per_worker of a mapping": (ps.ConfigError, "returned a dict, which is asked by key", lambda: ps.per_worker(lambda: {"x": X})),
    "per_worker that raises": (KeyError, "own", lambda: ps.per_worker(raising(KeyError("own")))),
}


class Turn:
    """An iterable whose `__iter__` is a function of choice."""

    def __init__(self, begin: Callable[[], Any]) -> None:
        self._begin = begin

    def __iter__(self) -> Any:
        return self._begin()


def begun(begin: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: ps.prefetch(Turn(begin), P("data"))


class AsyncTurn:
    def __aiter__(self) -> Any:
        return None


class NoneMany(Dataset):
    def __getitems__(self, numbers: list[int]) -> Any:
        return None


def on_device(*, sharding: Any = None, to: Any = None, **options: Any) -> Any:
    return ps.Loader(ps.OnDevice({"x": X}, sharding), **{"sharding": P("data") if to is None else to, "batch_size": 8, **options})


def deleted(shape: tuple[int, ...] = (8, 4)) -> Any:
    array = jax.numpy.zeros(shape)
    array.delete()
    return array


def deleted_later() -> Any:
    array = jax.numpy.zeros((8, 4))
    loader = ps.Loader(ps.OnDevice({"x": array}), P("data"), batch_size=8)
    array.delete()
    return loader


def read_before() -> Any:
    loader = ps.prefetch(iter([BATCH]), P("data"))
    iter(loader).close()
    return loader


def closed() -> Any:
    iterator = iter(ps.prefetch([BATCH], P("data")))
    iterator.close()
    return iterator


def sources() -> Iterator[Row]:
    for (name, (kind, says, make)), size in itertools.product(NO_SOURCES.items(), (None, 8)):
        if size is None or not name.startswith("per_worker of a m"):
            yield Row(f"{name}, batch_size={size}", MADE, kind, says, lambda make=make, size=size: arrays(make(), batch_size=size))


def odd_sources() -> list[Row]:
    bad, leaf, source = ps.ConfigError, ps.LeafTypeError, ps.SourceError
    again = "batches already: leave batch_size out"
    index = like(__getitem__=lambda self, row: X[row if row < 4 else 99])
    return [
        Row("arrays without batch_size", MADE, bad, "without batch_size ... [batch]", lambda: ps.prefetch({"x": X}, P("data"))),
        Row("a function that gives None", 0, source, "returned None for epoch 0", lambda: ps.prefetch(lambda: None, P("data"))),
        Row("a function that gives an int", 0, bad, "builtins.int is no source", lambda: ps.prefetch(lambda: 5, P("data"))),
        Row("a function that gives a coroutine", 0, bad, "async", lambda: ps.prefetch(lambda: opened(), P("data"))),
        Row("a loader as examples", MADE, bad, f"Loader, {again} ... ps.rebatch", lambda: arrays(pre())),
        Row("an iterator of a loader as examples", MADE, bad, f"LoaderIterator, {again}", lambda: arrays(closed())),
        Row("an index out of range", 0, IndexError, "99 ... while reading batch 0", lambda: arrays(index)),
        Row("__getitem__ that raises", 0, KeyError, "own ... batch 0", lambda: arrays(like(__getitem__=raising(KeyError("own"))))),
        Row("__getitem__ that stops", 0, source, "StopIteration", lambda: arrays(like(__getitem__=raising(StopIteration())))),
        Row(
            "__getitem__ that gives None",
            0,
            source,
            "row 0: it is None",
            lambda: arrays(like(__getitem__=lambda self, row: None), workers=1),
        ),
        Row("__getitem__ without a row", 0, TypeError, "positional argument ... batch 0", lambda: arrays(like(__getitem__=lambda self: 1))),
        Row("__getitem__ that is async", 0, leaf, "a coroutine", lambda: arrays(like(__getitem__=lambda self, row: opened()))),
        Row("__getitems__ that gives None", 0, source, "NoneMany.__getitems__ returned None", lambda: arrays(NoneMany())),
        Row("__iter__ that gives None", 0, TypeError, "'NoneType' ... reading the source", begun(lambda: None)),
        Row("__iter__ that gives a list", 0, TypeError, "'list' ... reading the source", begun(lambda: [BATCH])),
        Row("__iter__ that raises", 0, KeyError, "reading the source", begun(raising(KeyError("own")))),
        Row("__iter__ that stops", 0, source, "StopIteration", begun(raising(StopIteration()))),
        Row("__aiter__ that gives None", 0, TypeError, "'NoneType' ... batch 0", lambda: ps.prefetch(AsyncTurn(), P("data"))),
        Row("a source read before", ITER, ps.UsedUpError, "one-shot iterator, exhausted ... a function", read_before),
        Row("set_epoch without a number", 0, TypeError, "positional ... an epoch", lambda: arrays(like(set_epoch=lambda self: None))),
        Row("lines of text", 0, leaf, "str 'a' cannot be put", lambda: pre_of("a")),
        Row("OnDevice of None", MADE, bad, "ps.OnDevice takes ... not a NoneType", late(ps.OnDevice, None)),
        Row("OnDevice of a list", MADE, bad, "ps.OnDevice takes ... not a list", late(ps.OnDevice, [X])),
        Row("OnDevice of an iterator", MADE, bad, "ps.OnDevice takes ... not a list_iterator", late(ps.OnDevice, iter([X]))),
        Row("OnDevice of OnDevice", MADE, bad, "ps.OnDevice takes ... not a OnDevice", lambda: ps.OnDevice(ps.OnDevice(X))),
        Row("OnDevice of text", MADE, bad, "ps.OnDevice: array t (", late(ps.OnDevice, {"t": np.array(["a"])})),
        Row("OnDevice of a masked array", MADE, bad, "ps.OnDevice: array m (Masked", late(ps.OnDevice, {"m": np.ma.masked_array(X)})),
        Row("OnDevice of keys", MADE, bad, "ps.OnDevice: ... key_data", lambda: ps.OnDevice(jax.random.key(0))),
        Row("OnDevice of a deleted array", MADE, bad, "ps.OnDevice: array x was deleted", lambda: ps.OnDevice({"x": deleted()})),
        Row("OnDevice of an array deleted later", ITER, bad, "ps.OnDevice: array x was deleted", deleted_later),
        Row("OnDevice of large values", ITER, ps.NarrowingError, "row 0 ... int32", lambda: arrays(ps.OnDevice(np.full(8, 2**40)))),
        Row("OnDevice without batch_size", MADE, bad, "without batch_size", lambda: ps.prefetch(ps.OnDevice(X), P("data"))),
        Row("OnDevice and transform", MADE, bad, "transform runs on the host", late(on_device, transform=np.copy)),
        Row("OnDevice on the host", MADE, bad, "ps.OnDevice: leaf x is to stay", late(on_device, to=ps.HOST)),
        Row("OnDevice, sharding a text", MADE, bad, "ps.OnDevice: sharding: 'data'", late(on_device, sharding="data")),
        Row("OnDevice, sharding an int", MADE, bad, "ps.OnDevice: sharding: 3", late(on_device, sharding=3)),
        Row("OnDevice, sharding of no axis", MADE, bad, "ps.OnDevice: ... 'dat' ... 'data'", late(on_device, sharding=P("dat"))),
        Row("OnDevice, ps.HOST", MADE, bad, "ps.OnDevice: leaf x: ... ps.HOST is no sharding", late(on_device, sharding=ps.HOST)),
        *(
            Row(f"per_worker({named(one)})", MADE, bad, "ps.per_worker takes a function", late(ps.per_worker, one))
            for one in ([1], None, "x", 3)
        ),
        Row("per_worker of a path", MADE, bad, "ps.per_worker calls ... without ... 'path'", late(ps.per_worker, needs)),
        Row("per_worker of an async function", MADE, bad, "ps.per_worker ... async", late(ps.per_worker, coroutine)),
        Row("in_own_loop of a list", MADE, bad, "ps.in_own_loop takes an async iterable ... not list", late(ps.in_own_loop, [1])),
        Row("in_own_loop of None", MADE, bad, "ps.in_own_loop takes ... not NoneType", late(ps.in_own_loop, None)),
        Row("from_this_loop without a loop", MADE, bad, "ps.from_this_loop must be called in", lambda: ps.from_this_loop(yields)),
        Row("from_this_loop of a list", MADE, bad, "ps.from_this_loop takes ... not list", lambda: asyncio.run(marked([1]))),
        Row("a loader made inside jit", MADE, bad, "outside functions that JAX traces", lambda: jax.jit(traced(pre))(X)),
        Row("a loader read inside jit", MADE, bad, "outside functions that JAX traces", lambda: jax.jit(traced(pre().__iter__))(X)),
        Row("OnDevice inside jit", MADE, bad, "ps.OnDevice: a traced array", lambda: jax.jit(ps.OnDevice)(X)),
        Row("check_source of a path", MADE, bad, "check_source calls its function without arguments ... 'path'", late(check_source, needs)),
        Row("check_source of 0 items", MADE, bad, "check_source(most)=0: an integer", late(check_source, list, most=0)),
        Row("check_source by 0 threads", MADE, bad, "check_source(threads)=0: an integer", late(check_source, list, threads=0)),
        Row("check_source of a source", MADE, bad, "check_source takes a function ... not a list", late(check_source, [X])),
    ]


def traced(call: Callable[[], Any]) -> Callable[[Any], Any]:
    """A function to be jitted that calls this."""

    def inside(x: Any) -> Any:
        call()
        return x

    return inside


async def marked(source: Any) -> Any:
    return ps.from_this_loop(source)


# --- shardings


def grid(spec: Any = None) -> Any:
    """The mesh 4 x 2, or a sharding over it."""
    mesh = ps.make_mesh({"data": 4, "model": 2}, jax.devices()[:8])
    return mesh if spec is None else NamedSharding(mesh, spec)


def three(spec: Any) -> Any:
    return NamedSharding(Mesh(np.array(jax.devices()[:3]), ("data",)), spec)


FORMS = "a Sharding, a 1-D Mesh, a PartitionSpec, None, ps.HOST"
NO_SHARDINGS: list[tuple[str, type[BaseException], str, Callable[[], Any]]] = [
    ("text", ps.ConfigError, "sharding: 'data' (type str) is no sharding: write PartitionSpec('data')", lambda: "data"),
    ("text in a tuple", ps.ConfigError, "sharding at '[0]': 'data' ... PartitionSpec('data')", lambda: ("data",)),
    ("text at a leaf", ps.ConfigError, "sharding at 'x': 'data'", lambda: {"x": "data", "y": None}),
    ("bytes", ps.ConfigError, f"sharding: b'd' ... {FORMS}", lambda: b"d"),
    ("float", ps.ConfigError, f"sharding: 1.5 ... {FORMS}", lambda: 1.5),
    ("set", ps.ConfigError, f"sharding: {{ ... {FORMS}", lambda: {P("data")}),
    ("object", ps.ConfigError, f"sharding: ... {FORMS}", object),
    ("device", ps.ConfigError, "sharding: ... SingleDeviceSharding(device)", lambda: jax.devices()[0]),
    ("devices", ps.ConfigError, "sharding at '[0]': ... SingleDeviceSharding(device)", jax.devices),
    ("device at a leaf", ps.ConfigError, "sharding at 'y': ... SingleDeviceSharding(device)", lambda: {"x": None, "y": jax.devices()[0]}),
    ("class of shardings", ps.ConfigError, "NamedSharding ... is no sharding: it is a class", lambda: NamedSharding),
    ("class of specs", ps.ConfigError, "is no sharding: it is a class", lambda: P),
    ("class of meshes at a leaf", ps.ConfigError, "sharding at 'x': ... it is a class", lambda: {"x": Mesh, "y": None}),
    ("class of dtypes", ps.ConfigError, "float32 ... it is a class", lambda: np.float32),
    ("nothing", ps.ConfigError, f"sharding={{}} holds no rule: pass {FORMS}", dict),
    ("mesh of two axes", ps.ConfigError, "sharding: the mesh {'data': 4, 'model': 2} does not say ... NamedSharding", grid),
    ("axes without a mesh", ps.ConfigError, "P('data', 'model') names 2 mesh axes, but no mesh", lambda: P("data", "model")),
    ("axis twice", ps.ConfigError, "sharding: P('data', 'data') uses the axis 'data' ... twice", lambda: P("data", "data")),
    ("unconstrained", ps.ConfigError, "sharding: PartitionSpec.UNCONSTRAINED cannot place", lambda: P(P.UNCONSTRAINED)),
    ("unconstrained at a leaf", ps.ConfigError, "sharding at 'y': ... UNCONSTRAINED", lambda: {"x": None, "y": P(P.UNCONSTRAINED)}),
    ("abstract mesh", ps.ConfigError, f"sharding: AbstractMesh ... {FORMS}", lambda: grid().abstract_mesh),
    ("abstract sharding", ps.ConfigError, "abstract mesh, which has no devices", lambda: NamedSharding(grid().abstract_mesh, P("data"))),
    ("function of nothing", ps.ConfigError, "sharding: the function is called with (path, shape, dtype)", lambda: lambda: None),
    ("function of a path", ps.ConfigError, "sharding at 'x': the function is called with", lambda: {"x": lambda path: None, "y": None}),
    ("other devices and None", ps.ConfigError, "rules over different devices", lambda: {"x": three(P()), "y": None, "z": grid(P())}),
    ("int", ps.ArgumentError, "sharding=8 is no sharding: write batch_size=8", lambda: 8),
    ("array", ps.ArgumentError, "sharding: an array of shape (3,)", lambda: np.zeros(3)),
]
NO_FITS: list[tuple[str, str, Callable[[], Any]]] = [
    ("missing leaf", "sharding has no entry for 'y'", lambda: {"x": P("data")}),
    ("leaf too many", "sharding has an entry for 'z', the batch has none", lambda: {"x": P("data"), "y": P("data"), "z": P()}),
    ("None too many", "sharding has an entry for 'z'", lambda: {"x": P("data"), "y": None, "z": None}),
    ("tuple for a dict", "sharding has a tuple, the batch a dict", lambda: (P("data"), P("data"))),
    ("list for a dict", "sharding has a list, the batch a dict", lambda: [P("data"), P("data")]),
    ("dict for an array", "sharding has a dict at 'x', the batch an array", lambda: {"x": {"a": P("data")}, "y": P("data")}),
    (
        "spec of too many axes",
        "leaf y: shape (8,) ... rank 1 ... give this leaf a spec of at most 1",
        lambda: {"x": P("data"), "y": P("data", None)},
    ),
    ("axis that does not divide", "leaf x: shape (8, 4) ... axis 1 (4) must be a multiple of 3", lambda: three(P(None, "data"))),
    ("axes that do not divide", "leaf x: ... a multiple of 8 ('data' x 'model')", lambda: grid(P(None, ("data", "model")))),
    ("text from a function", "leaf x: the sharding callable gave ... 'data'", lambda: lambda path, shape, dtype: "data"),
    ("class from a function", "leaf x: the sharding callable gave ... a class", lambda: lambda path, shape, dtype: SingleDeviceSharding),
    ("function from a function", "leaf x: the sharding callable gave a callable", lambda: lambda path, shape, dtype: ruled),
    ("dict from a function", "leaf x: the sharding callable gave", lambda: lambda path, shape, dtype: {"x": P("data")}),
]


def shardings() -> Iterator[Row]:
    both = {"x": X, "y": np.zeros(16, np.int32)}
    for name, kind, says, make in NO_SHARDINGS:
        yield Row(f"{name} as sharding", MADE, kind, says, lambda make=make: pre(sharding=make()))
    for name, says, make in NO_FITS:
        yield Row(f"sharding of arrays: {name}", MADE, ps.PlacementError, says, lambda make=make: arrays(both, sharding=make()))
        yield Row(f"sharding of batches: {name}", 0, ps.PlacementError, says, lambda make=make: pre(sharding=make()))
    few = "leaf x: shape (8, 4) ... axis 0 (8) must be a multiple of 3 ('data') ... remainder='pad'"
    yield Row("rows that do not divide", 0, ps.PlacementError, few, lambda: pre(sharding=three(P("data"))))
    yield Row(
        "examples that do not divide", MADE, ps.ConfigError, "batch_size=8 ... multiple of 3", lambda: rows(sharding=three(P("data")))
    )
    yield Row("an error from a sharding", 0, ZeroDivisionError, "batch 0", lambda: pre(sharding=lambda path, shape, dtype: 1 / 0))
    yield Row("host= of no leaf of arrays", MADE, ps.ConfigError, "host= names 'txet' ... 'x', 'y'", lambda: arrays(both, host="txet"))
    yield Row("host= of no leaf of batches", 0, ps.ConfigError, "host= names 'txet' ... 'x', 'y'", lambda: pre(host="txet"))
    there = {"x": P("data"), "y": P("data")}
    yield Row("host= and sharding=", MADE, ps.ConfigError, "host= names 'y', and sharding=", lambda: pre(sharding=there, host="y"))


# --- leaves, and batches that do not go together


class Badly:
    """An array that cannot be read."""

    shape, dtype = (8,), np.dtype(np.float32)

    def __init__(self, made: Callable[..., Any]) -> None:
        self._made = made

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self._made()


REFUSED = "cannot be put on a device ... host=('odd',)"
NO_ARRAYS = {
    "objects": np.array([None] * 8),
    "text": np.array(["a"] * 8),
    "dates": np.zeros(8, "M8[s]"),
    "records": np.zeros(8, [("a", "i4")]),
    "raw bytes": np.zeros(8, "V4"),
    "longdouble": np.zeros(8, np.longdouble),
}
NO_LEAVES: list[tuple[str, type[BaseException], str, Callable[[], Any]]] = [
    ("a ragged list", ps.BatchError, "leaf odd: the list is ragged ... `collate`", lambda: [[1], [1, 2]]),
    ("a list with text", ps.LeafTypeError, "leaf odd[1]: str 'a' cannot be put on a device", lambda: [1, "a"]),
    (
        "a list of arrays of other rows",
        ps.BatchError,
        "differ in rows: {'odd[0]': 2, 'odd[1]': 3, 'x': 8}",
        lambda: [np.zeros(2), np.zeros(3)],
    ),
    ("other rows", ps.BatchError, "differ in rows: {'odd': 16, 'x': 8}", lambda: X),
    ("no rows", ps.BatchError, "differ in rows: {'odd': 0, 'x': 8}", lambda: X[:0]),
    ("an integer of 80 bits", ps.NarrowingError, "leaf odd: the integer 1208925819614629174706176 has more than 64 bits", lambda: 2**80),
    ("keys of two types", ps.PlacementError, "at 'odd': a dict has the keys [1, 'a']", lambda: {1: np.zeros(8), "a": np.zeros(8)}),
    ("a coroutine", ps.LeafTypeError, "leaf odd: a coroutine cannot be put on a device; it comes of an async function", opened),
    ("a function", ps.LeafTypeError, "leaf odd: an object of type builtins.builtin_function", lambda: len),
    ("a slice", ps.LeafTypeError, "leaf odd: an object of type builtins.slice", lambda: slice(3)),
    ("a mesh", ps.LeafTypeError, "leaf odd: an object of type jax ... Mesh", lambda: ps.make_mesh({"data": -1})),
    ("a shape", ps.LeafTypeError, "leaf odd: an object of type jax.ShapeDtypeStruct", lambda: jax.ShapeDtypeStruct((8,), np.float32)),
    ("a deleted array", ps.PlacementError, "leaf odd: the jax.Array of shape (8, 4) was deleted", deleted),
    ("an array that raises", KeyError, "own ... leaf odd", lambda: Badly(raising(KeyError("own")))),
    ("an array of None", ps.LeafTypeError, "leaf odd: ... Badly, of which NumPy makes no array", lambda: Badly(lambda: None)),
]


def leaves() -> Iterator[Row]:
    kind = ps.LeafTypeError
    for name, value in NO_ARRAYS.items():
        yield Row(f"leaf of batches: {name}", 0, kind, f"leaf odd: dtype ... {REFUSED}", late(pre_of, {"x": X[:8], "odd": value}))
        yield Row(f"leaf of arrays: {name}", MADE, kind, f"leaf odd: dtype ... {REFUSED}", late(arrays, {"x": X[:8], "odd": value}))
    masked = np.ma.masked_array(np.zeros(8))
    yield Row("leaf of arrays: masked", MADE, kind, "leaf odd: a masked array ... filled", lambda: arrays({"x": X[:8], "odd": masked}))
    yield Row("leaf of arrays: other rows", MADE, ps.ConfigError, "leading size: {'odd': 8, 'x': 16}", late(arrays, {"x": X, "odd": X[:8]}))
    yield Row("leaf of arrays: a scalar", MADE, ps.ConfigError, "array odd has no axis of rows", late(arrays, {"x": X, "odd": np.array(1)}))
    for name, error, says, make in NO_LEAVES:
        yield Row(f"leaf of batches: {name}", 0, error, says, lambda make=make: pre_of({"x": X[:8], "odd": make()}))
    for name in ("a ragged list", "an integer of 80 bits", "a coroutine", "a mesh", "a deleted array", "an array that raises"):
        _, error, says, make = next(row for row in NO_LEAVES if row[0] == name)
        yield Row(f"leaf of examples: {name}", 0, error, says, lambda make=make: arrays(iter([example(odd=make()) for _ in range(8)])))


def example(**more: Any) -> Any:
    return {"x": X[0], **more}


def mixed(*odd: Any, **options: Any) -> Any:
    return arrays(Counted([*[example()] * 12, *odd, *[example()] * 3]), **options)


def changes() -> list[Row]:
    source, batch = ps.SourceError, ps.BatchError
    wide = {"x": np.zeros(5, np.float32)}
    cut = functools.partial(ps.rebatch, batch_size=8)
    fit, row = ps.PlacementError, "the example at row 12"
    return [
        Row("a batch that is None", 0, source, "no leaves for batch 0 ... it is None", lambda: pre_of(None)),
        Row("a batch that is {}", 0, source, "no leaves for batch 0 ... it is {}", lambda: pre_of({})),
        Row("a second batch that is None", 1, source, "no leaves for batch 1", lambda: pre_of(BATCH, None)),
        Row("a second batch that is ()", 1, source, "no leaves for batch 1", lambda: pre_of(BATCH, ())),
        Row("a second batch of text", 1, ps.LeafTypeError, "leaf x: dtype <U1", lambda: pre_of(BATCH, {"x": np.array(["a"] * 8)})),
        Row("a second batch without a leaf", 1, fit, "no entry ... 'y'", lambda: pre_of({"x": X[:8]}, BATCH, sharding={"x": P("data")})),
        Row("a second batch of 4 rows", 1, fit, "leaf x: shape (4, 4) ... 'drop'", lambda: pre_of({"x": X[:8]}, {"x": X[:4]})),
        Row("a batch that is a number", 0, fit, "leaf (the batch itself): shape () ... rank 0", lambda: pre_of(3)),
        Row("a scalar that is split", 0, fit, "leaf n: shape ()", lambda: pre_of({"n": np.float32(1)}, sharding={"n": P("data")})),
        Row("an example of another shape", 1, batch, f"leaf x: {row} has shape (5,)", lambda: mixed(wide)),
        Row("an example of another dtype", 1, batch, f"leaf x: {row} has dtype int64 ... cast", lambda: mixed({"x": np.arange(4)})),
        Row("an example with a leaf more", 1, batch, f"{row} has ['y'] beside", lambda: mixed(example(y=1))),
        Row("an example of another container", 1, batch, f"{row} lacks ['x'] and has ['[0]']", lambda: mixed((X[0],))),
        Row("an example that is a list", 1, batch, f"{row} lacks ['x'] and has ['(the example itself)']", lambda: mixed([1])),
        Row("an example that is None", 1, source, f"{row}: it is None", lambda: mixed(None)),
        Row("an example that is {}", 1, source, f"{row}: it is {{}}", lambda: mixed({})),
        Row("a mask that is there", 0, ps.ConfigError, "'mask' ... mask_key=", lambda: pre_of({"mask": X[:8]}, remainder="pad")),
        Row("a mask that is there in arrays", MADE, ps.ConfigError, "'mask' ... mask_key=", lambda: arrays({"mask": X}, remainder="pad")),
        Row("padding that does not fit", 0, batch, "leaf y: ps.Pad(value=nan) ... int32", lambda: pre_of(BATCH, remainder=PADS)),
        Row("padding that does not fit arrays", MADE, batch, "ps.Pad(value=nan)", lambda: arrays(np.zeros((9, 2), int), remainder=PADS)),
        Row("rebatch: other columns", 2, batch, "piece 1 ... ['y']", lambda: ps.prefetch(cut(Counted([{"x": X}, {"y": X}])), P("data"))),
        Row("rebatch: other rows", 0, batch, "piece 0 ... {'x': 16, 'y': 3}", lambda: ps.prefetch(cut([{"x": X, "y": X[:3]}]), P("data"))),
        Row("rebatch: None", 0, batch, "piece 0 ... it is None", lambda: ps.prefetch(cut([None]), P("data"))),
        Row("rebatch: a number", 0, batch, "piece 0 ... has no rows", lambda: ps.prefetch(cut([{"n": 3}]), P("data"))),
        Row("rebatch in a loader with batch_size", MADE, ps.ConfigError, "leave batch_size out", lambda: arrays(cut(Counted([X])))),
        Row("rebatch in a loader without", MADE, ps.ConfigError, "say how many", lambda: ps.prefetch(ps.rebatch(Counted([X])), P("data"))),
        Row("rebatch of None", MADE, ps.ConfigError, "the source is None", lambda: ps.prefetch(cut(None), P("data"))),
        Row("rebatch of a used-up generator", MADE, ps.UsedUpError, "was read to its end", lambda: ps.prefetch(cut(used_up()), P("data"))),
        Row("rebatch and shuffle", MADE, ps.ConfigError, "shuffle=True", lambda: ps.prefetch(cut(Counted([X])), P("data"), shuffle=True)),
    ]


PADS = ps.Pad(value=math.nan)

# --- other public names, and states


def field(**values: Any) -> str:
    return json.dumps({**json.loads(STATE.to_json()), **values})


def shard(mesh: Any, spec: Any) -> Callable[[], Any]:
    return lambda: ps.process_data_shard(
        mesh() if callable(mesh) and not isinstance(mesh, Mesh) else mesh, spec() if callable(spec) else spec
    )


def all_data() -> Mesh:
    return ps.make_mesh({"data": -1})


def values() -> Iterator[Row]:
    bad = ps.ConfigError
    for value in (*NO_COUNTS, None, 2**63):
        yield Row(f"PerDevice({named(value)})", MADE, bad, "PerDevice(rows)= ... an integer", late(ps.PerDevice, value))
    for value in NO_COUNTS:
        yield Row(f"rebatch(..., {named(value)})", MADE, bad, "rebatch(source, batch_size=", late(ps.rebatch, [X], value))
    for value in ("", 1, None, b"m", True):
        yield Row(f"Pad(mask_key={value!r})", MADE, bad, f"Pad(mask_key={value!r}): a non-empty string", late(ps.Pad, mask_key=value))
    for value in ("0", None, 1j, [0], np.zeros(1)):
        yield Row(f"Pad(value={value!r})", MADE, bad, f"Pad(value={value!r}): a number", late(ps.Pad, value=value))
    yield Row("Pad(key=)", MADE, TypeError, "'key'", lambda: ps.Pad(key="m"))  # type: ignore[call-arg]
    yield Row("PerDevice()", MADE, TypeError, "'rows'", lambda: ps.PerDevice())  # type: ignore[call-arg]


def meshes() -> Iterator[Row]:
    bad = ps.ConfigError
    for value in (None, 8, "data", ["data"], (8,)):
        yield Row(f"make_mesh({value!r})", MADE, bad, f"make_mesh({value!r}): a size for each axis by name", late(ps.make_mesh, value))
    for value in (-2, 0, 8.0, "8", True, None, math.nan):
        yield Row(f"make_mesh of size {value!r}", MADE, bad, f"axis 'data' has size {value!r}; a", late(ps.make_mesh, {"data": value}))
    for axes, says in [
        ({}, "at least one axis"),
        ({0: 8}, "the axis 0 of size 8 is no string"),
        ({"data": -1, "model": -1}, "only one axis may be -1"),
        ({"data": 3}, "needs 3 devices ... let one axis be -1"),
        ({"data": -1, "model": 3}, "a multiple of 3 devices"),
        ({"data": 2**70}, "needs 1180591620717411303424 devices"),
    ]:
        yield Row(f"make_mesh({axes})", MADE, bad, f"make_mesh ... {says}", late(ps.make_mesh, axes))
    for value in (8, "cpu", ["cpu:0"], [None], [[]]):
        says = f"make_mesh(devices={value!r}): a list of devices, such as jax.devices()"
        yield Row(f"make_mesh(devices={value!r})", MADE, bad, says, late(ps.make_mesh, {"data": -1}, value))
    yield Row("make_mesh over no devices", MADE, bad, "the list of devices is empty", late(ps.make_mesh, {"data": -1}, []))
    yield Row("make_mesh, a device twice", MADE, bad, "twice", lambda: ps.make_mesh({"data": -1}, [jax.devices()[0]] * 2))
    for name, mesh, spec, says in [
        ("no mesh", None, P("data"), "mesh=None is no jax.sharding.Mesh"),
        ("a sharding for the mesh", lambda: grid(P("data")), P("data"), "mesh= ... sharding.mesh"),
        ("an abstract mesh", lambda: grid().abstract_mesh, P("data"), "mesh= ... is no jax.sharding.Mesh"),
        ("both the other way round", P("data"), all_data, "mesh= ... is no jax.sharding.Mesh"),
        ("no spec", all_data, None, "spec=None is no PartitionSpec, such as P('data')"),
        ("text for the spec", all_data, "data", "spec='data' is no PartitionSpec"),
        ("a tuple for the spec", all_data, ("data",), "spec=('data',) is no PartitionSpec"),
        ("an axis that is not there", all_data, P("dat"), "'dat' ... did you mean 'data'?"),
        ("an axis twice", all_data, P("data", "data"), "twice"),
    ]:
        yield Row(f"process_data_shard: {name}", MADE, bad, says, shard(mesh, spec))


def states() -> Iterator[Row]:
    bad, state = ps.ConfigError, ps.StateError
    for name, value in {
        "text": "x",
        "dict": {},
        "int": 3,
        "bool": True,
        "class": ps.LoaderState,
        "tuple": (STATE,),
        "JSON": STATE.to_json(),
    }.items():
        yield Row(f"state= a {name}", MADE, bad, f"state= takes a LoaderState ... not {type(value).__qualname__}", late(pre, state=value))
    yield Row("state= bytes", MADE, bad, "state= takes ... not bytes: state=ps.LoaderState.decode(...)", late(rows, state=STATE.encode()))
    yield Row("state= of arrays", MADE, state, "kind: the state has 'random access', this loader 'iterator'", late(rows, state=STATE))
    yield Row("state= of batches", MADE, state, "batch_size: the state has None, this loader 8", late(rows, state=OF_BATCHES))
    for options, says in [
        ({"seed": 1}, "seed: the state has 0, this loader 1"),
        ({"shuffle": False}, "shuffle: the state has True, this loader False"),
        ({"batch_size": 16}, "batch_size: the state has 8, this loader 16; state.rebatch(16)"),
        ({"remainder": "pad"}, "remainder: the state has 'drop', this loader 'pad'"),
        ({"source": X[:8]}, "length: the state has 16, this loader 8"),
    ]:
        options = {"shuffle": True, "state": STATE, **options}
        yield Row(f"state= of a loader with another {says.split(':')[0]}", MADE, state, says, late(arrays, **options))
    for value in (0, -1, "8", 8.0, True, None, 2**70, np.float32(8), [8]):
        yield Row(f"state.rebatch({value!r})", MADE, state, "batch_size= ... an integer, at least 1, is needed", late(STATE.rebatch, value))
    yield Row("state.rebatch of batches", MADE, state, "rebatch: the source makes the batches", late(OF_BATCHES.rebatch, 8))
    for name, value in {"text": "x", "None": None, "int": 3}.items():
        yield Row(f"decode of {name}", MADE, state, f"not from {type(value).__name__}", late(ps.LoaderState.decode, value))
    for name, text, says in [
        ("None", None, "cannot be read"),
        ("a list", "[]", "an object"),
        ("nothing", "{}", "lacks batch_rows, batches"),
        ("a field too many", field(more=1), "`more`"),
        ("rows below 0", field(rows=-1), "rows=-1"),
        ("rows of a float", field(rows=1.5), "$.rows"),
        ("a newer version", field(version=99), "newer prefetchshard: version 99"),
    ]:
        yield Row(f"from_json of {name}", MADE, state, says, late(ps.LoaderState.from_json, text))
    yield Row("load of None", MADE, TypeError, "not NoneType", late(ps.LoaderState.load, None))
    yield Row("load of no file", MADE, FileNotFoundError, "no-such-state", late(ps.LoaderState.load, "no-such-state"))
    yield Row("spec of no batch", MADE, ps.BatchError, "the source has no batch", lambda: ps.prefetch([], P("data")).spec())
    yield Row("spec of no such leaf", MADE, KeyError, "'z' is no leaf; the leaves are 'x', 'y'", lambda: ps.prefetch([BATCH]).spec()["z"])
    yield Row("stats before a run", MADE, bad, "has not run yet", lambda: pre().stats())
    yield Row("len of an iterator", MADE, TypeError, "a one-shot iterator has no length", lambda: len(pre()))


ROWS: list[Row] = [
    *settings(), *functions(), *combinations(), *sources(), *odd_sources(), *shardings(), *leaves(), *changes(), *values(), *meshes(), *states(),
]  # fmt: skip


@pytest.mark.skipif(jax.device_count() != 8, reason="the numbers in the texts are those of eight devices")
@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_a_bad_input(row: Row) -> None:
    OPENED.clear()
    error, when = outcome(row.call)
    assert (type(error), when) == (row.kind, row.when), error
    text = "\n".join([str(error), *getattr(error, "__notes__", ())])
    place = 0
    for part in row.says.split(" ... "):
        found = text.find(part, place)
        assert found >= 0, f"{part!r} is not in {text!r}"
        place = found + len(part)
    if when in (MADE, ITER):
        assert [source.asked for source in OPENED] == [0] * len(OPENED), "an element was taken"
        assert not threads_left()


def test_the_rows_are_many_and_have_names_of_their_own() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS) >= 200
    assert not [row.name for row in ROWS if " at 0x" in row.name]


@pytest.mark.parametrize("number", [np.int64(2), np.uint8(2)])
def test_numbers_of_numpy_are_no_bad_inputs(number: Any) -> None:
    assert len(list(arrays(seed=number, epochs=number, depth=number, read_ahead=number, workers=number))) == 4
    assert len(list(arrays(device_memory=np.int64(1 << 20), host_memory=np.int64(1 << 20)))) == 2
    assert STATE.rebatch(number).fingerprint.batch_size == 2
    assert ps.PerDevice(number).rows == 2
    if jax.device_count() > 1:
        assert dict(ps.make_mesh({"a": number}, jax.devices()[:2]).shape) == {"a": 2}


def test_a_batch_inside_jit_can_be_described() -> None:
    told: list[str] = []
    jax.jit(lambda batch: (told.append(ps.describe(batch)), batch)[1])({"x": X})
    assert "traced, nowhere yet" in told[0]
