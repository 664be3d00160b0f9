"""Run: a training run whose result does not depend on how many workers ran it. Wires the rooms together.

TrainingLoop (the user's turns)  StepGate (optimizers)  LaneEngine (gradients)  WorkerGroup (workers)  RunState (the state)
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, Literal

from torch import nn

from lockstep.checkpoint.checkpoints import CheckpointCallbacks, Checkpoints
from lockstep.comm.base import Comm
from lockstep.data.open_source import open_source
from lockstep.data.shard import Shard
from lockstep.elastic.worker_group import WorkerGroup
from lockstep.errors import PeerError, UsageError
from lockstep.gradients.control_word import STOP
from lockstep.gradients.lane_engine import LaneEngine, Phase
from lockstep.gradients.module import device_of, parameters_of
from lockstep.observe.ledger import Ledger
from lockstep.observe.log import LaneLog, Sink
from lockstep.plan.lanes import assign_lanes
from lockstep.plan.samples import MODEL, sample_seed
from lockstep.plan.tree import fold
from lockstep.training.consistency import Consistency
from lockstep.training.determinism import Determinism
from lockstep.training.evaluation import Evaluations
from lockstep.training.loop import TrainingLoop
from lockstep.training.replica_check import ReplicaCheck
from lockstep.training.run_state import RunState
from lockstep.training.sigterm import Sigterm
from lockstep.training.step_gate import StepGate
from lockstep.world import agent_endpoint


class Run:
    """Registers all that must be identical on every worker: ``model``, its optimizers, schedulers and GradScaler.

    All workers must construct it alike. The model is hooked in place; rank 0's state goes to all.

    ``lanes``: slices of every global batch, which define the arithmetic: with the same ``lanes`` and
    ``seed`` the result has the same bits on any number of workers up to ``lanes``. Default: the
    number of workers. ``exact=False`` keeps lanes and data, but sums as the backend likes.
    ``threads``: intra-op threads on the CPU; sums depend on it, so with ``lanes`` given it is 1 unless
    you choose. ``on_log(step, values)`` receives on rank 0 what ``run.log`` averages, every
    ``log_every`` steps. ``comm``, ``bucket_mb``, ``timeout_s``: as in ``replicate``.

    ``checkpoint``: a folder, or any URL that fsspec reaches, where the whole state is saved ``every`` "10min", "500 steps" or
    "1 epoch", at the end of each loop, and on SIGTERM; the newest ``keep`` stay. If there is a whole one already, the run goes on
    from it. ``verify_every``: replicas are compared every so many steps, and a parted one is healed; 0: never.
    """

    def __init__(
        self,
        model: nn.Module,
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
        verify_every: int = 100,
    ) -> None:
        _require_sense(model, lanes, seed, threads, bucket_mb, timeout_s, log_every, verify_every)
        self.model, self.seed, self.exact = model, seed, exact
        self._sigterm: Sigterm | None = None
        self._verification: ReplicaCheck | None = None
        params = [p for _, p in parameters_of(model, ())]
        self.device = device_of(params)
        self._owns_comm = comm is None or isinstance(comm, str)
        trained = sum(p.nbytes for p in params if p.requires_grad)

        def need_bytes(workers: int) -> int:
            return trained * fold(lanes or workers, assign_lanes(lanes or workers, workers)).width

        line = agent_endpoint()
        ledger = Ledger(line.ledger, line.worker) if line is not None and line.ledger else None
        if comm is None or isinstance(comm, str):
            self._workers = WorkerGroup(line, self.device, comm, timeout_s, need_bytes, lanes)
        else:
            self._workers = WorkerGroup.of(comm)
        self.lanes = self._workers.start_size if lanes is None else lanes
        threads = threads if threads is not None or lanes is None or self.device.type != "cpu" else 1
        self._undo: list[Callable[[], None]] = []
        """What gives back what was taken, in the order in which it was."""
        try:
            if exact:
                self._undo.append(Determinism(model, threads).close)
            self.engine = LaneEngine(model, self.comm, self.lanes, exact=exact, bucket_mb=bucket_mb)
            self._undo.append(self.engine.close)
            self._log = LaneLog([on_log] if on_log is not None else [])
            self._loop = TrainingLoop(
                self._workers, self.engine, self._log, lanes=self.lanes, seed=seed, log_every=log_every, ledger=ledger
            )
            self._undo.append(self._loop.close)
            self.gate = StepGate(optimizers_and_schedulers, self.engine.params, self._loop.may_step, self._loop.stepped)
            self._undo.append(self.gate.close)
            settings = {"lanes": self.lanes, "exact": exact, "seed": seed}
            agreement = Consistency(self.comm, self.engine, self.gate, self.device, settings)
            self._loop.bind(self.gate, agreement)
            self._evaluations = Evaluations(model, self.engine, self.lanes, seed)
            self._state = RunState(model, self.engine, self.gate, self._loop, self._evaluations, agreement, settings)
            self._checkpoints: Checkpoints | None = None
            if verify_every:
                self._verification = ReplicaCheck(self._state, self._workers, self.device, verify_every)
                self._loop.tasks.append(self._verification)
                self._state.notes["verified"] = (self._verification.agreed, self._verification.resumed)
            if checkpoint is not None:
                self._open_checkpoints(checkpoint, every, keep)
            self.engine.settings, self.engine.on_averaged = self.gate.settings, self._loop.averaged
            self.engine.on_difference = lambda rank: agreement.settings_differ(self.step, rank)
            self.engine.before_leaving = self._loop.write_down
            if self._workers.link is not None:
                self.engine.on_lost = self._workers.recover
            self.engine.requests = self._requests
            self._workers.begin(self._state)
            self._state.began = True
        except BaseException:
            self.close()
            raise

    # -- to read -----------------------------------------------------------------------------

    @property
    def comm(self) -> Comm:
        """What carries bytes between the workers of this generation."""
        return self._workers.comm

    @property
    def generation(self) -> int:
        """Grows by one whenever a worker is lost, joins or leaves."""
        return self._workers.generation

    @property
    def rank(self) -> int:
        return self.comm.rank

    @property
    def size(self) -> int:
        return self.comm.size

    @property
    def is_main(self) -> bool:
        return self.comm.rank == 0

    @property
    def lanes_here(self) -> tuple[int, int]:
        """This worker's lanes, [first, last)."""
        return self.engine.my_lanes

    @property
    def step(self) -> int:
        """Steps committed so far."""
        return self._loop.step

    @property
    def epoch(self) -> int:
        """The epoch of the loop that is going on, from 0."""
        return self._loop.now.epoch if self._loop.now is not None else 0

    @property
    def committed(self) -> bool:
        """Whether this turn's ``opt.step()`` committed a step: true once per step, on every worker alike."""
        return self._loop.committed

    @property
    def averaged(self) -> bool:
        """Whether the step's gradients are there: true from the last turn's ``backward()`` to the end of the turn."""
        return self._loop.turn is not None and self.engine.phase is Phase.AVERAGED

    @property
    def stands_in(self) -> bool:
        """Whether this turn's batch is a stand-in, which counts for nothing: this worker has no samples in the step."""
        return self._loop.stands_in

    @property
    def logged(self) -> dict[str, float]:
        """The latest averages of what was logged."""
        return self._log.latest

    def every(self, period: int | Literal["epoch"]) -> bool:
        """True once per ``period`` steps (or at each epoch's last step), in the turn that committed it, on every worker alike."""
        if period == "epoch":
            return self.committed and self._loop.now is not None and self._loop.now.ends_epoch
        if not isinstance(period, int) or period < 1:
            raise UsageError(f"run.every({period!r}): pass a number of steps, 1 or more, or 'epoch'.")
        return self.committed and self.step % period == 0

    # -- the loop ----------------------------------------------------------------------------

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
        """Every sample of every epoch exactly once, by lane: iterate over it instead of a DataLoader.

        ``global_batch`` samples per step are cut into lanes; a worker with several lanes sees several
        micro-batches per step, and ``opt.step()`` does nothing until its last one. Any map-style
        dataset, or a stream (an iterable dataset). ``sampler``: an order of your own.
        """

        def opened(stage: int) -> Any:
            seed = self.seed if stage == 0 else sample_seed(self.seed, stage, 0, MODEL)
            return open_source(
                dataset,
                lanes=self.lanes,
                global_batch=global_batch,
                epochs=epochs,
                seed=seed,
                shuffle=shuffle,
                drop_last=drop_last,
                sampler=sampler,
                num_workers=num_workers,
                collate_fn=collate_fn,
                pin_memory=self.device.type == "cuda" if pin_memory is None else pin_memory,
                prefetch_factor=prefetch_factor,
            )

        shard = Shard(self._loop, opened, self.lanes, epochs)
        shard.settings = {
            "length": shard.length,
            "global_batch": global_batch,
            "shuffle": shuffle,
            "epochs": epochs,
            "drop_last": drop_last,
        }
        return shard

    def weigh(self, weight: float) -> None:
        """Before ``backward()``: the current lane's weight (tokens, say) instead of its number of samples.

        The step's gradient is sum(w * g) / sum(w) over lanes. Call it in every turn, or never.
        """
        self.engine.weigh(float(weight))

    def log(self, **values: Any) -> None:
        """Note numbers (or tensors of one element) of this lane; averaged over lanes by weight, some steps later.

        What belongs to the step, not to a lane (a gradient's norm, a learning rate), stands under ``if run.committed``.
        """
        turn = self._loop.turn
        if turn is None or turn.step is None:
            raise UsageError("run.log() was called outside the loop over run.shard(...). Call it in the loop body.")
        step = self.step if turn.committed else self.step + 1
        if turn.step.counts[turn.lane]:
            self._log.note(step, turn.lane, values)

    def evaluate(
        self,
        fn: Callable[[Any], Mapping[str, Any]],
        dataset: Any,
        *,
        global_batch: int,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> dict[str, Any]:
        """The sums of what ``fn(batch)`` returns (a dict of numbers or tensors) over every sample exactly once.

        All workers must call it: outside the loop, or under ``run.every(...)``. The model is in eval
        mode and gradients are off meanwhile. The same bits on any number of workers.
        """
        self._loop.require_open()
        self._loop.require_collective("run.evaluate(...)", "result = run.evaluate(...)")
        outside = self._loop.turn is None
        if outside and (earlier := self._evaluations.earlier()) is not None:
            return earlier
        result = self._workers.together(
            lambda: self._evaluations.evaluate(
                fn, dataset, step=self.step, global_batch=global_batch, num_workers=num_workers, collate_fn=collate_fn
            )
        )
        if outside:
            self._evaluations.kept.append(result)
        return result

    # -- the state ---------------------------------------------------------------------------

    def register(self, name: str, each: Any) -> None:
        """``each`` (with ``state_dict`` and ``load_state_dict``) belongs to the run's state: saved, resumed, and sent to newcomers.

        Call it right after ``Run(...)``, on every worker. Its state must be plain values and tensors, alike on every worker.
        """
        self._loop.require_open()
        self._state.register(name, each)

    def save(self) -> None:
        """Save a checkpoint. Inside the loop, under ``run.every``: at the end of this turn. Outside: at once, and it is on the
        storage when this returns. All workers must call it.
        """
        self._loop.require_open()
        if self._checkpoints is None:
            raise UsageError('run.save() has no place to save to. Name one: lockstep.Run(..., checkpoint="checkpoints").')
        self._loop.require_collective("run.save()", "run.save()")
        if self._loop.turn is not None:
            self._checkpoints.request_save()
        else:
            checkpoints = self._checkpoints
            self._workers.together(lambda: checkpoints.save(self.step))

    def _open_checkpoints(self, checkpoint: Any, every: str, keep: int) -> None:
        workers = self._workers

        def published(step: int, where: str) -> None:
            if workers.link is not None:
                workers.link.say(type="saved", step=step, where=where)

        callbacks = CheckpointCallbacks(published)
        if self._verification is not None:
            callbacks = CheckpointCallbacks(published, self._verification.agreed_at, self._verification.resumed)
        checkpoints = Checkpoints(checkpoint, every, keep, self._state, lambda: workers.comm, callbacks)
        self._checkpoints = checkpoints
        self._state.resume, self._state.on_rebind = checkpoints.resume, checkpoints.abandon
        self._loop.tasks.append(checkpoints)
        if self._verification is not None:
            self._verification.on_parted = checkpoints.distrust_after
        if workers.link is None:
            self._loop.exit_code = checkpoints.exit_code
            self._sigterm = Sigterm()
            self._undo.append(self._sigterm.close)

    def _requests(self) -> int:
        stop = STOP if self._sigterm is not None and self._sigterm.came else 0
        return stop | self._workers.requests() | (self._checkpoints.requests() if self._checkpoints is not None else 0)

    def close(self) -> None:
        """Wait for a checkpoint in flight, unhook the model, give the optimizers their ``step`` back, close the connections.

        May be called twice.
        """
        checkpoints = getattr(self, "_checkpoints", None)
        if checkpoints is not None and self._undo:
            if sys.exc_info()[0] is None and self._state.began:
                with suppress(PeerError):  # others are gone: theirs is not written
                    checkpoints.finish(self.step)
            checkpoints.abandon()
        while self._undo:
            self._undo.pop()()
        if self._owns_comm:
            self.comm.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
