"""StepEnd: what every worker knows at the end of a committed step. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepEnd:
    """The end of one committed step.

    ``requests`` holds every worker's request bits of that step, by rank (gradients/control_word.py). If the workers have changed
    since, only STOP is left of them: the other requests come again with the next step, but a worker that stops makes no more.
    """

    step: int
    epoch: int
    ends_epoch: bool
    requests: tuple[int, ...]
