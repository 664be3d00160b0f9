"""Interval: how often a checkpoint is due: "10min", "500 steps", "1 epoch". Pure: steps, epochs and seconds are passed in."""

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

    @staticmethod
    def parse(text: str) -> Interval:
        """Read the ``every`` argument of ``Run``. Raises ``UsageError`` if it is not an interval."""
        found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-z]+)\s*", text) if isinstance(text, str) else None
        if found is None or found[2] not in _UNITS:
            raise UsageError(f"every={text!r} is not an interval. Use '10min', '500 steps' or '1 epoch'.")
        unit, factor = _UNITS[found[2]]
        amount = float(found[1]) * factor
        if unit == "seconds" and not 0 < amount < math.inf:
            raise UsageError(f"every={text!r} is not an interval: the time must be positive. Use '10min'.")
        if unit != "seconds" and (amount < 1 or amount != int(amount)):
            raise UsageError(f"every={text!r} is not an interval: {unit} are counted in whole numbers from 1. Use '1 {unit[:-1]}'.")
        return Interval(amount, unit)

    def is_due(self, step: int, epoch: int, *, ends_epoch: bool) -> bool:
        """Return whether an interval of steps or epochs ends with step ``step`` (from 1) of epoch ``epoch`` (from 0).

        The answer is the same on every worker.
        """
        if self.unit == "steps":
            return step % int(self.amount) == 0
        return self.unit == "epochs" and ends_epoch and (epoch + 1) % int(self.amount) == 0

    def has_passed(self, seconds: float) -> bool:
        """Return whether an interval of time has passed, ``seconds`` after the last checkpoint by the clock of one worker."""
        return self.unit == "seconds" and seconds >= self.amount
