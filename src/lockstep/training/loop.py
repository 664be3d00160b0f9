"""Loop: the user's loop over a shard, turn by turn. Says when a step begins, commits, and is assigned again.

The user's loop drives everything. In each turn of it (one lane of one step):

    start_micro_batch   seeds, buffers and gradients as the lane must find them     (data/shard.py calls it)
    backward()   the lane's gradients are taken; in the last turn, averaged   (grads/engine.py)
    opt.step()   nothing, until the last turn: then the step commits          (gate.py)
    end_micro_batch     what was forgotten is told; what is due between two steps is done

Owns where the run is: steps committed, the loop (stage) and the position in it. A worker that is healed in mid-turn receives
these with the rest of the state, and counts the step as committed in the turn it is in.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from lockstep.comm.exchange import gather_bytes, require_equal
from lockstep.data.seeding import seed_everything
from lockstep.data.shard import Shard, Step, StepRestarted
from lockstep.elastic.worker_group import WorkerGroup
from lockstep.errors import PeerError, UsageError
from lockstep.gradients.control_word import CHANGE, STOP
from lockstep.gradients.lane_engine import LaneEngine, Phase
from lockstep.observe.ledger import Ledger
from lockstep.observe.log import LaneLog
from lockstep.plan.samples import MODEL, lane_seed, sample_seed
from lockstep.plan.step_end import StepEnd
from lockstep.training.between_steps import BetweenStepsTask
from lockstep.training.consistency import Consistency
from lockstep.training.step_gate import StepGate

T = TypeVar("T")


@dataclass
class Turn:
    """The turn of the loop that is going on."""

    stage: int
    step: Step | None = None
    lane: int = -1
    is_last: bool = False
    committed: bool = False
    turns: int = 0
    """Of this step, so far."""
    generation: int = 0
    calls: int = 0
    """Gated calls that were let through in this turn."""
    skips: int | None = None
    """Healed in this turn: its first so many gated calls are in the state received; -1: all of them."""


class TrainingLoop:
    """The driver of shards (data/shard.py), and who answers the gate. ``gate`` are set once they exist."""

    gate: StepGate

    def __init__(
        self,
        workers: WorkerGroup,
        engine: LaneEngine,
        log: LaneLog,
        *,
        lanes: int,
        seed: int,
        log_every: int,
        ledger: Ledger | None,
    ) -> None:
        self._workers, self.engine, self._log, self._ledger = workers, engine, log, ledger
        self._lanes, self._seed, self._log_every = lanes, seed, log_every
        self.step = 0
        """Steps committed so far."""
        self.samples = 0
        self.turn: Turn | None = None
        self._stages = 0  # loops that this worker's script has come to
        self._stage, self.position = 0, (0, 0)  # where the run is: the loop, and (epoch, step) in it
        self._joins = False  # the loop that this worker comes to next is one that others are in
        self._broken_off: int | None = None
        self._held: dict[int, list[int]] = {}
        self._closed = False
        self.tasks: list[BetweenStepsTask] = []
        self.exit_code: Callable[[], int] = lambda: 0
        """Of a worker that was told to end."""
        self._data: dict[str, Any] = {}
        self._resumed_data: dict[str, Any] | None = None

    def bind(self, gate: StepGate, agreement: Consistency) -> None:
        self.gate, self._agreement = gate, agreement

    # -- to read -----------------------------------------------------------------------------

    @property
    def lanes_here(self) -> tuple[int, int]:
        return self.engine.my_lanes

    @property
    def committed(self) -> bool:
        return self.turn is not None and self.turn.committed

    @property
    def now(self) -> Step | None:
        """The step that is going on, or that was committed in this turn."""
        return self.turn.step if self.turn is not None else None

    @property
    def stands_in(self) -> bool:
        turn = self.turn
        return turn is not None and turn.step is not None and turn.lane >= 0 and turn.step.counts[turn.lane] == 0

    @property
    def keeps_ledger(self) -> bool:
        return self._ledger is not None

    # -- told by the shard -------------------------------------------------------------------

    def enter(self, shard: Shard) -> int | None:
        self.require_open()
        if self.turn is not None:
            raise UsageError(
                "a loop over run.shard(...) inside another one (or an iterator of one that is still held): a step belongs to one "
                "loop. End that one (del the iterator), or use run.evaluate."
            )
        stage, self._stages = self._stages, self._stages + 1
        if stage < self._stage:
            self._seed_after(stage)
            return None  # over before this worker joined, or the run was resumed
        self._require_same_data(shard.settings)
        rows = [["argument", name, str(value)] for name, value in shard.settings.items()]
        if not self._joins:
            self._workers.together(
                lambda: require_equal(
                    self._workers.comm,
                    rows,
                    "are about to train on different data",
                    "Pass the same dataset and arguments to run.shard on every worker.",
                )
            )
        self._joins = False
        self._data = dict(shard.settings)
        self.turn = Turn(stage)
        return stage

    def empty_epoch(self) -> None:
        self.position = (self.position[0] + 1, 0)

    def start_epoch(self, order: int) -> None:
        self._require_unchanged()
        if order:
            self._or_redeal(
                lambda: require_equal(
                    self._workers.comm,
                    [["order", "of the samples", f"fingerprint {order:08x}"]],
                    "have samplers that disagree",
                    "A sampler must give the same order on every worker: seed it alike, or pass shuffle=True instead.",
                )
            )

    def start_step(self, step: Step) -> None:
        assert self.turn is not None
        self.turn.step, self.turn.turns = step, 0
        if step.index == 1:
            self._require_unchanged()  # what the first forward has made
        self._or_redeal(lambda: self._start_step(step))
        self._held = {}

    def _start_step(self, step: Step) -> None:
        self._agreement.compare_trainable()
        self.engine.start_step(self.step, step.counts)

    def start_micro_batch(self, lane: int, is_last: bool) -> None:
        turn = self.turn
        assert turn is not None
        turn.lane, turn.is_last, turn.committed = lane, is_last, False
        turn.turns += 1
        turn.generation, turn.calls, turn.skips = self._workers.generation, 0, None
        self.engine.start_lane(lane, is_last)
        seed_everything(lane_seed(self._seed, self.step, lane))

    def holds(self, lane: int, samples: list[int]) -> None:
        self._held[lane] = samples

    def end_micro_batch(self) -> None:
        turn = self.turn
        assert turn is not None
        if self.engine.phase is Phase.DISCARDED and not turn.committed:
            self._log.forget(self.step + 1)
            raise StepRestarted
        self._require_complete(turn)
        self._log.weigh(self.engine.weight_of(turn.lane))
        if turn.committed:
            self._between_steps(turn)
        if turn.generation != self._workers.generation:
            raise StepRestarted

    def _between_steps(self, turn: Turn) -> None:
        """A step is committed, and its turn is over: all workers are here, unless some are gone."""
        if self.step % self._log_every == 0:
            self._workers.together(self._exchange)
        else:
            self._workers.journal.skip()
        for task in self.tasks:
            if task.is_due(self._step_end(turn)):
                task.done(self._workers.together(lambda task=task: task.perform(self._step_end(turn))))  # type: ignore[misc]
            else:
                self._workers.journal.skip()
        requests = self._step_end(turn).requests
        if any(request & STOP for request in requests):
            if self._workers.link is not None and self._workers.comm.rank == 0:
                self._workers.link.say(type="stopped", step=self.step)
            raise SystemExit(self.exit_code())
        if any(request & CHANGE for request in requests):
            self._workers.move()

    def _step_end(self, turn: Turn) -> StepEnd:
        step = turn.step
        assert step is not None
        requests = self.engine.requests_of_all if turn.generation == self._workers.generation else ()
        return StepEnd(self.step, step.epoch, step.ends_epoch, requests)

    def exhausted(self) -> None:
        self._workers.together(self._exchange)
        for task in self.tasks:
            self._workers.together(lambda task=task: task.loop_ended(self.step))  # type: ignore[misc]

    def broken_off(self) -> None:
        if self.turn is not None and self.turn.turns > 1 and not self.turn.committed:
            self._broken_off = self.step

    def leave(self) -> None:
        if self.turn is not None:
            self._stage, self.position = self.turn.stage + 1, (0, 0)
            self._seed_after(self.turn.stage)
        self.turn = None
        self.engine.stop()

    def _seed_after(self, stage: int) -> None:
        """Behind a loop the script draws the same, whether this worker has run it or passed it."""
        seed_everything(sample_seed(self._seed, stage, 1, MODEL))

    def gather_counts(self, counts: Sequence[int]) -> tuple[int, ...]:
        mine = json.dumps(list(counts)).encode()

        def gather() -> list[int]:
            texts = gather_bytes(self._workers.comm, mine, "the samples of each lane")
            return [count for text in texts for count in json.loads(text)]

        return tuple(self._or_redeal(gather))

    def _or_redeal(self, action: Callable[[], T]) -> T:
        """A collective action inside the loader: after a recovery the step is assigned again instead, on every worker."""
        try:
            return action()
        except PeerError as error:
            self._workers.recover(error)
            raise StepRestarted from None

    def _exchange(self) -> None:
        self._log.exchange(self._workers.comm)
        self._agreement.compare_buffers(self.step)
        if self._workers.link is not None and self._workers.comm.rank == 0:
            epoch = self.now.epoch if self.now is not None else 0
            self._workers.link.say(type="progress", step=self.step, epoch=epoch, values=self._log.latest, samples=self.samples)

    # -- told by the gate and the engine ----------------------------------------------------

    def may_step(self, what: str) -> bool:
        turn = self.turn
        if turn is None:
            return True
        if self.engine.phase in (Phase.LANE, Phase.BACKWARD):
            raise UsageError(
                f"{what} came before backward() in step {self.step} (or it reached no parameter of the model): there is no "
                "gradient yet. Call backward() first."
            )
        if turn.skips is not None:  # healed: the state that came holds so many of this turn's steps already
            turn.calls += 1
            return turn.skips >= 0 and turn.calls > turn.skips
        allowed = turn.is_last and self.engine.phase is not Phase.DISCARDED
        turn.calls += allowed
        return allowed

    def stepped(self) -> None:
        turn = self.turn
        if turn is not None and not turn.committed:
            assert turn.step is not None
            turn.committed = True
            if self._ledger is not None:
                self._ledger.commits(self.step, self._workers.generation)
            self.step += 1
            self._workers.journal.start_over()
            self.samples += sum(turn.step.counts)
            self.position = (turn.step.epoch + 1, 0) if turn.step.ends_epoch else (turn.step.epoch, turn.step.index + 1)

    def averaged(self) -> None:
        """From here to the next turn all workers do the same: whoever draws must draw the same."""
        seed_everything(lane_seed(self._seed, self.step, self._lanes))

    def write_down(self) -> None:
        """Before anything leaves: for the ledger."""
        if self._ledger is not None and self.turn is not None and self.turn.step is not None:
            place = (self.turn.stage, self.turn.step.epoch, self.turn.step.index)
            self._ledger.holds(self.step, self._workers.generation, place, self._held)

    # -- what a change of workers carries over -------------------------------------------------

    def capture(self) -> dict[str, Any]:
        turn = self.turn
        return {
            "step": self.step,
            "samples": self.samples,
            "stage": self._stage,
            "position": self.position,
            "in_loop": turn is not None,
            "calls": turn.calls if turn is not None and turn.committed else -1,
            "data": self._data,
        }

    def restore(self, state: Mapping[str, Any], *, joins: bool) -> None:
        """``joins``: this worker has not begun, and comes to a loop that others may be in."""
        self.step, self._stage, self.position = state["step"], state["stage"], state["position"]
        self.samples = state["samples"]
        if self.turn is None:
            self._joins = state["in_loop"] and joins
            self._resumed_data = state["data"] if state["in_loop"] else None
        else:
            self.turn.committed, self.turn.skips, self.turn.calls = True, state["calls"], 0

    # -- mistakes ----------------------------------------------------------------------------

    def require_collective(self, what: str, line: str) -> None:
        if self.turn is not None and not self.turn.committed:
            raise UsageError(
                f"{what} is collective, and a worker passes the loop body once per lane: call it where all workers meet, once per "
                f"step: `if run.every(100): {line}` after opt.step()."
            )

    def _require_same_data(self, settings: Mapping[str, Any]) -> None:
        """In a loop that was entered before: on another worker, or before the run was resumed. More epochs may follow."""
        before, self._resumed_data = self._resumed_data, None
        for name, value in (before or {}).items():
            if name != "epochs" and settings.get(name) != value:
                raise UsageError(
                    f"the run is in the middle of a loop over run.shard with {name}={value!r}, and this script has "
                    f"{name}={settings.get(name)!r}: other samples would be left. Pass the same data and arguments."
                )

    def _require_unchanged(self) -> None:
        self.gate.require_sense()
        self.engine.require_unchanged()

    def require_open(self) -> None:
        self._tell_broken_off()
        if self._closed:
            raise UsageError("this Run is closed. Make a new one.")

    def close(self) -> None:
        self._closed = True
        self._tell_broken_off()

    def _tell_broken_off(self) -> None:
        """Not in ``leave``, which also runs while an exception ends the program."""
        if self._broken_off is not None:
            warnings.warn(
                f"a loop over run.shard was left in the middle of step {self._broken_off}: its lanes so far were dropped, and "
                "which they were depends on the number of workers. Leave it when run.committed is true, and count by run.step.",
                stacklevel=4,
            )
            self._broken_off = None

    def _require_complete(self, turn: Turn) -> None:
        if self.engine.phase is Phase.BACKWARD:
            raise UsageError(
                f"backward() raised in step {self.step} and the exception was caught: half of lane {turn.lane} is gone, and other "
                "workers wait for it. Let the exception end the run; to skip a batch call run.weigh(0) before backward()."
            )
        if self.engine.phase is Phase.LANE:
            raise UsageError(
                f"the loop body ended without backward() in step {self.step} (lane {turn.lane}). Every turn needs one: every other "
                "worker waits for its gradients. To skip a batch, give it weight 0: run.weigh(0) before backward()."
            )
        if turn.is_last and not turn.committed:
            names = ", ".join(dict.fromkeys(f"{type(each).__name__}.step()" for each in self.gate.optimizers))
            raise UsageError(
                f"the loop body ended without {names}, though the last lane of step {self.step} was averaged. "
                "Call it in every turn, on the optimizer that was passed to Run; it does nothing until the last one."
            )
