"""The loaders that are compared: a file each, used the way that its own documentation recommends for the work at hand.

Each file has `start(workload, place, workers)`, which returns an endless iterator of batches on the devices, or raises `NotApplicable`.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import packages_distributions, version
from typing import Any

from bench.data import Workload
from bench.place import Place


class NotApplicable(Exception):
    """Why a loader is not run on a workload."""


@dataclass(frozen=True)
class Entry:
    """A loader: its name here, its file, what it needs, how it is used.

    Attributes:
        needs: the modules that must be importable, and what installs each.
        plain: it yields leaves `(rows, ...)`; else the devices are a leading axis.
    """

    name: str
    file: str
    says: str
    needs: tuple[tuple[str, str], ...] = ()
    plain: bool = True

    def missing(self) -> list[str]:
        """The packages that are not installed."""
        return [package for module, package in self.needs if importlib.util.find_spec(module.partition(".")[0]) is None]

    def version(self) -> str:
        """Of the package, empty for loops written by hand."""
        if self.name in ("prefetchshard", "processes"):
            return importlib.import_module("prefetchshard").__version__
        installed = packages_distributions()
        names = [name for module, _ in self.needs for name in installed.get(module.partition(".")[0], ())]
        return version(names[-1]) if names else ""  # of several the last: a package of types or tools may share the module's name

    def load(self) -> Any:
        """Its file, with everything that it needs imported."""
        module = importlib.import_module(f"bench.loaders.{self.file}")
        for name, _ in self.needs:
            importlib.import_module(name)
        return module


GRAIN, TORCH, SPDL = (("grain", "grain"),), (("torch", "torch"),), (("spdl.pipeline", "spdl_core"),)

LOADERS = {
    entry.name: entry
    for entry in (
        Entry("prefetchshard", "prefetchshard_loader", "ps.Loader, or ps.prefetch around an iterator"),
        Entry("processes", "prefetchshard_processes", "ps.Loader with workers=ps.Processes(n)"),
        Entry("naive", "naive", "the batch is made and put where it is needed"),
        Entry("thread", "thread", "by hand: one thread makes and puts, queue.Queue(2); copies what the source may overwrite"),
        Entry("pool", "pool", "by hand: a pool of threads makes batches, one puts them, queue.Queue(2)"),
        Entry("flax", "flax_loader", "flax.jax_utils.prefetch_to_device, 2 ahead", (("flax", "flax"),), plain=False),
        Entry("datarax", "datarax_loader", "datarax.prefetch_to_device, 2 ahead", (("datarax", "datarax"),)),
        Entry("grain", "grain_examples", "from examples, reading threads, grain.experimental.device_put", GRAIN),
        Entry("grain-batches", "grain_batches", "the source makes whole batches, reading threads, grain.experimental.device_put", GRAIN),
        Entry("grain-processes", "grain_processes", "from examples, worker processes, grain.experimental.device_put", GRAIN),
        Entry("spdl", "spdl_loader", "a pipeline that makes whole batches in threads and puts them", SPDL),
        Entry("torch", "torch_loader", "DataLoader with worker processes, a thread that puts", TORCH),
        Entry("torch-pinned", "torch_pinned", "DataLoader with worker processes and page-locked batches, a thread that puts", TORCH),
        Entry("tfdata", "tfdata_loader", "tf.data with parallel map and prefetch, put 2 ahead", (("tensorflow", "tensorflow"),)),
    )
}


def host_batches(workload: Workload, place: Place) -> Iterator[Any]:
    """The batches of one thread, safe to keep: copied where the source overwrites them, or where the CPU backend would alias its arrays."""
    batches = workload.batches()
    if workload.gives == "refilled" or (workload.gives == "kept" and place.platform == "cpu"):
        return map(copied, batches)
    return batches


def copied(batch: Any) -> Any:
    return {name: leaf.copy() for name, leaf in batch.items()}


def no_iterators(workload: Workload, reason: str) -> None:
    """Raises NotApplicable where the source is an iterator."""
    if workload.kind == "batches":
        raise NotApplicable(reason)
