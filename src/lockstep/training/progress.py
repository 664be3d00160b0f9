"""Progress: where a run is, in steps, samples, loops and collectives. Part of the state that newcomers and checkpoints receive.

Loops over ``run.shard(...)`` are numbered in the order in which the script reaches them: the number is the loop's *stage*.
Collectives between loops (``run.evaluate``, ``run.save``) are numbered likewise, and their results are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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


@dataclass
class Progress:
    """Where the run is. It moves only when a step commits, a loop ends, or a collective between loops is complete."""

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
    results: list[Any] = field(default_factory=list)
    """The result of each collective between loops."""

    was_in_loop: bool = field(default=False, init=False)
    """Whether the adopted state was taken inside a loop."""
    loop: CurrentLoop | None = field(default=None, init=False)
    loops_reached: int = field(default=0, init=False)
    """Loops that this worker's script has reached."""
    collectives_reached: int = field(default=0, init=False)
    """Collectives between loops that this worker's script has reached."""

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
        """The epoch of the current loop, or 0."""
        return self.loop.step.epoch if self.loop is not None and self.loop.step is not None else 0

    def commit(self, plan: StepPlan) -> None:
        """A step is complete. Its phases were counted in ``commits`` before."""
        self.step += 1
        self.samples += sum(plan.counts)
        self.position = (plan.epoch + 1, 0) if plan.ends_epoch else (plan.epoch, plan.index + 1)

    def end_loop(self, stage: int) -> None:
        self.stage, self.position = stage + 1, (0, 0)

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
            "results": self.results,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Adopt another worker's progress, or a checkpoint's: what ``capture`` returned."""
        self.step, self.samples, self.commits = state["step"], state["samples"], state.get("commits", state["step"])
        self.stage, self.position = state["stage"], state["position"]
        self.equal_at, self.data = state["equal_at"], state["data"]
        self.results, self.was_in_loop = list(state["results"]), state["in_loop"]
