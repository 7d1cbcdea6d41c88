"""What the loop waited for."""

from __future__ import annotations

from prefetchshard.measuring.shares import waits_of
from prefetchshard.measuring.stats import Stats
from prefetchshard.plotting.axes import Scale, across, duration
from prefetchshard.plotting.markup import Plot, bar, drawing, words

HEADING = "What the loop waited for"
WIDTH, LEFT, RIGHT = 960, 190, 800
TOP, ROW, BAR = 6, 26, 18

NOTHING = 1e-9
"""Seconds: less is what rounding leaves."""

NAMES = {
    "start-up": "start-up (the first batch)",
    "reading": "reading",
    "transform": "transform and collate",
    "copying": "copying",
    "transferring": "transfer",
    "handing over": "handing over",
    "end": "the end of the source",
}
CLASSES = {"handing over": "handing", "start-up": "start"}


def causes_of(stats: Stats) -> dict[str, float]:
    """Seconds that the loop waited, by cause; together all that it waited."""
    found = {"start-up": stats.start_up_seconds, **waits_of(stats)}
    rest = stats.stall_seconds - sum(found.values())
    if rest > 1e-6 * stats.stall_seconds + NOTHING:
        found["end"] = rest
    return found


def waits_plot(stats: Stats) -> Plot:
    """What the loop waited for, and for how long.

    Args:
        stats: of the run.
    """
    causes = causes_of(stats)
    if not stats.batches:
        return Plot(HEADING, ("There is nothing to draw: no batch was handed out.",))
    if stats.stall_seconds <= NOTHING:
        return Plot(HEADING, ("There is nothing to draw: the loop never waited.",))
    lock = stats.locking.waited_seconds
    rows = [(NAMES[cause], seconds, CLASSES.get(cause, cause)) for cause, seconds in causes.items()]
    rows.append(("the interpreter's lock *", lock, "lock"))
    scale = Scale(0.0, max(*causes.values(), lock), LEFT, RIGHT)
    bottom = TOP + ROW * len(rows)
    factor, unit = (1.0, "s") if scale.high >= 0.5 else (1e3, "ms")
    in_unit = Scale(0.0, scale.high * factor, LEFT, RIGHT)
    inside = across(in_unit, bottom, TOP, [(value, f"{value:,.6g}") for value in in_unit.ticks(6)], f"waited, {unit}")
    for number, (name, seconds, kind) in enumerate(rows):
        y = TOP + ROW * number + (ROW - BAR) / 2
        share = "" if kind == "lock" else f" ({_percent(seconds, stats.wall_seconds)})"
        said = f"{duration(seconds)}{share}" if seconds > NOTHING else "0"
        inside += [
            words(LEFT - 8, y + 13, name, text_anchor="end"),
            bar(LEFT, y, scale(seconds) - LEFT, BAR, kind, f"{name}: {said}"),
            words(scale(seconds) + 6, y + 13, said),
        ]
    waited, wall = stats.stall_seconds, stats.wall_seconds
    said = (
        f"The loop waited {duration(waited)} of {duration(wall)}, {_percent(waited, wall)} of its time. The shares beside the bars are of its time too.",
        f"* Not in that sum: waits for the lock, as the transfer thread saw them at {stats.locking.waits} of {stats.locking.looks} looks.",
    )
    return Plot(HEADING, said, drawing(WIDTH, bottom + 42, "seconds waited, by cause", *inside))


def _percent(seconds: float, wall: float) -> str:
    return f"{100 * seconds / wall if wall > 0 else 0.0:.1f} %"
