"""ProgressReports: tells the process that supervises the run how far it is, twice a second and when values are exchanged."""

from __future__ import annotations

import itertools
import time

from lockstep.elastic.worker_group import WorkerGroup
from lockstep.observe.log import LaneLog
from lockstep.training.progress import Progress
from lockstep.training.run_length import RunLength

_EVERY_S = 0.5
_MOST_VALUES = 200
"""In a report. It must fit into one packet."""


class ProgressReports:
    """Rank 0 sends the reports. The first step of each generation is reported at once: it shows how long a recovery took."""

    def __init__(self, log: LaneLog, workers: WorkerGroup, progress: Progress) -> None:
        self._log, self._workers, self._progress = log, workers, progress
        self._length = RunLength(progress)
        self._generation = -1
        self._next_at = 0.0

    def step_committed(self) -> None:
        """Call it after each committed step, on every worker."""
        self._length.note_step()
        if self._workers.link is None or self._workers.rank:
            return
        if time.monotonic() >= self._next_at or self._workers.generation != self._generation:
            self.send()

    def send(self) -> None:
        """Report the newest step, with the newest averages of what was logged."""
        progress = self._progress
        self._next_at, self._generation = time.monotonic() + _EVERY_S, self._workers.generation
        self._workers.report(
            type="progress",
            step=progress.step,
            epoch=progress.epoch,
            values=dict(itertools.islice(self._log.latest.items(), _MOST_VALUES)),
            samples=progress.samples,
            total=self._length.total,
        )
