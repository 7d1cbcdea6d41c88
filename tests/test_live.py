"""The display of a loop that runs: what it shows, and that it leaves nothing behind, whichever way the loop ends."""

from __future__ import annotations

import gc
import io
import itertools
import json
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from jax.sharding import NamedSharding
from rich.console import Console

import prefetchshard as ps
from prefetchshard.measuring.delivered import Steps
from prefetchshard.measuring.shares import shares_of, waits_of
from prefetchshard.telling import drawing
from prefetchshard.telling.live import Watcher
from prefetchshard.telling.shown import Shown
from prefetchshard.testing import ManualClock
from support import HANG_SECONDS, interrupted_everywhere, loader_threads, run_python, wait_until
from test_window import NOTHING


def live_threads() -> list[threading.Thread]:
    return [thread for thread in loader_threads() if thread.name == "prefetchshard-live"]


def endless() -> Iterator[np.ndarray]:
    while True:
        yield np.zeros((8, 2), np.float32)


class Terminal(io.StringIO):
    """What a terminal got."""

    @property
    def shows(self) -> str:
        return self.getvalue()

    def wait_for(self, words: str) -> None:
        wait_until(lambda: words in self.getvalue())


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal instead of the standard error stream."""
    file = Terminal()
    monkeypatch.setattr(
        drawing, "make_console", lambda: Console(file=file, force_terminal=True, width=120, color_system=None, legacy_windows=False)
    )
    monkeypatch.setenv("TERM", "xterm")
    return file


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A file instead of the standard error stream, with a line as often as it can be written."""
    file = Terminal()
    monkeypatch.setattr(drawing, "make_console", lambda: Console(file=file))
    monkeypatch.setattr(drawing, "LINE_SECONDS", 0.0)
    return file


# -- what is shown


def drawn(shown: Shown | None) -> str:
    console = Console(file=io.StringIO(), width=120, color_system=None)
    with console.capture() as capture:
        console.print(drawing.picture(shown))
    return capture.get()


def test_what_is_shown() -> None:
    steady = Steps(90, 2.0, 8.0, reading=6.0, transform=1.0, copying=0.5, transferring=0.25, handing_over=0.25)
    stats = msgspec.structs.replace(
        NOTHING, batches=90, rows=720, bytes=9_000_000, wall_seconds=10.0, steady=steady,  workers=3,
        ready=msgspec.structs.replace(NOTHING.ready, ready=1),
    )  # fmt: skip
    text = drawn(Shown(1234, stats, "the last 10 s"))
    for words in (
        "step 1234, 9.0 steps/s, 72 rows/s, 0.9 MB/s", "Bound by reading", "the last 10 s", "1 of 2 batches", "0 of 2 batches",
    ):  # fmt: skip
        assert words in text
    for name, share in (
        ("the loop's step", "20.0 %"),
        ("waits for reading", "60.0 %"),
        ("waits for handing over", "2.5 %"),
        ("reader threads", "3"),
    ):
        assert any(name in line and share in line for line in text.splitlines()), name
    assert max(map(len, text.splitlines())) <= 100


def test_shares_are_of_the_time_of_the_loop() -> None:
    stats = msgspec.structs.replace(NOTHING, warm_up=Steps(1, 1.0, 1.0, reading=1.0), steady=Steps(1, 1.0, 1.0, handing_over=1.0))
    assert shares_of(stats) == {"step": 0.5, "reading": 0.25, "transform": 0.0, "copying": 0.0, "transferring": 0.0, "handing over": 0.25}
    assert waits_of(stats)["handing over"] == 1.0
    assert set(shares_of(NOTHING).values()) == {0.0}


@pytest.mark.parametrize(("waiting", "words"), [(0, "the loop does not ask for one"), (1, "the loop waits for one")])
def test_no_verdict_on_nothing(waiting: int, words: str) -> None:
    stats = msgspec.structs.replace(NOTHING, ready=msgspec.structs.replace(NOTHING.ready, receivers_waiting=waiting))
    text = drawn(Shown(7, stats, "the last 10 s"))
    assert f"No batch was handed out in the last 10 s: {words}." in text
    assert "Bound by" not in text
    assert "no run" in drawn(None)


