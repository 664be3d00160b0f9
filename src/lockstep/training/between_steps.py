"""BetweenStepsTask: work that all workers do together between two steps, such as saving a checkpoint."""

from __future__ import annotations

from typing import Any, Protocol

from lockstep.plan.step_end import StepEnd


class BetweenStepsTask(Protocol):
    """The training loop calls ``is_due`` after every step, and ``perform`` and ``done`` if the task is due."""

    def is_due(self, now: StepEnd) -> bool:
        """Return whether the task has work to do. Every worker must return the same answer."""

    def perform(self, now: StepEnd) -> Any:
        """Do the work. All workers call it. If a worker is lost meanwhile, it is called again with a newer ``StepEnd``.

        Returns:
            Plain data, the same on every worker.
        """

    def done(self, result: Any) -> None:
        """Remember what ``perform`` returned. ``result`` may come from another worker that had completed the task.

        What this worker remembers must depend on ``result`` alone.
        """

    def loop_ended(self, step: int) -> None:
        """Called by all workers at the end of a loop over the data."""
