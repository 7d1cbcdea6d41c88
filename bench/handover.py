"""What handing over a batch costs: tiny batches through prefetchshard, and through a thread, a queue and `device_put` by hand.

    python bench/handover.py [--batches 2000] [--rounds 7]

Both copy each batch once (without that copy the loop by hand is not safe: the source refills its buffers). Rounds alternate, so that a
change of the machine's speed meets both; the figure is the median of the ratios of neighbouring rounds. Also the time of `next()` where
a batch is ready, and of importing the library over importing jax; and of an example of an async source, beside the same examples from a
generator, and beside an asyncio loop by hand, which stacks 64 examples and calls `device_put`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")
import jax

jax.config.update("jax_num_cpu_devices", 8)

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import prefetchshard as ps


def batches(count: int):
    """A source that refills its two leaves."""
    batch = {"x": np.zeros((64, 16), np.float32), "y": np.zeros(64, np.int32)}
    for i in range(count):
        batch["x"][0, 0] = i
        batch["y"][0] = i
        yield batch


def by_hand(count: int, sharding: NamedSharding) -> float:
    ready: queue.Queue = queue.Queue(2)

    def run() -> None:
        for batch in batches(count):
            ready.put(jax.device_put({name: leaf.copy() for name, leaf in batch.items()}, sharding))
        ready.put(None)

    began = time.perf_counter()
    threading.Thread(target=run).start()
    while ready.get() is not None:
        pass
    return (time.perf_counter() - began) / count


def by_prefetch(count: int, sharding: NamedSharding) -> float:
    began = time.perf_counter()
    for _ in ps.prefetch(batches(count), sharding):
        pass
    return (time.perf_counter() - began) / count


def next_when_ready(sharding: NamedSharding) -> float:
    """Median seconds of `next()` where a batch is ready."""
    iterator = iter(ps.prefetch(batches(400), sharding, depth=8))
    next(iterator)
    times = []
    for _ in range(40):
        while iterator.stats().ready.ready < 8:
            time.sleep(0.001)
        for _ in range(8):
            began = time.perf_counter()
            next(iterator)
            times.append(time.perf_counter() - began)
    iterator.close()
    return statistics.median(times)


ROWS = 64


def example(i: int):
    return {"x": np.full(16, i, np.float32), "y": np.int32(i)}


def examples(count: int):
    for i in range(count):
        yield example(i)


async def async_examples(count: int, *, waits: bool):
    for i in range(count):
        if waits:
            await asyncio.sleep(0)
        yield example(i)


def examples_by_prefetch(source, count: int, sharding: NamedSharding) -> float:
    began = time.perf_counter()
    for _ in ps.Loader(source, sharding, batch_size=ROWS):
        pass
    return (time.perf_counter() - began) / count


def examples_by_hand(count: int, sharding: NamedSharding, *, waits: bool) -> float:
    async def run() -> None:
        rows = []
        async for one in async_examples(count, waits=waits):
            rows.append(one)
            if len(rows) == ROWS:
                jax.device_put({name: np.stack([row[name] for row in rows]) for name in one}, sharding)
                rows.clear()

    began = time.perf_counter()
    asyncio.run(run())
    return (time.perf_counter() - began) / count


def print_examples(count: int, rounds: int, sharding: NamedSharding) -> None:
    """What an example of an async source costs, which never waits, or lets its loop turn before each."""
    for waits in (False, True):

        def each(count: int, waits: bool = waits) -> tuple[float, float, float]:
            return (
                examples_by_prefetch(async_examples(count, waits=waits), count, sharding),
                examples_by_prefetch(examples(count), count, sharding),
                examples_by_hand(count, sharding, waits=waits),
            )

        each(10 * ROWS)
        found = [each(count) for _ in range(rounds)]
        name = "async source that " + ("lets its loop turn" if waits else "never waits")
        print(f"{name:45s} {1e6 * statistics.median(a for a, _, _ in found):8.1f} us an example")
        print(f"  over a generator                            {statistics.median(a / b for a, b, _ in found):8.2f}")
        print(f"  over an asyncio loop by hand                {statistics.median(a / c for a, _, c in found):8.2f}")


def import_cost() -> float:
    """Seconds of `import prefetchshard` over `import jax`: the median of nine processes, with compiled bytecode as an installation has it."""
    code = "import jax, time; a = time.perf_counter(); import prefetchshard; print(time.perf_counter() - a)"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.TemporaryDirectory() as compiled:
        environment["PYTHONPYCACHEPREFIX"] = compiled
        seconds = [
            float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment).stdout)
            for _ in range(10)
        ]
    return statistics.median(seconds[1:])  # the first one compiled it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    by_hand(200, sharding)
    by_prefetch(200, sharding)
    pairs = [(by_hand(args.batches, sharding), by_prefetch(args.batches, sharding)) for _ in range(args.rounds)]
    print(
        f"{os.cpu_count()} cores, {len(jax.devices())} {jax.devices()[0].platform} devices, jax {jax.__version__}, Python {sys.version.split()[0]}"
    )
    print(f"thread + queue.Queue(2) + device_put by hand  {1e6 * statistics.median(a for a, _ in pairs):8.1f} us a batch")
    print(f"prefetchshard                                 {1e6 * statistics.median(b for _, b in pairs):8.1f} us a batch")
    print(f"ratio (median of {args.rounds} pairs)                    {statistics.median(b / a for a, b in pairs):8.2f}")
    print(f"next() on a ready batch                       {1e6 * next_when_ready(sharding):8.1f} us")
    print_examples(args.batches * 4, args.rounds, sharding)
    print(f"import prefetchshard over import jax          {1e3 * import_cost():8.1f} ms")


if __name__ == "__main__":
    main()
