"""Run: a training run whose result does not depend on how many workers ran it. Wires the rooms together.

The user's loop drives everything. In each turn of it (one lane of one step):

    start_turn   seeds, buffers and gradients as the lane must find them     (data/shard.py calls it)
    backward()   the lane's gradients are taken; in the last turn, averaged   (grads/engine.py)
    opt.step()   nothing, until the last turn: then the step commits          (gates.py)
    end_turn     what was forgotten is told
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from lockstep.agreement import Agreement
from lockstep.comm.base import Comm
from lockstep.comm.exchange import gather_bytes
from lockstep.data.choose import open_source
from lockstep.data.seeding import preserved_randomness, seed_everything
from lockstep.data.shard import Redealt, Shard, Step
from lockstep.elastic.crew import Crew
from lockstep.errors import UsageError
from lockstep.evaluate import sum_everywhere, sum_here
from lockstep.exactness import Determinism
from lockstep.gates import Gates
from lockstep.grads.engine import LaneEngine, Phase
from lockstep.grads.module import device_of, parameters_of
from lockstep.observe.ledger import Ledger
from lockstep.observe.log import LaneLog, Sink
from lockstep.plan.lanes import deal
from lockstep.plan.samples import MODEL, lane_seed, sample_seed
from lockstep.plan.tree import fold
from lockstep.same import require_equal
from lockstep.world import agent_line

T = TypeVar("T")


@dataclass
class _Loop:
    """The loop over a shard that is going on."""

    stage: int
    step: Step | None = None
    lane: int = -1
    is_last: bool = False
    committed: bool = False
    turns: int = 0
    generation: int = 0
    calls: int = 0
    """Gated calls that were let through in this turn."""
    skips: int | None = None
    """Healed in this turn: its first so many gated calls are in the state received; -1: all of them."""


class Run:
    """Registers all that must be identical on every worker: ``model``, its optimizers, schedulers and GradScaler.

    All workers must construct it alike. The model is hooked in place; rank 0's state goes to all.

    ``lanes``: slices of every global batch, which define the arithmetic: with the same ``lanes`` and
    ``seed`` the result has the same bits on any number of workers up to ``lanes``. Default: the
    number of workers. ``exact=False`` keeps lanes and data, but sums as the backend likes.
    ``threads``: intra-op threads on the CPU; sums depend on it, so with ``lanes`` given it is 1 unless
    you choose. ``on_log(step, values)`` receives on rank 0 what ``run.log`` averages, every
    ``log_every`` steps. ``comm``, ``bucket_mb``, ``timeout_s``: as in ``replicate``.
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
    ) -> None:
        _require_sense(model, lanes, seed, threads, bucket_mb, timeout_s, log_every)
        self.model, self.seed, self.exact = model, seed, exact
        self.step = 0
        """Steps committed so far."""
        self._log_every = log_every
        self._stages = 0  # loops that this worker's script has come to
        self._stage, self.position = 0, (0, 0)  # where the run is: the loop, and (epoch, step) in it
        self._evaluations: list[Any] = []  # results of evaluate outside loops, for those who join later
        self._evaluated = self._samples = 0
        self._began = self._joins_loop = False
        self._loop: _Loop | None = None
        self._closed = False
        self._broken_off: int | None = None
        params = [p for _, p in parameters_of(model, ())]
        self.device = device_of(params)
        self._owns_comm = comm is None or isinstance(comm, str)
        trained = sum(p.nbytes for p in params if p.requires_grad)

        def need_bytes(workers: int) -> int:
            return trained * fold(lanes or workers, deal(lanes or workers, workers)).width

        line = agent_line()
        self._ledger = Ledger(line.ledger, line.worker) if line is not None and line.ledger else None
        if comm is None or isinstance(comm, str):
            self._crew = Crew(line, self.device, comm, timeout_s, need_bytes, lanes)
        else:
            self._crew = Crew.of(comm)
        self.lanes = self._crew.start_size if lanes is None else lanes
        self._threads = threads if threads is not None or lanes is None or self.device.type != "cpu" else 1
        self._determinism = Determinism(model, self._threads) if exact else None
        self.gates: Gates | None = None
        self._engine: LaneEngine | None = None
        try:
            self.engine = self._engine = LaneEngine(model, self.comm, self.lanes, exact=exact, bucket_mb=bucket_mb)
            self.gates = Gates(optimizers_and_schedulers, self.engine.params, self._may_step, self._stepped)
            self._log = LaneLog([on_log] if on_log is not None else [])
            self.engine.settings, self.engine.on_averaged = self.gates.settings, self._averaged
            self.engine.on_difference = lambda rank: self._agreement.settings_differ(self.step, rank)
            self._agreement = Agreement(self.comm, self.engine, self.gates)
            self.engine.before_leaving = self._write_down
            session = self._crew.session
            if session is not None:
                self.engine.on_lost, self.engine.wants_change = self._crew.recover, lambda: session.wants_change
            self._crew.begin(self)
            self._began = True
        except BaseException:
            self.close()
            raise

    # -- to read -----------------------------------------------------------------------------

    @property
    def comm(self) -> Comm:
        """What carries bytes between the workers of this generation."""
        return self._crew.comm

    @property
    def generation(self) -> int:
        """Grows by one whenever a worker is lost, joins or leaves."""
        return self._crew.generation

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
        return self.engine.dealt

    @property
    def epoch(self) -> int:
        """The epoch of the loop that is going on, from 0."""
        return self._loop.step.epoch if self._loop is not None and self._loop.step is not None else 0

    @property
    def committed(self) -> bool:
        """Whether this turn's ``opt.step()`` committed a step: true once per step, on every worker alike."""
        return self._loop is not None and self._loop.committed

    @property
    def averaged(self) -> bool:
        """Whether the step's gradients are there: true from the last turn's ``backward()`` to the end of the turn."""
        return self._loop is not None and self.engine.phase is Phase.AVERAGED

    @property
    def stands_in(self) -> bool:
        """Whether this turn's batch is a stand-in, which counts for nothing: this worker has no samples in the step."""
        loop = self._loop
        return loop is not None and loop.step is not None and loop.lane >= 0 and loop.step.counts[loop.lane] == 0

    @property
    def logged(self) -> dict[str, float]:
        """The latest averages of what was logged."""
        return self._log.latest

    def every(self, period: int | Literal["epoch"]) -> bool:
        """True once per ``period`` steps (or at each epoch's last step), in the turn that committed it, on every worker alike."""
        if period == "epoch":
            return self.committed and self._loop is not None and self._loop.step is not None and self._loop.step.ends_epoch
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

        shard = Shard(self, opened, self.lanes, epochs)
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
        loop = self._loop
        if loop is None or loop.step is None:
            raise UsageError("run.log() was called outside the loop over run.shard(...). Call it in the loop body.")
        step = self.step if loop.committed else self.step + 1
        if loop.step.counts[loop.lane]:
            self._log.note(step, loop.lane, values)

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
        self._require_open()
        self._require_collective("run.evaluate(...)")
        outside = self._loop is None
        if outside:
            self._evaluated += 1
            if self._evaluated <= len(self._evaluations):  # before this worker joined
                return dict(self._evaluations[self._evaluated - 1])
        result = self._crew.together(lambda: self._evaluate(fn, dataset, global_batch, num_workers, collate_fn))
        if outside:
            self._evaluations.append(result)
        return result

    def _evaluate(
        self,
        fn: Callable[[Any], Mapping[str, Any]],
        dataset: Any,
        global_batch: int,
        num_workers: int,
        collate_fn: Callable[[list[Any]], Any] | None,
    ) -> dict[str, Any]:
        source = open_source(
            dataset,
            lanes=self.lanes,
            global_batch=global_batch,
            num_workers=num_workers,
            collate_fn=collate_fn,
            seed=self.seed,
            pin_memory=self.device.type == "cuda",
        )
        require_equal(
            self.comm,
            [["argument", "global_batch", str(global_batch)], ["dataset", "length", str(getattr(source, "length", None))]],
            "evaluate different things",
            "Pass the same dataset and global_batch on every worker.",
        )
        training = [module for module in self.model.modules() if module.training]
        try:
            self.model.eval()
            with preserved_randomness(), self.engine.untouched_buffers(), torch.no_grad():
                mine = sum_here(fn, source, self.lanes_here, lane_seed(self.seed, self.step, 0, MODEL))
        finally:
            source.close()
            for module in training:
                module.training = True
        return sum_everywhere(self.comm, mine, self.lanes)

    def close(self) -> None:
        """Unhook the model, give the optimizers their ``step`` back, close the connections. May be called twice."""
        self._closed = True
        self._tell_broken_off()
        if self.gates is not None:
            self.gates.close()
        if self._engine is not None:
            self._engine.close()
        if self._determinism is not None:
            self._determinism.close()
        if self._owns_comm:
            self.comm.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- told by the shard -------------------------------------------------------------------

    def enter(self, shard: Shard) -> int | None:
        self._require_open()
        if self._loop is not None:
            raise UsageError(
                "a loop over run.shard(...) inside another one (or an iterator of one that is still held): a step belongs to one "
                "loop. End that one (del the iterator), or use run.evaluate."
            )
        stage, self._stages = self._stages, self._stages + 1
        if stage < self._stage:
            return None  # over before this worker joined
        rows = [["argument", name, str(value)] for name, value in shard.settings.items()]
        if not self._joins_loop:
            self._crew.together(
                lambda: require_equal(
                    self.comm,
                    rows,
                    "are about to train on different data",
                    "Pass the same dataset and arguments to run.shard on every worker.",
                )
            )
        self._joins_loop = False
        self._loop = _Loop(stage)
        return stage

    def empty_epoch(self) -> None:
        self.position = (self.position[0] + 1, 0)

    def start_epoch(self, order: int) -> None:
        self._require_unchanged()
        if order:
            self._or_redeal(
                lambda: require_equal(
                    self.comm,
                    [["order", "of the samples", f"fingerprint {order:08x}"]],
                    "have samplers that disagree",
                    "A sampler must give the same order on every worker: seed it alike, or pass shuffle=True instead.",
                )
            )

    def start_step(self, step: Step) -> None:
        assert self._loop is not None
        self._loop.step, self._loop.turns = step, 0
        if step.index == 1:
            self._require_unchanged()  # what the first forward has made
        self._or_redeal(lambda: self._start_step(step))
        self._held: dict[int, list[int]] = {}

    def _start_step(self, step: Step) -> None:
        self._agreement.compare_trainable()
        self.engine.start_step(self.step, step.counts)

    def start_turn(self, lane: int, is_last: bool) -> None:
        assert self._loop is not None
        self._loop.lane, self._loop.is_last, self._loop.committed = lane, is_last, False
        self._loop.turns += 1
        self._loop.generation, self._loop.calls, self._loop.skips = self.generation, 0, None
        self.engine.start_lane(lane, is_last)
        seed_everything(lane_seed(self.seed, self.step, lane))

    @property
    def keeps_ledger(self) -> bool:
        return self._ledger is not None

    def holds(self, lane: int, samples: list[int]) -> None:
        self._held[lane] = samples

    def _write_down(self) -> None:
        loop = self._loop
        if self._ledger is not None and loop is not None and loop.step is not None:
            self._ledger.holds(self.step, self.generation, (loop.stage, loop.step.epoch, loop.step.index), self._held)

    def end_turn(self) -> None:
        loop = self._loop
        assert loop is not None
        if self.engine.phase is Phase.VOID and not loop.committed:
            self._log.forget(self.step + 1)
            raise Redealt
        if self.engine.phase is Phase.BACKWARD:
            raise UsageError(
                f"backward() raised in step {self.step} and the exception was caught: half of lane {loop.lane} is gone, and other "
                "workers wait for it. Let the exception end the run; to skip a batch call run.weigh(0) before backward()."
            )
        if self.engine.phase is Phase.LANE:
            raise UsageError(
                f"the loop body ended without backward() in step {self.step} (lane {loop.lane}). Every turn needs one: every other "
                "worker waits for its gradients. To skip a batch, give it weight 0: run.weigh(0) before backward()."
            )
        if loop.is_last and not loop.committed:
            names = ", ".join(dict.fromkeys(f"{type(each).__name__}.step()" for each in self._the_gates.optimizers))
            raise UsageError(
                f"the loop body ended without {names}, though the last lane of step {self.step} was averaged. "
                "Call it in every turn, on the optimizer that was passed to Run; it does nothing until the last one."
            )
        self._log.weigh(self.engine.weight_of(loop.lane))
        if loop.committed and self.step % self._log_every == 0:
            self._crew.together(self._exchange)
        if loop.committed and self.engine.change_is_due and self._crew.session is not None and loop.generation == self.generation:
            self._crew.move()
        if loop.generation != self.generation:
            raise Redealt

    def _exchange(self) -> None:
        self._log.exchange(self.comm)
        self._agreement.compare_buffers(self.step)
        if self._crew.session is not None and self.is_main:
            self._crew.session.say(
                type="progress", step=self.step, epoch=self.epoch, values=self._log.latest, samples=self._samples
            )

    def exhausted(self) -> None:
        self._crew.together(self._exchange)

    def broken_off(self) -> None:
        if self._loop is not None and self._loop.turns > 1 and not self._loop.committed:
            self._broken_off = self.step

    def leave(self) -> None:
        if self._loop is not None:
            self._stage, self.position = self._loop.stage + 1, (0, 0)
        self._loop = None
        self.engine.stop()
        seed_everything(lane_seed(self.seed, self.step, self.lanes))

    def _or_redeal(self, act: Callable[[], T]) -> T:
        """A collective act inside the loader: after a recovery the step is dealt again instead."""
        before = self.generation
        found = self._crew.together(lambda: act() if self.generation == before else None)
        if self.generation != before:
            raise Redealt
        return found  # type: ignore[return-value]

    def gather_counts(self, counts: Sequence[int]) -> tuple[int, ...]:
        texts = self._or_redeal(lambda: gather_bytes(self.comm, json.dumps(list(counts)).encode(), "the samples of each lane"))
        return tuple(count for text in texts for count in json.loads(text))

    # -- told by the gates -------------------------------------------------------------------

    def _may_step(self, what: str) -> bool:
        loop = self._loop
        if loop is None:
            return True
        if self.engine.phase in (Phase.LANE, Phase.BACKWARD):
            raise UsageError(
                f"{what} came before backward() in step {self.step} (or it reached no parameter of the model): there is no "
                "gradient yet. Call backward() first."
            )
        if loop.skips is not None:  # healed: the state that came holds so many of this turn's steps already
            loop.calls += 1
            return loop.skips >= 0 and loop.calls > loop.skips
        allowed = loop.is_last and self.engine.phase is not Phase.VOID
        loop.calls += allowed
        return allowed

    def _averaged(self) -> None:
        """From here to the next turn all workers do the same: whoever draws must draw the same."""
        seed_everything(lane_seed(self.seed, self.step, self.lanes))

    def _stepped(self) -> None:
        if self._loop is not None and not self._loop.committed:
            step = self._loop.step
            assert step is not None
            self._loop.committed = True
            if self._ledger is not None:
                self._ledger.commits(self.step, self.generation)
            self.step += 1
            self._samples += sum(step.counts)
            self.position = (step.epoch + 1, 0) if step.ends_epoch else (step.epoch, step.index + 1)

    # -- what a change of workers carries over (elastic/crew.py) -------------------------------

    @property
    def committed_steps(self) -> int:
        return self.step

    def give_up(self) -> None:
        if self._loop is None or not self._loop.committed:
            self.engine.void()

    def rebind(self, comm: Comm) -> None:
        self.engine.rebind(comm)
        self._agreement.rebind(comm)

    def agree(self) -> None:
        self._agreement.require_same(self.lanes, self.exact, self.seed)
        self._agreement.share_state(self.device)

    def capture(self) -> dict[str, Any]:
        loop = self._loop
        return {
            "step": self.step,
            "samples": self._samples,
            "stage": self._stage,
            "position": self.position,
            "in_loop": loop is not None,
            "calls": loop.calls if loop is not None and loop.committed else -1,
            "evaluations": self._evaluations,
            "trainable": self.engine.trainable(),
            "parameters": {name: param.detach() for name, param in self.engine.named},
            "buffers": {name: buffer.detach() for name, buffer in self.engine.buffers.named()},
            "objects": [each.state_dict() for each in self._the_gates.objects],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over another worker's state. In mid-loop, the step this worker missed counts as committed in this turn."""
        with torch.no_grad():
            for name, param in self.engine.named:
                param.copy_(state["parameters"][name])
                param.requires_grad_(name in state["trainable"])
            for name, buffer in self.engine.buffers.named():
                self.engine.buffers.write(buffer, state["buffers"][name])
        for each, held in zip(self._the_gates.objects, state["objects"], strict=True):
            each.load_state_dict(held)
        self.step, self._stage, self.position = state["step"], state["stage"], state["position"]
        self._samples = state["samples"]
        self._evaluations = list(state["evaluations"])
        if self._loop is None:
            self._joins_loop = state["in_loop"] and not self._began
        else:
            self._loop.committed, self._loop.skips, self._loop.calls = True, state["calls"], 0

    # -- what must be equal ------------------------------------------------------------------

    @property
    def _the_gates(self) -> Gates:
        assert self.gates is not None
        return self.gates

    def _tell_broken_off(self) -> None:
        """Not in ``leave``, which also runs while an exception ends the program."""
        if self._broken_off is not None:
            warnings.warn(
                f"a loop over run.shard was left in the middle of step {self._broken_off}: its lanes so far were dropped, and "
                "which they were depends on the number of workers. Leave it when run.committed is true, and count by run.step.",
                stacklevel=3,
            )
            self._broken_off = None

    def _require_open(self) -> None:
        self._tell_broken_off()
        if self._closed:
            raise UsageError("this Run is closed. Make a new one.")

    def _require_unchanged(self) -> None:
        self._the_gates.require_sense()
        unsettled = self.engine.buffers.unsettled()
        if unsettled:
            raise UsageError(
                f"buffer {unsettled[0]} appeared or vanished after Run(...) was made: nobody would average it. Register it with a "
                "tensor before; a cache that every worker can compute for itself with persistent=False."
            )
        now = [id(p) for _, p in _named(self.model)]
        if now != [id(p) for _, p in self.engine.named]:
            old = {name for name, _ in self.engine.named}
            new = {name for name, _ in _named(self.model)}
            shown = ", ".join(sorted(old ^ new)[:3]) or "a parameter was replaced"
            raise UsageError(
                f"the model was changed after Run(...) was made: {shown}. Nobody would average the new parameters' gradients. "
                "Change it first, then make the optimizer and the Run."
            )

    def _require_collective(self, what: str) -> None:
        if self._loop is not None and not self._loop.committed:
            raise UsageError(
                f"{what} is collective, and a worker passes the loop body once per lane: call it where all workers meet, once per "
                f"step: `if run.every(100): result = {what}` after opt.step()."
            )


def _named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(model.named_parameters())


def _require_sense(
    model: Any, lanes: int | None, seed: int, threads: int | None, bucket_mb: float, timeout_s: float, log_every: int
) -> None:
    if not isinstance(model, nn.Module):
        raise UsageError(f"Run takes a torch.nn.Module first, not a {type(model).__name__}: lockstep.Run(model, optimizer, ...).")
    for module in model.modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise UsageError(
                "the model has SyncBatchNorm, which talks to all workers in every forward, and they have different numbers of "
                "lanes. Use BatchNorm: Run averages its statistics over lanes."
            )
    for name, value, least in (("lanes", lanes, 1), ("threads", threads, 1), ("log_every", log_every, 1)):
        if value is not None and (not isinstance(value, int) or value < least):
            raise UsageError(f"{name}={value!r} is not a number of {least} or more. Pass a whole number.")
    if not isinstance(seed, int):
        raise UsageError(f"seed={seed!r} is not a whole number. Pass an int.")
    if not bucket_mb > 0 or not timeout_s > 0:
        raise UsageError(f"bucket_mb={bucket_mb} and timeout_s={timeout_s} must both be positive.")
