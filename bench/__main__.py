"""The command line: `python -m bench`, from the repository's root."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from bench import machine, measure, plot, table
from bench.data import Sizes
from bench.loaders import LOADERS
from bench.workloads import ABOUT, GROUPS, WORKLOADS

SECONDS = {"cpu": 2.0}
SECONDS_ELSE = 3.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the comparison. Returns the exit code: 0 done, 1 a run failed or brought wrong values, 130 ended by Ctrl-C."""
    options = _parser().parse_args(arguments)
    if options.list:
        _list()
        return 0
    job: dict[str, Any] = {"devices": options.devices}
    head = machine.header(job, [LOADERS[name] for name in options.loaders], options.timeout)
    seconds = options.seconds or SECONDS.get(head["platform"], SECONDS_ELSE)
    sizes = dataclasses.asdict(Sizes.choose(head["platform"], head["devices"], options.batch_mib, options.rows))
    head |= {"workers": options.workers or max(2, min(16, head["cores"])), "seconds": seconds, "sizes": sizes}
    job |= {name: head[name] for name in ("devices", "sizes", "workers", "seconds")}
    records: list[dict[str, Any]] = []
    try:
        _run_all(options, job, head, records)
    except KeyboardInterrupt:
        print("stopped: what was measured until then", file=sys.stderr)
        _tell(options, head, records)
        return 130
    _tell(options, head, records)
    return int(any(record["status"] in ("failed", "wrong") for record in records))


def _run_all(options: argparse.Namespace, job: dict[str, Any], head: dict[str, Any], records: list[dict[str, Any]]) -> None:
    """Adds to `records`, and to the file as soon as there is one more."""
    with open(options.json or os.devnull, "w") as file:
        print(json.dumps(head), file=file, flush=True)
        for record in _records(options, job):
            records.append(record)
            print(json.dumps(record), file=file, flush=True)


def _tell(options: argparse.Namespace, head: dict[str, Any], records: list[dict[str, Any]]) -> None:
    table.show(head, records)
    if options.plot:
        print(plot.save(options.plot, head, records))


def _records(options: argparse.Namespace, job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every run, one after the other; repeats go round over the loaders, so that a change of the machine's speed meets all."""
    for workload in options.workloads:
        same = {**job, "workload": workload, "compute": _compute(options, job, workload)}
        about = ABOUT[workload](Sizes(**job["sizes"])) + (f"; step: {same['compute']}" if same["compute"] else "")
        for repeat in range(options.repeat):
            for name in options.loaders:
                lacking = LOADERS[name].missing()
                if lacking:
                    result = {"status": "missing", "reason": f"not installed (pip install {' '.join(lacking)})"}
                else:
                    result = measure.do({**same, "job": "run", "loader": name}, options.timeout)
                record = {"record": "run", "workload": workload, "loader": name, "repeat": repeat, "about": about, **result}
                print(f"{workload} {name}: {_in_short(record)}", file=sys.stderr, flush=True)
                yield record


def _compute(options: argparse.Namespace, job: dict[str, Any], workload: str) -> dict[str, Any] | None:
    """What the step of images-step does, the same for all loaders.

    Raises:
        RuntimeError: it could not be found out.
    """
    if workload != "images-step":
        return None
    found = measure.do({**job, "job": "calibrate", "workload": workload, "step_ms": options.step_ms}, options.timeout)
    if "compute" not in found:
        raise RuntimeError(f"the step could not be calibrated: {found['reason']}\n{found.get('log', '')}")
    return found["compute"]


def _in_short(record: dict[str, Any]) -> str:
    if record["status"] != "ok":
        return f"{record['status'].upper()}: {record['reason']}".splitlines()[0]
    ratio = f", {record['step_over_alone']:.2f} x the step alone" if "step_over_alone" in record else ""
    return f"{record['gb_per_second']:.3g} GB/s, {record['batches_per_second']:,.1f} batches/s{ratio}"


def _list() -> None:
    print("workloads")
    for name in WORKLOADS:
        print(f"  {name:<17} {ABOUT[name](Sizes.choose('gpu', 1))}")
    print("loaders")
    for name, entry in LOADERS.items():
        lacking = entry.missing()
        print(f"  {name:<17} {entry.says}" + (f"; missing: pip install {' '.join(lacking)}" if lacking else ""))


def _names(known: Sequence[str], groups: dict[str, tuple[str, ...]], text: str) -> list[str]:
    names = [name for given in text.split(",") if given for name in groups.get(given, (given,))]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown) or 'nothing given'}; known: {', '.join(known)}")
    return list(dict.fromkeys(names))


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return number


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description="prefetchshard beside other loaders, on the same work.")
    add = parser.add_argument
    add(
        "--workloads",
        type=lambda text: _names(list(WORKLOADS), GROUPS, text),
        default=list(WORKLOADS),
        metavar="NAME,...",
        help="default: all; see --list",
    )
    add(
        "--loaders",
        type=lambda text: _names(list(LOADERS), {}, text),
        default=list(LOADERS),
        metavar="NAME,...",
        help="default: all; see --list",
    )
    add("--workers", type=_positive, metavar="N", help="threads or processes that each loader may read with (default: one a core, 2 to 16)")
    add("--seconds", type=float, metavar="S", help="measured time of a run (default: 2 on CPUs, else 3)")
    add("--devices", type=_positive, metavar="N", help="how many (default: all; on CPUs 8 virtual ones)")
    add("--batch-mib", type=float, metavar="M", help="images: MiB of a batch a device (default: 36.75, on CPUs 1.15)")
    add("--rows", type=_positive, metavar="N", help="images: rows in memory (default: 8192, on CPUs 1024)")
    add("--step-ms", type=float, metavar="M", help="images-step: the step alone (default: 6.6; on CPUs 1.5 times the loading of a batch)")
    add("--repeat", type=_positive, default=1, metavar="N", help="runs of each; the table shows the median")
    add("--timeout", type=float, default=60.0, metavar="S", help="of one run, start and end included (default: 60)")
    add("--json", metavar="FILE", help="a line of JSON for the header and for each run")
    add("--plot", metavar="FILE", help="a picture; needs matplotlib")
    add("--list", action="store_true", help="say what the workloads and the loaders are, and end")
    return parser


if __name__ == "__main__":
    sys.exit(main())
