"""Every way out of a program: the exit code that it should have, nothing on stderr but what has to be there, and within seconds.

Each way is a program of its own; `ways_out.py` and `rare_ways_out.py` make them. One that fails is printed whole, to be run by hand.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest

from rare_ways_out import RARE
from support import HANG_SECONDS, run_command
from ways_out import LISTED, Way

pytestmark = pytest.mark.slow

WAYS = {**LISTED, **RARE}
SIDE_BY_SIDE = 4
"""More than there are CPUs: each is disturbed by others, and some of them wait."""


NEVER_THERE = 1e9


class Outcome(NamedTuple):
    """What came of a program."""

    code: int
    stdout: str
    stderr: str
    seconds: float
    """From `here` on; `NEVER_THERE` of a program that did not come there."""


def run(way: Way) -> Outcome:
    watchdog = "import faulthandler; faulthandler.dump_traceback_later(110)\n"
    try:
        done = run_command([sys.executable, *way.flags, "-c", watchdog + way.program])
    except subprocess.TimeoutExpired as error:
        return Outcome(-1, "", "\n".join(("it hangs", *error.__notes__)), NEVER_THERE)
    ended_at = time.monotonic()
    lines = done.stdout.splitlines(keepends=True)
    times = [float(line.split()[1]) for line in lines if line.startswith("here ")]
    stdout = "".join(line for line in lines if not line.startswith("here "))
    return Outcome(done.returncode, stdout, done.stderr, ended_at - times[0] if times else NEVER_THERE)


@pytest.fixture(scope="module")
def done(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Outcome]]:
    """What came of a way: those of the tests that will run are run beside each other, as those tests come."""
    items = [item for item in request.session.items if getattr(item, "originalname", "") == test_the_way_out.__name__]
    names = [str(item.callspec.params["name"]) for item in items if isinstance(item, pytest.Function)]
    pool = ThreadPoolExecutor(SIDE_BY_SIDE)
    futures = {name: pool.submit(run, WAYS[name]) for name in names}
    yield lambda name: futures[name].result()
    pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("name", WAYS)
def test_the_way_out(name: str, done: Callable[[str], Outcome]) -> None:
    way, outcome = WAYS[name], done(name)
    faults = [
        *([] if outcome.code == way.code else [f"exit code {outcome.code}, not {way.code}"]),
        *([] if outcome.stdout == way.stdout else [f"stdout is not {way.stdout!r}"]),
        *([] if re.fullmatch(way.stderr, outcome.stderr) else [f"stderr is not {way.stderr!r}"]),
        *([] if outcome.seconds < HANG_SECONDS else [f"it took {outcome.seconds:.1f} s to end"]),
    ]
    if faults:
        parts = (
            *faults,
            f"--- stdout\n{outcome.stdout}",
            f"--- stderr\n{outcome.stderr}",
            f"--- python {' '.join(way.flags)}\n{way.program}",
        )
        pytest.fail("\n".join(parts), pytrace=False)


def test_there_are_enough_of_them() -> None:
    assert len(WAYS) >= 150