def test_a_file_gets_a_line_every_ten_seconds() -> None:
    file, clock = io.StringIO(), ManualClock()
    screen = drawing.Lines(Console(file=file), clock)
    screen.start(Shown(0, NOTHING, "the last 10 s"))
    for step in range(35):
        screen.show(Shown(step, NOTHING, "the last 10 s"))
        clock.advance(1.0)
    screen.show(None)
    screen.stop(Shown(35, NOTHING, "all of the run"))
    assert [line.split(",")[0] for line in file.getvalue().splitlines()] == [f"prefetchshard: step {step}" for step in (10, 20, 30)]
    assert "\x1b" not in file.getvalue()


# -- while a loop runs


@pytest.mark.parametrize("way", ["around the loop", "around the loader", "around the iterator", "both"])
def test_it_is_shown_while_the_loop_runs(way: str, S: NamedSharding, terminal: Terminal) -> None:
    """The last thing that is shown is of all of the run."""
    loader = ps.Loader(lambda: itertools.islice(endless(), 20), S)
    seen = 0

    def body() -> None:
        nonlocal seen
        seen += 1
        if seen == 10:
            terminal.wait_for("step 10,")
            assert len(live_threads()) == 1

    if way == "around the loop":
        with ps.live(loader, seconds=0.001):
            for _ in loader:
                body()
    elif way == "both":
        with ps.live(loader, seconds=0.001) as batches:
            for _ in batches:
                body()
    else:
        for _ in ps.live(loader if way == "around the loader" else iter(loader), seconds=0.001):
            body()
    assert seen == 20
    assert not live_threads()
    assert "all of the run" in terminal.shows.rpartition("step 20,")[2]
    assert terminal.shows.rstrip().endswith("\x1b[?25h"), "the cursor is back"


async def _take(loader: ps.Loader[Any], terminal: Terminal) -> int:
    seen = 0
    with ps.live(loader, seconds=0.001):
        async for _ in loader:
            seen += 1
            if seen == 5:
                terminal.wait_for("step 5,")
    return seen


def test_around_an_async_loop(S: NamedSharding, terminal: Terminal, run: Callable[..., Any]) -> None:
    assert run(_take, ps.Loader(lambda: itertools.islice(endless(), 9), S), terminal) == 9
    assert not live_threads()


def test_a_file_gets_lines(S: NamedSharding, lines: Terminal) -> None:
    with ps.Loader(endless, S) as loader:
        for _ in ps.live(loader, seconds=0.001):
            if "prefetchshard: step 3," in lines.shows:
                break
            if loader.stats().batches == 3:
                lines.wait_for("prefetchshard: step 3,")
    assert "\x1b" not in lines.shows


def test_nothing_is_written_of_a_short_loop(S: NamedSharding, capfd: pytest.CaptureFixture[str]) -> None:
    for _ in ps.live(ps.Loader(lambda: itertools.islice(endless(), 3), S), seconds=0.001):
        pass
    assert capfd.readouterr() == ("", "")


def test_a_loader_that_has_not_begun_and_one_with_two_runs(S: NamedSharding, terminal: Terminal) -> None:
    loader = ps.Loader(endless, S)
    with ps.live(loader, seconds=0.001):
        terminal.wait_for("no run, or several")
        first = iter(loader)
        next(first)
        terminal.wait_for("step 1,")
        terminal.truncate(0)
        second = iter(loader)
        terminal.wait_for("no run, or several")
        first.close()
        second.close()


# -- in a notebook


class Output:
    """What a notebook shows in one place."""

    def __init__(self, made: Any) -> None:
        self.shows = made

    def update(self, made: Any) -> None:
        self.shows = made


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> list[Output]:
    """The outputs of a cell."""
    outputs: list[Output] = []

    def display(made: Any, *, display_id: bool) -> Output:
        assert display_id, "it cannot be changed"
        outputs.append(Output(made))
        return outputs[-1]

    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    monkeypatch.setattr(drawing, "make_console", lambda: Console(force_jupyter=True))
    return outputs


def html(output: Output) -> str:
    return output.shows._repr_mimebundle_([], [])["text/html"]


