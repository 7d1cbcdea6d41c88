"""What a function of the user's asks for."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, cast


def takes_parameter(function: Callable[..., Any], name: str) -> bool:
    """Whether the function has a parameter of that name that is still to be given; False where its signature cannot be read."""
    if isinstance(function, functools.partial) and name in function.keywords:
        return False
    asked_of = cast("Any", function)
    try:
        asked = inspect.signature(asked_of).parameters.get(name)
        taken = inspect.signature(asked_of, follow_wrapped=False).parameters  # a wrapper may pass on less than it is said to take
    except (TypeError, ValueError):
        return False
    if asked is None or asked.kind not in (asked.POSITIONAL_OR_KEYWORD, asked.KEYWORD_ONLY):
        return False
    return name in taken or any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())


def misfit(function: Callable[..., Any], *values: Any, **options: Any) -> str | None:
    """Why the function cannot be called so, in Python's words; None where it can, or where its signature cannot be read."""
    try:
        signature = inspect.signature(function, follow_wrapped=False)  # a wrapper may give what the wrapped function asks for
    except (TypeError, ValueError):
        return None
    try:
        signature.bind(*values, **options)
    except TypeError as error:
        return str(error)
    return None


def is_async(function: Callable[..., Any]) -> bool:
    """Whether a call gives a coroutine."""
    called: Any = type(function).__call__
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)
