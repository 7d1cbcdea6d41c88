"""Shared memory on the parent's side."""

from __future__ import annotations

import mmap
import os
import pickle
from typing import Any

from prefetchshard.processes.child import LEAST_BYTES, make_memory, places


def written(buffers: list[Any], data: bytes) -> tuple[int, tuple[int, int], tuple[int, int]]:
    """New shared memory with these buffers, after them a table that says where each lies and how long it is, and then the data.

    Returns its file, and where table and data begin and how long they are.

    Raises:
        OSError: there is not so much.
    """
    sizes = [buffer.nbytes for buffer in buffers]
    starts, end = places(sizes)
    table = pickle.dumps(list(zip(starts, sizes, strict=True)), protocol=5)
    whole = end + len(table) + len(data)
    fd = make_memory(whole)
    try:
        with mmap.mmap(fd, whole) as memory:
            for start, buffer in zip(starts, buffers, strict=True):
                memory[start : start + buffer.nbytes] = buffer
            memory[end:whole] = table + data
    except BaseException:
        os.close(fd)
        raise
    return fd, (end, len(table)), (end + len(table), len(data))


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
