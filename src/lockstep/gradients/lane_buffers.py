"""LaneBuffers: every lane starts from the buffers at the step's beginning; at its end all workers have the average over lanes.

Floating-point buffers (BatchNorm statistics) are weighted and added along the summation tree, like gradients. Integer buffers
take the values of the first lane with samples. Only buffers that some lane changed are averaged: the mean of a constant may
differ from the constant by rounding, and masks are large. The control word says which buffers changed. A buffer that the model
creates, resizes or removes while it runs is a cache, and is left alone.

Note: how a change is detected
------------------------------
By value: batch normalisation writes its statistics without a new version number of the tensor. Buffers above 64 KB that have never
changed (masks, tables) are compared by value in two of every 100 steps, and by version number and identity in the other steps.

Note: buffers on a GPU
----------------------
The host does not wait for the device to learn whether a value changed. There the control word says which buffers *may* have
changed: all small ones, and the large ones that have changed before. For each floating-point buffer one more element is added up
along the tree: whether a lane changed it. If no lane did, the device keeps the value of the step's beginning instead of the mean.
Only large buffers that never changed make the host wait, in two of every 100 steps.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.comm.base import Comm, bits, real
from lockstep.comm.fold_nccl import row_length
from lockstep.gradients.buffers import Buffers
from lockstep.gradients.lane_reducer import LaneWeights
from lockstep.gradients.packed import differ, group_by_kind, pack, spread
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
        self._changed_values: dict[int, dict[int, Tensor]] = {}  # lane -> {buffer: elements after the lane}
        self._has_changed: dict[int, dict[int, Tensor]] = {}  # lane -> {floating-point buffer on a GPU: a bool on the GPU}
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
        self._changed_values, self._has_changed = {}, {}

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
        self._changed_values[lane] = {}
        if not has_samples:
            self.restore()
            return
        tensors = self._buffers.tensors()
        if len(tensors) != len(self._initial) or self._fold.lanes == 1:  # the values of a single lane are the average already
            return
        changed = self._find_changed(tensors)
        self._large_that_change |= {k for k in changed if not _is_small(tensors[k])}
        with torch.no_grad():
            for group in group_by_kind(changed, tensors):
                self._keep(lane, group, tensors)

    def _keep(self, lane: int, group: list[int], tensors: Sequence[Tensor]) -> None:
        """Copy the values of some buffers of one kind."""
        values, sizes = pack([tensors[k] for k in group]), [tensors[k].numel() for k in group]
        self._changed_values[lane].update(zip(group, values.split(sizes), strict=True))
        if _is_on_device(values) and _can_be_averaged(values):
            flags = differ(values, pack([self._initial[k] for k in group]), sizes)
            self._has_changed.setdefault(lane, {}).update(zip(group, flags.unbind(), strict=True))

    def changed(self) -> bytes:
        """Returns 1 for each buffer that some lane of this worker changed (on a GPU: may have changed), otherwise 0."""
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
        with torch.no_grad():
            for group in group_by_kind(numbers, self._initial):
                if _can_be_averaged(self._initial[group[0]]):
                    self._average_group(group, weights, scale)
                else:
                    self._take_values_of_lane(next(lane for lane, count in enumerate(weights.counts) if count), group)

    # -- one kind of buffer ------------------------------------------------------------------

    def _value(self, lane: int, k: int) -> Tensor:
        return self._changed_values.get(lane, {}).get(k, self._initial[k])

    def _average_group(self, group: list[int], weights: LaneWeights, scale: float) -> None:
        """Average buffers of one dtype and device."""
        first, fold = self._initial[group[0]], self._fold
        on_device, headroom = _is_on_device(first), headroom_of(first.dtype, fold.lanes)
        levels = self._add_up(group, weights, headroom)
        sizes = [self._initial[k].numel() for k in group]
        used = sum(sizes) + (len(group) if on_device else 0)
        rows = first.new_zeros(fold.width, row_length(used, self._comm.size) if on_device else used)
        copy_scaled([row[:used] for row in rows[: len(levels)]], levels, None)
        scale = scale / headroom
        in_fold = None if scale == 1 or on_device else scale
        self._comm.fold(rows.view(-1), fold, in_fold, "the buffers").wait()
        means, flags = rows[0, : sum(sizes)], rows[0, sum(sizes) : used]
        if on_device:
            if scale != 1:
                real(means).mul_(scale)
            means = torch.where(spread(flags != 0, sizes), means, pack([self._initial[k] for k in group]))
        self._write(group, means.split(sizes))

    def _add_up(self, group: list[int], weights: LaneWeights, headroom: float) -> list[Value]:
        """Returns the partial sums of this worker's lanes. On a GPU the flags of ``_has_changed`` follow the values."""
        lanes = self._fold.lanes_of(self._comm.rank)
        sums = PartialSums(1, carries(self._fold.lanes, *lanes))
        for lane in range(*lanes):
            value: Value = None
            factor = weights.share(lane) * headroom
            if factor:
                value = pack([self._value(lane, k) for k in group])
                value = value if factor == 1 else value.mul_(factor)
                if _is_on_device(value):
                    value = torch.cat([value, self._flags(lane, group).to(value.dtype)])
            sums.start_lane()
            sums.add([0], [value])
            sums.end_lane()
        return sums.levels_of(0)

    def _flags(self, lane: int, group: list[int]) -> Tensor:
        found = self._has_changed.get(lane, {})
        unchanged = torch.zeros((), dtype=torch.bool, device=self._initial[group[0]].device)
        return torch.stack([found.get(k, unchanged) for k in group])

    def _take_values_of_lane(self, lane: int, group: list[int]) -> None:
        """The rank that ran ``lane`` sends its values of buffers of one dtype and device to all ranks."""
        values = pack([self._value(lane, k) for k in group])
        self._comm.broadcast(bits(values), self._fold.rank_of(lane), "the integer buffers").wait()
        self._write(group, values.split([self._initial[k].numel() for k in group]))

    def _write(self, numbers: Sequence[int], values: Sequence[Tensor]) -> None:
        tensors = self._buffers.tensors()
        in_place: list[tuple[Tensor, Tensor]] = []
        for k, value in zip(numbers, values, strict=True):
            if tensors[k].shape != self._initial[k].shape:
                continue  # a cache that the model resized
            if self._buffers.may_write_in_place(tensors[k]):
                in_place.append((tensors[k], value.view(tensors[k].shape)))
            else:
                self._buffers.write(tensors[k], value.view(tensors[k].shape))
        _copy([tensor for tensor, _ in in_place], [value for _, value in in_place])

    # -- what changed ------------------------------------------------------------------------

    def _remember(self, tensors: list[Tensor]) -> None:
        self._tensors, self._versions = tensors, [tensor._version for tensor in tensors]

    def _may_have_changed(self, k: int, tensor: Tensor) -> bool:
        """False if the buffer is a resized cache or empty, or if it cannot have changed as far as is known without reading it."""
        if tensor.shape != self._initial[k].shape or not tensor.numel():
            return False
        must_compare = _is_small(tensor) or k in self._large_that_change or self._step % _COMPARE_ALL_EVERY < 2
        return must_compare or self._was_written(k, tensor)

    def _was_written(self, k: int, tensor: Tensor) -> bool:
        return tensor is not self._tensors[k] or tensor._version != self._versions[k]

    def _find_changed(self, tensors: Sequence[Tensor]) -> list[int]:
        """Returns the buffers that this lane changed; of those on a GPU, the buffers that it may have changed."""
        candidates = [k for k, tensor in enumerate(tensors) if self._may_have_changed(k, tensor)]
        unchanged = {k for k in candidates if not _is_on_device(tensors[k]) and _equal(tensors[k], self._initial[k])}
        constant = [k for k in candidates if _is_on_device(tensors[k]) and self._never_changed(k, tensors[k])]
        if constant:  # one comparison of all: reading the result waits for the device
            differs = torch.stack([(bits(tensors[k]) != bits(self._initial[k])).any() for k in constant]).tolist()
            unchanged |= {k for k, each in zip(constant, differs, strict=True) if not each}
        return [k for k in candidates if k not in unchanged]

    def _never_changed(self, k: int, tensor: Tensor) -> bool:
        return not (_is_small(tensor) or k in self._large_that_change or self._was_written(k, tensor))


def _is_on_device(tensor: Tensor) -> bool:
    """Whether reading the tensor would make the host wait for a device."""
    return tensor.is_cuda


def _can_be_averaged(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) or torch.equal(bits(a), bits(b))  # the second for NaN


def _copy(into: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    if into:
        with torch.no_grad():
            torch._foreach_copy_(list(into), list(values))


def _is_small(tensor: Tensor) -> bool:
    return tensor.nbytes <= _SMALL_BYTES
