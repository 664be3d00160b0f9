"""Progress: where a run is, in steps, samples, loops and collectives. Part of the state that newcomers and checkpoints receive.

Loops over ``run.shard(...)`` are numbered in the order in which the script reaches them: the number is the loop's *stage*. Loops
over ``run.epochs(...)`` are numbered likewise. What a worker needs to replay the script is kept as numbered *results*: the result
of each collective between loops (``run.evaluate``, ``run.save``), and what the script could read of the run (script_values.py) at
the end of each loop over ``run.shard`` and at the beginning of each epoch of ``run.epochs``. Results of an epoch of ``run.epochs``
are dropped two epochs later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from lockstep.data.step_loader import StepPlan


@dataclass
class CurrentLoop:
    """The loop over the data that this worker is in, and the micro-batch that its loop body works on."""

    stage: int
    step: StepPlan | None = None
    lane: int = -1
    is_last: bool = False
    """Whether this is the worker's last micro-batch of the step."""
    committed: bool = False
    """Whether the step was committed in this micro-batch."""
    micro_batches: int = 0
    """How many micro-batches of this step the worker has begun."""
    generation: int = 0
    """The generation in which this micro-batch, or the last phase, began."""
    has_phases: bool = False
    """Whether this is a loop over ``run.steps``, whose steps consist of phases. In a loop over ``run.shard`` they have only one."""
    phase: int = 0
    """The phase of the step that was begun last; -1 before the first."""
    in_phase: bool = False
    """Whether the user's loop over the lanes of a step (``run.steps``) is under way."""

    @property
    def may_meet(self) -> bool:
        """Whether all workers can take part in a collective here: they are not inside the lanes of a step."""
        return not self.in_phase if self.has_phases else self.committed


@dataclass(frozen=True)
class EpochLoop:
    """A loop over ``run.epochs(...)``: its current epoch, and what the script had reached when that epoch began."""

    epoch: int
    """From 0; the number of epochs if all of them are over."""
    stage: int
    """How many loops over ``run.shard`` the script had reached."""
    result: int
    """How many results there were: the next one belongs to the beginning of this epoch."""
    first: int
    """The number of the result that belongs to the beginning of the first epoch."""
    keep: int
    """Results from ``first`` to this one were dropped."""
    is_exhausted: bool = False
    """Whether all epochs are over."""
    is_left: bool = False
    """Whether the script has left the loop by ``break``: then ``stage`` and ``result`` are those of the end of the loop."""


@dataclass
class Progress:
    """Where the run is. It moves when a step commits, a loop ends, an epoch begins, or a collective between loops is complete."""

    step: int = 0
    """Steps committed so far."""
    samples: int = 0
    """Samples committed so far."""
    commits: int = 0
    """Phases committed so far: as many as steps, if every step has one phase."""
    stage: int = 0
    """The loop that the run is in, or comes to next."""
    position: tuple[int, int] = (0, 0)
    """The cursor in that loop: (epoch, step in the epoch)."""
    equal_at: int = -1
    """The last step after which all replicas were known to hold the same bits."""
    data: dict[str, Any] = field(default_factory=dict)
    """The arguments of the loop's ``run.shard`` that must not change."""
    results: dict[int, Any] = field(default_factory=dict)
    """The results that were not dropped, by number."""
    result_count: int = 0
    """How many results there were so far."""
    epoch_loops: list[EpochLoop] = field(default_factory=list)
    """The loops over ``run.epochs`` that the run has reached."""

    was_in_loop: bool = field(default=False, init=False)
    """Whether the adopted state was taken inside a loop."""
    loop: CurrentLoop | None = field(default=None, init=False)
    loops_reached: int = field(default=0, init=False)
    """Loops that this worker's script has reached."""
    results_reached: int = field(default=0, init=False)
    """How many results there were when the run was where this worker's script is."""
    epoch_loops_reached: int = field(default=0, init=False)
    """Loops over ``run.epochs`` that this worker's script has reached."""
    epoch_now: int | None = field(default=None, init=False)
    """The epoch of the loop over ``run.epochs`` that this worker's script is in, or None."""
    epoch_count: int | None = field(default=None, init=False)
    """How many epochs that loop has."""

    @property
    def committed(self) -> bool:
        """Whether the step was committed in the current micro-batch."""
        return self.loop is not None and self.loop.committed

    @property
    def is_in_phases(self) -> bool:
        """Whether the worker is in a loop over ``run.steps``."""
        return self.loop is not None and self.loop.has_phases

    @property
    def epoch(self) -> int:
        """The epoch of ``run.epochs``; outside it, the epoch of the current loop, or 0."""
        if self.epoch_now is not None:
            return self.epoch_now
        return self.loop.step.epoch if self.loop is not None and self.loop.step is not None else 0

    def commit(self, plan: StepPlan) -> None:
        """A step is complete. Its phases were counted in ``commits`` before."""
        self.step += 1
        self.samples += sum(plan.counts)
        self.position = (plan.epoch + 1, 0) if plan.ends_epoch else (plan.epoch, plan.index + 1)

    def end_loop(self, stage: int) -> None:
        self.stage, self.position = stage + 1, (0, 0)

    def add_result(self, result: Any) -> None:
        self.results[self.result_count] = result
        self.result_count += 1
        self.results_reached = self.result_count

    def begin_epoch(self, number: int, epoch: int, count: int) -> None:
        """Begin an epoch of loop ``number`` over ``run.epochs``, and drop the results of epochs before the last one.

        ``epoch`` is ``count`` if all epochs are over.

        The last one's are kept, because rank 0 may have died before it could send them to the agent.
        """
        last = self.epoch_loops[number] if number < len(self.epoch_loops) else None
        first, keep = (self.result_count, self.result_count) if last is None else (last.first, last.result)
        self.results = {index: result for index, result in self.results.items() if not first <= index < keep}
        self.epoch_loops[number:] = [EpochLoop(epoch, self.loops_reached, self.result_count, first, keep, epoch >= count)]

    def leave_epochs(self, number: int) -> None:
        """The script has left loop ``number`` over ``run.epochs`` by ``break``."""
        last = self.epoch_loops[number]
        self.epoch_loops[number] = replace(last, stage=self.loops_reached, result=self.result_count, is_left=True)

    def capture(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "samples": self.samples,
            "commits": self.commits,
            "stage": self.stage,
            "position": self.position,
            "equal_at": self.equal_at,
            "in_loop": self.loop is not None,
            "data": self.data,
            "results": dict(self.results),
            "result_count": self.result_count,
            "epoch_loops": [asdict(each) for each in self.epoch_loops],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Adopt another worker's progress, or a checkpoint's: what ``capture`` returned."""
        self.step, self.samples, self.commits = state["step"], state["samples"], state.get("commits", state["step"])
        self.stage, self.position = state["stage"], state["position"]
        self.equal_at, self.data = state["equal_at"], state["data"]
        self.results, self.result_count, self.was_in_loop = dict(state["results"]), state["result_count"], state["in_loop"]
        self.epoch_loops = [EpochLoop(**each) for each in state["epoch_loops"]]
