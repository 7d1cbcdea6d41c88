"""Tells a source the number of the epoch that begins, where it has a method `set_epoch`, as torch's samplers and Hugging Face's datasets do."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

_told: dict[int, tuple[weakref.ref[Any], int, int]] = {}
"""Of each object by identity: itself, what it was told last, and by how much that was more than the loader's own number."""


class Wrapper:
    """What stands around a source of the user's and says something about it, such as its event loop.

    Attributes:
        source: the user's.
    """

    source: Any


def set_epoch(source: Any, epoch: int, run_epoch: int | None = None) -> int:
    """Tell a source, also in a `Wrapper`, or the sampler and the dataset of a torch DataLoader.

    Who counts epochs by himself calls `sampler.set_epoch(n)` and makes a loader for each epoch, whose own number is 0 each time. So a
    number that was set by hand before the run counts for the epoch with which the run began, and goes up from there.

    Args:
        source: anything.
        epoch: the loader's number of the epoch.
        run_epoch: where this is the first epoch of a run, the one with which the run began (a resumed run begins with a later one).

    Returns the number that it was told, of several the last one's.
    """
    more = 0
    for each in _to_be_told(source):
        more = _set_by_hand(each, run_epoch)
        each.set_epoch(epoch + more)
        with contextlib.suppress(TypeError):  # it allows no weak reference
            key = id(each)
            _told[key] = weakref.ref(each, lambda _, key=key: _told.pop(key, None)), epoch + more, more
    return epoch + more


def takes_epoch(source: Any) -> bool:
    """Whether `set_epoch` tells it anything."""
    return bool(_to_be_told(source))


def _to_be_told(source: Any) -> list[Any]:
    while isinstance(source, Wrapper):
        source = source.source
    if callable(getattr(source, "set_epoch", None)):
        return [source]
    if not is_data_loader(source):
        return []
    batch_sampler = getattr(source, "batch_sampler", None)
    parts = [getattr(source, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None), getattr(source, "dataset", None)]
    return [part for part in {id(part): part for part in parts}.values() if callable(getattr(part, "set_epoch", None))]


def _set_by_hand(source: Any, run_epoch: int | None) -> int:
    """By how much the source's number is to be more than the loader's."""
    known, told, more = _told.get(id(source), (None, 0, 0))
    is_known = known is not None and known() is source
    if run_epoch is None:
        return more if is_known else 0
    try:
        now = source.epoch
    except Exception:  # noqa: BLE001 - the source's own code, or no such attribute
        return 0
    if is_known and now == told:
        return more
    return now - run_epoch if type(now) is int and now > 0 else 0


def is_data_loader(source: Any) -> bool:
    """Whether it is a torch DataLoader or one derived from it, as torchdata's is."""
    return any(kind.__name__ == "DataLoader" and kind.__module__.split(".")[0] == "torch" for kind in type(source).__mro__)


def makes_batches(source: Any) -> bool:
    """Whether it is a loader of this library, or a torch DataLoader that makes batches; one with `batch_size=None` gives examples."""
    if any(kind.__module__ in ("prefetchshard.loader", "prefetchshard.iterator") for kind in type(source).__mro__):
        return True
    return is_data_loader(source) and getattr(source, "batch_sampler", None) is not None
