"""The public names, listed once. A name that is added, renamed or dropped is changed here on purpose."""

from __future__ import annotations

import types

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
    "OnDevice",
    # where and what
    "BatchSpec",
    "LeafSpec",
    "Position",
    "describe",
    "from_this_loop",
    "make_mesh",
    "process_data_shard",
    # where to go on
    "LoaderState",
    # what it did
    "Stats",
    # what goes wrong
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
