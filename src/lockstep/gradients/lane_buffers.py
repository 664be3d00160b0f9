"""Buffers under lanes: every lane starts from the step's beginning; afterwards all hold the average over lanes.

Floating-point buffers (BatchNorm statistics) are weighted and folded along the tree like gradients;
integer ones follow the first lane with samples. Only buffers that some lane changed are touched: the mean of a
constant need not be that constant, and masks are large. Which those are comes from the control word. A
buffer that is made, resized or dropped while the model runs is a cache: it is left to the model.

Note: how a change is noticed
-----------------------------
By value: batch normalisation writes its statistics behind autograd's back, without a new version. Buffers
above 64 KB that never changed so far (masks, tables) are read only now and then, and told by version and
identity in between.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.comm.base import Comm, bits
from lockstep.gradients.buffers import Buffers
from lockstep.gradients.partial_sums import PartialSums, Value, write
from lockstep.gradients.scale import headroom
from lockstep.plan.tree import Fold, carries

_SMALL_BYTES = 1 << 16
_READ_ALL_EVERY = 100
"""Steps after which every buffer is read for two steps, however large and constant it seems."""


class LaneBuffers:
    """One worker's buffers. Per step ``start``; per lane ``restore``, then ``note`` when it is over; then ``finish``."""

    def __init__(self, buffers: Buffers, comm: Comm) -> None:
        self._buffers, self._comm = buffers, comm
        self._tensors: list[Tensor] = []  # as they were at the step's beginning, and their versions then
        self._versions: list[int] = []
        self._begun: list[Tensor] = []  # copies of that
        self._lively: set[int] = set()  # large ones that have changed before
        self._lanes: dict[int, dict[int, Tensor]] = {}
        self._step = 0

    def rebind(self, comm: Comm) -> None:
        self._comm = comm

    def start(self, step: int) -> None:
        """A step begins: what the buffers hold now is where every lane starts."""
        self._step = step
        tensors = self._buffers.tensors()
        if len(tensors) != len(self._begun) or any(t.shape != b.shape for t, b in zip(tensors, self._begun, strict=True)):
            self._begun = [tensor.detach().clone() for tensor in tensors]
            self._lively = set()
        else:
            stale = [k for k, tensor in enumerate(tensors) if self._may_have_changed(k, tensor)]
            _copy([self._begun[k] for k in stale], [tensors[k] for k in stale])
        self._tensors, self._versions = tensors, [tensor._version for tensor in tensors]
        self._lanes = {}

    def restore(self) -> None:
        """A lane begins, or a step is given up."""
        now = self._buffers.tensors()
        if len(now) != len(self._begun):
            return
        with torch.no_grad():
            stale = [k for k, tensor in enumerate(now) if self._may_have_changed(k, tensor)]
            self._write(stale, [self._begun[k] for k in stale])
        self._tensors = self._buffers.tensors()
        self._versions = [tensor._version for tensor in self._tensors]

    def note(self, lane: int, counts: bool) -> None:
        """A lane is over: keep what it made of the buffers. A stand-in (``counts`` False) makes nothing."""
        if not counts:
            self._lanes[lane] = {}
            self.restore()
            return
        tensors = self._buffers.tensors()
        changed = self._different(tensors) if len(tensors) == len(self._begun) else []
        self._lively |= {k for k in changed if not _is_small(tensors[k])}
        self._lanes[lane] = {k: tensors[k].detach().clone() for k in changed}

    def changed(self) -> bytes:
        """1 for the buffers that some lane of this worker changed."""
        seen = {k for values in self._lanes.values() for k in values}
        return bytes(k in seen for k in range(len(self._begun)))

    def fingerprints(self) -> list[list[str]]:
        """Of the small buffers at the step's beginning: (kind, name, hash) rows."""
        named = zip(self._buffers.named(), self._begun, strict=False)
        return [["buffer", name, f"{zlib.crc32(bytes(bits(b).tolist())):08x}"] for (name, _), b in named if _is_small(b)]

    def finish(self, changed: bytes, fold: Fold, lanes: tuple[int, int], shares: Sequence[float], scale: float, first: int) -> None:
        """Average the buffers that changed anywhere. Collective.

        ``shares``: of my lanes; ``first``: the first lane with samples.
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
                self._follow(others, fold, first)

    # -- one kind of buffer ------------------------------------------------------------------

    def _value(self, lane: int, k: int) -> Tensor:
        return self._lanes.get(lane, {}).get(k, self._begun[k])

    def _average(self, group: list[int], fold: Fold, lanes: tuple[int, int], shares: Sequence[float], scale: float) -> None:
        stack = PartialSums(1, carries(fold.lanes, *lanes))
        room = headroom(self._begun[group[0]].dtype, fold.lanes)
        for lane, share in zip(range(*lanes), shares, strict=True):
            value: Value = None
            if share:
                value = torch.cat([self._value(lane, k).reshape(-1) for k in group])
                value = value if share * room == 1 else value.mul_(share * room)
            stack.open()
            stack.fold([0], [value])
            stack.close()
        size = sum(self._begun[k].numel() for k in group)
        rows = self._begun[group[0]].new_zeros(fold.width, size)
        write(list(rows), [*stack.values(0), *[None] * (fold.width - len(stack.values(0)))], None)
        scale = scale / room
        self._comm.fold(rows.view(-1), fold, None if scale == 1 else scale, "the buffers").wait()
        parts = rows[0].split([self._begun[k].numel() for k in group])
        self._write(group, parts)

    def _follow(self, numbers: list[int], fold: Fold, first: int) -> None:
        source = next(rank for rank, held in enumerate(fold.held) if held[0][0] <= first < held[-1][1])
        flat = torch.cat([bits(self._value(first, k).contiguous()).cpu() for k in numbers])
        self._comm.broadcast(flat, source, "the integer buffers").wait()
        parts = flat.split([self._begun[k].nbytes for k in numbers])
        self._write(numbers, [part.clone().view(self._begun[k].dtype) for k, part in zip(numbers, parts, strict=True)])

    def _write(self, numbers: Sequence[int], values: Sequence[Tensor]) -> None:
        tensors = self._buffers.tensors()
        in_place = [
            (tensors[k], value)
            for k, value in zip(numbers, values, strict=True)
            if tensors[k].shape == self._begun[k].shape and self._buffers.is_free(tensors[k])
        ]
        _copy([tensor for tensor, _ in in_place], [value.view(tensor.shape) for tensor, value in in_place])
        done = {id(tensor) for tensor, _ in in_place}
        for k, value in zip(numbers, values, strict=True):
            if id(tensors[k]) not in done and tensors[k].shape == self._begun[k].shape:
                self._buffers.write(tensors[k], value.view(tensors[k].shape).to(tensors[k].device))

    # -- what changed ------------------------------------------------------------------------

    def _may_have_changed(self, k: int, tensor: Tensor) -> bool:
        """False only where nothing can have, as far as is known without reading it."""
        if tensor.shape != self._begun[k].shape:
            return False
        reads = _is_small(tensor) or k in self._lively or self._step % _READ_ALL_EVERY < 2
        return reads or tensor is not self._tensors[k] or tensor._version != self._versions[k]

    def _different(self, tensors: Sequence[Tensor]) -> list[int]:
        asked = [k for k, tensor in enumerate(tensors) if self._may_have_changed(k, tensor)]
        on_device = [k for k in asked if tensors[k].is_cuda]
        changed = {k for k in asked if not tensors[k].is_cuda and not _equal(tensors[k], self._begun[k])}
        if on_device:  # asked all at once: an answer costs a synchronisation
            answers = torch.stack([(bits(tensors[k]) != bits(self._begun[k])).any() for k in on_device]).tolist()
            changed |= {k for k, answer in zip(on_device, answers, strict=True) if answer}
        return [k for k in asked if k in changed]


def _equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) or torch.equal(bits(a), bits(b))  # the second for NaN


def _copy(into: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    if into:
        with torch.no_grad():
            torch._foreach_copy_(list(into), list(values))


def _is_small(tensor: Tensor) -> bool:
    return tensor.nbytes <= _SMALL_BYTES


def _groups(tensors: Sequence[Tensor], numbers: Sequence[int]) -> list[list[int]]:
    """Numbers of tensors that can lie in one flat piece."""
    found: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for tensor, k in zip(tensors, numbers, strict=True):
        found.setdefault((tensor.dtype, tensor.device), []).append(k)
    return list(found.values())
