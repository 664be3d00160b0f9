"""Scripts that do not use ``lockstep.Run``: if a worker fails, all workers are stopped and started again. Pure.

Such a script (torch.distributed, ``replicate``, a framework) finds the other workers by the variables of its process. It cannot
take in a replacement, and continues from what it has saved itself. These rules do not apply any more as soon as a worker has asked
to join a generation. They do not apply either to a script that never asks for the other workers: each worker is on its own.
"""

from __future__ import annotations

from dataclasses import replace

from lockstep.plan import membership_texts as texts
from lockstep.plan.membership_events import Action, Died, RankRead, Report, StartAgain, StopAll
from lockstep.plan.membership_generation import Decision, end, spawn
from lockstep.plan.membership_state import State


def on_rank_read(state: State, event: RankRead, now: float) -> Decision:
    state = replace(state, reads_rank=True, needs_peers=state.needs_peers or event.needs_peers)
    return state, (), f"worker {event.worker} has read its rank"


def restarts_together(state: State) -> bool:
    """Whether the failure of one worker is a failure of all: the script connects the workers, and not by ``lockstep.Run``."""
    return state.needs_peers and not state.has_joined


def restart(state: State, why: str) -> Decision:
    """A worker has failed: stop all others. When all are gone, ``start_again`` follows. Ends the run if it may not be restarted."""
    policy = state.policy
    limit = policy.max_restarts if policy.respawn else 0
    if state.restarts >= limit:
        used = f". The workers were started again {state.restarts} times, and --max-restarts allows no more" if limit else ""
        return end(state, 1, f"{why}{used}")
    number = state.restarts + 1
    state = replace(state, restarting=True, restarts=number)
    text = f"{why}. {texts.start_again(number, limit)}"
    stopped = tuple(worker.id for worker in state.workers)
    actions: tuple[Action, ...] = (Report(text), StopAll(stopped)) if stopped else (Report(text),)
    if stopped:
        return state, actions, why
    state, more, why = start_again(state)
    return state, (*actions, *more), why


def on_death_while_stopping(state: State, event: Died, why: str) -> Decision:
    """A worker is gone. If a signal of its own has ended it, that may be why another one raised, which is then no bug."""
    actions: tuple[Action, ...] = ()
    if not event.exited and event.how != "SIGTERM":  # which the agent sends
        places = list(state.failed_places)
        if state.restarting_for in places:
            places.remove(state.restarting_for)
        state = replace(state, failed_places=tuple(places), restarting_for="")
        actions = (Report(f"{why}, which may be why others failed"),)
    if state.workers:
        return state, actions, why
    state, more, why = start_again(state)
    return state, (*actions, *more), why


def start_again(state: State) -> Decision:
    """All workers of the last attempt are gone: start as many again."""
    state = replace(state, restarting=False, restarting_for="", finishing=False, unfinished=(), ended_at=(), needs_peers=False)
    state, start = spawn(state, state.size, 0.0)
    return state, (StartAgain(state.restarts), start), f"restart {state.restarts}: starting {texts.count(state.size)}"


def end_notes(state: State) -> tuple[str, ...]:
    """What a person should know who has asked for spares, or if no worker of several asked for its rank or for the others."""
    if state.has_joined:
        return ()
    spares = ("--spares has no effect: the script does not use lockstep.Run, so no worker can take another's place",)
    return (*spares[: state.policy.spares], *_independence_note(state))


def _independence_note(state: State) -> tuple[str, ...]:
    if state.size < 2 or state.reads_rank:
        return ()
    return (
        f"{texts.count(state.size)} ran the whole script independently: it used neither Lockstep nor its rank (RANK, WORLD_SIZE). "
        "To train together, use lockstep.Run or torch.distributed in the script. To run it once, use -n 1",
    )
