"""Finds out in the first rows of a run whether its dataset may be read by several threads at once.

The first two reads are made alone, one after the other, and watched. If they moved a position, changed an attribute of the dataset, or
came in the same memory, which may all be safe, more rows are read as `Interleaving` does it. No other dataset is read more than asked.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from prefetchshard.base.errors import SourceError
from prefetchshard.base.jax_types import tree_flatten
from prefetchshard.base.memory import AnyArray
from prefetchshard.leaves.converting import as_array, is_torch
from prefetchshard.reading.interleaving import Finding, Interleaving
from prefetchshard.reading.reading_plan import ReadingPlan
from prefetchshard.sources.dataset import Dataset
from prefetchshard.sources.per_worker import WorkerDatasets

PATIENCE_SECONDS = 0.25
"""Who waits longer for its turn reads on, and nothing is looked for any more: rows may wait for each other, or take long."""
TRY_SECONDS = 2.0
"""What reading rows in turns may take. A row that is not due yet may wait for ever, so a thread of its own reads them."""
PAIRS = 2
"""Of rows that are read in turns; each is read four times."""
SAMPLE_BYTES = 1 << 20
"""Of a larger leaf the first row is compared."""
DEPTH = 3
"""Datasets within datasets whose attributes are looked at."""


class FirstReads(Dataset):
    """The dataset of a run until it is known whether several threads may read it.

    Args:
        source: the dataset.
        plan: of the reading.
        due: the rows of the batches that may be read before one is delivered.
        helpers: the threads of the run that run the source's code beside its workers.
        decided: called once no more is looked for; from then on the workers may read from `source`.

    Raises:
        SourceError: several threads must not read it.
    """

    def __init__(
        self,
        source: Dataset,
        plan: ReadingPlan,
        due: Callable[[], set[int]],
        helpers: list[threading.Thread],
        decided: Callable[[], None],
    ) -> None:
        self.dataset = source.dataset
        self.length = source.length
        self.reads_many = source.reads_many
        self.shares_items = source.shares_items
        self.takes_epoch = source.takes_epoch
        self._source = source
        self._plan = plan
        self._due = due
        self._helpers = helpers
        self._decided = decided
        self._gate = threading.Lock()  # guards the rest, and who holds it reads alone
        self._habits = _Habits(source.dataset)
        self._in_turns = False
        self._is_over = False

    @staticmethod
    def are_wanted(source: Dataset, plan: ReadingPlan) -> bool:
        """Whether several threads will read one dataset that is the user's own."""
        own = not isinstance(source, WorkerDatasets) and not source.shares_items
        return (
            own
            and not plan.in_processes
            and (plan.workers > 1 or plan.is_controlled)
            and source.length > 1
            and (source.unsafe is not None or not source.was_watched)
        )

    def read(self, row: int) -> Any:
        return self._ask(lambda: self._source.read(row), [row])

    def read_many(self, rows: list[int]) -> list[Any]:
        return self._ask(lambda: self._source.read_many(rows), rows)

    def _ask(self, read: Callable[[], Any], rows: list[int]) -> Any:
        gate = self._gate
        if not gate.acquire(timeout=PATIENCE_SECONDS) and not (self._in_turns and gate.acquire(timeout=2 * TRY_SECONDS)):
            self._end()
            return read()
        try:
            if not self._is_over:
                return self._watch(read, rows)
        finally:
            gate.release()
        return read()

    def _end(self) -> None:
        self._is_over = self._source.was_watched = True
        self._decided()

    def _watch(self, read: Callable[[], Any], rows: list[int]) -> Any:
        if self._source.unsafe is not None:  # what looked suspicious need not do so again
            raise SourceError(self._source.unsafe)
        habits = self._habits
        got = habits.seen(read)
        if habits.reads < 2:
            return got
        if habits.are_suspicious(rows) and not self._is_over:
            self._try_in_turns(sorted({*rows, *self._due()}))
            got = read()  # it may lie in a buffer that was used again
        self._end()
        return got

    def _try_in_turns(self, rows: list[int]) -> None:
        source = self._source
        self._in_turns = True

        def ask(row: int) -> Any:
            return source.read_many([row])[0] if source.reads_many else source.read(row)

        trying, findings = Interleaving(ask), list[Finding | None]()
        thread = trying.in_thread(lambda: findings.append(trying.find(rows, PAIRS)))
        self._helpers.append(thread)
        deadline = time.monotonic() + TRY_SECONDS
        while thread.is_alive() and not self._plan.out.cancelled and time.monotonic() < deadline:
            thread.join(0.05)
        trying.stop()
        found = findings[0] if findings else None
        if found is not None and not self._is_over:  # else others read as well
            source.unsafe = (
                f"{type(self.dataset).__qualname__} must not be read by several threads at once: with row {found.other} read by another "
                f"thread, row {found.row} is wrong: {found.what}. Give each worker a dataset of its own, ps.per_worker(make_dataset), or read "
                f"it with workers=1"
            )
            # Not the end of it: parts of earlier batches may not have been read yet, and must not be
            raise SourceError(source.unsafe) from found.error


