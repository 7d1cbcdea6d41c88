"""The worker processes of one run."""

from __future__ import annotations

import itertools
import os
import sys
from typing import Any

from prefetchshard.base.errors import ConfigError
from prefetchshard.processes.pickling import Packed
from prefetchshard.processes.wake import Wake
from prefetchshard.processes.worker_process import WorkerProcess


class Pool:
    """Makes the processes of a run, one for each thread that asks.

    Args:
        count: of the threads that ask.
        parts: what each of them is sent; see `pickling.Packed`.
        words: what to call those that are the user's.

    Attributes:
        cancelled: given where nothing more is wanted.
        over: given where there is no more to be done.

    Raises:
        ConfigError: the source or a function cannot be pickled, or there are no such processes here.
    """

    def __init__(self, count: int, parts: dict[str, Any], words: dict[str, str]) -> None:
        if sys.platform == "win32":
            raise ConfigError("workers=ps.Processes(...) needs a POSIX system: use threads here, workers=<a number>")
        prepared = _preparation()
        self._packed = Packed(parts, words)
        if not self._packed.needs_main:  # to import it may take long, and it may do things
            prepared = {key: value for key, value in prepared.items() if not key.startswith("init_main")}
        self._hello = {"prepare": prepared, "data": self._packed.data, "table": self._packed.table}
        self.cancelled = Wake()
        self.over = Wake()
        self._numbers = itertools.count()  # `next` is atomic
        self._left = itertools.count(1)
        self._count = count
        self._made: list[WorkerProcess] = []

    def claim(self) -> WorkerProcess:
        """A process for the thread that calls this. It is not started yet."""
        packed = self._packed
        process = WorkerProcess(next(self._numbers), self._hello, lambda: packed.fd, self.cancelled, self.over)
        self._made.append(process)
        return process

    def leave(self, process: WorkerProcess) -> None:
        """End the process of the thread that calls this, which asks no more."""
        process.end()
        process.trouble = None  # its traceback holds the process
        if next(self._left) == self._count:
            self._packed.close()

    def end_all(self) -> None:
        """End those whose threads do not come to it. Bounded in time."""
        for process in list(self._made):
            process.end()


def _preparation() -> dict[str, Any]:
    """What multiprocessing tells a process that it spawns about this one.

    Raises:
        ConfigError: this one is just being started itself, and its main module makes a loader when it is imported.
    """
    from multiprocessing import spawn

    try:
        found: dict[str, Any] = spawn.get_preparation_data("")
    except RuntimeError as error:
        raise ConfigError(
            "workers=ps.Processes(...): the main program is imported by each worker process, and begins a run of a loader when it is imported: "
            "put what it does under `if __name__ == '__main__':`"
        ) from error
    for key in ("authkey", "log_to_stderr", "log_level", "start_method", "name"):
        found.pop(key, None)
    found["dir"] = os.getcwd()
    return found
