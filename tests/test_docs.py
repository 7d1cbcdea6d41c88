"""The decision pages have one form, are all in the index, and refer to nothing that is not there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support import REPOSITORY

DECISIONS = REPOSITORY / "docs" / "decisions"
PAGES = sorted(page for page in DECISIONS.glob("*.md") if page.name != "README.md")
TEXTS = [*PAGES, DECISIONS / "README.md", *(REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_has_the_five_headings(page: Path) -> None:
    headings = re.findall(r"^## (.*)$", page.read_text(), re.MULTILINE)
    assert headings == ["Question", "Measured", "Chosen", "Turned down", "What would change it"]


def test_the_index_has_every_page_once() -> None:
    listed = re.findall(r"^\| \[[^\]]*\]\(([^)]*)\)", (DECISIONS / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == [page.name for page in PAGES]


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: str(text.relative_to(REPOSITORY)))
def test_what_a_link_points_to_is_there(text: Path) -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)", text.read_text()) if "://" not in link]
    assert not [link for link in links if not (text.parent / link).exists()]
