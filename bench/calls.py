"""How many Python functions of this package a batch, and an example, goes through, by thread.

    python bench/calls.py

Counted with `sys.setprofile`, the difference between a long and a short run, so that start and end do not count: arrays of two leaves in
batches of 64 rows, and a dataset of examples with a `transform`, one worker, eight CPU devices. A count, not a time: it does not depend on
the machine, but for how often a thread finds that it has to wait.
"""

from __future__ import annotations

import collections
import os
import threading
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
import jax

jax.config.update("jax_num_cpu_devices", 8)

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import prefetchshard as ps

ROWS = 64
FOLDER = os.path.dirname(os.path.abspath(ps.__file__)) + os.sep


class Examples:
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, row: int) -> Any:
        if not 0 <= row < self.length:
            raise IndexError(row)
        return {"x": np.full(16, row, np.float32), "y": np.int32(row)}


def counted(make: Callable[[int], ps.Loader], batches: int) -> collections.Counter[str]:
    """Calls by thread while so many batches are read."""
    calls: collections.Counter[str] = collections.Counter()

    def count(frame: Any, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(FOLDER):
            calls[threading.current_thread().name] += 1

    threading.setprofile(count)
    try:
        with make(batches) as loader:
            for _ in loader:
                pass
    finally:
        threading.setprofile(None)
    return calls


def main() -> None:
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))

    def arrays(batches: int) -> ps.Loader:
        leaves = {"x": np.zeros((batches * ROWS, 16), np.float32), "y": np.zeros(batches * ROWS, np.int32)}
        return ps.Loader(leaves, sharding, batch_size=ROWS, workers=1)

    def examples(batches: int) -> ps.Loader:
        return ps.Loader(Examples(batches * ROWS), sharding, batch_size=ROWS, workers=1, transform=lambda example: example)

    for name, make, short in (("arrays", arrays, 100), ("examples", examples, 50)):
        few, many = counted(make, short), counted(make, 3 * short)
        for thread in sorted(many):
            a_batch = (many[thread] - few[thread]) / (2 * short)
            an_example = f", {a_batch / ROWS:.1f} an example" if name == "examples" and "reader" in thread else ""
            print(f"{name:10s} {thread:26s} {a_batch:8.1f} calls a batch{an_example}")


if __name__ == "__main__":
    main()
