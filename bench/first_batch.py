"""How long it takes from making a loader to its first batch on the devices: in a fresh process, and for the next loader there.

    python -m bench.first_batch [--workloads images,small] [--loaders thread,prefetchshard] [--workers 8] [--repeat 5]

Each run is a process of its own. Before the clock starts JAX has put one batch on the devices, by hand, and computed with it. The next
loader is made when the first one has run for half a second and was closed. The medians in milliseconds, and the least and the most.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

import jax

from bench.data import Sizes
from bench.loaders import LOADERS
from bench.place import Place, use_devices
from bench.steps import make_step
from bench.workloads import WORKLOADS

FIRST_LOADER_SECONDS = 0.5


def measure(workload_name: str, loader_name: str, workers: int, devices: int | None) -> dict[str, float]:
    """Milliseconds, in this process."""
    use_devices(devices)
    place = Place(devices or len(jax.devices()))
    workload = WORKLOADS[workload_name](Sizes.choose(place.platform, len(place.devices)))
    loader = LOADERS[loader_name].load()
    step = make_step(workload, place, None)
    for sample in workload.samples():
        jax.block_until_ready(step(place.put(sample)))
    found: dict[str, float] = {}
    for which in ("first", "next"):
        began = time.perf_counter()
        batches = loader.start(workload, place, workers)
        batch = jax.block_until_ready(next(batches))
        found[which] = 1e3 * (time.perf_counter() - began)
        while time.perf_counter() < began + FIRST_LOADER_SECONDS:
            batch = next(batches)
        jax.block_until_ready(batch)
        batches.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workloads", default="images")
    parser.add_argument("--loaders", default="thread,prefetchshard")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--devices", type=int)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        print(json.dumps(measure(args.workloads, args.loaders, args.workers, args.devices)))
        return
    for workload in args.workloads.split(","):
        found: dict[tuple[str, str], list[float]] = {}
        for _ in range(args.repeat):
            for loader in args.loaders.split(","):
                options = ["--workloads", workload, "--loaders", loader, "--workers", str(args.workers)]
                options += ["--devices", str(args.devices)] if args.devices else []
                done = subprocess.run([sys.executable, "-m", "bench.first_batch", "--here", *options], stdout=subprocess.PIPE, check=True)
                for which, value in json.loads(done.stdout.splitlines()[-1]).items():
                    found.setdefault((loader, which), []).append(value)
        for (loader, which), values in found.items():
            print(
                f"{workload:18s} {loader:16s} {which:6s} {statistics.median(values):7.1f} ms  ({min(values):.1f} to {max(values):.1f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
