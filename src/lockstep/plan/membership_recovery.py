"""The state of a run as a new head learns it from the agents: they outlive the head, and remember what concerns them. Pure.

A head that is started in the place of a lost one knows nothing. Each agent reports its workers and the newest generation that it
was told. The newest generation of all reports is the current one: a head tells the agents of a generation before it counts on
it, and a generation in which one member was not told cannot train, because every member must enter it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lockstep.plan.membership_events import Action
from lockstep.plan.membership_generation import Decision, break_generation, settle, spawn
from lockstep.plan.membership_restarts import restart, restarts_together
from lockstep.plan.membership_spares import device_of
from lockstep.plan.membership_state import Policy, State, Status, Worker


@dataclass(frozen=True)
class WorkerReport:
    """What an agent knows of one of its workers, from the packets that it has passed on."""

    id: int
    pid: int | None = None
    has_joined: bool = False
    """It has asked to join."""
    ready_generation: int = -1
    """The last generation that it has left."""
    steps: int = -1
    leaving: bool = False
    finished: bool = False
    gpu: str = ""
    """What it has said about its GPU (plan/membership_spares.py)."""
    is_unsettled: bool = False
    """It has lost its peers, or waits for a key of the store of its generation, which was lost with the head."""


@dataclass(frozen=True)
class MachineReport:
    """What an agent knows of the run. ``members`` are those of the newest generation that it was told (-1: of none).

    ``machine``: the name of its machine, which the head adds.
    """

    room: int
    workers: tuple[WorkerReport, ...] = ()
    generation: int = -1
    members: tuple[int, ...] = ()
    stage: int = -1
    committed: int = 0
    max_members: int = 0
    next_id: int = 0
    wanted: int = 0
    """How many workers a person has asked for; 0: as many as there is room for."""
    has_joined: bool = False
    needs_peers: bool = False
    started: int = 0
    """How many workers the run started at first, on all machines; 0: this machine has started none."""
    machine: str = ""


def newest(reports: Sequence[MachineReport]) -> MachineReport:
    """The report with the newest generation."""
    return max(reports, key=lambda report: report.generation)


def missing_members(reports: Sequence[MachineReport]) -> list[int]:
    """The members of the newest generation that no report names: they are dead, or their machine has not reported yet."""
    known = {worker.id for report in reports for worker in report.workers}
    return [id for id in newest(reports).members if id not in known]


def is_complete(reports: Sequence[MachineReport]) -> bool:
    """Whether every member is in a report. Before the first generation: whether as many workers are as were started at first."""
    if newest(reports).generation >= 0:
        return not missing_members(reports)
    return sum(len(report.workers) for report in reports) >= max(report.started for report in reports)


def has_majority(members: Sequence[int], present: Sequence[int]) -> bool:
    """Whether ``present`` may continue without the other ``members``: more than half of them, or half of them with the first one.

    Two disjoint sets cannot both have a majority, so two heads cannot both continue.
    """
    there = frozenset(present)
    alive = [id for id in members if id in there]
    return 2 * len(alive) > len(members) or (2 * len(alive) == len(members) and bool(alive) and alive[0] == members[0])


def recover(policy: Policy, reports: Sequence[MachineReport], now: float) -> tuple[Decision, tuple[int, ...]]:
    """The state of the run, the actions that follow, and the workers to be killed: newcomers and spares, which held no state.

    Members that no report names are lost. Replacements for lost members and newcomers are started, as far as there is room.
    """
    latest = newest(reports)
    found = {worker.id: worker for report in reports for worker in report.workers}
    devices = {each.id: device_of(report.machine, report.room, each.gpu) for report in reports for each in report.workers}
    # The head was lost while it told the agents of the newest generation. Their workers wait for it, and enter the next one.
    untold = {worker.id for report in reports if report.generation < latest.generation for worker in report.workers}
    kept = list(found.values()) if latest.generation < 0 else [found[id] for id in latest.members if id in found]
    kept_ids = {worker.id for worker in kept}
    dropped = tuple(id for id in found if id not in kept_ids)
    lost = [id for id in latest.members if id not in found]
    members = tuple(worker.id for worker in kept) if latest.generation >= 0 else ()
    room, wanted = sum(report.room for report in reports), max(report.wanted for report in reports)
    state = State(
        size=max(1, min(wanted or room, room)),
        room=room,
        wanted=wanted,
        policy=policy,
        spares=policy.spares,
        workers=tuple(_worker(each, latest.generation, devices[each.id], is_untold=each.id in untold) for each in kept),
        next_id=max(report.next_id for report in reports),
        max_members=max(report.max_members for report in reports),
        generation=latest.generation,
        members=members,
        formed=latest.members,
        departed=tuple(f"worker {id} was lost" for id in lost),
        stage=max(report.stage for report in reports),
        committed=max(report.committed for report in reports),
        formed_at_step=max(report.committed for report in reports),
        finishing=any(worker.finished for worker in kept),
        has_joined=any(report.has_joined for report in reports),
        needs_peers=any(report.needs_peers for report in reports),
        reads_rank=any(report.needs_peers for report in reports),
    )
    is_unsettled = any(
        worker.is_unsettled or worker.id in untold or worker.ready_generation == latest.generation >= 0 for worker in kept
    )
    why = "the head was replaced" if not lost else "the head was replaced, and members are lost"
    actions: tuple[Action, ...] = ()
    if state.generation >= 0 and (lost or is_unsettled):
        state, actions = break_generation(state, why, now)
    if restarts_together(state):
        return (restart(state, f"{why}, and members are lost") if not is_complete(reports) else (state, (), why)), dropped
    missing = state.size - sum(not worker.leaving for worker in state.workers)
    if not policy.respawn:
        missing = min(missing, sum(report.room for report in reports if report.next_id == 0))
    if missing > 0 and not state.finishing:
        state, start = spawn(state, missing, 0.0, is_replacement=state.generation >= 0)
        actions += (start,)
    state, more, why = settle(replace(state, arrived_at=now, ready_at=now if is_unsettled else None), why)
    return (state, (*actions, *more), why), dropped


def _worker(report: WorkerReport, generation: int, device: tuple[str, int], *, is_untold: bool) -> Worker:
    if generation < 0:
        status = Status.WAITING if report.has_joined else Status.STARTING
    else:
        status = Status.READY if is_untold or report.ready_generation == generation else Status.MEMBER
    return Worker(
        report.id,
        status,
        report.pid,
        leaving=report.leaving,
        finished=report.finished,
        device=device[0],
        device_room=device[1],
        has_committed=generation >= 0,
        steps=report.steps,
    )
