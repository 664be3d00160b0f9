"""What follows from a state of plan/membership.py: whether a generation is formed, changed or broken, and who is replaced. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lockstep.plan.membership_events import Abort, Action, Change, Dismiss, End, Form, Kill, Report, Spawn, Stop
from lockstep.plan.membership_state import State, Status, Worker

Decision = tuple[State, tuple[Action, ...], str]

_MAX_FRUITLESS = 3


def settle(state: State, why: str) -> Decision:
    """Form the next generation if every worker that must be there is; else ask for a change if a worker waits for one."""
    if state.generation < 0:
        if any(worker.status is Status.STARTING for worker in state.workers):
            return state, (), why
        waiting = [worker.id for worker in state.workers if worker.status is Status.WAITING and not worker.leaving]
        return _form(state, waiting, why) if waiting else (state, (), why)
    leaving = [id for id in state.members if state.worker(id).leaving]
    if state.members and all(state.worker(id).status is Status.READY for id in state.members):
        staying = [id for id in state.members if not state.worker(id).leaving]
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


def break_generation(state: State, why: str, now: float) -> tuple[State, tuple[Action, ...]]:
    """The generation has lost a member, or its members have lost each other: tell all of them to abort, once."""
    if state.broken_at is not None or not state.members:
        return state, ()
    return replace(state, broken_at=now, broken_by=why), (Abort(state.members, state.generation, why),)


def kill(state: State, ids: Sequence[int], why: str) -> tuple[State, tuple[Action, ...]]:
    """Kill workers that hang. The reason says what each one was doing, and what to do if it did not hang."""
    actions = []
    for id in ids:
        worker = state.worker(id)
        if not worker.hung:
            announce = ", and `with run.alone(...):` announces long work of one worker" if worker.status is Status.MEMBER else ""
            actions.append(Kill(id, f"{why}; {doing(state, worker)}. --hang-timeout raises the limit{announce}"))
        state = state.update(id, hung=True)
    return state, tuple(actions)


def doing(state: State, worker: Worker) -> str:
    """What a worker does, for people: "it belonged to generation 2 of a run that had committed 12 steps"."""
    if worker.finished:
        return "its script had ended, but not its process"
    if worker.alone:
        return f"it was in run.alone({worker.alone!r}) for longer than its limit_s={worker.alone_limit_s:g}"
    steps = max(worker.steps, state.committed)
    at = f" after {steps} committed steps" if steps > 0 else ""
    texts = {
        Status.STARTING: "it had not reached Run(...)",
        Status.WAITING: "it waited to join",
        Status.PREPARING: "it was setting up to join",
        Status.MEMBER: f"it was in generation {state.generation}{at}",
        Status.READY: f"it had left generation {state.generation}{at} and waited for the next one",
    }
    return texts[worker.status]


def note_commit(state: State, step: int) -> State:
    """``step`` steps have committed: the current members have taken part in the last one, if it is newer than their generation."""
    if step > state.formed_at_step:
        members = frozenset(state.members)
        new = [worker for worker in state.workers if not worker.has_committed and worker.id in members]
        if any(worker.is_replacement for worker in new):
            state = replace(state, failed_respawns=0)
        if new:
            state = state.update_all([worker.id for worker in new], has_committed=True)
    return replace(state, committed=max(step, state.committed))


def respawn(state: State, dead: Worker, now: float) -> tuple[State, tuple[Action, ...]]:
    """Replace a dead worker, if the run should have more workers than it has and the policy allows it."""
    policy = state.policy
    recent = tuple(at for at in state.respawned_at if now - at < policy.window_s)
    if dead.is_replacement and not dead.has_committed:
        state = replace(state, failed_respawns=state.failed_respawns + 1)
    if not policy.respawn or state.finishing or sum(not worker.leaving for worker in state.workers) >= state.size:
        return state, ()
    limit = ""
    if len(recent) >= policy.max_respawns:
        most = f"{policy.max_respawns} replacement{'' if policy.max_respawns == 1 else 's'}"
        limit = f"--max-respawns allows {most} in {policy.window_s / 60:g} minutes"
    elif state.failed_respawns >= policy.max_respawns:
        limit = f"{state.failed_respawns} replacements in a row died before they took part in a step (--max-respawns)"
    if limit:
        left = sum(not worker.leaving for worker in state.workers)
        state = replace(state, not_replaced=(*state.not_replaced, f"worker {dead.id} was not replaced: {limit}"))
        return state, (Report(f"worker {dead.id} is not replaced: {limit}; {count(left)} continue{'s' if left == 1 else ''}"),)
    burst = sum(now - at < 10.0 for at in recent)  # back off if workers die as soon as they start
    delay_s = 0.0 if burst < 3 else min(30.0, 0.25 * 2 ** (burst - 3))
    state, start = spawn(replace(state, respawned_at=(*recent, now), arrived_at=now + delay_s), 1, delay_s, is_replacement=True)
    return state, (
        Report(f"worker {start.workers[0]} starts{f' in {delay_s:g} s' if delay_s else ''} to replace worker {dead.id}"),
        start,
    )


def spawn(state: State, count: int, delay_s: float, *, is_replacement: bool = False) -> tuple[State, Spawn]:
    ids = tuple(range(state.next_id, state.next_id + count))
    workers = (*state.workers, *(Worker(id, is_replacement=is_replacement) for id in ids))
    return replace(state, workers=workers, next_id=state.next_id + count), Spawn(ids, delay_s)


def end(state: State, code: int, why: str, notes: tuple[str, ...] = ()) -> Decision:
    return replace(state, ended=True), (End(code, why, (*state.not_replaced, *notes)),), why


def count(workers: int) -> str:
    return f"{workers} worker{'' if workers == 1 else 's'}"


def _admitted(state: State, members: int) -> list[int]:
    """The waiting workers that may join a generation that has ``members`` members already: those in the same loop."""
    waiting = [id for id in state.with_status(Status.WAITING) if not state.worker(id).leaving]
    if state.generation >= 0:
        waiting = [id for id in waiting if state.worker(id).stage == state.stage]
    return waiting[: max(0, state.max_members - members)] if state.max_members else waiting


def _form(state: State, members: Sequence[int], why: str) -> Decision:
    is_fruitless = state.committed <= state.formed_at_step and set(members) == set(state.formed)
    if is_fruitless and state.fruitless >= _MAX_FRUITLESS:
        return end(state, 1, _no_progress(state))
    number = state.generation + 1
    text = f"{_changes(state, members)}, generation {number}"
    reports = (Report(text),) if number > 0 else ()
    state = state.update_all(members, status=Status.MEMBER)
    state = replace(
        state,
        generation=number,
        members=tuple(members),
        formed=tuple(members),
        formed_at_step=state.committed,
        fruitless=state.fruitless + 1 if is_fruitless else 0,
        broken_at=None,
        broken_by="",
        ready_at=None,
        departed=(),
        unfinished=(),
        changing=False,
    )
    actions: tuple[Action, ...] = (*reports, Form(number, tuple(members)))
    if _admitted(state, len(members)):  # they arrived during a recovery
        state = replace(state, changing=True)
        actions += (Change(state.members, number),)
    return state, actions, f"{why}; generation {number} has {count(len(members))}"


def _no_progress(state: State) -> str:
    """Why the run ends if it recovers again and again, and what each member reported."""
    each = [
        f"{worker.name}: {worker.lost_because or doing(state, worker)}" for worker in (state.worker(id) for id in state.members)
    ]
    first = state.generation - state.fruitless
    return (
        f"generations {first} to {state.generation} ended without a committed step, and nobody died, joined or left: "
        f"another recovery would not help. What each worker reported: {'; '.join(each)}"
    )


def _changes(state: State, members: Sequence[int]) -> str:
    """How ``members`` differ from the current generation: "worker 7 joined; 3 workers"."""
    before, after = frozenset(state.members), frozenset(members)
    left = [state.worker(id).name for id in state.members if id not in after]
    joined = [state.worker(id).name for id in members if id not in before]
    parts = [*state.departed, *(f"{', '.join(names)} {verb}" for names, verb in ((left, "left"), (joined, "joined")) if names)]
    suffix = "" if joined else " continues" if len(members) == 1 else " continue"
    return f"{', '.join(parts) or state.broken_by or 'no worker joined or left'}; {count(len(members))}{suffix}"