def test_a_notebook_gets_one_output_that_changes(S: NamedSharding, cell: list[Output], capfd: pytest.CaptureFixture[str]) -> None:
    loader = ps.Loader(lambda: itertools.islice(endless(), 20), S)
    with ps.live(loader, seconds=0.001):
        for step, _ in enumerate(loader):
            print("printed", step)  # noqa: T201 - as a cell does
            if step == 9:
                wait_until(lambda: "step 10," in html(cell[0]))
    assert len(cell) == 1
    assert "step 20," in html(cell[0])
    assert "all of the run" in html(cell[0])
    assert capfd.readouterr() == ("".join(f"printed {step}\n" for step in range(20)), "")


def test_a_notebook_that_shows_nothing_ends_no_loop(S: NamedSharding, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "IPython.display", None)
    monkeypatch.setattr(drawing, "make_console", lambda: Console(force_jupyter=True))
    assert len(list(ps.live(ps.Loader(lambda: itertools.islice(endless(), 5), S), seconds=0.001))) == 5
    assert not live_threads()


@pytest.mark.ecosystem
def test_cells_of_a_real_notebook() -> None:
    """One display a loop, in both kinds of loop; no printed line is lost; statistics and verdicts are shown as texts."""
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    program = """
        import json
        import nbformat
        from nbclient import NotebookClient

        cells = ['''
        import numpy as np
        import prefetchshard as ps
        def batches():
            for number in range(200):
                yield np.full((8, 3), number, np.float32)
        loader = ps.Loader(batches)
        ''', '''
        with ps.live(loader, seconds=0.001):
            for number, batch in enumerate(loader):
                print("printed", number)
        ''', '''
        with ps.live(loader, seconds=0.001):
            async for batch in loader:
                pass
        ''', "loader.stats()", "loader.stats().verdict"]
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
        print(json.dumps([cell.outputs for cell in notebook.cells]))
    """
    done = run_python(program)
    assert done.returncode == 0, done.stderr
    start, loop, asynchronous, stats, verdict = json.loads(done.stdout.splitlines()[-1])
    assert start == []
    for outputs, step in ((loop, 200), (asynchronous, 400)):
        (shown,) = [output for output in outputs if output["output_type"] == "display_data"]
        assert f"step {step}," in shown["data"]["text/html"]
        assert "all of the run" in shown["data"]["text/html"]
    printed = [output for output in loop if output["output_type"] != "display_data"]
    assert {output["name"] for output in printed} == {"stdout"}
    assert "".join(output["text"] for output in printed).count("printed") == 200
    assert len(asynchronous) == 1
    for outputs in (stats, verdict):
        (shown,) = outputs
        assert shown["data"]["text/plain"].startswith("Bound by ")
    assert "ms a batch" in stats[0]["data"]["text/plain"]


# -- how it ends


def test_break_leaves_the_iterator_as_it_is(S: NamedSharding, terminal: Terminal) -> None:
    batches = iter(ps.Loader(endless, S))
    for _ in ps.live(batches, seconds=0.001):
        break
    assert not live_threads()
    next(batches)
    assert batches.stats().batches == 2
    batches.close()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("way", ["around the loop", "around the loader"])
def test_an_exception_in_the_loop(way: str, error: type[BaseException], S: NamedSharding, terminal: Terminal) -> None:
    def loop() -> None:
        if way == "around the loop":
            with ps.live(loader, seconds=60):
                for _ in loader:
                    raise error
        for _ in ps.live(loader, seconds=60):
            raise error

    with ps.Loader(endless, S) as loader:
        with pytest.raises(error):
            loop()
        gc.collect()
        wait_until(lambda: not live_threads())


def test_an_exception_of_the_source(S: NamedSharding, terminal: Terminal) -> None:
    def source() -> Iterator[np.ndarray]:
        yield np.zeros((8, 2), np.float32)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        for _ in ps.live(ps.Loader(source(), S), seconds=60):
            pass
    assert not live_threads()


def test_a_loader_that_is_dropped_takes_its_display_along(S: NamedSharding, terminal: Terminal) -> None:
    loader = ps.Loader(endless, S)
    shown = ps.live(loader, seconds=60)
    shown.__enter__()
    assert len(live_threads()) == 1
    gone = weakref.ref(loader)
    del loader, shown
    gc.collect()
    assert gone() is None
    wait_until(lambda: not live_threads())


