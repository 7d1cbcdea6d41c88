"""Host memory as the stages see it."""

from __future__ import annotations

from typing import Any, Protocol

from numpy.typing import NDArray

AnyArray = NDArray[Any]


class Memory(Protocol):
    """The host memory of one batch, from the staging ring.

    Attributes:
        views: one a leaf.
        slab: the bytes in which the small leaves lie side by side.
    """

    views: tuple[AnyArray, ...]
    slab: AnyArray | None

    def lock(self) -> None:
        """Make it ready for the devices, once all of it is written."""
        ...

    def release(self) -> None:
        """Give the memory back. Called once its transfer is ready, or will never be made."""
        ...
