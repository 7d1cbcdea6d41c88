"""The kinds of sources, and how each is recognised. The first rule that matches decides:

1. arrays: a NumPy array or torch tensor, or a mapping, tuple or registered container of them; wrapped in `ps.OnDevice`, they stay on the devices;
2. dataset: `__len__` and `__getitem__`;
3. iterable or iterator: `__iter__`, `__next__`; one that can save and restore its state (see `stateful`) resumes from it;
4. async iterable: `__aiter__`, or the result of `ps.from_this_loop` or `ps.in_own_loop`;
5. factory: a callable that returns any of these, called once per epoch.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Iterator
from typing import Any, TypeAlias

from prefetchshard.base.errors import ConfigError, PrefetchWarning
from prefetchshard.base.faults import safe_to_raise
from prefetchshard.sources.arrays import Arrays, find_arrays
from prefetchshard.sources.asynchronous import AsyncStream, ChosenLoop
from prefetchshard.sources.dataset import Dataset
from prefetchshard.sources.device_arrays import OnDevice
from prefetchshard.sources.epochs import makes_batches
from prefetchshard.sources.iterables import FactoryStream, IterableStream, OpenIterator, OpenSource, PulledSource, Stream
from prefetchshard.sources.per_worker import PerWorker, WorkerDatasets
from prefetchshard.sources.rebatch import Rebatched, RebatchedStream
from prefetchshard.sources.stateful import refuse_snapshot
from prefetchshard.sources.tables import refuse_table

Source: TypeAlias = Arrays | Dataset | Stream


_WAYS = "pass arrays, a dataset, an iterable of batches or examples, or a function that returns one"


def recognise(source: Any, *, batched: bool) -> Source:
    """The source wrapped as its kind.

    Args:
        source: what the user passed.
        batched: whether there is a batch size, so that items are examples.

    Raises:
        ConfigError: it is none of the kinds, or cannot be read with these settings; the message says what to change.
    """
    if isinstance(source, (str, bytes, bytearray)):
        raise ConfigError(f"a {type(source).__qualname__} is not a source of batches; open the file and yield its examples")
    if source is None:
        raise ConfigError(f"the source is None; {_WAYS}")
    if isinstance(source, type):  # a factory, although it has the methods of its instances as attributes
        _refuse_class(source)
        return FactoryStream(source, lambda made: _stream_of_epoch(made, batched))
    if isinstance(source, Rebatched):
        source.check(batched=batched)
        found = recognise(source.source, batched=False)
        return RebatchedStream(InOrder(found) if isinstance(found, (Arrays, Dataset)) else found, source.batch_size)
    if batched and makes_batches(source):
        raise ConfigError(
            f"this source, a {type(source).__module__}.{type(source).__qualname__}, batches already: leave batch_size out, give it "
            f"batch_size=None, or cut its batches anew, ps.rebatch(source, rows)"
        )
    refuse_table(source)
    if isinstance(source, PerWorker):
        return WorkerDatasets(source.make_dataset)
    arrays = source.source if isinstance(source, OnDevice) else find_arrays(source)
    if arrays is not None:
        if not batched:
            raise ConfigError(
                "the source is arrays, and without batch_size it cannot be told what one batch is; pass batch_size=..., "
                "or wrap a single batch as a list: [batch]"
            )
        return arrays
    if hasattr(source, "__len__") and hasattr(source, "__getitem__") and not _is_torch_iterable(source):
        return Dataset(source)
    _warn_of_fork(source)
    return _stream(source, batched)


def _refuse_class(kind: type) -> None:
    """Refuse a class whose objects can be no source.

    Raises:
        ConfigError: it is one.
    """
    makes_objects = kind.__new__ is object.__new__  # else a call may return anything
    is_dataset = hasattr(kind, "__getitem__") and hasattr(kind, "__len__")
    if makes_objects and not is_dataset and not any(hasattr(kind, name) for name in ("__iter__", "__next__", "__aiter__")):
        raise ConfigError(f"the source is the class {kind.__module__}.{kind.__qualname__}, whose objects are no source either; {_WAYS}")


def _stream(source: Any, batched: bool) -> Stream:
    if isinstance(source, ChosenLoop):
        if source.is_factory:
            return FactoryStream(source.source, lambda made: _stream_of_epoch(source.around(made), batched))
        return AsyncStream(source.source, source)
    if hasattr(source, "__next__") or hasattr(source, "__iter__"):
        return IterableStream(source)
    if hasattr(source, "__aiter__"):
        return AsyncStream(source)
    if callable(source):
        return FactoryStream(source, lambda made: _stream_of_epoch(made, batched))
    what = f"an object of type {type(source).__module__}.{type(source).__qualname__} is no source"
    if inspect.iscoroutine(source):
        raise ConfigError(f"{what}: an async function returned it; await it, or pass an async generator, which yields")
    raise ConfigError(f"{what}: it has none of __getitem__ with __len__, __iter__, __next__, __aiter__, and cannot be called; {_WAYS}")


def _stream_of_epoch(made: Any, batched: bool) -> Stream:
    """The stream of one epoch from what a factory returned; arrays and datasets too are then read in order by one thread."""
    if callable(made) and not any(hasattr(made, name) for name in ("__iter__", "__getitem__", "__aiter__")):
        raise ConfigError(f"the factory returned something callable ({type(made).__qualname__}), not a source")
    if isinstance(made, OnDevice):
        raise ConfigError("the factory returned ps.OnDevice, whose arrays would be put anew each epoch: pass it itself, with epochs=...")
    if inspect.iscoroutine(made):
        made.close()
        raise ConfigError(
            "the factory is an async function; make it an async generator, which yields, or one that returns such a generator"
        )
    found = recognise(made, batched=batched)
    return InOrder(found) if isinstance(found, (Arrays, Dataset)) else found


class InOrder(PulledSource):
    """A stream over arrays or a dataset, read in order by one thread."""

    one_shot = False

    def __init__(self, source: Arrays | Dataset) -> None:
        self.kind = source.kind
        self.length = source.length
        self._source = source

    def open(self, epoch: int, loop: Any, snapshot: bytes | None = None) -> OpenSource:
        del epoch, loop
        if snapshot is not None:
            raise refuse_snapshot(self)
        return OpenIterator(self._items(), ours=True)

    def _items(self) -> Iterator[Any]:
        source = self._source
        try:
            for row in range(source.length):
                try:
                    item = source.read(row)
                except StopIteration as error:  # raised in a generator, Python would turn it into a RuntimeError
                    raise safe_to_raise(error, "the dataset") from error
                yield item
        finally:
            if isinstance(source, Dataset):
                source.leave()


def _is_torch_iterable(source: Any) -> bool:
    """torch gives all its datasets a `__getitem__`, even those that can only be iterated."""
    return any(kind.__name__ == "IterableDataset" and kind.__module__.startswith("torch.") for kind in type(source).__mro__)


def _warn_of_fork(source: Any) -> None:
    """Warn of a torch DataLoader that forks its workers: JAX's threads hold locks, so a forked child may hang."""
    if not type(source).__module__.startswith("torch") or not getattr(source, "num_workers", 0) or not sys.platform.startswith("linux"):
        return
    context = getattr(source, "multiprocessing_context", None)
    method = context if isinstance(context, str) or context is None else context.get_start_method()
    if method in (None, "fork") and sys.version_info < (3, 14):
        warnings.warn(
            f"a torch DataLoader with num_workers={source.num_workers} forks its workers from a process in which JAX runs, which can hang; "
            f"pass multiprocessing_context='spawn' to it (or num_workers=0: this loader's own threads read ahead)",
            PrefetchWarning,
            stacklevel=6,
        )
