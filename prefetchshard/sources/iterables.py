"""Iterables, iterators, generators and factories: one thread pulls."""

from __future__ import annotations

import enum
import functools
import types
import weakref
from collections.abc import Callable
from typing import Any, Final, Literal, Protocol, TypeAlias

from prefetchshard.base.errors import SourceError, UsedUpError
from prefetchshard.base.event_loop import HomeLoop
from prefetchshard.base.signatures import takes_parameter
from prefetchshard.sources.stateful import StateAccess, find_state_access, refuse_snapshot


class _End(enum.Enum):
    END = "END"


END: Final = _End.END
EndType: TypeAlias = Literal[_End.END]


class OpenSource(Protocol):
    """The items of one epoch. `pull` and `close` are called by the source's thread."""

    def pull(self) -> Any | EndType:
        """The next item, or END."""
        ...

    def interrupt(self) -> None:
        """Called from any thread once nothing more is wanted: makes a blocked `pull` return where that can be. Never blocks."""
        ...

    def close(self) -> None:
        """Let go of the source."""
        ...

    @property
    def closable_from_outside(self) -> bool:
        """Whether `close` may be called while another thread is inside `pull`."""
        ...

    @property
    def access(self) -> StateAccess | None:
        """How the source tells and takes its own state; None where it cannot."""
        ...


class Stream(Protocol):
    """A source that is pulled.

    Attributes:
        kind: the word for it in states and errors.
        one_shot: it can be read once.
        is_numbered, is_memory, stays_on_devices, shares_items: as `Arrays` says them; none is so of what is pulled.
        home: the event loop that it is pulled in, where it is bound to one.
        length: items of an epoch, where known.
    """

    kind: str
    one_shot: bool
    is_numbered: Literal[False]
    is_memory: Literal[False]
    stays_on_devices: bool
    shares_items: Literal[False]

    @property
    def home(self) -> HomeLoop | None: ...

    @property
    def length(self) -> int | None: ...

    def open(self, epoch: int, loop: Any, snapshot: bytes | None = None) -> OpenSource:
        """The items of an epoch. Called by the source's thread.

        Args:
            epoch: its number.
            loop: the run's `OwnLoop`, for async sources.
            snapshot: the source's own state, to go on from there in that epoch.

        Raises:
            StateError: the source takes no state.
        """
        ...


class OpenIterator:
    """The items of an iterator.

    Attributes:
        again: the source gave this very iterator the last time too. If it has nothing more, the data would end early, and quietly.
        access: how it, or what it was made from, tells its own state; None where it cannot.
    """

    def __init__(
        self,
        iterator: Any,
        *,
        ours: bool,
        again: bool = False,
        access: StateAccess | None = None,
        on_close: Callable[[], object] | None = None,
    ) -> None:
        self.again = again
        self.access = access
        self._on_close = on_close
        self._iterator = iterator
        self._next = iterator.__next__
        self._ours = ours  # opened by us, or given to us to be used up: ours to close

    def pull(self) -> Any | EndType:
        try:
            item = self._next()
        except StopIteration:
            if self.again:
                raise UsedUpError(
                    f"the source gave the same {type(self._iterator).__qualname__} as the last time, which is exhausted: it has to make a "
                    f"new iterator each time that it is asked for one"
                ) from None
            return END
        self.again = False
        return item

    def interrupt(self) -> None:
        pass

    @property
    def closable_from_outside(self) -> bool:
        """A generator refuses while it runs, and its clean-up belongs into its own thread."""
        return self._ours and not isinstance(self._iterator, types.GeneratorType) and callable(getattr(self._iterator, "close", None))

    def close(self) -> None:
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()
        close = getattr(self._iterator, "close", None)
        if self._ours and callable(close):
            close()


class _Last:
    """The iterator that a source gave last; not kept alive where that can be."""

    def __init__(self) -> None:
        self._get: Callable[[], Any] = lambda: None

    def is_again(self, iterator: Any) -> bool:
        """Whether it is this one. From now on it is."""
        again = self._get() is iterator
        try:
            self._get = weakref.ref(iterator)
        except TypeError:
            self._get = lambda: iterator
        return again


class PulledSource:
    """What is so of every source that is pulled."""

    is_numbered: Literal[False] = False
    is_memory: Literal[False] = False
    stays_on_devices: bool = False
    shares_items: Literal[False] = False
    home: HomeLoop | None = None


class IterableStream(PulledSource):
    """Something with `__iter__` (opened once an epoch) or `__next__` (one-shot), which may tell its own state."""

    def __init__(self, iterable: Any) -> None:
        self.kind = "iterator" if find_state_access(iterable) is None else "stateful iterator"
        self.one_shot = hasattr(iterable, "__next__")
        self._iterable = iterable
        self._last = _Last()
        self._accesses: list[StateAccess] = []  # of the iterators that are being read; `append` and `remove` need no lock

    @property
    def length(self) -> int | None:
        return length_of(self._iterable)

    def open(self, epoch: int, loop: Any, snapshot: bytes | None = None) -> OpenSource:
        del epoch, loop
        access = find_state_access(self._iterable)
        iterator = None
        if access is not None:
            self._accesses.append(access)
            if len(self._accesses) > 1:
                for one in tuple(self._accesses):
                    one.distrust()
        if access is not None and snapshot is not None:
            iterator = access.restore(snapshot)  # before the iterator is made: that is when such sources look at it
        if iterator is None:
            iterator = self._iterable if self.one_shot else iter(self._iterable)
        on_close = None if access is None else functools.partial(self._accesses.remove, access)
        if access is None:
            access = find_state_access(iterator)
            if snapshot is not None:
                if access is None:
                    raise refuse_snapshot(iterator)
                access.restore(snapshot)
        return OpenIterator(iterator, ours=True, again=self._last.is_again(iterator), access=access, on_close=on_close)


class FactoryStream(PulledSource):
    """A callable that returns a new source for each epoch."""

    kind = "factory"
    one_shot = False
    length = None

    def __init__(self, factory: Callable[..., Any], resolve: Callable[[Any], Stream]) -> None:
        self._factory = factory
        self._resolve = resolve
        self._takes_epoch = takes_parameter(factory, "epoch")
        self._last = _Last()

    def open(self, epoch: int, loop: Any, snapshot: bytes | None = None) -> OpenSource:
        made = self._factory(epoch=epoch) if self._takes_epoch else self._factory()
        if made is None:
            raise SourceError(f"the factory {name_of(self._factory)} returned None for epoch {epoch}; it must return a source")
        set_epoch(made, epoch)
        again = self._last.is_again(made)
        items = self._resolve(made).open(epoch, loop, snapshot)
        if isinstance(items, OpenIterator):
            items.again = again and hasattr(made, "__next__")
        return items


def length_of(source: Any) -> int | None:
    """`len(source)` where it has one that works."""
    try:
        return len(source)
    except (TypeError, NotImplementedError, AttributeError):
        return None


def set_epoch(source: Any, epoch: int) -> None:
    """Tell a source that wants to know which epoch comes (torch samplers, HF datasets)."""
    tell = getattr(source, "set_epoch", None)
    if callable(tell):
        tell(epoch)


def name_of(function: Any) -> str:
    return getattr(function, "__qualname__", type(function).__qualname__)
