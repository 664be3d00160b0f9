"""The built site (`make docs`) loads nothing from the network."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from tests.docs.code_blocks import ROOT

SITE = ROOT / "build" / "docs"


class Loads(HTMLParser):
    """Collects the addresses that a browser loads with a page: scripts, style sheets, pictures, fonts, frames."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in ("script", "img", "iframe", "source", "embed") and given.get("src"):
            self.found.append(str(given["src"]))
        if tag == "link" and given.get("rel") in ("stylesheet", "icon", "preload", "preconnect", "manifest"):
            self.found.append(str(given["href"]))


@pytest.mark.skipif(not SITE.exists(), reason="the site is built by `make docs`")
def test_the_site_needs_no_network() -> None:
    pages = list(SITE.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        loads = Loads()
        loads.feed(page.read_text())
        assert loads.found
        assert not [each for each in loads.found if each.startswith(("http:", "https:", "//"))], page
    for sheet in SITE.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*['\"]?(https?:)?//", sheet.read_text()), sheet
