"""BetweenSteps: what all workers do together after a committed step: exchange logged values, save, compare replicas, stop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from lockstep.elastic.recovery import Recovery
from lockstep.elastic.worker_group import WorkerGroup
from lockstep.gradients.control_word import CHANGE, STOP
from lockstep.gradients.lane_engine import LaneEngine
from lockstep.observe.log import Averages, LaneLog
from lockstep.plan.step_end import StepEnd
from lockstep.training.consistency import Consistency
from lockstep.training.progress import Progress


class BetweenStepsTask(Protocol):
    """Work between two steps, such as saving a checkpoint. ``perform`` and ``done`` are called if ``is_due``."""

    def is_due(self, now: StepEnd) -> bool:
        """Return whether the task has work to do. Called after every step; every worker must return the same answer."""

    def perform(self, now: StepEnd) -> Any:
        """Do the work. All workers call it. If a worker is lost meanwhile, it is called again with a newer ``StepEnd``.

        Returns:
            Plain data, the same on every worker.
        """

    def done(self, result: Any) -> None:
        """Remember what ``perform`` returned. ``result`` may come from another worker that had completed the task.

        What this worker remembers must depend on ``result`` alone.
        """

    def loop_ended(self, step: int) -> Any:
        """Do what is due at the end of a loop. All workers call it. Returns plain data for ``done``, or None."""


class BetweenSteps:
    """Runs the tasks between steps. ``exit_code()`` is the exit code of a worker that was asked to end."""

    def __init__(
        self,
        tasks: Sequence[BetweenStepsTask],
        exchange: LogExchange,
        recovery: Recovery,
        workers: WorkerGroup,
        engine: LaneEngine,
        progress: Progress,
        exit_code: Callable[[], int],
    ) -> None:
        self._tasks, self._exchange, self._recovery, self._workers = tasks, exchange, recovery, workers
        self._engine, self._progress, self._exit_code = engine, progress, exit_code

    def run(self) -> None:
        """Do what is due. All workers call it after each committed step.

        Raises:
            SystemExit: The whole run was asked to end.
        """
        if self._exchange.is_due():
            self._exchange.done(self._recovery.together(self._exchange.perform))
        else:
            self._recovery.skip()
        for task in self._tasks:
            if task.is_due(self._step_end()):
                task.done(self._recovery.together(lambda task=task: task.perform(self._step_end())))  # type: ignore[misc]
            else:
                self._recovery.skip()
        now = self._step_end()
        if any(request & STOP for request in now.requests):
            self._workers.report(type="stopped", step=now.step)
            raise SystemExit(self._exit_code())
        if any(request & CHANGE for request in now.requests):
            self._recovery.together(self._exchange.share)  # a worker that leaves takes nothing along
            self._recovery.change_generation()

    def _step_end(self) -> StepEnd:
        """Describe the step that was just committed. Requests are empty if the workers have changed since."""
        loop = self._progress.loop
        assert loop is not None
        assert loop.step is not None
        requests = self._engine.requests_of_all if loop.generation == self._workers.generation else ()
        return StepEnd(self._progress.step, self._progress.epoch, loop.step.ends_epoch, requests)

    def loop_ended(self, step: int) -> None:
        """Do what is due at the end of a loop. All workers call it."""
        self._exchange.done(self._recovery.together(self._exchange.perform))
        for task in self._tasks:
            result = self._recovery.together(lambda task=task: task.loop_ended(step))  # type: ignore[misc]
            if result is not None:
                task.done(result)


class LogExchange:
    """Exchanges logged values every ``every`` steps and at the end of each epoch, and compares the buffers of all workers."""

    def __init__(self, log: LaneLog, consistency: Consistency, workers: WorkerGroup, progress: Progress, every: int) -> None:
        self._log, self._consistency, self._workers, self._progress, self._every = log, consistency, workers, progress, every

    def is_due(self) -> bool:
        loop = self._progress.loop
        assert loop is not None
        assert loop.step is not None
        return self._progress.step % self._every == 0 or loop.step.ends_epoch

    def perform(self) -> Averages:
        """Return the averages of what was logged. All workers call it."""
        self._consistency.compare_buffers(self._progress.step)
        return self._log.collect(self._workers.comm)

    def share(self) -> None:
        """Give all workers what each has logged. All workers call it."""
        self._log.share(self._workers.comm)

    def done(self, averages: Averages) -> None:
        """Publish the averages. They may come from another worker that had completed the exchange."""
        progress = self._progress
        self._log.publish(averages, is_main=self._workers.rank == 0)
        self._workers.report(
            type="progress", step=progress.step, epoch=progress.epoch, values=self._log.latest, samples=progress.samples
        )
