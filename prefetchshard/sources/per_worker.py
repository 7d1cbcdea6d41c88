"""A dataset for each reader thread, for datasets that are not thread-safe."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from typing import Any, cast

from prefetchshard.base.errors import ConfigError, SourceError
from prefetchshard.base.signatures import is_async, misfit
from prefetchshard.sources.dataset import Dataset, ask_many
from prefetchshard.sources.epochs import set_epoch


class PerWorker:
    """A function that makes a dataset for each worker; see `per_worker`."""

    def __init__(self, make_dataset: Callable[[], Any]) -> None:
        if not callable(make_dataset):
            raise ConfigError(
                f"ps.per_worker takes a function that makes a dataset, or its class, not a dataset ({type(make_dataset).__qualname__}): "
                f"ps.per_worker(lambda: Dataset(path))"
            )
        if is_async(make_dataset):
            raise ConfigError("ps.per_worker takes a function that makes a dataset, and got an async one, which nobody awaits")
        why = misfit(make_dataset)
        if why is not None:
            raise ConfigError(
                f"ps.per_worker calls its function without arguments, and it cannot be called so: {why}; ps.per_worker(lambda: Dataset(path))"
            )
        self.make_dataset = make_dataset

    def __repr__(self) -> str:
        return f"per_worker({getattr(self.make_dataset, '__qualname__', self.make_dataset)})"


def per_worker(make_dataset: Callable[[], Any]) -> PerWorker:
    """As a source: a dataset of its own for each worker, for datasets that several threads must not read at once.

    That is so where a dataset seeks and reads one open file, or returns one buffer again and again. The loader makes one dataset where it
    is made, to learn the length; the first worker reads that one. The other workers make theirs in their own threads when they read
    their first rows, and all workers of each later run do. A dataset with a `close` method is closed when its worker ends.

    Args:
        make_dataset: returns a dataset, with `__len__` and `__getitem__`; called without arguments. All must have the same rows. Where it
            returns the same dataset each time, that one is read by all workers.

    Raises:
        ConfigError: it is no function.

    Example:
        loader = ps.Loader(ps.per_worker(lambda: [np.float32(row) for row in range(64)]), P("data"), batch_size=16, workers=2)
        assert np.concatenate([np.asarray(batch) for batch in loader]).tolist() == list(range(64))
    """
    return PerWorker(make_dataset)


class WorkerDatasets(Dataset):
    """The source behind `per_worker`: reads from the dataset of the thread that asks.

    Raises:
        ConfigError: what the function returns is no dataset.
    """

    def __init__(self, make_dataset: Callable[[], Any]) -> None:
        first = make_dataset()
        if not hasattr(first, "__len__") or not hasattr(first, "__getitem__"):
            raise ConfigError(
                f"the function of ps.per_worker returned a {type(first).__qualname__}, which is no dataset: it has no __len__ and __getitem__"
            )
        if isinstance(first, Mapping):
            raise ConfigError(
                f"the function of ps.per_worker returned a {type(cast('Any', first)).__qualname__}, which is asked by key, not by row; "
                f"arrays need no ps.per_worker, several threads may read them"
            )
        super().__init__(first)
        self.dataset = None
        self.shares_items = False
        self.make_dataset = make_dataset
        self.name = repr(PerWorker(make_dataset))
        self._first = [first]  # until a worker takes it; `pop` is atomic
        self._epoch: tuple[int, int | None] = (0, None)
        self._local = _Local()

    def read(self, row: int) -> Any:
        return self._mine()[row]

    def read_many(self, rows: list[int]) -> list[Any]:
        return ask_many(self._mine(), rows)

    def size_now(self) -> int:
        return len(self._mine())

    def set_epoch(self, epoch: int, run_epoch: int | None) -> None:
        """Each dataset is told by its own thread before that reads on."""
        self._epoch = self.told = epoch, run_epoch

    def leave(self) -> None:
        """Close the dataset of this thread."""
        dataset, self._local.dataset = self._local.dataset, None
        close = getattr(dataset, "close", None)
        if callable(close):
            close()

    def _mine(self) -> Any:
        local = self._local
        if local.dataset is None:
            local.dataset = self._next()
            local.told = None
        if local.told != self._epoch:
            local.told = self._epoch
            set_epoch(local.dataset, *self._epoch)
        return local.dataset

    def _next(self) -> Any:
        """A dataset that no thread reads yet.

        Raises:
            SourceError: it has another length than the first one.
        """
        with contextlib.suppress(IndexError):
            return self._first.pop()
        dataset = self.make_dataset()
        if len(dataset) != self.length:
            raise SourceError(
                f"the datasets of {self.name} differ: the first one has {self.length} rows, and one that was made later has {len(dataset)}"
            )
        return dataset


class _Local(threading.local):
    """What each thread has for itself."""

    dataset: Any = None
    told: tuple[int, int | None] | None = None
