"""Cuts what a source yields in pieces of any size (row groups, chunks, batches) into batches of one size, or into rows."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np

from prefetchshard.base.codec import shown
from prefetchshard.base.errors import BatchError, ConfigError
from prefetchshard.base.jax_types import tree_flatten_with_path
from prefetchshard.base.memory import AnyArray
from prefetchshard.leaves.converting import as_array, is_a
from prefetchshard.leaves.copying import private_copy
from prefetchshard.sharding.batch_tree import path_text
from prefetchshard.sources.epochs import Wrapper
from prefetchshard.sources.iterables import END, EndType, OpenIterator, OpenSource, PulledSource, Stream
from prefetchshard.sources.stateful import StateAccess, refuse_snapshot

_PLAIN = (bool, int, float, complex, str, bytes, np.generic, type(None))
"""A list that begins with one of these is a column, and so is an empty list."""


class Rebatched(Wrapper):
    """A source cut anew; see `rebatch`."""

    def __init__(self, source: Any, batch_size: int | None) -> None:
        if batch_size is not None and (isinstance(batch_size, bool) or not isinstance(batch_size, numbers.Integral) or batch_size < 1):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may be untyped
            raise ConfigError(f"rebatch(source, batch_size={shown(batch_size)}): an integer, at least 1; None: the rows one by one")
        self.source = source
        self.batch_size = None if batch_size is None else int(batch_size)

    def check(self, *, batched: bool) -> None:
        """Whether a loader with or without a batch size can read it.

        Raises:
            ConfigError: it cannot.
        """
        if batched and self.batch_size is not None:
            raise ConfigError(
                f"ps.rebatch(source, {self.batch_size}) batches already: leave batch_size out of the loader, or out of rebatch, which then "
                f"gives the rows one by one"
            )
        if not batched and self.batch_size is None:
            raise ConfigError("ps.rebatch(source) gives the rows one by one: say how many make a batch, ps.rebatch(source, 64)")

    def __iter__(self) -> Iterator[Any]:
        made: Any = self.source
        if not hasattr(made, "__iter__") and callable(made):
            made = made()
        items = OpenRebatched(OpenIterator(iter(made), ours=made is not self.source or hasattr(made, "__next__")), self.batch_size)
        try:
            while (item := items.pull()) is not END:
                yield item
        finally:
            items.close()

    def __repr__(self) -> str:
        return f"rebatch({type(self.source).__qualname__}, {self.batch_size})"


def rebatch(source: Any, batch_size: int | None = None) -> Rebatched:
    """Cut what a source yields in pieces of any number of rows, such as row groups of a file, into batches of `batch_size` rows.

    Every row comes once, in order. The last batch of an epoch may be short: `remainder` of the loader says what becomes of it. Only rows of
    a batch that crosses the end of a piece are copied; all others are views of their piece. Resuming reads the epoch again up to the place.

    Args:
        source: an iterable, iterator, async iterable or list of pieces, or a function that returns one, called once an epoch. A piece is
            an array `(rows, ...)` or a tree of them with one number of rows, which may be 0; text, objects and lists of plain values are
            columns too. All pieces have the same leaves, dtypes and shapes beyond the rows.
        batch_size: rows of a batch, for a loader without `batch_size`. None: the rows one by one, as examples for a loader with
            `batch_size`, `transform` or `collate`; that takes some microseconds a row.

    Raises:
        ConfigError: `batch_size` is no positive integer.

    Example:
        groups = [{"x": np.ones((rows, 3), np.float32)} for rows in (100, 7, 53)]
        batches = list(ps.prefetch(ps.rebatch(groups, 32), P("data")))
        assert [batch["x"].shape for batch in batches] == [(32, 3)] * 5
    """
    return Rebatched(source, batch_size)


class RebatchedStream(PulledSource):
    """The stream behind `rebatch`: one that pulls another one."""

    length = None

    def __init__(self, inner: Stream, batch_size: int | None) -> None:
        self.kind = f"rebatched {inner.kind}"
        self.one_shot = inner.one_shot
        self.inner = inner
        self._batch_size = batch_size

    def open(self, epoch: int, loop: Any, snapshot: bytes | None = None) -> OpenSource:
        if snapshot is not None:
            raise refuse_snapshot(self)
        return OpenRebatched(self.inner.open(epoch, loop), self._batch_size)


class OpenRebatched:
    """One epoch of pieces, cut anew.

    Args:
        pieces: that are cut; closed with this.
        batch_size: rows of a batch; None: the rows one by one.
    """

    access: StateAccess | None = None

    def __init__(self, pieces: OpenSource, batch_size: int | None) -> None:
        self._pieces = pieces
        self._batch_size = batch_size
        self._first: _Piece | None = None
        self._piece: _Piece | None = None
        self._row = 0  # of the piece, the next one to be given
        self._count = 0
        self._ended = False

    @property
    def closable_from_outside(self) -> bool:
        return self._pieces.closable_from_outside

    @property
    def interrupt(self) -> Callable[[], None] | None:
        return self._pieces.interrupt

    def close(self) -> None:
        self._piece = None
        self._pieces.close()

    def pull(self, most: int = 1) -> Any | EndType:
        del most
        if self._batch_size is not None:
            return self._batch(self._batch_size)
        if not self._has_rows() and not self._next_piece():
            return END
        assert self._piece is not None
        row, self._row = self._row, self._row + 1
        return self._piece.tree.unflatten([column[row] for column in self._piece.columns])

    def _batch(self, size: int) -> Any | EndType:
        parts: list[list[AnyArray]] = []
        count = 0
        while count < size:
            if not self._has_rows():
                if parts:  # the source may overwrite its piece when it is asked for the next one
                    parts[-1] = [private_copy(column, deep=True) for column in parts[-1]]
                if not self._next_piece():
                    break
            assert self._piece is not None
            start, self._row = self._row, min(self._row + size - count, self._piece.rows)
            parts.append([column[start : self._row] for column in self._piece.columns])
            count += self._row - start
        if not count:
            return END
        assert self._first is not None
        columns = parts[0] if len(parts) == 1 else [_joined(list(columns)) for columns in zip(*parts, strict=True)]
        return self._first.tree.unflatten(columns)

    def _has_rows(self) -> bool:
        return self._piece is not None and self._row < self._piece.rows

    def _next_piece(self) -> bool:
        """Pull pieces up to one that has rows. Returns False at the end."""
        self._piece, self._row = None, 0
        while not self._ended and not self._has_rows():
            item = self._pieces.pull()
            if item is END:
                self._ended = True
                break
            piece = _Piece(item, self._count)
            del item
            self._count += 1
            if piece.rows:
                self._first = self._first or piece.without_rows()
                piece.check_like(self._first)
                self._piece = piece
        return self._has_rows()


class _Piece:
    """The columns of a piece.

    Raises:
        BatchError: they have not one number of rows.
    """

    def __init__(self, item: Any, number: int) -> None:
        self._name = f"ps.rebatch: piece {number} of the epoch"
        paths_and_leaves, self.tree = tree_flatten_with_path(item, is_leaf=_is_plain_list)
        self.paths = [path_text(path) or "(the piece itself)" for path, _ in paths_and_leaves]
        self.columns = [self._column(leaf, path) for path, (_, leaf) in zip(self.paths, paths_and_leaves, strict=True)]
        if not self.columns:
            raise BatchError(f"{self._name} has no leaves: it is {item!r}")
        sizes = {path: len(column) for path, column in zip(self.paths, self.columns, strict=True)}
        if len(set(sizes.values())) > 1:
            raise BatchError(f"{self._name} has leaves of different numbers of rows: {sizes}")
        self.rows = len(self.columns[0])

    def _column(self, leaf: Any, path: str) -> AnyArray:
        if isinstance(leaf, list):
            values = cast("list[Any]", leaf)
            is_text = any(isinstance(value, (str, bytes)) for value in values)
            kinds: Any = set(map(type, values))
            column: AnyArray = np.asarray(values, object if is_text and len(kinds) > 1 else None)
        else:
            column = leaf if is_a(leaf, np.ndarray) else as_array(leaf, path)
        if column.ndim == 0:
            raise BatchError(f"{self._name}: leaf {path} is {leaf!r}, which has no rows; give it a value for each row, or leave it out")
        return column

    def without_rows(self) -> _Piece:
        """What the pieces after it are compared with."""
        piece = object.__new__(_Piece)
        piece.tree, piece.paths, piece.rows = self.tree, self.paths, 0
        piece.columns = [np.empty((0, *column.shape[1:]), column.dtype) for column in self.columns]
        return piece

    def check_like(self, first: _Piece) -> None:
        """Check that rows of both can share a batch.

        Raises:
            BatchError: they cannot.
        """
        if self.tree != first.tree:
            raise BatchError(f"{self._name} has the leaves {self.paths}, the first one {first.paths}, or other containers")
        for path, ours, theirs in zip(self.paths, self.columns, first.columns, strict=True):
            is_text = ours.dtype.kind == theirs.dtype.kind and ours.dtype.kind in "US"  # of any length
            if (ours.dtype != theirs.dtype and not is_text) or ours.shape[1:] != theirs.shape[1:]:
                raise BatchError(
                    f"{self._name}: the rows of leaf {path} have dtype {ours.dtype} and shape {ours.shape[1:]}, those of the first piece "
                    f"{theirs.dtype} and {theirs.shape[1:]}, and they may have to share a batch"
                )


def _is_plain_list(node: Any) -> bool:
    return is_a(node, list) and (not node or is_a(node[0], _PLAIN))


def _joined(columns: list[AnyArray]) -> AnyArray:
    numpy: Any = np.ma if any(isinstance(column, np.ma.MaskedArray) for column in columns) else np
    return numpy.concatenate(columns)
