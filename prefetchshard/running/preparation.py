"""What is found out and made beside the first batches of a run, which do not wait for it."""

from __future__ import annotations

from collections.abc import Callable

from prefetchshard.staging.layout import Staging
from prefetchshard.staging.pinned import PinnedStaging
from prefetchshard.streaming.copies import Copies, is_decided, streaming_if_faster

ALWAYS_CACHED_BYTES = 4 << 20
"""Less than this goes through the cache on the CPU backend, where the step may find it there."""


class Preparation:
    """Finds out whether to copy past the cache, and makes page-locked slots, each in a thread that begins once batches are known.

    Args:
        staging: the staging ring.
        platform: of the devices.

    Attributes:
        start: starts a thread: its name and its body. The run sets it.
        copies: into the memory of batches; past the cache as soon as that is known to be faster.

    Thread safety: any thread may call any method.
    """

    def __init__(self, staging: Staging, platform: str) -> None:
        self._are_read = platform == "cpu"
        self.copies = Copies(least_bytes=ALWAYS_CACHED_BYTES) if self._are_read else Copies()
        self._ring = staging if isinstance(staging, PinnedStaging) else None
        self.start: Callable[[str, Callable[[], None]], None] = _start_none
        self._begun: dict[str, object] = {}
        self._is_over = False

    def batches_take(self, nbytes: int, slots: int) -> None:
        """Told before the first batch is made, and where later ones take more.

        Args:
            nbytes: of a batch on the host.
            slots: the most batches on the host.
        """
        if nbytes >= self.copies.least_bytes and self._is_first("copies"):
            if is_decided(are_read=self._are_read):
                self._choose_copies()
            else:
                self.start("copies", self._choose_copies)
        ring = self._ring
        if ring is not None:
            ring.capacity = slots
            if self._is_first("slots"):
                self.start("slots", lambda: ring.make_slots(lambda: self._is_over))

    def _is_first(self, what: str) -> bool:
        mine = object()
        return self._begun.setdefault(what, mine) is mine  # one call into C, so atomic

    def _choose_copies(self) -> None:
        self.copies.copy_rows = streaming_if_faster(are_read=self._are_read)

    def cancel(self) -> None:
        """Nothing more is wanted. Takes no lock."""
        self._is_over = True
        if self._ring is not None:
            self._ring.wake()


def _start_none(name: str, body: Callable[[], None]) -> None:
    """The run does not exist yet, or not any more."""
    del name, body