def test_the_thread_keeps_no_loader_alive(S: NamedSharding) -> None:
    class Nowhere:
        def start(self, shown: Shown | None) -> None: ...
        def show(self, shown: Shown | None) -> None: ...
        def stop(self, shown: Shown | None) -> None: ...

    loader = ps.Loader(endless, S)
    watcher = Watcher(loader, Nowhere(), 0.001)
    watcher.start()
    del loader
    gc.collect()
    wait_until(lambda: not watcher.thread.is_alive())


@pytest.mark.parametrize("method", ["start", "show", "stop"])
def test_a_display_that_fails_ends_no_loop(method: str, S: NamedSharding, terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: object, shown: object) -> None:
        raise OSError("no such terminal")

    stdout, stderr = sys.stdout, sys.stderr
    monkeypatch.setattr(drawing.Display, method, fail)
    assert len(list(ps.live(ps.Loader(lambda: itertools.islice(endless(), 5), S), seconds=0.001))) == 5
    assert not live_threads()
    if method != "stop":
        assert (sys.stdout, sys.stderr) == (stdout, stderr)
    sys.stdout, sys.stderr = stdout, stderr


def test_a_terminal_that_takes_nothing_holds_up_no_loop(S: NamedSharding, monkeypatch: pytest.MonkeyPatch, terminal: Terminal) -> None:
    is_showing, may_go_on = threading.Event(), threading.Event()

    def show(self: object, shown: object) -> None:
        is_showing.set()
        assert may_go_on.wait(HANG_SECONDS)

    monkeypatch.setattr(drawing.Display, "show", show)
    monkeypatch.setattr("prefetchshard.telling.live.PATIENCE_SECONDS", 0.01)
    with ps.Loader(endless, S) as loader, ps.live(loader, seconds=0.001):
        assert is_showing.wait(HANG_SECONDS)
    assert len(live_threads()) == 1
    may_go_on.set()
    wait_until(lambda: not live_threads())


@pytest.mark.parametrize("stride", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_ctrl_c_anywhere_leaves_nothing(stride: int, S: NamedSharding, lines: Terminal) -> None:
    loader = ps.Loader(np.zeros(8, np.float32), S, batch_size=8)

    def show() -> None:
        with ps.live(loader, seconds=60):
            pass

    places = 0
    for _ in interrupted_everywhere(lambda: None, show, stride=stride):
        places += 1
        gc.collect()
        wait_until(lambda: not live_threads())
    assert places * stride > 30


def test_it_is_shown_once(S: NamedSharding, lines: Terminal) -> None:
    shown = ps.live(ps.Loader(endless, S))
    with shown, pytest.raises(ps.ConfigError, match="shown already"), shown:
        pass
    assert not live_threads()


# -- what it needs


@pytest.mark.parametrize("seconds", [0, -1.0, 61.0, float("nan")])
def test_no_such_seconds(seconds: float, S: NamedSharding) -> None:
    with pytest.raises(ps.ConfigError, match="seconds must be above 0 and at most 60"):
        ps.live(ps.Loader(endless, S), seconds=seconds)


def test_without_rich_it_says_how_to_get_it() -> None:
    program = """
        import sys
        sys.modules["rich"] = None
        import numpy as np
        import prefetchshard as ps

        try:
            ps.live(ps.Loader(np.zeros(8), batch_size=8))
        except ps.ConfigError as error:
            print(error)
    """
    done = run_python(program)
    assert (done.returncode, done.stdout.strip()) == (0, "ps.live needs the package rich: python -m pip install 'prefetchshard[live]'")


def test_a_program_that_ends_while_it_is_shown() -> None:
    """Nobody has left the display: its thread must not hold up the exit, nor complain."""
    program = """
        import itertools
        import numpy as np
        import prefetchshard as ps

        loader = ps.Loader(lambda: (np.zeros((8, 2), np.float32) for _ in itertools.count()), None)
        shown = ps.live(loader, seconds=0.001)
        shown.__enter__()
        batches = iter(loader)
        next(batches)
        print("the end")
    """
    done = run_python(program)
    assert (done.returncode, done.stdout, done.stderr) == (0, "the end\n", "")
