"""Shared memory on the parent's side."""

from __future__ import annotations

import mmap
import os
from typing import Any

from prefetchshard.processes.child import LEAST_BYTES, make_memory, places


def written(buffers: list[Any], data: bytes = b"") -> tuple[int, list[tuple[int, int]], int]:
    """New shared memory with these buffers and, after them, the data.

    Returns its file, where each buffer lies and how long it is, and where the data begins.

    Raises:
        OSError: there is not so much.
    """
    sizes = [buffer.nbytes for buffer in buffers]
    starts, end = places(sizes)
    fd = make_memory(max(1, end + len(data)))
    try:
        with mmap.mmap(fd, end + len(data) or 1) as memory:
            for start, buffer in zip(starts, buffers, strict=True):
                memory[start : start + buffer.nbytes] = buffer
            memory[end : end + len(data)] = data
    except BaseException:
        os.close(fd)
        raise
    return fd, list(zip(starts, sizes, strict=True)), end


class AskedMemory:
    """What this side writes into for one process, made anew where more is needed.

    Attributes:
        new: its file, until that is sent.
    """

    def __init__(self) -> None:
        self.new: int | None = None
        self._map: mmap.mmap | None = None
        self._size = 0

    def write(self, buffers: list[Any]) -> list[tuple[int, int]]:
        """Write the buffers. Returns where each lies and how long it is.

        Raises:
            OSError: there is not so much.
        """
        if not buffers:
            return []
        sizes = [buffer.nbytes for buffer in buffers]
        starts, end = places(sizes)
        if self._map is None or end > self._size:
            self.close()
            size = max(LEAST_BYTES, end + end // 4)
            self.new = make_memory(size)
            self._map, self._size = mmap.mmap(self.new, size), size
        for start, buffer in zip(starts, buffers, strict=True):
            self._map[start : start + buffer.nbytes] = buffer
        return list(zip(starts, sizes, strict=True))

    def sent(self) -> None:
        """The file was sent, or is not wanted."""
        new, self.new = self.new, None
        if new is not None:
            os.close(new)

    def close(self) -> None:
        self.sent()
        memory, self._map = self._map, None
        if memory is not None:
            memory.close()
