"""Progress of a run, as a worker reports it, and what follows from several reports: rates, remaining time, trend. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from lockstep.recording.text import number, plural, printable

_Value = TypeVar("_Value")
_SHOWN_VALUES, _NAME_CHARS = 4, 32
_RATE_WINDOW_S = 5.0
_REMAINING_WINDOW_S = 30.0


@dataclass(frozen=True)
class Progress:
    step: int
    epoch: int | None = None
    values: Mapping[str, float] = field(default_factory=dict)
    samples_per_s: float | None = None
    workers: int = 1
    generation: int | None = None
    samples: int | None = None
    """How many samples the run has committed."""
    total: int | None = None
    """How many steps the whole run has, if this is known."""


def progress_text(progress: Progress) -> str:
    """ "step 120 of 344 (35%) | epoch 1 | loss 0.5321 | 8.1k samples/s | 4 workers | generation 2"."""
    step = f"step {progress.step}"
    if progress.total:
        step += f" of {progress.total} ({percent(progress)}%)"
    parts = [step, *([] if progress.epoch is None else [f"epoch {progress.epoch}"])]
    parts += value_texts(progress.values)
    if progress.samples_per_s is not None:
        parts.append(f"{number(progress.samples_per_s)} samples/s")
    parts.append(plural(progress.workers, "worker"))
    if progress.generation is not None:
        parts.append(f"generation {progress.generation}")
    return " | ".join(parts)


def value_texts(values: Mapping[str, float | str]) -> list[str]:
    """The most important of the logged values: "loss 0.5321", "lr 0.01", ..., "and 37 more". NaN and infinity may be texts."""
    ordered = loss_first(values)
    shown = [f"{_name(name)} {number(float(value))}" for name, value in ordered[:_SHOWN_VALUES]]
    return [*shown, f"and {len(ordered) - len(shown)} more"] if len(ordered) > len(shown) else shown


def _name(text: str) -> str:
    return printable(text if len(text) <= _NAME_CHARS else f"{text[: _NAME_CHARS - 1]}…")


def percent(progress: Progress) -> int:
    """Of the steps; 100 only at the end."""
    assert progress.total
    return min(100, 100 * progress.step // progress.total)


def loss_first(values: Mapping[str, _Value]) -> list[tuple[str, _Value]]:
    """The values in the order of their importance: the loss, what is named after a loss, then the others as they came."""
    return sorted(values.items(), key=lambda item: 0 if item[0] == "loss" else 1 if "loss" in item[0].lower() else 2)


class Pace:
    """How fast the run is, from its last reports."""

    def __init__(self) -> None:
        self._reports: deque[tuple[float, Progress]] = deque()  # (when it came, what it said)

    def add(self, progress: Progress, now: float) -> None:
        if self._reports and progress.step < self._reports[-1][1].step:
            self._reports.clear()  # another run begins in the same script, or the state was restored
        self._reports.append((now, progress))
        while len(self._reports) > 2 and self._reports[1][0] < now - _REMAINING_WINDOW_S:
            self._reports.popleft()

    @property
    def samples_per_s(self) -> float | None:
        """Over the last seconds; None before the second report."""
        known = [(at, each.samples) for at, each in self._reports if each.samples is not None]
        if len(known) < 2:
            return None
        last_at, last = known[-1]
        first_at, first = next(each for each in reversed(known[:-1]) if last_at - each[0] >= _RATE_WINDOW_S or each is known[0])
        return (last - first) / (last_at - first_at) if last > first and last_at > first_at else None

    def remaining_s(self, now: float) -> float | None:
        """How long the rest of the run takes if it goes on as in the last half minute; None if that is not known."""
        if len(self._reports) < 2:
            return None
        (first_at, first), (last_at, last) = self._reports[0], self._reports[-1]
        if not last.total or last.step <= first.step or last_at <= first_at:
            return None
        left_s = (last.total - last.step) * (last_at - first_at) / (last.step - first.step)
        return max(0.0, left_s - (now - last_at))


class Trend:
    """Whether a value rises or falls: the average of its last values is compared with that of more of them."""

    def __init__(self) -> None:
        self._fast = self._slow = self._spread = 0.0
        self._values = 0

    def add(self, value: float) -> None:
        if value != value or abs(value) == float("inf"):
            return
        self._values += 1
        weight = 1 / self._values  # a plain mean at first
        self._fast += max(0.2, weight) * (value - self._fast)
        self._slow += max(0.05, weight) * (value - self._slow)
        self._spread += max(0.1, weight) * (abs(value - self._fast) - self._spread)

    @property
    def arrow(self) -> str:
        """ "↓", "↑", or "→" if it does neither; empty while there are too few values."""
        if self._values < 10:
            return ""
        change, noise = self._fast - self._slow, 0.6 * self._spread + 1e-12 * abs(self._slow)
        return "↓" if change < -noise else "↑" if change > noise else "→"
