"""What the speed of a loop depends on, worked out from what was measured."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from prefetchshard.base.limits import MOST_WAITING
from prefetchshard.measuring.delivered import Steps
from prefetchshard.measuring.distribution import Distribution
from prefetchshard.measuring.locking import Locking
from prefetchshard.measuring.setup import Setup

Bound: TypeAlias = Literal["reading", "transform", "copying", "transferring", "consumer", "start-up", "lock"]

LITTLE = 0.05
"""A loop that waits for less than this share of its time is bound by its own step."""

LEAST_START_UP_SECONDS = 0.1
"""A first batch that comes sooner is never what a loop is bound by."""

FEW = 3
"""Batches. A loop of so few is start-up, whatever it waits for then."""

START_UP_SHARE = 0.15
"""Of the wall time, likewise."""

LOCK_SHARE = 0.25
"""The interpreter's lock counts as contended where so many looks had to wait for it (`bench/verdicts.py`: 0.5 to 1.0 where Python code is what
takes the time, below 0.05 elsewhere)."""

LEAST_LOOKS = 2

ONE_CPU = (0.5, 1.4)
"""Threads that hold the lock by turns use about one CPU together; more, and they compute beside each other, less, and they wait for something
else."""

FREE_STEPS = 0.02
"""So many steps, at least, find the interpreter's lock free where the others wait for it. (Of 50 steps it is the fastest one: in the loop over
an iterable with a Python `transform` the second fastest still waited for a millisecond in 5 of 8 runs.)"""

HELD_SHARE = 0.4
"""Of the wall time: calls that take less do not make the step wait for the interpreter's lock much."""

MOSTLY = 0.5
"""Likewise, on the CPU backend, where nothing else than the calls takes a transfer's time."""

NEVER_FREE = 0.65
"""Of the wall time: beside calls that take more even the fastest steps wait for the lock (400 leaves and a step of 4 ms: calls take 0.7 of it,
and the fastest steps 16 ms; 60 to 400 leaves and a step of half the time and more: 0.52 to 0.59, and 4.3 and 13.0 ms of 4.2 and 12.2)."""

UNEVEN = 0.75
"""Steps that wait for the lock take unlike times: the fastest fiftieth (`FREE_STEPS`) is below this part of the mean."""

FEW_LEAVES = 3
"""Of so few none is to be put together with others: an image, a label, a mask."""

FEWER_LEAVES = "fewer leaves, or larger batches: each leaf costs a call, so put small ones together into one array"

LARGER_BATCHES = "larger batches: each costs its calls, whatever it holds (microbatches= divides one for several steps)"

EVEN_OUT = 'depth="auto": most batches are ready long before they are asked for, and a greater depth evens out those that are late'

ONE_WAIT = 'most of that was one wait: where such waits come again, depth="auto" evens them out'

NEXT_SECONDS = 2e-5
"""What a `next()` takes that need not wait."""


class Verdict(msgspec.Struct, frozen=True):
    """What the speed of a loop depends on.

    Attributes:
        bound: the stage that the loop waits for: "reading" (the source's own code), "transform" (`transform` and `collate`), "copying"
            (into staging memory), "transferring" (to the devices); "lock": the interpreter's lock, which threads of readers hold by turns;
            "start-up": the first batch; "consumer": none, the loop's own step takes the time.
        lost_share: of the steady wall time, what the loop lost by waiting, 0.0 to 1.0; at "start-up", of all of it.
        possible_gain: the most that removing the cause could bring: 0.31 is "at most 31 % faster".
        advice: the change to make; empty where there is none.
    """

    bound: Bound
    lost_share: float
    possible_gain: float
    advice: str

    def __str__(self) -> str:
        """One sentence."""
        lost = f"{100 * self.lost_share:.1f} %"
        if self.bound == "consumer":
            return f"Bound by the consumer: the step waits for input {lost} of the steady time, so that no loader makes this loop faster."
        what = "start-up" if self.bound == "start-up" else "the interpreter's lock" if self.bound == "lock" else self.bound
        gain = (
            f"at most {100 * self.possible_gain:.0f} % faster"
            if self.possible_gain < 2
            else f"at most {1 + self.possible_gain:.1f} times as fast"
        )
        advice = f": {self.advice}" if self.advice else ""
        time = "time" if self.bound == "start-up" else "steady time"
        return f"Bound by {what}: waiting takes {lost} of the {time}, and without it the loop would be {gain}{advice}."

    def __repr__(self) -> str:
        return str(self)  # what a notebook shows


