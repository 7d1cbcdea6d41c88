"""Where a thread is, and where a task waits, as lines of a traceback."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from itertools import dropwhile
from typing import Any

MOST_FRAMES = 15
"""The innermost ones say what is waited for; those around them are the same each time."""

_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_BELOW = {"cr": "cr_await", "ag": "ag_await", "gi": "gi_yieldfrom"}


def stack_of(ident: int) -> list[traceback.FrameSummary]:
    """The innermost frames of a thread, outermost first; empty where it has ended.

    Those of this library that called the user's code are left out. Where there is only this library's code they are all there.
    """
    frame = sys._current_frames().get(ident)  # pyright: ignore[reportPrivateUsage] - documented, for this
    try:
        return [] if frame is None else _of_user(traceback.extract_stack(frame, limit=MOST_FRAMES))
    finally:
        del frame  # else what its locals refer to would be kept


def stack_of_awaiting(*awaitables: Any) -> list[traceback.FrameSummary]:
    """Where a coroutine or an asynchronous generator awaits, as `stack_of`; empty where it does not, as its code runs.

    Args:
        awaitables: each one awaited by the one before, where that cannot be looked up.
    """
    found: list[traceback.FrameSummary] = []
    for awaitable in awaitables:
        while (kind := _kind_of(awaitable)) is not None and (frame := getattr(awaitable, f"{kind}_frame")) is not None:
            below = getattr(awaitable, _BELOW[kind])
            if below is None and getattr(awaitable, f"{kind}_running"):
                return []
            found.append(traceback.FrameSummary(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
            awaitable = below
    return _of_user(found)[-MOST_FRAMES:]


def is_own(stack: list[traceback.FrameSummary], package: str = "") -> bool:
    """Whether all of it is this library's, or Python's threads; with `package`, and some of it of that package."""
    own = all(_is_own(frame) for frame in stack)
    return own and (not package or any(frame.filename.startswith(_OWN + package + os.sep) for frame in stack))


def _kind_of(awaitable: Any) -> str | None:
    return next((kind for kind in _BELOW if hasattr(awaitable, f"{kind}_frame")), None)


def _of_user(stack: list[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    return list(dropwhile(_is_own, stack)) or stack


def _is_own(frame: traceback.FrameSummary) -> bool:
    return frame.filename.startswith(_OWN) or frame.filename == threading.__file__
