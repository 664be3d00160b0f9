"""What docs/internals names exists: files, functions, the levels of imports."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.docs.code_blocks import ROOT
from tests.unit import test_imports

SOURCE = ROOT / "src" / "lockstep"
INTERNALS = ROOT / "docs" / "internals"
ARCHITECTURE = (INTERNALS / "architecture.md").read_text()
PLACE = re.compile(r"`((?:\w+/)*\w+\.py):\s+([\w.]+)`")
MOST_FILES = 12
"""On the way of a gradient in Run mode."""


def functions(path: Path) -> set[str]:
    """Functions, classes, and methods as `Class.method`."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
    return found


def walk(title: str) -> list[tuple[str, str]]:
    """The places of one walk, in order: [("training/loop.py", "TrainingLoop.start_step"), ...]."""
    section = ARCHITECTURE.split(f"## {title}\n")[1].split("\n## ")[0]
    return PLACE.findall(section)


@pytest.mark.parametrize("page", sorted(INTERNALS.glob("*.md")), ids=lambda page: page.name)
def test_every_function_that_is_named_exists(page: Path) -> None:
    for path, name in PLACE.findall(page.read_text()):
        assert (SOURCE / path).exists(), f"there is no src/lockstep/{path}"
        assert name in functions(SOURCE / path), f"src/lockstep/{path} has no {name}"


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.name)
def test_every_file_that_is_named_exists(page: Path) -> None:
    for name in re.findall(r"`((?:tests|benchmarks|examples|docs|src)/[\w./-]+\.\w+)`", page.read_text()):
        assert (ROOT / name).exists(), name
    packages = "|".join(each.name for each in SOURCE.iterdir() if each.is_dir())
    for name in re.findall(rf"`((?:{packages})/\w+\.py)", page.read_text()):
        assert (SOURCE / name).exists(), name


def test_a_gradient_passes_few_files() -> None:
    assert 5 < len({path for path, _ in walk("A gradient")}) <= MOST_FILES


@pytest.mark.parametrize("title", ["A gradient", "A sample", "A failure", "A checkpoint"])
def test_every_step_of_a_walk_names_a_place(title: str) -> None:
    section = ARCHITECTURE.split(f"## {title}\n")[1].split("\n## ")[0]
    steps = re.findall(r"^\d+\. (.*?)(?=^\d+\. |^$|\Z)", section, re.MULTILINE | re.DOTALL)
    assert len(steps) >= 5
    assert all(PLACE.search(step) for step in steps), [step for step in steps if not PLACE.search(step)]


def test_the_levels_of_imports_are_those_of_the_test() -> None:
    section = ARCHITECTURE.split("## Levels\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \| (.*?) \|", section, re.MULTILINE)
    shown = {name.strip("`/ "): int(level) for level, names in rows for name in names.split(", ")}
    assert shown == test_imports.LEVEL
