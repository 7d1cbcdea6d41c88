"""What the loader reaches on an accelerator by number of workers, and beside the same work by hand, in one run.

    python bench/accelerator.py [--devices N] [--workers 4,8,12,16] [--rows 8192] [--compare 100000] [--json FILE]

Images uint8 [rows, 224, 224, 3] in host memory, random rows, 256 a device; a step of bfloat16 matrix products of about 6.4 ms on an H100;
an iterator over batches that exist, and one that makes each in fresh memory; forty leaves [64, 16] int32, beside the same values packed by
hand into one array and cut up by one jitted function. GB are 1e9 bytes. The first batches of each case are not counted (the ring is made
then), and the clock starts and stops with nothing in flight. At last so many rows, all values of each, are compared on the devices with
the array that they come from. `bench/stress.py` compares batches of every kind.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import queue
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import prefetchshard as ps

ROWS_A_DEVICE = 256
SIDE = 224


class Report:
    """Prints each figure as it comes, and keeps it as a JSON line."""

    def __init__(self, path: str | None) -> None:
        self._path = path

    def __call__(self, case: str, **figures: float | str) -> None:
        words = "  ".join(f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}" for name, value in figures.items())
        print(f"{case:44s} {words}", flush=True)
        if self._path:
            with open(self._path, "a") as file:
                file.write(json.dumps({"case": case, **figures}) + "\n")


def measure(batches: Iterable[Any], skip: int, use: Callable[[Any], Any] | None = None) -> dict[str, float]:
    """Milliseconds and bytes a batch, and CPU seconds, after the first `skip` batches."""
    count, nbytes, last, began, cpu = 0, 0, None, 0.0, 0.0
    for batch in batches:
        last = batch if use is None else use(batch)
        count += 1
        if count == skip:
            jax.block_until_ready(last)
            began, cpu = time.perf_counter(), time.process_time()
        nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(batch))
    jax.block_until_ready(last)
    seconds, steps = time.perf_counter() - began, count - skip
    gigabytes = nbytes * steps / 1e9
    return {"GB/s": gigabytes / seconds, "ms": 1e3 * seconds / steps, "CPU s/GB": (time.process_time() - cpu) / gigabytes}


def through_queue(source: Iterable[Any], sharding: NamedSharding) -> Iterator[Any]:
    """By hand: one thread that makes and puts, and `queue.Queue(2)`."""
    ready: queue.Queue[Any] = queue.Queue(2)

    def run() -> None:
        for batch in source:
            ready.put(jax.device_put(batch, sharding))
        ready.put(None)

    threading.Thread(target=run, daemon=True).start()
    return iter(ready.get, None)


class Images:
    """The image workload over the devices of a mesh."""

    def __init__(self, rows: int, mesh: Mesh, report: Report) -> None:
        self.images = np.random.default_rng(0).integers(0, 255, (rows, SIDE, SIDE, 3), np.uint8)
        self.labels = np.arange(rows, dtype=np.int32)
        self.mesh = mesh
        self.sharding = NamedSharding(mesh, PartitionSpec("data"))
        self.batch = ROWS_A_DEVICE * mesh.size
        self.report = report
        self.orders = [np.random.default_rng(i).integers(0, rows, self.batch) for i in range(60)]

    def loader(self, workers: int, steps: int = 600) -> ps.Loader:
        epochs = -(-steps * self.batch // len(self.images))
        data = {"image": self.images, "label": self.labels}
        return ps.Loader(data, self.sharding, batch_size=self.batch, shuffle=True, epochs=epochs, workers=workers)

    def made(self, steps: int) -> Iterator[dict[str, Any]]:
        for i in range(steps):
            order = self.orders[i % len(self.orders)]
            yield {"image": self.images[order], "label": self.labels[order]}

    def transfers(self, workers: list[int]) -> None:
        self.report("images, thread + queue by hand", **measure(through_queue(self.made(60), self.sharding), 12))
        for count in workers:
            self.report(f"images, {count} workers", **measure(self.loader(count), 80))

    def with_step(self, workers: list[int]) -> None:
        weights = jax.device_put(jnp.ones((8192, 8192), jnp.bfloat16) * 0.01, NamedSharding(self.mesh, PartitionSpec()))

        @jax.jit
        def step(w: jax.Array, images: jax.Array) -> jax.Array:
            y = w
            for _ in range(5):
                y = (y @ w) * jnp.bfloat16(0.01)
            return y[:1, :1].astype(jnp.float32) + images[:, 0, 0, :1].astype(jnp.float32).sum()

        still = jax.device_put(self.images[: self.batch], self.sharding)
        jax.block_until_ready(step(weights, still))

        def alone() -> float:
            return measure(({"image": still} for _ in range(170)), 20, lambda batch: step(weights, batch["image"]))["ms"]

        for count in workers:
            before = alone()
            figures = measure(self.loader(count), 80, lambda batch: step(weights, batch["image"]))
            ideal = (before + alone()) / 2
            self.report(f"images with a step, {count} workers", **{"over step alone": figures["ms"] / ideal}, **figures)

    def wrapped(self) -> None:
        pieces = [slice(i * self.batch, (i + 1) * self.batch) for i in range(min(8, len(self.images) // self.batch))]
        exist = [{"image": self.images[piece].copy(), "label": self.labels[piece]} for piece in pieces]

        def existing(steps: int) -> Iterator[dict[str, Any]]:
            return (exist[i % len(exist)] for i in range(steps))

        self.report("existing batches, thread + queue, no copy", **measure(through_queue(existing(100), self.sharding), 24))
        for reuses in (True, False):
            batches = ps.prefetch(existing(200), self.sharding, workers=8, reuses_buffers=reuses)
            self.report(f"existing batches, reuses_buffers={reuses}", **measure(batches, 40))
        for reuses in (True, False):
            source = [0.0, 0.0]
            for i in range(2):
                began = time.perf_counter()
                for _ in self.made(40):
                    pass
                source[i] = (time.perf_counter() - began) / 40 * 1e3
                if i == 0:
                    figures = measure(ps.prefetch(self.made(100), self.sharding, workers=8, reuses_buffers=reuses), 24)
            alone = sum(source) / 2
            self.report(f"fresh batches, reuses_buffers={reuses}", **{"over source alone": figures["ms"] / alone}, **figures)
        self.report("fresh batches, thread + queue", **measure(through_queue(self.made(80), self.sharding), 24))

    def compared(self, count: int, workers: int) -> None:
        source = jax.device_put(self.images, NamedSharding(self.mesh, PartitionSpec()))

        @jax.jit
        def differ(batch: Any) -> jax.Array:
            return (batch["image"] != source[batch["label"]]).any(axis=(1, 2, 3)).sum()

        found, rows = [], 0
        for batch in self.loader(workers, -(-count // self.batch)):
            found.append(differ(batch))
            rows += self.batch
            if len(found) % 16 == 0:
                jax.block_until_ready(found[-8])
        self.report("rows compared on the devices", rows=float(rows), wrong=float(sum(map(int, found))))


def small_leaves(sharding: NamedSharding, report: Report) -> None:
    tree = {f"k{i}": np.random.default_rng(i).integers(0, 9, (64, 16)).astype(np.int32) for i in range(40)}
    packed = np.concatenate(list(tree.values()), axis=1)
    unpack = jax.jit(lambda x: {name: x[:, i * 16 : (i + 1) * 16] for i, name in enumerate(tree)}, out_shardings=sharding)
    ratios: list[tuple[float, ...]] = []
    for _ in range(5):
        by_hand = measure((unpack(jax.device_put(packed, sharding)) for _ in range(400)), 50, jax.block_until_ready)["ms"]
        singly = measure((jax.device_put(tree, sharding) for _ in range(150)), 50, jax.block_until_ready)["ms"]
        ours = measure(ps.prefetch((tree for _ in range(400)), sharding), 50, jax.block_until_ready)["ms"]
        ratios.append((ours / by_hand, by_hand, singly, ours))
    names = ("over packed by hand", "packed by hand ms", "one tree put ms", "prefetchshard ms")
    report("40 small leaves", **{name: statistics.median(column) for name, column in zip(names, zip(*ratios, strict=True), strict=True)})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--devices", type=int)
    parser.add_argument("--workers", default="4,8,12,16")
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--compare", type=int, default=100_000)
    parser.add_argument("--json")
    args = parser.parse_args()
    workers = [int(count) for count in args.workers.split(",")]
    devices = jax.devices()[: args.devices]
    mesh = Mesh(np.array(devices), ("data",))
    report = Report(args.json)
    print(f"{' '.join(sys.argv)}  {os.environ.get('GLIBC_TUNABLES', '')}")
    print(f"{len(devices)} x {devices[0].device_kind}, {os.cpu_count()} cores, jax {jax.__version__}, Python {platform.python_version()}")
    images = Images(args.rows, mesh, report)
    images.transfers(workers)
    images.with_step(workers[:2])
    images.wrapped()
    small_leaves(images.sharding, report)
    images.compared(args.compare, workers[-1])


if __name__ == "__main__":
    main()
