"""When a checkpoint is due: "10min", "500 steps", "1 epoch". Pure: steps, epochs and seconds are passed in."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from lockstep.errors import UsageError

_UNITS: dict[str, tuple[Literal["seconds", "steps", "epochs"], float]] = {
    **dict.fromkeys(("s", "sec", "second", "seconds"), ("seconds", 1.0)),
    **dict.fromkeys(("min", "minute", "minutes"), ("seconds", 60.0)),
    **dict.fromkeys(("h", "hour", "hours"), ("seconds", 3600.0)),
    **dict.fromkeys(("step", "steps"), ("steps", 1.0)),
    **dict.fromkeys(("epoch", "epochs"), ("epochs", 1.0)),
}


@dataclass(frozen=True)
class Interval:
    """Every ``amount`` of ``unit``."""

    amount: float
    unit: Literal["seconds", "steps", "epochs"]

    def is_due(self, step: int, epoch: int, *, ends_epoch: bool) -> bool:
        """After step number ``step`` (from 1), in epoch ``epoch`` (from 0): a fact of the run, the same on every worker."""
        if self.unit == "steps":
            return step % int(self.amount) == 0
        return self.unit == "epochs" and ends_epoch and (epoch + 1) % int(self.amount) == 0

    def is_late(self, seconds: float) -> bool:
        """So long after the last one: a fact of one worker's clock."""
        return self.unit == "seconds" and seconds >= self.amount


def parse(text: str) -> Interval:
    """``UsageError`` for what is no cadence."""
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-z]+)\s*", text) if isinstance(text, str) else None
    if found is None or found[2] not in _UNITS:
        raise UsageError(f'every={text!r} says no rhythm of checkpoints. Write "10min", "500 steps" or "1 epoch".')
    unit, factor = _UNITS[found[2]]
    amount = float(found[1]) * factor
    if amount <= 0 or not math.isfinite(amount) or (unit != "seconds" and amount != int(amount)):
        raise UsageError(f'every={text!r} is no rhythm: a whole number of {unit}, 1 or more, is. Write "10min" or "500 steps".')
    return Interval(amount, unit)
