"""Phases: drives the user's loop over ``run.steps(...)``: steps that consist of phases.

A phase is one pass over the lanes of a step, with one set of gradients. It commits on every worker or on none:

    start_phase           begins without gradients; those of earlier phases of the step are added at its end
    start_micro_batch     sets seeds, buffers and gradients as the lane must find them
    end_micro_batch       adds the lane's gradients to the partial sums             (gradients/lane_engine.py)
    end_phase             averages, and waits until every worker has the averages   (docs/internals/commit_protocol.md)
    end_step              does what is due between two steps                        (training/between_steps.py)

If a worker is lost before every worker has the averages, all survivors run the phase again. Nothing of the user's code between two
phases, or between the last phase and the end of the step, runs twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from lockstep.comm.exchange import gather_bytes
from lockstep.comm.plain_state import from_bytes, to_bytes
from lockstep.data.seeding import preserved_randomness, seed_everything
from lockstep.data.source import MicroBatch
from lockstep.data.step_loader import StepPlan, StepRestarted
from lockstep.elastic.recovery import Recovery
from lockstep.elastic.worker_group import WorkerGroup
from lockstep.errors import UsageError
from lockstep.gradients.engine_state import EngineState
from lockstep.gradients.lane_engine import LaneEngine
from lockstep.observe.log import LaneLog
from lockstep.plan.samples import lane_seed
from lockstep.recording.recorder import Recorder
from lockstep.recording.records import BETWEEN, BODY, DATA, FORWARD, LANE
from lockstep.training.between_steps import BetweenSteps
from lockstep.training.consistency import Consistency
from lockstep.training.loop import TrainingLoop
from lockstep.training.loop_checks import require_backward_returned
from lockstep.training.progress import CurrentLoop, Progress
from lockstep.training.step_commit import StepCommit


class Phases:
    """The driver of the phases of steps (data/steps.py: ``PhaseDriver``). ``loop`` is the driver of all loops over the data."""

    def __init__(
        self,
        loop: TrainingLoop,
        progress: Progress,
        workers: WorkerGroup,
        recovery: Recovery,
        engine: LaneEngine,
        commit: StepCommit,
        consistency: Consistency,
        between_steps: BetweenSteps,
        log: LaneLog,
        recorder: Recorder,
        seed: int,
    ) -> None:
        self._recorder = recorder
        self._loop, self._progress, self._workers, self._recovery, self._engine = loop, progress, workers, recovery, engine
        self._commit, self._consistency, self._between_steps, self._log = commit, consistency, between_steps, log
        self._seed, self._overlap = seed, False

    @property
    def generation(self) -> int:
        return self._workers.generation

    @property
    def lane(self) -> int:
        loop = self._progress.loop
        if loop is None or not loop.in_phase or loop.lane < 0:
            raise UsageError("step.lane was read outside the loop over the lanes of a step. Read it in the body of that loop.")
        return loop.lane

    # -- the loop over steps -------------------------------------------------------------------

    def loop_entered(self, overlap: bool) -> None:
        self._current().has_phases = True
        self._overlap = overlap

    def steps_abandoned(self) -> None:
        """The user left the loop by ``break``: the step that was under way counts if its phases are complete."""
        loop = self._progress.loop
        if loop is not None and loop.committed and not loop.in_phase:
            self._commit_step(is_whole=False)
            self._end_step(loop)

    def start_step(self, step: StepPlan) -> None:
        loop = self._current()
        self._loop.note_step(step)
        loop.committed, loop.phase, loop.lane = False, -1, -1
        loop.generation = self._workers.generation
        self._recorder.enter(BODY)
        seed_everything(lane_seed(self._seed, self._progress.step, self._engine.lanes + 1))

    def end_step(self) -> None:
        loop = self._current()
        self._require_complete(loop)
        if loop.phase < 0:
            self._engine.forget_requests()  # they are those of an earlier step
        self._commit_step()
        self._recorder.enter(BETWEEN)
        try:
            self._between_steps.run()
        finally:  # also if the run is asked to end
            self._end_step(loop)

    def _end_step(self, loop: CurrentLoop) -> None:
        assert loop.step is not None
        samples = sum(loop.step.counts[slice(*self._recorder.lanes)])
        self._recorder.end_step(self._progress.step, self._progress.epoch, samples)

    def _commit_step(self, *, is_whole: bool = True) -> None:
        self._commit.commit_step()
        self._log.weigh_step(self._progress.step, self._engine.total_weight, is_whole=is_whole)

    # -- one phase -----------------------------------------------------------------------------

    def start_phase(self, counts: tuple[int, ...]) -> None:
        loop = self._current()
        step = loop.step
        assert step is not None
        if not loop.in_phase:  # otherwise it is repeated
            loop.phase += 1
        elif loop.lane >= 0 and self._engine.state is not EngineState.DISCARDED:
            self._require_complete(loop)
        loop.in_phase, loop.committed, loop.lane = True, False, -1
        self._recorder.enter(LANE)
        loop.generation = self._workers.generation

        def start() -> None:
            self._consistency.compare_trainable()
            position = (loop.stage, step.epoch, step.index, loop.phase)
            self._engine.start_phase(self._progress.step, counts, position, collects=True, overlap=self._overlap)

        self._loop.or_restart_step(start)
        self._recorder.enter(DATA)

    def start_micro_batch(self, lane: int, is_last: bool) -> None:
        loop = self._current()
        loop.lane, loop.is_last = lane, is_last
        self._recorder.enter(LANE)
        self._engine.start_lane(lane, is_last)
        self._commit.seed_lane(lane)
        self._recorder.enter(FORWARD)

    def end_micro_batch(self) -> None:
        loop = self._current()
        self._commit.end_lane()
        require_backward_returned(loop, self._progress.step, self._engine.state)
        weight = self._engine.weight_of(loop.lane)  # what was logged counts, also if there is no backward
        self._recorder.enter(LANE)
        self._engine.end_lane()
        self._restart_if_discarded()
        self._log.weigh(weight)
        self._recorder.enter(DATA)

    def end_phase(self) -> None:
        self._engine.average()
        self._restart_if_discarded()
        self._engine.confirm()
        self._restart_if_discarded()
        self._commit.commit_phase()

    def _restart_if_discarded(self) -> None:
        if self._engine.state is EngineState.DISCARDED:
            self._log.discard_step(self._progress.step + 1, self._current().phase)
            raise StepRestarted

    def _require_complete(self, loop: CurrentLoop) -> None:
        if loop.in_phase:
            raise UsageError(
                f"the loop over the lanes of step {self._progress.step} was left before its end: its gradients are not averaged, "
                "and how many lanes are missing depends on the number of workers. Let the loop run to its end: no `break`, and "
                "`for batch in step:` instead of next(iter(step))."
            )

    def _current(self) -> CurrentLoop:
        assert self._progress.loop is not None
        return self._progress.loop

    # -- values of all lanes -------------------------------------------------------------------

    def means(self) -> dict[str, float]:
        self._loop.require_collective("step.means", "")
        step, phase = self._progress.step + 1, self._current().phase
        with self._recorder.waiting():
            return self._recovery.together(lambda: self._log.means(self._workers.comm, step, phase))

    def gather_lanes(self, fn: Callable[[Any], Any], micro_batches: Callable[[], Iterator[MicroBatch]]) -> list[Any]:
        self._loop.require_collective("step.gather(...)", "")
        phase = self._current().phase + 1  # the next phase draws the same random numbers

        def collect() -> dict[int, Any]:
            mine = {}
            with preserved_randomness(), self._engine.untouched_buffers(), torch.no_grad(), self._loop.raising_peer_errors():
                for micro_batch in micro_batches():
                    if micro_batch.count:
                        self._commit.seed_lane(micro_batch.lane, phase)
                        mine[micro_batch.lane] = fn(micro_batch.batch)
            skeleton, content = to_bytes(mine, "what step.gather collects")
            with self._recorder.waiting():
                skeletons = gather_bytes(self._workers.comm, skeleton.encode(), "the outline of what step.gather collects")
                contents = gather_bytes(self._workers.comm, content, "what step.gather collects")
            found = [from_bytes(text.decode(), each) for text, each in zip(skeletons, contents, strict=True)]
            return {lane: value for lanes in found for lane, value in lanes.items()}

        found = self._recovery.together(collect)
        return [_move(found[lane], self._engine.params[0].device) for lane in sorted(found)]


def _move(value: Any, device: torch.device) -> Any:
    """Move the tensors in plain data to a device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _move(each, device) for key, each in value.items()}
    return type(value)(_move(each, device) for each in value) if isinstance(value, (list, tuple)) else value
