"""BackwardWork: a captured function that computes a loss and calls backward(). Its recording leaves the gradients in memory of its
own, from where the engine takes them as if a backward had just ended.

Nothing in it depends on the workers: which buckets there are, and which lanes this worker has, is no part of the recording. So a
change of workers needs no new one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.gradients.autograd_hooks import noting_gradients
from lockstep.gradients.cuda_graph import CannotRecord, Results
from lockstep.gradients.lane_engine import LaneEngine
from lockstep.training.memory_reads import TOUCHES_GRADIENTS, MemoryReads


@dataclass
class Recorded:
    """What a function did while it was recorded."""

    returned: Any
    memory: Results
    """Further tensors that each replay writes: the gradients."""
    cleared: Sequence[int] = ()
    """The parameters whose gradients it set to None."""
    has_stepped: bool = False
    """Whether it called an optimizer."""


class BackwardWork:
    """What a recording of forward and backward needs, and what a replay must do besides."""

    refuses_everything = False

    def __init__(self, engine: LaneEngine) -> None:
        self._engine = engine

    def is_now(self) -> bool:
        """Whether the call belongs to a lane that waits for its backward. Otherwise the function runs as it is."""
        return self._engine.awaits_backward and torch.is_grad_enabled()

    def objection(self) -> str | None:
        """Return why this call cannot be recorded, if that is known before."""
        return None

    def key(self) -> tuple[tuple[str, Hashable], ...]:
        return ()

    def tensors(self) -> list[Tensor]:
        """Return the tensors whose addresses are part of ``key``."""
        return []

    def call(self, function: Callable[[], Any], reads: MemoryReads | None = None) -> Recorded:
        """Call the function for a recording, or with ``reads`` for a rehearsal. ``memory`` are the gradients of the parameters.

        Raises:
            CannotRecord: It touches gradients after backward(): those of this call alone, which are not averaged.
        """
        engine = self._engine
        before = [param.grad for param in engine.params]
        try:
            for param in engine.params:
                param.grad = None
            with engine.hooks_off(), noting_gradients(engine.params) as left:
                if reads is not None:
                    reads.gradients = left.addresses
                returned = function()
            gradients = [param.grad for param in engine.params]
            is_touched = not all(map(left.is_untouched, engine.params))
        finally:
            for param, grad in zip(engine.params, before, strict=True):
                param.grad = grad
        if is_touched:
            raise CannotRecord(TOUCHES_GRADIENTS)
        for name, gradient in zip(engine.param_names, gradients, strict=True):
            if gradient is not None and gradient.layout is not torch.strided:
                raise CannotRecord(f"the gradient of {name} is sparse")
        if all(gradient is None for gradient in gradients):
            raise CannotRecord("no parameter of the model received a gradient")
        return Recorded(returned, list(gradients))

    def after_replay(self, recorded: Recorded) -> None:
        """Hand the gradients to the engine."""
        self._engine.backward_was_replayed(recorded.memory)
