"""The side-by-side runs start, check what arrives, and say what is missing. What they measure is not tested."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

from support import REPOSITORY, run_command, run_python

pytestmark = pytest.mark.skipif(not (REPOSITORY / "bench").is_dir(), reason="bench/ is not here")

FIGURES = (
    "gb_per_second",
    "samples_per_second",
    "batches_per_second",
    "cpu_seconds_per_gb",
    "rss_peak_bytes",
    "first_batch_seconds",
    "warm_up_seconds",
)


@pytest.mark.parametrize(
    "loaders", [["naive", "prefetchshard"], pytest.param(["naive", "thread", "prefetchshard"], marks=pytest.mark.slow)]
)
def test_runs_report_checked_values(loaders: list[str], tmp_path: Path) -> None:
    lines = tmp_path / "runs.jsonl"
    sizes = ["--devices", "2", "--batch-mib", "0.3", "--rows", "16", "--seconds", "0.1", "--workers", "2"]
    named = ["--loaders", ",".join(loaders), "--workloads", "tiny,images", "--json", str(lines)]
    done = run_command([sys.executable, "-m", "bench", *sizes, *named])
    assert done.returncode == 0, done.stdout + done.stderr
    head, *runs = map(json.loads, lines.read_text().splitlines())
    assert {"date", "command", "device", "devices", "cores", "python", "jax", "versions", "workers"} <= set(head)
    assert head["devices"] == 2
    assert [(run["workload"], run["loader"]) for run in runs] == [
        (workload, loader) for workload in ("tiny", "images") for loader in loaders
    ]
    for run in runs:
        assert run["status"] == "ok", run
        assert run["values_checked"], run
        assert run["exit_code"] == 0, run
        assert all(math.isfinite(run[figure]) and run[figure] >= 0 for figure in FIGURES), run
        assert run["batches_compared"] >= 1
    assert all(run["rows_probed"] >= run["batches"] * 4 for run in runs if run["workload"] == "images")
    assert "prefetchshard" in done.stdout


def test_a_loader_that_is_not_installed_is_named() -> None:
    done = run_python(
        """
        import sys
        sys.modules["datarax"] = None  # as if it were not there
        from bench.__main__ import main
        sys.exit(main(["--loaders", "datarax", "--workloads", "tiny", "--devices", "2", "--seconds", "0.1"]))
        """
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "missing: datarax (pip install datarax)" in done.stdout


def test_wrong_values_are_found() -> None:
    done = run_python(
        """
        import numpy as np
        from bench.place import Place, use_devices
        use_devices(2)
        from bench.checks import WrongValuesError, check
        from bench.data import Sizes
        from bench.workloads import WORKLOADS

        place = Place(2)
        sizes = Sizes.choose("cpu", 2, mib=0.3, rows=16)

        def wrong(workload, batches, **more):
            placed = [place.put(batch) for batch in batches]
            probes = [workload.probe(batch) for batch in placed] if workload.labelled else []
            try:
                check(workload, place, probes, more.get("kept", dict(enumerate(placed))))
            except WrongValuesError as error:
                return str(error)
            return None

        images = WORKLOADS["images"](sizes)
        assert wrong(images, [images.make(0), images.make(1)]) is None
        assert "came twice" in wrong(images, [images.make(0), images.make(0)])
        bad = images.make(0)
        bad["image"][1, 0, 0, 0] ^= 1
        assert "first value" in wrong(images, [bad])
        bad = images.make(0)
        bad["image"][1, 100, 100, 1] ^= 1
        assert "values of" in wrong(images, [bad])
        assert "not on the devices" in wrong(images, [images.make(0)], kept={0: images.make(0)})

        ordered = WORKLOADS["wrapped-fresh"](sizes)
        assert wrong(ordered, [ordered.make(0), ordered.make(1)]) is None
        assert "out of order" in wrong(ordered, [ordered.make(1), ordered.make(0)])

        tiny = WORKLOADS["tiny"](sizes)
        assert wrong(tiny, [tiny.make(0), tiny.make(1)]) is None
        assert "values of" in wrong(tiny, [tiny.make(0), tiny.make(2)])
        """
    )
    assert done.returncode == 0, done.stdout + done.stderr
