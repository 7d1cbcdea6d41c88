"""Sources that save and restore their own state: grain iterators, torchdata, datasets of Hugging Face, and the like."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from prefetchshard.base.codec import pack_snapshot, unpack_snapshot
from prefetchshard.base.errors import StateError

_PAIRS = (("get_state", "set_state"), ("state_dict", "load_state_dict"))


class StateAccess:
    """The two methods by which a source saves and restores its state. Called by the thread that reads the source, between two items.

    Args:
        get: returns the state, which the source may go on changing.
        put: takes such a state.
        owner: whose methods they are.
        reader: what is read once the state is in place; None: the source as always.
    """

    __slots__ = ("_get", "_lock", "_owner", "_put", "_reader", "_spoilt")

    def __init__(self, get: Callable[[], Any], put: Callable[[Any], Any], owner: str, reader: Any = None) -> None:
        self._get = get
        self._put = put
        self._owner = owner
        self._reader = reader
        self._lock = threading.Lock()  # guards _spoilt: no other iterator is made while a snapshot is taken
        self._spoilt = False

    def distrust(self) -> None:
        """Take no more snapshots: another iterator of the same source is about to be made, and the state may then be that of either."""
        with self._lock:
            self._spoilt = True

    def snapshot(self) -> bytes | None:
        """The state as it is now, packed; None where it may be that of another iterator.

        Raises:
            StateError: something in it cannot be kept; the text says where it sits.
        """
        try:
            with self._lock:
                return None if self._spoilt else pack_snapshot(self._get())
        except StateError as error:
            raise StateError(
                f"{error} (from {self._owner}). With snapshot_every=None the loader does without the source's state, and goes on by reading again"
            ) from None

    def restore(self, snapshot: bytes) -> Any:
        """Put the source where it was when the snapshot was taken. Returns the iterator to go on with; None: the one of the source."""
        self._put(unpack_snapshot(snapshot))
        return self._reader


def find_state_access(source: Any) -> StateAccess | None:
    """The two methods, where the source has both of the two."""
    node: Any = source if _is_node(source) else getattr(source, "root", None)
    if _is_node(node):
        # A torchdata.nodes.Loader begins anew when it is put where its data ended; the node inside it stays at the end, as it must here.
        return StateAccess(node.state_dict, node.reset, f"{type(source).__qualname__}.state_dict", node)
    for get_name, put_name in _PAIRS:
        get, put = getattr(source, get_name, None), getattr(source, put_name, None)
        if callable(get) and callable(put):
            return StateAccess(get, put, f"{type(source).__qualname__}.{get_name}")
    return None


def _is_node(source: Any) -> bool:
    """Whether it is a node of torchdata, which takes its state with `reset`."""
    return all(callable(getattr(source, name, None)) for name in ("__next__", "get_state", "next", "reset", "state_dict"))


def refuse_snapshot(source: Any) -> StateError:
    """The error where a state holds a source's own state, and this source takes none."""
    return StateError(
        f"the state holds the source's own state, and a source of type {type(source).__qualname__} takes none: it has neither set_state nor "
        f"load_state_dict"
    )
