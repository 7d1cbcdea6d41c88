"""A `next()` that waits long says in the log what holds its batch; and each minute of a run gets a line."""

from __future__ import annotations

import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

import prefetchshard as ps
from consumers import Consume
from prefetchshard.measuring.minutes import MinuteLine
from prefetchshard.measuring.recorder import Recorder, Span
from prefetchshard.measuring.stalls import find_holder, tell
from prefetchshard.measuring.timeline import BatchTimes
from prefetchshard.placing.placer import Placer
from prefetchshard.testing import ManualClock
from process_sources import Gated
from support import HANG_SECONDS, Thread, wait_until

SOON = 0.02
"""Seconds after which it is told here; what is waited for holds until then, so no test depends on them."""


class Told(logging.Handler):
    """What was told, and a wait for it: `hold(3)` returns once a wait for step 3 was told."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        assert record.levelno == logging.WARNING
        self.texts.append(record.getMessage())

    def of(self, step: int) -> list[str]:
        return [text for text in list(self.texts) if f" s for step {step}" in text.splitlines()[0]]

    def hold(self, step: int) -> None:
        wait_until(lambda: self.of(step), HANG_SECONDS)


@pytest.fixture
def told() -> Iterator[Told]:
    handler, logger = Told(), logging.getLogger("prefetchshard.consumer")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


def full(value: float) -> np.ndarray:
    return np.full((8, 2), value, np.float32)


def test_an_iterator_that_hangs(S: NamedSharding, consume: Consume, told: Told) -> None:
    def fetch_from_afar() -> None:
        told.hold(3)

    def source() -> Iterator[np.ndarray]:
        for i in range(5):
            if i == 3:
                fetch_from_afar()
            yield full(i)

    assert len(consume(ps.Loader(source(), S, stall_warning_seconds=SOON))) == 5
    (text,) = told.of(3)
    assert "next() has waited" in text  # or anext()
    assert "(epoch 0, row 3): it is being read, for " in text
    assert "by the thread prefetchshard-source\nStack of prefetchshard-source (most recent call last):\n" in text
    assert "in fetch_from_afar\n    told.hold(3)" in text
    assert "item_dealer.py" not in text, "the library's own frames around it"


class Slow:
    """A dataset one of whose rows takes until it was told."""

    def __init__(self, read: Callable[[int], None]) -> None:
        self.read = read

    def __len__(self) -> int:
        return 64

    def __getitem__(self, row: int) -> np.ndarray:
        self.read(row)
        return np.full(2, row, np.float32)


def test_the_first_of_several_batches_that_are_read(S: NamedSharding, told: Told) -> None:
    """Later ones are read at the same time, and hang too."""

    def read_row(row: int) -> None:
        if row in (17, 25, 33):
            told.hold(2)

    loader = ps.Loader(Slow(read_row), S, batch_size=8, workers=3, depth=4, stall_warning_seconds=SOON)
    assert len(list(loader)) == 8
    (text,) = told.of(2)
    assert "(epoch 0, row 16): it is being read, for " in text
    assert "in read_row" in text


@pytest.mark.parametrize("function", ["transform", "collate"])
def test_a_function_that_hangs(S: NamedSharding, told: Told, function: str) -> None:
    def transform(row: Any) -> Any:
        if row[0] == 16:
            told.hold(2)
        return row

    def collate(examples: list[Any]) -> Any:
        if examples[0][0] == 16:
            told.hold(2)
        return np.stack(examples)

    chosen: Any = {"transform": transform, "collate": collate}[function]
    options: Any = {function: chosen}
    assert len(list(ps.Loader(Slow(lambda _: None), S, batch_size=8, workers=2, stall_warning_seconds=SOON, **options))) == 8
    (text,) = told.of(2)
    assert "it is in your `transform` or `collate`, for " in text
    assert f"in {function}\n" in text


def test_a_source_that_hangs_as_it_is_opened(S: NamedSharding, told: Told) -> None:
    def open_the_files() -> Iterator[np.ndarray]:
        told.hold(0)
        return iter([full(0)])

    assert len(list(ps.Loader(open_the_files, S, stall_warning_seconds=SOON))) == 1
    (text,) = told.of(0)
    assert "for step 0: no thread has begun with it\nStack of prefetchshard-source" in text
    assert "in open_the_files\n" in text


def test_a_transfer_that_hangs(S: NamedSharding, told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    class Arrays:
        def block_until_ready(self) -> None:
            told.hold(1)

    dispatch = Placer.dispatch

    def dispatched(self: Placer, host: Any) -> Any:
        flight = dispatch(self, host)
        if host.position.step == 1:
            monkeypatch.setattr(flight, "arrays", [*flight.arrays, Arrays()])
        return flight

    monkeypatch.setattr(Placer, "dispatch", dispatched)
    monkeypatch.setattr(Placer, "land", _without_last(Placer.land))
    assert len(list(ps.Loader((full(i) for i in range(3)), S, stall_warning_seconds=SOON))) == 3
    (text,) = told.of(1)
    assert "(epoch 0, row 1): it is in its transfer to the devices, for " in text
    assert "by the thread prefetchshard-transfer\nStack of prefetchshard-transfer" in text


def _without_last(land: Callable[..., Any]) -> Callable[..., Any]:
    def landed(self: Placer, flight: Any) -> Any:
        flight.arrays = [array for array in flight.arrays if isinstance(array, jax.Array)]
        return land(self, flight)

    return landed


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_dispatch_that_hangs(S: NamedSharding, told: Told, monkeypatch: pytest.MonkeyPatch, ahead: int) -> None:
    """That of the batch itself, or that of the next one, while the batch is on its way."""
    dispatch = Placer._dispatch

    def dispatched(self: Placer, host: Any) -> Any:
        if host.position.step == ahead:
            told.hold(0)
        return dispatch(self, host)

    monkeypatch.setattr(Placer, "_dispatch", dispatched)
    assert len(list(ps.Loader((full(i) for i in range(3)), S, stall_warning_seconds=SOON))) == 3
    text = told.of(0)[-1]
    where = "it is in its transfer, while the thread dispatches the next one" if ahead else "its transfer is being dispatched"
    assert where in text
    assert "\nStack of prefetchshard-transfer" in text


@pytest.mark.parametrize("way", ["sync", "asyncio", "trio"])
def test_an_async_source_that_hangs(S: NamedSharding, told: Told, way: str) -> None:
    """It is said where its task awaits, in whichever loop it is pulled."""

    async def fetch_from_afar() -> None:
        while not told.of(2):  # noqa: ASYNC110 - it is told in a thread
            await anyio.sleep(0.001)

    async def source() -> AsyncIterator[np.ndarray]:
        for i in range(4):
            if i == 2:
                await fetch_from_afar()
            yield full(i)

    async def consume() -> None:
        async for _ in ps.Loader(source(), S, stall_warning_seconds=SOON):
            pass

    if way == "sync":
        list(ps.Loader(source(), S, stall_warning_seconds=SOON))
    else:
        anyio.run(consume, backend=way)
    (text,) = told.of(2)
    assert text.startswith("next() " if way == "sync" else "anext() ")
    assert "it is being read, for " in text
    assert "\nIn the event loop of the source (most recent call last):\n" in text
    assert "in fetch_from_afar\n" in text


def test_an_async_source_that_blocks_its_loop(S: NamedSharding, told: Told) -> None:
    """Nothing awaits: it is said where the loop's thread is."""

    async def source() -> AsyncIterator[np.ndarray]:
        yield full(0)
        block_the_loop()
        yield full(1)

    def block_the_loop() -> None:
        told.hold(1)

    assert len(list(ps.Loader(source(), S, stall_warning_seconds=SOON))) == 2
    (text,) = told.of(1)
    assert "in block_the_loop\n" in text