class Measured(NamedTuple):
    """What a verdict is worked out from; see `Stats`. Of threads: how many, their busy seconds, and their CPU seconds. `longest`: of the waits."""

    batches: int
    wall: float
    start_up: float
    warm_up: Steps
    steady: Steps
    step: Distribution
    reading: Distribution
    transform: Distribution
    copying: Distribution
    transferring: Distribution
    dispatching: float
    source: tuple[int, float, float]
    readers: tuple[int, float, float]
    locking: Locking
    longest: float = 0.0

    @property
    def steps(self) -> Steps:
        """The steps that tell the speed of the loop: the steady ones, where it waits in these too."""
        steady = self.steady
        return steady if steady.count and steady.stalled > LITTLE * steady.wall else self.warm_up + steady

    @property
    def cpus_used(self) -> float:
        """CPUs that its threads used on average."""
        return (self.source[2] + self.readers[2]) / self.wall if self.wall > 0 else 0.0

    @property
    def is_dispatch(self) -> bool:
        """Whether transfers are mostly the calls that begin them."""
        return self.dispatching > 0.5 * self.transferring.total

    @property
    def is_locked(self) -> bool:
        """Whether its threads hold the interpreter's lock by turns."""
        locking, (least, most) = self.locking, ONE_CPU
        return locking.looks >= LEAST_LOOKS and locking.share >= LOCK_SHARE and least <= self.cpus_used <= most


def judge(measured: Measured, setup: Setup) -> Verdict:
    """What the loop's speed depends on, what that costs, and what would change it."""
    steps = measured.steps
    wall = steps.wall
    lost = steps.stalled / wall if wall > 0 else 0.0
    if _is_start_up(measured, steps.stalled):
        return _start_up(measured)
    if steps.count and measured.is_locked and setup.cpus > 1 and not setup.processes:
        undisturbed = min(_undisturbed_step(measured), steps.busy / steps.count)
        lost_to_lock = 1 - undisturbed * steps.count / wall
        if lost_to_lock >= LITTLE:
            return Verdict("lock", lost_to_lock, _gain(wall / steps.count, undisturbed), _lock_advice(setup))
    if (held := _held_by_dispatch(measured, steps, setup)) is not None:
        return held
    if lost < LITTLE:
        return Verdict("consumer", lost, lost / (1 - lost), "")
    bound = _slowest(measured, steps, setup)
    step = steps.busy / steps.count
    is_in_calls = bound == "transferring" and measured.is_dispatch  # which compute in Python, and hold the lock from the step
    if is_in_calls:
        step = min(step, _undisturbed_step(measured))
        lost = 1 - step * steps.count / wall
    gain = _gain(wall / steps.count, max(step, _rest(measured, steps, setup, bound)))
    even_out = "" if is_in_calls else _even_out(measured, steps, setup)
    return Verdict(bound, lost, gain, even_out or _ADVICE[bound](measured, steps, setup))


def _held_by_dispatch(measured: Measured, steps: Steps, setup: Setup) -> Verdict | None:
    """Where the calls that begin transfers hold the interpreter's lock, so that the step waits for it and not for a batch."""
    if not measured.is_dispatch or measured.dispatching < HELD_SHARE * measured.wall or steps.stalled > LITTLE * steps.wall:
        return None
    step = steps.busy / steps.count
    free = _undisturbed_step(measured)
    if free > UNEVEN * step and not (setup.platform == "cpu" and measured.dispatching > MOSTLY * measured.wall):
        return None  # it does not wait for the lock, whoever holds it: it may wait for the device
    finds_it_free = free < UNEVEN * step and measured.dispatching < NEVER_FREE * measured.wall
    undisturbed = free if finds_it_free else max(step - measured.dispatching / measured.batches, LITTLE * step)
    lost = 1 - undisturbed * steps.count / steps.wall
    return Verdict("transferring", lost, _gain(steps.wall / steps.count, undisturbed), _fewer_calls(setup))


def _undisturbed_step(measured: Measured) -> float:
    """Seconds of a step that need not wait for the interpreter's lock: some find it free."""
    return measured.step.quantile(FREE_STEPS)


def _gain(now: float, then: float) -> float:
    return max(0.0, now / (then + NEXT_SECONDS) - 1)


def _is_start_up(measured: Measured, stalled: float) -> bool:
    if 0 < measured.batches <= FEW and (measured.warm_up + measured.steady).count < measured.batches:  # the first one is among them
        return True
    start_up = measured.start_up
    return start_up >= LEAST_START_UP_SECONDS and start_up > START_UP_SHARE * measured.wall and start_up > 2 * stalled


def _start_up(measured: Measured) -> Verdict:
    usual = measured.reading.p50 + measured.transform.p50 + measured.copying.p50 + measured.transferring.p50
    rest = max(measured.wall - measured.start_up, 0.0) + usual
    gain = measured.wall / rest - 1 if rest > 0 else 0.0
    advice = "call iter(loader) before the step is compiled, as reading begins with it"
    lost = measured.start_up / measured.wall if measured.wall > 0 else 0.0
    return Verdict("start-up", lost, max(0.0, gain), advice)


def _slowest(measured: Measured, steps: Steps, setup: Setup) -> Bound:
    waits: dict[Bound, float] = {
        "reading": steps.reading,
        "transform": steps.transform,
        "copying": steps.copying,
        "transferring": steps.transferring,
    }
    if steps.handing_over > sum(waits.values()):  # small batches
        return "transferring"
    if _is_pulled(measured, setup):
        _tell_by_use(measured, waits)
    return max(waits, key=lambda name: waits[name])


def _is_pulled(measured: Measured, setup: Setup) -> bool:
    """Whether one thread pulls, and others work on what it pulled."""
    return setup.has_functions and measured.source[0] > 0 and measured.readers[0] > 0


