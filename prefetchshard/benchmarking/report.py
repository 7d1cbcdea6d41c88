"""What a benchmark found, as a value, as a text and as a page."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from prefetchshard.base.errors import ConfigError
from prefetchshard.base.files import write_whole
from prefetchshard.benchmarking.page import Page, page_of
from prefetchshard.benchmarking.rounds import Round
from prefetchshard.measuring.stats import Stats
from prefetchshard.measuring.timeline import Recent
from prefetchshard.measuring.verdict import Verdict
from prefetchshard.plotting.occupancy import occupancy_of
from prefetchshard.plotting.spread import spread_of
from prefetchshard.plotting.waits import waits_plot
from prefetchshard.plotting.way import way_of

NAMES = {
    "source": "the source alone, one thread",
    "loader": "the loader, nothing done",
    "by_hand": "thread and queue by hand",
    "step": "the loader beside a step",
}

HEADINGS = ("", "batches/s", "rows/s", "MB/s", "ms a batch", "waits")

LONG_SECONDS = 0.1
"""A later epoch that begins sooner is not worth a word."""

BEGINS_FOR_LONG = (
    "most of it is for a later epoch to begin ({seconds:.1f} s each time): keep what that needs from one epoch to the next (a torch "
    "DataLoader: persistent_workers=True), or let one pass over the source hold several epochs"
)


class BenchmarkRun(msgspec.Struct, frozen=True, kw_only=True):
    """One way to get the batches of a source, and how fast it was.

    Attributes:
        name: "source": it alone, read in one thread; "loader": a loader, with nothing done with a batch; "by_hand": a thread and a queue;
            "step": a loader, with a step on each batch.
        rounds: each measured by itself, in turns with those of others.
        stats: of the loader's pass with the most batches; None where there is no loader.
        recent: when what happened to the last batches of that pass; None likewise.
    """

    name: str
    rounds: tuple[Round, ...]
    stats: Stats | None = None
    recent: Recent | None = None

    @property
    def batches(self) -> int:
        """Counted in all rounds; the first one of each pass is not."""
        return sum(one.batches for one in self.rounds)

    @property
    def seconds(self) -> float:
        """That these batches took."""
        return sum(one.seconds for one in self.rounds)

    @property
    def batches_per_second(self) -> float:
        """Over all rounds."""
        return self._rate(self.batches)

    @property
    def rows_per_second(self) -> float:
        """Over all rounds; 0.0 where batches have no rows in common."""
        return self._rate(sum(one.rows for one in self.rounds))

    @property
    def bytes_per_second(self) -> float:
        """Over all rounds, of what goes to devices, each batch counted once however many devices hold it."""
        return self._rate(sum(one.nbytes for one in self.rounds))

    @property
    def seconds_per_batch(self) -> float:
        """Over all rounds, the step included."""
        return self.seconds / self.batches if self.batches else 0.0

    @property
    def waited_share(self) -> float:
        """The part of the time that was spent waiting for a batch, 0.0 to 1.0."""
        return sum(one.waited_seconds for one in self.rounds) / self.seconds if self.seconds else 0.0

    @property
    def first_batch_seconds(self) -> float:
        """Until the first batch of the first round was there."""
        return self.rounds[0].first_batch_seconds

    @property
    def next_epoch_seconds(self) -> float | None:
        """That the first batch of a later epoch was waited for, on average; None where no further epoch was begun."""
        epochs = sum(one.epochs for one in self.rounds)
        return sum(one.epochs_seconds for one in self.rounds) / epochs if epochs else None

    @property
    def begins_for_long(self) -> bool:
        """Whether most of the waiting was for epochs to begin."""
        return sum(one.epochs_seconds for one in self.rounds) > sum(one.waited_seconds for one in self.rounds)

    def _rate(self, count: int) -> float:
        return count / self.seconds if self.seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Its figures, as JSON can hold them, with units in the names."""
        return {
            "batches": self.batches,
            "seconds": self.seconds,
            "batches_per_second": self.batches_per_second,
            "rows_per_second": self.rows_per_second,
            "bytes_per_second": self.bytes_per_second,
            "seconds_per_batch": self.seconds_per_batch,
            "waited_share": self.waited_share,
            "first_batch_seconds": self.first_batch_seconds,
            "next_epoch_seconds": self.next_epoch_seconds,
            "rounds_batches_per_second": [one.batches / one.seconds if one.seconds else 0.0 for one in self.rounds],
            "passes": sum(one.passes for one in self.rounds),
            "stats": None if self.stats is None else self.stats.to_dict(),
        }

    def cells(self) -> tuple[str, ...]:
        """Its row of a table; see `HEADINGS`."""
        waits = "" if self.name == "source" else f"{100 * self.waited_share:.1f} %"
        rates = (self.batches_per_second, self.rows_per_second, self.bytes_per_second / 1e6)
        return (NAMES[self.name], *map(_number, rates), f"{1e3 * self.seconds_per_batch:.3f}", waits)

    def __str__(self) -> str:
        return _row(self.cells())

    def __repr__(self) -> str:
        return str(self)


