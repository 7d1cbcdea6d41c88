"""A line in the log for each minute of a run: what the loop's speed depended on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from prefetchshard.measuring.stats import Stats

EVERY_SECONDS = 60.0

_log = logging.getLogger("prefetchshard")


class MinuteLine:
    """Says what the loop's speed depended on since it last said so, at level INFO.

    Args:
        stats: of the run.
        now: seconds of the run's clock.

    Attributes:
        due_at: when `tell` is to be called next, in seconds of that clock.

    Thread safety: every method from any thread that holds no lock. Of two at once one says it.
    """

    def __init__(self, stats: Callable[[], Stats], now: float) -> None:
        self.due_at = now + EVERY_SECONDS
        self._stats = stats
        self._last: Stats | None = None
        self._lock = threading.Lock()  # held by the thread that tells; nobody waits for it

    def tell(self, now: float) -> None:
        """Say it, where it is due. Never raises, but for Ctrl-C."""
        if now < self.due_at or not self._lock.acquire(blocking=False):
            return
        try:
            if now >= self.due_at:  # still: another one may have told meanwhile
                self.due_at = now + EVERY_SECONDS
                if _log.isEnabledFor(logging.INFO) and (text := self._text()):
                    _log.info("%s", text)
        except Exception:  # noqa: BLE001 - a loop must not end for a line in its log
            _log.debug("no line for this minute", exc_info=True)
        finally:
            self._lock.release()

    def _text(self) -> str:
        stats, last = self._stats(), self._last
        lately = stats if last is None else stats - last
        if not lately.batches:
            return ""
        self._last = stats
        return f"{lately.batches} batches in {lately.wall_seconds:.0f} s, {lately.rows_per_second:,.0f} rows/s. {lately.verdict}"
