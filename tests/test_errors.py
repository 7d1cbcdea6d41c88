"""The errors of the library as values: they go through pickle, as from a worker process, and through copy."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import numpy as np
import pytest

import prefetchshard as ps
from prefetchshard.base import errors
from support import pairwise

KINDS = [
    kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, (errors.PrefetchError, errors.PrefetchWarning))
]
WAYS: list[Callable[[Any], Any]] = [copy.copy, copy.deepcopy]
WAYS += [lambda error, protocol=protocol: pickle.loads(pickle.dumps(error, protocol)) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]


def made(kind: type[BaseException]) -> BaseException:
    if kind is ps.LeafTypeError:
        return ps.LeafTypeError("meta.name", "text", "leave it out")
    return kind("what went wrong")


def same(one: BaseException, other: BaseException) -> bool:
    return (type(one), str(one), one.args, vars(one)) == (type(other), str(other), other.args, vars(other))


@pytest.mark.parametrize(("kind", "way"), pairwise(KINDS, WAYS))
def test_they_come_back(kind: type[BaseException], way: Callable[[Any], Any]) -> None:
    error: Any = made(kind)
    assert same(way(error), error)
    error.add_note("prefetchshard: while reading batch 1")
    error.row = 7
    again = way(error)
    assert same(again, error)
    assert again.__notes__ == ["prefetchshard: while reading batch 1"]
    assert same(way(again), error)


def test_of_the_users_own_subclasses() -> None:
    for way in WAYS:
        assert same(way(Own("x", code=3)), Own("x", code=3))


class Own(ps.SourceError):
    def __init__(self, where: str, *, code: int) -> None:
        super().__init__(f"{where}: {code}")
        self.code = code


FAULTS: dict[type[BaseException], Callable[[], Any]] = {
    ps.ConfigError: lambda: ps.Loader(np.zeros((64, 3)), batch_size=-1),
    ps.SourceError: lambda: list(ps.prefetch([np.ones(8, np.float32)], transform=lambda batch: None)),
    ps.BatchError: lambda: list(ps.Loader([np.ones(i, np.float32) for i in range(8)], batch_size=8)),
    ps.PlacementError: lambda: list(ps.prefetch([np.ones((7, 3), np.float32)])),
    ps.LeafTypeError: lambda: list(ps.prefetch([np.array(["text"] * 8)])),
    ps.NarrowingError: lambda: list(ps.prefetch([np.full(8, 2**40)])),
    ps.StateError: lambda: ps.LoaderState.decode(b"not a state"),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_as_a_loader_raises_them(kind: type[BaseException]) -> None:
    with pytest.raises(kind) as caught:
        FAULTS[kind]()
    for way in WAYS:
        assert same(way(caught.value), caught.value)


def fail() -> None:
    raise ps.LeafTypeError("x", "an object")


def test_a_process_pool_hands_them_on() -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool, pytest.raises(ps.LeafTypeError, match="leaf x: an object cannot"):
        pool.submit(fail).result(60)
