"""The rules of membership: which workers form a generation, and what follows when a worker comes, goes, dies or hangs. Pure.

``decide(state, event, now)`` returns the next state, the actions for the agent to perform, and the reason. The status of a worker:

    STARTING --JoinRequested--> WAITING --Form--> MEMBER --Ready--> READY --Form--> MEMBER ...
        Died in any status: the worker is removed

A generation ends in one of two ways.
**Broken**: a member died, or other members lost contact with it. All members are told to abort and become READY. The survivors
alone form the next generation and repeat the step.
**Changing**: a worker waits to join or wants to leave. All members leave the generation after the same step. The next generation
has the newcomers and lacks the workers that leave. A newcomer that arrives during a recovery waits for such a change.

The rules do not know which machine a worker runs on, or how many agents there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from lockstep.plan.membership_events import (
    Abort,
    Action,
    Change,
    Died,
    Dismiss,
    End,
    Event,
    Form,
    JoinRequested,
    Kill,
    LeaveRequested,
    PeersLost,
    Ready,
    Report,
    ScaleRequested,
    ScriptFinished,
    ScriptRaised,
    Spawn,
    Stop,
    Tick,
)
from lockstep.plan.membership_state import Policy, State, Status, Worker

Decision = tuple[State, tuple[Action, ...], str]

_ALL_LATE_FACTOR = 10
"""If every member of a broken generation is late, the machine is slow: wait this many times the hang timeout."""


def begin(size: int, policy: Policy | None = None) -> Decision:
    """The first decision of a run: start ``size`` workers."""
    state, spawn = _spawn(State(size, policy or Policy()), size, 0.0)
    return state, (spawn,), f"starting {_count(size)}"


def decide(state: State, event: Event, now: float) -> Decision:
    """Returns the state after ``event``, the actions that follow from it, and why. Events of removed workers change nothing."""
    if state.ended:
        return state, (), "the run has ended"
    if not isinstance(event, (ScaleRequested, Tick)) and state.find(event.worker) is None:
        return state, (), f"worker {event.worker} is gone already"
    return _RULES[type(event)](state, event, now)


# -- one rule per event ----------------------------------------------------------------------


def _on_join_request(state: State, event: JoinRequested, now: float) -> Decision:
    if state.finishing:
        return state, (Dismiss(event.worker, "the run is over"),), "the run is over"
    state = state.update(event.worker, status=Status.WAITING, pid=event.pid)
    state = replace(state, max_members=event.max_members or state.max_members, arrived_at=now)
    return _settle(state, f"worker {event.worker} waits to join")


def _on_ready(state: State, event: Ready, now: float) -> Decision:
    if event.generation != state.generation or event.worker not in state.members:
        return state, (), f"worker {event.worker} has left generation {event.generation}, which is over"
    state = state.update(event.worker, status=Status.READY)
    state = _restart_wait(state, now)  # from now on this worker waits for the other members
    return _settle(state, f"worker {event.worker} has left generation {event.generation}")


def _on_peers_lost(state: State, event: PeersLost, now: float) -> Decision:
    if event.generation != state.generation or event.worker not in state.members:
        return state, (), f"worker {event.worker} lost peers of generation {event.generation}, which is over"
    blamed = [id for id in event.blamed if event.hung and id in state.members and id != event.worker]
    stuck = [id for id in blamed if state.worker(id).status is Status.MEMBER]
    state, kills = _kill(state, stuck, f"worker {event.worker} waited for it: {event.why}")
    state, aborts = _break(state, f"worker {event.worker} lost its peers: {event.why}", now)
    return state, (*kills, *aborts), event.why


def _on_leave_request(state: State, event: LeaveRequested, now: float) -> Decision:
    state = state.update(event.worker, leaving=True)
    if state.generation >= 0 and state.worker(event.worker).status is not Status.MEMBER:
        return state, (Dismiss(event.worker, "it was asked to leave"),), f"worker {event.worker} leaves before it joined"
    return _settle(state, f"worker {event.worker} wants to leave")


def _on_script_raised(state: State, event: ScriptRaised, now: float) -> Decision:
    """One exception is treated as a fault. Exceptions at the same step on two workers, or before training began, are a bug."""
    is_repeated = event.step in state.failed_steps
    state = replace(state, failed_steps=(*state.failed_steps, event.step))
    if state.generation < 0:
        return _end(state, 1, f"the script raised before training began: {event.error}")
    if is_repeated and state.worker(event.worker).status is not Status.STARTING:
        return _end(state, 1, f"the script raised at step {event.step} on more than one worker: {event.error}")
    why = f"worker {event.worker} raised {event.error}"
    if event.worker not in state.members:
        return state, (), why
    state, aborts = _break(state, why, now)  # its process is about to exit: the other members need not wait for that
    return state, aborts, why


def _on_script_finished(state: State, event: ScriptFinished, now: float) -> Decision:
    finishing = state.finishing or not state.worker(event.worker).leaving  # the script of a worker that leaves ends early
    return replace(state.update(event.worker, finished=True), finishing=finishing), (), f"worker {event.worker} has finished"


def _on_death(state: State, event: Died, now: float) -> Decision:
    worker = state.worker(event.worker)
    verb = "hung and was killed" if worker.hung else "exited" if worker.finished else f"died ({event.how})"
    why = f"{worker.name} {verb}"
    was_member = worker.id in state.members
    has_left = worker.leaving and worker.status is Status.READY
    state = replace(
        state,
        workers=tuple(each for each in state.workers if each.id != worker.id),
        members=tuple(id for id in state.members if id != worker.id),
    )
    if not state.workers or (was_member and not state.members):
        is_done = worker.finished or worker.leaving
        return _end(state, 0 if is_done else 1, "all workers have finished" if is_done else f"no worker is left: {why}")
    if state.generation < 0 and event.exited and not worker.finished:
        return _end(state, 1, f"{why} before training began")  # a fault would have been a signal
    actions: tuple[Action, ...] = ()
    if was_member and not worker.finished:
        state = replace(state, departed=(*state.departed, f"{worker.name} left" if has_left else why))
        if not has_left:
            state, actions = _break(state, why, now)
    if not worker.finished and not worker.leaving:
        state, spawns = _respawn(state, worker.id, now)
        actions += spawns
    if not state.members and not state.with_status(Status.STARTING, Status.WAITING):
        return _end(state, 1, why)
    state, more, why = _settle(state, why)
    return state, (*actions, *more), why


def _on_scale_request(state: State, event: ScaleRequested, now: float) -> Decision:
    state = replace(state, size=event.size)
    staying = [worker.id for worker in state.workers if not worker.leaving]
    target = f"scaling to {_count(event.size)}"
    if len(staying) < event.size:
        missing = event.size - len(staying)
        state, spawn = _spawn(state, missing, 0.0)
        return state, (spawn,), f"{target}: {missing} more {'is' if missing == 1 else 'are'} starting"
    # Newcomers leave first, because they hold no training state; then the last ranks leave.
    surplus = [*state.members, *(id for id in staying if id not in state.members)][event.size :]
    for id in surplus:
        state = state.update(id, leaving=True)
    dismissals = [Dismiss(id, f"the run was scaled to {_count(event.size)}") for id in surplus if id not in state.members]
    state, more, _ = _settle(state, "")
    leaving = f"{len(surplus)} will leave after the current step" if surplus else "there are as many already"
    return state, (*dismissals, *more), f"{target}: {leaving}"


def _on_tick(state: State, event: Tick, now: float) -> Decision:
    if state.generation < 0:
        return _kill_late_starters(state, now)
    since = state.left_at if state.broken_at is None else state.broken_at
    if since is None:
        return state, (), ""
    # If all members are late, the machine is slow. To kill them all would lose the training state and help nobody.
    is_one_ready = any(state.worker(id).status is Status.READY for id in state.members)
    patience_s = state.policy.hang_timeout_s * (1 if is_one_ready else _ALL_LATE_FACTOR)
    if now - since <= patience_s:
        return state, (), ""
    stuck = [id for id in state.members if state.worker(id).status is Status.MEMBER]
    why = f"it did not leave generation {state.generation} within {patience_s:g} s"
    state, kills = _kill(_restart_wait(state, now), stuck, why)
    return state, kills, why if stuck else ""


def _kill_late_starters(state: State, now: float) -> Decision:
    """Before the first generation: kill workers that do not ask to join while other workers wait and nothing else happens."""
    waiting, starting = state.with_status(Status.WAITING), state.with_status(Status.STARTING)
    if not waiting or not starting or state.arrived_at is None or now - state.arrived_at <= state.policy.hang_timeout_s:
        return state, (), ""
    why = f"it did not join while other workers waited for {state.policy.hang_timeout_s:g} s (--hang-timeout)"
    state, kills = _kill(replace(state, arrived_at=now), starting, why)
    return state, kills, why


_RULES: dict[type, Callable[[State, Any, float], Decision]] = {
    JoinRequested: _on_join_request,
    Ready: _on_ready,
    PeersLost: _on_peers_lost,
    LeaveRequested: _on_leave_request,
    ScriptRaised: _on_script_raised,
    ScriptFinished: _on_script_finished,
    Died: _on_death,
    ScaleRequested: _on_scale_request,
    Tick: _on_tick,
}


# -- what follows from a state ---------------------------------------------------------------


def _settle(state: State, why: str) -> Decision:
    """Form the next generation if every worker that must be there is; else ask for a change if a worker waits for one."""
    waiting = state.with_status(Status.WAITING)
    if state.generation < 0:
        if waiting and not state.with_status(Status.STARTING):
            return _form(state, waiting, why)
        return state, (), why
    leaving = [id for id in state.members if state.worker(id).leaving]
    if state.members and all(state.worker(id).status is Status.READY for id in state.members):
        staying = [id for id in state.members if id not in leaving]
        if not staying:  # they stop together and not one by one, so that they can save
            state, actions, why = _form(state, state.members, why)
            return state, (*actions, Stop(state.members)), "all workers were asked to leave"
        # After a failure the survivors repeat the step among themselves. Newcomers join after that step.
        joining = [] if state.broken_at is not None else _admitted(state, len(staying))
        state, actions, why = _form(state, [*staying, *joining], why)
        return state, (*(Dismiss(id, "it was asked to leave") for id in leaving), *actions), why
    if leaving and len(leaving) == len(state.members) and not _admitted(state, 0) and state.broken_at is None:
        return state, (Stop(state.members),), "all workers were asked to leave"
    wants_change = bool(leaving) or bool(_admitted(state, len(state.members)))
    if wants_change and not state.changing and state.broken_at is None and state.members:
        return replace(state, changing=True), (Change(state.members, state.generation),), why
    return state, (), why


def _admitted(state: State, members: int) -> list[int]:
    """The waiting workers that may join a generation that has ``members`` members already."""
    waiting = [id for id in state.with_status(Status.WAITING) if not state.worker(id).leaving]
    return waiting[: max(0, state.max_members - members)] if state.max_members else waiting


def _form(state: State, members: Sequence[int], why: str) -> Decision:
    number = state.generation + 1
    text = f"{_changes(state, members)}, generation {number}"
    reports = (Report(text),) if number > 0 else ()
    for id in members:
        state = state.update(id, status=Status.MEMBER)
    state = replace(state, generation=number, members=tuple(members), broken_at=None, broken_by="", departed=())
    state = replace(state, changing=False, left_at=None)
    actions: tuple[Action, ...] = (*reports, Form(number, tuple(members)))
    if _admitted(state, len(members)):  # they arrived during a recovery
        state = replace(state, changing=True)
        actions += (Change(state.members, number),)
    return state, actions, f"{why}; generation {number} has {_count(len(members))}"


def _changes(state: State, members: Sequence[int]) -> str:
    """How ``members`` differ from the current generation: "worker 7 joined; 3 workers"."""
    left = [state.worker(id).name for id in state.members if id not in members]
    joined = [state.worker(id).name for id in members if id not in state.members]
    parts = [*state.departed, *(f"{', '.join(names)} {verb}" for names, verb in ((left, "left"), (joined, "joined")) if names)]
    suffix = "" if joined else " continues" if len(members) == 1 else " continue"
    return f"{', '.join(parts) or state.broken_by or 'no worker joined or left'}; {_count(len(members))}{suffix}"


def _break(state: State, why: str, now: float) -> tuple[State, tuple[Action, ...]]:
    if state.broken_at is not None or not state.members:
        return state, ()
    return replace(state, broken_at=now, broken_by=why), (Abort(state.members, state.generation, why),)


def _restart_wait(state: State, now: float) -> State:
    """Members that have not left the current generation get the whole hang timeout again."""
    return replace(state, left_at=now) if state.broken_at is None else replace(state, broken_at=now)


def _kill(state: State, ids: Sequence[int], why: str) -> tuple[State, tuple[Action, ...]]:
    for id in ids:
        state = state.update(id, hung=True)
    return state, tuple(Kill(id, why) for id in ids)


def _respawn(state: State, dead: int, now: float) -> tuple[State, tuple[Action, ...]]:
    policy = state.policy
    recent = tuple(at for at in state.respawned_at if now - at < policy.window_s)
    if not policy.respawn or state.finishing or sum(not worker.leaving for worker in state.workers) >= state.size:
        return state, ()
    if len(recent) >= policy.max_respawns:
        limit = f"--max-respawns {policy.max_respawns} in {policy.window_s / 60:g} minutes"
        return state, (Report(f"worker {dead} is not replaced, because the limit is reached ({limit})"),)
    burst = sum(now - at < 10.0 for at in recent)  # back off if workers die as soon as they start
    delay_s = 0.0 if burst < 3 else min(30.0, 0.25 * 2 ** (burst - 3))
    state, spawn = _spawn(replace(state, respawned_at=(*recent, now), arrived_at=now + delay_s), 1, delay_s)
    return state, (
        Report(f"worker {spawn.workers[0]} starts{f' in {delay_s:g} s' if delay_s else ''} to replace worker {dead}"),
        spawn,
    )


def _spawn(state: State, count: int, delay_s: float) -> tuple[State, Spawn]:
    ids = tuple(range(state.next_id, state.next_id + count))
    workers = (*state.workers, *(Worker(id) for id in ids))
    return replace(state, workers=workers, next_id=state.next_id + count), Spawn(ids, delay_s)


def _end(state: State, code: int, why: str) -> Decision:
    return replace(state, ended=True), (End(code, why),), why


def _count(workers: int) -> str:
    return f"{workers} worker{'' if workers == 1 else 's'}"