def _tell_by_use(measured: Measured, waits: dict[Bound, float]) -> None:
    """A batch passes through the thread that pulls and through others: the loop waits for those that are at work all the time."""
    in_readers = waits["reading"] + waits["transform"] + waits["copying"]
    threads, busy, _ = measured.readers
    if measured.source[1] >= busy / threads:
        waits["reading"], waits["transform"], waits["copying"] = in_readers, 0.0, 0.0
    else:
        functions = measured.transform.total + measured.copying.total
        share = measured.transform.total / functions if functions else 1.0
        waits["reading"], waits["transform"], waits["copying"] = 0.0, share * in_readers, (1 - share) * in_readers


def _rest(measured: Measured, steps: Steps, setup: Setup, bound: Bound) -> float:
    """Seconds a step of what would be the slowest stage without this one."""
    work = {"reading": measured.reading.mean, "transform": measured.transform.mean, "copying": measured.copying.mean}
    total = sum(work.values())
    batches = max(1, measured.batches)
    if bound == "transferring":
        threads = max(1, measured.readers[0])
        return total / threads if setup.is_numbered else measured.source[1] / batches
    if _is_pulled(measured, setup):
        beside = measured.readers[1] / measured.readers[0] / batches
        others = beside if bound == "reading" else measured.source[1] / batches
    else:
        others = steps.wall / steps.count * (total - work[bound]) / total if total else 0.0
    return max(others, measured.transferring.mean)


# -- advice


def _even_out(measured: Measured, steps: Steps, setup: Setup) -> str:
    """What a greater depth brings, where batches are late now and then; else an empty text."""
    if not setup.depth_could_grow or measured.steady.ahead <= steps.stalled or steps.handing_over > 0.5 * steps.stalled:
        return ""
    if measured.longest > 0.5 * steps.stalled:
        return ONE_WAIT
    return EVEN_OUT if measured.steady.late > 0.5 * steps.stalled else ""  # else they were late at first, and later no more


def _lock_advice(setup: Setup) -> str:
    if setup.is_numbered or setup.has_functions:
        return f"workers=ps.Processes({setup.cpus}) computes in processes, beside each other"
    return "the source computes in Python in one thread: let it yield what is cheap, and do the rest in transform= with ps.Processes(n)"


def _more_workers(measured: Measured, steps: Steps, setup: Setup) -> str:
    """More workers, where there is something for them to do; else an empty text."""
    threads, busy, _ = measured.readers
    needed = math.ceil(1.2 * busy / max(steps.busy / steps.count * measured.batches, 1e-9)) if measured.batches else threads
    most = MOST_WAITING if _wait_themselves(measured, setup) else setup.cpus
    wanted = min(most, max(needed, threads + 1))
    if wanted <= max(threads, setup.workers):
        return ""
    return f"workers=ps.Processes({wanted})" if setup.processes else f"workers={wanted}"


def _reading_advice(measured: Measured, steps: Steps, setup: Setup) -> str:
    if not setup.is_numbered:
        return (
            "one thread pulls the source: give a dataset (__len__ and __getitem__), which all workers read, or let it yield what is cheap "
            "and do the rest in transform="
        )
    more = _more_workers(measured, steps, setup)
    if more:
        return more
    if _wait_themselves(measured, setup):
        return f"{setup.workers} workers wait already, maybe for each other: see what lets few of them read at once, such as a lock"
    return f"all {setup.cpus} CPUs read already: make an example cheaper to read, or store it as it is used"


def _wait_themselves(measured: Measured, setup: Setup) -> bool:
    """Whether threads that read or transform use their CPUs for less than half of the time that this takes. Of processes nobody knows."""
    _, busy, cpu = measured.readers
    return cpu < 0.5 * busy and not setup.processes


def _transform_advice(measured: Measured, steps: Steps, setup: Setup) -> str:
    more = _more_workers(measured, steps, setup)
    return more or "what the devices can do belongs in device_transform="


def _copying_advice(measured: Measured, steps: Steps, setup: Setup) -> str:
    if not setup.is_numbered and setup.reuses_buffers and not setup.has_functions:
        return "reuses_buffers=False lets the source go on while its batch is copied, where it yields new arrays"
    more = _more_workers(measured, steps, setup)
    return more or "store the data in a smaller dtype (uint8), and convert it in device_transform="


def _transferring_advice(measured: Measured, steps: Steps, setup: Setup) -> str:
    if measured.is_dispatch:
        return _fewer_calls(setup)
    if steps.handing_over > 0.5 * steps.stalled:
        return LARGER_BATCHES
    if setup.wide_share > 0.5:
        return "send a smaller dtype (uint8) over the bus, and convert it in device_transform="
    return "send fewer bytes a step"


def _fewer_calls(setup: Setup) -> str:
    return LARGER_BATCHES if setup.leaves <= FEW_LEAVES else FEWER_LEAVES


_ADVICE = {"reading": _reading_advice, "transform": _transform_advice, "copying": _copying_advice, "transferring": _transferring_advice}
