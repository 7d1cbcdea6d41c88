"""How the live display is drawn. Needs the extra `live`; `telling/live.py` imports it where it is used."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from prefetchshard.measuring.shares import shares_of
from prefetchshard.measuring.stats import Stats
from prefetchshard.telling.shown import Screen, Shown

LINE_SECONDS = 10.0
"""Between two lines where nothing can be drawn."""

BAR_WIDTH = 32
WIDTH = 96


def make_console() -> Console:
    """The standard error stream, or the notebook."""
    return Console(stderr=True)


def make_screen() -> Screen:
    """What is possible here: a display that changes, or lines."""
    console = make_console()
    if console.is_jupyter:
        return Cell()
    return Display(console) if console.is_terminal and not console.is_dumb_terminal else Lines(console)


class Cell:
    """One output of a notebook's cell, which changes.

    Not rich's own display: it needs ipywidgets, and while it draws it takes what the loop prints, and wipes that away.
    """

    def __init__(self) -> None:
        self._output: Any = None

    def start(self, shown: Shown | None) -> None:
        self._output = importlib.import_module("IPython.display").display(picture(shown), display_id=True)

    def show(self, shown: Shown | None) -> None:
        self._output.update(picture(shown))

    def stop(self, shown: Shown | None) -> None:
        if shown is not None and self._output is not None:
            self._output.update(picture(shown))


class Display:
    """One display that changes, in a terminal."""

    def __init__(self, console: Console) -> None:
        # What is printed appears above it, but what goes into a file still goes there
        self._live = Live(console=console, auto_refresh=False, redirect_stdout=sys.stdout.isatty())

    def start(self, shown: Shown | None) -> None:
        self._live.update(picture(shown))
        self._live.start(refresh=True)

    def show(self, shown: Shown | None) -> None:
        self._live.update(picture(shown), refresh=True)

    def stop(self, shown: Shown | None) -> None:
        if shown is not None:
            self._live.update(picture(shown), refresh=self._live.is_started)
        self._live.stop()


class Lines:
    """A plain line now and then, for what is no terminal."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._due_at = clock() + LINE_SECONDS

    def start(self, shown: Shown | None) -> None:
        del shown

    def show(self, shown: Shown | None) -> None:
        now = self._clock()
        if shown is None or now < self._due_at:
            return
        self._due_at = now + LINE_SECONDS
        file = self._console.file
        file.write(f"prefetchshard: {_rates(shown)}. {said_of(shown)}\n")
        file.flush()

    def stop(self, shown: Shown | None) -> None:
        del shown


def picture(shown: Shown | None) -> Panel:
    """What the display shows; notebooks can show it too."""
    if shown is None:
        return Panel(Text("no run, or several"), title="prefetchshard", title_align="left", width=WIDTH)
    stats = shown.stats
    parts = [Text(said_of(shown), style="bold"), Text(), _bars(stats), Text(), _queues(stats)]
    return Panel(Group(*parts), title=f"prefetchshard: {_rates(shown)}", subtitle=shown.of, title_align="left", width=WIDTH)


def said_of(shown: Shown) -> str:
    """The verdict, or what there is instead of it where no batch was handed out."""
    stats = shown.stats
    if stats.batches:
        return str(stats.verdict)
    doing = "the loop waits for one" if stats.ready.receivers_waiting else "the loop does not ask for one"
    return f"No batch was handed out in {shown.of}: {doing}."


def _rates(shown: Shown) -> str:
    stats = shown.stats
    steps = stats.batches / stats.wall_seconds if stats.wall_seconds else 0.0
    return f"step {shown.step}, {steps:,.1f} steps/s, {stats.rows_per_second:,.0f} rows/s, {stats.bytes_per_second / 1e6:,.1f} MB/s"


def _bars(stats: Stats) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, share in shares_of(stats).items():
        bar = _bar(share, "green" if name == "step" else "red")
        table.add_row("the loop's step" if name == "step" else f"waits for {name}", bar, Text(f"{100 * share:5.1f} %"))
    return table


def _bar(share: float, style: str) -> ProgressBar:
    return ProgressBar(total=1.0, completed=min(share, 1.0), width=BAR_WIDTH, complete_style=style, finished_style=style)


def _queues(stats: Stats) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, queue in (("ready for the loop", stats.ready), ("read, not transferred", stats.host)):
        table.add_row(name, _bar(queue.ready / max(1, queue.capacity), "cyan"), Text(f"{queue.ready} of {queue.capacity} batches"))
    table.add_row("reader threads", Text(str(stats.workers)))
    return table
