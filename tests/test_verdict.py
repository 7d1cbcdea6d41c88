"""What the verdict names, from numbers that are known; `bench/verdicts.py` runs real loops."""

from __future__ import annotations

import sys
from typing import Any

import msgspec
import numpy as np
import pytest

from prefetchshard.measuring.delivered import Steps
from prefetchshard.measuring.distribution import Distribution, bucket_of
from prefetchshard.measuring.locking import Locking
from prefetchshard.measuring.setup import Setup
from prefetchshard.measuring.verdict import NEXT_SECONDS, Measured, Verdict, judge
from support import REPOSITORY, run_command

COUNT = 100
NONE = (0, 0.0, 0.0)
DATASET = Setup(source="dataset", is_numbered=True, workers=4, cpus=8, platform="gpu")
MANY_LEAVES = Setup(source="dataset", is_numbered=True, workers=4, cpus=8, platform="gpu", leaves=60)
ITERABLE = Setup(source="iterator", workers=4, cpus=8, platform="gpu")
WITH_TRANSFORM = Setup(source="iterator", workers=4, cpus=8, has_functions=True)


def spread(each: float) -> Distribution:
    """So long for every batch."""
    return Distribution(COUNT, COUNT * each, each, 0, {})


def measured(*, step: float = 0.010, stalled: dict[str, float] | None = None, start_up: float = 0.0, **known: Any) -> Measured:
    """A loop of steps that take so long, with these waits in each; seconds."""
    waits = {name: COUNT * seconds for name, seconds in (stalled or {}).items()}
    steady = Steps(COUNT, COUNT * step, sum(waits.values()), **waits)
    nothing = {name: spread(0.0) for name in ("reading", "transform", "copying", "transferring")}
    given: dict[str, Any] = {
        "batches": COUNT + 1, "wall": steady.wall + start_up, "start_up": start_up, "warm_up": Steps(), "steady": steady,
        "step": spread(step), **nothing, "dispatching": 0.0, "source": NONE, "readers": NONE, "locking": Locking(),
    }  # fmt: skip
    return Measured(**given | known)


def gain(now: float, then: float) -> Any:
    return pytest.approx(now / (then + NEXT_SECONDS) - 1, rel=1e-3)


def test_a_loop_that_hardly_waits_is_bound_by_its_step() -> None:
    verdict = judge(measured(stalled={"reading": 0.0005}), DATASET)
    assert verdict == Verdict("consumer", pytest.approx(0.5 / 10.5), pytest.approx(0.05), "")
    assert (
        str(verdict)
        == "Bound by the consumer: the step waits for input 4.8 % of the steady time, so that no loader makes this loop faster."
    )
    assert repr(verdict) == str(verdict)


def test_a_loop_of_which_nothing_is_known_yet() -> None:
    nothing = measured()._replace(batches=0, wall=0.0, steady=Steps())
    assert judge(nothing, DATASET) == Verdict("consumer", 0.0, 0.0, "")


def test_a_source_that_computes_and_gives_nothing() -> None:
    """Its thread keeps the lock, and no step was there to wait for it."""
    nothing = measured()._replace(batches=0, wall=2.0, steady=Steps(), source=(1, 2.0, 2.0), locking=Locking(9, 9, 0.05))
    assert nothing.is_locked
    assert judge(nothing, ITERABLE) == Verdict("consumer", 0.0, 0.0, "")


@pytest.mark.parametrize("batches", [1, 2, 3])
def test_a_loop_of_few_batches_is_start_up(batches: int) -> None:
    few = measured(start_up=0.03)._replace(batches=batches, wall=0.04, steady=Steps(), warm_up=Steps(batches - 1, 0.0, 0.01, reading=0.01))
    assert (judge(few, DATASET).bound, judge(few, DATASET).lost_share) == ("start-up", pytest.approx(0.75))
    assert judge(few._replace(batches=1, wall=0.0, start_up=0.0, warm_up=Steps()), DATASET).lost_share == 0.0
    later = few._replace(wall=0.04, start_up=0.0, warm_up=Steps(), steady=Steps(batches, 0.01, 0.03, reading=0.03))
    assert judge(later, DATASET).bound == "reading", "of a run that had begun before"


