"""What a type checker knows of a batch: pyright reads this file as it reads the package, and the lines run too."""

# pyright: strict, reportUnnecessaryTypeIgnoreComment=true

from __future__ import annotations

import asyncio
import inspect
import typing
from collections.abc import Mapping
from typing import Any, assert_type

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import prefetchshard as ps

ROWS = np.zeros((16, 3), np.float32)
LEAVES = {"x": ROWS}


def both(batch: Any, key: Any) -> tuple[jax.Array, jax.Array]:
    del key
    return batch, batch + 1


def test_nobody_said_what_it_is() -> None:
    for batch in ps.Loader(ROWS, P("data"), batch_size=8):
        assert_type(batch, Any)
        assert batch.shape == (8, 3)


def test_the_annotation_says_it() -> None:
    loader: ps.Loader[dict[str, jax.Array]] = ps.Loader(LEAVES, P("data"), batch_size=8)
    for batch in loader:
        assert_type(batch, dict[str, jax.Array])
    with loader as same:
        batches = iter(same)
        assert_type(batches, ps.LoaderIterator[dict[str, jax.Array]])
        assert_type(next(batches), dict[str, jax.Array])
    wider: ps.Loader[Mapping[str, jax.Array]] = loader
    assert wider is loader

    async def main() -> None:
        async with loader as same:
            async for batch in same:
                assert_type(batch, dict[str, jax.Array])

    asyncio.run(main())


def test_it_is_said_in_brackets() -> None:
    loader = ps.Loader[jax.Array](ROWS, P("data"), batch_size=8)
    assert_type(loader, ps.Loader[jax.Array])
    assert isinstance(loader, ps.Loader)


def test_device_transform_says_it() -> None:
    loader = ps.Loader(ROWS, P("data"), batch_size=8, device_transform=both)
    assert_type(loader, ps.Loader[tuple[jax.Array, jax.Array]])
    assert all(type(batch) is tuple for batch in loader)
    wrong: ps.Loader[jax.Array] = ps.Loader(ROWS, batch_size=8, device_transform=both)  # pyright: ignore[reportAssignmentType]
    assert wrong


def test_prefetch_is_typed_as_the_loader_is() -> None:
    for batch in ps.prefetch([ROWS], P("data")):
        assert_type(batch, Any)
    loader: ps.Loader[jax.Array] = ps.prefetch([ROWS], sharding=P("data"), workers=1)
    assert_type([*loader], list[jax.Array])
    assert_type(ps.prefetch(ROWS, batch_size=8, device_transform=both), ps.Loader[tuple[jax.Array, jax.Array]])
    with pytest.raises(TypeError, match=r"Loader.*'batchsize'"):
        ps.prefetch(ROWS, batchsize=8)  # pyright: ignore[reportCallIssue]
    with pytest.raises(ps.ConfigError, match="batch_size"):
        ps.prefetch(ROWS, batch_size="8")  # pyright: ignore[reportArgumentType]


def test_prefetch_shows_the_arguments_of_the_loader() -> None:
    shown = inspect.signature(ps.prefetch)
    assert shown.parameters == inspect.signature(ps.Loader).parameters
    assert shown.return_annotation is ps.Loader


def test_annotations_can_be_read_when_it_runs() -> None:
    for function in (ps.Loader.__init__, ps.Loader.__iter__, ps.LoaderIterator.__next__):
        assert typing.get_type_hints(function)
