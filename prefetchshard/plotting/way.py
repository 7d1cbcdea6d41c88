"""The way of the last batches: a lane for each thread that read, and lanes for what came after."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from prefetchshard.measuring.timeline import STAGE_OF, STAGES, BatchTimes, Recent, Work
from prefetchshard.plotting.axes import Scale, duration, time_axis
from prefetchshard.plotting.markup import Plot, bar, drawing, element, text, words
from prefetchshard.running.thread_group import THREAD_PREFIX
from prefetchshard.telling.slices import AFTER_READING, Lane, Slice, in_order, lanes_of, slices_of

HEADING = "Timeline of the last batches"

SHOWN = 40
"""Batches, unless there is too much to draw in them."""

LEAST_SHOWN = 4

MOST_PIECES = 1800
"""Each takes some 150 bytes of the page."""

WIDTH, LEFT, RIGHT = 960, 130, 945
TOP = 6

MANY_LANES = 24
"""More of them are drawn half as high."""

LEAST_WIDTH = 0.8
"""Pixels: what is shorter is still seen."""

THIN = 3.0
"""Pixels: what is thinner has no edge, which would hide it."""

FINEST, COARSEST = 0.5, 16.0
"""Pixels: parts of one batch that are less far apart are drawn as one."""

DIGIT_WIDTH = 6.5

KINDS = {"transfer": "transferring", "ready": "ready", "next()": "next", "step": "step"}
LEGEND = (
    ("reading", "reading (the source's own code)"),
    ("transform", "transform and collate"),
    ("copying", "copying into staging memory"),
    ("transferring", "transfer"),
    ("ready", "ready on the devices, not taken yet"),
    ("next", "next(): the loop waits"),
    ("step", "step"),
)


class Piece(NamedTuple):
    """What is drawn as one bar.

    Attributes:
        kind: its class.
        began, ended: seconds since the run began.
        step: of the batch.
        hover: the text that is shown where the mouse is.
    """

    kind: str
    began: float
    ended: float
    step: int
    hover: str


class _Chosen(NamedTuple):
    """What is drawn: of how many batches, from when to when, and the bars of each lane."""

    batches: Sequence[BatchTimes]
    scale: Scale
    lanes: list[tuple[str, list[Piece]]]


def way_of(recent: Recent, *, has_step: bool) -> Plot:
    """What happened to the last batches.

    Args:
        recent: batches that were handed out.
        has_step: whether something was done with each.
    """
    if not recent.batches:
        return Plot(HEADING, ("There is nothing to draw: no batch was handed out.",))
    chosen = _choose(recent)
    is_dense = len(chosen.lanes) > MANY_LANES
    height = 11 if is_dense else 20
    bottom = TOP + height * len(chosen.lanes) + 2
    inside = time_axis(chosen.scale, bottom, TOP, "since the run began")
    for number, (name, pieces) in enumerate(chosen.lanes):
        y = TOP + height * number
        inside.append(
            words(LEFT - 8, y + height / 2 + (3 if is_dense else 4), name, text_anchor="end", class_="small" if is_dense else "name")
        )
        inside.append(element("g", *(part for piece in pieces for part in _drawn(piece, chosen.scale, y + 1, height - 2)), class_="lane"))
    used = {piece.kind for _, pieces in chosen.lanes for piece in pieces}
    first, last = chosen.batches[0].step, chosen.batches[-1].step
    said = [f"Step {first}." if first == last else f"Steps {first} to {last}."]
    if not recent.is_end:
        said[0] += " What threads did for later batches, which the loop never took, is not shown."
    if not has_step:
        said.append("No step was measured: the lane “step” is the benchmark's own loop, which does nothing with a batch.")
    svg = drawing(WIDTH, bottom + 42, "what each thread did for which batch, over time", *inside)
    return Plot(HEADING, tuple(said), svg, tuple((kind, meaning) for kind, meaning in LEGEND if kind in used))


def _choose(recent: Recent) -> _Chosen:
    """As much as can be drawn: fewer batches, and less of each, where there is a lot."""
    kept = in_order(recent.batches)
    slices = slices_of(kept, recent.began_at)
    shown, gap = SHOWN, FINEST
    while True:
        batches = kept[-shown:]
        began = kept[-shown - 1].taken_at if len(kept) > shown else min(times.began_at for times in batches)
        low, high = began - recent.began_at, batches[-1].taken_at - recent.began_at
        scale = Scale(low, max(high, low + 1e-6), LEFT, RIGHT)
        seen = [each for each in slices if each.ended * 1e-9 > low and each.began * 1e-9 < high]
        seconds = gap * (scale.high - scale.low) / (RIGHT - LEFT)
        lanes = [(_name_of(lane), pieces_of(lane, seconds)) for lane in sorted(lanes_of(seen), key=_order)]
        if sum(len(pieces) for _, pieces in lanes) <= MOST_PIECES or gap >= COARSEST:
            return _Chosen(batches, scale, lanes)
        shown, gap = max(LEAST_SHOWN, shown // 2), 2 * gap


def _name_of(lane: Lane) -> str:
    return lane.name if lane.track in AFTER_READING else lane.name.removeprefix(THREAD_PREFIX)


def _order(lane: Lane) -> tuple[int, list[tuple[int, str]]]:
    """Threads first, by their numbers; then what comes after, in its order."""
    if lane.track in AFTER_READING:
        return 1 + AFTER_READING.index(lane.track), []
    return 0, [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", lane.name)]


def pieces_of(lane: Lane, gap: float) -> list[Piece]:
    """The bars of a lane.

    Args:
        lane: its slices.
        gap: seconds: parts of one batch that are less far apart become one, its kinds of work one after the other.
    """
    if lane.track in AFTER_READING:
        return [_piece(KINDS[lane.track], each, each.name) for each in lane.slices]
    groups: list[list[Slice]] = []
    for each in lane.slices:
        if groups and groups[-1][-1].batch is each.batch and (each.began - groups[-1][-1].ended) * 1e-9 < gap:
            groups[-1].append(each)
        else:
            groups.append([each])
    return [piece for group in groups for piece in _stages(group)]


def _piece(kind: str, each: Slice, name: str) -> Piece:
    began, ended = each.began * 1e-9, each.ended * 1e-9
    return Piece(kind, began, ended, each.batch.step, f"{name} {duration(ended - began)}")


def _stages(group: Sequence[Slice]) -> Iterable[Piece]:
    """What a thread did for a batch, the kinds of work one after the other, in proportion."""
    began, ended, step = group[0].began * 1e-9, group[-1].ended * 1e-9, group[0].batch.step
    spent = dict.fromkeys(STAGES, 0)
    for each in group:
        for name, at, until, _ in each.inner:
            work: Work = name  # pyright: ignore[reportAssignmentType] - `slices_of` names them so
            spent[STAGE_OF[work]] += until - at
    total = sum(spent.values())
    if not total:
        yield _piece("step", group[0], f"step {step}: nothing measured,")
        return
    at = began
    for stage, took in spent.items():
        if took:
            until = at + (ended - began) * took / total
            yield Piece(stage, at, until, step, f"step {step}: {stage} {duration(took * 1e-9)}")
            at = until


def _drawn(piece: Piece, scale: Scale, y: float, height: float) -> list[str]:
    x = scale(piece.began)
    width = max(LEAST_WIDTH, scale(piece.ended) - x)
    found = [bar(x, y, width, height, piece.kind if width > THIN else f"{piece.kind} thin", piece.hover)]
    if height > 12 and width > DIGIT_WIDTH * len(str(piece.step)) + 4:
        found.append(
            element("text", text(piece.step), class_=f"in {piece.kind}", x=x + width / 2, y=y + height / 2 + 4, text_anchor="middle")
        )
    return found