class _Habits:
    """What a dataset does in its first reads that two threads at once might disturb.

    Attributes:
        reads: that were seen.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._before = _attributes(dataset)
        self._moves = False
        self._last: Any = object()  # what the last read gave; not this itself, which nobody but the garbage collector would free then
        self._memory: list[tuple[AnyArray, AnyArray]] = []  # its arrays, and what was in them
        self._overwrites = False
        self.reads = 0

    def seen(self, read: Callable[[], Any]) -> Any:
        """What the read gives. Its calls are seen, unless somebody else looks at those of this thread."""
        if sys.getprofile() is not None:
            got = read()
        else:
            sys.setprofile(self._at_call)
            try:
                got = read()
            finally:
                sys.setprofile(None)
        arrays = _arrays_in(got)
        self._overwrites = got is self._last or any(
            leaf.tobytes() != before.tobytes() and any(np.may_share_memory(leaf, array) for array in arrays)
            for leaf, before in self._memory
        )
        self._last, self._memory = got, [(array, array.copy()) for array in arrays]
        self.reads += 1
        return got

    def _at_call(self, frame: Any, event: str, arg: Any) -> None:
        name = getattr(arg, "__name__", "") if event == "c_call" else frame.f_code.co_name if event == "call" else ""
        if "seek" in name or name == "execute" or (name == "set" and hasattr(getattr(arg, "__self__", None), "read")):
            self._moves = True

    def are_suspicious(self, rows: list[int]) -> bool:
        """Whether any was seen.

        Args:
            rows: that were read last. A number that changed may be a count, which disturbs nothing, unless it is one of these.
        """
        before = self._before
        changed = [value for key, value in _attributes(self._dataset).items() if before.get(key, before) is not value]
        return self._moves or self._overwrites or any(not isinstance(value, (int, float)) or value in rows for value in changed)


def _arrays_in(example: Any) -> list[AnyArray]:
    try:
        arrays = [as_array(leaf) for leaf in tree_flatten(example)[0] if isinstance(leaf, np.ndarray) or is_torch(leaf)]
    except Exception:  # noqa: BLE001 - whoever writes it says what is wrong with it
        return []
    return [array if array.nbytes <= SAMPLE_BYTES else array[:1] for array in arrays if not array.dtype.hasobject]


def _attributes(dataset: Any, depth: int = DEPTH) -> dict[tuple[int, str], Any]:
    """The attributes of a dataset, and of the datasets that it holds."""
    slots: Sequence[str] = getattr(dataset, "__slots__", ())
    values: dict[str, Any] = {**getattr(dataset, "__dict__", {}), **{name: getattr(dataset, name, None) for name in slots}}
    found = {(id(dataset), name): value for name, value in values.items()}
    for value in values.values() if depth else ():
        if hasattr(value, "__getitem__") and hasattr(value, "__dict__"):
            found |= _attributes(value, depth - 1)
    return found
