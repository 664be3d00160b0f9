"""Snapshot: a copy in host memory of the tensors that one worker writes, laid out as its files.

Training waits until the tensors may be changed again. If a GPU holds them and has memory to spare, this is before the copy has
reached the host (device_copy.py). So the thread that reads the snapshot calls ``wait`` first.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.checkpoint.background_task import BackgroundTask
from lockstep.checkpoint.device_copy import CopyRanges, CudaDevice, Device, DeviceCopy, fits, plan_ranges
from lockstep.checkpoint.state_layout import StateLayout
from lockstep.checkpoint.tensor_file import Entry, make_header, place_tensors
from lockstep.comm.plain_state import dtype_name
from lockstep.errors import InvariantError

METADATA = {"format": "pt"}
_PAGE_BYTES = 4096


@dataclass(frozen=True)
class FilePlan:
    """One file to be written: its name, its header, and its tensors. Its data begins at ``begin`` in the snapshot's memory."""

    file: str
    header: bytes
    entries: tuple[Entry, ...]
    begin: int = 0

    @property
    def bytes(self) -> int:
        """Without the header."""
        return max((entry.end for entry in self.entries), default=0)


class Snapshot:
    """Memory that all checkpoints of a run use, one after the other. The first one allocates it; the next ones only copy."""

    def __init__(self, device: Device | None = None) -> None:
        """``device`` is used for tensors on it; by default, the GPU that holds the tensors, if there is one and not several."""
        self._device = device
        self._device_copy: DeviceCopy | None = None
        self._ranges: CopyRanges | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._allocation: BackgroundTask | None = None
        self.file_plans: tuple[FilePlan, ...] = ()
        self._views: list[Tensor] = []
        self._planned_for: Any = None
        """The files and tensors that ``file_plans`` and ``_views`` were made for."""

    @property
    def is_prepared(self) -> bool:
        return self._allocation is not None

    def prepare(self, layout: StateLayout, writer: int) -> None:
        """Allocate memory for this part in the background, before the first ``copy``."""
        nbytes = int(sum(layout.tensors[number].nbytes for _, numbers in layout.parts[writer] for number in numbers) * 1.01)
        pinned = any(tensor.is_cuda for tensor in layout.tensors)
        self._allocation = BackgroundTask(lambda: self._allocate(nbytes + (1 << 16), pinned), "prepare")

    def copy(self, layout: StateLayout, writer: int) -> None:
        """Copy the tensors that this worker writes. Returns when they may be changed; ``wait`` returns when all are copied."""
        self.wait()
        if self._allocation is not None:
            self._allocation.wait()
        files, tensors = layout.parts[writer], layout.tensors
        wanted = (files, [(layout.names[n], tensors[n].dtype, tensors[n].shape, tensors[n].device) for _, ns in files for n in ns])
        if wanted != self._planned_for:
            self._planned_for = None
            self._plan_files(layout, writer)
            self._planned_for = wanted
        sources = [tensors[entry.number].detach() for plan in self.file_plans for entry in plan.entries]
        if not self._copy_through_device(sources):
            self._copy_directly(sources)

    def wait(self) -> None:
        """Wait until all is copied. Called by the thread that writes, before it reads. Raises what the device raises."""
        copy = self._device_copy
        if copy is not None:
            copy.wait()
            self._device_copy = None

    def _copy_through_device(self, sources: list[Tensor]) -> bool:
        """Return False if no device is used, or if it has too little memory."""
        if self._device is None or self._ranges is None or not fits(self._device, self._ranges):
            return False
        try:
            self._device_copy = DeviceCopy(self._device, self._ranges, self._memory, self._views, sources)
        except torch.OutOfMemoryError:  # another process has allocated it meanwhile
            return False
        return True

    def _copy_directly(self, sources: list[Tensor]) -> None:
        if sources:
            with torch.no_grad():
                torch._foreach_copy_(self._views, sources, non_blocking=self._memory.is_pinned())
        if self._memory.is_pinned():
            torch.cuda.synchronize()

    def data(self, plan: FilePlan) -> memoryview:
        """Return a file's data, without its header."""
        self._require_complete()
        return memory_of(self._memory[plan.begin : plan.begin + plan.bytes])

    def tensor(self, plan: FilePlan, entry: Entry) -> Tensor:
        """Return the bytes of one tensor."""
        self._require_complete()
        return self._bytes(plan, entry)

    def _require_complete(self) -> None:
        if self._device_copy is not None:
            raise InvariantError("a snapshot was read before wait() had returned")

    def _bytes(self, plan: FilePlan, entry: Entry) -> Tensor:
        return self._memory[plan.begin + entry.begin : plan.begin + entry.end]

    def _plan_files(self, layout: StateLayout, writer: int) -> None:
        tensors, plans, begin = layout.tensors, [], 0
        for file, numbers in layout.parts[writer]:
            plan = plan_file(file, {number: (layout.names[number], tensors[number]) for number in numbers}, METADATA, begin)
            plans.append(plan)
            begin += -(-plan.bytes // _PAGE_BYTES) * _PAGE_BYTES
        self._allocate(begin, any(tensors[number].is_cuda for _, numbers in layout.parts[writer] for number in numbers))
        self.file_plans = tuple(plans)
        self._views = [
            self._bytes(plan, entry).view(tensors[entry.number].dtype).view(entry.shape) for plan in plans for entry in plan.entries
        ]
        self._plan_ranges(tensors)

    def _plan_ranges(self, tensors: Sequence[Tensor]) -> None:
        numbers = [entry.number for plan in self.file_plans for entry in plan.entries]
        gpus = {tensors[number].device for number in numbers if tensors[number].is_cuda}
        if gpus:
            self._device = CudaDevice(gpus.pop()) if len(gpus) == 1 else None
        self._ranges = None
        if (device := self._device) is not None:
            files: list[list[tuple[int, int, int, bool]]] = []
            for plan in self.file_plans:
                files.append([])
                for entry in plan.entries:
                    place = (plan.begin + entry.begin, plan.begin + entry.end)
                    files[-1].append((sum(map(len, files)), *place, device.holds(tensors[entry.number])))
            self._ranges = plan_ranges(files)

    def _allocate(self, nbytes: int, pinned: bool) -> None:
        """Get memory and write to each page of it: the first write to a page costs more than the copy into it."""
        if self._memory.numel() >= nbytes and self._memory.is_pinned() == pinned:
            return
        self._planned_for = None  # the views are of the old memory
        self._memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        self._memory[::_PAGE_BYTES] = 0


def plan_file(file: str, tensors: Mapping[int, tuple[str, Tensor]], metadata: Mapping[str, str], begin: int = 0) -> FilePlan:
    """Plan a file that holds ``tensors``: number -> (name, tensor)."""
    entries = place_tensors([(n, name, dtype_name(t.dtype), tuple(t.shape)) for n, (name, t) in tensors.items()])
    return FilePlan(file, make_header(entries, metadata), entries, begin)


def memory_of(flat: Tensor) -> memoryview:
    """Return the memory of a flat uint8 tensor on the host. The tensor must live longer than the view."""
    if flat.numel() == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * flat.numel()).from_address(flat.data_ptr())).cast("B")
