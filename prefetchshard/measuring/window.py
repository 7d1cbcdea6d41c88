"""Statistics of the last seconds of a run: looks at it are kept, and the difference to one of them is what happened since."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

from prefetchshard.base.errors import ConfigError
from prefetchshard.measuring.stats import Stats

EVERY_SECONDS = 1.0
"""A look takes some 0.1 ms, so that looks cost a loop 0.01 % of its time."""

MOST_LOOKS = 64
"""Each holds the buckets of six distributions: some 20 KB."""

MOST_SECONDS = 600.0
"""With so many looks, those of ten minutes are 1 s apart at the age of 10 s, 4 s at that of a minute, and a minute at the end."""

_log = logging.getLogger(__name__)


class Look(NamedTuple):
    """What a run had done.

    Attributes:
        at: when; seconds of the run's clock.
        stats: until then.
    """

    at: float
    stats: Stats


class Window:
    """Keeps looks at a run: one a second of the last ones, fewer of those before.

    Args:
        now: seconds of the run's clock.

    Attributes:
        due_at: when `look` is to be called next, in seconds of that clock.

    Thread safety: every method from any thread, also in a signal handler.
    """

    def __init__(self, now: float) -> None:
        self.due_at = now + EVERY_SECONDS
        # The oldest first. A new tuple each time, so that no lock is needed, for which a signal handler could wait for ever
        self._looks: tuple[Look, ...] = ()

    def look(self, now: float, stats: Callable[[], Stats]) -> None:
        """Keep a look, where one is due. `stats`: of the run. Never raises, but for Ctrl-C."""
        looks = self._looks  # first: of two threads at once one look is lost, but their order never
        if now < self.due_at:
            return
        self.due_at = now + EVERY_SECONDS  # first: who comes meanwhile goes on
        try:
            self._looks = kept((*looks, Look(now, stats())), now)
        except Exception:  # noqa: BLE001 - a loop must not end for its statistics
            _log.debug("no look at the run was kept", exc_info=True)

    def since(self, stats: Stats, now: float, seconds: float) -> Stats:
        """Of `stats`, which are those of now, what happened after the last look that is so many seconds old; without such a look, all."""
        for look in reversed(self._looks):
            if now - look.at >= seconds:
                return stats - look.stats
        return stats


def check_seconds(seconds: float) -> float:
    """The number itself.

    Raises:
        ConfigError: no window is so short, or so long.
    """
    if not 0 < seconds <= MOST_SECONDS:
        raise ConfigError(
            f"last_seconds must be above 0 and at most {MOST_SECONDS:.0f} (got {seconds!r}): looks that are older are not kept"
        )
    return seconds


def kept(looks: tuple[Look, ...], now: float) -> tuple[Look, ...]:
    """Those looks that stay: at most `MOST_LOOKS`, their distances in proportion to their ages."""
    first = 0
    while first + 1 < len(looks) and now - looks[first + 1].at >= MOST_SECONDS:
        first += 1
    looks = looks[first:]
    while len(looks) > MOST_LOOKS:
        least = min(range(1, len(looks) - 1), key=lambda i: (looks[i + 1].at - looks[i - 1].at) / max(now - looks[i].at, EVERY_SECONDS))
        looks = (*looks[:least], *looks[least + 1 :])
    return looks
