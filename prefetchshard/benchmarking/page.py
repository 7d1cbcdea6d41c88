"""What a benchmark found, as one page of HTML that needs no other file, no network and no script."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from prefetchshard.plotting.markup import Plot, element, text

COLOURS = """
:root {
  color-scheme: light dark;
  --paper: #ffffff; --ink: #1b1f24; --faint: #57606a; --rule: #d0d7de; --shade: #f6f8fa;
  --reading: #2f6fb2; --transform: #9a4c93; --copying: #d9902a; --transferring: #1d8566; --ready: #93c2e8; --next: #cf4457;
  --step: #c8cdd3;
  --handing: #6f62c4; --start: #7d848c; --lock: #8a5a33; --on-dark: #ffffff; --on-light: #1b1f24; --on-ready: #1b1f24;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #0f1318; --ink: #e6e9ed; --faint: #9aa4af; --rule: #333b44; --shade: #181d23;
    --reading: #4f93da; --transform: #bd70b6; --copying: #dda04a; --transferring: #3aa684; --ready: #36617f; --next: #e8677a;
    --step: #4b535c;
    --handing: #9488e6; --start: #8f979f; --lock: #b98252; --on-dark: #0f1318; --on-light: #0f1318; --on-ready: #e6e9ed;
  }
}
"""

STYLE = """
body { margin: 0 auto; max-width: 1000px; padding: 24px 20px 48px; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 21px; line-height: 1.4; margin: 4px 0 8px; }
h2 { font-size: 17px; margin: 36px 0 4px; }
p { margin: 4px 0; }
.of, .said, .notes { color: var(--faint); overflow-wrap: anywhere; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: 20px 0 12px; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 5px 10px; text-align: right; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
th { font-weight: 600; color: var(--faint); }
.notes { padding-left: 20px; margin: 8px 0; }
.none { background: var(--shade); border: 1px dashed var(--rule); border-radius: 6px; padding: 14px 16px; margin: 10px 0; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 2px 18px; margin: 8px 0; padding: 0; font-size: 13px; }
.legend svg { width: 12px; height: 12px; margin-right: 6px; vertical-align: -1px; display: inline; }
svg { display: block; width: 100%; height: auto; font: 12px system-ui, sans-serif; }
svg text { fill: var(--ink); }
svg .small { font-size: 9px; }
svg .unit { fill: var(--faint); }
.axis { stroke: var(--faint); }
.grid { stroke: var(--rule); stroke-width: 0.6; }
.limit { stroke: var(--faint); stroke-dasharray: 5 4; }
.mark { stroke: var(--ink); stroke-width: 1; stroke-dasharray: 2 2; }
.marked { font-weight: 600; }
.reading { fill: var(--reading); } .transform { fill: var(--transform); } .copying { fill: var(--copying); }
.transferring { fill: var(--transferring); } .ready { fill: var(--ready); } .next { fill: var(--next); } .step { fill: var(--step); }
.handing { fill: var(--handing); } .start { fill: var(--start); } .lock { fill: var(--lock); } .end { fill: var(--faint); }
.lane rect { stroke: var(--paper); stroke-width: 0.5; } .lane .thin { stroke: none; }
svg text.in { fill: var(--on-dark); font-size: 10px; pointer-events: none; }
svg text.in.ready { fill: var(--on-ready); } svg text.in.copying { fill: var(--on-light); } svg text.in.step { fill: var(--ink); }
.area { fill-opacity: 0.8; stroke-width: 0.7; stroke-opacity: 0.8; }
.area.ready { stroke: var(--ready); } .area.reading { stroke: var(--reading); }
.means { fill: none; stroke: var(--ink); stroke-width: 1.4; } .average { fill: var(--ink); }
svg .over, svg .marked { paint-order: stroke; stroke: var(--paper); stroke-width: 4px; stroke-linejoin: round; }
details { margin-top: 36px; }
summary { cursor: pointer; font-weight: 600; }
pre { background: var(--shade); border: 1px solid var(--rule); border-radius: 6px; padding: 12px; overflow-x: auto;
  font: 12px/1.45 ui-monospace, monospace; }
"""

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""Whatever slipped in from a user's text could load nothing and run nothing."""


class Page(NamedTuple):
    """What is shown, in this order.

    Attributes:
        title: what was measured, in the user's words.
        verdict: one sentence.
        source: what was read, in words.
        table: the headings, then a row for each run.
        notes: sentences below the table.
        plots_of: which run the plots are of.
        plots: one after the other.
        all_of_it: the text that `print` shows.
    """

    title: str
    verdict: str
    source: str
    table: Sequence[Sequence[str]]
    notes: Sequence[str]
    plots_of: str
    plots: Sequence[Plot]
    all_of_it: str


def page_of(page: Page) -> bytes:
    """The page, as a file holds it; also well-formed XML."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", text(f"{page.title or page.source}: prefetchshard bench")),
        element("style", COLOURS + STYLE),
    )
    body = element("body", "\n", *(f"{part}\n" for part in _body(page)))
    return f"<!DOCTYPE html>\n{element('html', head, body, lang='en')}\n".encode()


def _body(page: Page) -> Iterator[str]:
    yield element("p", text(f"{page.title}: {page.source}" if page.title else page.source), class_="of")
    yield element("h1", text(page.verdict))
    yield element("div", _table(page.table), class_="wide")
    yield element("ul", *(element("li", text(note)) for note in page.notes), class_="notes")
    yield element("p", text(f"What follows is of {page.plots_of}."))
    for plot in page.plots:
        yield _section(plot)
    yield element("details", element("summary", "All figures"), element("pre", text(page.all_of_it)))


def _table(rows: Sequence[Sequence[str]]) -> str:
    head = element("thead", element("tr", *(element("th", text(cell)) for cell in rows[0])))
    body = element("tbody", *(element("tr", *(element("td", text(cell)) for cell in row)) for row in rows[1:]))
    return element("table", head, body)


def _section(plot: Plot) -> str:
    heading = element("h2", text(plot.heading))
    if not plot.svg:
        return element("section", heading, element("p", text(" ".join(plot.said)), class_="none"))
    keys = [
        element("li", element("svg", element("rect", class_=kind, width=12, height=12), viewBox="0 0 12 12"), text(meaning))
        for kind, meaning in plot.legend
    ]
    legend = [element("ul", *keys, class_="legend")] if keys else []
    return element("section", heading, *(element("p", text(said), class_="said") for said in plot.said), *legend, plot.svg)
