"""Schedule: when the next checkpoint of a run is due. Knows nothing of how a checkpoint is written."""

from __future__ import annotations

import time

from lockstep.gradients.control_word import SAVE, STOP
from lockstep.plan.interval import Interval
from lockstep.plan.step_end import StepEnd


class Schedule:
    """A checkpoint is due after each interval, on ``run.save()``, before the run stops, and after a checkpoint was abandoned."""

    def __init__(self, interval: Interval) -> None:
        self._interval = interval
        self._begun_at_s = time.monotonic()
        self.last_step = -1
        """The step of the last checkpoint, begun or resumed from; -1 if there is none, or if it failed or was abandoned."""
        self.is_requested = False
        """Whether a checkpoint was requested for the end of this step, on every worker alike."""
        self._must_repeat = False
        """Whether a checkpoint was abandoned, and none was begun since."""

    def is_due(self, now: StepEnd) -> bool:
        """Return whether a checkpoint is due at the end of this step: the same answer on every worker."""
        if self.is_requested or self._interval.is_due(now.step, now.epoch, ends_epoch=now.ends_epoch):
            return True
        return self.last_step != now.step and any(request & (SAVE | STOP) for request in now.requests)

    def wants_save(self, rank: int) -> bool:
        """Return whether this worker must send SAVE: intervals of time are measured by the clock of rank 0."""
        return self._must_repeat or (rank == 0 and self._interval.has_passed(time.monotonic() - self._begun_at_s))

    def begun(self, step: int) -> None:
        """A checkpoint of ``step`` was begun."""
        self._begun_at_s = time.monotonic()
        self.last_step, self._must_repeat = step, False

    def failed(self) -> None:
        """The checkpoint could not be written."""
        self.last_step = -1

    def abandoned(self) -> None:
        """The checkpoint was abandoned because the workers changed: another one is due as soon as possible."""
        self.last_step, self._must_repeat = -1, True
