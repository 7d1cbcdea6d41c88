"""Says what is measured, while it is: one line that changes on a terminal, a line for each measurement elsewhere."""

from __future__ import annotations

from typing import Self, TextIO

BAR_COLUMNS = 20


class Progress:
    """Writes progress to a stream, and takes a line on a terminal away at the end.

    Args:
        stream: the standard error.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._last = ""

    def tell(self, what: str, share: float) -> None:
        """Say it.

        Args:
            what: is measured now.
            share: of all that is done, 0.0 to 1.0.
        """
        if self._is_terminal:
            done = round(BAR_COLUMNS * share)
            self._stream.write(f"\r\x1b[K[{'#' * done}{'.' * (BAR_COLUMNS - done)}] {100 * share:3.0f} %  {what}")
            self._stream.flush()
        elif what != self._last:
            self._stream.write(f"measuring {what}\n")
        self._last = what

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._is_terminal and self._last:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
