"""StepCommit: decides whether ``opt.step()`` may step, and commits the step when it has. Answers StepGate's questions."""

from __future__ import annotations

from lockstep.data.seeding import seed_everything
from lockstep.elastic.collective_journal import CollectiveJournal
from lockstep.elastic.worker_group import WorkerGroup
from lockstep.errors import UsageError
from lockstep.gradients.engine_state import EngineState
from lockstep.gradients.lane_engine import LaneEngine
from lockstep.observe.ledger import Ledger
from lockstep.plan.samples import PHASE, lane_seed
from lockstep.recording.recorder import Recorder
from lockstep.recording.records import BODY
from lockstep.training.progress import Progress
from lockstep.training.user_state import UserState


class StepCommit:
    """The commit of each step on this worker. ``ledger`` records the samples of each step, if the user has asked for it."""

    def __init__(
        self,
        progress: Progress,
        engine: LaneEngine,
        workers: WorkerGroup,
        journal: CollectiveJournal,
        user_state: UserState,
        ledger: Ledger | None,
        recorder: Recorder,
        seed: int,
    ) -> None:
        self._recorder = recorder
        self._progress, self._engine, self._workers, self._journal = progress, engine, workers, journal
        self._user_state, self._ledger, self._seed = user_state, ledger, seed
        self._samples: dict[int, list[int]] = {}
        self._recorded = (-1, -1)  # the step and the generation whose samples are in the ledger

    @property
    def records_samples(self) -> bool:
        return self._ledger is not None

    def start_step(self) -> None:
        self._samples = {}
        self._user_state.start_step()

    def end_lane(self) -> None:
        """The loop body of a lane that did not commit the step has ended: it must not have changed ``run.state``."""
        self._user_state.require_unchanged()

    def note_samples(self, lane: int, samples: list[int]) -> None:
        """Note which samples a lane of this step contains, for the ledger."""
        self._samples[lane] = samples

    def may_step(self, call: str) -> bool:
        """Return whether ``call`` (such as "Adam.step()") takes effect now. StepGate asks before each gated call.

        Raises:
            UsageError: ``backward()`` has not been called yet.
        """
        loop = self._progress.loop
        if loop is None:
            return True
        if loop.has_phases:
            if loop.in_phase:
                raise UsageError(
                    f"{call} was called inside the loop over the lanes of step {self._progress.step}: gradients are averaged when "
                    "that loop has ended. Move the call behind the loop over the lanes, into the loop over run.steps(...)."
                )
            return True
        if self._engine.state in (EngineState.LANE, EngineState.BACKWARD):
            raise UsageError(
                f"{call} was called before backward() in step {self._progress.step}, or backward() reached no parameter of the "
                "model: there is no gradient yet. Call backward() first."
            )
        if loop.is_last:
            self._engine.confirm()
        return loop.is_last and self._engine.state is not EngineState.DISCARDED

    def stepped(self) -> None:
        """Commit the step. StepGate calls it after an optimizer's step, or after a GradScaler has skipped one."""
        loop = self._progress.loop
        if loop is not None and not loop.committed and not loop.has_phases:
            self._user_state.require_unchanged()
            self.commit_phase()
            self.commit_step()
            self._recorder.enter(BODY)

    def commit_phase(self) -> None:
        """Every worker has the averages of the phase, or has made its step with them."""
        loop = self._progress.loop
        assert loop is not None
        loop.committed, loop.in_phase = True, False
        self._progress.commits += 1
        self._journal.reset()

    def commit_step(self) -> None:
        """All phases of the step are committed."""
        loop = self._progress.loop
        assert loop is not None
        assert loop.step is not None
        if self._ledger is not None:
            self._ledger.record_commit(self._progress.step, loop.generation)
        self._progress.commit(loop.step)

    def seed_after_averaging(self) -> None:
        """Seed all random generators. From here to the next micro-batch all workers must draw the same numbers."""
        self.seed_lane(self._engine.lanes)

    def seed_lane(self, lane: int, phase: int | None = None) -> None:
        """Seed all random generators for a lane of a phase, by default of the current one."""
        step, loop = self._progress.step, self._progress.loop
        if phase is None:
            phase = loop.phase if loop is not None else 0
        seed = lane_seed(self._seed, step, phase, PHASE) if phase else self._seed
        seed_everything(lane_seed(seed, step, lane))

    def record_samples(self) -> None:
        """Write this worker's samples to the ledger, once. Called before the first gradients of the last micro-batch are sent."""
        loop, step = self._progress.loop, self._progress.step
        if self._ledger is None or loop is None or loop.step is None or self._recorded == (step, loop.generation):
            return
        self._recorded = (step, loop.generation)  # a step may have several phases
        first, last = self._engine.my_lanes
        samples = {lane: found for lane, found in self._samples.items() if first <= lane < last}
        self._ledger.record_samples(step, loop.generation, (loop.stage, loop.step.epoch, loop.step.index), samples)
