"""A signal that threads wait for beside files, and that anyone may give without a lock."""

from __future__ import annotations

import os


class Wake:
    """Once given, whoever waits for `fd` wakes, and nobody waits for it any more.

    Thread safety: `give` from any thread, a finaliser or a signal handler; it never blocks and takes no lock.
    """

    def __init__(self) -> None:
        self.fd, self._end = os.pipe()
        os.set_blocking(self._end, False)
        self.given = False

    def give(self) -> None:
        self.given = True
        try:
            os.write(self._end, b"1")
        except BlockingIOError:  # it is full of signals
            pass

    def __del__(self) -> None:
        # Not earlier: who holds this may give the signal, and the files' numbers are used again
        for fd in (getattr(self, "fd", None), getattr(self, "_end", None)):
            if fd is not None:
                os.close(fd)
