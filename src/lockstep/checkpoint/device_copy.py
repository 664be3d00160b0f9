"""DeviceCopy: tensors of a device are copied to memory of the device at once, and from there to the host while training continues.

Training waits for neither copy. Both follow the work that the device has been given so far, and what training gives to the device
later follows the first copy (stream order), so it cannot change what is written:

    the stream of training   ... step | tensors -> buffers | next step ...
    a stream of its own                                    | buffers -> host | event: ``wait`` returns

Small tensors of the host may lie between those of the device. They are copied when ``start`` is called, and put into their places
by ``wait``, because the second copy fills whole ranges. A large tensor of the host ends a range and is copied directly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

SMALL_BYTES = 64 << 10
"""A tensor of the host with fewer bytes does not end a range."""
PIECE_BYTES = 16 << 20
"""The second copy is made of pieces, so that small copies of the training to the host need not wait for all of it."""
RESERVE_BYTES = 512 << 20
"""This much of the device's memory stays free for the training, besides as much as the buffers need."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Items are copied as integers: a multi-tensor copy may convert items of 2 bytes to float and back, which changes bits of NaNs."""
_ALIGNMENT = 16
"""The bytes of the largest item of a tensor."""


class Device(Protocol):
    """What a ``DeviceCopy`` needs of a device. The tests have one on the host."""

    def holds(self, tensor: Tensor) -> bool:
        """Return whether the tensor is in memory of this device."""

    def free_bytes(self) -> int:
        """Return how much memory can be allocated."""

    def allocate(self, nbytes: int) -> Tensor:
        """Return a flat uint8 tensor on the device. Raises ``torch.OutOfMemoryError``."""

    def send(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Callable[[], None]:
        """Start to copy (to the host, from the device). The function that is returned waits for the end of it, in any thread."""


class CudaDevice:
    """A GPU. The copies to the host have a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def holds(self, tensor: Tensor) -> bool:
        return tensor.device == self._device

    def free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[0])

    def allocate(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def send(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Callable[[], None]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        ended = torch.cuda.Event(blocking=True)  # the thread that waits uses no core
        with torch.cuda.stream(self._stream):
            for to, source in pairs:
                to.copy_(source, non_blocking=True)
            ended.record()
        return ended.synchronize


@dataclass(frozen=True)
class CopyRange:
    """A range of the snapshot's memory that one buffer on the device mirrors."""

    begin: int
    end: int
    tensors: tuple[tuple[int, int], ...]
    """Tensors of the device: (index, first byte in the memory)."""


@dataclass(frozen=True)
class CopyRanges:
    """How each tensor is copied: its index is in one range, in ``small`` or in ``large``. Empty ones of the device are left out."""

    ranges: tuple[CopyRange, ...]
    small: tuple[int, ...]
    """Tensors of the host that may lie inside a range."""
    large: tuple[int, ...]
    """Tensors of the host that lie outside of all ranges."""

    @property
    def bytes(self) -> int:
        return sum(each.end - each.begin for each in self.ranges)


def plan_ranges(files: Sequence[Sequence[tuple[int, int, int, bool]]]) -> CopyRanges:
    """Plan the copy of tensors given as (index, begin, end, whether the device holds it), by file and in the order of memory.

    A range lies inside one file: there no tensor has wider items than the one before it, so that all are aligned in the buffer.
    """
    ranges: list[CopyRange] = []
    small: list[int] = []
    large: list[int] = []
    for tensors in files:
        found: list[tuple[int, int, int]] = []
        for index, begin, end, on_device in tensors:
            if on_device:
                found.append((index, begin, end))
            elif end - begin < SMALL_BYTES:
                small.append(index)
            else:
                large.append(index)
                ranges += _make_range(found)
                found = []
        ranges += _make_range(found)
    return CopyRanges(tuple(ranges), tuple(small), tuple(large))


def fits(device: Device, plan: CopyRanges) -> bool:
    """Return whether the device has memory to spare: with all buffers, as much again and ``RESERVE_BYTES`` stay free."""
    return bool(plan.ranges) and device.free_bytes() >= 2 * plan.bytes + RESERVE_BYTES


class DeviceCopy:
    """One copy of a state. Holds its buffers on the device until ``wait`` has returned or raised."""

    def __init__(
        self, device: Device, plan: CopyRanges, memory: Tensor, views: Sequence[Tensor], sources: Sequence[Tensor]
    ) -> None:
        """Start to copy ``sources`` into ``views``, which are in ``memory``. Raises ``torch.OutOfMemoryError``."""
        self._buffers = [device.allocate(-(-(each.end - each.begin) // _ALIGNMENT) * _ALIGNMENT) for each in plan.ranges]
        with torch.no_grad():
            for buffer, each in zip(self._buffers, plan.ranges, strict=True):
                _gather(buffer, each, sources)
            self._wait: Callable[[], None] | None = device.send(list(self._pieces(plan, memory)))
            self._small = [(views[index], sources[index].clone()) for index in plan.small]
            for index in plan.large:
                views[index].copy_(sources[index])

    def wait(self) -> None:
        """Wait until the memory holds the tensors. Raises what the device raises. May be called in another thread, and twice."""
        wait, self._wait = self._wait, None
        if wait is None:
            return
        try:
            wait()
            for view, value in self._small:
                view.copy_(value)
        finally:
            self._buffers, self._small = [], []

    def _pieces(self, plan: CopyRanges, memory: Tensor) -> Sequence[tuple[Tensor, Tensor]]:
        pairs: list[tuple[Tensor, Tensor]] = []
        for buffer, each in zip(self._buffers, plan.ranges, strict=True):
            nbytes = each.end - each.begin
            pairs += zip(memory[each.begin : each.end].split(PIECE_BYTES), buffer[:nbytes].split(PIECE_BYTES), strict=True)
        return pairs


def _make_range(found: Sequence[tuple[int, int, int]]) -> list[CopyRange]:
    tensors = tuple((index, begin) for index, begin, end in found if end > begin)
    return [CopyRange(found[0][1], found[-1][2], tensors)] if tensors else []


def _gather(buffer: Tensor, plan: CopyRange, sources: Sequence[Tensor]) -> None:
    """Copy all tensors of a range into its buffer: one multi-tensor copy for each size of items and kind of strides."""
    groups: dict[tuple[torch.dtype, bool], tuple[list[Tensor], list[Tensor]]] = {}
    items: dict[torch.dtype, Tensor] = {}
    for index, begin in plan.tensors:
        source = sources[index]
        if source.is_conj() or source.is_neg():
            source = source.resolve_conj().resolve_neg()
        dtype = _BITS.get(source.itemsize, source.dtype)
        if dtype not in items:
            items[dtype] = buffer.view(dtype)
        first = (begin - plan.begin) // source.itemsize
        to, found = groups.setdefault((dtype, source.is_contiguous()), ([], []))
        to.append(items[dtype][first : first + source.numel()].view(source.shape))
        found.append(source.view(dtype))
    for to, found in groups.values():
        torch._foreach_copy_(to, found)
