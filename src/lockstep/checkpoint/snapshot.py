"""Snapshot: one worker's part of the state, copied to host memory in the layout of its files. All that training waits for."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.checkpoint.tensor_file import Entry, header, lay_out
from lockstep.comm.plain_state import dtype_name

PAGE = 4096


@dataclass(frozen=True)
class FilePlan:
    """One file to be written: its name, its header, its tensors, and where its data lies in the snapshot's memory."""

    file: str
    head: bytes
    entries: tuple[Entry, ...]
    numbers: tuple[int, ...]
    """Of the tensors, in the whole state."""
    begin: int

    @property
    def bytes(self) -> int:
        return max((entry.end for entry in self.entries), default=0)

    @property
    def head_sha256(self) -> str:
        return hashlib.sha256(self.head).hexdigest()


Files = Sequence[tuple[str, Sequence[int], Mapping[str, str]]]
"""Name, the numbers of its tensors, metadata."""


class Snapshot:
    """Memory that is kept from one checkpoint to the next: after the first one copying is all that it costs."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self.file_plans: tuple[FilePlan, ...] = ()
        self._views: list[Tensor] = []
        self._shape: Any = None
        """What the layout was made for: from one checkpoint to the next it is the same."""

    def prepare(self, nbytes: int, pinned: bool) -> None:
        """Get so much memory, and touch it: a page's first touch costs more than the copy into it."""
        if self._memory.numel() >= nbytes and self._memory.is_pinned() == pinned:
            return
        self._shape = None  # the views are of the old memory
        self._memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        self._memory[::PAGE] = 0

    def take(self, tensors: Sequence[Tensor], names: Sequence[str], files: Files) -> None:
        """Returns when all are copied."""
        shape = (files, [(names[n], tensors[n].dtype, tensors[n].shape, tensors[n].device) for _, ns, _ in files for n in ns])
        if shape != self._shape:
            self._shape = None
            self._lay_out(tensors, names, files)
            self._shape = shape
        there = [tensors[number].detach() for file_plan in self.file_plans for number in file_plan.numbers]
        if there:
            with torch.no_grad():
                torch._foreach_copy_(self._views, there, non_blocking=self._memory.is_pinned())
        if self._memory.is_pinned():
            torch.cuda.synchronize()

    def _lay_out(self, tensors: Sequence[Tensor], names: Sequence[str], files: Files) -> None:
        file_plans, begin = [], 0
        for file, numbers, metadata in files:
            file_plan = sheet_of(file, numbers, names, tensors, metadata, begin)
            file_plans.append(file_plan)
            begin += -(-file_plan.bytes // PAGE) * PAGE
        self.prepare(begin, any(tensors[number].is_cuda for _, numbers, _ in files for number in numbers))
        self.file_plans = tuple(file_plans)
        self._views = [
            self.tensor(file_plan, entry).view(tensors[number].dtype).view(tensors[number].shape)
            for file_plan in file_plans
            for number, entry in zip(file_plan.numbers, file_plan.entries, strict=True)
        ]

    def data(self, file_plan: FilePlan) -> memoryview:
        """A file's data, without its header."""
        return memory_of(self._memory[file_plan.begin : file_plan.begin + file_plan.bytes])

    def tensor(self, file_plan: FilePlan, entry: Entry) -> Tensor:
        """One tensor's bytes."""
        return self._memory[file_plan.begin + entry.begin : file_plan.begin + entry.end]


def sheet_of(
    file: str, numbers: Sequence[int], names: Sequence[str], tensors: Sequence[Tensor], metadata: Mapping[str, str], begin: int
) -> FilePlan:
    entries = lay_out([(names[n], dtype_name(tensors[n].dtype), tuple(tensors[n].shape)) for n in numbers])
    in_order = sorted(zip(entries, numbers, strict=True), key=lambda pair: pair[0].begin)
    placed = tuple(entry for entry, _ in in_order)
    return FilePlan(file, header(placed, metadata), placed, tuple(number for _, number in in_order), begin)


def memory_of(flat: Tensor) -> memoryview:
    """A flat uint8 tensor's memory. It must outlive the view."""
    if flat.numel() == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * flat.numel()).from_address(flat.data_ptr())).cast("B")
