"""BetweenSteps: what all workers do together after a committed step: exchange logged values, save, compare replicas, stop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from lockstep.elastic.recovery import Recovery
from lockstep.elastic.worker_group import WorkerGroup
from lockstep.errors import PeerError
from lockstep.gradients.control_word import CHANGE, STOP
from lockstep.gradients.lane_engine import LaneEngine
from lockstep.observe.log import Collected, LaneLog
from lockstep.observe.tracker_backlog import TrackerReport
from lockstep.observe.trackers import Trackers
from lockstep.plan.step_end import StepEnd
from lockstep.recording.recorder import Recorder
from lockstep.training.consistency import Consistency
from lockstep.training.progress import Progress
from lockstep.training.progress_reports import ProgressReports


class BetweenStepsTask(Protocol):
    """Work between two steps, such as saving a checkpoint. ``perform`` and ``done`` are called if ``is_due``."""

    phase: str
    """The phase in which the recording shows the work (recording/records.py)."""

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
        recorder: Recorder,
        exit_code: Callable[[], int],
    ) -> None:
        self._recorder = recorder
        self._tasks, self._exchange, self._recovery, self._workers = tasks, exchange, recovery, workers
        self._engine, self._progress, self._exit_code = engine, progress, exit_code

    def run(self) -> None:
        """Do what is due. All workers call it after each committed step.

        Raises:
            SystemExit: The whole run was asked to end.
        """
        self._exchange.step_committed()
        if self._exchange.is_due():
            self._exchange.done(self._recovery.together(self._exchange.perform))
        else:
            self._recovery.skip()
        for task in self._tasks:
            if task.is_due(self._step_end()):
                with self._recorder.within(task.phase):
                    task.done(self._recovery.together(lambda task=task: task.perform(self._step_end())))  # type: ignore[misc]
            else:
                self._recovery.skip()
        if any(request & STOP for request in self._step_end().requests):
            self._publish(self._exchange.collect, is_saved=True)
            self._workers.report(type="stopped", step=self._progress.step)
            raise SystemExit(self._exit_code())
        if any(request & CHANGE for request in self._step_end().requests):
            self._change_generation()

    def _change_generation(self) -> None:
        """Let the workers change. If a worker is lost meanwhile, the recovery from that is the change.

        The exchange is no collective point. After a recovery nobody repeats it: other workers may have noticed the loss at a point
        before, and have no request for a change any more.
        """
        try:
            self._exchange.share()  # a worker that leaves takes nothing along
        except PeerError as error:
            self._recovery.recover(error)
        else:
            self._recovery.change_generation()

    def _step_end(self) -> StepEnd:
        """Describe the step that was just committed. If the workers have changed since, the only request is to stop."""
        loop = self._progress.loop
        assert loop is not None
        assert loop.step is not None
        requests = self._engine.requests_of_all
        if loop.generation != self._workers.generation:
            requests = tuple(request & STOP for request in requests)
        return StepEnd(self._progress.step, self._progress.epoch, loop.step.ends_epoch, requests)

    def loop_ended(self, step: int) -> None:
        """Do what is due at the end of a loop. All workers call it."""
        self._publish(self._exchange.perform)
        for task in self._tasks:
            with self._recorder.within(task.phase):
                result = self._recovery.together(lambda task=task: task.loop_ended(step))  # type: ignore[misc]
                if result is not None:
                    task.done(result)

    def script_ended(self) -> None:
        """Publish what a loop that was left by ``break`` has left over. All workers call it."""
        if not self._exchange.is_settled:
            self._publish(self._exchange.collect, is_last=True)

    def _publish(self, collect: Callable[[], Collected], *, is_saved: bool = False, is_last: bool = False) -> None:
        """Exchange what was logged, and wait until the trackers hold it. ``is_last``: the script ends.

        ``is_saved``: the state was saved before, and this worker ends. A run that resumes exchanges the same values again, at the
        same step as a run that was not stopped: ``run.logged`` must not depend on when a run is stopped.
        """
        self._exchange.done(self._recovery.together(collect), calls_sinks=not is_saved)
        self._exchange.settled(self._recovery.together(lambda: self._exchange.settle(is_last=is_last)))


class LogExchange:
    """Exchanges logged values every ``every`` steps and at the end of each epoch, and compares the buffers of all workers."""

    def __init__(
        self,
        log: LaneLog,
        trackers: Trackers,
        consistency: Consistency,
        workers: WorkerGroup,
        progress: Progress,
        recorder: Recorder,
        every: int,
    ) -> None:
        self._log, self._trackers, self._consistency, self._recorder = log, trackers, consistency, recorder
        self._workers, self._progress, self._every = workers, progress, every
        self._reports = ProgressReports(log, workers, progress)

    @property
    def is_settled(self) -> bool:
        """Whether every step was exchanged, and rank 0's trackers hold it. The same on every worker."""
        return self._log.is_settled

    def step_committed(self) -> None:
        """Call it after each committed step, on every worker."""
        self._reports.step_committed()

    def is_due(self) -> bool:
        loop = self._progress.loop
        assert loop is not None
        assert loop.step is not None
        return self._progress.step % self._every == 0 or loop.step.ends_epoch

    def perform(self) -> Collected:
        """Return the averages of what was logged, and what rank 0's trackers hold. All workers call it."""
        self._consistency.compare_buffers(self._progress.step)
        return self.collect()

    def collect(self) -> Collected:
        """Do what ``perform`` does, but do not compare buffers: outside the loop the script may have changed them."""
        return self._log.collect(self._workers.comm, self._trackers.report())

    def share(self) -> None:
        """Give all workers what each has logged. All workers call it."""
        self._log.share(self._workers.comm)

    def done(self, collected: Collected, *, calls_sinks: bool = True) -> None:
        """Publish the averages. They may come from another worker that had completed the exchange."""
        is_main = self._workers.rank == 0
        self._log.publish(collected, is_main=is_main and calls_sinks)
        if is_main:
            self._trackers.hand_over()
        if self._workers.rank <= 1:  # two workers, because rank 0 may be killed before it has sent them
            for step, _, values in collected[0]:
                self._recorder.note_metrics(step, values)
        self._reports.send()

    def settle(self, *, is_last: bool) -> TrackerReport | None:
        """Wait for rank 0, which lets its trackers write everything: no worker leaves the loop before. All workers call it.

        If rank 0 dies meanwhile, another worker hands over what is missing (``Trackers.enter_generation``) before this is repeated.
        """
        if not self._trackers.are_configured:
            return None
        return self._log.share_report(self._workers.comm, self._trackers.settle(is_last=is_last))

    def settled(self, report: TrackerReport | None) -> None:
        """Remember what rank 0's trackers hold."""
        self._log.confirm(report)
