"""Brings the members of a new generation to the same point: newcomers receive the state, others the results they missed.

All functions here are collective. Nothing is unpickled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch

from lockstep.comm.base import Comm
from lockstep.comm.exchange import broadcast_in_place, gather_bytes
from lockstep.comm.plain_state import empty_tensors, flatten, unflatten
from lockstep.errors import InvariantError


@dataclass(frozen=True)
class WorkerProgress:
    """How far a worker is: its committed phases (-1: it holds no state), and its collective points since (CollectiveJournal).

    ``has_averages``: it has all averages of the next phase, but does not know whether every other worker has them.
    """

    commits: int = -1
    passed: int = 0
    inside: int = 0
    has_averages: bool = False


@dataclass(frozen=True)
class Aligned:
    """What a worker received when a generation began.

    ``state`` is set for a newcomer: the state of a worker that has passed ``passed`` collective points since its last commit.
    ``has_result`` is set if this worker is in a collective point that another worker has completed with ``result``.
    ``confirmed`` is set if every worker that holds a state has the averages of the next phase, or has committed it.
    """

    state: Any = None
    passed: int = 0
    has_result: bool = False
    result: Any = None
    confirmed: bool = False


def send_value(comm: Comm, value: Callable[[], Any], source: int, receivers: Sequence[int], device: torch.device) -> Any:
    """Send plain data from rank ``source`` to ``receivers``. All ranks must call it.

    Args:
        value: Called on ``source`` only.
        receivers: Must not contain ``source``.
        device: Where received CUDA tensors are put.

    Returns:
        The value on the receivers, None on the other ranks.
    """
    skeleton, tensors = flatten(value(), "the state of the run") if comm.rank == source else ("", [])
    skeleton = gather_bytes(comm, skeleton.encode(), "the outline of the state")[source].decode()
    if comm.rank != source:
        tensors = empty_tensors(skeleton, str(device))
    broadcast_in_place(comm, tensors, source, "the state of the run")
    return unflatten(skeleton, tensors) if comm.rank in receivers else None


def align(
    comm: Comm, mine: WorkerProgress, capture: Callable[[], Any], results: Mapping[int, Any], device: torch.device
) -> Aligned:
    """Bring all members of a new generation to the same point. All ranks must call it.

    A newcomer receives the state of a worker with the greatest number of committed phases. A worker that is in a collective point
    which another worker has completed receives its result. (docs/internals/commit.md says why no other case exists.)

    Args:
        mine: This worker's progress.
        capture: Returns this worker's state. Called if others need it.
        results: The results of this worker's collective points since its last commit.
        device: Where received CUDA tensors are put.
    """
    everyone = gather_progress(comm, mine)
    latest = max(each.commits for each in everyone)
    newcomers = [rank for rank, each in enumerate(everyone) if each.commits < 0]
    aligned = Aligned(confirmed=_is_confirmed(everyone, mine))
    if newcomers and latest >= 0:
        source = next(rank for rank, each in enumerate(everyone) if each.commits == latest)
        state = send_value(comm, capture, source, newcomers, device)
        aligned = replace(aligned, state=state, passed=everyone[source].passed)
    ahead = {rank: each for rank, each in enumerate(everyone) if each.commits == latest}
    for point in sorted({each.inside for each in ahead.values() if each.inside}):
        complete = [rank for rank, each in ahead.items() if each.passed >= point]
        if complete:
            inside = [rank for rank, each in ahead.items() if each.inside == point]
            result = send_value(comm, lambda point=point: results.get(point), complete[0], inside, device)  # type: ignore[misc]
            if comm.rank in inside:
                aligned = replace(aligned, has_result=True, result=result)
    return aligned


def _is_confirmed(everyone: Sequence[WorkerProgress], mine: WorkerProgress) -> bool:
    """Return whether this worker may commit the phase whose averages it has. Pure.

    A worker commits only when every worker has the averages. So if one has committed, all have them; if one lacks them, none has
    committed, and all repeat the phase.
    """
    latest = max(each.commits for each in everyone)
    for rank, each in enumerate(everyone):
        if each.commits >= 0 and each.commits + each.has_averages < latest:
            raise InvariantError(
                f"rank {rank} has committed {each.commits} phases and lacks averages; another has committed {latest}"
            )
    if not mine.has_averages:
        return False
    return latest > mine.commits or all(each.has_averages for each in everyone if each.commits == latest)


def gather_progress(comm: Comm, mine: WorkerProgress) -> list[WorkerProgress]:
    """Return every worker's progress, by rank. All ranks must call it."""
    everyone = torch.zeros(comm.size, 4, dtype=torch.int64)
    comm.all_gather(everyone, torch.tensor(astuple(mine), dtype=torch.int64), "the progress of each worker").wait()
    return [WorkerProgress(commits, passed, inside, bool(averages)) for commits, passed, inside, averages in everyone.tolist()]
