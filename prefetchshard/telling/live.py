"""Shows what a loop depends on while it runs. A thread of its own looks at the statistics now and then; the loop pays nothing for it."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Generic, Protocol, TypeVar

from prefetchshard.base.errors import ConfigError
from prefetchshard.base.position import StartPoint
from prefetchshard.base.threads import run_uncut
from prefetchshard.measuring.stats import Stats
from prefetchshard.running.thread_group import THREAD_PREFIX
from prefetchshard.telling.shown import Screen, Shown

LAST_SECONDS = 10.0
"""What is shown is of about so many seconds."""

MOST_SECONDS = 60.0
"""Between two looks: a thread whose loop was dropped is noticed by then."""

PATIENCE_SECONDS = 2.0
"""How long the end of a display waits for its thread: a terminal that takes nothing, as after Ctrl-S, must not hold up the loop."""

_log = logging.getLogger(__name__)

T_co = TypeVar("T_co", covariant=True)


class Watched(Protocol[T_co]):
    """A loader or an iterator."""

    def __iter__(self) -> Iterator[T_co]: ...
    def stats(self, *, last_seconds: float | None = None) -> Stats: ...
    def state(self) -> StartPoint: ...


class Live(Generic[T_co]):
    """What `live` returns: a context manager, and an iterable of the batches. Thread safety: one thread at a time."""

    def __init__(self, watched: Watched[T_co], make_screen: Callable[[], Screen], seconds: float) -> None:
        self._watched = watched
        self._make_screen = make_screen
        self._seconds = seconds
        self._watcher: Watcher | None = None
        self._dropped: weakref.finalize[[], Live[T_co]] | None = None

    def __enter__(self) -> Live[T_co]:
        if self._watcher is not None:
            raise ConfigError("this display is shown already: call ps.live again for another one")
        self._watcher = watcher = Watcher(self._watched, self._make_screen(), self._seconds)
        self._dropped = weakref.finalize(self, watcher.end)
        watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        watcher, self._watcher = self._watcher, None
        if watcher is not None and self._dropped is not None:
            watcher.end()  # first: else Ctrl-C in between leaves the thread
            self._dropped.detach()
            watcher.close()

    def __iter__(self) -> Iterator[T_co]:
        batches = iter(self._watched)
        if self._watcher is not None:
            return batches
        return self._shown(batches)

    def _shown(self, batches: Iterator[T_co]) -> Iterator[T_co]:
        """The batches, shown until no more come or nobody wants any."""
        one_run: Any = batches
        with Live(one_run, self._make_screen, self._seconds):
            # `yield from` the iterator itself would close it where the loop is left; and this keeps no batch
            yield from islice(batches, None)


def live(watched: Watched[T_co], *, seconds: float = 1.0) -> Live[T_co]:
    """Show what a loop depends on while it runs: around the loop (`with`), or around the loader (`for batch in ps.live(loader)`).

    It shows the verdict on the last 10 s, the step, rates, for which share of the time the loop waited for which stage, how full the two
    queues are, and how many threads read. In a terminal that is one display, which changes, with what the loop prints above it. In a
    notebook it is one output of the cell, which changes, with what the loop prints below it. Elsewhere it is a plain line every 10 s.
    Outside notebooks it goes to the standard error stream.

    `async for` loops, and loops that Ctrl-C may interrupt without losing a batch, take `with`.

    Args:
        watched: a loader, or an iterator of one. Of a loader it shows the only live run, else the last one.
        seconds: between two looks, up to 60.

    Raises:
        ConfigError: the package `rich` is missing (the extra `live` brings it); `seconds` is not above 0, or above 60.

    Example:
        loader = ps.Loader(np.zeros((64, 3), np.float32), P("data"), batch_size=16)
        with ps.live(loader):
            for batch in loader:
                batch.sum()
    """
    if not 0 < seconds <= MOST_SECONDS:
        raise ConfigError(f"seconds must be above 0 and at most {MOST_SECONDS:.0f} (got {seconds!r})")
    try:
        from prefetchshard.telling.drawing import make_screen  # here, as it needs an extra
    except ImportError as error:
        raise ConfigError("ps.live needs the package rich: python -m pip install 'prefetchshard[live]'") from error
    return Live(watched, make_screen, seconds)


class Watcher:
    """Looks at a loader now and then, in a thread of its own, until it is told to end or the loader is gone.

    Args:
        watched: a loader or an iterator; it is not kept alive.
        screen: where to show it; it is stopped at the end.
        seconds: between two looks.

    Thread safety: `end` from any thread, in finalisers and signal handlers too; the others from one thread.
    """

    def __init__(self, watched: Watched[Any], screen: Screen, seconds: float) -> None:
        self._watched = weakref.ref(watched)
        self._screen = screen
        self._seconds = seconds
        # Held until it is to end. Not an Event: a finaliser may strike inside its methods, and would wait for itself
        self._going_on = threading.Lock()
        self._going_on.acquire()
        self.thread = threading.Thread(target=self._run, name=THREAD_PREFIX + "live", daemon=True)

    def start(self) -> None:
        """Begin. Where the screen or the thread cannot, the loop goes on without."""
        try:
            self._screen.start(self._look())  # in this thread, whose cell of a notebook it belongs to
            run_uncut(self.thread.start)
        except BaseException as error:
            self.end()
            if not self.thread.is_alive():
                self._stop()
            if not isinstance(error, Exception):
                raise
            _log.warning("no live display: %s: %s", type(error).__name__, error)

    def end(self) -> None:
        """Tell it to end. Never blocks."""
        try:
            self._going_on.release()
        except RuntimeError:  # it was told
            pass

    def close(self) -> None:
        """Tell it to end, and wait for that in bounded time."""
        self.end()
        if self.thread.is_alive():
            self.thread.join(PATIENCE_SECONDS)

    def _run(self) -> None:
        try:
            while not self._going_on.acquire(timeout=self._seconds) and self._watched() is not None:
                self._screen.show(self._look())
        except Exception:  # noqa: BLE001 - a loop must not end for its display
            _log.debug("the live display ends", exc_info=True)
        finally:
            self._stop()

    def _stop(self) -> None:
        try:
            self._screen.stop(self._look(of_all=True))
        except Exception:  # noqa: BLE001 - as above
            _log.debug("the live display could not be ended", exc_info=True)

    def _look(self, *, of_all: bool = False) -> Shown | None:
        """None: there is nothing to be seen."""
        watched = self._watched()
        if watched is None:
            return None
        try:
            stats = watched.stats(last_seconds=None if of_all else LAST_SECONDS)
            return Shown(watched.state().step, stats, "all of the run" if of_all else f"the last {LAST_SECONDS:.0f} s")
        except ConfigError:  # it has not begun; or has several runs, and nobody knows which
            return None
