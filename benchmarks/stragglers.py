"""Writes the results of the cases of stragglers as a table.

python -m tests.straggler_cases --out cases.json
python -m benchmarks.stragglers cases.json ["how the machine was used"]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import machine, write

CLOSE = 0.03


def table(batches: dict[str, Any]) -> str:
    cases = [case for batch in batches.values() for case in batch["cases"]]
    rows = [
        "| cause | cases | right within 20 steps | steps until it was named | price within 3 points of the rerun |",
        "|---|---|---|---|---|",
    ]
    for cause in ("loader", "compute", "stop", "link"):
        mine = [case for case in cases if case["cause"] == cause]
        if mine:
            rows.append(_row(cause, mine))
    rows.append(_row("all", cases))
    windows, alarms = quiet(batches)
    rows.append(f"\nFalse alarms: {alarms} in {windows} quiet windows of 20 steps.")
    return "\n".join(rows)


def quiet(batches: dict[str, Any]) -> tuple[int, int]:
    """How many quiet windows there were, and how many false alarms."""
    found = [batch["quiet"] for batch in batches.values()]
    return sum(each["windows"] for each in found), sum(len(each["alarms"]) for each in found)


def _row(name: str, cases: Sequence[Any]) -> str:
    right = sum(case["right"] for case in cases)
    steps = sorted(case["live"] for case in cases if case["live"] is not None)
    span = f"{steps[len(steps) // 2]} ({steps[0]} to {steps[-1]})" if steps else "-"
    priced = [case for case in cases if case["said"] is not None and case["true"] is not None]
    close = sum(abs(case["said"] - case["true"]) <= CLOSE for case in priced)
    return f"| {name} | {len(cases)} | {right} | {span} | {close} of {len(priced)} |"


def main() -> None:
    batches = json.loads(Path(sys.argv[1]).read_text())
    how = sys.argv[2] if len(sys.argv) > 2 else ""
    about: dict[str, Any] = {**machine(), **({"how": how} if how else {})}
    write("stragglers", {"machine": about, "batches": batches}, table(batches), "python -m tests.straggler_cases")


if __name__ == "__main__":
    main()
