"""The stages of a run in a profile of JAX's, while one is taken (`jax.profiler.trace`).

Where none is taken, an annotation with a number in it costs 0.4 us, and to ask whether one is taken 0.02 us (two cores that others use
too; `python -m timeit -s "from jax.profiler import TraceAnnotation as T" "with T('a', step=1): pass"`, and the same of
`T.is_enabled()`). So who annotates asks first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.profiler import TraceAnnotation

PREFIX = "prefetchshard: "
"""Every name in a profile begins so."""

is_taken: Callable[[], bool] = getattr(TraceAnnotation, "is_enabled", lambda: True)
"""Whether a profile is being taken. Where JAX has no such function, each annotation asks by itself."""


def annotate(what: str, **numbers: int) -> Any:
    """Name what this thread does from here on, until `leave`, or until nobody holds the annotation any more.

    Args:
        what: in a word.
        numbers: shown with it.
    """
    found: Any = TraceAnnotation(PREFIX + what, **numbers)  # JAX says nothing of its methods' types
    found.__enter__()
    return found


def leave(annotation: Any) -> None:
    """It is done. None: it was not annotated."""
    if annotation is not None:
        annotation.__exit__(None, None, None)
