"""Finds a container that holds itself. JAX cannot say it: taking such a container apart leaves the thread unable to call a function."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, cast

MOST_LEVELS = 400
"""Deeper nesting counts as a container that holds itself. JAX, and Python's own functions, give up at some thousand levels."""


def cycle_in(value: Any) -> str | None:
    """Where a dict, list or tuple holds itself, in words; None where nothing does. Containers of other types are not looked into."""
    return _cycle(value, (), ())


def _cycle(value: Any, keys: tuple[Any, ...], above: tuple[Any, ...]) -> str | None:
    if isinstance(value, dict):
        parts: Any = cast("dict[Any, Any]", value).items()
    elif isinstance(value, list | tuple):
        parts = enumerate(cast("list[Any]", value))
    else:
        return None
    if len(above) >= MOST_LEVELS:
        return f"its containers are nested more than {MOST_LEVELS} levels deep"
    if any(value is one for one in above):
        return in_words(value, "".join(f"[{key!r}]" for key in keys))
    for key, part in parts:
        if isinstance(part, dict | list | tuple):
            found = _cycle(cast("Any", part), (*keys, key), (*above, cast("Any", value)))
            if found is not None:
                return found
    return None


def root_only() -> Callable[[Any], bool]:
    """An `is_leaf=` by which JAX opens the container that it is given and none below, also where that holds itself. For one call."""
    asked = itertools.count()
    return lambda _: next(asked) > 0


def in_words(container: Any, path: str) -> str:
    """That a container holds itself at a path."""
    return f"it holds itself: {path} is the {type(container).__name__} in which it lies"