@pytest.mark.parametrize(
    ("bound", "work", "rest"),
    [
        ("reading", {"reading": 0.060, "transform": 0.015, "copying": 0.005}, 0.010),
        ("transform", {"reading": 0.015, "transform": 0.060, "copying": 0.005}, 0.010),
        ("copying", {"reading": 0.0, "transform": 0.0, "copying": 0.080}, 0.010),
        ("reading", {"reading": 0.040, "transform": 0.036, "copying": 0.004}, 0.020 * 0.5),
        ("reading", {"reading": 0.044, "transform": 0.032, "copying": 0.004}, 0.010),
        ("reading", {"reading": 0.042, "transform": 0.030, "copying": 0.008}, 0.010),
        ("transform", {"reading": 0.032, "transform": 0.044, "copying": 0.004}, 0.010),
        ("transform", {"reading": 0.026, "transform": 0.028, "copying": 0.026}, 0.020 * 52 / 80),
    ],
)
def test_workers_of_a_dataset(bound: str, work: dict[str, float], rest: float) -> None:
    """Without a stage the others take what is left of the workers' time, but the step never takes less than it does."""
    total = sum(work.values())
    stalled = {name: 0.010 * seconds / total for name, seconds in work.items()}
    verdict = judge(measured(stalled=stalled, **{name: spread(seconds) for name, seconds in work.items()}), DATASET)
    assert (verdict.bound, verdict.lost_share) == (bound, pytest.approx(0.5))
    assert verdict.possible_gain == gain(0.020, rest)


def test_the_transfer_is_what_is_left_then() -> None:
    found = measured(stalled={"reading": 0.010}, reading=spread(0.08), transferring=spread(0.016))
    assert judge(found, DATASET).possible_gain == gain(0.020, 0.016)


def test_bound_by_the_transfer() -> None:
    work = {"copying": spread(0.06), "transferring": spread(0.02)}
    found = measured(stalled={"transferring": 0.009, "handing_over": 0.001}, readers=(4, 6.0, 6.0), **work)
    verdict = judge(found, DATASET)
    assert (verdict.bound, verdict.possible_gain) == ("transferring", gain(0.020, 0.015))
    assert "fewer bytes" in verdict.advice
    assert "smaller dtype" in judge(found, Setup(is_numbered=True, wide_share=0.9)).advice


def test_bound_by_the_calls_that_begin_transfers() -> None:
    """They hold the lock from the step too: what is lost is more than waits for batches."""
    steps = Distribution(COUNT, 1.0, 0.015, 0, {bucket(0.003): 10, bucket(0.010): 90})
    found = measured(stalled={"handing_over": 0.001}, transferring=spread(0.002), dispatching=0.0019 * 101)._replace(step=steps)
    verdict = judge(found, MANY_LEAVES)
    assert (verdict.bound, verdict.possible_gain) == ("transferring", gain(0.010, 0.0027))
    assert verdict.lost_share == pytest.approx(0.73, rel=1e-3), "it fits to the gain"
    assert "fewer leaves" in verdict.advice
    assert "larger batches" in judge(found, msgspec.structs.replace(MANY_LEAVES, leaves=3)).advice, "there is nothing to put together"
    early = found._replace(steady=msgspec.structs.replace(found.steady, ahead=COUNT * 0.009))
    assert "fewer leaves" in judge(early, MANY_LEAVES).advice, "the step is slow by the calls, whatever is ready"


def test_small_batches_cost_what_handing_over_costs() -> None:
    """Also where several come at once, and then none: more of them ready bring nothing."""
    found = measured(step=0.0001, stalled={"transferring": 0.0001, "handing_over": 0.0003}, readers=(4, 0.01, 0.01))
    found = found._replace(steady=msgspec.structs.replace(found.steady, ahead=COUNT * 0.001, late=COUNT * 0.0004))
    verdict = judge(found, DATASET)
    assert (verdict.bound, verdict.advice.split(":")[0]) == ("transferring", "larger batches")
    small = found._replace(steady=Steps(COUNT, COUNT * 0.0001, COUNT * 0.0004, reading=COUNT * 0.0001, handing_over=COUNT * 0.0003))
    assert judge(small, DATASET).bound == "transferring"
    assert "larger batches" in judge(found._replace(transferring=spread(0.0001), dispatching=0.9 * COUNT * 0.0001), DATASET).advice


@pytest.mark.parametrize("stage", ["reading", "transform", "copying", "transferring"])
def test_batches_that_are_late_now_and_then(stage: str) -> None:
    """Most were ready long before: more of them ready even out the late ones."""
    found = measured(stalled={stage: 0.002}, readers=(4, 0.6, 0.3), **{stage: spread(0.006)})
    even = found._replace(steady=msgspec.structs.replace(found.steady, ahead=COUNT * 0.001, late=COUNT * 0.002))
    uneven = found._replace(steady=msgspec.structs.replace(found.steady, ahead=COUNT * 0.009, late=COUNT * 0.002))
    assert judge(uneven, DATASET).bound == judge(even, DATASET).bound == stage
    assert judge(uneven, DATASET).advice.startswith('depth="auto": ')
    assert "depth" not in judge(even, DATASET).advice
    assert "depth" not in judge(uneven, msgspec.structs.replace(DATASET, depth_could_grow=False)).advice, "it is as great as it can be"
    one_wait = uneven._replace(longest=0.6 * COUNT * 0.002)
    assert judge(one_wait, DATASET).advice.startswith("most of that was one wait"), "it may never come again"
    early = uneven._replace(steady=msgspec.structs.replace(uneven.steady, late=0.4 * COUNT * 0.002))
    assert "depth" not in judge(early, DATASET).advice, "one after the other was late, and then none"
    waits = msgspec.structs.replace(found.steady, ahead=COUNT * 9.0)
    compiled = found._replace(warm_up=waits, steady=found.steady)
    assert "depth" not in judge(compiled, DATASET).advice, "while the first step was compiled, all were ready"


