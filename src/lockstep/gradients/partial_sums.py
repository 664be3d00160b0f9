"""PartialSums: what a worker has added up of its lanes so far, along the summation tree (plan/tree.py).

Also the multi-tensor arithmetic that this needs. Knows nothing of parameters, autograd or other workers.

A ``Value`` is the contribution of some lanes to one tensor. None stands for zeros. Zeros are added, not skipped: -0.0 + 0.0 is 0.0,
and a worker cannot skip a lane that another worker runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Value = Tensor | None

_ONE_PASS_BYTES = 1 << 16  # above this, one pass that copies and scales is faster than two passes in the cache


class PartialSums:
    """Partial sums of ``count`` tensors. ``self._levels[k][i]`` is the partial sum number k of tensor i, from left to right.

    ``carries[k]`` says how many of the last levels the k-th lane is added to (plan/tree.py: ``carries``).

    For each lane call ``start_lane``, then ``add`` for the tensors in any order, each tensor once, then ``end_lane``; or
    ``skip_lane``. For the last lane with samples call ``totals`` or ``write_totals`` instead of ``add`` and ``end_lane``.
    """

    def __init__(self, count: int, carries: Sequence[int]) -> None:
        self._count, self._carries = count, carries
        self._levels: list[list[Value]] = []
        self._started = 0

    @property
    def copies_last_lane(self) -> bool:
        """Whether ``write_totals`` would copy the values of the present lane, without adding them to anything."""
        return self._carry == 0 and self._started == len(self._carries)

    def skip_lane(self) -> None:
        """The next lane has no samples: its values are zeros."""
        self.start_lane()
        self.add(range(self._count), [None] * self._count)
        self.end_lane()

    def start_lane(self) -> None:
        self._carry = self._carries[self._started]
        self._started += 1
        self._sums: list[Value] = [None] * self._count

    def add(self, indices: Sequence[int], values: list[Value]) -> None:
        """Add the lane's values of tensors ``indices``. The memory of ``values`` belongs to this object from now on."""
        for level in reversed(self._levels[len(self._levels) - self._carry :]):
            values = add_in_place(values, _remove(level, indices))
        for i, value in zip(indices, values, strict=True):
            self._sums[i] = value

    def end_lane(self) -> None:
        self._levels = [*self._levels[: len(self._levels) - self._carry], self._sums]

    def levels_of(self, index: int) -> list[Value]:
        """The partial sums of one tensor, from left to right."""
        return [level[index] for level in self._levels]

    def totals(self, indices: Sequence[int], values: list[Value]) -> list[list[Value]]:
        """Add the values of the last lane with samples; return the final partial sums of tensors ``indices``, by level."""
        levels = [_remove(level, indices) for level in self._levels]
        for lane, carry in enumerate(self._carries[self._started - 1 :]):
            levels.append([None] * len(indices) if lane else values)
            for _ in range(carry):
                top = levels.pop()
                levels[-1] = add_in_place(top, levels[-1])
        return levels

    def write_totals(
        self, indices: Sequence[int], values: list[Value], rows: Sequence[Sequence[Tensor]], scale: float | None
    ) -> None:
        """``totals``, written to ``rows[level]`` and multiplied by ``scale``. The last addition writes to the row directly."""
        last_addition_ends_the_sum = self._carry > 0 and self._started == len(self._carries)
        if not last_addition_ends_the_sum:
            for out, level in zip(rows, self.totals(indices, values), strict=False):
                copy_scaled(out, level, scale)
            return
        bottom = len(self._levels) - self._carry
        for level in reversed(self._levels[bottom + 1 :]):
            values = add_in_place(values, _remove(level, indices))
        _write_sum(rows[bottom], values, _remove(self._levels[bottom], indices), scale)
        for out, level in zip(rows, self._levels[:bottom], strict=False):
            copy_scaled(out, _remove(level, indices), scale)


def headroom_of(dtype: torch.dtype, lanes: int) -> float:
    """The factor for every lane's values before they are added, so that the sum of ``lanes`` large values stays finite.

    It is a power of two, hence exact, for fp16, and 1 for dtypes with a wider exponent.
    """
    return 2.0 ** -(lanes - 1).bit_length() if dtype == torch.float16 else 1.0


def sum_dtype(dtype: torch.dtype, reduce_dtype: torch.dtype | None) -> torch.dtype:
    """Returns the dtype in which gradients of ``dtype`` are added: ``reduce_dtype``, unless that is less precise."""
    return dtype if reduce_dtype is None else torch.promote_types(dtype, reduce_dtype)


def cast(values: Sequence[Value], dtypes: Sequence[torch.dtype]) -> list[Value]:
    """Returns the values in these dtypes: itself, if a value has its dtype; otherwise a copy, on CUDA in few launches."""
    result, copies, originals = list(values), [], []
    for k, (value, dtype) in enumerate(zip(values, dtypes, strict=True)):
        if value is not None and value.dtype != dtype:
            result[k] = copy = torch.empty_like(value, dtype=dtype)
            copies.append(copy)
            originals.append(value)
    if copies:
        torch._foreach_copy_(copies, originals)
    return result


def multiply(tensors: Sequence[Tensor], scale: float) -> None:
    """In place, with the bits of ``tensor.mul_(scale)`` for each tensor; on CUDA in few launches.

    On the host torch's multi-tensor multiplication would first round ``scale`` to the dtype of a bf16 tensor.
    """
    on_device = [tensor for tensor in tensors if tensor.is_cuda]
    if on_device:
        torch._foreach_mul_(on_device, scale)
    for tensor in tensors:
        if not tensor.is_cuda:
            tensor.mul_(scale)


def add_in_place(mine: list[Value], others: list[Value]) -> list[Value]:
    """Return the sums. They lie in the memory of ``mine``, or of ``others`` if mine is None. None plus None stays None."""
    if _has_no_none(mine) and _has_no_none(others):
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


def copy_scaled(out: Sequence[Tensor], values: Sequence[Value], scale: float | None) -> None:
    """Write ``values`` times ``scale`` to ``out``, in one multi-tensor copy if possible."""
    if scale is None and _has_no_none(values):
        torch._foreach_copy_(out, values)  # type: ignore[arg-type]
        return
    views, copied = [], []
    for view, value in zip(out, values, strict=True):
        if value is None:
            view.zero_()
        elif scale is not None and view.nbytes > _ONE_PASS_BYTES and not view.is_cuda:
            torch.mul(value, scale, out=view)
        else:
            views.append(view)
            copied.append(value)
    if views:
        torch._foreach_copy_(views, copied)
        if scale is not None:
            multiply(views, scale)


def _write_sum(out: Sequence[Tensor], mine: list[Value], others: list[Value], scale: float | None) -> None:
    if not _has_no_none(mine) or not _has_no_none(others) or out[0].is_cuda:
        copy_scaled(out, add_in_place(mine, others), scale)
        return
    for view, a, b in zip(out, mine, others, strict=True):
        torch.add(a, b, out=view)  # type: ignore[arg-type]
        if scale is not None:
            view.mul_(scale)


def _has_no_none(values: Sequence[Value]) -> bool:
    return all(value is not None for value in values)  # not ``None not in values``: that compares tensors


def _remove(level: list[Value], indices: Sequence[int]) -> list[Value]:
    """Return the level's values of tensors ``indices``. The level no longer keeps them alive."""
    removed = [level[i] for i in indices]
    for i in indices:
        level[i] = None
    return removed
