"""Run: a training run whose result depends neither on the number of workers nor on which of them died.

This file constructs the parts of a run in one order and holds the public API:

    WorkerGroup   the workers of this generation              Progress      where the run is
    LaneEngine    gradients, averaged over lanes              StepCommit    when a step commits
    StepGate      step() of optimizers and schedulers         RunState      the whole state as one value
    Checkpoints   saving and resuming                         Recovery      from one generation to the next
    BetweenSteps  what is due after a step                    TrainingLoop  the user's loop
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, Literal, TypeVar, cast

from torch import nn

from lockstep.checkpoint.checkpoints import CheckpointCallbacks, Checkpoints
from lockstep.comm.base import Comm
from lockstep.comm.plain_state import digest, flatten
from lockstep.data.shard import Shard
from lockstep.data.source import LoaderOptions
from lockstep.data.steps import Steps
from lockstep.elastic.agent_link import CommOptions
from lockstep.elastic.collective_journal import CollectiveJournal
from lockstep.elastic.recovery import Recovery, RecoveryCallbacks
from lockstep.elastic.worker_group import WorkerGroup, join_workers
from lockstep.errors import PeerError, UsageError
from lockstep.gradients.control_word import STOP
from lockstep.gradients.lane_engine import EngineCallbacks, EngineState, LaneEngine
from lockstep.gradients.module import device_of, parameters_of
from lockstep.observe.ledger import Ledger
from lockstep.observe.log import LaneLog, Sink
from lockstep.plan.lanes import assign_lanes
from lockstep.plan.tree import fold
from lockstep.training.alone_work import AloneWork
from lockstep.training.argument_names import BATCH_SIZE, explain_unknown
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
from lockstep.training.run_state import RunState
from lockstep.training.script_place import describe_place
from lockstep.training.script_replay import ScriptPosition, ScriptReplay
from lockstep.training.script_values import ScriptValues
from lockstep.training.sigterm import Sigterm
from lockstep.training.step_commit import StepCommit
from lockstep.training.step_gate import StepGate
from lockstep.training.user_state import UserState
from lockstep.training.value_exchange import broadcast_value, gather_values, mean_of_values
from lockstep.world import agent_endpoint

T = TypeVar("T")


class Run:
    """A training run: everything that must be identical on every worker.

    All workers must construct it, with the same arguments. The model is hooked in place: there is no wrapper and no ``module.``
    prefix. Rank 0's parameters, buffers, optimizer and scheduler states are copied to all workers.

    Args:
        model: The model to train. Several models: a list or a dict of them, as in ``lockstep.Run([generator, critic], opt_g,
            opt_c)``. Their parameters are then named "0.weight", or after the keys of the dict.
        *optimizers_and_schedulers: The optimizers of the model, their schedulers, and a ``GradScaler`` if there is one.
        lanes: Into how many slices every global batch is cut. Lanes define the arithmetic: with the same ``lanes`` and ``seed``
            the result has the same bits on any number of workers up to ``lanes``. Default: the number of workers.
        exact: If False, lanes and data stay as they are, but the backend sums gradients in the order it likes.
        seed: Seeds the order of the samples and everything random in training.
        threads: Intra-op threads per worker on the CPU. Sums depend on it, so the default is 1 if ``lanes`` is given.
        comm: What carries gradients: "auto", "shm", "twolevel", "gloo", "nccl", or a Comm. Default: chosen by device and machine.
        bucket_mb: The size of a gradient bucket in MiB.
        timeout_s: How long a worker waits for another one before it raises a ``PeerError``.
        log_every: Logged values are averaged over all workers every ``log_every`` steps.
        on_log: Called on rank 0 as ``on_log(step, values)`` with the averages of what ``run.log`` was given.
        checkpoint: A folder, or any URL that fsspec can write to. The whole state is saved there, and the run resumes from
            the newest complete checkpoint that it finds there.
        every: How often a checkpoint is saved: "10min", "500 steps" or "1 epoch". One is also saved at the end of each loop and on
            SIGTERM.
        keep: How many checkpoints are kept.
        resume: Whether the run begins from a checkpoint: "auto" (from the newest one in ``checkpoint``, if there is one), "must"
            (the same, but a ``UsageError`` if there is none), "never" (it begins anew, and saves next to the checkpoints that are
            there), or the folder of one checkpoint, such as "checkpoints/step-000000500-01a1e4fd0da4e3df".
        override: Names of optimizers' hyperparameters, such as ``("lr",)``, for which a resumed run uses the script's value. For
            all others it uses the checkpoint's, and names those that differ from the script's.
        verify_every: Replicas are compared every ``verify_every`` steps, and a replica that differs is restored. 0: never.

    Raises:
        UsageError: An argument cannot work, or the workers have different models or settings.
        PeerError: Another worker was lost and there is no agent to recover with.

    Example:
        >>> run = lockstep.Run(model, optimizer, scheduler, lanes=8)
        >>> for x, y in run.shard(dataset, global_batch=256, shuffle=True):
        ...     loss = F.cross_entropy(model(x), y)
        ...     loss.backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
    """

    @explain_unknown("lockstep.Run")
    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module],
        *optimizers_and_schedulers: Any,
        lanes: int | None = None,
        exact: bool = True,
        seed: int = 0,
        threads: int | None = None,
        comm: Comm | str | None = None,
        bucket_mb: float = 25,
        timeout_s: float = 600.0,
        log_every: int = 10,
        on_log: Sink | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        every: str = "10min",
        keep: int = 3,
        resume: str | os.PathLike[str] = "auto",
        override: Sequence[str] = (),
        verify_every: int = 100,
    ) -> None:
        _require_sense(_one_module(model), lanes, seed, threads, bucket_mb, timeout_s, log_every, verify_every)
        _require_checkpoint(checkpoint, resume, override)
        self.model: nn.Module = _one_module(model)
        self.seed, self.exact = seed, exact
        params = [p for _, p in parameters_of(self.model, ())]
        self.device = device_of(params)
        self._progress = Progress()
        self._owns_comm = comm is None or isinstance(comm, str)
        self._workers = self._join(params, lanes, comm, timeout_s)
        self._alone_work = AloneWork(self._workers)
        self.lanes = self._workers.start_size if lanes is None else lanes
        self._undo: list[Callable[[], None]] = []
        """Called in reverse order by ``close``."""
        self._checkpoints: Checkpoints | None = None
        try:
            if exact:
                threads = threads if threads is not None or lanes is None or self.device.type != "cpu" else 1
                self._undo.append(Determinism(self.model, threads).close)
            self._build_step(optimizers_and_schedulers, bucket_mb)
            self._build_state(on_log, checkpoint, every, keep, resume, override)
            self._build_loop(log_every, verify_every)
            self._recovery.begin()
            self._state.began = True
        except BaseException:
            self.close()
            raise

    # -- construction: each part gets what it needs; calls that go up are closures, looked up when they are called ----------

    def _join(self, params: list[nn.Parameter], lanes: int | None, comm: Comm | str | None, timeout_s: float) -> WorkerGroup:
        self._endpoint = agent_endpoint()
        if comm is not None and not isinstance(comm, str):
            return WorkerGroup(comm, comm.size)
        trained = sum(p.nbytes for p in params if p.requires_grad)

        def bucket_bytes(workers: int) -> int:
            count = lanes or workers
            return trained * fold(count, assign_lanes(count, workers)).width

        options = CommOptions(self.device, comm, timeout_s, bucket_bytes, lambda: describe_place(self._progress))
        return join_workers(self._endpoint, options, lanes)

    def _build_step(self, objects: tuple[Any, ...], bucket_mb: float) -> None:
        """What happens within one step: gradients, and the calls that commit it."""
        self._journal = CollectiveJournal()
        has_agent = self._workers.link is not None
        callbacks = EngineCallbacks(
            settings_hash=lambda: self._gate.settings_hash(),
            on_settings_differ=lambda rank: self._consistency.settings_differ(self.step, rank),
            before_send=lambda: self._commit.record_samples(),
            on_averaged=lambda: self._commit.seed_after_averaging(),
            on_peer_lost=(lambda error: self._recovery.recover(error)) if has_agent else None,
            share_logged=self._share_logged,
            requests=self._requests,
        )
        self._engine = LaneEngine(self.model, self.comm, self.lanes, exact=self.exact, bucket_mb=bucket_mb, callbacks=callbacks)
        self._undo.append(self._engine.close)
        endpoint = self._endpoint
        ledger = Ledger(endpoint.ledger, endpoint.worker) if endpoint is not None and endpoint.ledger else None
        self._commit = StepCommit(self._progress, self._engine, self._workers, self._journal, ledger, self.seed)
        self._gate = StepGate(
            objects, self._engine.params, self._commit.may_step, self._commit.stepped, lambda: self._progress.is_in_phases
        )
        self._undo.append(self._gate.close)

    def _build_state(
        self, on_log: Sink | None, checkpoint: Any, every: str, keep: int, resume: str | os.PathLike[str], override: Sequence[str]
    ) -> None:
        """What workers share: the state, its checks, its checkpoints, and how it survives a change of workers."""
        settings = {"lanes": self.lanes, "exact": self.exact, "seed": self.seed}
        self._consistency = Consistency(self._workers, self._engine, self._gate, self.device, settings)
        self._evaluations = Evaluations(self.model, self._engine, self.lanes, self.seed)
        self._log = LaneLog([on_log] if on_log is not None else [])
        progress = self._progress
        self._user_state = UserState(lambda: progress.loop is None or progress.loop.may_meet)
        self._state = RunState(self.model, self._engine, self._gate, self._progress, self._log, self._user_state, settings)
        self._sigterm: Sigterm | None = None
        if checkpoint is not None:
            callbacks = CheckpointCallbacks(self._published, self._equal_at, self._resumed, lambda: self._log.share(self.comm))
            self._checkpoints = Checkpoints(
                checkpoint, every, keep, self._state, lambda: self.comm, callbacks, resume=resume, override=override
            )
            self._finished_notice = FinishedRunNotice(self._progress, self._workers)
            self._undo.append(self._finished_notice.close)
            if self._workers.link is None:
                self._sigterm = Sigterm()
                self._undo.append(self._sigterm.close)
        self._recovery = Recovery(
            self._workers,
            self._journal,
            self._state,
            self.device,
            RecoveryCallbacks(
                committed_steps=lambda: self.step,
                commits=lambda: self._progress.commits,
                has_averages=lambda: self._engine.state is EngineState.UNCONFIRMED,
                confirm_step=self._engine.confirm_step,
                discard_step=self._discard_step,
                rebind=self._rebind,
                start=self._start,
                aligned=self._aligned,
            ),
        )
        values = ScriptValues(self._user_state, self._log, self.device)
        self._replay = ScriptReplay(self._progress, self._workers, values, self._recovery.join, self._arrived)
        self._epoch_loops = EpochLoops(self._progress, self._replay, self.seed)

    def _build_loop(self, log_every: int, verify_every: int) -> None:
        """What happens between steps, and the loop itself."""
        tasks: list[BetweenStepsTask] = []
        if verify_every:
            tasks.append(
                ReplicaCheck(self._state, self._progress, self._workers, self.device, verify_every, self._replica_differed)
            )
        if self._checkpoints is not None:
            tasks.append(self._checkpoints)
        exchange = LogExchange(self._log, self._consistency, self._workers, self._progress, log_every)
        between_steps = BetweenSteps(tasks, exchange, self._recovery, self._workers, self._engine, self._progress, self._exit_code)
        self._loop = TrainingLoop(
            self._progress,
            self._workers,
            self._recovery,
            self._replay,
            self._engine,
            self._commit,
            self._gate,
            self._consistency,
            between_steps,
            self._log,
            self.seed,
        )
        self._undo.append(self._loop.close)
        self._phases = Phases(
            self._loop,
            self._progress,
            self._workers,
            self._recovery,
            self._engine,
            self._commit,
            self._consistency,
            between_steps,
            self._log,
            self.seed,
        )

    def _requests(self) -> int:
        """What this worker asks of the others in the next control word."""
        stop = STOP if self._sigterm is not None and self._sigterm.came else 0
        return stop | self._workers.requests() | (self._checkpoints.requests() if self._checkpoints is not None else 0)

    def _discard_step(self) -> None:
        loop = self._progress.loop
        if loop is None or not loop.may_meet:
            self._engine.discard_step()
            self._log.discard_step(self.step + 1, loop.phase if loop is not None else 0)

    def _rebind(self, comm: Comm) -> None:
        self._engine.rebind(comm)
        if self._checkpoints is not None:
            self._checkpoints.new_generation()

    def _start(self) -> None:
        self._consistency.require_same()
        if self._checkpoints is None or not self._checkpoints.resume():
            self._consistency.share_state()

    def _aligned(self, comm: Comm) -> None:
        self._consistency.new_generation()  # a newcomer has adopted now which parameters are trained
        self._log.realign(comm)
        self._replay.new_generation()

    def _arrived(self) -> None:
        """The script has reached the place where the checkpoint was made: what it did on the way must leave no trace."""
        if self._checkpoints is not None:
            self._checkpoints.restore_if_changed()

    def _share_logged(self, comm: Comm) -> None:
        """Give all workers what this worker has logged so far, before the step commits: then it survives this worker."""
        loop = self._progress.loop
        assert loop is not None
        if not loop.has_phases:  # there, each lane has ended before
            self._log.weigh(self._engine.weight_of(loop.lane))
        self._log.share(comm, reads_devices=False)

    def _published(self, step: int, where: str) -> None:
        if self._workers.link is not None:
            self._workers.link.send(type="saved", step=step, where=where)

    def _equal_at(self, step: int) -> int:
        """The last step, up to ``step``, at which replicas were known to be equal. A single replica always is."""
        return step if self.size == 1 else self._progress.equal_at

    def _resumed(self, step: int) -> None:
        self._progress.equal_at = step
        self._finished_notice.resumed(step)
        progress = self._progress
        self._replay.resume_at(ScriptPosition(progress.stage, progress.was_in_loop, progress.result_count))

    def _replica_differed(self, equal_at: int) -> None:
        if self._checkpoints is not None:
            self._checkpoints.distrust_after(equal_at)

    def _exit_code(self) -> int:
        """Of a worker that was asked to end. With an agent, the agent decides."""
        return self._checkpoints.exit_code() if self._checkpoints is not None and self._workers.link is None else 0

    # -- to read -----------------------------------------------------------------------------

    @property
    def comm(self) -> Comm:
        """What carries bytes between the workers of this generation."""
        return self._workers.comm

    @property
    def generation(self) -> int:
        """The number of the current set of workers. It grows by one whenever a worker is lost, joins or leaves."""
        return self._workers.generation

    @property
    def rank(self) -> int:
        """The number of this worker in the current generation, from 0."""
        return self._workers.rank

    @property
    def size(self) -> int:
        """The number of workers in the current generation."""
        return self._workers.size

    @property
    def is_main(self) -> bool:
        """Whether this worker is rank 0."""
        return self.rank == 0

    @property
    def lanes_here(self) -> tuple[int, int]:
        """The lanes of this worker, as (first, last + 1)."""
        return self._engine.my_lanes

    @property
    def step(self) -> int:
        """The number of steps committed so far."""
        return self._progress.step

    @property
    def epoch(self) -> int:
        """The epoch of ``run.epochs``, from 0; outside it, the epoch of the current loop over ``run.shard``."""
        return self._progress.epoch

    @property
    def committed(self) -> bool:
        """Whether the step of this iteration is committed: true once per step, on every worker alike.

        In a loop over ``run.shard`` that is so after ``opt.step()`` in the last micro-batch; in a loop over ``run.steps``, after a
        loop over the lanes.
        """
        return self._progress.committed

    @property
    def averaged(self) -> bool:
        """Whether ``param.grad`` holds the averages: true from the last lane's ``backward()`` to the end of the iteration."""
        loop = self._progress.loop
        return loop is not None and not loop.in_phase and self._engine.is_averaged

    @property
    def stands_in(self) -> bool:
        """Whether this iteration's batch is a placeholder that does not count, because this worker has no samples in the step."""
        loop = self._progress.loop
        return loop is not None and loop.step is not None and loop.lane >= 0 and loop.step.counts[loop.lane] == 0

    @property
    def logged(self) -> dict[str, float]:
        """The latest averages of what was logged."""
        return self._log.latest

    @property
    def epoch_means(self) -> dict[str, float]:
        """The averages over the current epoch of what was logged, with the same bits on any number of workers.

        Each step counts by its weight: its number of samples, or what ``run.weigh`` was given. The epoch is that of
        ``run.epochs``; outside it, that of the loop over ``run.shard``. The averages are complete when that loop has ended. Until
        the first values of an epoch are exchanged, they are those of the epoch before.
        """
        return self._log.epoch_means()

    @property
    def state(self) -> MutableMapping[str, Any]:
        """Your own variables: a mapping from names to plain values and tensors, such as the best accuracy so far.

        It is saved in checkpoints, sent to replacement workers, and compared with the other replicas. A worker that replays the
        script finds in it what it held at that place. Change it between loops, or in a loop under ``if run.committed:``, on every
        worker alike. Assigning a value that is not plain is a ``UsageError``.

        Example:
            >>> run.state["best"] = max(run.state.get("best", 0.0), 0.93)
        """
        return self._user_state

    def every(self, period: int | Literal["epoch"]) -> bool:
        """Return True once per ``period`` steps, in the iteration that committed the step, on every worker alike.

        Args:
            period: A number of steps, or "epoch" for the last step of each epoch.

        Raises:
            UsageError: ``period`` is neither.

        Example:
            >>> if run.every(100):
            ...     accuracy = run.evaluate(count_correct, test_set, global_batch=256)["correct"] / len(test_set)
        """
        if period == "epoch":
            loop = self._progress.loop
            return self.committed and loop is not None and loop.step is not None and loop.step.ends_epoch
        if not isinstance(period, int) or period < 1:
            raise UsageError(f"run.every({period!r}): pass a number of steps, 1 or more, or 'epoch'.")
        loop = self._progress.loop
        completed = self.step + (loop is not None and loop.has_phases)  # the step of this iteration is counted at its end
        return self.committed and completed % period == 0

    # -- the loop ----------------------------------------------------------------------------

    def epochs(self, count: int) -> Iterator[int]:
        """Iterate over the epochs of a run, from 0 to ``count`` - 1. All workers must call it alike.

        A run that is resumed, and a worker that joins, begin with the current epoch: nothing in the loop body is run again for
        earlier epochs. The body may hold any number of loops over ``run.shard``, ``run.evaluate``, ``run.save``, scheduler steps
        and plain code. The loop may be left by ``break``, by the same decision on every worker.

        Args:
            count: The number of epochs. A run that is resumed may have more than before.

        Returns:
            An iterator over the numbers of the epochs.

        Raises:
            UsageError: ``count`` is not a number, or the loop is inside another one.

        Example:
            >>> for epoch in run.epochs(2):
            ...     for x, y in run.shard(dataset, global_batch=32, shuffle=True):
            ...         F.cross_entropy(model(x), y).backward()
            ...         opt.step()
            ...         opt.zero_grad()
            ...     sched.step()
        """
        self._loop.require_open()
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise UsageError(f"run.epochs({count!r}): pass the number of epochs, a whole number of 0 or more.")
        return self._epoch_loops.iterate(count)

    @explain_unknown("run.shard", {"batch_size": BATCH_SIZE})
    def shard(
        self,
        dataset: Any,
        *,
        global_batch: int,
        shuffle: bool = False,
        epochs: int = 1,
        drop_last: bool = False,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool | None = None,
        sampler: Iterable[int] | None = None,
        prefetch_factor: int | None = None,
    ) -> Shard:
        """Return this worker's part of a dataset, to iterate over instead of a DataLoader. All workers must call it alike.

        Every sample of every epoch is used exactly once. A worker with several lanes sees several micro-batches per step, and
        ``opt.step()`` does nothing until the last one.

        Args:
            dataset: A map-style dataset, or an iterable one (a stream).
            global_batch: How many samples all workers together use in one step.
            shuffle: Whether to shuffle the samples anew in each epoch, by ``seed``.
            epochs: How often to pass over the dataset.
            drop_last: Whether to drop the last samples of an epoch if they do not fill a global batch.
            num_workers: How many loader processes each worker has; 0 loads in the worker's own process.
            collate_fn: Makes a batch from a list of samples, as in a DataLoader. A batch that it returns as None is skipped.
            pin_memory: As in a DataLoader. Default: True if the model is on a GPU.
            sampler: Yields the indices of an epoch's samples, instead of ``shuffle``. It must yield the same on every worker. The
                seed of its ``generator``, if it has one, and ``seed`` decide the order of each epoch.
            prefetch_factor: As in a DataLoader.

        Returns:
            An iterable over micro-batches. Its ``len()`` is the number of iterations on this worker, so that progress bars are
            right. It changes when the workers change; in a resumed run it is the number that remains.

        Raises:
            UsageError: An argument cannot work.
        """
        options = self._options(
            pin_memory,
            global_batch=global_batch,
            epochs=epochs,
            shuffle=shuffle,
            drop_last=drop_last,
            sampler=sampler,
            num_workers=num_workers,
            collate_fn=collate_fn,
            prefetch_factor=prefetch_factor,
        )
        return Shard(self._loop, dataset, options)

    @explain_unknown("run.steps", {"batch_size": BATCH_SIZE})
    def steps(
        self,
        dataset: Any,
        *,
        global_batch: int,
        shuffle: bool = False,
        epochs: int = 1,
        drop_last: bool = False,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool | None = None,
        sampler: Iterable[int] | None = None,
        prefetch_factor: int | None = None,
    ) -> Steps:
        """Return the steps over a dataset: one iteration per optimizer step, on every worker alike. All workers must call it alike.

        Each step is an iterable over this worker's lanes. When the loop over the lanes has ended, ``param.grad`` holds the
        averages, and everything behind it (clipping, ``opt.step()``, a moving average) runs once per step on every worker. A
        second loop over the same step computes another set of gradients, for a second loss or a second model.

        Args:
            dataset: As in ``shard``, like all other arguments.
            global_batch: How many samples all workers together use in one step.
            shuffle: Whether to shuffle the samples anew in each epoch, by ``seed``.
            epochs: How often to pass over the dataset.
            drop_last: Whether to drop the last samples of an epoch if they do not fill a global batch.
            num_workers: How many loader processes each worker has; 0 loads in the worker's own process.
            collate_fn: Makes a batch from a list of samples, as in a DataLoader. A batch that it returns as None is skipped.
            pin_memory: As in a DataLoader. Default: True if the model is on a GPU.
            sampler: Yields the indices of an epoch's samples, instead of ``shuffle``. It must yield the same on every worker.
            prefetch_factor: As in a DataLoader.

        Returns:
            An iterable over steps. Its ``len()`` is the number of steps.

        Raises:
            UsageError: An argument cannot work.

        Example:
            >>> for step in run.steps(dataset, global_batch=256, shuffle=True):
            ...     for x, y in step:
            ...         F.cross_entropy(model(x), y).backward()
            ...     torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
            ...     optimizer.step()
            ...     optimizer.zero_grad()
        """
        options = self._options(
            pin_memory,
            global_batch=global_batch,
            epochs=epochs,
            shuffle=shuffle,
            drop_last=drop_last,
            sampler=sampler,
            num_workers=num_workers,
            collate_fn=collate_fn,
            prefetch_factor=prefetch_factor,
        )
        return Steps(self._loop, self._phases, dataset, options)

    def _options(self, pin_memory: bool | None, **given: Any) -> LoaderOptions:
        pins = self.device.type == "cuda" if pin_memory is None else pin_memory
        return LoaderOptions(lanes=self.lanes, seed=self.seed, pin_memory=pins, **given)

    def weigh(self, weight: float) -> None:
        """Set the weight of the current lane (its number of tokens, for example) instead of its number of samples.

        The step's gradient is sum(w * g) / sum(w) over all lanes. Call it before ``backward()``, in every iteration or never.
        ``run.weigh(0)`` skips a batch, in any iteration: its gradients count for nothing. If all lanes of a step are skipped, the
        step has no gradients (``param.grad`` is None), and the optimizer changes nothing.

        Raises:
            UsageError: It was called after ``backward()`` or outside the loop, or ``weight`` is negative or not finite.
        """
        self._engine.weigh(float(weight))

    def log(self, **values: Any) -> None:
        """Log numbers of this lane. They are averaged over all lanes by weight, every ``log_every`` steps.

        A value that belongs to the step, not to a lane (the norm of the gradient, a learning rate), is logged under
        ``if run.committed``.

        Args:
            **values: Numbers, or tensors of one element. A tensor is not read before the average is taken, so that logging does not
                synchronise with the GPU.

        Raises:
            UsageError: It was called outside the loop, or a value is not one number.
        """
        loop = self._progress.loop
        if loop is None or loop.step is None:
            raise UsageError("run.log() was called outside the loop over run.shard(...). Call it in the loop body.")
        step = self.step if loop.committed and not loop.has_phases else self.step + 1
        if loop.has_phases and not loop.in_phase:
            self._log.note(step, -1, values, phase=loop.phase, weight=1.0)
        elif loop.step.counts[loop.lane]:
            self._log.note(step, loop.lane, values, phase=loop.phase)

    @explain_unknown("run.evaluate", {"batch_size": BATCH_SIZE})
    def evaluate(
        self,
        fn: Callable[[Any], Mapping[str, Any]],
        dataset: Any,
        *,
        global_batch: int,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> dict[str, Any]:
        """Sum what ``fn`` returns over every sample of a dataset, with the same bits on any number of workers.

        All workers must call it: outside the loop, or in the loop under ``run.every(...)``. Meanwhile the model is in eval mode
        and gradients are off.

        Args:
            fn: Called with each batch; returns a dict of numbers or tensors to add up.
            dataset: A map-style dataset, or an iterable one.
            global_batch: How many samples all workers together take at a time.
            num_workers: How many loader processes each worker has.
            collate_fn: Makes a batch from a list of samples, as in a DataLoader.

        Returns:
            The sums, under the names that ``fn`` returned.

        Raises:
            UsageError: ``fn`` returned something else, or different names for different batches, or not all workers call it.

        Example:
            >>> def count_correct(batch):
            ...     x, y = batch
            ...     return {"correct": (model(x).argmax(1) == y).sum()}
            >>> accuracy = run.evaluate(count_correct, test_set, global_batch=256)["correct"] / len(test_set)
        """
        self._loop.require_open()
        self._loop.require_collective("run.evaluate(...)", "result = run.evaluate(...)")
        return self._collective(
            lambda: self._evaluations.evaluate(
                fn, dataset, step=self.step, global_batch=global_batch, num_workers=num_workers, collate_fn=collate_fn
            )
        )

    # -- values of all workers -----------------------------------------------------------------

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all workers, by rank, on every worker.

        All workers must call it: outside the loop, or in the loop under ``run.every(...)`` or ``if run.committed:``. If a worker
        is lost meanwhile, the survivors' values are returned.

        Args:
            value: Plain values, tensors, or lists, tuples and dicts of them. It may differ between workers.

        Returns:
            One value for each worker. Tensors are on the host.

        Raises:
            UsageError: The value is not plain, or not all workers call it.

        Example:
            >>> seconds = run.gather(12.5)
        """
        return self._exchange("gather", lambda: gather_values(self.comm, value, "run.gather(...)"))

    def mean(self, value: Any) -> Any:
        """Return the mean of the values of all workers, on every worker. Each worker counts once, however many lanes it has.

        All workers must call it, as ``run.gather``. Use ``run.log`` or ``run.evaluate`` for means over samples.

        Args:
            value: A number, or a tensor of the same shape on every worker.

        Returns:
            A float, or a tensor on the host.

        Raises:
            UsageError: The value is something else, or not all workers call it.

        Example:
            >>> seconds = run.mean(12.5)
        """
        return self._exchange("mean", lambda: mean_of_values(self.comm, value))

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """Return the value of one worker, on every worker.

        All workers must call it, as ``run.gather``. If that worker is lost meanwhile, its successor's value is returned.

        Args:
            value: Plain values, tensors, or lists, tuples and dicts of them. Only the value of rank ``source`` is used.
            source: The rank whose value is returned.

        Returns:
            The value. Tensors are on the host.

        Raises:
            UsageError: The value is not plain, there is no such rank, or not all workers call it.

        Example:
            >>> words = run.broadcast(["a", "list", "that", "rank 0", "has", "read"] if run.is_main else None)
        """
        return self._exchange("broadcast", lambda: broadcast_value(self.comm, value, source))

    def _exchange(self, name: str, call: Callable[[], T]) -> T:
        self._loop.require_open()
        self._loop.require_collective(f"run.{name}(...)", f"result = run.{name}(...)")
        return self._collective(call)

    # -- the state ---------------------------------------------------------------------------

    def register(self, name: str, stateful: Any) -> None:
        """Add an object to the state of the run: it is saved, resumed, and sent to newcomers.

        Call it right after ``Run(...)``, on every worker.

        Args:
            name: A name that no other registered object has.
            stateful: An object with ``state_dict`` and ``load_state_dict``. Its state must consist of plain values and tensors, and
                be the same on every worker.

        Raises:
            UsageError: The name is taken, or the object lacks one of the two methods.
        """
        self._loop.require_open()
        self._state.register(name, stateful)

    def fingerprint(self) -> str:
        """Return the SHA-256 of the model's parameters and persistent buffers, as 64 hexadecimal digits.

        Two runs with equal fingerprints have the same weights, bit for bit: compare runs by it. Any worker may call it alone, also
        after ``close()``; all workers have the same. It reads every parameter once.

        Example:
            >>> result = run.fingerprint()  # 3b03c75862afaba38876a1a602399d3b46cbecd333f906bc8bf51b5532ca4b3e, for example
        """
        weights = {name: tensor.detach().cpu() for name, tensor in sorted(self._state.weights().items())}
        return digest(*flatten(weights, "the model")).hex()

    def save(self) -> None:
        """Save a checkpoint. All workers must call it.

        Inside the loop call it under ``run.every(...)``: the checkpoint is begun at the end of the iteration, and written while
        training continues. Outside the loop the checkpoint is complete when ``save`` returns.

        Raises:
            UsageError: Run was given no ``checkpoint``, or not all workers call it.
        """
        self._loop.require_open()
        checkpoints = self._checkpoints
        if checkpoints is None:
            raise UsageError('run.save() has no place to save to. Name one: lockstep.Run(..., checkpoint="checkpoints").')
        self._loop.require_collective("run.save()", "run.save()")
        if self._progress.loop is not None:
            checkpoints.request_save()
        else:
            self._collective(lambda: checkpoints.save(self.step))

    def alone(self, what: str, *, limit_s: float = 3600.0) -> AbstractContextManager[None]:
        """Announce work of this worker that may take longer than ``--hang-timeout`` while the others wait for it.

        Until the ``with`` block ends, the agent does not take this worker for hung, and the waits of the others do not time out.
        Any worker may use it, inside and outside loops. A worker that dies in the block is replaced as always. Without an agent
        (``python``, ``torchrun``) it does nothing: the others wait for ``timeout_s``.

        Args:
            what: What this worker does, for messages: "saving the best model".
            limit_s: After so many seconds the worker counts as hung if the others wait for it for another ``--hang-timeout``.

        Returns:
            A context manager.

        Raises:
            UsageError: ``what`` is empty, or ``limit_s`` is not a positive number.

        Example:
            >>> if run.is_main:
            ...     with run.alone("saving the best model"):
            ...         torch.save(model.state_dict(), "best.pt")
        """
        return self._alone_work.announce(what, limit_s)

    def _collective(self, call: Callable[[], T]) -> T:
        """Call ``call`` together with all workers. Between loops, a script that is replayed gets the recorded result."""
        if self._progress.loop is not None:
            return self._recovery.together(call)
        recorded = self._replay.next_result()
        if recorded is not None:
            return cast(T, recorded.value)
        result = self._recovery.together(call)
        self._replay.record(result)
        return result

    def close(self) -> None:
        """Wait for a checkpoint that is being written, unhook the model, and close the connections.

        The optimizers get their own ``step`` back. It may be called twice.
        """
        checkpoints = self._checkpoints
        if checkpoints is not None and self._undo:
            if sys.exc_info()[0] is None and self._state.began:
                self._replay.end_script()
                with suppress(PeerError):  # the other workers are gone, and their parts with them
                    checkpoints.finish(self.step)
            checkpoints.close()
        while self._undo:
            self._undo.pop()()
        if self._owns_comm:
            self.comm.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _one_module(model: Any) -> Any:
    """Several models become one module, which contains them."""
    if isinstance(model, Mapping) and model and all(isinstance(each, nn.Module) for each in model.values()):
        return nn.ModuleDict(model)
    if isinstance(model, (list, tuple)) and model and all(isinstance(each, nn.Module) for each in model):
        return nn.ModuleList(model)
    return model


def _require_sense(
    model: Any,
    lanes: int | None,
    seed: int,
    threads: int | None,
    bucket_mb: float,
    timeout_s: float,
    log_every: int,
    verify_every: int,
) -> None:
    if not isinstance(model, nn.Module):
        raise UsageError(f"Run takes a torch.nn.Module first, not a {type(model).__name__}: lockstep.Run(model, optimizer, ...).")
    for module in model.modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise UsageError(
                "the model has SyncBatchNorm, which talks to all workers in every forward, and they have different numbers of "
                "lanes. Use BatchNorm: Run averages its statistics over lanes."
            )
    for name, value, least in (
        ("lanes", lanes, 1),
        ("threads", threads, 1),
        ("log_every", log_every, 1),
        ("verify_every", verify_every, 0),
    ):
        if value is not None and (not isinstance(value, int) or value < least):
            raise UsageError(f"{name}={value!r} is not a number of {least} or more. Pass a whole number.")
    if not isinstance(seed, int):
        raise UsageError(f"seed={seed!r} is not a whole number. Pass an int.")
    if not bucket_mb > 0 or not timeout_s > 0:
        raise UsageError(f"bucket_mb={bucket_mb} and timeout_s={timeout_s} must both be positive.")


def _require_checkpoint(checkpoint: Any, resume: str | os.PathLike[str], override: Sequence[str]) -> None:
    if checkpoint is None and (resume != "auto" or override):
        given = f"resume={resume!r}" if resume != "auto" else f"override={override!r}"
        raise UsageError(
            f"{given} without checkpoint=: this run saves nothing, and has no folder to resume from. Name one: "
            'lockstep.Run(..., checkpoint="checkpoints").'
        )
