"""Elements of HTML and SVG as text. The result is also well-formed XML."""

from __future__ import annotations

import html
import re
from typing import NamedTuple

NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Control characters and lone surrogates: no document may hold them, however they are written."""


class Plot(NamedTuple):
    """What a page shows under one heading.

    Attributes:
        heading: its words.
        said: sentences below it; where there is nothing to draw, they say why.
        svg: the drawing; empty where there is none.
        legend: the class of each colour in it, and what that stands for.
    """

    heading: str
    said: tuple[str, ...]
    svg: str = ""
    legend: tuple[tuple[str, str], ...] = ()


def text(value: object) -> str:
    """What a user may have written, as text that cannot be anything else."""
    return html.escape(NOT_IN_XML.sub("\ufffd", str(value)))


def element(tag: str, *inside: str, **attributes: str | float) -> str:
    """An element.

    Args:
        tag: its name.
        inside: markup; what a user wrote went through `text`.
        attributes: a trailing underscore is dropped, others become hyphens; values are escaped.
    """
    written = "".join(f' {name.rstrip("_").replace("_", "-")}="{_value(value)}"' for name, value in attributes.items())
    content = "".join(inside)
    return f"<{tag}{written}>{content}</{tag}>" if content else f"<{tag}{written}/>"


def drawing(width: float, height: float, label: str, *inside: str) -> str:
    """An SVG that is as wide as there is room; `label`: for those who do not see it."""
    return element("svg", *inside, viewBox=f"0 0 {_value(width)} {_value(height)}", role="img", aria_label=label)


def bar(x: float, y: float, width: float, height: float, kind: str, hover: str) -> str:
    """A filled rectangle with a text that is shown where the mouse is."""
    return element("rect", element("title", text(hover)), class_=kind, x=x, y=y, width=width, height=height)


def words(x: float, y: float, said: object, **attributes: str | float) -> str:
    """A text in a drawing."""
    return element("text", text(said), x=x, y=y, **attributes)


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    """A straight line."""
    return element("line", class_=kind, x1=x1, y1=y1, x2=x2, y2=y2)


def _value(value: str | float) -> str:
    return text(value) if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")
