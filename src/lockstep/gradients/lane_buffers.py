"""LaneBuffers: every lane starts from the buffers at the step's beginning; at its end all workers have the average over lanes.

Floating-point buffers (BatchNorm statistics) are weighted and added along the summation tree, like gradients. Integer buffers
take the values of the first lane with samples. Only buffers that some lane changed are averaged: the mean of a constant may
differ from the constant by rounding, and masks are large. The control word says which buffers changed. A buffer that the model
creates, resizes or removes while it runs is a cache, and is left alone.

Note: how a change is detected
------------------------------
By value: batch normalisation writes its statistics without a new version number of the tensor. Buffers above 64 KB that have never
changed (masks, tables) are compared by value in two of every 100 steps, and by version number and identity in the other steps.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.comm.base import Comm, bits
from lockstep.gradients.buffers import Buffers
from lockstep.gradients.lane_reducer import LaneWeights
from lockstep.gradients.partial_sums import PartialSums, Value, copy_scaled, headroom_of
from lockstep.plan.tree import Fold, carries

_SMALL_BYTES = 1 << 16
_COMPARE_ALL_EVERY = 100
"""Of this many steps, the first two compare every buffer by value, however large it is."""


class LaneBuffers:
    """The buffers of one worker. Each phase: ``start_phase``; for each lane ``restore`` and ``end_lane``; then ``average``."""

    def __init__(self, buffers: Buffers, comm: Comm, fold: Fold) -> None:
        self._buffers, self._comm, self._fold = buffers, comm, fold
        self._initial: list[Tensor] = []  # copies of the buffers at the step's beginning
        self._tensors: list[Tensor] = []  # the buffers when they were last equal to the copies, and their version numbers
        self._versions: list[int] = []
        self._large_that_change: set[int] = set()
        self._changed_values: dict[int, dict[int, Tensor]] = {}  # lane -> {buffer: value after the lane}
        self._step, self._has_begun = 0, False

    def rebind(self, comm: Comm, fold: Fold) -> None:
        """Continue with another set of workers."""
        self._comm, self._fold = comm, fold
        self._has_begun = False

    def start_phase(self, step: int) -> None:
        """A phase of a step begins: every lane will start from the present values."""
        self._step, self._has_begun = step, True
        tensors = self._buffers.tensors()
        if len(tensors) != len(self._initial) or any(t.shape != b.shape for t, b in zip(tensors, self._initial, strict=True)):
            self._initial = [tensor.detach().clone() for tensor in tensors]
            self._large_that_change = set()
        else:
            stale = [k for k, tensor in enumerate(tensors) if self._may_have_changed(k, tensor)]
            _copy([self._initial[k] for k in stale], [tensors[k] for k in stale])
        self._remember(tensors)
        self._changed_values = {}

    def restore(self) -> None:
        """Write the values of the step's beginning: a lane begins, or the step is abandoned."""
        now = self._buffers.tensors()
        if len(now) != len(self._initial):
            return
        with torch.no_grad():
            stale = [k for k, tensor in enumerate(now) if self._may_have_changed(k, tensor)]
            self._write(stale, [self._initial[k] for k in stale])
        self._remember(self._buffers.tensors())

    def end_lane(self, lane: int, has_samples: bool) -> None:
        """A lane is over: keep the values it changed. A lane without samples (it ran on a stand-in batch) changes nothing."""
        if not has_samples:
            self._changed_values[lane] = {}
            self.restore()
            return
        tensors = self._buffers.tensors()
        changed = self._find_changed(tensors) if len(tensors) == len(self._initial) else []
        self._large_that_change |= {k for k in changed if not _is_small(tensors[k])}
        self._changed_values[lane] = {k: tensors[k].detach().clone() for k in changed}

    def changed(self) -> bytes:
        """Returns 1 for each buffer that some lane of this worker changed, otherwise 0."""
        changed = {k for values in self._changed_values.values() for k in values}
        return bytes(k in changed for k in range(len(self._initial)))

    def fingerprints(self) -> list[list[str]]:
        """Returns a row (kind, name, hash) for each small buffer at the step's beginning.

        Returns no rows, on every worker, if no step has begun with these workers: a newcomer does not know how the last one began.
        """
        if not self._has_begun:
            return []
        named = zip(self._buffers.named(), self._initial, strict=False)
        return [["buffer", name, f"{zlib.crc32(bytes(bits(b).tolist())):08x}"] for (name, _), b in named if _is_small(b)]

    def average(self, changed: bytes, weights: LaneWeights, scale: float) -> None:
        """Average the buffers that some lane of the run ``changed``. Collective."""
        numbers = [k for k, flag in enumerate(changed) if flag]
        if not numbers:
            return
        with torch.no_grad():
            floats = [k for k in numbers if self._initial[k].is_floating_point() or self._initial[k].is_complex()]
            groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
            for k in floats:
                groups.setdefault((self._initial[k].dtype, self._initial[k].device), []).append(k)
            for group in groups.values():
                self._average_group(group, weights, scale)
            others = [k for k in numbers if k not in set(floats)]
            if others:
                first = next(lane for lane, count in enumerate(weights.counts) if count)
                self._take_values_of_lane(first, others)

    # -- one kind of buffer ------------------------------------------------------------------

    def _value(self, lane: int, k: int) -> Tensor:
        return self._changed_values.get(lane, {}).get(k, self._initial[k])

    def _average_group(self, group: list[int], weights: LaneWeights, scale: float) -> None:
        """Average buffers of one dtype and device."""
        fold, lanes = self._fold, self._fold.lanes_of(self._comm.rank)
        sums = PartialSums(1, carries(fold.lanes, *lanes))
        headroom = headroom_of(self._initial[group[0]].dtype, fold.lanes)
        for lane in range(*lanes):
            value: Value = None
            factor = weights.share(lane) * headroom
            if factor:
                value = torch.cat([self._value(lane, k).reshape(-1) for k in group])
                value = value if factor == 1 else value.mul_(factor)
            sums.start_lane()
            sums.add([0], [value])
            sums.end_lane()
        sizes = [self._initial[k].numel() for k in group]
        rows = self._initial[group[0]].new_zeros(fold.width, sum(sizes))
        levels = sums.levels_of(0)
        copy_scaled(list(rows[: len(levels)]), levels, None)
        scale = scale / headroom
        self._comm.fold(rows.view(-1), fold, None if scale == 1 else scale, "the buffers").wait()
        self._write(group, rows[0].split(sizes))

    def _take_values_of_lane(self, lane: int, numbers: list[int]) -> None:
        """The rank that ran ``lane`` sends its values to all ranks."""
        flat = torch.cat([bits(self._value(lane, k).contiguous()).cpu() for k in numbers])
        self._comm.broadcast(flat, self._fold.rank_of(lane), "the integer buffers").wait()
        parts = flat.split([self._initial[k].nbytes for k in numbers])
        self._write(numbers, [part.clone().view(self._initial[k].dtype) for k, part in zip(numbers, parts, strict=True)])

    def _write(self, numbers: Sequence[int], values: Sequence[Tensor]) -> None:
        tensors = self._buffers.tensors()
        in_place: list[tuple[Tensor, Tensor]] = []
        for k, value in zip(numbers, values, strict=True):
            if tensors[k].shape != self._initial[k].shape:
                continue  # a cache that the model resized
            if self._buffers.may_write_in_place(tensors[k]):
                in_place.append((tensors[k], value.view(tensors[k].shape)))
            else:
                self._buffers.write(tensors[k], value.view(tensors[k].shape).to(tensors[k].device))
        _copy([tensor for tensor, _ in in_place], [value for _, value in in_place])

    # -- what changed ------------------------------------------------------------------------

    def _remember(self, tensors: list[Tensor]) -> None:
        self._tensors, self._versions = tensors, [tensor._version for tensor in tensors]

    def _may_have_changed(self, k: int, tensor: Tensor) -> bool:
        """False if the buffer is a resized cache, or if it cannot have changed as far as is known without reading it."""
        if tensor.shape != self._initial[k].shape:
            return False
        must_compare = _is_small(tensor) or k in self._large_that_change or self._step % _COMPARE_ALL_EVERY < 2
        return must_compare or tensor is not self._tensors[k] or tensor._version != self._versions[k]

    def _find_changed(self, tensors: Sequence[Tensor]) -> list[int]:
        candidates = [k for k, tensor in enumerate(tensors) if self._may_have_changed(k, tensor)]
        on_device = [k for k in candidates if tensors[k].is_cuda]
        changed = {k for k in candidates if not tensors[k].is_cuda and not _equal(tensors[k], self._initial[k])}
        if on_device:  # one comparison of all: reading the result synchronises with the device
            differ = torch.stack([(bits(tensors[k]) != bits(self._initial[k])).any() for k in on_device]).tolist()
            changed |= {k for k, differs in zip(on_device, differ, strict=True) if differs}
        return [k for k in candidates if k in changed]


def _equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) or torch.equal(bits(a), bits(b))  # the second for NaN


def _copy(into: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    if into:
        with torch.no_grad():
            torch._foreach_copy_(list(into), list(values))


def _is_small(tensor: Tensor) -> bool:
    return tensor.nbytes <= _SMALL_BYTES
