"""Eight CPU devices for every test, and no thread of the library may outlive the test that caused it.

`JAX_PLATFORMS` set outside (`JAX_PLATFORMS=cuda python -m pytest`) runs the tests on an accelerator instead.
"""

from __future__ import annotations

import gc
import os

# Before JAX is imported, and in the environment, so that the programs which tests start see the same devices.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")

from collections.abc import Generator

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from consumers import WAYS, Consume, consumer
from support import loader_threads, stacks, threads_left

if os.environ["JAX_PLATFORMS"] == "cpu":
    jax.config.update("jax_num_cpu_devices", int(os.environ["JAX_NUM_CPU_DEVICES"]))

_failed = pytest.StashKey[bool]()


def pytest_collection_finish() -> None:
    """What was imported stays: the collection after each test need not look through it (a tenth of a second each time)."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.stash[_failed] = item.stash.get(_failed, False) or report.failed
    return report


@pytest.fixture(autouse=True)
def no_thread_left(request: pytest.FixtureRequest) -> Generator[None]:
    """Fails a test that leaves a thread of the library running.

    A test that failed by itself is not asked: its traceback holds the frames, hence the loaders, alive.
    """
    before = set(loader_threads())
    yield
    if not request.node.stash.get(_failed, False):
        left = threads_left(before)
        if left:
            pytest.fail(f"{len(left)} thread(s) outlived the test:\n{stacks(left)}", pytrace=False)


@pytest.fixture(scope="session")
def mesh() -> Mesh:
    """All devices along one axis, "data"."""
    return Mesh(np.array(jax.devices()), ("data",))


@pytest.fixture(scope="session")
def S(mesh: Mesh) -> NamedSharding:
    """Axis 0 split over all devices."""
    return NamedSharding(mesh, PartitionSpec("data"))


@pytest.fixture(scope="session")
def R(mesh: Mesh) -> NamedSharding:
    """Replicated over all devices."""
    return NamedSharding(mesh, PartitionSpec())


@pytest.fixture(scope="module")
def slow_sources() -> Generator[None]:
    """Every source counts as one that takes long enough for its batches to be copied by workers, where it does not hold on to them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("prefetchshard.reading.item_dealer.HAND_OVER_SECONDS", -1.0)
        yield


@pytest.fixture(params=WAYS)
def consume(request: pytest.FixtureRequest) -> Consume:
    """Runs the test once for each way to consume: `for`, and `async for` on asyncio and on trio."""
    return consumer(request.param)
