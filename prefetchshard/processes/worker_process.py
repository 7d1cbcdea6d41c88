"""One worker process, as its thread sees it: started, asked, ended."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from prefetchshard.base.errors import SourceError
from prefetchshard.processes.child import HEADER, dumped_somehow
from prefetchshard.processes.memory import AskedMemory
from prefetchshard.processes.wake import Wake

PROGRAM = Path(__file__).with_name("child.py")
BUSY_SECONDS = 0.3
"""How long a process that is in the user's code may take to end by itself when nothing more is wanted."""
IDLE_SECONDS = 5.0
"""The same where it waits for work: its dataset's own `close` may take so long."""
DEATH_SECONDS = 5.0
"""How long after the end of its connection the exit code of a process may take to be known."""
TERMINATE_SECONDS = 0.3
"""How long after SIGTERM it is killed."""

READ_BYTES = 1 << 14
"""Of an answer are read at once; most are some hundred bytes, and what is large lies in shared memory."""
MAY_WORK_BEFORE = True
"""Whether the first thread works by itself until its process is ready. Tests say that it does not."""

_log = logging.getLogger(__name__)


class StoppedError(Exception):
    """Nothing more is wanted, while a process was waited for."""


class Answer:
    """What a process answered.

    Attributes:
        kind: what it is: "stack", "list", "batch", "fault", or of its start "ready" or "failed".
        body: by kind; see `child.py`.
        seconds: that it spent in each stage.
        memory: what it wrote beside; it may be written again once another question is asked.
    """

    __slots__ = ("body", "kind", "memory", "seconds")

    def __init__(self, kind: str, body: Any, seconds: dict[str, float], memory: memoryview) -> None:
        self.kind = kind
        self.body = body
        self.seconds = seconds
        self.memory = memory


