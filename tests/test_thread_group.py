"""A run's threads: begun together, more or fewer while it runs, and never begun once they were refused."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from jax.sharding import NamedSharding

import prefetchshard as ps
from fakes import Gate, generator
from prefetchshard.base.jax_context import JaxContext
from prefetchshard.base.threads import run_uncut
from prefetchshard.running.closing import join
from prefetchshard.running.thread_group import ThreadGroup
from support import HANG_SECONDS, Interrupts, no_threads, wait_until


class Scene:
    """A group, and what it told."""

    def __init__(self, may_begin: Callable[[], bool] = lambda: True) -> None:
        self.faults: list[BaseException] = []
        self.left = 0
        self.ran: list[str] = []
        self.gate = threading.Event()
        self.group = ThreadGroup(JaxContext(), [], may_begin=may_begin, on_fault=self.faults.append, on_leave=self.leave)

    def leave(self) -> None:
        self.left += 1

    def add(self, name: str, *, waits: bool = True) -> None:
        def body() -> None:
            self.ran.append(name)
            if waits:
                self.gate.wait(HANG_SECONDS)

        self.group.add(name, body)

    def end(self) -> None:
        self.gate.set()
        join(self.group.in_source, time.monotonic() + 10)
        assert no_threads()


def test_they_begin_together_and_once() -> None:
    scene = Scene()
    for name in "ab":
        scene.add(name)
    assert scene.group.has_ended
    assert not scene.ran
    scene.group.start()
    scene.group.start()
    wait_until(lambda: sorted(scene.ran) == ["a", "b"])
    assert not scene.group.has_ended
    scene.end()
    assert scene.group.has_ended
    assert scene.left == 2


def test_it_grows_and_shrinks_while_it_runs() -> None:
    scene = Scene()
    scene.add("first")
    scene.group.start()
    for i in range(3):
        scene.add(f"more-{i}", waits=False)
        wait_until(lambda: f"more-{i}" in scene.ran)  # noqa: B023 - called in this round only
        wait_until(lambda: [t.name for t in scene.group.in_source if t.is_alive()] == ["prefetchshard-first"])
    scene.add("last")
    assert [thread.name for thread in scene.group.in_source] == ["prefetchshard-first", "prefetchshard-last"]  # who returned is forgotten
    assert not scene.group.has_ended
    scene.end()
    assert scene.group.has_ended


def test_who_was_refused_never_begins() -> None:
    scene = Scene()
    scene.add("a")
    scene.group.refuse()
    scene.group.start()
    assert scene.group.has_ended
    scene.end()
    assert not scene.ran


def test_refusing_and_starting_at_once() -> None:
    """Each thread runs to its end, or never; nobody waits for one that never does."""
    for _ in range(50):
        scene = Scene()
        for name in "abc":
            scene.add(name, waits=False)
        starter = threading.Thread(target=scene.group.start)
        starter.start()
        scene.group.refuse()
        starter.join()
        scene.end()
        assert scene.left == len(scene.ran)
        assert scene.group.has_ended


def test_a_thread_that_may_not_begin_leaves() -> None:
    scene = Scene(lambda: False)
    scene.add("a")
    scene.group.start()
    scene.end()
    assert (scene.ran, scene.left) == ([], 1)


def test_a_fault_is_told() -> None:
    scene, error = Scene(), AssertionError()

    def body() -> None:
        raise error

    scene.group.add("a", body)
    scene.group.start()
    scene.end()
    assert scene.faults == [error]
    error.__traceback__ = None
    assert repr(scene.group) == "<ThreadGroup of none>"


def test_what_runs_uncut_goes_on_after_an_interrupt() -> None:
    going, done = threading.Event(), threading.Event()

    def function() -> None:
        interrupts.armed = True  # not before: Ctrl-C is to strike while it runs
        going.wait(HANG_SECONDS)
        done.set()

    with Interrupts(0.02) as interrupts:
        with pytest.raises(KeyboardInterrupt):
            run_uncut(function)
    going.set()
    assert done.wait(HANG_SECONDS)


def test_what_it_raises_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        run_uncut(lambda: 1 / 0)


def test_the_life_of_a_run_is_logged(S: NamedSharding, caplog: pytest.LogCaptureFixture) -> None:
    """A line for each event, none for a batch."""
    with caplog.at_level(logging.DEBUG, "prefetchshard"):
        loader = ps.prefetch([np.ones(8)] * 20, S, workers=1)
        assert len(list(loader)) == 20
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split()[2] for line in lines if line.startswith("run ")] in (["begins:", "has", "closes:"], ["begins:", "closes:", "has"])
    assert len(lines) == 3


@pytest.mark.filterwarnings("ignore::prefetchshard.StuckThreadWarning")
def test_giving_up_is_logged(S: NamedSharding, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefetchshard.running.closing.GIVE_UP_SECONDS", 0.3)
    gate = Gate(1)
    iterator = iter(ps.prefetch(generator(9, gate), S))
    assert gate.inside.wait(HANG_SECONDS)
    with caplog.at_level(logging.DEBUG, "prefetchshard"):
        iterator.close()
    (line,) = (message for message in caplog.messages if message.startswith("giving up on "))
    assert "prefetchshard-source" in line  # and any thread that just had no time to end
    gate.open()
    wait_until(no_threads)
