"""Buffers under lanes: every lane starts from the step's beginning; afterwards all hold the average over lanes.

Floating-point buffers (BatchNorm statistics) are weighted and folded along the tree like gradients;
integer ones follow the first lane with samples. Only buffers that some lane changed are touched: the mean of a
constant need not be that constant, and masks are large. Which those are comes from the control word.

Note: how a change is noticed
-----------------------------
By value: batch normalisation writes its statistics behind autograd's back, without a new version. Buffers
above 64 KB (masks, tables) are not read in every lane, but told by version and identity.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.comm.base import Comm, bits
from lockstep.grads.buffers import Buffers
from lockstep.grads.stack import LaneStack, Value, write
from lockstep.plan.tree import Fold, carries

_SMALL_BYTES = 1 << 16


class LaneBuffers:
    """One worker's buffers. Per step ``start``; per lane ``restore``, then ``note`` when it is over; then ``finish``."""

    def __init__(self, buffers: Buffers, comm: Comm) -> None:
        self._buffers, self._comm = buffers, comm
        self._begun: list[Tensor] = []  # copies of the step's beginning
        self._stamps: list[tuple[int, int]] = []  # of the tensors those are copies of
        self._lanes: dict[int, dict[int, Tensor]] = {}

    def start(self) -> None:
        """A step begins: what the buffers hold now is where every lane starts."""
        tensors = self._buffers.tensors()
        if len(self._begun) != len(tensors):
            self._begun = [t.detach().clone() for t in tensors]
        else:
            for k, tensor in enumerate(tensors):
                if _is_small(tensor) or _stamp(tensor) != self._stamps[k]:
                    self._begun[k] = tensor.detach().clone()
        self._stamps = _stamps(tensors)
        self._lanes = {}

    def restore(self) -> None:
        """A lane begins."""
        with torch.no_grad():
            for k, tensor in enumerate(self._buffers.tensors()):
                if _is_small(tensor) or _stamp(tensor) != self._stamps[k]:
                    self._buffers.write(tensor, self._begun[k])
        self._stamps = _stamps(self._buffers.tensors())

    def note(self, lane: int, counts: bool) -> None:
        """A lane is over: keep what it made of the buffers. A stand-in (``counts`` False) makes nothing."""
        tensors = self._buffers.tensors()
        self._lanes[lane] = {k: tensors[k].detach().clone() for k in self._different(tensors)} if counts else {}

    def _different(self, tensors: Sequence[Tensor]) -> list[int]:
        small = [k for k, tensor in enumerate(tensors) if _is_small(tensor)]
        if any(tensors[k].is_cuda for k in small):  # asked all at once: an answer costs a synchronisation
            where = next(tensors[k].device for k in small if tensors[k].is_cuda)
            answers = torch.stack([(bits(tensors[k]) != bits(self._begun[k])).any().to(where) for k in small]).tolist()
        else:
            answers = [not torch.equal(bits(tensors[k]), bits(self._begun[k])) for k in small]
        changed = [k for k, answer in zip(small, answers, strict=True) if answer]
        return changed + [k for k, tensor in enumerate(tensors) if not _is_small(tensor) and _stamp(tensor) != self._stamps[k]]

    def changed(self) -> bytes:
        """1 for the buffers that some lane of this worker changed."""
        seen = {k for values in self._lanes.values() for k in values}
        return bytes(k in seen for k in range(len(self._begun)))

    def finish(self, changed: bytes, fold: Fold, lanes: tuple[int, int], shares: Sequence[float], scale: float, first: int) -> None:
        """Average the buffers that changed anywhere. Collective.

        ``shares``: of my lanes; ``first``: the rank that has the first lane with samples.
        """
        numbers = [k for k, flag in enumerate(changed) if flag]
        if not numbers:
            return
        with torch.no_grad():
            floats = [k for k in numbers if self._begun[k].is_floating_point() or self._begun[k].is_complex()]
            for group in _groups([self._begun[k] for k in floats], floats):
                self._average(group, fold, lanes, shares, scale)
            others = [k for k in numbers if k not in set(floats)]
            if others:
                self._follow(others, lanes, shares, first)

    def _value(self, lane: int, k: int) -> Tensor:
        return self._lanes.get(lane, {}).get(k, self._begun[k])

    def _average(self, group: list[int], fold: Fold, lanes: tuple[int, int], shares: Sequence[float], scale: float) -> None:
        stack = LaneStack(1, carries(fold.lanes, *lanes))
        for lane, share in zip(range(*lanes), shares, strict=True):
            value: Value = None
            if share:
                value = torch.cat([self._value(lane, k).reshape(-1) for k in group])
                value = value if share == 1 else value.mul_(share)
            stack.open()
            stack.fold([0], [value])
            stack.close()
        size = sum(self._begun[k].numel() for k in group)
        rows = self._begun[group[0]].new_zeros(fold.width, size)
        write(list(rows), [*stack.values(0), *[None] * (fold.width - len(stack.values(0)))], None)
        self._comm.fold(rows.view(-1), fold, None if scale == 1 else scale, "the buffers").wait()
        parts = rows[0].split([self._begun[k].numel() for k in group])
        self._write(group, parts)

    def _follow(self, numbers: list[int], lanes: tuple[int, int], shares: Sequence[float], first: int) -> None:
        lane = next((lane for lane, share in zip(range(*lanes), shares, strict=True) if share), lanes[0])
        flat = torch.cat([bits(self._value(lane, k).contiguous()).cpu() for k in numbers])
        self._comm.broadcast(flat, first, "the integer buffers").wait()
        parts = flat.split([self._begun[k].nbytes for k in numbers])
        self._write(numbers, [part.clone().view(self._begun[k].dtype) for k, part in zip(numbers, parts, strict=True)])

    def _write(self, numbers: Sequence[int], values: Sequence[Tensor]) -> None:
        tensors = self._buffers.tensors()
        for k, value in zip(numbers, values, strict=True):
            self._buffers.write(tensors[k], value.view(tensors[k].shape).to(tensors[k].device))


def _is_small(tensor: Tensor) -> bool:
    return tensor.nbytes <= _SMALL_BYTES


def _stamp(tensor: Tensor) -> tuple[int, int]:
    """Changes whenever the buffer is written to, or replaced."""
    return id(tensor), tensor._version


def _stamps(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    return [_stamp(tensor) for tensor in tensors]


def _groups(tensors: Sequence[Tensor], numbers: Sequence[int]) -> list[list[int]]:
    """Numbers of tensors that can lie in one flat piece."""
    found: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for tensor, k in zip(tensors, numbers, strict=True):
        found.setdefault((tensor.dtype, tensor.device), []).append(k)
    return list(found.values())
