"""TrainingLoop: drives the user's loop over ``run.shard(...)``, one micro-batch at a time.

The shard calls these methods in each iteration of the user's loop (one lane of one step):

    start_micro_batch   sets seeds, buffers and gradients as the lane must find them
    backward()          takes the lane's gradients; in the last micro-batch, averages them     (gradients/lane_engine.py)
    opt.step()          does nothing until the last micro-batch; then it commits the step      (training/step_commit.py)
    end_micro_batch     reports what the loop body forgot; does what is due between two steps  (training/between_steps.py)
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from lockstep.comm.exchange import gather_bytes
from lockstep.data.seeding import seed_everything
from lockstep.data.step_loader import StepPlan, StepRestarted
from lockstep.elastic.recovery import Recovery
from lockstep.elastic.worker_group import WorkerGroup
from lockstep.errors import PeerError, UsageError
from lockstep.gradients.engine_state import EngineState
from lockstep.gradients.lane_engine import LaneEngine
from lockstep.observe.log import LaneLog
from lockstep.plan.samples import MODEL, sample_seed
from lockstep.recording.recorder import Recorder
from lockstep.recording.records import BETWEEN, DATA, FORWARD, LANE
from lockstep.training.between_steps import BetweenSteps
from lockstep.training.consistency import Consistency
from lockstep.training.loop_checks import require_complete, require_same_data, step_calls
from lockstep.training.progress import CurrentLoop, Progress
from lockstep.training.script_replay import LoopEntry, ScriptReplay
from lockstep.training.step_commit import StepCommit
from lockstep.training.step_gate import StepGate

T = TypeVar("T")


class TrainingLoop:
    """The driver of shards (data/shard.py: ``ShardDriver``)."""

    def __init__(
        self,
        progress: Progress,
        workers: WorkerGroup,
        recovery: Recovery,
        replay: ScriptReplay,
        engine: LaneEngine,
        commit: StepCommit,
        gate: StepGate,
        consistency: Consistency,
        between_steps: BetweenSteps,
        log: LaneLog,
        recorder: Recorder,
        seed: int,
    ) -> None:
        self._recorder = recorder
        self._progress, self._workers, self._recovery, self._replay, self._engine = progress, workers, recovery, replay, engine
        self._commit, self._gate, self._consistency, self._between_steps = commit, gate, consistency, between_steps
        self._log, self._seed = log, seed
        self._abandoned: int | None = None  # the step in which the user left a loop, until a warning says so
        self._closed = self._raises_peer_errors = False

    # -- what the shard reads ----------------------------------------------------------------

    @property
    def lanes_here(self) -> tuple[int, int]:
        return self._engine.my_lanes

    @property
    def position(self) -> tuple[int, int]:
        return self._progress.position

    @property
    def next_loop_position(self) -> tuple[int, int] | None:
        return self._replay.next_loop_position()

    @property
    def records_samples(self) -> bool:
        return self._commit.records_samples

    def note_samples(self, lane: int, samples: list[int]) -> None:
        self._commit.note_samples(lane, samples)

    # -- a loop ------------------------------------------------------------------------------

    def enter_loop(self, settings: Mapping[str, Any]) -> int | None:
        """Begin a loop. Returns its stage, or None if the run has passed this loop already."""
        self.require_open()
        progress = self._progress
        if progress.loop is not None:
            raise UsageError(
                "a loop over run.shard(...) inside another one (or an iterator of one that is still referenced): a step belongs to "
                "one loop. End the other loop first (del the iterator), or use run.evaluate."
            )
        stage, progress.loops_reached = progress.loops_reached, progress.loops_reached + 1
        entry = self._replay.enter_loop(stage)
        if entry is LoopEntry.SKIP:
            self._seed_after(stage)
            return None
        if entry in (LoopEntry.RESUME, LoopEntry.JOIN):
            require_same_data(progress.data, settings)
        if entry is not LoopEntry.JOIN:  # the others have compared already
            self._recovery.together(lambda: self._consistency.compare_data(settings))
        progress.data = dict(settings)
        progress.loop = CurrentLoop(stage)
        self._recorder.end_pause(progress.epoch)
        return stage

    def loop_ended(self) -> None:
        self._recorder.enter(BETWEEN)
        self._between_steps.loop_ended(self._progress.step)

    def loop_abandoned(self) -> None:
        loop = self._progress.loop
        if loop is None:
            return
        if loop.committed:
            self._weigh_logged(loop, is_whole=False)
            self._end_step(loop, self._progress.step)
        else:
            self._log.discard_step(self._progress.step + 1, phase=0)
            if loop.micro_batches > 1:
                self._abandoned = self._progress.step

    def leave_loop(self) -> None:
        loop = self._progress.loop
        if loop is not None:
            self._progress.end_loop(loop.stage)
            self._replay.leave_loop()
            self._seed_after(loop.stage)
            self._recorder.begin_pause()
        self._progress.loop = None
        self._engine.stop()

    def empty_epoch(self) -> None:
        self._progress.position = (self._progress.position[0] + 1, 0)

    def start_epoch(self, fingerprint: int) -> None:
        """Begin an epoch. ``fingerprint`` identifies the order of its samples; 0 for a stream."""
        self._require_unchanged()
        if fingerprint:
            with self._recorder.waiting():
                self.or_restart_step(lambda: self._consistency.compare_order(fingerprint))

    # -- a step ------------------------------------------------------------------------------

    def start_step(self, step: StepPlan) -> None:
        self._recorder.enter(LANE)
        loop = self._current()
        self.note_step(step)

        def start() -> None:
            self._consistency.compare_trainable()
            self._engine.start_phase(self._progress.step, step.counts, (loop.stage, step.epoch, step.index, 0))

        self.or_restart_step(start)
        self._recorder.enter(DATA)  # collate_fn may return None, so the loader looks one micro-batch ahead

    def note_step(self, step: StepPlan) -> None:
        """The loop has come to this step."""
        loop = self._current()
        loop.step, loop.micro_batches = step, 0
        self._recorder.start_step()
        if step.index == 0 and self._progress.epoch_now is None:
            self._log.start_epoch(self._progress.step)
        if step.index == 1:
            self._require_unchanged()  # the first forward may have created parameters or buffers
        self._commit.start_step()

    def skip_lane(self, lane: int) -> None:
        self._engine.skip_lane(lane)

    def start_micro_batch(self, lane: int, is_last: bool) -> None:
        loop = self._current()
        loop.lane, loop.is_last, loop.committed = lane, is_last, False
        loop.micro_batches += 1
        loop.generation = self._workers.generation
        self._recorder.enter(LANE)
        self._engine.start_lane(lane, is_last)
        self._commit.seed_lane(lane)
        self._recorder.enter(FORWARD)

    def end_micro_batch(self) -> None:
        """Raises StepRestarted if the workers have changed and the shard must start the step again."""
        loop = self._current()
        if not loop.committed:
            self._commit.end_lane()
        if self._engine.state is EngineState.DISCARDED and not loop.committed:
            self._log.discard_step(self._progress.step + 1, phase=0)
            self._end_step(loop, self._progress.step + 1, committed=False)
            raise StepRestarted
        self._compare_ends(loop)
        require_complete(loop, self._progress.step, self._engine.state, self._gate.optimizers)
        self._weigh_logged(loop)
        if loop.committed:
            self._recorder.enter(BETWEEN)
            try:
                self._between_steps.run()
            finally:  # also if the run is asked to end
                self._end_step(loop, self._progress.step)
        else:
            self._recorder.enter(DATA)
        if loop.generation != self._workers.generation:
            raise StepRestarted

    def _end_step(self, loop: CurrentLoop, step: int, *, committed: bool = True) -> None:
        assert loop.step is not None
        samples = sum(loop.step.counts[slice(*self._recorder.lanes)])
        self._recorder.end_step(step, self._progress.epoch, samples, committed=committed)

    def _compare_ends(self, loop: CurrentLoop) -> None:
        """If the loop body has not called the optimizer, meet the other workers. If some have, all raise one error that says so."""
        if loop.is_last and not loop.committed and self._engine.is_averaged:
            with suppress(PeerError):
                self._workers.comm.barrier(f"the end of the loop body without {step_calls(self._gate.optimizers)}")

    def _weigh_logged(self, loop: CurrentLoop, *, is_whole: bool = True) -> None:
        self._log.weigh(self._engine.weight_of(loop.lane))
        if loop.committed:
            self._log.weigh_step(self._progress.step, self._engine.total_weight, is_whole=is_whole)

    def gather_counts(self, counts: Sequence[int]) -> tuple[int, ...]:
        """Gather the number of samples of every lane of a stream's step. All workers call it."""
        mine = json.dumps(list(counts)).encode()

        def gather() -> list[int]:
            texts = gather_bytes(self._workers.comm, mine, "the samples of each lane")
            return [count for text in texts for count in json.loads(text)]

        with self._recorder.waiting():
            return tuple(self.or_restart_step(gather))

    def or_restart_step(self, collective: Callable[[], T]) -> T:
        """Call a collective of the loader. After a recovery, all workers start the step again instead of repeating the call."""
        try:
            return collective()
        except PeerError as error:
            if self._raises_peer_errors:
                raise
            self._recovery.recover(error)
            raise StepRestarted from None

    @contextmanager
    def raising_peer_errors(self) -> Iterator[None]:
        """Within this context the loader runs in a collective that is repeated as a whole if a worker is lost."""
        self._raises_peer_errors = True
        try:
            yield
        finally:
            self._raises_peer_errors = False

    def _current(self) -> CurrentLoop:
        assert self._progress.loop is not None
        return self._progress.loop

    def _seed_after(self, stage: int) -> None:
        """Seed all random generators after a loop, alike whether this worker has run the loop or passed it."""
        seed_everything(sample_seed(self._seed, stage, 1, MODEL))

    # -- mistakes ----------------------------------------------------------------------------

    def require_open(self) -> None:
        self._warn_if_abandoned(stacklevel=4)
        if self._closed:
            raise UsageError("this Run is closed. Make a new one.")

    def close(self) -> None:
        self._closed = True
        self._warn_if_abandoned(stacklevel=5)

    def require_collective(self, call: str, line: str) -> None:
        """Raise a UsageError if ``call`` would not run on all workers at once."""
        loop = self._progress.loop
        if loop is not None and loop.in_phase:
            raise UsageError(
                f"{call} must be called by all workers at once, but the loop over the lanes of a step runs once per lane. Call it "
                "behind that loop, in the loop over run.steps(...)."
            )
        if loop is not None and not loop.may_meet:
            raise UsageError(
                f"{call} must be called by all workers at once, but the loop body runs once per lane. Call it once per step, after "
                f"opt.step(): `if run.every(100): {line}`."
            )

    def _require_unchanged(self) -> None:
        self._gate.require_known_parameters()
        self._engine.require_unchanged()

    def _warn_if_abandoned(self, stacklevel: int) -> None:
        """Not in ``leave_loop``, which also runs while an exception ends the program."""
        if self._abandoned is not None:
            warnings.warn(
                f"a loop over run.shard was left in the middle of step {self._abandoned}: its lanes so far were dropped, and "
                "which lanes these were depends on the number of workers. Leave the loop when run.committed is true, and count "
                "by run.step.",
                stacklevel=stacklevel,
            )
            self._abandoned = None
