"""The figures of the docs and of the README are those in benchmarks/results/."""

from __future__ import annotations

import re

from benchmarks import figures


def test_the_page_of_figures_is_what_the_results_say() -> None:
    made = figures.page()
    assert figures.PAGE.read_text() == made, "run: python -m benchmarks.figures --write"


def test_the_readme_shows_six_figures_and_they_are_in_the_results() -> None:
    readme = figures.README.read_text()
    assert figures.with_table(readme) == readme, "run: python -m benchmarks.figures --write"
    rows = [line for line in figures.table().splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 6
    results = "".join(path.read_text() for path in figures.RESULTS.glob("*.md"))
    for row in rows:
        ours = row.split("|")[2]
        assert all(number in results for number in re.findall(r"\d+\.\d+", ours))


def test_the_tables_of_the_results_agree_with_their_data() -> None:
    """A few of them: the medians of the page against the raw numbers."""
    rows = figures.STEP_2.data["results"]
    for row in rows:
        for variant, times in row["variants"].items():
            assert figures.STEP_2.cell("ms (quartiles)", row["case"], variant) == f"{times['ms']:.2f}"
    for row in figures.RECOVERY_2.data["results"]:
        worst = figures.RECOVERY_2.cell("worst s", str(row["workers"]), row["launcher"])
        assert worst == f"{max(row['next_s']):.3f}"


def test_no_other_page_states_a_measured_time() -> None:
    """Figures are in one place: other pages link to it."""
    for page in (figures.ROOT / "docs").rglob("*.md"):
        if page != figures.PAGE:
            text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
            found = re.findall(r"\d+\.\d+ (?:ms|us|s|seconds)\b|\b\d\.\d+x\b", text)
            assert not found, f"{page}: {found} belongs to benchmarks/figures.py"
