"""The step that consumes batches, and what it costs alone."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp

from bench.data import Workload
from bench.place import Place

ON_THE_WAY = 2  # steps that may be dispatched and not done
SIDE = 4096  # of the matrices
LEAST_SLEEP = 2.0  # milliseconds: shorter ones are not what they say

Step = Callable[[Any], Any]


def make_step(workload: Workload, place: Place, compute: dict[str, Any] | None) -> Step:
    """The function of a batch that a run calls; what it returns is waited for, `ON_THE_WAY` steps later.

    Unlabelled batches are only taken. Of labelled ones each row's probe is read, by a jitted function without communication. `compute`
    adds work: {"reps": n} a chain of n bfloat16 matrix products on each device; {"ms": m} a sleep of m milliseconds once the batch is
    ready, which stands for a device that is not the host's own cores (products on them would take the loader's).
    """
    if not workload.labelled:
        return _identity
    probe = jax.jit(lambda batch: _read(workload, batch))
    if not compute:
        return probe
    return _sleeping(probe, compute["ms"] / 1000) if "ms" in compute else _chain(workload, place, compute["reps"])


def _identity(batch: Any) -> Any:
    return batch


def _read(workload: Workload, batch: Any) -> Any:
    """The probe in arrays of its own: a leaf that jit only passed on would hold the batch's memory."""
    return jax.tree.map(lambda leaf: leaf + 0, workload.probe(batch))


def _sleeping(probe: Step, seconds: float) -> Step:
    def step(batch: Any) -> Any:
        result = jax.block_until_ready(probe(batch))
        time.sleep(seconds)
        return result

    return step


def _chain(workload: Workload, place: Place, reps: int) -> Step:
    @jax.jit
    def step(weights: Any, batch: Any) -> Any:
        value = weights
        for _ in range(reps):
            value = (value @ weights) * jnp.bfloat16(0.01)
        return _read(workload, batch), value[:1, :1]

    weights = jax.device_put(jnp.full((SIDE, SIDE), 0.01, jnp.bfloat16), place.replicated)
    return lambda batch: step(weights, batch)[0]


class Pacer:
    """Lets a few steps be on their way, as a training loop that looks at its loss now and then does."""

    def __init__(self) -> None:
        self._on_the_way: deque[Any] = deque()

    def add(self, result: Any) -> None:
        self._on_the_way.append(result)
        if len(self._on_the_way) > ON_THE_WAY:
            jax.block_until_ready(self._on_the_way.popleft())

    def drain(self) -> None:
        jax.block_until_ready(list(self._on_the_way))
        self._on_the_way.clear()


def seconds_alone(step: Step, batch: Any, repeats: int = 20, seconds: float = 0.0) -> float:
    """Of one step on a batch that is there already: the mean of at least so many, for at least so many seconds after as many before.

    A device that was idle runs faster at first: a chain of 1.3 ms took 1.35 ms for 20 steps, and 1.39 for 1,000 (one H200).
    """
    jax.block_until_ready(step(batch))
    _mean_seconds(step, batch, 1, seconds)
    return _mean_seconds(step, batch, repeats, seconds)


def _mean_seconds(step: Step, batch: Any, repeats: int, seconds: float) -> float:
    pacer, count = Pacer(), 0
    began = time.perf_counter()
    while count < repeats or time.perf_counter() - began < seconds:
        pacer.add(step(batch))
        count += 1
    pacer.drain()
    return (time.perf_counter() - began) / count


def calibrate(workload: Workload, place: Place, milliseconds: float | None) -> dict[str, Any]:
    """What "compute" must be for a step of so many milliseconds; by default 6.6 on an accelerator, 1.5 times a batch's loading on CPUs."""
    if place.platform == "cpu":
        return {"ms": milliseconds or max(LEAST_SLEEP, round(1500 * _loading_seconds(workload, place), 2))}
    batch = place.put(workload.make(0))
    short, long = (seconds_alone(make_step(workload, place, {"reps": reps}), batch, 10) for reps in (8, 40))
    return {"reps": max(1, round(8 + ((milliseconds or 6.6) / 1000 - short) / ((long - short) / 32)))}


def _loading_seconds(workload: Workload, place: Place) -> float:
    """Of one batch in the naive loop: making it and putting it."""
    times = []
    for number in range(12):
        began = time.perf_counter()
        jax.block_until_ready(place.put(workload.make(number)))
        times.append(time.perf_counter() - began)
    return median(times[2:])
