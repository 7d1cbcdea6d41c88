"""What many tests need: memory of a known alignment, the library's threads, programs run in a process of their own."""

from __future__ import annotations

import dis
import gc
import itertools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Container, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")
EMPTY = object()
REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGE = REPOSITORY / "prefetchshard"
THREAD_PREFIX = "prefetchshard"
PATIENCE_SECONDS = 20.0
"""How long a thread that was told to end may take for it."""
HANG_SECONDS = 30.0
"""What lasts this long hangs, however busy the machine is; less than the minute for which the library waits for a transfer."""


def aligned(shape: int | tuple[int, ...], dtype: Any = np.float32, offset: int = 0) -> np.ndarray:
    """Uninitialised memory that starts `offset` bytes after a multiple of 64.

    The CPU backend of JAX aliases it at offset 0; at offset 4 it copies, and does so after `device_put` has returned.
    """
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.empty(size + 128, np.uint8)
    start = (-raw.ctypes.data) % 64 + offset
    return raw[start : start + size].view(dtype).reshape(shape)


def wait_until(ready: Callable[[], object], seconds: float = 30.0) -> None:
    """Waits until `ready()` is true: for a state that nobody tells of, such as a thread that waits."""
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, f"still not so after {seconds} seconds:\n{stacks(threading.enumerate())}"
        time.sleep(0.001)


class Interrupts:
    """Ctrl-C again and again, every `seconds`, wherever the main thread is; only while armed, and each one disarms.

    A `for` statement loses nothing between the iterator and the loop variable, so what is missing was lost by the iterator.
    """

    def __init__(self, seconds: float) -> None:
        self.armed = False
        self.count = 0
        self._seconds = seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._send, args=(threading.get_ident(),), daemon=True)
        self._old: Any = None

    def _send(self, to: int) -> None:
        while not self._stop.wait(self._seconds):
            signal.pthread_kill(to, signal.SIGUSR1)

    def _interrupt(self, _: int, frame: FrameType | None) -> None:
        if self.armed and not _drops_exceptions(frame):
            self.armed = False
            self.count += 1
            raise KeyboardInterrupt

    def __enter__(self) -> Interrupts:
        self._old = signal.signal(signal.SIGUSR1, self._interrupt)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.armed = False
        self._stop.set()
        self._thread.join()
        signal.signal(signal.SIGUSR1, self._old)


_WEAK_CALLBACKS = {
    weakref.finalize.__call__.__code__,
    *(vars(kind())["_remove"].__code__ for kind in (weakref.WeakSet, weakref.WeakKeyDictionary, weakref.WeakValueDictionary)),
}


def _drops_exceptions(frame: FrameType | None) -> bool:
    """Whether the interpreter would drop what is raised here: in callbacks of the garbage collector and of weak references, in finalisers."""
    callbacks = {getattr(callback, "__code__", None) for callback in gc.callbacks} | _WEAK_CALLBACKS
    while frame is not None:
        if frame.f_code in callbacks or frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


def at_every_step(prepare: Callable[[], object], function: Callable[[], T], disturb: Callable[[], object]) -> Iterator[T]:
    """Calls `function` again and again, disturbing it before its first instruction in the package, then before its second, and so on.

    What `disturb` does stands for what another thread does there; `function` may hold no lock that it needs.
    """
    for _, answer in _disturbed(prepare, function, disturb, lambda last, now: True):
        yield answer


def handled_everywhere(prepare: Callable[[], object], function: Callable[[], T], handler: Callable[[], object]) -> Iterator[T]:
    """Calls `function` again and again, with a signal handler run at the first place in the package where the interpreter looks for
    signals, then at the second, and so on. Unlike another thread, a handler strikes nowhere else, and may need what `function` holds.
    """
    for _, answer in _disturbed(prepare, function, handler, _looks_for_signals):
        yield answer


def interrupted_everywhere(prepare: Callable[[], object], function: Callable[[], object], *beside: str, stride: int = 1) -> Iterator[None]:
    """Calls `function` again and again, with Ctrl-C at the first place in the package where the interpreter looks for signals, and so on.

    The files `beside` count as parts of the package. With a `stride`, a prime, it strikes at each place of that many, from the one in
    the middle of the first so many on.
    """

    def interrupt() -> None:
        raise KeyboardInterrupt

    for interrupted, _ in _disturbed(prepare, function, interrupt, _looks_for_signals, beside, stride):
        assert interrupted, "Ctrl-C was swallowed"
        yield


def _looks_for_signals(last: str, now: str) -> bool:
    """Whether it does so between these two instructions (CPython 3.11 to 3.14)."""
    return last in ("RESUME", "JUMP_BACKWARD") or (last.startswith(("CALL", "PRECALL")) and now != "CALL")


