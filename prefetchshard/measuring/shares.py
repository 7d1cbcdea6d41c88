"""For which share of its time a loop waited for which stage."""

from __future__ import annotations

from prefetchshard.measuring.delivered import CAUSES
from prefetchshard.measuring.stats import Stats


def waits_of(stats: Stats) -> dict[str, float]:
    """Seconds that the loop waited for each stage, but for its first batch; "reading", "transform", "copying", "transferring", "handing over"."""
    steps = stats.warm_up + stats.steady
    return {name: getattr(steps, name.replace(" ", "_")) for name in CAUSES}


def shares_of(stats: Stats) -> dict[str, float]:
    """Shares of the time of the loop, 0.0 to 1.0: "step", which is its own, then those of `waits_of`. Their sum is 1.0, or 0.0 without a step."""
    steps = stats.warm_up + stats.steady
    seconds = {"step": steps.busy, **waits_of(stats)}
    return {name: took / steps.wall if steps.wall > 0 else 0.0 for name, took in seconds.items()}
