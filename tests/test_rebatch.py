"""`ps.rebatch`: pieces of any number of rows become batches of one size, each row once and in order."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
import pytest
from jax.sharding import NamedSharding

import prefetchshard as ps
from consumers import Consume, joined

SIZES = (5, 0, 30, 1, 8, 12)
ROWS = sum(SIZES)


def pieces(sizes: tuple[int, ...] = SIZES) -> list[dict[str, np.ndarray]]:
    ends = np.cumsum(sizes)
    return [{"x": np.arange(end - n, end), "y": np.full((n, 2), end, np.float32)} for end, n in zip(ends, sizes, strict=True)]


def in_one_buffer() -> Iterator[dict[str, np.ndarray]]:
    """A reader that overwrites what it yielded when it is asked for more."""
    x = np.zeros(max(SIZES), int)
    for piece in pieces():
        x[: len(piece["x"])] = piece["x"]
        yield {"x": x[: len(piece["x"])], "y": piece["y"]}
        x[:] = -1


async def asynchronously() -> AsyncIterator[dict[str, np.ndarray]]:
    for piece in pieces():
        yield piece


SOURCES: dict[str, Callable[[], Any]] = {
    "list": pieces,
    "iterator": lambda: iter(pieces()),
    "one buffer": in_one_buffer,
    "factory": lambda: in_one_buffer,
    "async": asynchronously,
    "async factory": lambda: asynchronously,
}


@pytest.mark.parametrize("kind", SOURCES)
def test_every_row_once_and_in_order(kind: str, S: NamedSharding, consume: Consume) -> None:
    loader = ps.prefetch(ps.rebatch(SOURCES[kind](), 16), S, remainder="pad")
    seen = consume(loader)
    assert [len(b["x"]) for b, _ in seen] == [16] * 4
    mask = joined(seen, lambda b: b["mask"])
    assert joined(seen, lambda b: b["x"])[mask].tolist() == list(range(ROWS))
    assert loader.stats().rows == ROWS


@pytest.mark.parametrize("kind", SOURCES)
def test_row_by_row(kind: str, S: NamedSharding) -> None:
    loader = ps.Loader(ps.rebatch(SOURCES[kind]()), S, batch_size=8)
    assert np.concatenate([np.asarray(b["x"]) for b in loader]).tolist() == list(range(ROWS))


def test_without_a_loader_it_can_be_read_again() -> None:
    cut = ps.rebatch(in_one_buffer, 16)
    for _ in range(2):
        assert [batch["x"].tolist() for batch in cut] == [list(range(i, min(i + 16, ROWS))) for i in range(0, ROWS, 16)]


def test_only_what_crosses_the_end_of_a_piece_is_copied() -> None:
    (piece,) = given = pieces((32,))
    assert all(np.shares_memory(batch["x"], piece["x"]) for batch in ps.rebatch(given, 8))


def test_several_epochs_and_a_state(R: NamedSharding) -> None:
    def make(state: ps.LoaderState | None = None) -> ps.Loader[Any]:
        return ps.prefetch(ps.rebatch(in_one_buffer, 16), R, epochs=2, state=state)

    whole = [np.asarray(b["x"]).tolist() for b in make()]
    assert sum(whole, []) == list(range(ROWS)) * 2
    for done in (1, 4, 6):
        iterator = iter(make())
        for _ in range(done):
            next(iterator)
        state = iterator.state()
        iterator.close()
        assert state.resumes_by == "replay"
        assert [np.asarray(b["x"]).tolist() for b in make(state)] == whole[done:]


def test_a_source_inside_is_told_the_epoch(S: NamedSharding) -> None:
    class Epochs(list[Any]):
        def __init__(self) -> None:
            super().__init__(pieces((16,)))
            self.told: list[int] = []

        def set_epoch(self, epoch: int) -> None:
            self.told.append(epoch)

    source = Epochs()
    for form in (ps.rebatch(source, 8), lambda: ps.rebatch(source, 8)):
        source.told.clear()
        list(ps.prefetch(form, S, epochs=2))
        assert source.told == [0, 1]


def test_text_and_lists_are_columns_too(S: NamedSharding) -> None:
    source = [{"n": [0, 1, 2], "text": ["a", "b", "c"]}, {"n": [3, 4, 5, 6, 7], "text": ["long", "e", "f", "g", "h"]}]
    (batch,) = ps.prefetch(ps.rebatch(source, 8), S, host=("text",))
    assert np.asarray(batch["n"]).tolist() == list(range(8))
    assert list(batch["text"]) == ["a", "b", "c", "long", "e", "f", "g", "h"]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ([{"x": np.zeros(4), "y": np.zeros(3)}], r"piece 0.*different numbers of rows: \{'x': 4, 'y': 3\}"),
        ([{"x": np.zeros(4)}, {"y": np.zeros(4)}], r"piece 1.*has the leaves \['y'\], the first one \['x'\]"),
        ([{"x": np.zeros(4)}, {"x": np.zeros(4, int)}], r"piece 1.*leaf x have dtype int64.*float64"),
        ([{"x": np.zeros((4, 2))}, {"x": np.zeros((4, 3))}], r"piece 1.*shape \(3,\).*\(2,\)"),
        ([{"x": 3.0}], r"piece 0.*leaf x is 3.0, which has no rows"),
        ([{}], r"piece 0.*has no leaves"),
    ],
)
def test_pieces_that_cannot_share_a_batch(source: Any, words: str, S: NamedSharding) -> None:
    with pytest.raises(ps.BatchError, match=words):
        list(ps.prefetch(ps.rebatch(source, 8), S))


def test_an_error_comes_after_the_good_batches(S: NamedSharding) -> None:
    def source() -> Iterator[Any]:
        yield from pieces((16, 20))
        raise OSError("disk")

    iterator = iter(ps.prefetch(ps.rebatch(source, 8), S))
    assert [int(next(iterator)["x"][0]) for _ in range(4)] == [0, 8, 16, 24]
    with pytest.raises(OSError, match="disk"):
        next(iterator)
