"""What the tests of going on share: sources of every kind over the same rows, and head + resumed tail == whole."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

import prefetchshard as ps

Frozen = tuple[tuple[str, tuple[int, ...], bytes], ...]


def frozen(batch: Any) -> Frozen:
    """A batch as a value: dtype, shape and bytes of each leaf."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(batch)]
    return tuple((leaf.dtype.str, leaf.shape, leaf.tobytes()) for leaf in leaves)


def take(iterator: Any, count: int | None = None) -> list[Frozen]:
    """The next batches as values; all of them without a count."""
    seen: list[Frozen] = []
    while count is None or len(seen) < count:
        batch = next(iterator, None)
        if batch is None:
            break
        seen.append(frozen(batch))
    return seen


def through_bytes(state: ps.LoaderState) -> ps.LoaderState:
    """The state as another process reads it."""
    back = ps.LoaderState.decode(state.encode())
    assert back == state
    assert ps.LoaderState.from_json(state.to_json()) == state
    return back


def broken_off(make: Callable[..., ps.Loader], cuts: Sequence[int], length: int, *, ends: bool = True) -> tuple[list[Frozen], ps.Stats]:
    """The batches of a run that is broken off after so many batches each time, and goes on in a new loader; and the last run's stats.

    Args:
        make: makes the loader.
        cuts: how many batches are taken before each break.
        length: batches in all.
        ends: whether the run has an end there.
    """
    seen: list[Frozen] = []
    state: ps.LoaderState | None = None
    for cut in cuts:
        iterator = iter(make(state=state))
        seen += take(iterator, min(cut, length - len(seen)))  # one more would end the run
        state = through_bytes(iterator.state())
        iterator.close()
        assert iterator.state() == state
    loader = make(state=state)
    assert loader.state() == state
    iterator = iter(loader)
    assert iterator.state() == loader.state() == state
    seen += take(iterator, None if ends else length - len(seen))
    stats = iterator.stats()
    loader.close()
    return seen, stats


# --- sources


def example(row: int, epoch: int = 0) -> dict[str, np.ndarray]:
    """A row that says which one it is."""
    return {"id": np.array(row, np.int32), "x": np.full(2, row + 0.5 + 1000 * epoch, np.float32)}


def batch_of(rows: Sequence[int], epoch: int = 0) -> dict[str, np.ndarray]:
    """What the source of whole batches makes of rows."""
    return {"id": np.array(rows, np.int32), "x": np.array([[row + 0.5 + 1000 * epoch] * 2 for row in rows], np.float32)}


def batches_of(length: int, size: int, epoch: int = 0) -> list[dict[str, np.ndarray]]:
    return [batch_of(range(start, min(start + size, length)), epoch) for start in range(0, length, size)]


class Rows:
    """A dataset with random access, of examples or of batches."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items
        self.asked = 0

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        self.asked += 1
        return self.items[index]


class Again:
    """An iterable that begins anew each time, and does not know its length."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


class AgainAsync:
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    async def __aiter__(self) -> AsyncIterator[Any]:
        for item in self.items:
            yield item


class Telling:
    """A one-shot iterator that tells where it stands, as those of grain do."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items
        self.at = 0

    def __iter__(self) -> Telling:
        return self

    def __next__(self) -> Any:
        if self.at >= len(self.items):
            raise StopIteration
        self.at += 1
        return self.items[self.at - 1]

    def get_state(self) -> dict[str, Any]:
        return {"at": self.at}

    def set_state(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class TellingAgain:
    """An iterable whose iterators tell where they stand, as datasets of grain do."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __iter__(self) -> Telling:
        return Telling(self.items)


class TellingItself:
    """An iterable that tells where its last iterator stands, as streaming datasets of Hugging Face do; it is told the epoch."""

    def __init__(self, make: Callable[[int], list[Any]]) -> None:
        self.make = make
        self.epoch = 0
        self.state: dict[str, Any] = {}
        self.start: dict[str, Any] | None = None

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        start, self.start = self.start, None
        items = self.make(self.epoch)
        for at in range(0 if start is None else start["at"], len(items)):
            self.state = {"epoch": self.epoch, "at": at + 1}
            yield items[at]

    def state_dict(self) -> dict[str, Any]:
        return self.state  # its own object: who keeps it has to copy it

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state


def source_of(kind: str, length: int, size: int) -> tuple[Any, int | None]:
    """A new source of a kind over rows 0 to length, and the batch size that the loader is given (None: the source makes batches)."""
    batched = kind.endswith("batches")

    def items(epoch: int = 0) -> list[Any]:
        return batches_of(length, size, epoch) if batched else [example(row, epoch) for row in range(length)]

    makers: dict[str, Callable[[], Any]] = {
        "arrays": lambda: batch_of(range(length)),
        "list": items,
        "dataset": lambda: Rows(items()),
        "iterable": lambda: Again(items()),
        "one-shot": lambda: iter(items()),
        "factory": lambda: lambda epoch: iter(items(epoch)),
        "async": lambda: AgainAsync(items()),
        "telling": lambda: Telling(items()),
        "telling iterable": lambda: TellingAgain(items()),
        "telling itself": lambda: TellingItself(items),
        "telling factory": lambda: lambda epoch: Telling(items(epoch)),
    }
    return makers[kind.removesuffix(" of batches")](), None if batched else size


BY_INDEX = ["arrays", "list", "dataset", "list of batches", "dataset of batches"]
BY_REPLAY = [f"{kind}{unit}" for kind in ("iterable", "one-shot", "factory", "async") for unit in ("", " of batches")]
BY_SNAPSHOT = [
    f"{kind}{unit}" for kind in ("telling", "telling iterable", "telling itself", "telling factory") for unit in ("", " of batches")
]
ONE_SHOT = [kind for kind in (*BY_REPLAY, *BY_SNAPSHOT) if kind.removesuffix(" of batches") in ("one-shot", "telling")]
