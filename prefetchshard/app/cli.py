"""The command line: `python -m prefetchshard`, or `prefetchshard` where the package is installed."""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefetchshard import PrefetchError, Processes, __version__

MOST = 2**31 - 1
DEMO_PACKAGES = {"optax": "optax", "rich": "rich", "sklearn": "scikit-learn"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. Returns the exit code: 0 done, 1 done but not well, 2 could not be done as asked."""
    options = _parser().parse_args(arguments)
    try:
        return options.command(options)
    except PrefetchError as error:
        return _refuse(str(error))
    except KeyboardInterrupt:
        return 130  # what a shell reports for a program that Ctrl-C ended


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="prefetchshard", description="Keeps the next sharded batches on the devices while the JAX training step runs."
    )
    parser.add_argument("--version", action="version", version=f"prefetchshard {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_demo(commands)
    _add_doctor(commands)
    _add_bench(commands)
    return parser


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:  # pyright: ignore[reportPrivateUsage] - has no public name
    demo = commands.add_parser(
        "demo",
        help="train a small network on real data, with progress",
        description="Trains a small convolutional network on scikit-learn's handwritten digits, over all devices, or over eight "
        "virtual ones where there is no accelerator. Takes some ten seconds on two cores. Exit code 1 if the network gets fewer "
        "than 95 % of the held-out digits right.",
    )
    demo.add_argument(
        "--mesh",
        type=_mesh,
        default={"data": -1},
        metavar="AXIS=SIZE,...",
        help='axes and sizes, as in "data=4,model=2"; -1 takes the devices that are left; the axis model splits the dense layers, '
        "every other one the batch (default: data=-1)",
    )
    demo.add_argument("--epochs", type=_positive, default=20, metavar="N", help="times that the data is read (default: %(default)s)")
    demo.add_argument("--batch-size", type=_positive, default=64, metavar="N", help="rows a step, over all devices (default: %(default)s)")
    demo.add_argument("--seed", type=_natural, default=0, metavar="N", help="of parameters, order and augmentation (default: %(default)s)")
    demo.add_argument("--async", dest="use_async", action="store_true", help="train in an async loop: the same steps, the same result")
    demo.add_argument("--backend", choices=("asyncio", "trio"), help="what runs the async loop (default: asyncio)")
    demo.add_argument(
        "--checkpoint",
        type=_folder,
        metavar="FOLDER",
        help="save there now and then, and go on from what is there, to exactly the same result",
    )
    demo.add_argument("--checkpoint-every", type=_positive, metavar="N", help="steps from one save to the next (default: 25)")
    demo.set_defaults(command=_demo, parser=demo)


def _demo(options: argparse.Namespace) -> int:
    if options.backend and not options.use_async:
        options.parser.error("--backend chooses what runs the async loop: give --async too")
    if options.checkpoint_every and not options.checkpoint:
        options.parser.error("--checkpoint-every says how often to save: give --checkpoint FOLDER too")
    if options.backend == "trio" and importlib.util.find_spec("trio") is None:
        return _refuse("--backend trio needs the package trio: python -m pip install trio")
    try:
        from prefetchshard.app import demo
    except ModuleNotFoundError as error:
        missing = DEMO_PACKAGES.get((error.name or "").partition(".")[0])
        if missing is None:
            raise
        return _refuse(f"the demo needs the package {missing}: python -m pip install 'prefetchshard[demo]'")
    return demo.run(
        demo.Options(
            mesh=options.mesh,
            epochs=options.epochs,
            batch_size=options.batch_size,
            seed=options.seed,
            use_async=options.use_async,
            backend=options.backend or "asyncio",
            checkpoint=options.checkpoint,
            checkpoint_every=options.checkpoint_every or demo.SAVE_EVERY_STEPS,
        )
    )


def _add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:  # pyright: ignore[reportPrivateUsage] - as above
    doctor = commands.add_parser(
        "doctor",
        help="look at this machine: transfers, copies, CPUs, and which settings suit it",
        description="Looks at this machine and measures what a loader depends on: transfers to the devices, copies on the host, and how "
        "many CPUs this process may use. The first line says what to change, if anything. Takes some seconds. Exit code 1 if JAX's "
        "devices cannot be used.",
    )
    doctor.add_argument("--json", action="store_true", help="print one JSON object, with units in the names")
    doctor.set_defaults(command=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    # Else JAX takes three quarters of each GPU when it starts, beside a training that may run there
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from prefetchshard.app import doctor

    return doctor.run(as_json=options.json)


def _add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:  # pyright: ignore[reportPrivateUsage] - as above
    bench = commands.add_parser(
        "bench",
        help="measure your own source: alone, through a loader, beside a step, and by hand",
        description="Measures a source of your own: alone, through a loader, through a thread and a queue written by hand, and beside a "
        "step. The first line says what the loop is bound by, and what to change.",
    )
    bench.add_argument(
        "factory",
        metavar="MODULE:FACTORY",
        help="a function that returns a source, an iterator or a ps.Loader, called without arguments, once for each measurement; MODULE "
        "is a dotted name or a file.py; the current folder is looked in first",
    )
    bench.add_argument(
        "--sharding",
        type=_axes,
        metavar="AXIS,...",
        help='entries of a PartitionSpec, as in "data" or "data,None"; the first axis has all devices (default: rows over all devices)',
    )
    bench.add_argument("--batch-size", type=_positive, metavar="N", help="rows a step; left out where the source yields batches")
    bench.add_argument(
        "--workers", type=_workers, default="auto", metavar="N", help='a number, "auto", or "processes:N" (default: %(default)s)'
    )
    bench.add_argument("--step-ms", type=_milliseconds, default=0.0, metavar="MS", help="length of a step (default: no step is measured)")
    bench.add_argument("--seconds", type=_seconds, default=2.0, metavar="S", help="that each measurement takes (default: %(default)g)")
    bench.add_argument("--json", action="store_true", help="print one JSON object, with units in the names")
    bench.add_argument(
        "--report",
        type=_report,
        metavar="FILE.html",
        help="write a page with plots as well: a timeline of threads and batches, the queues, what the loop waited for, next(); it needs "
        "no network and no other file",
    )
    bench.set_defaults(command=_bench)


def _bench(options: argparse.Namespace) -> int:
    from prefetchshard.app import bench

    return bench.run(
        bench.Options(
            factory=options.factory,
            axes=options.sharding,
            batch_size=options.batch_size,
            workers=options.workers,
            step_ms=options.step_ms,
            seconds=options.seconds,
            as_json=options.json,
            report=options.report,
        )
    )


def _axes(text: str) -> tuple[str | None, ...]:
    entries = [part.strip() for part in text.split(",")]
    names = [entry for entry in entries if entry != "None"]
    if not all(name.isidentifier() for name in names) or len(set(names)) != len(names):
        raise argparse.ArgumentTypeError(f'{text!r}: write names of axes or None, each axis once, as in "data" or "data,None"')
    return tuple(None if entry == "None" else entry for entry in entries)


def _workers(text: str) -> Any:
    kind, colon, number = text.partition(":")
    if text == "auto":
        return text
    if colon and kind == "processes":
        return Processes(_positive(number))
    return _positive(text)


def _milliseconds(text: str) -> float:
    number = _number(text)
    if number < 0:
        raise argparse.ArgumentTypeError("must be at least 0")
    return number


def _seconds(text: str) -> float:
    number = _number(text)
    if number <= 0:
        raise argparse.ArgumentTypeError("must be more than 0")
    return number


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return number


def _refuse(reason: str) -> int:
    sys.stderr.write(f"prefetchshard: error: {reason}\n")
    return 2


def _mesh(text: str) -> dict[str, int]:
    axes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = part.partition("=")
        if not axis.isidentifier() or axis in axes or not size.removeprefix("-").isdecimal():
            raise argparse.ArgumentTypeError(f'{text!r}: write axes with their sizes, each axis once, as in "data=4,model=2"')
        axes[axis] = int(size)
    return axes


def _folder(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("the name of a folder, and it is empty")
    return Path(text)


def _report(text: str) -> Path:
    """Looked at before anything is measured."""
    path = Path(text)
    try:
        is_folder, has_folder = path.is_dir(), path.parent.is_dir()
    except OSError as error:  # it is too long, or in a folder that is closed to this user
        raise argparse.ArgumentTypeError(f"{text!r}: {error.strerror}") from None
    if not text or is_folder:
        raise argparse.ArgumentTypeError(f"{text!r} is not the name of a file, such as report.html")
    if not has_folder:
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
    return path


def _positive(text: str) -> int:
    number = _natural(text)
    if number == 0:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    if len(text.lstrip("0")) > len(str(MOST)) or int(text) > MOST:
        raise argparse.ArgumentTypeError(f"must be at most {MOST:,}")
    return int(text)