def _disturbed(
    prepare: Callable[[], object],
    function: Callable[[], T],
    disturb: Callable[[], object],
    is_place: Callable[[str, str], bool],
    beside: tuple[str, ...] = (),
    stride: int = 1,
) -> Iterator[tuple[bool, T | None]]:
    for step in itertools.count(stride // 2, stride):
        places, last, was_disturbed = 0, "", False

        def trace(frame: FrameType, event: str, arg: object) -> Any:
            nonlocal places, last, was_disturbed
            if not frame.f_code.co_filename.startswith((str(PACKAGE), *beside)):
                return None
            frame.f_trace_opcodes = True
            if event == "call":
                last = "RESUME"  # has no event of its own; a property, or a comparison, is called by no `CALL`
            if event == "opcode":
                now = dis.opname[frame.f_code.co_code[frame.f_lasti]]
                if is_place(last, now):
                    places += 1
                    if places == step + 1:  # noqa: B023 - called in this round only
                        was_disturbed = True
                        sys.settrace(None)
                        disturb()
                        return None
                last = now
            return trace

        prepare()
        answer, interrupted, old = None, False, sys.gettrace()
        gc.disable()  # what a finaliser that is run by chance raises is lost
        sys.settrace(trace)
        try:
            answer = function()
        except KeyboardInterrupt:
            interrupted = True
        finally:
            sys.settrace(old)
            gc.enable()
        if not was_disturbed:
            return
        yield interrupted, answer


_earlier_threads: set[threading.Thread] = set()


def begin_threads() -> None:
    """From here on a test's own threads are those that begin now; what a failed test left blocked is not the next one's fault."""
    _earlier_threads.clear()
    _earlier_threads.update(loader_threads())


def loader_threads() -> list[threading.Thread]:
    """The threads of the library that live now and did not live when the test began."""
    return [thread for thread in threading.enumerate() if thread.name.startswith(THREAD_PREFIX) and thread not in _earlier_threads]


class Thread(threading.Thread):
    """Runs a function and keeps what it returned or raised."""

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self.function = function
        self.result: Any = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.result = self.function()
        except BaseException as error:  # noqa: BLE001 - whoever joins it gets it
            self.error = error

    def returned(self) -> Any:
        """What it returned; what it raised is raised."""
        if (error := self.raised()) is not None:
            raise error
        return self.result

    def raised(self) -> BaseException | None:
        self.join(HANG_SECONDS)
        assert not self.is_alive(), stacks([self])
        return self.error


def no_threads() -> bool:
    return not [thread for thread in loader_threads() if thread.ident]  # Ctrl-C may leave one that never began (CPython 3.11)


def ended(iterator: Iterator[Any]) -> bool:
    """Whether `next` ends at once, again and again."""
    return all(next(iterator, EMPTY) is EMPTY for _ in range(3))


def threads_left() -> list[threading.Thread]:
    """The test's threads of the library that do not end within `PATIENCE_SECONDS`."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (left := loader_threads()) and time.monotonic() < deadline:
        gc.collect()  # again and again: it does nothing while another thread collects
        for thread in left:
            thread.join(0.5 / len(left))
    return left


def stacks(threads: list[threading.Thread]) -> str:
    """Name and stack of each thread, to be read by a person."""
    frames = sys._current_frames()
    parts: list[str] = []
    for thread in threads:
        frame = frames.get(thread.ident or 0)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else "  (ended meanwhile)\n"
        parts.append(f"{thread.name} (daemon={thread.daemon}):\n{stack}")
    return "\n".join(parts)


def pairwise(*lists: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Rows with one value of each list, such that each two values of different lists meet in a row; in the same order every time.

    What goes wrong by two values together shows in few rows; all combinations are many. Of two lists it is all combinations.
    """
    values = [list(each) for each in lists]
    pairs = list(itertools.combinations(range(len(values)), 2))
    sizes = [range(len(each)) for each in values]
    missing = dict.fromkeys((a, i, b, j) for a, b in pairs for i in sizes[a] for j in sizes[b])
    rows: list[tuple[Any, ...]] = []
    while missing:
        a, i, b, j = next(iter(missing))
        row = {a: i, b: j}
        for column in range(len(values)):
            if column not in row:
                row[column] = max(sizes[column], key=lambda k: _new_pairs(missing, row, (column, k)))
        for a, b in pairs:
            missing.pop((a, row[a], b, row[b]), None)
        rows.append(tuple(values[column][row[column]] for column in range(len(values))))
    return rows


def _new_pairs(missing: Container[tuple[int, ...]], row: dict[int, int], value: tuple[int, int]) -> int:
    """How many values of the row it would meet for the first time."""
    return sum((*min(value, other), *max(value, other)) in missing for other in row.items())


def called_in(ident: int) -> set[str]:
    """The names of the functions that a thread is inside of now."""
    frame, names = sys._current_frames().get(ident), set[str]()
    while frame is not None:
        names.add(frame.f_code.co_name)
        frame = frame.f_back
    return names


def copies_late(sharding: Any) -> bool:
    """Whether the CPU backend reads memory that it cannot alias after the call that puts it returned; since JAX 0.11 it does not."""
    import jax

    memory = np.empty((1 << 26) + 1, np.uint8)
    memory = memory[1 - memory.ctypes.data % 2 :][: 1 << 26].reshape(8, -1)  # at an odd address
    for value in range(20):
        memory[:] = value
        put = jax.make_array_from_callback(memory.shape, sharding, memory.__getitem__)
        memory[:] = 255
        if not (np.asarray(put) == value).all():
            return True
    return False


def run_python(
    code: str, timeout: float = 120.0, *, args: tuple[str, ...] = (), env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs `code` (indented as it may be) as a program of its own, which sees eight CPU devices.

    A test of a hang asserts `returncode == 0`: a program still running after `timeout` seconds fails the test by
    `subprocess.TimeoutExpired`, whose text holds what the program had printed, the stacks of its threads included.
    """
    watchdog = f"import faulthandler; faulthandler.dump_traceback_later({max(timeout - 10.0, timeout / 2)})\n"  # begun late, it ends late
    return run_command([sys.executable, "-c", watchdog + textwrap.dedent(code), *args], timeout, env=env)


def run_command(command: list[str], timeout: float = 120.0, *, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Runs a command in the repository, with no standard input; see `run_python`."""
    try:
        return subprocess.run(
            command,
            cwd=REPOSITORY,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        for name, output in (("stdout", error.stdout), ("stderr", error.stderr)):
            text = output.decode(errors="replace") if isinstance(output, bytes) else output
            error.add_note(f"{name}:\n{text or '(nothing)'}")
        raise
