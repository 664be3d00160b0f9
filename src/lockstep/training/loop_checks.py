"""Checks of the user's loop: mistakes in the loop body, and loops that do not fit the run. Each raises a ``UsageError``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.errors import UsageError
from lockstep.gradients.engine_state import EngineState
from lockstep.training.progress import CurrentLoop


def require_same_data(before: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Compare ``settings`` with the arguments under which this loop was begun: by other workers, or before a restart.

    The number of epochs may grow.
    """
    for name, value in before.items():
        if name != "epochs" and settings.get(name) != value:
            raise UsageError(
                f"the run is in the middle of a loop over run.shard with {name}={value!r}, and this script has "
                f"{name}={settings.get(name)!r}: other samples would remain. Pass the same data and arguments."
            )


def step_calls(optimizers: Sequence[Any]) -> str:
    """Return the calls that commit a step, such as "SGD.step()"."""
    return ", ".join(dict.fromkeys(f"{type(each).__name__}.step()" for each in optimizers))


def require_complete(loop: CurrentLoop, step: int, state: EngineState, optimizers: Sequence[Any]) -> None:
    """Require that the loop body has called backward() and, in the last micro-batch of the step, the optimizer."""
    require_backward_returned(loop, step, state)
    if state is EngineState.LANE:
        raise UsageError(
            f"the loop body ended without backward() in step {step} (lane {loop.lane}). Every iteration needs one: all other "
            "workers wait for its gradients. To skip a batch, give it weight 0: run.weigh(0) before backward()."
        )
    if loop.is_last and not loop.committed:
        raise UsageError(
            f"the loop body ended without {step_calls(optimizers)}, though the last lane of step {step} was averaged. "
            "Call it in every iteration, on the optimizer that was passed to Run; it does nothing until the last lane. "
            "Gradient accumulation needs no counting: pass the samples of one optimizer step as global_batch to run.shard, and "
            "the number of parts in which they are computed as lanes to Run, and leave the loss undivided. For a loop with one "
            "iteration per optimizer step, use run.steps."
        )


def require_backward_returned(loop: CurrentLoop, step: int, state: EngineState) -> None:
    """Require that no backward() of this micro-batch has raised."""
    if state is EngineState.BACKWARD:
        raise UsageError(
            f"backward() raised in step {step} and the exception was caught: half of lane {loop.lane} is missing, and other "
            "workers wait for it. Let the exception end the run; to skip a batch call run.weigh(0) before backward()."
        )
