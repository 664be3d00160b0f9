"""Assigns lanes to workers, and the samples of a step to lanes. Pure.

Workers get contiguous ranges of lanes, as evenly as possible, and lanes get contiguous ranges of samples in the same way: lane i
of L gets samples [n*i//L, n*(i+1)//L) of n. Which lane a sample is in depends only on n and L.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.errors import UsageError


@dataclass(frozen=True)
class MicroBatchPlan:
    """One micro-batch of a worker: lane ``lane`` with samples [start, stop) of the step's global batch.

    If ``start == stop``, none of the worker's lanes has samples in this step, and the loop body runs on a stand-in batch with
    weight 0.
    """

    lane: int
    start: int
    stop: int


def assign_lanes(lanes: int, workers: int) -> tuple[tuple[int, int], ...]:
    """Returns the lanes [first, last) of each worker, by rank.

    Raises:
        UsageError: If there are more workers than lanes: every worker needs at least one lane.
    """
    if workers > lanes:
        raise UsageError(
            f"{workers} workers cannot share {lanes} lane{'s' if lanes > 1 else ''}: each worker needs at least one. "
            f"Pass lanes={workers} or more to Run, or start at most {lanes} worker{'s' if lanes > 1 else ''}."
        )
    return tuple((lanes * r // workers, lanes * (r + 1) // workers) for r in range(workers))


def cut(samples: int, lanes: int) -> tuple[tuple[int, int], ...]:
    """Returns the samples [start, stop) of each lane of a batch of ``samples`` samples."""
    return tuple((samples * i // lanes, samples * (i + 1) // lanes) for i in range(lanes))


def plan_micro_batches(lanes: tuple[int, int], cuts: Sequence[tuple[int, int]]) -> tuple[MicroBatchPlan, ...]:
    """Returns the micro-batches of a worker with lanes [first, last): one per lane with samples, or a single stand-in."""
    mine = [MicroBatchPlan(lane, *cuts[lane]) for lane in range(*lanes)]
    return tuple(p for p in mine if p.stop > p.start) or (MicroBatchPlan(lanes[0], 0, 0),)
