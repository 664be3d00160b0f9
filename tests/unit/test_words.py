"""The project keeps to literal names: metaphors that once named its parts do not come back."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [path for folder in ("src", "docs") for path in sorted((ROOT / folder).rglob("*")) if path.suffix in (".py", ".md")]
CLASSES = re.compile(
    r"class (Holding|Holder|Held|Whole|Duty|Moment|Acts|Crew|Session|Keeping|Shelf|Place|Sheet|Room|Running|Guard|Turns?"
    r"|Nursery|Door|Outlet|Verdict|Pass|Micro|Gates)\b"
)
WORDS = re.compile(r"\b(crew|shelf|nursery|outlet|whoever|stillborn|unborn|wishes|told whole|redealt)\b", re.I)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_metaphor_names_a_part(page: Path) -> None:
    text = page.read_text()
    assert not CLASSES.findall(text)
    assert not WORDS.findall(text)
