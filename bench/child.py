"""One job, in a process of its own: `python -m bench.child JOB RESULT`, both JSON; RESULT is a file, written as soon as there is one."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bench import process
from bench.checks import WrongValuesError, check
from bench.data import Sizes, Workload
from bench.loaders import LOADERS, NotApplicable
from bench.place import Place, use_devices
from bench.steps import Pacer, Step, calibrate, make_step, seconds_alone
from bench.workloads import WORKLOADS

LEAST_BATCHES = 4  # that are measured, however long they take
Tell = Callable[[dict[str, Any]], Any]
KEPT = (0.0, 0.3, 0.6, 0.9)  # parts of the measured time after which a batch is kept, to be compared in full


def main() -> None:
    job, path = json.loads(sys.argv[1]), Path(sys.argv[2])
    faulthandler.dump_traceback_later(0.9 * job["timeout"])  # into the log, which is shown where there is no result in time
    use_devices(job["devices"])
    {"probe": probe, "calibrate": calibration, "run": run}[job["job"]](job, lambda result: path.write_text(json.dumps(result)))


def probe(job: dict[str, Any], tell: Tell) -> None:
    """What the devices are."""
    place = Place(job["devices"])
    tell(
        {
            "platform": place.platform,
            "device": place.devices[0].device_kind,
            "devices": len(place.devices),
            "jax": jax.__version__,
            "numpy": np.__version__,
        }
    )


def calibration(job: dict[str, Any], tell: Tell) -> None:
    """What the step must do to take so long."""
    place = Place(job["devices"])
    workload = WORKLOADS[job["workload"]](Sizes(**job["sizes"]))
    tell({"compute": calibrate(workload, place, job["step_ms"])})


def run(job: dict[str, Any], tell: Tell) -> None:
    """One loader on one workload."""
    try:
        _Run(job, tell).measure()
    except NotApplicable as reason:
        tell({"status": "n/a", "reason": str(reason)})
    except WrongValuesError as error:
        tell({"status": "wrong", "values_checked": False, "reason": str(error)})
    except Exception as error:  # noqa: BLE001 - said in the report, whatever it is
        traceback.print_exc()
        tell({"status": "failed", "reason": f"{type(error).__name__}: {error}"[:500]})


class _Run:
    def __init__(self, job: dict[str, Any], tell: Tell) -> None:
        self._job, self._tell = job, tell
        self._entry = LOADERS[job["loader"]]
        self._loader = self._entry.load()
        self._place = Place(job["devices"])
        self._workload: Workload = WORKLOADS[job["workload"]](Sizes(**job["sizes"]))
        self._step, self._alone = self._compiled()

    def _compiled(self) -> tuple[Step, float]:
        """The step, compiled for each shape of batch, and its seconds alone."""
        put = getattr(self._loader, "put", None) if not self._entry.plain else None
        step = make_step(self._workload, self._place, self._job["compute"])
        alone = 0.0
        for sample in self._workload.samples():
            batch = put(sample, self._place) if put else self._place.put(sample)
            alone = seconds_alone(step, batch, 20, self._job["seconds"] / 2) if self._job["compute"] else seconds_alone(step, batch, 1)
        return step, alone

    def measure(self) -> None:
        process.forget_peak()
        base = process.resident_bytes()
        began = time.perf_counter()
        batches = self._loader.start(self._workload, self._place, self._job["workers"])
        loop = _Loop(batches, self._step, self._workload)
        first_batch = jax.block_until_ready(next(batches))
        first = time.perf_counter() - began
        loop.use(first_batch)
        del first_batch
        warm_up = self._warm_up(loop)
        figures = self._timed(loop)
        figures["first_batch_seconds"] = first
        if self._job["compute"]:
            figures["step_alone_seconds"] = self._alone
            figures["step_over_alone"] = figures["batch_seconds"] / self._alone
        figures["rss_base_bytes"], figures["rss_peak_bytes"] = base, process.peak_bytes()
        report = {"status": "ok", "values_checked": False, **warm_up, **figures}
        if hasattr(batches, "stats"):
            report["detail"] = str(batches.stats())
        report["close_seconds"] = _close(batches)
        report |= check(self._workload, self._place, loop.probes, loop.kept, plain=self._entry.plain)
        self._tell(report | {"values_checked": True})

    def _warm_up(self, loop: _Loop) -> dict[str, Any]:
        """Until the loader runs as it does later: its buffers are full, its workers have started."""
        seconds = self._job["seconds"]
        began = time.perf_counter()
        enough = 8 + 2 * self._job["workers"]
        while (spent := time.perf_counter() - began) < 0.25 * seconds or (loop.taken < enough and spent < max(seconds, 1.0)):
            loop.take()
        loop.pacer.drain()
        return {"warm_up_batches": loop.taken, "warm_up_seconds": time.perf_counter() - began}

    def _timed(self, loop: _Loop) -> dict[str, Any]:
        seconds = self._job["seconds"]
        keep = [part * seconds for part in KEPT]
        before, taken, size = process.cpu_seconds(), loop.taken, loop.bytes
        began = time.perf_counter()
        while (spent := time.perf_counter() - began) < seconds or loop.taken - taken < LEAST_BATCHES:
            batch = loop.take()
            if keep and spent >= keep[0]:
                keep.pop(0)
                loop.kept[loop.taken - 1] = batch
        loop.pacer.drain()
        spent = time.perf_counter() - began
        count, size, cpu = loop.taken - taken, loop.bytes - size, process.cpu_seconds() - before
        loop.kept[loop.taken - 1] = batch
        return {
            "batches": count,
            "seconds": spent,
            "batch_seconds": spent / count,
            "batches_per_second": count / spent,
            "samples_per_second": count * self._workload.batch_size / spent,
            "bytes_per_batch": size / count,
            "gb_per_second": size / spent / 1e9,
            "cpu_seconds_per_gb": cpu / (size / 1e9),
            "load_average": os.getloadavg()[0],
        }


class _Loop:
    """The training loop."""

    def __init__(self, batches: Iterator[Any], step: Step, workload: Workload) -> None:
        self._batches, self._step = batches, step
        self._keep_probes, self._varies, self._size = workload.labelled, workload.varies, 0
        self.pacer = Pacer()
        self.probes: list[Any] = []
        self.kept: dict[int, Any] = {}
        self.taken = 0
        self.bytes = 0

    def take(self) -> Any:
        batch = next(self._batches)
        self.use(batch)
        return batch

    def use(self, batch: Any) -> None:
        result = self._step(batch)
        self.pacer.add(result)
        if self._keep_probes:
            self.probes.append(result)
        if self._varies or not self._size:
            self._size = sum(leaf.nbytes for leaf in batch.values())
        self.bytes += self._size
        self.taken += 1


def _close(batches: Iterator[Any]) -> float:
    began = time.perf_counter()
    close = getattr(batches, "close", None)
    if close is not None:
        close()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
