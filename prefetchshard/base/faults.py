"""How the fault of a thread reaches the consumer: as the same object, with a note, unless it would be misread as control flow."""

from __future__ import annotations

import contextlib
import sys

from prefetchshard.base.errors import SourceError
from prefetchshard.base.position import Position


def _is_control_flow(error: BaseException) -> bool:
    if isinstance(error, (StopIteration, StopAsyncIteration, GeneratorExit)):
        return True
    # Who raises one of these has imported its module.
    libraries = (("asyncio", "CancelledError"), ("trio", "Cancelled"))
    return any(name in sys.modules and isinstance(error, getattr(sys.modules[name], kind, ())) for name, kind in libraries)


def safe_to_raise(error: BaseException, where: str) -> BaseException:
    """The error that the consumer gets; `where` says in which stage it was raised."""
    if not _is_control_flow(error):
        return error
    stand_in = SourceError(f"{where} raised {type(error).__name__}, which would be read as the end of the data or of a task")
    stand_in.__cause__ = error
    return stand_in


def note(error: BaseException, stage: str, position: Position | None, rows: tuple[int, int] | None = None) -> BaseException:
    """Say in a note where it happened; an error object that comes again keeps its first note."""
    text = f"prefetchshard: while {stage}"
    if position is not None:
        text += f" batch {position.step} (epoch {position.epoch}, "
        first, last = rows if rows is not None else (position.first_row, position.rows)
        text += f"rows {first} to {last - 1} of the epoch)" if last > first else f"batch {position.batches - 1} of the epoch)"
    with contextlib.suppress(Exception):  # an error that lets nothing be added (a frozen dataclass) goes without
        if not any(str(n).startswith("prefetchshard: ") for n in getattr(error, "__notes__", ())):
            error.add_note(text)
    return error


def of_epoch(error: BaseException, stage: str, epoch: int) -> BaseException:
    """What the consumer gets of a fault that belongs to no batch."""
    return note(safe_to_raise(error, stage), f"{stage} (epoch {epoch})", None)
