"""The rules of membership: which workers form a generation, and what follows when a worker comes, goes, dies or hangs. Pure.

``decide(state, event, now)`` returns the next state, the actions for the agent to perform, and the reason. The status of a worker:

    STARTING --JoinRequested--> WAITING --Form--> MEMBER --Ready--> READY --Form--> MEMBER ...
        |                          ^ |
        | (a generation exists)    | | (the run has passed that loop)
        +---JoinRequested---> PREPARING
    Died in any status: the worker is removed

A generation ends in one of two ways.
**Broken**: a member died, or other members lost contact with it. All members are told to abort and become READY. The survivors
alone form the next generation and repeat the step.
**Changing**: a worker waits to join or wants to leave. All members leave the generation after the same step. The next generation
has the newcomers and lacks the workers that leave. A newcomer that arrives during a recovery waits for such a change.

A *newcomer* is a worker that is started while the run is under way. It is not a member while it sets up (PREPARING): it runs its
script up to the loop that the members are in, waits there, and becomes a member at the next change. A newcomer that is not needed
waits as a *spare*, until a member is lost (plan/membership_spares.py).
plan/membership_generation.py has what follows from a state, plan/membership_hangs.py the hang timeout, and
plan/membership_restarts.py what follows if the script does not use ``lockstep.Run``.

The rules do not know how many agents there are, and of machines only how many members each has room for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from lockstep.plan.membership_events import (
    Action,
    AloneBegan,
    AloneEnded,
    Committed,
    Died,
    Dismiss,
    Event,
    JoinRequested,
    LeaveRequested,
    MachineJoined,
    MachineLost,
    PeersLost,
    PostponeTimeouts,
    Prepare,
    RankRead,
    Ready,
    Report,
    ScaleRequested,
    ScriptFinished,
    ScriptRaised,
    SkipLoop,
    StageEntered,
    Tick,
)
from lockstep.plan.membership_generation import Decision, break_generation, end, kill, note_commit, respawn, settle, spawn
from lockstep.plan.membership_hangs import on_tick
from lockstep.plan.membership_restarts import end_notes, on_death_while_stopping, on_rank_read, restart, restarts_together
from lockstep.plan.membership_spares import admitted, is_needed, missing_workers, most_members, stands_by, staying, surplus_workers
from lockstep.plan.membership_state import Policy, State, Status
from lockstep.plan.membership_texts import Replacement, count, death_text, go_on, start_again


def begin(size: int, policy: Policy | None = None, room: int = 0) -> Decision:
    """The first decision of a run: start ``size`` workers. ``room``: how many there can be; 0: any number."""
    policy = policy or Policy()
    state, start = spawn(State(size, policy, room=room, spares=policy.spares), size, 0.0)
    return state, (start,), f"starting {count(size)}"


def decide(state: State, event: Event, now: float) -> Decision:
    """Returns the state after ``event``, the actions that follow from it, and why. Events of removed workers change nothing."""
    if state.ended:
        return state, (), "the run has ended"
    if not isinstance(event, (ScaleRequested, MachineJoined, MachineLost, Tick)) and state.find(event.worker) is None:
        return state, (), f"worker {event.worker} is gone already"
    if state.restarting and not isinstance(event, (Died, MachineJoined, MachineLost)):
        return state, (), "all workers are being stopped"
    return _RULES[type(event)](state, event, now)


# -- one rule per event ----------------------------------------------------------------------


def _on_join_request(state: State, event: JoinRequested, now: float) -> Decision:
    state = replace(state, has_joined=True)
    if state.finishing:
        return state, (Dismiss(event.worker, "the run is over"),), "the run is over"
    if state.worker(event.worker).leaving and state.generation >= 0:
        return state, (Dismiss(event.worker, "it was asked to leave"),), f"worker {event.worker} leaves before it joined"
    state = state.update(event.worker, pid=event.pid or state.worker(event.worker).pid, stage=event.stage)
    if event.device:
        state = state.update(event.worker, device=event.device, device_room=event.device_room)
    state = replace(state, max_members=event.max_members or state.max_members, arrived_at=now)
    if state.generation >= 0 and event.stage < 0:
        state = state.update(event.worker, status=Status.PREPARING)
        others = max(1, min(len(state.members), most_members(state) - 1))  # when it joins; a spare takes a place that is lost then
        return state, (Prepare(event.worker, others),), f"worker {event.worker} sets up to join"
    if event.stage >= 0 and event.stage < state.stage:
        return _pass(state, [event.worker], f"worker {event.worker} passes loop {event.stage}")
    state, actions, why = settle(state.update(event.worker, status=Status.WAITING), f"worker {event.worker} waits to join")
    state, reports = _note_spare(state, event.worker)
    return state, (*reports, *actions), why


def _note_spare(state: State, id: int) -> tuple[State, tuple[Action, ...]]:
    """Say that a worker stands by as a spare, when it does so for the first time."""
    if not stands_by(state, id) or state.worker(id).has_stood_by:
        return state, ()
    return state.update(id, is_spare=True, has_stood_by=True), (Report(f"{state.worker(id).name} stands by as a spare"),)


def _on_stage(state: State, event: StageEntered, now: float) -> Decision:
    why = f"the run is in loop {max(event.stage, state.stage)}"
    if event.worker not in state.members or event.stage <= state.stage:
        return state, (), why
    state = replace(state, stage=event.stage)
    behind = [id for id in state.with_status(Status.WAITING) if state.worker(id).stage < event.stage]
    state, passes, why = _pass(state, behind, why)
    state, actions, why = settle(state, why)
    return state, (*passes, *actions), why


def _pass(state: State, ids: Sequence[int], why: str) -> Decision:
    """Let newcomers continue their scripts behind a loop that the run has passed."""
    for id in ids:
        state = state.update(id, status=Status.PREPARING)
    return state, tuple(SkipLoop(id, state.worker(id).stage) for id in ids), why


def _on_commit(state: State, event: Committed, now: float) -> Decision:
    if event.worker in state.members:
        state = note_commit(state, event.step)
    return state, (), f"{event.step} steps are committed"


def _on_ready(state: State, event: Ready, now: float) -> Decision:
    if event.generation != state.generation or event.worker not in state.members:
        return state, (), f"worker {event.worker} has left generation {event.generation}, which is over"
    state = note_commit(state.update(event.worker, status=Status.READY, steps=event.step), event.step)
    state = replace(state, ready_at=now)  # from now on this worker waits for the other members
    return settle(state, f"worker {event.worker} has left generation {event.generation}")


def _on_peers_lost(state: State, event: PeersLost, now: float) -> Decision:
    if event.generation != state.generation or event.worker not in state.members:
        return state, (), f"worker {event.worker} lost peers of generation {event.generation}, which is over"
    blamed = [id for id in event.blamed if event.hung and id in state.members and id != event.worker]
    stuck = [id for id in blamed if state.worker(id).status is Status.MEMBER and not _has_announced(state, id, now)]
    state = state.update(event.worker, lost_because=event.why)
    state, kills = kill(state, stuck, f"worker {event.worker} waited for it: {event.why.rstrip('.')}")
    state, aborts = break_generation(state, f"worker {event.worker} lost its peers: {event.why}", now)
    return state, (*kills, *aborts), event.why


def _has_announced(state: State, id: int, now: float) -> bool:
    """Whether the worker works alone, or has done so until less than a hang timeout ago: then nobody has waited a whole timeout."""
    return now - state.worker(id).alone_until < state.policy.hang_timeout_s


def _on_alone(state: State, event: AloneBegan | AloneEnded, now: float) -> Decision:
    what, limit_s = (event.what, event.limit_s) if isinstance(event, AloneBegan) else ("", 0.0)
    why = f"worker {event.worker} works alone: {what}" if what else f"worker {event.worker} does not work alone any more"
    if event.worker not in state.members:
        return state, (), why  # nobody waits for a newcomer
    state = state.update(event.worker, alone=what, alone_limit_s=limit_s, alone_until=now + limit_s)
    others = tuple(id for id in state.members if id != event.worker)
    return state, (PostponeTimeouts(others, event.worker, limit_s),) if others else (), why


def _on_leave_request(state: State, event: LeaveRequested, now: float) -> Decision:
    state = state.update(event.worker, leaving=True)
    if event.cannot_join:
        state = replace(state, spares=0)
    if state.generation >= 0 and event.worker not in state.members:
        return state, (Dismiss(event.worker, "it was asked to leave"),), f"worker {event.worker} leaves before it joined"
    return settle(state, f"worker {event.worker} wants to leave")


def _on_script_raised(state: State, event: ScriptRaised, now: float) -> Decision:
    """One exception is treated as a fault. The same one at the same place, two at the same step, or one before training: a bug.

    Those of a spare do not count: the run does without it. Failures of GPUs (torch's AcceleratorError) are seen at one place,
    where the script next waits for its GPU: for them only the same step shows a bug, if the script uses ``lockstep.Run``.
    """
    if not is_needed(state, event.worker):
        return state, (), f"spare {event.worker} raised {event.error}"
    name, _, text = event.error.partition(": ")
    kind = name.rpartition(".")[2]
    lost_device = kind == "DeviceError"
    bug = f"{event.place}: {re.sub('[0-9]+', '#', event.error)}" if event.place else ""  # messages may name ranks or samples
    bug = "" if lost_device or (kind == "AcceleratorError" and not restarts_together(state)) else bug
    is_same_place = bool(bug) and bug in state.failed_places
    is_same_step = event.step in state.failed_steps and state.worker(event.worker).status is not Status.STARTING
    state = replace(state, failed_steps=(*state.failed_steps, event.step), failed_places=(*state.failed_places, bug))
    if state.generation < 0 and not restarts_together(state):
        return end(state, 1, f"the script raised before training began: {event.error}")
    if is_same_place or is_same_step:
        where = event.place.partition(" at ")[2] if is_same_place else f"step {event.step}"
        return end(state, 1, f"the script raised at {where} {_repeated(state)}: {event.error}")
    why = f"worker {event.worker} raised {event.error}"
    if restarts_together(state):
        return restart(replace(state, restarting_for=bug), f"worker {event.worker} raised {name}")  # its message was shown
    said = (Report(f"worker {event.worker} cannot use its GPU any more ({text.rstrip('.')})"),) if lost_device else ()
    if event.worker not in state.members:
        return state, said, why
    state, aborts = break_generation(state, why, now)  # its process is about to exit: the other members need not wait for that
    return state, (*said, *aborts), why


def _repeated(state: State) -> str:
    return "again after a restart" if state.restarts else "on more than one worker"


def _on_script_finished(state: State, event: ScriptFinished, now: float) -> Decision:
    # The scripts of workers that leave, and of newcomers that are not members, may end early.
    is_end = not state.worker(event.worker).leaving and (state.generation < 0 or event.worker in state.members)
    finishing = state.finishing or is_end
    if is_end and event.step >= 0:
        state = replace(state, ended_at=(*state.ended_at, (event.worker, event.step)))
    if not is_end and not state.worker(event.worker).leaving:
        state = replace(state, spares=max(0, state.spares - 1))  # the script of the next one would end there too
    is_first = finishing and not state.finishing and state.generation >= 0
    others = [each.id for each in state.workers if each.id not in state.members] if is_first else []
    state = replace(state.update(event.worker, finished=True), finishing=finishing)
    return state, tuple(Dismiss(id, "the run is over") for id in others), f"worker {event.worker} has finished"


def _on_death(state: State, event: Died, now: float) -> Decision:
    worker = state.worker(event.worker)
    worker = replace(worker, pid=worker.pid or event.pid)
    verb = "hung and was killed" if worker.hung else "exited" if worker.finished else f"died ({event.how})"
    why = f"{worker.name} {verb}"
    was_member = worker.id in state.members
    has_left = worker.leaving and worker.status is Status.READY
    state = replace(
        state,
        workers=tuple(each for each in state.workers if each.id != worker.id),
        members=tuple(id for id in state.members if id != worker.id),
        fruitless=0,
    )
    if state.restarting:
        return on_death_while_stopping(state, event, why)
    if restarts_together(state) and not worker.finished:
        return restart(state, why)
    if was_member and not worker.finished and not has_left:
        state = replace(state, unfinished=(*state.unfinished, why))
    if not state.workers or (was_member and not state.members):
        return _end_with_last(state, is_finished=worker.finished, why=why)
    if state.generation < 0 and event.exited and not worker.finished:
        return end(state, 1, f"{why} before training began")  # a fault would have been a signal
    actions: tuple[Action, ...] = ()
    if was_member and not worker.finished:
        if has_left:
            state = replace(state, departed=(*state.departed, f"{worker.name} left"))
        else:
            state, actions = break_generation(state, why, now)
    replacement = Replacement()
    spawns: tuple[Action, ...] = ()
    if state.spares and worker.leaving and not worker.surplus and staying(state):  # the run keeps its number of workers
        state, spawns, replacement = respawn(state, worker, now, was_member=was_member)
    elif not worker.finished and not worker.leaving:
        state = _keep_one(state) if was_member else state
        state, spawns, replacement = respawn(state, worker, now, was_member=was_member)
        if state.generation < 0 and not spawns:
            state = replace(state, unfinished=(*state.unfinished, why))
    if not worker.finished and not has_left and (was_member or not worker.leaving):
        others = len(state.members) if was_member else None
        actions += (Report(death_text(worker, event.how, others, replacement)),)
    actions += spawns
    if not state.members and not state.with_status(Status.STARTING, Status.WAITING):
        return end(state, 1, why)
    state, more, why = settle(state, why)
    return state, (*actions, *more), why


def _keep_one(state: State) -> State:
    """A worker that should stay has died: a member that was about to leave because the run was scaled down stays instead."""
    surplus = [id for id in state.members if state.worker(id).surplus]
    return state.update(surplus[0], leaving=False, surplus=False) if surplus else state


def _end_with_last(state: State, *, is_finished: bool, why: str) -> Decision:
    """The last worker is gone. The run has succeeded if its script had ended there, and nothing was left undone on others."""
    if state.unfinished and state.finishing:
        undone = f"{', '.join(state.unfinished)} before the end of the script, and no step was left that others could repeat"
        return end(state, 1, f"{undone}. What the script does there behind its last loop was not completed")
    if not is_finished:
        return end(state, 1, f"no worker is left: {why}")
    if len({step for _, step in state.ended_at}) > 1:
        each = ", ".join(f"worker {id} after step {step}" for id, step in state.ended_at)
        return end(
            state,
            1,
            f"the workers ended the script after different numbers of steps: {each}. Their results differ. Every worker must leave "
            "its loops after the same step: count by run.step, not by a variable that a replacement begins anew",
        )
    return end(state, 0, "all workers have finished", end_notes(state))


def _on_scale_request(state: State, event: ScaleRequested, now: float) -> Decision:
    if restarts_together(state):
        return state, (), f"the script does not use lockstep.Run, so its number of workers stays {state.size}"
    state = replace(state, size=event.size, wanted=event.size)
    target = f"scaling to {count(event.size)}"
    missing = missing_workers(state)
    if missing > 0:
        state, start = spawn(state, missing, 0.0)
        state, more, _ = settle(state, "")  # a spare may join at once
        return state, (start, *more), f"{target}: {missing} more {'is' if missing == 1 else 'are'} starting"
    joining, surplus = admitted(state, staying(state)), surplus_workers(state)
    for id in surplus:
        state = state.update(id, leaving=True, surplus=True)
    dismissals = [Dismiss(id, f"the run was scaled to {count(event.size)}") for id in surplus if id not in state.members]
    state, more, _ = settle(state, "")
    leaving = f"{len(surplus)} will leave after the current step" if surplus else "there are as many already"
    spares = f"{len(joining)} spare{' joins' if len(joining) == 1 else 's join'} after the current step"
    return state, (*dismissals, *more), f"{target}: {spares if joining else leaving}"


def _on_machine_joined(state: State, event: MachineJoined, now: float) -> Decision:
    """As many workers more as it has room for, unless a person has asked for fewer.

    While all workers are being stopped, they are started with the others.
    """
    why = f"machine {event.name} has joined with {count(event.workers)}"
    if restarts_together(state) and not state.restarting:
        return state, (Report(f"{why}, which are not used: the script does not use lockstep.Run"),), why
    state = state.with_room(state.room + event.workers)
    missing = missing_workers(state)
    if state.restarting or missing <= 0:
        return state, (Report(why),), why
    state, start = spawn(state, missing, 0.0)
    return state, (Report(why), start), why


def _on_machine_lost(state: State, event: MachineLost, now: float) -> Decision:
    """Its workers are not replaced, because there is no room for replacements."""
    state = state.with_room(state.room - event.room)
    actions: tuple[Action, ...] = ()
    before, restarts = state.members, state.restarts
    for id in event.workers:
        if state.find(id) is not None and not state.ended:
            state, more, _ = _on_death(state, Died(id, event.how), now)
            actions += tuple(action for action in more if not isinstance(action, Report))  # one sentence for all of them
    text = event.how.rstrip(".")
    if state.restarting and state.restarts > restarts:
        text += f". {start_again(state.restarts, state.policy.max_restarts)}"
    elif state.members != before and not state.ended:
        text += f". {go_on(len(state.members))}"
    return state, (Report(text), *actions), event.how


_RULES: dict[type, Callable[[State, Any, float], Decision]] = {
    JoinRequested: _on_join_request,
    StageEntered: _on_stage,
    Committed: _on_commit,
    Ready: _on_ready,
    PeersLost: _on_peers_lost,
    AloneBegan: _on_alone,
    AloneEnded: _on_alone,
    LeaveRequested: _on_leave_request,
    ScriptRaised: _on_script_raised,
    ScriptFinished: _on_script_finished,
    Died: _on_death,
    ScaleRequested: _on_scale_request,
    MachineJoined: _on_machine_joined,
    MachineLost: _on_machine_lost,
    RankRead: on_rank_read,
    Tick: on_tick,
}
