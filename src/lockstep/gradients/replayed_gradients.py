"""ReplayedGradients: puts the gradients of a backward that was replayed into ``param.grad``. Knows nothing of lanes and workers.

The gradients of a recording lie in memory that its next replay writes again. Recordings share the memory of what they use only
while they run, so the replay of another recording may write there too: an older recording may have had an activation where a newer
one has a gradient. So gradients stay there only if they are used up before anything else is replayed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class ReplayedGradients:
    """The gradients of ``params``. ``start_lane`` is called before the first backward of a lane."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._params = params
        self._memory: dict[int, Tensor] = {}  # parameter -> memory for its gradient, the same in each step
        self._in_use: set[int] = set()

    def start_lane(self) -> None:
        self._in_use.clear()

    def place(self, gradients: Sequence[Tensor | None], *, is_used_up: bool, is_last: bool) -> list[int]:
        """Put gradients into ``param.grad``, or add them to what is there.

        Args:
            gradients: The gradient of each parameter, or None, in the memory of a recording.
            is_used_up: Whether no other backward is replayed before the step is over. Otherwise they are copied.
            is_last: Whether this is the worker's last lane. If the worker is alone, the optimizer reads the gradients where they
                are put now. So they are put where they were in the step before, and a recorded update finds them there.

        Returns:
            The indices of the parameters that have a gradient.
        """
        params = self._params
        present = [(i, gradient) for i, gradient in enumerate(gradients) if gradient is not None]
        first = [(i, gradient) for i, gradient in present if params[i].grad is None]
        more = [(grad, gradient) for i, gradient in present if (grad := params[i].grad) is not None]
        values = [gradient for _, gradient in first]
        if values and not is_used_up:
            values = [self._memory_for(i, gradient) if is_last else torch.empty_like(gradient) for i, gradient in first]
            torch._foreach_copy_(values, [gradient for _, gradient in first])
        for (i, _), value in zip(first, values, strict=True):
            params[i].grad = value
        if more:
            torch._foreach_add_([grad for grad, _ in more], [gradient for _, gradient in more])
        return [i for i, _ in present]

    def _memory_for(self, index: int, gradient: Tensor) -> Tensor:
        """Return the parameter's memory; or new memory if the lane has used it: the user may have taken that gradient away."""
        memory = self._memory.get(index)
        if index in self._in_use:
            return torch.empty_like(gradient)
        self._in_use.add(index)
        if memory is None or memory.stride() != gradient.stride() or memory.dtype != gradient.dtype:
            memory = self._memory[index] = torch.empty_like(gradient)
        return memory
