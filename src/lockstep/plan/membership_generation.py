"""What follows from a state of plan/membership.py: whether a generation is formed, changed or broken, and who is replaced. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lockstep.plan.membership_events import Abort, Action, Change, Dismiss, End, Form, Kill, Report, Spawn, Stop
from lockstep.plan.membership_spares import admitted, is_complete, lacks_members, missing_workers, staying, workers_wanted
from lockstep.plan.membership_state import Policy, Respawns, State, Status, Worker
from lockstep.plan.membership_texts import Replacement, count, members_text

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
        stay = staying(state)
        if not stay:
            return _replace_all(state, why)
        # After a failure the survivors repeat the step among themselves. Newcomers join after that step.
        joining = [] if state.broken_at is not None else admitted(state, stay)
        state, actions, why = _form(state, [*stay, *joining], why)
        return state, (*(Dismiss(id, "it was asked to leave") for id in leaving), *actions), why
    if leaving and len(leaving) == len(state.members) and not _heirs(state) and state.broken_at is None:
        return state, (Stop(state.members),), "all workers were asked to leave"
    wants_change = bool(leaving) or bool(admitted(state, state.members))
    if wants_change and not state.changing and state.broken_at is None and state.members:
        return replace(state, changing=True), (Change(state.members, state.generation),), why
    return state, (), why


def _replace_all(state: State, why: str) -> Decision:
    """All members want to leave. The first of them stays for one step more, to give the state to the workers that wait.

    If no worker waits, they stop together and not one by one, so that they can save.
    """
    heirs = _heirs(state)
    if not heirs:
        state, actions, why = _form(state, state.members, why)
        return state, (*actions, Stop(state.members)), "all workers were asked to leave"
    members = state.members if state.broken_at is not None else (state.members[0], *heirs)
    dismissals = tuple(Dismiss(id, "it was asked to leave") for id in state.members if id not in members)
    state, actions, why = _form(state, members, why)
    state, more, why = settle(state, why)
    return state, (*dismissals, *actions, *more), why


def _heirs(state: State) -> list[int]:
    """The workers that would join if the first member stayed alone."""
    return admitted(state, state.members[:1])


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
        Status.WAITING: "it stood by as a spare" if worker.is_spare else "it waited to join",
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
            respawns, of_spares = (replace(past, failed=0) for past in (state.respawns, state.spare_respawns))
            state = replace(state, respawns=respawns, spare_respawns=of_spares)
        if new:
            state = state.update_all([worker.id for worker in new], has_committed=True)
    return replace(state, committed=max(step, state.committed))


def respawn(state: State, dead: Worker, now: float, *, was_member: bool) -> tuple[State, tuple[Action, ...], Replacement]:
    """Replace a worker that is gone, if the run should have more workers than it has and the policy allows it.

    If a spare takes its place, or if it was a spare, the next spare is started later, by ``start_spares``.
    """
    heir = _heir(state) if was_member else Replacement()
    policy, is_spare = state.policy, is_complete(state)
    past = state.spare_respawns if is_spare else state.respawns
    recent = tuple(at for at in past.at if now - at < policy.window_s)
    past = Respawns(recent, past.failed + (dead.is_replacement and not dead.has_committed))
    state = _with_respawns(state, past, of_spares=is_spare)
    if state.finishing or sum(not worker.leaving for worker in state.workers) >= workers_wanted(state):
        return state, (), heir
    if not policy.respawn:
        refused = "" if heir.by else "--no-respawn"
        return replace(state, spares=max(0, state.spares - 1)), (), replace(heir, refused=refused)
    if limit := _limit(policy, past):
        state = _note_not_replaced(state, f"{'spare' if is_spare else 'worker'} {dead.id} was not replaced: {limit}")
        return state, (), replace(heir, refused=limit)
    burst = sum(now - at < 10.0 for at in recent)  # back off if workers die as soon as they start
    delay_s = 0.0 if burst < 3 else min(30.0, 0.25 * 2 ** (burst - 3))
    state = _with_respawns(state, replace(past, at=(*recent, now)), of_spares=is_spare)
    if state.spares and lacks_members(state) <= 0:
        return replace(state, spares_at=now + delay_s), (), heir if heir.by else Replacement(is_later=True)
    state, start = spawn(replace(state, arrived_at=now + delay_s), 1, delay_s, is_replacement=True)
    return state, (start,), Replacement(f"worker {start.workers[0]}", delay_s)


def _heir(state: State) -> Replacement:
    """The worker that waits and takes the place of the member that was lost last, if there is one for each place."""
    waiting = admitted(state, staying(state))
    if not waiting or lacks_members(state) > 0:
        return Replacement()
    heir = state.worker(waiting[-1])
    return Replacement(heir.name.replace("worker", "spare", 1) if heir.is_spare else heir.name, is_waiting=True)


def start_spares(state: State, now: float) -> tuple[State, tuple[Action, ...]]:
    """Start the spares that are missing, when no worker has joined or left for a while: they disturb no recovery.

    If a member is missing, a worker is started in its place: no spare that has started meanwhile may take that place.
    """
    is_calm = state.generation >= 0 and state.broken_at is None and not state.changing and not state.finishing
    are_spares = is_complete(state)
    if not state.spares or not is_calm or not (are_spares or state.policy.respawn):
        return state if state.calm_since is None else replace(state, calm_since=None), ()
    alive = sum(not worker.leaving for worker in state.workers)
    missing = workers_wanted(state) - alive if are_spares else missing_workers(state)
    if missing <= 0:
        return state, ()
    if state.calm_since is None:
        state = replace(state, calm_since=now)
    if now < max(state.spares_at, (state.calm_since or 0.0) + state.policy.spares_after_s):
        return state, ()
    state = replace(state, calm_since=None)
    state, start = spawn(state, missing, 0.0, is_replacement=True, are_spares=are_spares)
    return state, (start,)


def _limit(policy: Policy, past: Respawns) -> str:
    """Why no other replacement is started after those in the past; empty: one may be started."""
    if len(past.at) >= policy.max_respawns:
        most = f"{policy.max_respawns} replacement{'' if policy.max_respawns == 1 else 's'}"
        return f"--max-respawns allows {most} in {policy.window_s / 60:g} minutes"
    if past.failed >= policy.max_respawns:
        return f"{past.failed} replacements in a row died before they took part in a step (--max-respawns)"
    return ""


def _note_not_replaced(state: State, note: str) -> State:
    """One spare less is wanted from now on, so this is said once."""
    return replace(state, not_replaced=(*state.not_replaced, note), spares=max(0, state.spares - 1))


def _with_respawns(state: State, past: Respawns, *, of_spares: bool) -> State:
    return replace(state, spare_respawns=past) if of_spares else replace(state, respawns=past)


def spawn(
    state: State, count: int, delay_s: float, *, is_replacement: bool = False, are_spares: bool = False
) -> tuple[State, Spawn]:
    ids = tuple(range(state.next_id, state.next_id + count))
    started = (Worker(id, is_replacement=is_replacement, is_spare=are_spares) for id in ids)
    return replace(state, workers=(*state.workers, *started), next_id=state.next_id + count), Spawn(ids, delay_s, are_spares)


def end(state: State, code: int, why: str, notes: tuple[str, ...] = ()) -> Decision:
    return replace(state, ended=True), (End(code, why, (*state.not_replaced, *notes)),), why


def _form(state: State, members: Sequence[int], why: str) -> Decision:
    is_fruitless = state.committed <= state.formed_at_step and set(members) == set(state.formed)
    if is_fruitless and state.fruitless >= _MAX_FRUITLESS:
        return end(state, 1, _no_progress(state))
    number = state.generation + 1
    text = _changes(state, members, number)
    reports = (Report(text),) if text and number > 0 else ()
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
    if admitted(state, members):  # they arrived during a recovery
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


def _changes(state: State, members: Sequence[int], number: int) -> str:
    """How ``members`` differ from the current generation: "worker 7 joined: 3 workers, generation 2". Deaths were reported before.

    Empty if there is nothing more to say.
    """
    before, after = frozenset(state.members), frozenset(members)
    left = [state.worker(id).name for id in state.members if id not in after]
    gone = [*state.departed, *([f"{', '.join(left)} left"] if left else [])]
    joined = [state.worker(id) for id in members if id not in before]
    if not gone and not joined:
        if len(before) < len(state.formed):
            return ""
        gone = [state.broken_by or "no worker joined or left"]
    return members_text(gone, joined, len(members), number)
