"""Scales, their ticks, and axes."""

from __future__ import annotations

import math
from typing import NamedTuple

from prefetchshard.plotting.markup import line, words

TICK = 4
STEPS = (1.0, 2.0, 5.0, 10.0)


class Scale(NamedTuple):
    """Where values lie in a drawing.

    Attributes:
        low: the least value, above 0 where the scale is logarithmic.
        high: the largest one; more than that.
        at_low: where the least value lies.
        at_high: where the largest one does.
        is_log: equal ratios are equally far apart.
    """

    low: float
    high: float
    at_low: float
    at_high: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        """Where a value lies; at the edge where it is outside."""
        value = min(self.high, max(self.low, value))
        if self.is_log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.at_low + share * (self.at_high - self.at_low)

    def ticks(self, about: int) -> list[float]:
        """Round values on it."""
        return self._log_ticks(about) if self.is_log else self._linear_ticks(about)

    def step(self, about: int) -> float:
        """Between ticks of a scale that is not logarithmic."""
        rough = (self.high - self.low) / about
        size = 10.0 ** math.floor(math.log10(rough))
        return next(size * step for step in STEPS if size * step >= 0.999 * rough)

    def _linear_ticks(self, about: int) -> list[float]:
        step = self.step(about)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [number * step for number in range(first, last + 1)]

    def _log_ticks(self, about: int) -> list[float]:
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        found: list[float] = []
        for steps in ((1,), (1, 3), (1, 2, 5), range(1, 10)):
            found = [value for decade in decades for step in steps if self.low <= (value := step * 10.0**decade) <= self.high]
            if len(found) >= about // 2:
                break
        return found


def duration(seconds: float) -> str:
    """Seconds in a unit that suits them."""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        if seconds * factor >= 0.9995:
            return f"{seconds * factor:.3g} {unit}" if seconds * factor < 1000 else f"{seconds * factor:,.0f} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def time_axis(scale: Scale, y: float, top: float, what: str) -> list[str]:
    """An axis below a drawing of what happened when, with a line up from each tick.

    Args:
        scale: of seconds.
        y: where it lies.
        top: of the drawing.
        what: the seconds are.
    """
    about = 8
    factor, unit = (1.0, "s") if scale.high - scale.low >= 2 else (1e3, "ms")
    decimals = max(0, -math.floor(math.log10(scale.step(about) * factor) + 1e-9))
    ticks = [(value, f"{value * factor:,.{decimals}f}") for value in scale.ticks(about)]
    return across(scale, y, top, ticks, f"{what}, {unit}")


def across(scale: Scale, y: float, top: float, ticks: list[tuple[float, str]], what: str) -> list[str]:
    """An axis below a drawing; `ticks`: values with their words."""
    found = [line(scale.at_low, y, scale.at_high, y, "axis")]
    for value, said in ticks:
        x = scale(value)
        found += [line(x, top, x, y, "grid"), line(x, y, x, y + TICK, "axis"), words(x, y + 17, said, text_anchor="middle")]
    return [*found, words((scale.at_low + scale.at_high) / 2, y + 35, what, text_anchor="middle", class_="unit")]


def up(scale: Scale, x: float, right: float, what: str) -> list[str]:
    """An axis of whole numbers at the left of a drawing, with a line across from each tick."""
    found = [line(x, scale.at_low, x, scale.at_high, "axis")]
    for value in scale.ticks(5):
        if value == round(value):
            y = scale(value)
            found += [
                line(x, y, right, y, "grid"),
                line(x - TICK, y, x, y, "axis"),
                words(x - 7, y + 4, f"{value:,.0f}", text_anchor="end"),
            ]
    middle = (scale.at_low + scale.at_high) / 2
    return [*found, words(16, middle, what, text_anchor="middle", class_="unit", transform=f"rotate(-90 16 {middle:.2f})")]
