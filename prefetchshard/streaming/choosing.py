"""When a run begins to copy past the cache."""

from __future__ import annotations

from collections.abc import Callable

from prefetchshard.streaming.copies import LEAST_BYTES, Copies, is_decided, streaming_if_faster

LEAST_BYTES_ON_CPU = 4 << 20
"""Less than this goes through the cache on the CPU backend, where the step may find it there."""


class CopyChoice:
    """Decides how a run copies: past the cache, once its batches are large and that was found to be faster.

    Where it is not known yet, it is found out in a thread beside the first batches, which do not wait for it.

    Args:
        platform: of the devices.

    Attributes:
        copies: what the run copies with.
        start: starts a thread: its name and its body. The run sets it.

    Thread safety: any thread may call any method.
    """

    def __init__(self, platform: str) -> None:
        self._are_read = platform == "cpu"
        self.copies = Copies(least_bytes=LEAST_BYTES_ON_CPU if self._are_read else LEAST_BYTES)
        self.start: Callable[[str, Callable[[], None]], None] = _start_none
        self._begun: dict[str, object] = {}

    def batches_take(self, nbytes: int) -> None:
        """Told before the first batch is made, and where later ones take more: the bytes of one."""
        if nbytes < self.copies.least_bytes:
            return
        mine = object()
        if self._begun.setdefault("choosing", mine) is not mine:  # one call into C, so atomic
            return
        if is_decided(are_read=self._are_read):
            self._choose()
        else:
            self.start("copies", self._choose)

    def _choose(self) -> None:
        self.copies.copy_rows = streaming_if_faster(are_read=self._are_read)


def _start_none(name: str, body: Callable[[], None]) -> None:
    """The run does not exist yet, or not any more."""
    del name, body
