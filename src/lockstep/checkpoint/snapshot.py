"""Snapshot: a copy in host memory of the tensors that one worker writes, laid out as its files. Training waits for it alone."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.checkpoint.background_task import BackgroundTask
from lockstep.checkpoint.state_layout import StateLayout
from lockstep.checkpoint.tensor_file import Entry, make_header, place_tensors
from lockstep.comm.plain_state import dtype_name

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

    def __init__(self) -> None:
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
        """Copy the tensors that this worker writes. Returns when all are copied."""
        if self._allocation is not None:
            self._allocation.wait()
        files, tensors = layout.parts[writer], layout.tensors
        wanted = (files, [(layout.names[n], tensors[n].dtype, tensors[n].shape, tensors[n].device) for _, ns in files for n in ns])
        if wanted != self._planned_for:
            self._planned_for = None
            self._plan_files(layout, writer)
            self._planned_for = wanted
        sources = [tensors[entry.number].detach() for plan in self.file_plans for entry in plan.entries]
        if sources:
            with torch.no_grad():
                torch._foreach_copy_(self._views, sources, non_blocking=self._memory.is_pinned())
        if self._memory.is_pinned():
            torch.cuda.synchronize()

    def data(self, plan: FilePlan) -> memoryview:
        """Return a file's data, without its header."""
        return memory_of(self._memory[plan.begin : plan.begin + plan.bytes])

    def tensor(self, plan: FilePlan, entry: Entry) -> Tensor:
        """Return the bytes of one tensor."""
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
            self.tensor(plan, entry).view(tensors[entry.number].dtype).view(entry.shape) for plan in plans for entry in plan.entries
        ]

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
