"""Spares: workers that wait while the run has all its members. Who may take whose place, and how many workers are missing. Pure.

A worker that waits at the loop of the members, while there are as many members as there should be, stands by as a spare. When a
member is lost or leaves, it becomes a member at the next change of generation, and another spare is started. A run has spares if
it was asked for them (``--spares``), or if there are more workers than lanes.

Any spare takes any place, with two exceptions, which ``Worker.device`` describes:

    over NCCL             no two members may share a GPU: a spare replaces the member that used its GPU, and nobody else
    on several machines   a machine has no more members than it has room for

If no spare may take the place of a lost member, a replacement is started there, as without spares.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from lockstep.plan.membership_state import State, Status, Worker


def device_of(machine: str, room: int, gpu: str) -> tuple[str, int]:
    """Returns a worker's ``device`` and ``device_room``.

    ``machine``: its name, if the run may have several machines. ``room``: how many members it has room for. ``gpu``: what the
    worker has said about its GPU: its name if no other member may use it, else "".
    """
    if gpu:
        return f"{machine}/{gpu}", 1
    return machine, room if machine else 0


def most_members(state: State) -> int:
    """How many members a generation may have: as many as the run should have workers, but no more than there are lanes."""
    return min(state.size, state.max_members) if state.max_members else state.size


def workers_wanted(state: State) -> int:
    """How many workers there should be, with the spares. Surplus workers, for which there are no lanes, count as spares."""
    return max(state.size, most_members(state) + state.spares) if state.generation >= 0 else state.size


def staying(state: State) -> list[int]:
    """The members that were not asked to leave."""
    return [id for id in state.members if not state.worker(id).leaving]


def is_complete(state: State) -> bool:
    """Whether a generation exists, and has as many members that stay as it should have: other workers are spares."""
    return state.generation >= 0 and len(staying(state)) >= most_members(state)


def is_needed(state: State, id: int) -> bool:
    """Whether the worker is a member, or the run lacks members. The failure of another worker is of no consequence."""
    return not is_complete(state) or id in state.members


def admitted(state: State, members: Sequence[int]) -> list[int]:
    """The waiting workers that join a generation that has ``members`` already: those in the same loop that may take a place."""
    waiting = [worker for worker in state.workers if worker.status is Status.WAITING and not worker.leaving]
    if state.generation >= 0:
        waiting = [worker for worker in waiting if worker.stage == state.stage]
    return _that_fit(state, members, waiting)


def lacks_members(state: State) -> int:
    """How many replacements must be started, because no worker that is there or starts already will take these places."""
    if state.generation < 0:
        return state.size - sum(not worker.leaving for worker in state.workers)
    members = staying(state)
    is_member = frozenset(state.members)
    others = [worker for worker in state.workers if worker.id not in is_member and not worker.leaving]
    ready = _that_fit(state, members, [worker for worker in others if worker.status is not Status.STARTING])
    starting = sum(worker.status is Status.STARTING for worker in others)  # it is not known yet which places they may take
    return most_members(state) - len(members) - len(ready) - starting


def missing_workers(state: State) -> int:
    """How many workers must be started to have as many as are wanted. Spares start later, except if they would take a place."""
    missing = workers_wanted(state) - sum(not worker.leaving for worker in state.workers)
    return min(missing, lacks_members(state)) if state.spares else missing


def surplus_workers(state: State) -> list[int]:
    """The workers that leave if there are too many: newcomers first, because they hold no training state; then the last ranks.

    Among the newcomers, those that are still starting leave first.
    """
    members, is_member = staying(state), frozenset(state.members)
    others = [worker for worker in state.workers if worker.id not in is_member and not worker.leaving]
    others.sort(key=lambda worker: worker.status is Status.STARTING)
    kept = max(0, workers_wanted(state) - min(len(members), state.size))
    return [*(worker.id for worker in others[kept:]), *members[state.size :]]


def stands_by(state: State, id: int) -> bool:
    """Whether the worker waits although no member is lost whose place it could take."""
    worker = state.find(id)
    if worker is None or worker.status is not Status.WAITING or worker.leaving or state.generation < 0:
        return False
    others = [each for each in state.workers if each.status in (Status.WAITING, Status.PREPARING) and not each.leaving]
    return id not in _that_fit(state, staying(state), others)


def _that_fit(state: State, members: Sequence[int], candidates: Sequence[Worker]) -> list[int]:
    """Those of the candidates, in their order, that may become members besides ``members``."""
    free = most_members(state) - len(members)
    if free <= 0 or not candidates or state.finishing:
        return []
    used = Counter(state.worker(id).device for id in members)
    is_shared = bool(used[""])  # a member has no device of its own, so other members may share one too
    joining: list[int] = []
    for worker in candidates:
        if len(joining) < free and (is_shared or not worker.device or used[worker.device] < worker.device_room):
            joining.append(worker.id)
            used[worker.device] += 1
    return joining
