"""The stress program finds nothing wrong, and does find what is planted."""

from __future__ import annotations

import re
import sys

import pytest
from jax.sharding import NamedSharding

from support import REPOSITORY, copies_late, run_command, run_python

STRESS = str(REPOSITORY / "bench" / "stress.py")


def stress(seconds: float, *more: str) -> str:
    """Runs the program. What it prints; the seed is another one each time, and is printed."""
    done = run_command([sys.executable, "-W", "error", STRESS, "--seconds", str(seconds), *more], timeout=seconds + 180)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    assert done.stdout.rstrip().endswith("no wrong value"), done.stdout
    return done.stdout


@pytest.mark.parametrize("staging", ["poison", "default"])
def test_nothing_is_wrong_in_a_few_seconds(staging: str) -> None:
    printed = stress(2, "--staging", staging)
    assert f"{staging} staging" in printed
    total = re.search(r"^all +(\d+) +(\d+) +(\d+)", printed, re.M)
    assert total is not None
    assert min(map(int, total.groups())) > 0


@pytest.mark.slow
@pytest.mark.parametrize("staging", ["poison", "default"])
def test_nothing_is_wrong_for_long(staging: str) -> None:
    stress(15, "--staging", staging)


def test_slots_that_are_released_too_early_are_found(S: NamedSharding) -> None:
    """Memory is given back right after the put: the CPU backend of a JAX before 0.11 reads what is large after that."""
    late = copies_late(S)
    done = run_python(
        """
        import os, sys
        sys.path.insert(0, ".")
        from bench import stress
        from prefetchshard.placing import placer as stages

        put = stages.Placer.dispatch

        def early(self, host):
            flight = put(self, host)
            if host.memory is not None:
                host.memory.release()
                host.memory = None
            return flight

        stages.Placer.dispatch = early
        stress.use_devices(8)
        for number in range(40 if os.environ["LATE"] == "True" else 3):
            if stress.run_case(0, number, poison=True).tally.wrong:
                print("found")
                break
        """,
        timeout=120,
        env={"JAX_PLATFORMS": "cpu", "LATE": str(late)},
    )
    assert (done.returncode, done.stdout) == (0, "found\n" if late else ""), done.stderr


def test_what_is_written_after_the_release_is_found() -> None:
    """A worker that still writes to a batch that was sent on."""
    done = run_python(
        """
        import sys
        sys.path.insert(0, ".")
        from bench import stress
        from prefetchshard.placing import placer as stages

        land = stages.Placer.land

        def late(self, flight):
            view = flight.host.memory.views[0] if flight.host.memory is not None else None
            placed = land(self, flight)
            if view is not None:
                view[:1] = 0
            return placed

        stages.Placer.land = late
        stress.use_devices(8)
        for number in range(40):
            checker = stress.run_case(0, number, poison=True)
            if checker.tally.failures and "SlotMisuseError" in checker.faults[-1]:
                print("found")
                break
        """,
        timeout=120,
        env={"JAX_PLATFORMS": "cpu"},
    )
    assert (done.returncode, done.stdout) == (0, "found\n"), done.stderr
