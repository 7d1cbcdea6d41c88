"""Programs drawn at random, with what goes wrong in them: what comes is what the model in plain Python says. See `schedules.py`."""

from __future__ import annotations

import os

import pytest

from schedules import CONSUMERS, ERRORS, KINDS, draw, model, run
from support import begin_threads

IN_A_TEST = 20
ALWAYS = range(300)
MORE = range(300, 300 + int(os.environ.get("PREFETCHSHARD_SCHEDULES", "1000")))


def _blocks(seeds: range) -> list[range]:
    return [seeds[start : start + IN_A_TEST] for start in range(0, len(seeds), IN_A_TEST)]


def _name(seeds: range) -> str:
    return f"{seeds[0]} to {seeds[-1]}"


def check(seeds: range) -> None:
    """Each of them; one that fails is told with all that was drawn for it."""
    failures: list[str] = []
    for seed in seeds:
        begin_threads()  # what a failed one left is not the next one's fault
        try:
            run(draw(seed))
        except AssertionError as error:
            failures.append(str(error))
    if failures:
        pytest.fail(f"{len(failures)} of {len(seeds)} schedules:\n\n" + "\n\n".join(failures[:3]), pytrace=False)


@pytest.mark.parametrize("seeds", _blocks(ALWAYS), ids=_name)
def test_what_comes_is_what_must_come(seeds: range) -> None:
    check(seeds)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", _blocks(MORE), ids=_name)
def test_what_comes_is_what_must_come_again_and_again(seeds: range) -> None:
    check(seeds)


def test_a_seed_draws_the_same_again() -> None:
    assert [draw(seed) for seed in ALWAYS] == [draw(seed) for seed in ALWAYS]


def test_every_kind_fault_and_consumer_is_drawn() -> None:
    schedules = [draw(seed) for seed in ALWAYS]
    faults = [schedule.fault for schedule in schedules if schedule.fault is not None]
    assert {schedule.kind for schedule in schedules} == set(KINDS)
    assert {schedule.consumer for schedule in schedules} == set(CONSUMERS)
    assert {fault.error for fault in faults} == {*ERRORS, ""}
    assert {fault.what for fault in faults} == {"raise", "gate", "shape", "dtype", "None"}
    assert {fault.where for fault in faults} == {"source", "transform", "collate", "device_transform"}
    assert sum(model(schedule).error is not None for schedule in schedules) > 60
    assert sum(len(model(schedule).batches) for schedule in schedules) > 900
