"""Lanes x workers -> who runs what. Pure.

Lanes are my_lanes in contiguous ranges, as evenly as they go; a step's samples are cut into lanes the
same way. Lane i of L gets samples [n*i//L, n*(i+1)//L): which sample is in which lane depends on
nothing but n and L.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.errors import UsageError


@dataclass(frozen=True)
class MicroBatchPlan:
    """One turn of a worker's loop body: lane ``lane`` with samples [start, stop) of the step's batch.

    ``start == stop``: none of this worker's lanes has samples in this step, and the body runs on a
    stand-in that counts for nothing.
    """

    lane: int
    start: int
    stop: int


def assign_lanes(lanes: int, workers: int) -> tuple[tuple[int, int], ...]:
    """Worker r's lanes [first, last). Every worker has at least one."""
    if workers > lanes:
        raise UsageError(
            f"{workers} workers cannot share {lanes} lane{'s' if lanes > 1 else ''}: each needs at least one. "
            f"Pass lanes={workers} or more to Run, or start at most {lanes} worker{'s' if lanes > 1 else ''}."
        )
    return tuple((lanes * r // workers, lanes * (r + 1) // workers) for r in range(workers))


def cut(samples: int, lanes: int) -> tuple[tuple[int, int], ...]:
    """Lane i's samples [start, stop) of a batch of so many."""
    return tuple((samples * i // lanes, samples * (i + 1) // lanes) for i in range(lanes))


def plan_micro_batches(lanes: tuple[int, int], cuts: Sequence[tuple[int, int]]) -> tuple[MicroBatchPlan, ...]:
    """The turns of a worker that has lanes [first, last): one per lane with samples, or a single stand-in."""
    mine = [MicroBatchPlan(lane, *cuts[lane]) for lane in range(*lanes)]
    return tuple(p for p in mine if p.stop > p.start) or (MicroBatchPlan(lanes[0], 0, 0),)
