"""The goals, and whether results meet them. Pure: rows of results in, goals out.

A ratio is compared as it is printed, with two decimals. A figure that is missing is neither a goal met nor one missed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

EAGER = (("Lockstep DDP", "torch DDP", "bare"), ("Lockstep Run", "torch DDP, deterministic", "bare, deterministic"))
CAPTURED, CAPTURED_FLOOR, CAPTURED_TORCH = "Lockstep Run captured", "bare captured, deterministic", "torch DDP, deterministic"
Row = dict[str, Any]


@dataclass(frozen=True)
class Goal:
    """One comparison. ``measured`` is None if a figure is missing."""

    what: str
    case: str
    ranks: int
    measured: float | None
    limit: float
    at_most: bool = True
    unit: str = ""

    @property
    def is_met(self) -> bool | None:
        if self.measured is None:
            return None
        measured, limit = float(self._text(self.measured)), float(self._text(self.limit))
        return measured <= limit if self.at_most else measured >= limit

    @property
    def limit_text(self) -> str:
        return f"{'at most' if self.at_most else 'at least'} {self._text(self.limit)}{self.unit}"

    @property
    def measured_text(self) -> str:
        return "not measured" if self.measured is None else self._text(self.measured) + self.unit

    def _text(self, value: float) -> str:
        return f"{value:.0f}" if self.unit else f"{value:.2f}"


def goals(rows: Sequence[Row]) -> list[Goal]:
    """All goals for these rows. What only holds without an exchange of gradients is asked of one rank alone."""
    return [goal for row in rows for goal in _of(row)]


def _of(row: Row) -> Iterator[Goal]:
    case, ranks = row["case"], row["ranks"]
    for ours, torch_ddp, bare in EAGER:
        yield Goal(f"{ours} / {torch_ddp}", case, ranks, ratio(row, ours, torch_ddp), 1.0)
        if row["large"] and ranks == 1:
            yield Goal(f"{ours} / {bare}", case, ranks, ratio(row, ours, bare), 1.01)
    if ranks == 1:
        yield Goal(f"{CAPTURED} / {CAPTURED_FLOOR}", case, ranks, ratio(row, CAPTURED, CAPTURED_FLOOR), 1.05)
        if row["launch_bound"]:
            yield Goal(f"{CAPTURED_TORCH} / {CAPTURED}", case, ranks, ratio(row, CAPTURED_TORCH, CAPTURED), 4.0, at_most=False)
    for ours, torch_ddp, _ in (*EAGER, (CAPTURED, CAPTURED_TORCH, "")):
        peak, limit = figure(row, ours, "peak_mb"), figure(row, torch_ddp, "peak_mb")
        if limit is not None:
            yield Goal(f"peak memory of {ours}, {torch_ddp} being the limit", case, ranks, peak, limit, unit=" MB")


def figure(row: Row, variant: str, name: str) -> float | None:
    """One figure of one variant, or None."""
    value = row["variants"].get(variant, {}).get(name)
    return None if value is None else float(value)


def ratio(row: Row, variant: str, base: str) -> float | None:
    """The time of a variant by the time of another one."""
    above, below = figure(row, variant, "ms"), figure(row, base, "ms")
    return None if above is None or below is None else above / below


def summary(found: Sequence[Goal]) -> str:
    """One sentence."""
    met, missed = (sum(goal.is_met is value for goal in found) for value in (True, False))
    left = len(found) - met - missed
    return f"Of the {len(found)} goals for what was run, {met} are met, {missed} are missed, {left} could not be measured."
