"""Says that a run which was started again after its end had nothing left to do. The end of the script shows that, or ``close``."""

from __future__ import annotations

import atexit
import sys

from lockstep.elastic.worker_group import WorkerGroup
from lockstep.observe.notice import print_notice
from lockstep.training.progress import Progress


class FinishedRunNotice:
    """Printed once, on rank 0, if the script has passed its loops without a step since the run was resumed."""

    def __init__(self, progress: Progress, workers: WorkerGroup) -> None:
        self._progress, self._workers = progress, workers
        self._resumed_at: int | None = None

    def resumed(self, step: int) -> None:
        """The run was resumed at ``step``. A script need not call ``run.close()``: then the end of the process shows its end."""
        self._resumed_at = step
        atexit.register(self._at_exit)

    def close(self) -> None:
        """The script has reached ``run.close()``, or the end of ``with lockstep.Run(...)``, perhaps by an exception."""
        atexit.unregister(self._at_exit)
        progress, resumed_at, self._resumed_at = self._progress, self._resumed_at, None
        has_passed_loops = progress.loops_reached > 0 and progress.loop is None
        if resumed_at == progress.step and has_passed_loops and sys.exc_info()[0] is None and self._workers.rank == 0:
            print_notice(
                f"there was nothing left to do: this run had ended when it was resumed, after {resumed_at} steps. To continue it, "
                'give it more epochs. To begin anew, pass resume="never" or another folder as checkpoint=... to Run.'
            )

    def _at_exit(self) -> None:
        if getattr(sys, "last_value", None) is None:  # else an exception has ended the script
            self.close()
