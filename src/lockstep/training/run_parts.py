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

import atexit
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import torch
from torch import nn

from lockstep.checkpoint.checkpoints import CheckpointCallbacks, Checkpoints
from lockstep.comm.base import Comm
from lockstep.comm.exchange import gather_bytes
from lockstep.elastic.agent_link import CommOptions
from lockstep.elastic.collective_journal import CollectiveJournal
from lockstep.elastic.recovery import Recovery, RecoveryCallbacks
from lockstep.elastic.worker_group import WorkerGroup, join_workers
from lockstep.errors import PeerError
from lockstep.gradients.control_word import STOP
from lockstep.gradients.cuda_graph import recorder_of
from lockstep.gradients.engine_state import EngineState
from lockstep.gradients.lane_engine import EngineCallbacks, LaneEngine
from lockstep.gradients.module import device_of, parameters_of
from lockstep.gradients.partial_sums import sum_dtype
from lockstep.launcher import worker
from lockstep.observe.gpu_use import GpuUse
from lockstep.observe.ledger import Ledger
from lockstep.observe.log import LaneLog
from lockstep.observe.named_trackers import tracking_folder
from lockstep.observe.notice import print_notice
from lockstep.observe.tracker_backlog import TrackerBacklog
from lockstep.observe.trackers import Trackers
from lockstep.plan.lanes import assign_lanes
from lockstep.plan.tree import fold
from lockstep.recording.recorder import Recorder, RecorderCallbacks, WorkerState
from lockstep.training.alone_work import AloneWork
from lockstep.training.between_steps import BetweenSteps, BetweenStepsTask, LogExchange
from lockstep.training.captured_function import CaptureContext
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
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # what has no device argument shall mean it: seeds, streams, synchronize
        self.progress = Progress()
        self._endpoint = agent_endpoint()
        self.workers = self._join(params)
        self.recorder = self._make_recorder()
        self.alone_work = AloneWork(self.workers)
        self.lanes = self.workers.start_size if given.lanes is None else given.lanes
        reduce_dtype = None if given.reduce_dtype is None else str(given.reduce_dtype)
        self._settings = {"lanes": self.lanes, "exact": given.exact, "seed": given.seed, "reduce_dtype": reduce_dtype}
        self._undo: list[Callable[[], None]] = []
        """Called in reverse order by ``close``."""
        self._undo.append(self.recorder.close)
        self.checkpoints: Checkpoints | None = None
        self._has_begun = False
        try:
            self._build_step()
            self._build_state()
            self._build_loop()
            self.recovery.begin()
            self.state.began = self._has_begun = True
            self._watch_script()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Publish what was logged, wait for a checkpoint that is being written, and close the parts in reverse order.

        It may be called twice.
        """
        self.script_ended()
        if self.checkpoints is not None and self._undo:
            if sys.exc_info()[0] is None and self._has_begun:
                with suppress(PeerError):  # the other workers are gone, and their parts with them
                    self.checkpoints.finish(self.progress.step)
            self.checkpoints.close()
        while self._undo:
            self._undo.pop()()
        if self._given.comm is None or isinstance(self._given.comm, str):  # the user closes a Comm of theirs
            self.workers.comm.close()

    def script_ended(self) -> None:
        """Publish the steps since the last exchange: a loop that was left by ``break`` or by an exception has left some over.

        Called by ``close``, and at the end of a script that does not call it. An exception may have ended the script on this worker
        alone: then rank 0 publishes what it knows without the others.
        """
        if not self._has_begun or not self._undo or not self.recovery.is_member:
            return
        if sys.exc_info()[0] is None:
            self.replay.end_script()
            with suppress(PeerError):  # the other workers are gone
                self.between_steps.script_ended()
        elif self.workers.rank == 0 and (self.workers.size == 1 or self.workers.link is not None):
            try:
                _publish_alone(self.log, self.trackers, is_lone=self.workers.size == 1, is_failed=True)
            except Exception as error:  # noqa: BLE001 - the user must see the exception that has ended the script, not this one
                print_notice(f"the last steps could not be given to the trackers ({type(error).__name__}: {error}).")

    # -- construction ------------------------------------------------------------------------

    def _watch_script(self) -> None:
        """Learn of the end of a script that does not close the run. With other workers and without an agent nobody tells."""
        if self.workers.link is not None:
            worker.script_ended = self.script_ended
        elif self.workers.size == 1:
            at_exit = partial(_publish_at_exit, self.log, self.trackers)  # it must not keep the model in memory
            atexit.register(at_exit)
            self._undo.append(lambda: atexit.unregister(at_exit))

    def _join(self, params: list[nn.Parameter]) -> WorkerGroup:
        given = self._given
        if given.comm is not None and not isinstance(given.comm, str):
            return WorkerGroup(given.comm, given.comm.size)
        trained = sum(p.numel() * sum_dtype(p.dtype, given.reduce_dtype).itemsize for p in params if p.requires_grad)

        def bucket_bytes(workers: int) -> int:
            count = given.lanes or workers
            return trained * fold(count, assign_lanes(count, workers)).width

        options = CommOptions(self.device, given.comm, given.timeout_s, bucket_bytes, lambda: describe_place(self.progress))
        return join_workers(self._endpoint, options, given.lanes)

    def _make_recorder(self) -> Recorder:
        """Records how steps pass, if there is an agent that writes the records."""
        workers, endpoint = self.workers, self._endpoint
        if endpoint is None or workers.link is None or not endpoint.records:
            return Recorder()

        def state() -> WorkerState:
            lanes = self.engine.my_lanes if hasattr(self, "engine") else (0, 0)
            return WorkerState(workers.rank, workers.size, workers.generation, lanes)

        def link_us() -> int:
            return workers.comm.link_us()

        gpu, send = GpuUse(self.device), workers.link.send
        callbacks = RecorderCallbacks(send, state, gpu.percent, gpu.memory_bytes, notify=print_notice, link_us=link_us)
        return Recorder(endpoint.worker, callbacks)

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
            given.model,
            workers.comm,
            self.lanes,
            exact=given.exact,
            bucket_mb=given.bucket_mb,
            reduce_dtype=given.reduce_dtype,
            callbacks=callbacks,
            recorder=self.recorder,
        )
        self._undo.append(self.engine.close)
        self.user_state = UserState(lambda: progress.loop is None or progress.loop.may_meet)
        endpoint = self._endpoint
        ledger = Ledger(endpoint.ledger, endpoint.worker) if endpoint is not None and endpoint.ledger else None
        self.commit = StepCommit(progress, self.engine, workers, self._journal, self.user_state, ledger, self.recorder, given.seed)
        self.gate = StepGate(
            given.objects, self.engine.params, self.commit.may_step, self.commit.stepped, lambda: progress.is_in_phases
        )
        self._undo.append(self.gate.close)
        self.captures = CaptureContext(
            self.device,
            given.model,
            self.engine,
            self.gate,
            recorder_of(self.device),
            lambda: progress.loop is not None,
            lambda line: print_notice(line) if workers.rank == 0 else None,
        )
        self._undo.append(self.captures.close)

    def _build_state(self) -> None:
        """What workers share: the state, its checks, its checkpoints, and how it survives a change of workers."""
        given, progress, workers = self._given, self.progress, self.workers
        self.consistency = Consistency(workers, self.engine, self.gate, self.device, self._settings)
        self.evaluations = Evaluations(given.model, self.engine, self.lanes, given.seed)
        self._build_log()
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
            self.recorder,
        )
        values = ScriptValues(self.user_state, self.log, self.device)
        self.replay = ScriptReplay(progress, workers, values, self.recovery.join, self._arrived)
        self.epoch_loops = EpochLoops(progress, self.replay, given.seed)

    def _build_log(self) -> None:
        given = self._given
        self._backlog = TrackerBacklog(is_kept=bool(given.trackers))
        self.log = LaneLog([given.on_log] if given.on_log is not None else [], self._backlog)
        folder = tracking_folder(given.checkpoint, self._endpoint.run_dir if self._endpoint is not None else None)
        self.trackers = Trackers(
            given.trackers, self._backlog, folder, print_notice, self.alone_work.announce, lambda: self.progress.step
        )
        self._undo.append(self.trackers.close)

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
        exchange = LogExchange(self.log, self.trackers, self.consistency, workers, progress, self.recorder, given.log_every)
        self.between_steps = BetweenSteps(
            tasks, exchange, self.recovery, workers, self.engine, progress, self.recorder, self._exit_code
        )
        self.loop = TrainingLoop(
            progress,
            workers,
            self.recovery,
            self.replay,
            self.engine,
            self.commit,
            self.gate,
            self.consistency,
            self.between_steps,
            self.log,
            self.recorder,
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
            self.between_steps,
            self.log,
            self.recorder,
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
        self.log.share(comm)

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
        if self._backlog.is_kept:
            is_branch = self.checkpoints is not None and self.checkpoints.is_branch
            new = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(3).hex()}"
            name = new if is_branch else self._backlog.run_id or new
            self._name_curves(gather_bytes(self.workers.comm, name.encode(), "the name of the run's curves")[0].decode())

    def _name_curves(self, run_id: str) -> None:
        if run_id != self._backlog.run_id:
            self._backlog.begin(run_id)

    def _aligned(self, comm: Comm) -> None:
        self.consistency.new_generation()  # a newcomer has adopted now which parameters are trained
        self.log.realign(comm)
        self.replay.new_generation()
        self.trackers.enter_generation(is_main=comm.rank == 0)

    def _arrived(self) -> None:
        """The script has reached the place where the checkpoint was made: what it did on the way must leave no trace."""
        run_id = self._backlog.run_id
        if self.checkpoints is not None and self.checkpoints.restore_if_changed():
            self._name_curves(run_id)  # those of the checkpoint may be of a run that this one has branched from

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


def _publish_alone(log: LaneLog, trackers: Trackers, *, is_lone: bool, is_failed: bool) -> None:
    """Publish what this worker, rank 0, knows alone. If the script has failed, ``on_log`` is not called: it gets each step once."""
    log.publish(log.collect_alone(is_lone=is_lone), is_main=not is_failed)
    trackers.hand_over()
    trackers.settle(is_last=True)


def _publish_at_exit(log: LaneLog, trackers: Trackers) -> None:
    """The lone process ends, and the script has not closed the run."""
    _publish_alone(log, trackers, is_lone=True, is_failed=getattr(sys, "last_value", None) is not None)
