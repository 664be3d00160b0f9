"""StepEnd: what every worker knows at the end of a committed step. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepEnd:
    """The end of one committed step.

    ``requests`` holds every worker's request bits of that step, by rank (gradients/control_word.py). It is empty if the
    workers have changed since.
    """

    step: int
    epoch: int
    ends_epoch: bool
    requests: tuple[int, ...]