def test_many_leaves_hold_the_lock_from_the_step() -> None:
    """It waits for no batch: each time that it wakes the transfer thread is in the calls for the next one."""
    steps = Distribution(COUNT, 1.8, 0.03, 0, {bucket(0.006): 10, bucket(0.018): 90})
    found = measured(step=0.018, transferring=spread(0.013), dispatching=0.0125 * 101)._replace(step=steps)
    verdict = judge(found, MANY_LEAVES)
    assert (verdict.bound, verdict.possible_gain) == ("transferring", gain(0.018, 0.0055))
    assert verdict.lost_share == pytest.approx(1 - 5.5 / 18)
    assert "fewer leaves" in verdict.advice
    assert judge(found._replace(step=spread(0.018)), DATASET).bound == "consumer", "no step is faster than others"
    assert judge(found._replace(step=spread(0.018)), Setup(is_numbered=True, platform="cpu")).bound == "transferring"
    assert judge(found._replace(dispatching=0.006 * 101), DATASET).bound == "consumer", "the calls are not what takes the time"
    some_are_free = judge(found._replace(dispatching=0.010 * 101), DATASET)
    assert some_are_free.possible_gain == pytest.approx(0.018 / 0.006 - 1, rel=0.03), "the fastest steps come between two calls"
    none_is_free = judge(found._replace(step=spread(0.018), dispatching=0.010 * 101), Setup(is_numbered=True, platform="cpu"))
    assert none_is_free.possible_gain == gain(0.018, 0.008)


def test_one_thread_pulls_and_others_transform() -> None:
    """Which of them is always at work tells, not what a batch takes: transforms run beside each other."""
    work = {"reading": spread(0.020), "transform": spread(0.060), "copying": spread(0.004)}
    waits = {"reading": 0.002, "transform": 0.008}
    pulls = measured(stalled=waits, source=(1, 2.0, 1.0), readers=(4, 6.4, 1.0), **work)
    verdict = judge(pulls, WITH_TRANSFORM)
    assert (verdict.bound, verdict.possible_gain) == ("reading", gain(0.020, max(0.010, 6.4 / 4 / 101)))
    transforms = measured(stalled=waits, source=(1, 1.2, 1.0), readers=(4, 8.0, 1.0), **work)
    verdict = judge(transforms, WITH_TRANSFORM)
    assert (verdict.bound, verdict.possible_gain) == ("transform", gain(0.020, 1.2 / 101))
    copies = transforms._replace(transform=spread(0.001), copying=spread(0.060))
    assert judge(copies, WITH_TRANSFORM).bound == "copying"


def test_a_late_start_of_a_loop_that_keeps_up() -> None:
    found = measured(start_up=2.0, reading=spread(0.002))
    usual = Distribution(COUNT, 0.2, 0.002, 0, {})
    verdict = judge(found._replace(reading=usual), ITERABLE)
    assert (verdict.bound, verdict.lost_share) == ("start-up", pytest.approx(2 / 3))
    assert verdict.possible_gain == pytest.approx(3.0 / 1.002 - 1)
    assert "iter(loader)" in verdict.advice
    assert "at most 199 % faster" in str(verdict)
    assert judge(measured(start_up=0.09, step=0.002), ITERABLE).bound == "consumer", "nobody minds a tenth of a second"
    assert judge(measured(start_up=0.15), ITERABLE).bound == "consumer", "nor a small part of all"
    assert judge(measured(start_up=1.5, stalled={"reading": 0.010}), ITERABLE).bound == "reading", "each batch comes late"


