"""The runs as a picture: a panel a workload, a bar a loader. Needs matplotlib."""

from __future__ import annotations

import importlib.util
from typing import Any

from bench.table import head_lines, summarise

FIGURES = {
    "images": ("gb_per_second", "GB/s"),
    "images-step": ("step_over_alone", "step time / step alone (1 = input hidden)"),
    "wrapped-existing": ("gb_per_second", "GB/s"),
    "wrapped-fresh": ("gb_per_second", "GB/s"),
    "small": ("batches_per_second", "batches/s"),
    "examples": ("samples_per_second", "samples/s"),
    "tiny": ("batches_per_second", "batches/s"),
    "text": ("samples_per_second", "samples/s"),
}


def save(path: str, head: dict[str, Any], records: list[dict[str, Any]]) -> str:
    """Draws the runs that went well into a file. Returns what was done, in words."""
    if importlib.util.find_spec("matplotlib") is None:
        return "no plot: matplotlib is missing (pip install matplotlib)"
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = {}
    for workload in dict.fromkeys(record["workload"] for record in records):
        runs = [run for run in summarise([record for record in records if record["workload"] == workload]) if run["status"] == "ok"]
        if runs:
            panels[workload] = runs
    if not panels:
        return "no plot: no run went well"
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(6.5 * columns, 3.4 * rows + 0.6), squeeze=False, layout="constrained")
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, (workload, runs) in zip(axes.flat, panels.items(), strict=False):
        _draw(axis, workload, runs)
    figure.suptitle(head_lines(head)[1], fontsize=8)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return f"plot: {path}"


def _draw(axis: Any, workload: str, runs: list[dict[str, Any]]) -> None:
    figure, unit = FIGURES[workload]
    runs = sorted(runs, key=lambda run: run[figure], reverse=figure == "step_over_alone")
    colours = ["tab:orange" if run["loader"] == "prefetchshard" else "tab:gray" for run in runs]
    bars = axis.barh([run["loader"] for run in runs], [run[figure] for run in runs], color=colours)
    axis.bar_label(bars, [f"{run[figure]:,.3g}" if run[figure] < 1000 else f"{run[figure]:,.0f}" for run in runs], padding=3, fontsize=8)
    axis.margins(x=0.15)
    axis.set_title(workload)
    axis.set_xlabel(unit)
