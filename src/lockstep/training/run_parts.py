"""RunParts: the parts of a run, constructed in one order.

    WorkerGroup   the workers of this generation              Progress      where the run is
    LaneEngine    gradients, averaged over lanes              StepCommit    when a step commits
    StepGate      step() of optimizers and schedulers         RunState      the whole state as one value
    Checkpoints   saving and resuming                         Recovery      from one generation to the next
    BetweenSteps  what is due after a step                    TrainingLoop  the user's loop

Each part gets what it needs in its constructor. Calls from an earlier part to a later one are closures, looked up when they are
called.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress

from torch import nn

from lockstep.checkpoint.checkpoints import CheckpointCallbacks, Checkpoints
from lockstep.comm.base import Comm
from lockstep.elastic.agent_link import CommOptions
from lockstep.elastic.collective_journal import CollectiveJournal
from lockstep.elastic.recovery import Recovery, RecoveryCallbacks
from lockstep.elastic.worker_group import WorkerGroup, join_workers
from lockstep.errors import PeerError
from lockstep.gradients.control_word import STOP
from lockstep.gradients.engine_state import EngineState
from lockstep.gradients.lane_engine import EngineCallbacks, LaneEngine
from lockstep.gradients.module import device_of, parameters_of
from lockstep.observe.ledger import Ledger
from lockstep.observe.log import LaneLog
from lockstep.plan.lanes import assign_lanes
from lockstep.plan.tree import fold
from lockstep.training.alone_work import AloneWork
from lockstep.training.between_steps import BetweenSteps, BetweenStepsTask, LogExchange
from lockstep.training.consistency import Consistency
from lockstep.training.determinism import Determinism
from lockstep.training.epochs import EpochLoops
from lockstep.training.evaluation import Evaluations
from lockstep.training.finished_run import FinishedRunNotice
from lockstep.training.loop import TrainingLoop
from lockstep.training.phases import Phases
from lockstep.training.progress import Progress
from lockstep.training.replica_check import ReplicaCheck
from lockstep.training.run_arguments import RunArguments
from lockstep.training.run_state import RunState
from lockstep.training.script_place import describe_place
from lockstep.training.script_replay import ScriptPosition, ScriptReplay
from lockstep.training.script_values import ScriptValues
from lockstep.training.sigterm import Sigterm
from lockstep.training.step_commit import StepCommit
from lockstep.training.step_gate import StepGate
from lockstep.training.user_state import UserState
from lockstep.world import agent_endpoint


class RunParts:
    """Constructs the parts of a run from its arguments, together with all workers, and closes them.

    Raises:
        UsageError: The workers have different models or settings, or a part refuses an argument.
        PeerError: Another worker was lost and there is no agent to recover with.
    """

    def __init__(self, given: RunArguments) -> None:
        self._given = given
        params = [p for _, p in parameters_of(given.model, ())]
        self.device = device_of(params)
        self.progress = Progress()
        self._endpoint = agent_endpoint()
        self.workers = self._join(params)
        self.alone_work = AloneWork(self.workers)
        self.lanes = self.workers.start_size if given.lanes is None else given.lanes
        self._settings = {"lanes": self.lanes, "exact": given.exact, "seed": given.seed}
        self._undo: list[Callable[[], None]] = []
        """Called in reverse order by ``close``."""
        self.checkpoints: Checkpoints | None = None
        try:
            self._build_step()
            self._build_state()
            self._build_loop()
            self.recovery.begin()
            self.state.began = True
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Wait for a checkpoint that is being written, and close the parts in reverse order. It may be called twice."""
        if self.checkpoints is not None and self._undo:
            if sys.exc_info()[0] is None and self.state.began:
                self.replay.end_script()
                with suppress(PeerError):  # the other workers are gone, and their parts with them
                    self.checkpoints.finish(self.progress.step)
            self.checkpoints.close()
        while self._undo:
            self._undo.pop()()
        if self._given.comm is None or isinstance(self._given.comm, str):  # the user closes a Comm of theirs
            self.workers.comm.close()

    # -- construction ------------------------------------------------------------------------

    def _join(self, params: list[nn.Parameter]) -> WorkerGroup:
        given = self._given
        if given.comm is not None and not isinstance(given.comm, str):
            return WorkerGroup(given.comm, given.comm.size)
        trained = sum(p.nbytes for p in params if p.requires_grad)

        def bucket_bytes(workers: int) -> int:
            count = given.lanes or workers
            return trained * fold(count, assign_lanes(count, workers)).width

        options = CommOptions(self.device, given.comm, given.timeout_s, bucket_bytes, lambda: describe_place(self.progress))
        return join_workers(self._endpoint, options, given.lanes)

    def _build_step(self) -> None:
        """What happens within one step: gradients, and the calls that commit it."""
        given, progress, workers = self._given, self.progress, self.workers
        if given.exact:
            is_given = given.threads is not None or given.lanes is None or self.device.type != "cpu"
            self._undo.append(Determinism(given.model, given.threads if is_given else 1).close)
        self._journal = CollectiveJournal()
        callbacks = EngineCallbacks(
            settings_hash=lambda: self.gate.settings_hash(),
            on_settings_differ=lambda rank: self.consistency.settings_differ(progress.step, rank),
            before_send=lambda: self.commit.record_samples(),
            on_averaged=lambda: self.commit.seed_after_averaging(),
            on_peer_lost=(lambda error: self.recovery.recover(error)) if workers.link is not None else None,
            share_logged=self._share_logged,
            requests=self._requests,
        )
        self.engine = LaneEngine(
            given.model, workers.comm, self.lanes, exact=given.exact, bucket_mb=given.bucket_mb, callbacks=callbacks
        )
        self._undo.append(self.engine.close)
        self.user_state = UserState(lambda: progress.loop is None or progress.loop.may_meet)
        endpoint = self._endpoint
        ledger = Ledger(endpoint.ledger, endpoint.worker) if endpoint is not None and endpoint.ledger else None
        self.commit = StepCommit(progress, self.engine, workers, self._journal, self.user_state, ledger, given.seed)
        self.gate = StepGate(
            given.objects, self.engine.params, self.commit.may_step, self.commit.stepped, lambda: progress.is_in_phases
        )
        self._undo.append(self.gate.close)

    def _build_state(self) -> None:
        """What workers share: the state, its checks, its checkpoints, and how it survives a change of workers."""
        given, progress, workers = self._given, self.progress, self.workers
        self.consistency = Consistency(workers, self.engine, self.gate, self.device, self._settings)
        self.evaluations = Evaluations(given.model, self.engine, self.lanes, given.seed)
        self.log = LaneLog([given.on_log] if given.on_log is not None else [])
        self.state = RunState(given.model, self.engine, self.gate, progress, self.log, self.user_state, self._settings)
        self._build_checkpoints()
        self.recovery = Recovery(
            workers,
            self._journal,
            self.state,
            self.device,
            RecoveryCallbacks(
                committed_steps=lambda: progress.step,
                commits=lambda: progress.commits,
                has_averages=lambda: self.engine.state is EngineState.UNCONFIRMED,
                confirm_step=self.engine.confirm_step,
                discard_step=self._discard_step,
                rebind=self._rebind,
                start=self._start,
                aligned=self._aligned,
            ),
        )
        values = ScriptValues(self.user_state, self.log, self.device)
        self.replay = ScriptReplay(progress, workers, values, self.recovery.join, self._arrived)
        self.epoch_loops = EpochLoops(progress, self.replay, given.seed)

    def _build_checkpoints(self) -> None:
        self._sigterm: Sigterm | None = None
        given, workers = self._given, self.workers
        if given.checkpoint is None:
            return
        callbacks = CheckpointCallbacks(self._published, self._equal_at, self._resumed, lambda: self.log.share(workers.comm))
        self.checkpoints = Checkpoints(
            given.checkpoint,
            given.every,
            given.keep,
            self.state,
            lambda: workers.comm,
            callbacks,
            resume=given.resume,
            override=given.override,
        )
        self._finished_notice = FinishedRunNotice(self.progress, workers)
        self._undo.append(self._finished_notice.close)
        if workers.link is None:
            self._sigterm = Sigterm()
            self._undo.append(self._sigterm.close)

    def _build_loop(self) -> None:
        """What happens between steps, and the loop itself."""
        given, progress, workers = self._given, self.progress, self.workers
        tasks: list[BetweenStepsTask] = []
        if given.verify_every:
            tasks.append(ReplicaCheck(self.state, progress, workers, self.device, given.verify_every, self._replica_differed))
        if self.checkpoints is not None:
            tasks.append(self.checkpoints)
        exchange = LogExchange(self.log, self.consistency, workers, progress, given.log_every)
        between_steps = BetweenSteps(tasks, exchange, self.recovery, workers, self.engine, progress, self._exit_code)
        self.loop = TrainingLoop(
            progress,
            workers,
            self.recovery,
            self.replay,
            self.engine,
            self.commit,
            self.gate,
            self.consistency,
            between_steps,
            self.log,
            given.seed,
        )
        self._undo.append(self.loop.close)
        self.phases = Phases(
            self.loop,
            progress,
            workers,
            self.recovery,
            self.engine,
            self.commit,
            self.consistency,
            between_steps,
            self.log,
            given.seed,
        )

    # -- calls from an earlier part to a later one -------------------------------------------

    def _requests(self) -> int:
        """What this worker asks of the others in the next control word."""
        stop = STOP if self._sigterm is not None and self._sigterm.came else 0
        return stop | self.workers.requests() | (self.checkpoints.requests() if self.checkpoints is not None else 0)

    def _share_logged(self, comm: Comm) -> None:
        """Give all workers what this worker has logged so far, before the step commits: then it survives this worker."""
        loop = self.progress.loop
        assert loop is not None
        if not loop.has_phases:  # there, each lane has ended before
            self.log.weigh(self.engine.weight_of(loop.lane))
        self.log.share(comm, reads_devices=False)

    def _discard_step(self) -> None:
        loop = self.progress.loop
        if loop is None or not loop.may_meet:
            self.engine.discard_step()
            self.log.discard_step(self.progress.step + 1, loop.phase if loop is not None else 0)

    def _rebind(self, comm: Comm) -> None:
        self.engine.rebind(comm)
        if self.checkpoints is not None:
            self.checkpoints.new_generation()

    def _start(self) -> None:
        self.consistency.require_same()
        if self.checkpoints is None or not self.checkpoints.resume():
            self.consistency.share_state()

    def _aligned(self, comm: Comm) -> None:
        self.consistency.new_generation()  # a newcomer has adopted now which parameters are trained
        self.log.realign(comm)
        self.replay.new_generation()

    def _arrived(self) -> None:
        """The script has reached the place where the checkpoint was made: what it did on the way must leave no trace."""
        if self.checkpoints is not None:
            self.checkpoints.restore_if_changed()

    def _published(self, step: int, where: str) -> None:
        if self.workers.link is not None:
            self.workers.link.send(type="saved", step=step, where=where)

    def _equal_at(self, step: int) -> int:
        """The last step, up to ``step``, at which replicas were known to be equal. A single replica always is."""
        return step if self.workers.size == 1 else self.progress.equal_at

    def _resumed(self, step: int) -> None:
        progress = self.progress
        progress.equal_at = step
        self._finished_notice.resumed(step)
        self.replay.resume_at(ScriptPosition(progress.stage, progress.was_in_loop, progress.result_count))

    def _replica_differed(self, equal_at: int) -> None:
        if self.checkpoints is not None:
            self.checkpoints.distrust_after(equal_at)

    def _exit_code(self) -> int:
        """Of a worker that was asked to end. With an agent, the agent decides."""
        return self.checkpoints.exit_code() if self.checkpoints is not None and self.workers.link is None else 0
