"""What processes must agree on: how many rows a batch has in all, what it looks like, and when the data ends.

One process agrees with itself, so its form is arithmetic. The interface is what a form over the coordination service fills in; it is
asked by the readers, once a batch, and may block there: no device collective ever runs in a background thread.
"""

from __future__ import annotations

from typing import Any, Protocol


class Agreement(Protocol):
    """Asked once a batch, in the order of the batches, by one thread of each process."""

    process_index: int
    process_count: int

    def global_rows(self, process_rows: int) -> int:
        """Rows of this step over all processes, from the rows that this process has."""
        ...

    def signature(self, step: int, signature: Any) -> None:
        """Raises where another process has a batch of another structure, shape or dtype at this step."""
        ...

    def goes_on(self, step: int, has_batch: bool) -> bool:
        """Whether every process has a batch for this step."""
        ...


class OneProcess:
    """The agreement of a process with itself."""

    process_index = 0
    process_count = 1

    def global_rows(self, process_rows: int) -> int:
        return process_rows

    def signature(self, step: int, signature: Any) -> None:
        del step, signature

    def goes_on(self, step: int, has_batch: bool) -> bool:
        del step
        return has_batch
