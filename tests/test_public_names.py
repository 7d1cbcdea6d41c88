"""The public names, listed once. A name that is added, renamed or dropped is changed here on purpose."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest

import prefetchshard as ps
from support import REPOSITORY

PUBLIC = {
    # making and reading batches
    "Loader",
    "LoaderIterator",
    "prefetch",
    # the settings
    "HOST",
    "Pad",
    "PerDevice",
    "Processes",
    "OnDevice",
    "per_worker",
    "rebatch",
    # where and what
    "BatchSpec",
    "LeafSpec",
    "Position",
    "describe",
    "from_this_loop",
    "in_own_loop",
    "make_mesh",
    "process_data_shard",
    # where to go on
    "LoaderState",
    # what it does, and did
    "Benchmark",
    "Stats",
    "benchmark",
    "live",
    # what goes wrong
    "ArgumentError",
    "BatchError",
    "ConfigError",
    "LeafTypeError",
    "NarrowingError",
    "PlacementError",
    "PrefetchError",
    "PrefetchWarning",
    "SourceError",
    "StateError",
    "StuckThreadWarning",
    "UsedUpError",
}

METHODS = {
    "Loader": {"aclose", "aspec", "close", "spec", "state", "stats"},
    "LoaderIterator": {"aclose", "close", "position", "state", "stats", "trace"},
}


def test_the_names_are_these() -> None:
    found = {
        name
        for name in dir(ps)
        if not name.startswith("_") and name != "annotations" and not isinstance(getattr(ps, name), types.ModuleType)
    }
    assert found - PUBLIC == set(), "public, but not listed"
    assert PUBLIC - found == set(), "listed, but not public"


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_each_name_is_documented(name: str) -> None:
    thing = getattr(ps, name)
    if isinstance(thing, type) or callable(thing):
        doc = thing.__doc__ or ""
        assert doc.strip(), f"{name} has no docstring"
        assert not doc.startswith(f"{name}("), f"{name} has only the docstring that dataclasses make"


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_the_readme_names_it(name: str) -> None:
    assert name in (REPOSITORY / "README.md").read_text()


@pytest.mark.parametrize("kind", sorted(METHODS))
def test_the_methods_are_these(kind: str) -> None:
    """What an instance holds is its own."""
    with ps.Loader(np.zeros(8), batch_size=8) as loader:
        thing: Any = {"Loader": loader, "LoaderIterator": iter(loader)}[kind]
        assert {name for name in dir(thing) if not name.startswith("_")} == METHODS[kind]


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in METHODS.items() for name in sorted(names)])
def test_each_method_is_documented(kind: str, name: str) -> None:
    assert (getattr(ps, kind).__dict__[name].__doc__ or "").strip()
    assert f"`{name}" in (REPOSITORY / "README.md").read_text()
