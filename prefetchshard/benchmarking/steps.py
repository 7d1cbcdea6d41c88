"""A step of a known length, in place of a training step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from prefetchshard.base.clock import Clock
from prefetchshard.base.jax_types import Device, block_until_ready, device_put, jit, local_devices

SIDE = 2048
TRIES = 5
FIRST_PRODUCTS = 32


class Step(NamedTuple):
    """What is done with a batch.

    Attributes:
        run: takes the batch; returns when it is done.
        kind: in words; empty where nothing is done.
        warm_up_seconds: that compiling and finding the length took.
    """

    run: Callable[[Any], object]
    kind: str
    warm_up_seconds: float = 0.0


def no_step(batch: Any) -> None:
    """Does nothing with a batch."""
    del batch


def make_step(seconds: float, device: Device, clock: Clock) -> Step:
    """A step of this length.

    An accelerator computes it: a chain of matrix products on each device, as long as the step is to be. The CPU backend sleeps: it would
    compute on the cores that the loader reads with.

    Args:
        seconds: that a step takes; 0: nothing is done.
        device: one of those that the batches go to.
        clock: monotonic seconds.
    """
    if seconds <= 0:
        return Step(no_step, "")
    if device.platform == "cpu":

        def sleep(batch: Any) -> None:
            del batch
            time.sleep(seconds)

        return Step(sleep, "a sleep, as the CPU backend would compute with the loader's own cores")
    began = clock()
    devices = [one for one in local_devices() if one.platform == device.platform]
    chain = chain_on(devices, SIDE)
    products = products_for(seconds, chain, clock)

    def compute(batch: Any) -> object:
        del batch
        return chain(products)

    return Step(compute, f"{products} matrix products on each device, waited for", clock() - began)


def products_for(seconds: float, chain: Callable[[int], object], clock: Clock) -> int:
    """How many products take so long.

    Args:
        seconds: that they are to take.
        chain: computes a number of products, and waits for them.
        clock: monotonic seconds.
    """
    chain(FIRST_PRODUCTS)  # compiles
    base = _median(lambda: chain(1), clock)
    each = (_median(lambda: chain(1 + FIRST_PRODUCTS), clock) - base) / FIRST_PRODUCTS
    return 1 + max(0, round((seconds - base) / each)) if each > 0 else FIRST_PRODUCTS


def _median(work: Callable[[], object], clock: Clock) -> float:
    found: list[float] = []
    for _ in range(TRIES):
        began = clock()
        work()
        found.append(clock() - began)
    return statistics.median(found)


def chain_on(devices: Sequence[Device], side: int) -> Callable[[int], Any]:
    """A function that computes a number of matrix products, one after the other, on each of these devices, and waits for them.

    Args:
        devices: that compute; none waits for another.
        side: of the matrices, rows and columns.
    """
    everywhere = NamedSharding(Mesh(np.array(list(devices)), ("device",)), PartitionSpec())
    weights = device_put(np.full((side, side), 1 / side, jnp.bfloat16), everywhere)

    loop = cast("Any", jax).lax.fori_loop

    def multiply(weights: Any, products: Any) -> Any:
        def once(_: Any, value: Any) -> Any:
            return value @ weights

        value = loop(0, products, once, weights)
        return value[:1, :1]

    compiled = jit(multiply)
    return lambda products: block_until_ready(compiled(weights, np.int32(products)))