class Benchmark(msgspec.Struct, frozen=True, kw_only=True):
    """How fast a source is by itself and on the way to the devices; see `benchmark`.

    It is shown as a text: the verdict on the loop, a table, and the statistics of the loader. `to_dict()` gives all of it as plain numbers,
    `write_report()` a page with plots.

    Attributes:
        source: what was read, in words.
        runs: what was measured, by its name: "source", "loader", "by_hand", "step". What could not be, or was not asked for, is not there.
        step: what the step was, in words; empty where there was none.
        step_seconds: how long it was to be.
        warm_up_seconds: what compiling the step took; this and the first batches are in no rate.
        notes: what else is to be known of the figures, such as what they leave out.

    Example:
        found = ps.benchmark(lambda: np.zeros((64, 3), np.float32), batch_size=16, seconds=0.05)
        print(found.verdict.bound, found.ratio)
        print(found.runs["loader"].rows_per_second, found.runs["loader"].stats.mean_ready)
        found.write_report("loader.html")
    """

    source: str
    runs: dict[str, BenchmarkRun]
    step: str = ""
    step_seconds: float = 0.0
    warm_up_seconds: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def stats(self) -> Stats:
        """Of the loader beside a step, where there was one; else of the loader. The first batch is not in it where there were more.

        Raises:
            ConfigError: no loader was measured.
        """
        run = self._loop
        if run is None or run.stats is None:
            raise ConfigError("no loader was measured")
        return run.stats

    @property
    def _loop(self) -> BenchmarkRun | None:
        return self.runs.get("step") or self.runs.get("loader")

    @property
    def verdict(self) -> Verdict:
        """What that loop is bound by, what that costs, and what would change it."""
        verdict = self.stats.verdict
        run = self.runs.get("step") or self.runs["loader"]
        epochs = run.next_epoch_seconds or 0.0
        if epochs < LONG_SECONDS or not run.begins_for_long or verdict.bound != "reading":
            return verdict
        return msgspec.structs.replace(verdict, advice=BEGINS_FOR_LONG.format(seconds=epochs))

    @property
    def ratio(self) -> float | None:
        """The loader's batches a second in those of the thread and queue by hand: 2.0 is twice as fast; None where that was not measured."""
        by_hand = self.runs.get("by_hand")
        rate = 0.0 if by_hand is None else by_hand.batches_per_second
        return self.runs["loader"].batches_per_second / rate if rate else None

    def to_dict(self) -> dict[str, Any]:
        """All of it, as JSON can hold it, with units in the names."""
        return {
            "verdict": {**msgspec.structs.asdict(self.verdict), "text": str(self.verdict)},
            "source": self.source,
            "loader_to_by_hand_ratio": self.ratio,
            "step": self.step or None,
            "step_seconds": self.step_seconds,
            "warm_up_seconds": self.warm_up_seconds,
            "notes": list(self.notes),
            "runs": {name: run.to_dict() for name, run in self.runs.items()},
        }

    def write_report(self, path: str | os.PathLike[str], *, title: str = "") -> None:
        """Write a page with the verdict, the table, and plots of the loop: one HTML file that needs no network and no script.

        The plots show the way of the last batches through the threads, how full the queues were, what the loop waited for, and how long
        `next()` took. The file is there as a whole or not at all.

        Args:
            path: of the file, such as `report.html`.
            title: what was measured, in words of your own.

        Raises:
            ConfigError: no loader was measured.
            OSError: it cannot be written.

        Example:
            found = ps.benchmark(lambda: np.zeros((64, 3), np.float32), batch_size=16, seconds=0.05)
            found.write_report("report.html", title="zeros")
        """
        stats, loop = self.stats, self._loop
        recent = (None if loop is None else loop.recent) or Recent(0.0)
        page = Page(
            title=title,
            verdict=str(self.verdict),
            source=self.source,
            table=[HEADINGS, *(run.cells() for run in self.runs.values())],
            notes=[note[:1].upper() + note[1:] for note in self._notes()],
            plots_of=f"{NAMES['step']} of {1e3 * self.step_seconds:g} ms" if self.step else f"{NAMES['loader']}: no step was measured",
            plots=(way_of(recent, has_step=bool(self.step)), occupancy_of(recent, stats), waits_plot(stats), spread_of(stats.next)),
            all_of_it=str(self),
        )
        write_whole(path, page_of(page))

    def __repr__(self) -> str:
        return str(self)  # what a notebook shows

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield str(self.verdict)
        yield ""
        yield f"{self.source}"
        yield _row(HEADINGS)
        yield from map(str, self.runs.values())
        yield from self._notes()
        yield ""
        yield "the loader beside the step:" if "step" in self.runs else "the loader:"
        yield from str(self.stats).split("\n")[2:]  # without the verdict

    def _notes(self) -> Iterator[str]:
        """What is to be said of the table."""
        if self.ratio is not None:
            yield f"the loader is {self.ratio:.2f} times as fast as the thread and queue{self._spread()}"
        if self.step:
            yield f"the step: {1e3 * self.step_seconds:g} ms, {self.step}"
        yield f"not in these figures: {self._warm_up()}"
        if later := self._later_epochs():
            yield later
        yield from self.notes

    def _spread(self) -> str:
        """The ratio of each pair of rounds: how much the machine's other work counts."""
        pairs = zip(self.runs["loader"].rounds, self.runs["by_hand"].rounds, strict=True)
        ratios = [a.batches / a.seconds / (b.batches / b.seconds) for a, b in pairs if a.seconds and b.seconds and b.batches]
        return f" ({', '.join(f'{ratio:.2f}' for ratio in ratios)} in each of {len(ratios)} rounds)" if len(ratios) > 1 else ""

    def _warm_up(self) -> str:
        firsts = ", ".join(f"{NAMES[name].split(',')[0]} {1e3 * run.first_batch_seconds:.1f} ms" for name, run in self.runs.items())
        compiled = f"; the step was compiled in {self.warm_up_seconds:.2f} s" if self.warm_up_seconds else ""
        return f"the first batch ({firsts}){compiled}"

    def _later_epochs(self) -> str:
        """What beginning an epoch costs, where that is worth a word; the verdict has it in it."""
        waits = {name: run.next_epoch_seconds for name, run in self.runs.items()}
        told = [f"{NAMES[name].split(',')[0]} {1e3 * wait:.1f} ms" for name, wait in waits.items() if wait is not None]
        longest = max((wait or 0.0 for wait in waits.values()), default=0.0)
        return (
            f"not in these figures, but in the verdict: the wait for a later epoch to begin ({', '.join(told)})"
            if longest >= LONG_SECONDS
            else ""
        )


def _row(cells: Sequence[str]) -> str:
    """A line of the table."""
    return "".join(f"{cell:{width}}" for cell, width in zip(cells, ("<30", ">12", ">14", ">12", ">12", ">9"), strict=True)).rstrip()


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:,.1f}"
