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