def test_the_interpreters_lock() -> None:
    """One CPU in use, and who sleeps wakes late: the threads hold the lock by turns, and the step waits for it too."""
    steps = Distribution(COUNT, 0.8, 0.012, 0, {bucket(0.004): 10, bucket(0.009): 90})
    waits = {"transferring": 0.002}
    found = measured(step=0.008, stalled=waits, readers=(4, 2.0, 0.9), locking=Locking(20, 12, 0.08))._replace(step=steps)
    verdict = judge(found, DATASET)
    assert verdict.bound == "lock"
    assert verdict.possible_gain == pytest.approx(0.010 / 0.004 - 1, rel=0.03)
    assert verdict.lost_share == pytest.approx(0.6, rel=0.02)
    for free, expected in ((3, 0.004), (1, 0.009)):  # two of a hundred, at least, find it free
        some = found._replace(step=Distribution(COUNT, 0.8, 0.012, 0, {bucket(0.004): free, bucket(0.009): 100 - free}))
        assert judge(some, DATASET).possible_gain == pytest.approx(0.010 / min(expected, 0.008) - 1, rel=0.03)
    assert verdict.advice.startswith("workers=ps.Processes(8)")
    assert str(verdict).startswith("Bound by the interpreter's lock: ")
    assert "in one thread" in judge(found, ITERABLE).advice
    for other in (
        found._replace(locking=Locking(20, 4, 0.08)),  # they let go of it
        found._replace(locking=Locking(1, 1, 0.08)),  # seen once
        found._replace(readers=(4, 2.0, 1.9)),  # they compute beside each other
        found._replace(readers=(4, 2.0, 0.1)),  # they wait for something else
    ):
        assert judge(other, DATASET).bound == "transferring"
    assert judge(found, Setup(is_numbered=True, cpus=1)).bound == "transferring", "nothing to be had beside each other"
    assert judge(found, Setup(is_numbered=True, cpus=8, processes=4)).bound == "transferring", "they have locks of their own"


def bucket(seconds: float) -> int:
    return int(bucket_of(np.array([seconds]))[0])


def test_a_wait_while_warming_up_counts_where_no_other_came() -> None:
    """One stall early in a short loop would else be nobody's."""
    found = measured()._replace(warm_up=Steps(4, 0.04, 0.4, reading=0.4), reading=spread(0.003))
    verdict = judge(found, ITERABLE)
    assert (verdict.bound, verdict.lost_share) == ("reading", pytest.approx(0.4 / 1.44))
    steady = measured(stalled={"transform": 0.010}, transform=spread(0.02))._replace(warm_up=Steps(4, 0.04, 0.4, reading=0.4))
    assert (judge(steady, DATASET).bound, judge(steady, DATASET).lost_share) == ("transform", 0.5), (
        "the steady steps tell, where they wait too"
    )


@pytest.mark.parametrize(
    ("setup", "bound", "readers", "advice"),
    [
        (DATASET, "reading", (4, 8.0, 0.4), "workers=10"),  # they wait: 0.08 s a batch, 0.01 a step, and some more
        (DATASET, "reading", (4, 8.0, 7.8), "workers=8"),  # they compute
        (Setup(is_numbered=True, workers=8, cpus=8), "reading", (8, 8.0, 7.8), "all 8 CPUs read already"),
        (Setup(is_numbered=True, workers=48, cpus=8), "reading", (48, 40.0, 0.8), "48 workers wait already"),  # no CPU is busy
        (Setup(is_numbered=True, workers=8, processes=8, cpus=8), "reading", (8, 8.0, 0.1), "all 8 CPUs read already"),
        (Setup(is_numbered=True, workers=8, cpus=8), "transform", (8, 8.0, 7.8), "device_transform="),
        (Setup(is_numbered=True, workers=2, processes=2, cpus=8), "transform", (2, 8.0, 0.1), "workers=ps.Processes(8)"),
        (Setup(is_numbered=True, is_memory=True, workers=8, cpus=8), "copying", (8, 8.0, 7.8), "smaller dtype"),
        (ITERABLE, "reading", NONE, "one thread pulls the source"),
        (ITERABLE, "copying", NONE, "reuses_buffers=False"),
        (Setup(reuses_buffers=False, cpus=1), "copying", NONE, "smaller dtype"),
    ],
)
def test_advice_is_in_words_of_the_interface(setup: Setup, bound: str, readers: Any, advice: str) -> None:
    found = measured(stalled={bound: 0.010}, readers=readers, source=(0 if setup.is_numbered else 1, 1.0, 1.0), **{bound: spread(0.08)})
    verdict = judge(found, setup)
    assert verdict.bound == bound
    assert advice in verdict.advice
    assert str(verdict).count(". ") == 0, "one sentence"
    assert verdict.advice in str(verdict)


@pytest.mark.slow
@pytest.mark.skipif(not (REPOSITORY / "bench").is_dir(), reason="bench/ is not here")
def test_real_loops_are_named() -> None:
    """Those that sleep, so that a busy machine hardly changes them; there are more, and it compares what was promised."""
    names = [
        "slow step",
        "late start",
        "one stall",
        "transform of four, reading of one",
        "reading of four, transform of one",
        "sleeping generator",
        "slow collate",
    ]
    done = run_command([sys.executable, str(REPOSITORY / "bench" / "verdicts.py"), "--runs", "1", "--only", *names])
    assert done.stdout.count(" 1 of 1 ") == len(names), done.stdout + done.stderr
