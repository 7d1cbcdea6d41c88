"""Iterables, iterators, generators and factories: sources that one thread pulls item by item."""

from __future__ import annotations

import enum
import functools
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any, Final, Literal, Protocol, TypeAlias, cast

from prefetchshard.base.errors import ConfigError, PrefetchWarning, SourceError, UsedUpError
from prefetchshard.base.signatures import is_async, misfit, takes_parameter
from prefetchshard.sources.epochs import Wrapper, set_epoch
from prefetchshard.sources.stateful import StateAccess, find_state_access, keeps_rows_back, refuse_snapshot


class _End(enum.Enum):
    END = "END"


END: Final = _End.END
EndType: TypeAlias = Literal[_End.END]


class OpenSource(Protocol):
    """An iteration over one epoch. The source's thread calls `pull` and `close`."""

    def pull(self, most: int = 1) -> Any | EndType:
        """The next item, or END.

        Args:
            most: how many items may be taken from the source by now, this one included. Only a source in an event loop takes more than one.
        """
        ...

    @property
    def interrupt(self) -> Callable[[], None] | None:
        """Cancels: makes a blocked `pull` return. Never blocks; any thread may call it. None: nothing does that."""
        ...

    def close(self) -> None:
        """Release the source."""
        ...

    @property
    def closable_from_outside(self) -> bool:
        """Whether `close` may be called while another thread is inside `pull`."""
        ...

    @property
    def access(self) -> StateAccess | None:
        """Saves and restores the source's own state; None if it has none."""
        ...


class Stream(Protocol):
    """A source that is pulled item by item.

    Attributes:
        kind: its name in reports and errors.
        one_shot: it can be read only once.
        is_numbered, is_memory, stays_on_devices, shares_items: as in `Arrays`; False for every stream.
        length: items per epoch, if known.
    """

    kind: str
    one_shot: bool
    is_numbered: Literal[False]
    is_memory: Literal[False]
    stays_on_devices: bool
    shares_items: Literal[False]

    @property
    def length(self) -> int | None: ...

    def open(self, epoch: int, loop: Any, snapshot: bytes | None = None) -> OpenSource:
        """Begin to iterate over an epoch. The source's thread calls this.

        Args:
            epoch: its number.
            loop: the run's `Loops`, for async sources.
            snapshot: a state of the source, taken in that epoch, to resume from.

        Raises:
            StateError: `snapshot` is given, and the source cannot restore a state.
        """
        ...


