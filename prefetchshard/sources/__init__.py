"""The kinds of sources, and how each is recognised. The first rule that matches decides:

1. arrays: a NumPy array, or a mapping, tuple or registered container of them; wrapped in `ps.OnDevice`, they stay on the devices;
2. dataset: `__len__` and `__getitem__`;
3. iterable or iterator: `__iter__`, `__next__`; one that can save and restore its state (see `stateful`) resumes from it;
4. async iterable: `__aiter__`, or the result of `ps.from_this_loop`;
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
from prefetchshard.sources.asynchronous import AsyncStream, FromThisLoop
from prefetchshard.sources.dataset import Dataset
from prefetchshard.sources.device_arrays import OnDevice
from prefetchshard.sources.iterables import FactoryStream, IterableStream, Stream

Source: TypeAlias = Arrays | Dataset | Stream


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
        raise ConfigError("the source is None")
    if isinstance(source, type):  # a factory, although it has the methods of its instances as attributes
        return FactoryStream(source, lambda made: _stream_of_epoch(made, batched))
    arrays = source.source if isinstance(source, OnDevice) else find_arrays(source)
    if arrays is not None:
        if not batched:
            raise ConfigError(
                "the source is arrays, and without batch_size it cannot be told what one batch is; pass batch_size=..., "
                "or wrap a single batch as a list: [batch]"
            )
        return arrays
    if hasattr(source, "__len__") and hasattr(source, "__getitem__") and not _is_torch_iterable(source):
        _refuse_columns(source)
        return Dataset(source)
    _warn_of_fork(source)
    return _stream(source, batched)


def _stream(source: Any, batched: bool) -> Stream:
    if isinstance(source, FromThisLoop):
        return AsyncStream(source.iterable, source.home)
    if hasattr(source, "__next__") or hasattr(source, "__iter__"):
        return IterableStream(source)
    if hasattr(source, "__aiter__"):
        return AsyncStream(source)
    if callable(source):
        return FactoryStream(source, lambda made: _stream_of_epoch(made, batched))
    raise ConfigError(
        f"an object of type {type(source).__module__}.{type(source).__qualname__} is no source: it has none of __getitem__ with __len__, "
        f"__iter__, __next__, __aiter__, and cannot be called"
    )


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
    return IterableStream(_in_order(found)) if isinstance(found, (Arrays, Dataset)) else found


def _in_order(source: Arrays | Dataset) -> Iterator[Any]:
    for row in range(source.length):
        try:
            item = source.read(row)
        except StopIteration as error:  # raised in a generator, Python would turn it into a RuntimeError
            raise safe_to_raise(error, "the dataset") from error
        yield item


def _refuse_columns(source: Any) -> None:
    """Refuse tables: they have a length and `__getitem__`, but `source[key]` is a column, not a row."""
    if hasattr(source, "keys") and not hasattr(source, "__getitems__"):
        raise ConfigError(
            f"the source, a {type(source).__module__}.{type(source).__qualname__}, is asked by key, not by row: pass its columns as NumPy "
            f"arrays, {{key: np.asarray(source[key]) for key in source.keys()}}, or a list of examples"
        )


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
            stacklevel=5,
        )
