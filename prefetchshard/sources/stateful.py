"""Sources that save and restore their own state: grain iterators, torchdata, Hugging Face datasets, and others."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast

from prefetchshard.base.codec import pack_snapshot, unpack_snapshot
from prefetchshard.base.errors import StateError

MOST_OBJECTS = 1000
MOST_ELEMENTS = 64
"""So much of a source is looked at, and of each list in it."""
_STREAMS = ("datasets", "torch", "torchdata")
_BUFFERS = ("BufferShuffledExamplesIterable",)
"""Packages whose objects are looked into, and what is looked for."""
_PAIRS = (("get_state", "set_state"), ("state_dict", "load_state_dict"))


class StateAccess:
    """Saves and restores the state of a source. The thread that reads the source calls it between two items.

    Args:
        get: returns the state; the source may change the returned object later.
        put: restores a state.
        owner: name of the source's method, for error messages.
        reader: the iterator to read after a restore; None: the source itself, as without a restore.
    """

    __slots__ = ("_get", "_lock", "_owner", "_put", "_reader", "_spoilt")

    def __init__(self, get: Callable[[], Any], put: Callable[[Any], Any], owner: str, reader: Any = None) -> None:
        self._get = get
        self._put = put
        self._owner = owner
        self._reader = reader
        self._lock = threading.Lock()  # guards _spoilt: `distrust` waits for a snapshot in progress, so no iterator is made meanwhile
        self._spoilt = False

    def distrust(self) -> None:
        """Take no more snapshots: a second iterator over the source is about to be made, and the state could then belong to either."""
        with self._lock:
            self._spoilt = True

    def snapshot(self) -> bytes | None:
        """The current state, packed; None if it could belong to another iterator.

        Raises:
            StateError: a value in it cannot be packed; the message gives its path.
        """
        try:
            with self._lock:
                return None if self._spoilt else pack_snapshot(self._get())
        except StateError as error:
            raise StateError(
                f"{error} (from {self._owner}). With snapshot_every=None the loader ignores the source's state, and resumes by reading again"
            ) from None

    def restore(self, snapshot: bytes) -> Any:
        """Restore the source to a snapshot. Returns the iterator to continue with; None: make or use the source's iterator as usual."""
        self._put(unpack_snapshot(snapshot))
        return self._reader


def find_state_access(source: Any) -> StateAccess | None:
    """Access to the state of a source that has methods for both saving and restoring; else None."""
    node: Any = source if _is_node(source) else getattr(source, "root", None)
    if _is_node(node):
        # A torchdata.nodes.Loader restored to the end of its data starts over; the node inside it stays at the end, as it must here.
        return StateAccess(node.state_dict, node.reset, f"{type(source).__qualname__}.state_dict", node)
    for get_name, put_name in _PAIRS:
        get, put = getattr(source, get_name, None), getattr(source, put_name, None)
        if callable(get) and callable(put):
            return StateAccess(get, put, f"{type(source).__qualname__}.{get_name}")
    return None


def keeps_rows_back(source: Any) -> bool:
    """Whether rows wait in a buffer which the source's state leaves out, so that they would be lost with a resume from that state.

    So it is with the shuffle buffer of a Hugging Face stream, also where that is inside another one, or inside a torch DataLoader.
    """
    seen: set[int] = set()
    left = [source]
    while left and len(seen) < MOST_OBJECTS:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        kind = cast("Any", type(one))
        if any(base.__name__ in _BUFFERS for base in kind.__mro__):
            return True
        if isinstance(one, (list, tuple)):
            left += cast("list[Any]", one)[:MOST_ELEMENTS]
        elif one is source or kind.__module__.split(".")[0] in _STREAMS:
            left += list(getattr(one, "__dict__", {}).values())
    return False


def _is_node(source: Any) -> bool:
    """Whether it is a torchdata node, which restores its state with `reset`."""
    return all(callable(getattr(source, name, None)) for name in ("__next__", "get_state", "next", "reset", "state_dict"))


def refuse_snapshot(source: Any) -> StateError:
    """The error for a state that holds a source's own state, and a source that cannot restore one."""
    return StateError(
        f"the state holds the source's own state, and a source of type {type(source).__qualname__} takes none: it has neither set_state nor "
        f"load_state_dict"
    )
