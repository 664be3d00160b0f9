"""Where the time of the last steps went, in one sentence for people. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.recording.breakdown import Breakdown, breakdown
from lockstep.recording.records import BACKWARD, BODY, CHECKPOINT, DATA, EVALUATE, FORWARD, LANE, OPTIMIZER, WAITS, StepRecord
from lockstep.recording.text import rank_text
from lockstep.recording.waits import Waits, waits

_FEWEST_STEPS = 10
_LEAST_SHARE = 0.005
LEAST_WAIT = 0.02
"""Shorter waits for one worker, as a part of the step, are not worth its name."""
_GROUPS = (
    ("computation", (FORWARD, BACKWARD, OPTIMIZER, BODY)),
    ("loading data", (DATA,)),
    ("waiting for workers and transport", tuple(WAITS)),
    ("checkpoints", (CHECKPOINT,)),
    ("evaluation", (EVALUATE,)),
    ("exactness", (LANE,)),
)


def costs_text(records: Sequence[StepRecord]) -> str:
    """ "a step: 88% computation, 8% waiting for workers and transport (most for rank 2), 2% exactness; ..."

    Empty if too few steps were recorded. The groups that take less than half a percent are left out.
    """
    costs = breakdown(records)
    if costs.steps < _FEWEST_STEPS or costs.seconds <= 0:
        return ""
    parts = []
    for name, phases in _GROUPS:
        share = sum(costs.phases.get(phase, 0.0) for phase in phases) / costs.seconds
        if share >= _LEAST_SHARE:
            parts.append(f"{share:.0%} {name}" if share >= 0.05 else f"{share:.1%} {name}")
            if phases == tuple(WAITS):
                parts[-1] += _waited_for(waits(records), costs)
    return "; ".join([f"a step: {', '.join(parts)}", *_further(costs)])


def _waited_for(found: dict[int, Waits], costs: Breakdown) -> str:
    """The worker for which the others wait longest, if they wait long."""
    total: dict[int, float] = {}
    for each in found.values():
        for worker, seconds in each.for_worker.items():
            total[worker] = total.get(worker, 0.0) + seconds / len(found)
    longest_s, worker = max(((seconds, worker) for worker, seconds in total.items()), default=(0.0, 0))
    ranks = {each.worker: each.rank for each in costs.workers}
    return f" (most for {rank_text(ranks.get(worker, worker), worker)})" if longest_s >= LEAST_WAIT * costs.seconds else ""


def _further(costs: Breakdown) -> list[str]:
    found = []
    if costs.hidden is not None:
        found.append(f"{costs.hidden:.0%} of the communication is hidden")
    if costs.lane_balance < 0.995:
        lanes = sorted(set(costs.lanes.values()))
        found.append(f"workers have {' or '.join(map(str, lanes))} lanes, and the steps wait for those that have most")
    return found