class WorkerProcess:
    """A process and its connection. Thread safety: one thread, but for `end`, which any thread may call.

    Args:
        number: of the process in its run.
        hello: what the process is sent first.
        memory: the file with the source and the functions.
        cancelled: given where nothing more is wanted.
        over: given where there is no more to be done.

    Attributes:
        is_first: its thread works by itself until the process is ready.
        is_ready: it answers.
        trouble: why it does not.
    """

    def __init__(self, number: int, hello: dict[str, Any], memory: Callable[[], int], cancelled: Wake, over: Wake) -> None:
        self.name = f"prefetchshard-process-{number}"
        self.is_first = number == 0
        self.is_ready = False
        self.trouble: BaseException | None = None
        self._hello = hello
        self._memory = memory
        self._cancelled = cancelled
        self._over = over
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._incoming = bytearray()  # what has come of answers
        self._files: deque[int] = deque()  # that came with them
        self._open: deque[int] = deque()  # of each question that is not answered yet, which of two memories it has
        self._asked = AskedMemory(), AskedMemory()
        self._answered: list[mmap.mmap | None] = [None, None]
        self._poll = select.poll()
        self._pidfd: int | None = None
        self._ending = threading.Lock()  # guards the end, which is done once

    @property
    def pid(self) -> int:
        return -1 if self._process is None else self._process.pid

    def __str__(self) -> str:
        return f"worker process {self.name.rpartition('-')[2]} (pid {self.pid})"

    # -- starting

    def start(self) -> None:
        """Start it. Does not wait until it is ready; what goes wrong is `trouble`."""
        try:
            self._start()
        except BaseException as error:  # noqa: BLE001 - it is raised where the process is asked
            error.add_note(f"prefetchshard: while starting {self}")
            self.trouble = error

    def _start(self) -> None:
        from multiprocessing import spawn

        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._connection = ours
        memory = self._memory()
        python: Any = spawn.get_executable()
        flags: list[str] = cast("Any", subprocess)._args_from_interpreter_flags()
        numbers = [str(theirs.fileno()), str(memory), str(os.getpid())]
        command = [os.fsdecode(python or sys.executable), *flags, "-P", str(PROGRAM), *numbers]
        # Blocked from its first moment on: it ignores Ctrl-C, and unblocks what it ignores then
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with theirs:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(), memory),
                    # Who uses JAX there computes on the CPU: accelerators belong to one process
                    env={**os.environ, "JAX_PLATFORMS": "cpu"},
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        _log.debug("%s starts", self)
        ours.setblocking(False)
        self._poll.register(ours, select.POLLIN)
        self._poll.register(self._cancelled.fd, select.POLLIN)
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):
                self._pidfd = os.pidfd_open(self._process.pid)
                self._poll.register(self._pidfd, select.POLLIN)
        self._send({**self._hello, "name": self.name})

    def wait_ready(self) -> None:
        """Wait until it is ready, cannot be, or is not needed any more."""
        if self.trouble is not None:
            return
        self._poll.register(self._over.fd, select.POLLIN)
        try:
            while not self._look() and not self._over.given and not self._cancelled.given:
                self._poll.poll()
        finally:
            self._poll.unregister(self._over.fd)

    def _look(self) -> bool:
        """Whether it is ready, or never will be. Does not wait."""
        if self.is_ready or self.trouble is not None:
            return True
        if not self._incoming and not any(fd in (self._fileno, self._pidfd) for fd, _ in self._poll.poll(0)):
            return False
        try:
            answer = self._receive()
        except StoppedError:
            return False
        except BaseException as error:  # noqa: BLE001 - as in `start`
            self.trouble = error
            return True
        if answer.kind == "failed":
            self.trouble = self._start_failed(answer.body)
        else:
            self.is_ready = True
            _log.debug("%s is ready", self)
        return True

    @property
    def works(self) -> bool:
        """Whether it is to be asked, rather than its thread to work by itself."""
        return self._look() or not (self.is_first and MAY_WORK_BEFORE)

    def _start_failed(self, body: Any) -> BaseException:
        data, name, text = body
        error = SourceError(
            f"{self} could not take the source and the functions: {name}. What is pickled is imported there by its module's name; a program "
            f"that is run as a script is imported too, so what it does by itself belongs under `if __name__ == '__main__':`. There:\n\n{text}"
        )
        with contextlib.suppress(Exception):
            error.__cause__ = None if data is None else pickle.loads(data)
        return error

    # -- asking

    def ask(self, question: tuple[Any, ...], sent: Any = None) -> None:
        """Ask; `answer` waits for the answer. At most two questions may be without one.

        What came with the answers before is not to be looked at any more, but for the last one's.

        Args:
            question: what to do.
            sent: goes with it.

        Raises:
            StoppedError: nothing more is wanted.
            SourceError: the process has ended, or what is sent cannot be pickled.
            OSError: there is no shared memory for what is sent.
        """
        if self.trouble is not None:
            raise self.trouble
        while not self._look():
            self._wait(select.POLLIN)
        if self.trouble is not None:
            raise self.trouble
        side = 1 if 0 in self._open else 0
        packed = None if sent is None else self._packed(sent, self._asked[side])
        self._open.append(side)
        self._send((*question, packed, side), self._asked[side])

    def answer(self) -> Answer:
        """The answer to the first question that has none; also where the process has ended, once it had answered.

        Raises:
            StoppedError: nothing more is wanted.
            SourceError: the process has ended.
        """
        answer = self._receive(self._open[0])
        self._open.popleft()
        return answer

    def _packed(self, sent: Any, memory: AskedMemory) -> tuple[bytes, list[tuple[int, int]]]:
        try:
            data, buffers = dumped_somehow(sent)
        except Exception as error:
            raise SourceError(
                f"items of the source cannot be sent to a worker process, as they cannot be pickled: {type(error).__name__}: {error}; let the "
                f"source yield arrays and plain Python values, or use threads, workers=<a number>"
            ) from error
        return data, memory.write(buffers)

    @property
    def _fileno(self) -> int:
        return -1 if self._connection is None else self._connection.fileno()

    def _send(self, message: Any, memory: AskedMemory | None = None) -> None:
        data = pickle.dumps(message, protocol=5)
        view = memoryview(HEADER.pack(len(data)) + data)
        new = None if memory is None else memory.new
        while view:
            connection = self._connection
            if connection is None:
                raise StoppedError
            try:
                count = connection.send(view) if new is None else socket.send_fds(connection, [view], [new])
            except BlockingIOError:
                self._wait(select.POLLIN | select.POLLOUT)  # it may be waiting itself until what it answers is taken
                continue
            except OSError:
                raise self._died() from None
            if memory is not None:
                memory.sent()
                new = memory = None
            view = view[count:]

    def _wait(self, events: int) -> None:
        """Wait until the connection is ready for one of these, and take what has come.

        Raises:
            StoppedError: nothing more is wanted.
            SourceError: the process has ended.
        """
        connection = self._connection
        if connection is None:
            raise StoppedError
        if events != select.POLLIN:
            self._poll.modify(connection, events)
        try:
            ready = dict(self._poll.poll())
        finally:
            if events != select.POLLIN:
                self._poll.modify(connection, select.POLLIN)
        if self._cancelled.given:
            raise StoppedError
        of_connection = ready.get(connection.fileno(), 0)
        if self._pidfd in ready and not of_connection:
            raise self._died()
        if of_connection & ~select.POLLOUT:
            self._take(connection)

    def _take(self, connection: socket.socket) -> None:
        """Take what has come."""
        try:
            data, files, _, _ = socket.recv_fds(connection, READ_BYTES, 1)
        except BlockingIOError:
            return
        except OSError:
            raise self._died() from None
        self._files += files
        if not data:
            raise self._died()
        self._incoming += data

    def _receive(self, side: int = 0) -> Answer:
        """The next answer; what it wrote beside lies in the memory of this side."""
        incoming = self._incoming
        while len(incoming) < HEADER.size or len(incoming) < HEADER.size + HEADER.unpack_from(incoming)[0]:
            self._wait(select.POLLIN)
        end = HEADER.size + HEADER.unpack_from(incoming)[0]
        (kind, body, seconds), size = pickle.loads(incoming[HEADER.size : end])
        del incoming[:end]
        if size is not None:
            file = self._files.popleft()
            try:
                self._answered[side] = None
                self._answered[side] = mmap.mmap(file, size, access=mmap.ACCESS_READ)
            finally:
                os.close(file)
        answered = self._answered[side]
        return Answer(kind, body, seconds, memoryview(b"") if answered is None else memoryview(answered))

    def _died(self) -> BaseException:
        """Why the process does not answer any more."""
        if self._cancelled.given:
            return StoppedError()
        if self.trouble is not None:  # that was found out before
            return self.trouble
        process = self._process
        assert process is not None
        deadline = time.monotonic() + DEATH_SECONDS
        while not _has_ended(process, 0.1) and time.monotonic() < deadline:
            if self._cancelled.given:
                return StoppedError()
        code: int | None = process.returncode
        doing = "while it worked" if self.is_ready else "while it started"
        if code is None:
            why = f"closed its connection {doing}"
        elif code < 0:
            why = f"was ended by {_signal_name(-code)} {doing}"
            if -code == signal.SIGKILL:
                why += ", most often by the system because memory ran out: take fewer processes, or smaller batches"
        else:
            why = f"ended with exit code {code} {doing}; what it wrote to stderr may say why"
        self.trouble = SourceError(f"{self} {why}")
        return self.trouble

    # -- ending

    def end(self) -> None:
        """End it: by itself where it does so soon, else by SIGTERM, else by SIGKILL. Bounded in time; further calls do nothing."""
        with self._ending:
            process, connection, self._connection = self._process, self._connection, None
            if connection is not None:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)  # closing alone does not reach it where a fork of this process holds it too
                connection.close()
            if process is not None:
                self._end(process)
            pidfd, self._pidfd = self._pidfd, None
            if pidfd is not None:
                os.close(pidfd)
            for memory in self._asked:
                memory.close()
            while self._files:
                os.close(self._files.popleft())
            self._answered = [None, None]
            self._process = None

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        began = time.monotonic()
        if self.is_ready:
            if _has_ended(process, BUSY_SECONDS if self._open else IDLE_SECONDS):
                _log.debug("%s has ended after %.3f s", self, time.monotonic() - began)
                return
            process.terminate()
            if _has_ended(process, TERMINATE_SECONDS):
                _log.debug("%s has ended by SIGTERM", self)
                return
        process.kill()  # one that has not begun has nothing to tidy up
        process.wait()
        _log.debug("%s has ended by SIGKILL", self)


def _has_ended(process: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
