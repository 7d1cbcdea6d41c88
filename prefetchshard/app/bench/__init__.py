"""`python -m prefetchshard bench MODULE:FACTORY`: how fast a user's own source is, by itself and on the way to the devices."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from jax.sharding import NamedSharding, PartitionSpec

import prefetchshard as ps
from prefetchshard.app.bench.finding import find_factory
from prefetchshard.app.bench.progress import Progress


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure, and how.

    Attributes:
        factory: `MODULE:FACTORY`.
        axes: entries of a PartitionSpec; None: the loader's own default.
        batch_size: rows of one step; None: the source yields whole batches.
        workers: as `ps.Loader` takes it.
        step_ms: length of a step; 0: none.
        seconds: that each measurement takes.
        as_json: print one JSON object.
        report: where to write a page with plots; None: nowhere.
    """

    factory: str
    axes: tuple[str | None, ...] | None = None
    batch_size: int | None = None
    workers: Any = "auto"
    step_ms: float = 0.0
    seconds: float = 2.0
    as_json: bool = False
    report: Path | None = None


def run(options: Options) -> int:
    """Measure, and write what was found to the standard output.

    Returns:
        The exit code, 0.

    Raises:
        PrefetchError: the module, the function or its source cannot be used, or the report cannot be written; says why in one line.
    """
    path = None if options.report is None else options.report.absolute()  # first: the user's code may go to another folder
    with contextlib.redirect_stdout(sys.stderr), Progress(sys.stderr) as progress:  # what the user's code prints is no result
        factory = _guarded(lambda: find_factory(options.factory), options.factory)
        found = _guarded(lambda: _measure(factory, options, progress), options.factory)
    text = msgspec.json.format(msgspec.json.encode(found.to_dict()), indent=2).decode() if options.as_json else str(found)
    sys.stdout.write(f"{text}\n")
    if path is not None:
        _write_report(found, path, options)
    return 0


def _write_report(found: ps.Benchmark, path: Path, options: Options) -> None:
    try:
        found.write_report(path, title=options.factory)
    except OSError as error:
        raise ps.PrefetchError(f"--report {options.report}: {error.strerror or error}") from error
    sys.stderr.write(f"wrote {options.report}\n")


def _measure(factory: Callable[[], Any], options: Options, progress: Progress) -> ps.Benchmark:
    return ps.benchmark(
        factory,
        sharding=None if options.axes is None else _sharding(options.axes),
        batch_size=options.batch_size,
        workers=options.workers,
        step_ms=options.step_ms,
        seconds=options.seconds,
        progress=progress.tell,
    )


def _sharding(axes: tuple[str | None, ...]) -> Any:
    """Over all devices: the first named axis has them, the others have the size 1."""
    names = [axis for axis in axes if axis is not None]
    sizes = {name: 1 if number else -1 for number, name in enumerate(names)}
    return NamedSharding(ps.make_mesh(sizes or {"data": -1}), PartitionSpec(*axes))


def _guarded(work: Callable[[], Any], factory: str) -> Any:
    """What `work` returns; an error of the user's own code becomes one line, with the place that raised it."""
    try:
        return work()
    except ps.PrefetchError:
        raise
    except Exception as error:
        place = _place(error)
        words = " ".join(str(error).split())
        raise ps.PrefetchError(f"{factory} raised {type(error).__name__}{f': {words}' if words else ''} ({place})") from error


def _place(error: Exception) -> str:
    """Where the user's code was: the innermost frame that is of no package."""
    frames = traceback.extract_tb(error.__traceback__)
    packages = (str(Path(ps.__file__).parent), "<frozen")
    own = [frame for frame in frames if not frame.filename.startswith(packages) and "site-packages" not in frame.filename]
    found = (own or frames)[-1]
    return f"{Path(found.filename).name}, line {found.lineno}"
