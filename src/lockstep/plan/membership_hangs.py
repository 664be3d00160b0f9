"""The hang timeout, in every state of plan/membership.py: which workers are killed because they hold others up. Pure.

before the first generation       workers that do not ask to join while others wait in ``Run(...)``
in a generation                   the workers that others report (PeersLost); no tick is needed
while a generation is changed     members that do not leave it while others have left
  or recovers                       (if no member has left, only members that use no CPU time, after ten times the timeout)
behind the last loop, at exit     workers that use no CPU time while others have finished

A newcomer that sets up, or stands by as a spare, holds nobody up and is never killed.
If a member has announced its work (``run.alone``), the timeout begins when that work ends or its limit has passed.
"""

from __future__ import annotations

from dataclasses import replace

from lockstep.plan.membership_events import Tick
from lockstep.plan.membership_generation import Decision, kill, start_spares
from lockstep.plan.membership_state import State, Status

_ALL_LATE_FACTOR = 10
"""If every member of a broken generation is late, the machine is slow: wait this many times the hang timeout."""
_IDLE_FACTOR = 1.25
"""Behind the last loop a worker may wait in a collective, whose own timeout must come first."""


def on_tick(state: State, event: Tick, now: float) -> Decision:
    """Kill the workers that have held others up for the hang timeout, and start the spares that are missing."""
    state, starts = start_spares(state, now)
    state, kills, why = _kill_late(state, event, now)
    return state, (*starts, *kills), why


def _kill_late(state: State, event: Tick, now: float) -> Decision:
    idle_s = dict(event.idle_s)
    if state.generation < 0:
        state, actions, why = _kill_late_starters(state, now)
    else:
        state, actions, why = _kill_late_members(state, idle_s, now)
    if not actions and state.finishing:
        return _kill_idle(state, idle_s, now)
    return state, actions, why


def is_watching(state: State) -> bool:
    """Whether the next ticks need the idle times of the workers."""
    return state.finishing or state.broken_at is not None


def _kill_late_starters(state: State, now: float) -> Decision:
    """Before the first generation: kill workers that do not ask to join while other workers wait and nothing else happens."""
    waiting, starting = state.with_status(Status.WAITING), state.with_status(Status.STARTING)
    if not waiting or not starting or state.arrived_at is None or now - state.arrived_at <= state.policy.hang_timeout_s:
        return state, (), ""
    why = f"it did not join while other workers waited for {state.policy.hang_timeout_s:g} s"
    state, kills = kill(replace(state, arrived_at=now), starting, why)
    return state, kills, why


def _kill_late_members(state: State, idle_s: dict[int, float], now: float) -> Decision:
    """Kill members that stay in a generation which others have left, or which is broken."""
    since = [at for at in (state.ready_at, state.broken_at) if at is not None]
    if not since or now - max(since) <= state.policy.hang_timeout_s:
        return state, (), ""
    members = [state.worker(id) for id in state.members]
    ready = [worker.id for worker in members if worker.status is Status.READY]
    late = [worker.id for worker in members if worker.status is not Status.READY and not worker.hung]
    if not late:
        return state, (), ""
    # If all members are late, the machine is slow, or they are behind the last loop. To kill them all would lose the training
    # state and help nobody, unless they hang.
    patience_s = state.policy.hang_timeout_s * (1 if ready else _ALL_LATE_FACTOR)
    if now - max(*since, state.alone_until) <= patience_s:
        return state, (), ""
    if not ready:
        late = [id for id in late if idle_s.get(id, 0.0) > patience_s]
    waiting = f", while {len(ready)} of {len(state.members)} members waited for the next one" if ready else ""
    why = f"it did not leave generation {state.generation} within {patience_s:g} s{waiting}"
    state, kills = kill(state, late, why)
    return state, kills, why if kills else ""


def _kill_idle(state: State, idle_s: dict[int, float], now: float) -> Decision:
    """Some workers have finished: kill those that hang at exit; if there are none, those that hang before the end of the script."""
    limit_s = state.policy.hang_timeout_s * _IDLE_FACTOR
    if now - state.alone_until <= limit_s:
        return state, (), ""
    active = (Status.MEMBER,) if state.generation >= 0 else (Status.STARTING,)
    idle = [
        worker
        for worker in state.workers
        if idle_s.get(worker.id, 0.0) > limit_s and not worker.hung and (worker.finished or worker.status in active)
    ]
    at_exit = [worker.id for worker in idle if worker.finished]
    why = f"other workers have finished, and it used no CPU time for {limit_s:g} s"
    state, kills = kill(state, at_exit or [worker.id for worker in idle], why)
    return state, kills, why if kills else ""
