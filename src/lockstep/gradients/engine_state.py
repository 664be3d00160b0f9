"""EngineState: where a LaneEngine is in a phase, and what a backward in the wrong state is told."""

from __future__ import annotations

import enum


class EngineState(enum.Enum):
    IDLE = "between steps"
    LANE = "a lane was started; its backward has not begun (or may be followed by another one)"
    BACKWARD = "inside a lane's backward"
    FOLDED = "the lane's gradients are in the partial sums; more lanes follow"
    AVERAGED = "this worker has the averages of the step, in the memory of its device; other workers may still wait for theirs"
    UNCONFIRMED = "every worker has the averages, and this worker has what all have logged; others may still wait for that"
    CONFIRMED = "every worker has the averages and what all have logged: the step may commit"
    DISCARDED = "the set of workers changed; this micro-batch counts for nothing"


AVERAGED = (EngineState.AVERAGED, EngineState.UNCONFIRMED, EngineState.CONFIRMED)
"""This worker has the averages."""
AFTER_BACKWARD = (EngineState.LANE, EngineState.FOLDED, *AVERAGED)
"""The lane has had a backward, or may have had one."""


def explain_backward(state: EngineState, collects: bool) -> str:
    """Return what to tell a user whose ``backward()`` came in a ``state`` that does not allow it.

    ``collects``: in a loop over ``run.steps``.
    """
    return _OUTSIDE_LANES if collects and state in AVERAGED else _WRONG_STATE[state]


_OUTSIDE_LANES = (
    "backward() was called behind the loop over the lanes of a step, where param.grad holds the averages of all workers. Call it "
    "in that loop, or loop over the step again (`for batch in step:`) for another set of gradients."
)
_WRONG_STATE = {
    EngineState.IDLE: (
        "backward() was called outside the loop over run.shard(...), or over the lanes of a step of run.steps(...). Only there do "
        "gradients belong to a step. Move backward() into the loop, or train that model without Run."
    ),
    EngineState.BACKWARD: "the last backward() raised half-way, and its lane cannot be repeated. Let the exception end the run.",
    EngineState.FOLDED: (
        "backward() was called twice for one micro-batch: the gradients of this lane were already added up. Add the losses and "
        "call backward() once. (A reentrant checkpoint in a submodule that is called directly looks the same: use_reentrant=False.)"
    ),
    **dict.fromkeys(
        AVERAGED,
        "backward() was called twice for one micro-batch: the gradients of this step were already averaged. "
        "Add the losses and call backward() once.",
    ),
}
