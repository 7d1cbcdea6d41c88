"""The runs as tables of text; drawn by rich where it is installed and the output is a wide terminal."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from statistics import median
from typing import Any

COLUMNS = ("loader", "GB/s", "samples/s", "batches/s", "ms/batch", "step/alone", "CPU s/GB", "RSS MB", "added MB", "first ms", "values")
WIDTH = 120  # that rich needs for all columns
Record = dict[str, Any]


def show(head: Record, records: list[Record]) -> None:
    """Prints the header and a table a workload."""
    wide = sys.stdout.isatty() and shutil.get_terminal_size().columns >= WIDTH
    rich = wide and importlib.util.find_spec("rich") is not None
    print("\n".join(head_lines(head)))
    for workload in dict.fromkeys(record["workload"] for record in records):
        runs = summarise([record for record in records if record["workload"] == workload])
        (_rich if rich else _plain)(f"{workload}: {runs[0].get('about', '')}", [cells(run) for run in runs])
        for line in remarks(runs):
            print(f"  {line}")


def head_lines(head: Record) -> list[str]:
    """The header in words."""
    versions = ", ".join(f"{name} {version}" for name, version in head["versions"].items() if version)
    devices = f"{head['devices']} x {head['device']}, {head['cores']} cores ({head['processor']}), load {head['load_average']:.1f}"
    least, most = f"{0.25 * head['seconds']:.2g} s and {8 + 2 * head['workers']} batches", f"{max(head['seconds'], 1.0):.2g} s"
    lines = [
        f"{head['date']}  {head['command']}",
        f"{devices}, Python {head['python']}, jax {head['jax']}, numpy {head['numpy']}",
        f"{head['workers']} workers each, {head['seconds']:g} s a run after a warm-up of {least} at least (but {most} at most)",
        "GB: 1e9 bytes of a batch, counted once however many devices hold it",
        f"versions: {versions or 'none'}",
    ]
    for name, packages in head["missing"].items():
        lines.append(f"missing: {name} (pip install {' '.join(packages)})")
    return lines


def summarise(records: list[Record]) -> list[Record]:
    """One record a loader: of several runs the one whose speed is nearest to their median; a run that went wrong stands for all."""
    runs = []
    for loader in dict.fromkeys(record["loader"] for record in records):
        same = [record for record in records if record["loader"] == loader]
        bad = [record for record in same if record["status"] != "ok"]
        if bad:
            runs.append(bad[0])
            continue
        speeds = [record["batches_per_second"] for record in same]
        middle = min(same, key=lambda record: abs(record["batches_per_second"] - median(speeds)))
        runs.append({**middle, "runs": len(same), "slowest": min(speeds), "fastest": max(speeds)})
    return runs


def cells(run: Record) -> list[str]:
    """A row of the table."""
    if run["status"] != "ok":
        return [run["loader"], {"wrong": "WRONG VALUES", "failed": "FAILED"}.get(run["status"], run["status"])]
    ratio = run.get("step_over_alone")
    peak = run["rss_peak_bytes"] + run["workers_peak_bytes"]
    return [
        run["loader"],
        f"{run['gb_per_second']:.3g}",
        f"{run['samples_per_second']:,.0f}",
        f"{run['batches_per_second']:,.1f}",
        f"{1000 * run['batch_seconds']:.3g}",
        "" if ratio is None else f"{ratio:.3f}",
        f"{run['cpu_seconds_per_gb']:.3g}",
        f"{peak / 1e6:,.0f}",
        f"{(peak - run['rss_base_bytes']) / 1e6:,.0f}",
        f"{1000 * run['first_batch_seconds']:,.3g}",
        "right" if run["values_checked"] else "NOT CHECKED",
    ]


def remarks(runs: list[Record]) -> list[str]:
    """What the figures do not say: why there is none, what was odd."""
    lines = []
    for run in runs:
        if run["status"] != "ok":
            lines.append(f"{run['loader']}: {run['reason']}".splitlines()[0])
        elif run["exit_code"]:
            lines.append(f"{run['loader']}: its process did not end well after the run, exit code {run['exit_code']}")
        if run.get("runs", 1) > 1:
            lines.append(f"{run['loader']}: of {run['runs']} runs, {run['slowest']:,.1f} to {run['fastest']:,.1f} batches/s")
    return lines


def _plain(title: str, rows: list[list[str]]) -> None:
    widths = [max(len(row[n]) for row in (list(COLUMNS), *rows) if n < len(row) and (n < 1 or len(row) > 2)) for n in range(len(COLUMNS))]
    print(f"\n{title}")
    for row in (list(COLUMNS), *rows):
        name, *others = row
        print("  ".join([name.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=False))]))


def _rich(title: str, rows: list[list[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for number, column in enumerate(COLUMNS):
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