def test_a_worker_process_that_hangs(S: NamedSharding, told: Told, tmp_path: Path) -> None:
    """No stack of another process is to be had: it is said that the process was asked."""

    def asked() -> list[str]:
        return [text for text in list(told.texts) if "its worker process was asked, and has not answered\n" in text]

    def open_the_gate() -> None:
        wait_until(asked, 2 * HANG_SECONDS)
        (tmp_path / "open").touch()

    opening = threading.Thread(target=open_the_gate)
    opening.start()
    source = Gated(64, path=str(tmp_path / "open"))
    with ps.Loader(source, S, batch_size=8, epochs=None, workers=ps.Processes(2), stall_warning_seconds=SOON) as loader:
        for _ in loader:
            if asked():
                break
    opening.join()
    assert "): it is being read, for " in asked()[0]


def test_spec_says_so_too(S: NamedSharding, told: Told) -> None:
    def source() -> Iterator[np.ndarray]:
        told.hold(0)
        yield full(0)

    with ps.Loader(source(), S, stall_warning_seconds=SOON) as loader:
        loader.spec()
    (text,) = told.of(0)
    assert text.startswith("spec() has waited")


def test_once_a_wait(S: NamedSharding, told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it lasts; the next wait is told again."""
    clock = ManualClock()
    monkeypatch.setattr("prefetchshard.loader.MONOTONIC", clock)
    may_go_on = [threading.Event() for _ in range(3)]

    def source() -> Iterator[np.ndarray]:
        for i, event in enumerate(may_go_on):
            assert event.wait(HANG_SECONDS)
            yield full(i)

    iterator = iter(ps.Loader(source(), S))
    outbox = iterator._consumer.outbox
    seen: list[Any] = []
    consuming = threading.Thread(target=lambda: seen.extend(iterator))
    consuming.start()

    def pass_while_waiting(step: int, seconds: float) -> None:
        wait_until(lambda: len(seen) == step and len(outbox.receivers) == 1)  # not a patient one, whose wait is not counted yet
        clock.advance(seconds)
        outbox.receivers.wake()

    pass_while_waiting(0, 59.0)
    pass_while_waiting(0, 0.5)
    assert not told.texts
    pass_while_waiting(0, 0.5)
    wait_until(lambda: told.texts)
    for _ in range(3):
        pass_while_waiting(0, 100.0)
    may_go_on[0].set()
    pass_while_waiting(1, 60.0)
    wait_until(lambda: told.of(1))
    for event in may_go_on:
        event.set()
    consuming.join()
    assert len(seen) == 3
    assert [text.partition(" (")[0] for text in told.texts] == [
        "next() has waited 60.0 s for step 0",
        "next() has waited 60.0 s for step 1",
    ]


def test_none_says_nothing(S: NamedSharding, told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    monkeypatch.setattr("prefetchshard.loader.MONOTONIC", clock)
    runs: list[ps.LoaderIterator] = []

    def source() -> Iterator[np.ndarray]:
        for i in range(3):
            wait_until(lambda i=i: bool(runs) and runs[0].stats().batches == i and len(runs[0]._consumer.outbox.receivers) == 1)
            clock.advance(1e6)
            runs[0]._consumer.outbox.receivers.wake()
            yield full(i)

    runs.append(iter(ps.Loader(source(), S, stall_warning_seconds=None)))
    assert len(list(runs[0])) == 3
    assert not told.texts


# -- what is said of what


def held(recorder: Recorder, *, is_read: bool = False) -> str:
    holder = find_holder(recorder, 5, is_read=is_read, readers=())
    return tell(holder, "next()", 5, waited=60.0, now=recorder.clock(), awaiting=list)


def test_the_words_for_each_stage() -> None:
    clock = ManualClock()
    recorder = Recorder(clock)
    assert held(recorder) == "next() has waited 60.0 s for step 5: no thread has begun with it"
    assert held(recorder, is_read=True) == "next() has waited 60.0 s for step 5: it was read, and waits for its transfer"
    span = Span(recorder, "reading", BatchTimes(1, 40))
    clock.advance(2.0)
    said = {}
    for work in ("reading", "transforming", "collating", "planning", "copying", "batching", "finishing"):
        span.enter(work)
        said[work] = held(recorder).splitlines()[0].partition(": ")[2]
    span.end()
    by = f", for 2.0 s so far, by the thread {threading.current_thread().name}"
    copying = f"it is being copied into staging memory{by}"
    function = f"it is in your `transform` or `collate`{by}"
    assert said == {
        "reading": f"it is being read{by}",
        "transforming": function,
        "collating": function,
        "planning": copying,
        "copying": copying,
        "batching": copying,
        "finishing": copying,
    }
    assert held(recorder) == "next() has waited 60.0 s for step 5: no thread has begun with it"


# -- a line a minute


def test_a_minute_of_a_run_gets_a_line(S: NamedSharding, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    monkeypatch.setattr("prefetchshard.loader.MONOTONIC", clock)
    iterator = iter(ps.Loader(np.zeros((8 * 40, 2), np.float32), S, batch_size=8))
    with caplog.at_level(logging.INFO, "prefetchshard"):
        for _ in range(40):
            next(iterator)
            clock.advance(9.0)
    lines = [record.getMessage() for record in caplog.records if record.name == "prefetchshard" and record.levelno == logging.INFO]
    # The first is due after 60 s: by the eighth call, at 63 s, seven batches were handed out, the last of them at 54 s
    assert [line.partition(".")[0] for line in lines] == ["7 batches in 54 s, 1 rows/s"] * 1 + ["7 batches in 63 s, 1 rows/s"] * 4
    assert all(". Bound by " in line for line in lines)  # by what depends on where the threads were when the clock moved on


def test_no_line_where_nobody_reads_it(S: NamedSharding, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then nothing is worked out either."""
    clock = ManualClock()

    def stats() -> Any:
        raise AssertionError("not asked for")

    with monkeypatch.context() as patch:
        patch.setattr(logging.getLogger("prefetchshard"), "level", logging.WARNING)
        logging.getLogger("prefetchshard").manager._clear_cache()  # pyright: ignore[reportAttributeAccessIssue] - what `setLevel` does
        line = MinuteLine(stats, clock())
        line.tell(61.0)
        assert line.due_at == 121.0
    logging.getLogger("prefetchshard").manager._clear_cache()  # pyright: ignore[reportAttributeAccessIssue] - as above


def test_a_line_that_fails_ends_no_loop(caplog: pytest.LogCaptureFixture) -> None:
    def stats() -> Any:
        raise ZeroDivisionError

    line = MinuteLine(stats, 0.0)
    with caplog.at_level(logging.DEBUG, "prefetchshard"):
        line.tell(60.0)
    (record,) = caplog.records
    assert record.levelno == logging.DEBUG
    assert record.exc_info is not None


def test_of_two_threads_at_once_one_tells(caplog: pytest.LogCaptureFixture) -> None:
    """The second one took later figures than the first, and told them before it: a line spoke of -2 batches."""
    figures = [SimpleNamespace(batches=batches, wall_seconds=1.0, rows_per_second=0.0, verdict="") for batches in (3, 5)]

    def stats() -> Any:
        if len(figures) == 2:
            found = figures.pop(0)
            line.due_at = 0.0  # the second one saw it as it was before
            Thread(lambda: line.tell(61.0)).returned()
            return found
        return figures.pop(0)

    line = MinuteLine(stats, 0.0)
    with caplog.at_level(logging.INFO, "prefetchshard"):
        line.tell(60.0)
        assert [record.getMessage().split(" in ")[0] for record in caplog.records] == ["3 batches"]
    assert len(figures) == 1


def test_who_is_interrupted_while_it_is_told_tells_nothing() -> None:
    """As a signal handler that calls `next()`: it must not wait for what it interrupted."""
    asked: list[int] = []

    def stats() -> Any:
        asked.append(0)
        line.tell(119.0)
        raise ZeroDivisionError

    line = MinuteLine(stats, 0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("prefetchshard.measuring.minutes._log.isEnabledFor", lambda _: True)
        line.tell(60.0)
    assert asked == [0]
