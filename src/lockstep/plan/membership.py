"""Who belongs to the world, and what follows when that changes: (state, event, now) -> (state, actions, why). Pure.

A worker's life, as the agent sees it:

    STARTING --Joined--> WAITING --Form--> MEMBER --Ready--> READY --Form--> MEMBER ...
        any of them --Died--> gone

A generation ends in one of two ways. **Broken**: a member died, or others lost it; all are told to
abort, come back as READY, and the survivors alone form the next one, to repeat the step. **Changed**: somebody waits
to join or wants to leave; members leave it after the same step, and the next one is formed with
the newcomers and without those who leave. Newcomers that come during a recovery wait for a change.

Nothing here knows whose child a worker is, or how many agents there are.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lockstep.errors import InvariantError

_ALL_LATE = 10
"""So many times the hang timeout, where no member of a broken generation has left it yet."""


class Status(enum.Enum):
    STARTING = "starting"  # spawned, has not asked to join
    WAITING = "waiting"  # asked to join, holds no state
    MEMBER = "member"  # of the current generation
    READY = "ready"  # was a member, has left the current generation, waits for the next


@dataclass(frozen=True)
class Worker:
    id: int
    status: Status = Status.STARTING
    leaving: bool = False
    finished: bool = False


@dataclass(frozen=True)
class Policy:
    respawn: bool = True
    max_respawns: int = 10
    """Within ``window_s``."""
    window_s: float = 300.0
    hang_timeout_s: float = 30.0


@dataclass(frozen=True)
class State:
    """``workers`` are alive; ``members`` those of generation ``generation`` (-1: none yet) in rank order, dead ones left out."""

    size: int
    policy: Policy = field(default_factory=Policy)
    workers: tuple[Worker, ...] = ()
    next_id: int = 0
    most: int = 0
    """How many members a generation may have; 0: any number."""
    generation: int = -1
    members: tuple[int, ...] = ()
    broken_at: float | None = None
    stirred_at: float | None = None
    """Before the first generation: when a worker last came to join, or was spawned in place of another."""
    changing: bool = False
    left_at: float | None = None
    """When a member last left the current generation for a change: it waits for the other members."""
    finishing: bool = False
    ended: bool = False
    spawned_at: tuple[float, ...] = ()
    """Respawns within the window."""
    failures: tuple[tuple[int, str], ...] = ()
    """(step, error) of workers whose script raised."""

    def __post_init__(self) -> None:
        alive = {worker.id for worker in self.workers}
        if not set(self.members) <= alive:
            raise InvariantError(f"members {self.members} are not all alive: {sorted(alive)}")

    def worker(self, id: int) -> Worker | None:
        return next((worker for worker in self.workers if worker.id == id), None)

    def having(self, *statuses: Status) -> list[int]:
        return [worker.id for worker in self.workers if worker.status in statuses]


# -- events ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Joined:
    """``most``: how many workers the run can use (its lanes); the rest wait as spares. 0: any number."""

    worker: int
    most: int = 0


@dataclass(frozen=True)
class Ready:
    worker: int
    generation: int
    step: int = 0


@dataclass(frozen=True)
class Lost:
    """A member got a PeerError. ``hung``: it waited for the whole timeout for ``blamed``."""

    worker: int
    generation: int
    blamed: tuple[int, ...] = ()
    hung: bool = False
    why: str = ""


@dataclass(frozen=True)
class Leaving:
    worker: int


@dataclass(frozen=True)
class Failed:
    worker: int
    step: int
    error: str


@dataclass(frozen=True)
class Finished:
    worker: int


@dataclass(frozen=True)
class Died:
    worker: int
    how: str


@dataclass(frozen=True)
class Scaled:
    size: int


@dataclass(frozen=True)
class Tick:
    pass


Event = Joined | Ready | Lost | Leaving | Failed | Finished | Died | Scaled | Tick


# -- actions ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Form:
    number: int
    members: tuple[int, ...]


@dataclass(frozen=True)
class Abort:
    workers: tuple[int, ...]
    generation: int
    why: str


@dataclass(frozen=True)
class Change:
    workers: tuple[int, ...]
    generation: int


@dataclass(frozen=True)
class Stop:
    """They all are to end after the same step, and save."""

    workers: tuple[int, ...]


@dataclass(frozen=True)
class Spawn:
    workers: tuple[int, ...]
    delay_s: float = 0.0


@dataclass(frozen=True)
class Kill:
    worker: int
    why: str


@dataclass(frozen=True)
class Dismiss:
    worker: int
    why: str


@dataclass(frozen=True)
class End:
    code: int
    why: str


Action = Form | Abort | Change | Stop | Spawn | Kill | Dismiss | End
Decision = tuple[State, tuple[Action, ...], str]


def begin(size: int, policy: Policy | None = None) -> Decision:
    """The start of a run: nobody is there, ``size`` workers are spawned."""
    state, spawn = _spawn(State(size, policy or Policy()), size, 0.0)
    return state, (spawn,), f"starting {size} worker{'s' if size > 1 else ''}"


def decide(state: State, event: Event, now: float) -> Decision:
    """What ``event`` changes, and what is to be done. Events of workers that are gone, or of old generations, change nothing."""
    if state.ended:
        return state, (), "the run has ended"
    if not isinstance(event, (Scaled, Tick)) and state.worker(event.worker) is None:
        return state, (), f"worker {event.worker} is gone already"
    return _RULES[type(event)](state, event, now)


# -- rules -----------------------------------------------------------------------------------


def _joined(state: State, event: Joined, now: float) -> Decision:
    if state.finishing:
        return state, (Dismiss(event.worker, "the run is over"),), "nobody is left to join"
    state = replace(_with(state, event.worker, status=Status.WAITING), most=event.most or state.most, stirred_at=now)
    return _settle(state, f"worker {event.worker} waits to join", now)


def _ready(state: State, event: Ready, now: float) -> Decision:
    if event.generation != state.generation or event.worker not in state.members:
        return state, (), f"worker {event.worker} is ready after generation {event.generation}, which is past"
    state = _with(state, event.worker, status=Status.READY)
    # The others' time begins when a member waits for them.
    state = replace(state, left_at=now) if state.broken_at is None else replace(state, broken_at=now)
    return _settle(state, f"worker {event.worker} has left generation {event.generation}", now)


def _lost(state: State, event: Lost, now: float) -> Decision:
    if event.generation != state.generation or event.worker not in state.members:
        return state, (), "a loss in a past generation"
    kills: tuple[Action, ...] = ()
    if event.hung:
        stuck = [id for id in event.blamed if id in state.members and _status(state, id) is Status.MEMBER and id != event.worker]
        kills = tuple(Kill(id, f"it held up worker {event.worker}: {event.why}") for id in stuck)
    state, aborts = _break(state, f"worker {event.worker} lost its peers: {event.why}", now)
    return state, (*kills, *aborts), event.why


def _leaving(state: State, event: Leaving, now: float) -> Decision:
    state = _with(state, event.worker, leaving=True)
    if state.generation >= 0 and _status(state, event.worker) is not Status.MEMBER:
        return state, (Dismiss(event.worker, "it was asked to leave"),), f"worker {event.worker} leaves before it joined"
    return _settle(state, f"worker {event.worker} wants to leave", now)


def _failed(state: State, event: Failed, now: float) -> Decision:
    """A script that raises is a fault once. At the same step twice, or before training began, it is a bug."""
    again = any(step == event.step for step, _ in state.failures)
    state = replace(state, failures=(*state.failures, (event.step, event.error)))
    if state.generation < 0:
        return _end(state, 1, f"the script raised before training began: {event.error}")
    if again and _status(state, event.worker) is not Status.STARTING:
        return _end(state, 1, f"the script raised at step {event.step} on more than one worker: {event.error}")
    why = f"worker {event.worker} raised {event.error}"
    if event.worker not in state.members:
        return state, (), why
    state, aborts = _break(state, why, now)  # it is about to exit: the others need not wait for that
    return state, aborts, why


def _finished(state: State, event: Finished, now: float) -> Decision:
    return replace(_with(state, event.worker, finished=True), finishing=True), (), f"worker {event.worker} has finished"


def _died(state: State, event: Died, now: float) -> Decision:
    worker = state.worker(event.worker)
    assert worker is not None
    why = f"worker {worker.id} {event.how}"
    was_member = worker.id in state.members
    state = replace(
        state,
        workers=tuple(each for each in state.workers if each.id != worker.id),
        members=tuple(id for id in state.members if id != worker.id),
    )
    if not state.workers or (was_member and not state.members):
        over = worker.finished or worker.leaving
        return _end(state, 0 if over else 1, "all workers have finished" if over else f"the last worker is gone: {why}")
    if state.generation < 0 and "exited with" in event.how and not worker.finished:
        return _end(state, 1, f"{why} before training began")  # a fault would have been a signal
    actions: tuple[Action, ...] = ()
    if was_member and not worker.finished and not (worker.leaving and worker.status is Status.READY):
        state, actions = _break(state, why, now)
    if not worker.finished and not worker.leaving:
        state, spawns = _respawn(state, now)
        actions += spawns
    if not state.members and not state.having(Status.STARTING, Status.WAITING):
        return _end(state, 1, why)
    state, more, why = _settle(state, why, now)
    return state, (*actions, *more), why


def _scaled(state: State, event: Scaled, now: float) -> Decision:
    state = replace(state, size=event.size)
    staying = [worker.id for worker in state.workers if not worker.leaving]
    if len(staying) < event.size:
        state, spawn = _spawn(state, event.size - len(staying), 0.0)
        return state, (spawn,), f"scaling up to {event.size}"
    # The last ranks go, newcomers first: they hold nothing yet.
    order = [*state.members, *(id for id in staying if id not in state.members)]
    actions: list[Action] = []
    for id in order[event.size :]:
        if id in state.members:
            state = _with(state, id, leaving=True)
        else:
            state = _with(state, id, leaving=True)
            actions.append(Dismiss(id, f"the run was scaled to {event.size}"))
    state, more, _ = _settle(state, "", now)
    return state, (*actions, *more), f"scaling down to {event.size}"


def _tick(state: State, event: Tick, now: float) -> Decision:
    if state.generation < 0:
        return _hurry(state, now)
    since = state.left_at if state.broken_at is None else state.broken_at
    if since is None:
        return state, (), ""
    # Where all are late the machine is slow, and the state would die with them: nobody is held up but those who hold nothing.
    held_up = any(_status(state, id) is Status.READY for id in state.members)
    patience_s = state.policy.hang_timeout_s * (1 if held_up else _ALL_LATE)
    if now - since <= patience_s:
        return state, (), ""
    stuck = [id for id in state.members if _status(state, id) is Status.MEMBER]
    why = f"it did not leave generation {state.generation} within {patience_s:g} s"
    state = replace(state, left_at=now) if state.broken_at is None else replace(state, broken_at=now)
    return state, tuple(Kill(id, why) for id in stuck), why if stuck else ""


def _hurry(state: State, now: float) -> Decision:
    """At the start: whoever does not come, while others wait and nothing else happens, holds them up."""
    waiting, starting = state.having(Status.WAITING), state.having(Status.STARTING)
    if not waiting or not starting or state.stirred_at is None or now - state.stirred_at <= state.policy.hang_timeout_s:
        return state, (), ""
    why = f"it did not come to join while others waited for {state.policy.hang_timeout_s:g} s (--hang-timeout)"
    return replace(state, stirred_at=now), tuple(Kill(id, why) for id in starting), why


_RULES: dict[type, Callable[[State, Any, float], Decision]] = {
    Joined: _joined,
    Ready: _ready,
    Lost: _lost,
    Leaving: _leaving,
    Failed: _failed,
    Finished: _finished,
    Died: _died,
    Scaled: _scaled,
    Tick: _tick,
}


# -- what follows from a state ---------------------------------------------------------------


def _settle(state: State, why: str, now: float) -> Decision:
    """Form the next generation if all that must be there is; otherwise ask for a change if somebody waits for one."""
    waiting = state.having(Status.WAITING)
    if state.generation < 0:
        if waiting and not state.having(Status.STARTING):
            return _form(state, waiting, why)
        return state, (), why
    if state.members and all(_status(state, id) is Status.READY for id in state.members):
        staying = [id for id in state.members if not _leaves(state, id)]
        gone = tuple(Dismiss(id, "it was asked to leave") for id in state.members if _leaves(state, id))
        if not staying:  # together, and not one by one: so that they can save
            state, actions, why = _form(state, state.members, why)
            return state, (*actions, Stop(state.members)), "all workers were asked to leave"
        # After a failure the survivors repeat the step among themselves; newcomers come at the next boundary.
        joining = [] if state.broken_at is not None else _welcome(state, len(staying))
        state, actions, why = _form(state, [*staying, *joining], why)
        return state, (*gone, *actions), why
    leaving = [id for id in state.members if _leaves(state, id)]
    if leaving and len(leaving) == len(state.members) and not _welcome(state, 0) and state.broken_at is None:
        return state, (Stop(state.members),), "all workers were asked to leave"
    wants_change = bool(leaving) or bool(_welcome(state, len(state.members)))
    if wants_change and not state.changing and state.broken_at is None and state.members:
        return replace(state, changing=True), (Change(state.members, state.generation),), why
    return state, (), why


def _welcome(state: State, there: int) -> list[int]:
    """Those who wait and may join ``there`` others."""
    waiting = [id for id in state.having(Status.WAITING) if not _leaves(state, id)]
    return waiting[: max(0, state.most - there)] if state.most else waiting


def _form(state: State, members: Sequence[int], why: str) -> Decision:
    number = state.generation + 1
    for id in members:
        state = _with(state, id, status=Status.MEMBER)
    state = replace(state, generation=number, members=tuple(members), broken_at=None, changing=False, left_at=None)
    actions: tuple[Action, ...] = (Form(number, tuple(members)),)
    if _welcome(state, len(members)):  # they came during a recovery
        state = replace(state, changing=True)
        actions += (Change(state.members, number),)
    return state, actions, f"{why}; generation {number} has {len(members)} workers"


def _break(state: State, why: str, now: float) -> tuple[State, tuple[Action, ...]]:
    if state.broken_at is not None or not state.members:
        return state, ()
    return replace(state, broken_at=now), (Abort(state.members, state.generation, why),)


def _respawn(state: State, now: float) -> tuple[State, tuple[Action, ...]]:
    recent = tuple(at for at in state.spawned_at if now - at < state.policy.window_s)
    there = sum(not worker.leaving for worker in state.workers)
    if not state.policy.respawn or state.finishing or there >= state.size or len(recent) >= state.policy.max_respawns:
        return state, ()
    burst = sum(now - at < 10.0 for at in recent)  # workers that die as soon as they come are not worth the hurry
    delay_s = 0.0 if burst < 3 else min(30.0, 0.25 * 2 ** (burst - 3))
    state, spawn = _spawn(replace(state, spawned_at=(*recent, now), stirred_at=now + delay_s), 1, delay_s)
    return state, (spawn,)


def _spawn(state: State, count: int, delay_s: float) -> tuple[State, Spawn]:
    ids = tuple(range(state.next_id, state.next_id + count))
    workers = (*state.workers, *(Worker(id) for id in ids))
    return replace(state, workers=workers, next_id=state.next_id + count), Spawn(ids, delay_s)


def _end(state: State, code: int, why: str) -> Decision:
    return replace(state, ended=True), (End(code, why),), why


def _with(state: State, id: int, **changes: Any) -> State:
    return replace(state, workers=tuple(replace(each, **changes) if each.id == id else each for each in state.workers))


def _status(state: State, id: int) -> Status:
    worker = state.worker(id)
    assert worker is not None
    return worker.status


def _leaves(state: State, id: int) -> bool:
    worker = state.worker(id)
    assert worker is not None
    return worker.leaving
