"""How many batches may be where, from counts and from bytes; and that a run goes on with the least of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from jax.sharding import NamedSharding

import prefetchshard as ps
from fakes import first
from prefetchshard.base.limits import Limits, within_bytes
from support import wait_until

WANTED = Limits(depth=3, in_flight=2, slots=5)


@pytest.mark.parametrize(
    ("host_memory", "device_memory", "limits"),
    [
        (None, None, (3, 2, 5)),
        (1000, 1000, (3, 2, 5)),
        (499, None, (3, 2, 4)),
        (250, None, (3, 2, 2)),
        (100, None, (3, 1, 1)),
        (None, 50, (3, 2, 5)),
        (None, 49, (2, 2, 5)),
        (None, 39, (1, 2, 5)),
        (None, 20, (1, 1, 5)),
        (100, 20, (1, 1, 1)),
    ],
)
def test_what_keeps_to_the_bounds(host_memory: int | None, device_memory: int | None, limits: tuple[int, int, int]) -> None:
    found = within_bytes(WANTED, batch_bytes=100, device_bytes=10, host_memory=host_memory, device_memory=device_memory)
    assert found == Limits(*limits)
    assert found.ahead == sum(limits)


@pytest.mark.parametrize(
    ("bounds", "words"),
    [
        ({"host_memory": 99}, "host_memory=99 bytes: one batch takes 100 on the host"),
        ({"host_memory": 199, "least_slots": 2}, "host_memory=199 bytes: one batch takes 100 .* two are there at once .*: 200"),
        ({"device_memory": 19}, "device_memory=19 bytes: a batch takes 10 .*: 20"),
    ],
)
def test_what_cannot_be_kept_to_is_told_with_the_numbers(bounds: dict[str, Any], words: str) -> None:
    with pytest.raises(ps.ConfigError, match=words):
        within_bytes(WANTED, **{"batch_bytes": 100, "device_bytes": 10, "host_memory": None, "device_memory": None} | bounds)


def of_sizes(*sizes: int) -> Iterator[np.ndarray]:
    for i, size in enumerate(sizes):
        yield np.full((size, 4), i, np.int32)


@pytest.mark.parametrize("transform", [None, lambda batch: batch])
@pytest.mark.parametrize(("sizes", "count"), [((16, 8, 16, 8), 3), ((16, 8, 8, 16), 4)])
def test_a_short_batch_in_the_middle_does_not_hold_everything_up(S: NamedSharding, transform: Any, sizes: Any, count: int) -> None:
    """It waits until the source was asked for the one after it, for which there has to be room."""
    one = 16 * 4 * 4
    loader = ps.prefetch(of_sizes(*sizes), S, transform=transform, host_memory=2 * one, remainder="drop")
    assert [batch.shape[0] for batch in loader] == list(sizes[:count])
    with pytest.raises(ps.ConfigError, match="two are there at once"):
        next(iter(ps.prefetch(of_sizes(*sizes), S, transform=transform, host_memory=2 * one - 1, remainder="drop")))


def test_where_batches_come_as_they_are_one_batch_is_enough(S: NamedSharding) -> None:
    assert [len(batch) for batch in ps.prefetch(of_sizes(16, 8, 16, 8), S, host_memory=16 * 4 * 4)] == [16, 8, 16, 8]


@pytest.mark.parametrize("bound", [{"host_memory": 1000}, {"device_memory": 64}])
@pytest.mark.parametrize("are_ready", [False, True])
def test_good_batches_come_before_one_that_fits_into_no_bound(bound: dict[str, int], are_ready: bool, S: NamedSharding) -> None:
    """Also where it is read before they are placed, or before one of them was taken."""
    gone = threading.Event()
    iterator: Any = None

    def batches() -> Iterator[np.ndarray]:
        try:
            yield from (np.full((8, 4), i, np.int32) for i in range(2))
            wait_until(lambda: not are_ready or (iterator is not None and iterator.stats().ready.ready == 2))
            yield np.zeros((8, 400), np.int32)
        finally:
            gone.set()

    iterator = iter(ps.prefetch(batches, S, **bound))
    assert gone.wait(30)
    assert [first(next(iterator)[:, 0]) for _ in range(2)] == [0, 1]
    for _ in range(2):
        with pytest.raises(ps.ConfigError, match="raise the bound or make the batches smaller"):
            next(iterator)
