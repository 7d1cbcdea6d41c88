"""`benchmark`: measures a user's own source."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, cast

from prefetchshard.base.clock import MONOTONIC, Clock
from prefetchshard.base.codec import shown
from prefetchshard.base.config import PerDevice, Processes
from prefetchshard.base.errors import ConfigError
from prefetchshard.base.signatures import misfit
from prefetchshard.benchmarking.passes import ByHandPass, LoaderPass, Pass, SourcePass
from prefetchshard.benchmarking.report import NAMES, Benchmark, BenchmarkRun
from prefetchshard.benchmarking.rounds import Round, Rounds
from prefetchshard.benchmarking.steps import Step, make_step, no_step
from prefetchshard.building.run_factory import Parts
from prefetchshard.loader import Loader
from prefetchshard.sources.dataset import Dataset

ROUNDS = 2
"""The loader and what is written by hand take turns, so that what else the machine does meets both."""

Progress = Callable[[str, float], object]
"""Is told what is measured, and what part of all is done, 0.0 to 1.0."""


def benchmark(
    make: Callable[[], Any],
    *,
    sharding: Any = None,
    batch_size: int | PerDevice | None = None,
    workers: int | Literal["auto"] | Processes = "auto",
    step_ms: float = 0.0,
    seconds: float = 2.0,
    progress: Progress | None = None,
) -> Benchmark:
    """Measure how fast a source is by itself, through a loader, and through a thread and a queue written by hand.

    It measures one after the other: the source alone, read in one thread; the loader, with nothing done with a batch but waiting for it,
    in turns with a thread that reads, calls `jax.device_put` and fills a `queue.Queue(2)`; with `step_ms` the loader beside a step. The
    first batch of each, the first one of each later epoch (of a torch DataLoader as many as it has processes), and what is compiled are not
    in the figures. An endless source is fine. One that ends is begun anew.

    Args:
        make: returns a source, an iterator, or a `Loader`, which is measured with its own settings. It is called without arguments, once
            for each measurement, and again where an iterator has ended: each call must make a new iterator.
        sharding, batch_size, workers: of the loader, as `Loader` takes them; not where `make` returns one.
        step_ms: the length of a step. Accelerators compute it; on the CPU backend it sleeps. 0: no step is measured.
        seconds: that each measurement takes, at least; longer where a batch does.
        progress: is told what is measured now, and what part of all is done, 0.0 to 1.0.

    Returns:
        What was found: as a text it begins with the verdict on the loop.

    Raises:
        ConfigError: a setting that cannot work, or `make` returns nothing that can be read.
        BatchError: the source gives no batch.
        UsedUpError: `make` returns the same iterator again.

    Thread safety: it may be called from any thread; two at once measure each other.

    Example:
        images = np.zeros((64, 8, 8), np.uint8)
        found = ps.benchmark(lambda: {"image": images}, batch_size=16, sharding=P("data"), seconds=0.05)
        assert found.runs["loader"].batches > 0
        print(found)
    """
    given = {name: value for name, value in (("sharding", sharding), ("batch_size", batch_size)) if value is not None}
    if workers != "auto":
        given["workers"] = workers
    _check(make, step_ms, seconds)
    return measure(Maker(make, given), step_ms / 1e3, seconds, progress or _nothing, MONOTONIC)


def _check(make: object, step_ms: float, seconds: float) -> None:
    if not callable(make):
        raise ConfigError(f"make={shown(make)}: a function that returns a source or a loader; for a list or arrays write lambda: them")
    why = misfit(make)
    if why is not None:
        raise ConfigError(f"make is called without arguments, and cannot be: {why}; bind what it needs by functools.partial")
    if not isinstance(step_ms, numbers.Real) or not 0 <= step_ms < math.inf:  # pyright: ignore[reportUnnecessaryIsInstance] - callers may be untyped
        raise ConfigError(f"step_ms={shown(step_ms)}: milliseconds, at least 0")
    if not isinstance(seconds, numbers.Real) or not 0 < seconds < math.inf:  # pyright: ignore[reportUnnecessaryIsInstance] - as above
        raise ConfigError(f"seconds={shown(seconds)}: a positive number")


def _nothing(what: str, share: float) -> None:
    del what, share


class Maker:
    """Makes loaders of what the user's function returns.

    Attributes:
        words: what that is; empty where a loader over it can say so.
        processes: worker processes that it has of its own, as far as it tells.
        keeps_processes: from epoch to epoch.
        is_list: it is a list, so that its items are meant as they are.
    """

    def __init__(self, make: Callable[[], Any], given: dict[str, Any]) -> None:
        self._make, self._given = make, given
        self.words = ""
        self.processes = 0
        self.keeps_processes = self.is_list = False

    def __call__(self) -> Loader[Any]:
        made: Any = self._make()
        if isinstance(made, Loader):
            if self._given:
                names = ", ".join(f"{name}=" for name in self._given)
                raise ConfigError(f"the function returns a Loader, whose own settings count: leave {names} out, or return its source")
            return cast("Loader[Any]", made)
        if made is None:
            raise ConfigError("the function returned None: it must return a source, an iterator or a Loader; is a `return` missing?")
        if isinstance(made, type):
            raise ConfigError(
                f"the function returned the class {made.__qualname__}, not a source: call it, return {made.__qualname__}(...)"
            )
        workers = getattr(made, "num_workers", 0)
        self.processes = workers if isinstance(workers, int) else 0
        self.is_list = isinstance(made, (list, tuple))
        self.keeps_processes = bool(getattr(made, "persistent_workers", False))
        sharding = self._given.get("sharding")
        options: dict[str, Any] = {name: value for name, value in self._given.items() if name != "sharding"}
        try:
            return Loader(made, sharding, epochs=None, **options)
        except ConfigError:
            once = Loader(made, sharding, **options)
            if not parts_of(once).source.one_shot:
                raise
        self.words = f"{words_of(once)}, made anew when it ends"
        return Loader(_anew(made, self._make), sharding, epochs=None, **options)


def _anew(first: Any, make: Callable[[], Any]) -> Callable[[], Any]:
    """Returns what was made already, and then makes new ones: an iterator for each epoch."""
    waiting = [first]
    del first
    return lambda: waiting.pop() if waiting else make()


def words_of(loader: Loader[Any]) -> str:
    """What a loader reads."""
    return repr(loader).removeprefix("<Loader over ").rpartition(": ")[0]


def parts_of(loader: Loader[Any]) -> Parts:
    """What a loader reads, and where that goes."""
    return loader._factory.parts  # pyright: ignore[reportPrivateUsage] - what is no use to others


class _Way:
    """One way to get batches, with the loader that says what to read. A source that can be read only once is made anew for each pass."""

    def __init__(self, maker: Callable[[], Loader[Any]], begin: Callable[[Loader[Any]], Pass]) -> None:
        self._maker, self._begin_pass = maker, begin
        self._loader: Loader[Any] | None = None

    @property
    def loader(self) -> Loader[Any]:
        """It is made when it is first asked for."""
        if self._loader is None:
            self._loader = self._maker()
        return self._loader

    def begin(self) -> Pass:
        """A pass over what is there, or is made anew."""
        loader = self.loader
        if parts_of(loader).source.one_shot:
            self._loader = None  # used up by this pass
        return self._begin_pass(loader)

    def forget(self) -> None:
        """Let go of what was made: it may hold a lot of memory."""
        self._loader = None


class _Measurement(NamedTuple):
    """What is measured in one go."""

    name: str
    way: _Way
    step: Step
    seconds: float


def measure(maker: Maker, step_seconds: float, seconds: float, progress: Progress, clock: Clock) -> Benchmark:
    """All measurements, one after the other.

    Args:
        maker: makes a loader anew.
        step_seconds: length of the step; 0: none.
        seconds: of each measurement.
        progress: is told what is measured, and which part of all is done.
        clock: monotonic seconds.
    """
    nothing = Step(no_step, "")
    ways = {
        "source": _Way(maker, lambda loader: SourcePass(parts_of(loader))),
        "loader": _Way(maker, LoaderPass),
        "by_hand": _Way(maker, lambda loader: ByHandPass(parts_of(loader))),
        "step": _Way(maker, LoaderPass),
    }
    first = ways["source"].loader
    words, parts = maker.words or words_of(first), parts_of(first)
    is_readable = not parts.source.stays_on_devices
    notes = _notes_on(maker, parts)
    step = make_step(step_seconds, parts.rules.device(), clock)
    del first, parts  # it is forgotten as soon as it is measured
    alternating = ["loader", "by_hand", "by_hand", "loader"] if is_readable else ["loader"] * ROUNDS
    plan = [_Measurement(name, ways[name], nothing, seconds / ROUNDS) for name in alternating]
    if is_readable:
        plan.insert(0, _Measurement("source", ways["source"], nothing, seconds))
    else:
        ways["source"].forget()
    if step.kind:
        plan.append(_Measurement("step", ways["step"], step, seconds))
    found = _all(plan, max(1, maker.processes), progress, clock)
    return Benchmark(
        source=words,
        runs={name: _run_of(name, found[name]) for name in NAMES if name in found},
        step=step.kind,
        step_seconds=step_seconds,
        warm_up_seconds=step.warm_up_seconds,
        notes=(*_notes(found), *notes),
    )


def _all(plan: list[_Measurement], first_batches: int, progress: Progress, clock: Clock) -> dict[str, list[Round]]:
    total = sum(one.seconds for one in plan)
    done = 0.0
    found: dict[str, list[Round]] = {}
    for number, one in enumerate(plan):
        what, before = NAMES[one.name], done
        progress(what, before / total)

        def tell(seconds: float, what: str = what, before: float = before) -> None:
            progress(what, min(1.0, (before + seconds) / total))

        found.setdefault(one.name, []).append(Rounds(one.way.begin, one.step.run, clock, first_batches).run(one.seconds, tell))
        done += one.seconds
        if all(other.way is not one.way for other in plan[number + 1 :]):
            one.way.forget()
    return found


def _run_of(name: str, rounds: list[Round]) -> BenchmarkRun:
    best = max(rounds, key=lambda one: one.stats.batches if one.stats is not None else 0)
    return BenchmarkRun(name=name, rounds=tuple(rounds), stats=best.stats, recent=best.recent)


def _notes(found: dict[str, list[Round]]) -> list[str]:
    notes: list[str] = []
    if "step" not in found:
        notes.append(
            "no step was measured, so the verdict is on a loop that does nothing: give the length of your own (step_ms=, --step-ms)"
        )
    if "source" not in found:
        notes.append("arrays that stay on the devices are not read on the host: only the loader is measured")
    if not all(one.has_steady for rounds in found.values() for one in rounds):
        notes.append("an epoch is over before its start is: the figures have in them what beginning takes")
    return notes


def _notes_on(maker: Maker, parts: Parts) -> list[str]:
    """What there is to say of a source and its settings, whatever is measured."""
    notes: list[str] = []
    left_out = [name for name in ("microbatches", "device_transform", "pad") if getattr(parts.settings, name) is not None]
    if left_out and not parts.source.stays_on_devices:
        notes.append(f"the thread and queue do without {' and '.join(left_out)}")
    if maker.processes and not maker.keeps_processes:
        notes.append(
            f"the source starts {maker.processes} worker processes anew for each epoch: "
            "persistent_workers=True keeps those of a torch DataLoader"
        )
    if isinstance(parts.source, Dataset) and parts.batch_size is None and not maker.is_list:
        notes.append(
            "each item of the dataset was taken for a whole batch: if it is an example, say how many make one (batch_size=, --batch-size)"
        )
    return notes
