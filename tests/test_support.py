"""The tests' own tools do what the other tests rely on."""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from support import REPOSITORY, Interrupts, aligned, pairwise, run_command, run_python, wait_until

LEAVES_A_THREAD = """
import threading, support

support.PATIENCE_SECONDS = 0.1

def test_leaves_a_thread():
    threading.Thread(target=threading.Event().wait, name="prefetchshard-reader-0", daemon=True).start()

def test_is_not_blamed_for_it():
    pass

def test_leaves_a_thread_and_fails():
    threading.Thread(target=threading.Event().wait, name="prefetchshard-reader-1", daemon=True).start()
    assert False

def test_waits_for_a_thread_that_ends():
    support.PATIENCE_SECONDS = 20.0
    threading.Thread(target=lambda: None, name="prefetchshard-reader-2").start()
"""


def test_a_thread_that_outlives_its_test_fails_it(tmp_path: Path) -> None:
    (tmp_path / "test_leak.py").write_text(LEAVES_A_THREAD)
    command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "conftest", "-c", str(REPOSITORY / "pyproject.toml"), str(tmp_path), "-rEf"]
    done = run_command(command, env={"PYTHONPATH": str(REPOSITORY / "tests")})
    lines = done.stdout.splitlines()
    assert [line.split(" - ")[0].split("::")[-1] for line in lines if line.startswith(("ERROR ", "FAILED "))] == [
        "test_leaves_a_thread",
        "test_leaves_a_thread_and_fails",
    ]
    assert "1 failed, 3 passed, 1 error" in done.stdout
    assert "prefetchshard-reader-0 (daemon=True):" in done.stdout
    assert "threading.py" in done.stdout


FAILS_ALONE = """
import asyncio, gc, threading
import numpy as np, pytest
import prefetchshard as ps
import support
from support import loader_threads, no_threads, wait_until

support.PATIENCE_SECONDS = 0.5
never = threading.Event()

class Held:
    pass

def source():
    yield np.ones(8)
    never.wait()

async def async_source():
    yield np.ones(8)
    await asyncio.sleep(3600)

def stuck(x):
    never.wait()

class Noisy:
    def __del__(self):
        raise ValueError("from a finaliser")

@pytest.mark.parametrize("make", [
    lambda: ps.prefetch(source()),
    lambda: ps.prefetch(source),
    lambda: ps.prefetch(async_source()),
    lambda: ps.Loader(np.arange(64), batch_size=8, transform=stuck, workers=3),
])
def test_fails_while_its_source_blocks(make):
    held, noisy = Held(), Noisy()
    iterator = iter(make())
    wait_until(lambda: len(loader_threads()) >= 2)
    assert False, (held, noisy)

def test_leaves_a_run_and_passes():
    test_leaves_a_run_and_passes.iterator = iter(ps.prefetch(source()))

def test_begins_without_threads():
    assert no_threads()
    assert loader_threads() == []

def test_nothing_is_held():
    gc.collect()
    assert not [value for value in gc.get_objects() if type(value) is Held]

def test_uses_a_loader():
    with ps.prefetch([np.ones(8)] * 4) as loader:
        assert len(list(loader)) == 4
    assert no_threads()
"""


def test_a_test_that_fails_fails_alone(tmp_path: Path) -> None:
    """It holds a loader whose source never returns: its threads stay, and no other test is blamed for them."""
    (tmp_path / "test_fails.py").write_text(FAILS_ALONE)
    command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "conftest", "-c", str(REPOSITORY / "pyproject.toml"), str(tmp_path), "-rEf"]
    done = run_command(command, env={"PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests")])})
    bad = [
        line.split(" - ")[0].split("::")[-1].split("[")[0] for line in done.stdout.splitlines() if line.startswith(("ERROR ", "FAILED "))
    ]
    assert sorted(bad) == ["test_fails_while_its_source_blocks"] * 4 + ["test_leaves_a_run_and_passes"], done.stdout
    assert "4 failed, 4 passed, 1 error" in done.stdout
    assert "never.wait()" in done.stdout
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("sizes", [(3, 2), (9, 8), (11, 3, 2, 2), (7, 3, 2), (2, 2, 2, 2, 2), (4, 1, 3)])
def test_each_two_values_meet(sizes: tuple[int, ...]) -> None:
    lists = [[f"{name}{i}" for i in range(size)] for name, size in zip("abcde", sizes, strict=False)]
    rows = pairwise(*lists)
    for one, other in itertools.combinations(range(len(lists)), 2):
        assert {(row[one], row[other]) for row in rows} == set(itertools.product(lists[one], lists[other]))
    largest, second = sorted(sizes)[-1], sorted(sizes)[-2]
    assert largest * second <= len(rows) <= 2 * largest * second
    assert rows == pairwise(*lists)


@pytest.mark.parametrize("offset", [0, 4])
def test_aligned_memory_starts_where_it_should(offset: int) -> None:
    array = aligned((8, 3), np.int16, offset)
    assert (array.shape, array.dtype, array.ctypes.data % 64) == ((8, 3), np.int16, offset)


@pytest.mark.skipif(os.environ["JAX_PLATFORMS"] != "cpu", reason="the number of virtual devices is of the CPU backend")
def test_there_are_eight_devices_here_and_in_other_programs() -> None:
    done = run_python("import jax; print(jax.device_count())")
    assert (done.returncode, done.stdout.strip(), jax.device_count()) == (0, "8", 8)


def test_a_program_that_hangs_shows_its_stacks() -> None:
    program = """
        import threading

        def stuck_here():
            threading.Event().wait()

        stuck_here()
    """
    for timeout in (2.0, 20.0):  # where the machine is too busy for a program to have begun by then
        with pytest.raises(subprocess.TimeoutExpired) as caught:
            run_python(program, timeout=timeout)
        notes = "".join(caught.value.__notes__)
        if "stuck_here" in notes:
            break
    assert "stuck_here" in notes


def test_an_interrupt_does_not_strike_where_it_would_be_dropped() -> None:
    """In a callback of the collector the interpreter only reports an exception, and the report fails the test."""
    struck: list[int] = []

    def callback(phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and not struck:
            interrupts.armed = True
            until = time.monotonic() + 0.05
            while time.monotonic() < until:
                pass
            struck.append(interrupts.count)

    def collect() -> None:
        gc.callbacks.append(callback)  # here: it arms after any collection, also one that comes by chance
        gc.collect()
        wait_until(lambda: False)

    with Interrupts(0.001) as interrupts:
        try:
            with pytest.raises(KeyboardInterrupt):
                collect()
        finally:
            gc.callbacks.remove(callback)
    assert struck == [0]
    assert interrupts.count == 1
