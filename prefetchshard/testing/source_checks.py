"""A conformance suite for your own datasets and iterables: checks that a source behaves as a loader requires."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from prefetchshard.base.config import at_least
from prefetchshard.base.errors import ConfigError
from prefetchshard.base.signatures import misfit
from prefetchshard.leaves.copying import private_copy
from prefetchshard.reading.comparing import difference
from prefetchshard.reading.interleaving import Interleaving
from prefetchshard.sources import Source, recognise
from prefetchshard.sources.arrays import Arrays
from prefetchshard.sources.dataset import Dataset
from prefetchshard.sources.epochs import makes_batches
from prefetchshard.sources.iterables import END, OpenIterator, OpenSource, Stream
from prefetchshard.sources.loops import Loops
from prefetchshard.sources.rebatch import Rebatched

THREADS_SECONDS = 60.0
"""How long the threads of one check may take."""


class SourceReport(msgspec.Struct, frozen=True):
    """The properties of a source that passed `check_source`. None of them is an error.

    Attributes:
        kind: how a loader reads it: "arrays", "dataset", "iterator", "factory", ...
        length: items per epoch; None if the source does not tell.
        items: number of items that were checked.
        reuses_buffers: the source overwrites an item when asked for the next one, so `reuses_buffers=False` would be wrong.
        rereadable: it can be read again, so a loader can have several epochs and runs.
        has_state: it saves and restores its own state, so a loader can resume without reading again.

    Example:
        report = ps.testing.check_source(lambda: iter([np.zeros(3), np.ones(3)]))
        assert report.items == 2
        assert not report.has_state
    """

    kind: str
    length: int | None
    items: int
    reuses_buffers: bool
    rereadable: bool
    has_state: bool


def check_source(
    make_source: Callable[[], Any], examples: Sequence[Any] | None = None, *, threads: int = 4, most: int = 1000
) -> SourceReport:
    """Check that a source behaves as a loader requires, by reading it as a loader does.

    A dataset must keep its length, and return the same values every time, also to several threads at once. An iterable must yield its items
    in the same order every time, as many as its length says, stay at its end once it has ended, and continue correctly from its own state
    if it has one.

    Args:
        make_source: makes a new source; called several times.
        examples: the items that the source must yield, in order; None: those of the first reading.
        threads: number of threads that read a dataset at once.
        most: number of items to check.

    Returns:
        The properties of the source.

    Raises:
        AssertionError: the source breaks a rule; the message says which, and where.
        ConfigError: it is no source, `make_source` no function without arguments, or `threads` or `most` no positive integer.

    Example:
        examples = [np.full(3, i) for i in range(10)]
        report = ps.testing.check_source(lambda: (row.copy() for row in examples), examples)
        assert not report.reuses_buffers
    """
    if not callable(make_source):  # pyright: ignore[reportUnnecessaryComparison] - callers may be untyped
        raise ConfigError(
            f"check_source takes a function that makes the source anew, not a {type(make_source).__qualname__}: check_source(lambda: source)"
        )
    why = misfit(make_source)
    if why is not None:
        raise ConfigError(
            f"check_source calls its function without arguments, and it cannot be called so: {why}; check_source(lambda: source)"
        )
    at_least("check_source(threads)", threads, 1)
    at_least("check_source(most)", most, 1)
    source = _recognised(make_source())
    if isinstance(source, Arrays):
        _equal(source.unflatten([leaf[:most] for leaf in source.leaves]), source.gathered(slice(0, most)), "the arrays")
        return SourceReport(source.kind, source.length, min(most, source.length), False, True, False)
    if isinstance(source, Dataset):
        return _DatasetCheck(source, examples, most).run(threads)
    return _StreamCheck(lambda: _as_stream(make_source()), examples, most).run()


def _recognised(source: Any) -> Source:
    """The source as its kind, whether its items are examples or batches."""
    makes = source.batch_size is not None if isinstance(source, Rebatched) else makes_batches(source)
    return recognise(source, batched=not makes)


def _as_stream(source: Any) -> Stream:
    found = _recognised(source)
    assert not isinstance(found, (Arrays, Dataset)), "the function made another kind of source than before"
    return found


# -- datasets


class _DatasetCheck:
    def __init__(self, source: Dataset, examples: Sequence[Any] | None, most: int) -> None:
        self._source = source
        self._examples = examples
        self._rows = _spread(source.length, most)
        self._known: list[Any] = []
        self._failures: list[BaseException] = []

    def run(self, threads: int) -> SourceReport:
        try:
            return self._run(threads)
        finally:
            self._source.leave()

    def _run(self, threads: int) -> SourceReport:
        source = self._source
        self._check_length("when asked again")
        reuses = self._read_in_order()
        self._check_length("after it was read")
        if source.reads_many:
            self._check_many(self._shuffled(0))
        self._check_threads(threads)
        if threads > 1:
            self._check_in_turns()
        return SourceReport(source.kind, source.length, len(self._rows), reuses, True, False)

    def _check_length(self, when: str) -> None:
        length = self._source.size_now()
        assert length == self._source.length, f"the length was {self._source.length}, and is {length} {when}"
        if self._examples is not None:
            assert length == len(self._examples), f"the length is {length}, and there are {len(self._examples)} examples"

    def _read_in_order(self) -> bool:
        """Read each row once. Returns whether reading an item overwrote the one before."""
        reuses, held = False, None
        for row in self._rows:
            item = self._ask(row)
            if held is not None:
                reuses = reuses or difference(held, self._known[-1]) is not None
            self._known.append(private_copy(item, deep=True))
            held = item
            if self._examples is not None:
                _equal(item, self._examples[row], f"row {row}")
        return reuses

    def _ask(self, row: int) -> Any:
        try:
            return self._source.read(row)
        except IndexError as error:
            raise AssertionError(f"row {row} of {self._source.length} raises IndexError: {error}") from error

    def _check_many(self, places: list[int]) -> None:
        rows = [self._rows[place] for place in places]
        for place, item in zip(places, self._source.read_many(rows), strict=True):
            _equal(item, self._known[place], f"row {self._rows[place]}, asked with others of __getitems__,")

    def _check_threads(self, count: int) -> None:
        begin = threading.Barrier(count)
        asking = [threading.Thread(target=self._ask_all, args=(i, begin), daemon=True) for i in range(count)]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join(THREADS_SECONDS)
            assert not thread.is_alive(), f"asked by {count} threads at once, it has not answered in {THREADS_SECONDS} seconds"
        if self._failures:
            raise AssertionError(
                f"asked by {count} threads at once: {self._failures[0]}; make it safe for that, or read it with workers=1"
            ) from self._failures[0]

    def _check_in_turns(self) -> None:
        found = Interleaving(self._source.read).find(self._rows)
        if found is not None:
            raise AssertionError(
                f"asked by 2 threads in turns: row {found.row} is another one: {found.what}; make it safe for that, or read it with workers=1"
            ) from found.error

    def _ask_all(self, number: int, begin: threading.Barrier) -> None:
        try:
            places = self._shuffled(number)
            begin.wait()
            for place in places:
                _equal(self._ask(self._rows[place]), self._known[place], f"row {self._rows[place]}")
            if self._source.reads_many:
                self._check_many(places)
        except BaseException as error:  # noqa: BLE001 - a thread has no caller
            self._failures.append(error)
        finally:
            self._source.leave()

    def _shuffled(self, seed: int) -> list[int]:
        return random.Random(seed).sample(range(len(self._rows)), len(self._rows))


def _spread(length: int, most: int) -> list[int]:
    """At most `most` rows, spread from the first to the last."""
    return list(range(length)) if length <= most else np.linspace(0, length - 1, most).astype(int).tolist()


# -- iterables


class _StreamCheck:
    def __init__(self, make: Callable[[], Stream], examples: Sequence[Any] | None, most: int) -> None:
        self._make = make
        self._examples = examples
        self._most = most

    def run(self) -> SourceReport:
        source = self._make()
        items = _Reading(source)
        with items:
            known, reuses, ended = items.read(self._most)
            has_state = items.access is not None
            if ended and items.is_iterator:
                assert items.pull() is END, "after its end it gave one more item"
        self._check_examples(known, ended)
        if ended and source.length is not None:
            assert source.length == len(known), f"its length is {source.length}, and it gave {len(known)} items"
        for cut in dict.fromkeys((len(known) // 2, 0, len(known))):
            self._check_again(None if source.one_shot else source, known, cut)
            if has_state:
                self._check_state(known, cut)
        return SourceReport(source.kind, source.length, len(known), reuses, not source.one_shot, has_state)

    def _check_examples(self, known: list[Any], ended: bool) -> None:
        wanted = self._examples
        if wanted is None:
            return
        for i, (item, example) in enumerate(zip(known, wanted, strict=False)):
            _equal(item, example, f"item {i}")
        count = min(len(wanted), self._most)
        assert len(known) == count or (not ended and len(known) > count), (
            f"it gave {len(known)} items, and there are {len(wanted)} examples"
        )

    def _check_again(self, source: Stream | None, known: list[Any], cut: int) -> None:
        """Read the first `cut` items again, then stop."""
        with _Reading(source or self._make()) as items:
            for i in range(cut):
                _equal(items.pull(), known[i], f"item {i}, when it was read again,")

    def _check_state(self, known: list[Any], cut: int) -> None:
        with _Reading(self._make()) as items:
            items.read(cut)
            snapshot = items.snapshot()
            for i in range(cut, len(known)):
                _equal(items.pull(), known[i], f"item {i}, after its state was taken,")
        for _ in range(2):  # a state is a value, so restoring it must work more than once
            with _Reading(self._make(), snapshot) as items:
                for i in range(cut, len(known)):
                    _equal(items.pull(), known[i], f"item {i}, from its state after item {cut - 1},")


class _Reading:
    """One reading of a source, in this thread."""

    def __init__(self, source: Stream, snapshot: bytes | None = None) -> None:
        self._source = source
        self._snapshot = snapshot
        self._loop = Loops([])
        self._items: OpenSource | None = None

    def __enter__(self) -> _Reading:
        self._items = self._source.open(0, self._loop, self._snapshot)
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._items is not None
        self._items.close()
        self._loop.close()

    @property
    def is_iterator(self) -> bool:
        return isinstance(self._items, OpenIterator)

    @property
    def access(self) -> Any:
        assert self._items is not None
        return self._items.access

    def snapshot(self) -> bytes:
        return self.access.snapshot()

    def pull(self) -> Any:
        assert self._items is not None
        return self._items.pull()

    def read(self, most: int) -> tuple[list[Any], bool, bool]:
        """Copies of up to `most` items; whether the source overwrote one; whether it has ended."""
        known: list[Any] = []
        reuses, held = False, None
        while len(known) < most:
            item = self.pull()
            if known:
                reuses = reuses or difference(held, known[-1]) is not None
            if item is END:
                return known, reuses, True
            known.append(private_copy(item, deep=True))
            held = item
        return known, reuses, False


# -- comparing


def _equal(got: Any, wanted: Any, where: str) -> None:
    assert got is not END, f"{where} is missing"
    found = difference(got, wanted)
    assert found is None, f"{where} is another one: {found}"