class OpenIterator:
    """An iteration over an iterator.

    Attributes:
        again: the source returned this same iterator the last time. If it is exhausted now, that is an error, not an empty epoch.
        access: saves and restores the state of the iterator or of its iterable; None if neither has one.
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
        self._ours = ours  # we opened it, or the user passed it to be consumed: we close it

    def pull(self, most: int = 1) -> Any | EndType:
        del most
        try:
            item = self._next()
        except StopIteration:
            if self.again:
                raise UsedUpError(
                    f"the source returned the same {type(self._iterator).__qualname__} as the last time, which is exhausted: its __iter__ or "
                    f"factory must make a new iterator each time"
                ) from None
            return END
        self.again = False
        return item

    @property
    def interrupt(self) -> None:
        """Nothing makes `__next__` return."""

    @property
    def closable_from_outside(self) -> bool:
        """Not for a generator: it cannot be closed while it runs, and its clean-up must run in its own thread."""
        return self._ours and not isinstance(self._iterator, types.GeneratorType) and callable(getattr(self._iterator, "close", None))

    def close(self) -> None:
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()
        close = getattr(self._iterator, "close", None)
        if self._ours and callable(close):
            close()


class _Last:
    """Remembers the last iterator of a source, by weak reference if its type allows one."""

    def __init__(self) -> None:
        self._get: Callable[[], Any] = lambda: None

    def is_again(self, iterator: Any) -> bool:
        """Whether this iterator was the last one. Remembers it."""
        again = self._get() is iterator
        try:
            self._get = weakref.ref(iterator)
        except TypeError:
            self._get = lambda: iterator
        return again


class PulledSource:
    """The attributes that all streams share."""

    is_numbered: Literal[False] = False
    is_memory: Literal[False] = False
    stays_on_devices: bool = False
    shares_items: Literal[False] = False


class IterableStream(PulledSource):
    """A stream over an object with `__iter__` (called once per epoch) or `__next__` (one-shot), with or without a state of its own."""

    def __init__(self, iterable: Any) -> None:
        self.kind = "iterator" if find_state_access(iterable) is None else "stateful iterator"
        self.one_shot = hasattr(iterable, "__next__")
        self._iterable = iterable
        self._last = _Last()
        self._accesses: list[StateAccess] = []  # of all open iterators; `append` and `remove` are atomic

    @property
    def length(self) -> int | None:
        return length_of(self._iterable)

    def open(self, epoch: int, loop: Any, snapshot: bytes | None = None) -> OpenSource:
        del epoch, loop
        access = find_state_access(self._iterable)
        iterator = None
        if access is not None:
            self._add(access)
            if snapshot is not None:
                iterator = access.restore(snapshot)  # before `iter`: such sources read the restored state when they make an iterator
            if keeps_rows_back(self._iterable):
                _leave_out(access, snapshot)
        if iterator is None:
            iterator = self._begun(access, snapshot)
        on_close = None if access is None else functools.partial(self._accesses.remove, access)
        if access is None:
            access = find_state_access(iterator)
            if snapshot is not None:
                if access is None:
                    raise refuse_snapshot(iterator)
                access.restore(snapshot)
            if access is not None and keeps_rows_back(iterator):
                _leave_out(access, snapshot)
        return OpenIterator(iterator, ours=True, again=self._last.is_again(iterator), access=access, on_close=on_close)

    def _add(self, access: StateAccess) -> None:
        self._accesses.append(access)
        if len(self._accesses) > 1:
            for one in tuple(self._accesses):
                one.distrust()

    def _begun(self, access: StateAccess | None, snapshot: bytes | None) -> Any:
        """What `for` would read: many iterators set themselves up in `__iter__`."""
        if self.one_shot and not hasattr(self._iterable, "__iter__"):
            return self._iterable
        iterator = iter(self._iterable)
        if access is not None and snapshot is not None and iterator is self._iterable and not _only_returns_itself(iterator):
            if access.snapshot() not in (None, snapshot):
                access.restore(snapshot)  # `__iter__` has put it at its beginning
        return iterator


def _returns_itself(self: Any) -> Any:
    return self


def _only_returns_itself(iterator: Any) -> bool:
    """Whether its `__iter__` does nothing else, as most do."""
    begin: Any = getattr(cast("Any", type(iterator)), "__iter__", None)
    code: Any = getattr(begin, "__code__", None)
    return code is not None and code.co_code == _returns_itself.__code__.co_code


def _leave_out(access: StateAccess, snapshot: bytes | None) -> None:
    """Resume by reading again: the source's own state is not exact."""
    access.distrust()
    if snapshot is not None:
        warnings.warn(
            "the state holds the source's own state, saved by an older version of this library: it lacks the rows that waited in the "
            "source's shuffle buffer, so some rows of this epoch are missing now, and others come twice. States saved from now on are exact",
            PrefetchWarning,
            stacklevel=2,
        )


class FactoryStream(PulledSource):
    """A stream over a callable that returns a new source for each epoch."""

    kind = "factory"
    one_shot = False
    length = None

    def __init__(self, factory: Callable[..., Any], resolve: Callable[[Any], Stream]) -> None:
        self._factory = factory
        self._resolve = resolve
        self._takes_epoch = takes_parameter(factory, "epoch")
        if is_async(factory):
            raise ConfigError(
                f"the source, {name_of(factory)}, is an async function; make it an async generator, which yields, or a function that "
                f"returns one"
            )
        why = misfit(factory, epoch=0) if self._takes_epoch else misfit(factory)
        if why is not None:
            how = "with epoch=" if self._takes_epoch else "without arguments"
            raise ConfigError(
                f"the source, {name_of(factory)}, is called once an epoch {how}, and cannot be: {why}; pass what it makes, or a lambda or "
                f"functools.partial that calls it"
            )
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


def refuse_used_up(source: Any) -> None:
    """Refuse a generator that has ended: a loop over it would be empty, as if there were no data.

    Raises:
        UsedUpError: it has.
    """
    while isinstance(source, Wrapper):
        source = source.source
    has_ended = (isinstance(source, types.GeneratorType) and source.gi_frame is None) or (
        isinstance(source, types.AsyncGeneratorType) and source.ag_frame is None
    )
    if has_ended:
        raise UsedUpError(
            f"the source, the generator {name_of(source)}, was read to its end before, or closed: make a new one, or pass the function that "
            f"makes it, which is then called each epoch"
        )


def length_of(source: Any) -> int | None:
    """`len(source)`; None if it has none, or one that raises."""
    try:
        return len(source)
    except (TypeError, NotImplementedError, AttributeError):
        return None


def name_of(function: Any) -> str:
    return getattr(function, "__qualname__", type(function).__qualname__)
