"""What the live display shows, and what it is shown on."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from prefetchshard.measuring.stats import Stats


class Shown(NamedTuple):
    """What is to be seen at one moment.

    Attributes:
        step: batches that the loop has had, with those before it was resumed.
        stats: what happened of late.
        of: when that was, in words.
    """

    step: int
    stats: Stats
    of: str


class Screen(Protocol):
    """Where it is seen; None: there is nothing to be seen. Thread safety: one thread at a time."""

    def start(self, shown: Shown | None) -> None: ...
    def show(self, shown: Shown | None) -> None: ...
    def stop(self, shown: Shown | None) -> None: ...
