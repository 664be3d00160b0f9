"""Every code block of the README and of the docs runs, and shows what it prints."""

from __future__ import annotations

import re
from pathlib import Path
from unittest import SkipTest

import pytest

from tests.docs import code_blocks


@pytest.mark.parametrize("page", code_blocks.PAGES, ids=lambda page: str(page.relative_to(code_blocks.ROOT)))
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    document = code_blocks.parse(page)
    try:
        for example in document.examples():
            try:
                example.evaluate()
            except SkipTest:
                pass
    finally:
        code_blocks.close_runs(document.namespace)


def test_every_block_says_what_it_is() -> None:
    for page in code_blocks.PAGES:
        for language in code_blocks.languages(page.read_text()):
            assert language in code_blocks.LANGUAGES, f"{page}: a block of {language!r} would not be run"


def test_few_blocks_are_not_run_and_each_says_why() -> None:
    skips = [(page, *found) for page in code_blocks.PAGES for found in code_blocks.SKIP.findall(page.read_text())]
    for page, action, reason in skips:
        assert action == "next", f"{page}: skip one block at a time"
        assert len(reason.strip().strip('"')) > 10, f"{page}: say why the block is not run"
    always = [
        reason for _, _, reason in skips if not reason.strip().startswith("if(")
    ]  # the others need a package that make installs
    assert len(always) <= 5


def test_the_transcript_of_the_readme_is_the_one_that_is_run() -> None:
    pages = (code_blocks.ROOT / "README.md", code_blocks.ROOT / "docs/tutorials/worker_dies.md")
    readme, tutorial = (re.findall(r"^```console\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL) for page in pages)
    assert readme == tutorial


def test_the_readme_has_at_most_100_lines() -> None:
    assert len((code_blocks.ROOT / "README.md").read_text().splitlines()) <= 100
