"""Eight CPU devices for every test; no thread of the library may outlive the test that caused it; a test that fails, fails alone.

`JAX_PLATFORMS` set outside (`JAX_PLATFORMS=cuda python -m pytest`) runs the tests on an accelerator instead.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import warnings

# Before JAX is imported, and in the environment, so that the programs which tests start see the same devices.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")

from collections.abc import Awaitable, Callable, Generator
from typing import Any

import anyio
import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from consumers import BACKENDS, WAYS, Consume, consumer
from prefetchshard.running import at_exit, closing
from support import HANG_SECONDS, begin_threads, loader_threads, stacks, threads_left

if os.environ["JAX_PLATFORMS"] == "cpu":
    jax.config.update("jax_num_cpu_devices", int(os.environ["JAX_NUM_CPU_DEVICES"]))

# A shell has SIGINT ignored in what it starts with `&`, and programs that tests start inherit that
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_failed = pytest.StashKey[bool]()


def pytest_configure(config: pytest.Config) -> None:
    """Where Python is told to write no bytecode beside the sources, pytest's own folder keeps it: each program that a test starts, and
    each process that collects the tests, would compile the package and the tests anew."""
    cache: pytest.Cache | None = getattr(config, "cache", None)
    if not sys.dont_write_bytecode or sys.pycache_prefix is not None or cache is None:
        return
    with contextlib.suppress(OSError):  # where nothing can be kept, it only takes longer
        os.environ["PYTHONPYCACHEPREFIX"] = str(cache.mkdir("bytecode"))
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def pytest_collection_finish() -> None:
    """What was imported stays: the collection after each test need not look through it (a tenth of a second each time)."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.stash[_failed] = item.stash.get(_failed, False) or report.failed
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """What a failed test held is let go of before the next one begins, and what its finalisers say is not said of the next one."""
    done = yield
    if item.stash.get(_failed, False):
        for name in ("last_exc", "last_type", "last_value", "last_traceback"):
            vars(sys).pop(name, None)
        hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
        try:
            with warnings.catch_warnings(action="ignore"):
                gc.collect()
        finally:
            sys.unraisablehook = hook
    return done


@pytest.fixture(autouse=True, scope="session")
def patient() -> Generator[None]:
    """Closing gives no thread up, and no clean-up, because the machine is busy; a test of giving up says how soon (see `impatient`).

    Nor does the end of a run give up a thread that has taken a batch and not counted it.

    Nor does a wait come up for signals so soon that a wake-up which is missing would not be noticed.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("prefetchshard.running.closing.GIVE_UP_SECONDS", HANG_SECONDS)
        patch.setattr("prefetchshard.base.waiters.SIGNAL_SECONDS", 10 * HANG_SECONDS)
        patch.setattr("prefetchshard.consumer.COUNTING_SECONDS", HANG_SECONDS)
        patch.setattr("prefetchshard.sources.asynchronous.TURN_SECONDS", HANG_SECONDS)
        yield


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing gives up earlier than it does by itself, for the many tests of what it does then."""
    monkeypatch.setattr("prefetchshard.running.closing.GRACE_SECONDS", 0.1)
    monkeypatch.setattr("prefetchshard.running.closing.GIVE_UP_SECONDS", 0.3)
    monkeypatch.setattr("prefetchshard.running.closing.CLOSING_SECONDS", 0.5)


@pytest.fixture(autouse=True)
def no_thread_left(request: pytest.FixtureRequest) -> Generator[None]:
    """Fails a test that leaves a thread of the library running, and closes what a failed test left, so that it fails alone.

    A test that failed by itself is not asked: its traceback holds the frames, hence the loaders, alive.
    """
    begin_threads()
    earlier = set(at_exit.live)
    yield
    left = [] if request.node.stash.get(_failed, False) else threads_left()
    words = stacks(left)
    if loader_threads():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(closing, "GIVE_UP_SECONDS", 0.5)
            patch.setattr(closing, "CLOSING_SECONDS", 0.5)
            closing.close_runs(list(at_exit.live - earlier), quietly=True)
    if left:
        pytest.fail(f"{len(left)} thread(s) outlived the test:\n{words}", pytrace=False)


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
        patch.setattr("prefetchshard.reading.batch_copying.HAND_OVER_SECONDS", -1.0)
        yield


@pytest.fixture(params=BACKENDS)
def run(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Runs an async function, on each backend, and not for ever."""

    def run(main: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        async def bounded() -> Any:
            with anyio.fail_after(HANG_SECONDS):
                return await main(*args)

        return anyio.run(bounded, backend=request.param)

    return run


@pytest.fixture(params=WAYS)
def consume(request: pytest.FixtureRequest) -> Consume:
    """Runs the test once for each way to consume: `for`, and `async for` on asyncio and on trio."""
    return consumer(request.param)
