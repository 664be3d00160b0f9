"""What a worker has folded of its lanes so far: values added along the tree, as they come (plan/tree.py).

A value is the contribution of some lanes to one tensor, or None, which stands for zeros. Adding
zeros is done, not skipped: -0.0 + 0.0 is 0.0, and a lane that is another worker's cannot be
skipped. Knows nothing of parameters, autograd or other workers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.gradients.scale import multiply

Value = Tensor | None

_FUSE_BYTES = 1 << 16  # above this, one pass that copies and scales beats two passes in cache


class PartialSums:
    """Levels of values: ``level[i]`` is tensor i's. ``carries[k]``: how many levels lane k closes when it is pushed.

    For each lane: ``open``, then ``fold`` for the tensors in any order, each once, then ``close``;
    or ``skip``. The values of the last lane with samples may go to ``finish`` instead of ``fold``.
    """

    def __init__(self, count: int, carries: Sequence[int]) -> None:
        self._count, self._carries = count, carries
        self._levels: list[list[Value]] = []
        self._next = 0

    def skip(self) -> None:
        """A lane that has no samples: zeros."""
        self.open()
        self.fold(range(self._count), [None] * self._count)
        self.close()

    def open(self) -> None:
        self._carry = self._carries[self._next]
        self._next += 1
        self._top: list[Value] = [None] * self._count

    def fold(self, indices: Sequence[int], values: list[Value]) -> None:
        """The opened lane's values of tensors ``indices``; their memory belongs to the stack from here on."""
        for level in reversed(self._levels[len(self._levels) - self._carry :]):
            values = add(values, _take(level, indices))
        for i, value in zip(indices, values, strict=True):
            self._top[i] = value

    def close(self) -> None:
        self._levels = [*self._levels[: len(self._levels) - self._carry], self._top]

    def values(self, index: int) -> list[Value]:
        """What is there of one tensor, level by level."""
        return [level[index] for level in self._levels]

    def rest(self, indices: Sequence[int], values: list[Value]) -> list[list[Value]]:
        """As ``fold``, for the last lane with samples: what is left in the end of tensors ``indices``, level by level."""
        stack = [_take(level, indices) for level in self._levels]
        for at, carry in enumerate(self._carries[self._next - 1 :]):
            stack.append([None] * len(indices) if at else values)
            for _ in range(carry):
                top = stack.pop()
                stack[-1] = add(top, stack[-1])
        return stack

    def finish(self, indices: Sequence[int], values: list[Value], rows: Sequence[Sequence[Tensor]], scale: float | None) -> None:
        """As ``rest``, written to ``rows[level]``, times ``scale``. The last addition writes there directly."""
        fused = self._carry > 0 and self._next == len(self._carries)
        if not fused:
            for out, level in zip(rows, self.rest(indices, values), strict=False):
                write(out, level, scale)
            return
        bottom = len(self._levels) - self._carry
        for level in reversed(self._levels[bottom + 1 :]):
            values = add(values, _take(level, indices))
        write_sum(rows[bottom], values, _take(self._levels[bottom], indices), scale)
        for out, level in zip(rows, self._levels[:bottom], strict=False):
            write(out, _take(level, indices), scale)


def all_there(values: list[Value]) -> bool:
    return all(value is not None for value in values)  # not ``None in values``: that compares tensors


def add(mine: list[Value], others: list[Value]) -> list[Value]:
    """Sums, in the memory of ``mine`` where there is some. Zeros and zeros stay None."""
    if all_there(mine) and all_there(others):
        torch._foreach_add_(mine, others)  # type: ignore[arg-type]
        return mine
    sums: list[Value] = []
    for a, b in zip(mine, others, strict=True):
        if a is not None and b is not None:
            sums.append(a.add_(b))
        else:
            one = b if a is None else a
            sums.append(None if one is None else one.add_(0.0))
    return sums


def write(out: Sequence[Tensor], values: list[Value], scale: float | None) -> None:
    """``out`` becomes ``values``, times ``scale``."""
    views, parts = [], []
    for view, value in zip(out, values, strict=True):
        if value is None:
            view.zero_()
        elif scale is not None and view.nbytes > _FUSE_BYTES and not view.is_cuda:
            torch.mul(value, scale, out=view)
        else:
            views.append(view)
            parts.append(value)
    if views:
        torch._foreach_copy_(views, parts)
        if scale is not None:
            multiply(views, scale)


def write_sum(out: Sequence[Tensor], mine: list[Value], others: list[Value], scale: float | None) -> None:
    if not all_there(mine) or not all_there(others) or out[0].is_cuda:
        write(out, add(mine, others), scale)
        return
    for view, a, b in zip(out, mine, others, strict=True):
        torch.add(a, b, out=view)  # type: ignore[arg-type]
        if scale is not None:
            view.mul_(scale)


def _take(level: list[Value], indices: Sequence[int]) -> list[Value]:
    """The level's values of tensors ``indices``, which it then no longer keeps alive."""
    taken = [level[i] for i in indices]
    for i in indices:
        level[i] = None
    return taken
