"""A bucket in shared memory: the buffers of all ranks of a machine in one segment, as this rank sees them. Protocol: shm.py."""

from __future__ import annotations

import torch

from lockstep.comm.counters import LINE_BYTES, PlainCounters
from lockstep.comm.fold import Block, fold_blocks, reduction, rows_of, values_of
from lockstep.comm.segment import Segment
from lockstep.errors import InvariantError
from lockstep.plan.tree import Fold

PAGE_BYTES = 4096


class SharedBucket:
    """Every rank's buffer, and counters of how often each rank has filled its buffer and has reduced its slice."""

    def __init__(
        self, segment: Segment, rank: int, size: int, numel: int, dtype: torch.dtype, counters: type[PlainCounters]
    ) -> None:
        is_first = rank == 0
        self._deposited = counters(segment.memory, 0, size, is_first)
        self._reduced = counters(segment.memory, counters.nbytes(size), size, is_first)
        self._rank, self._uses, self._in_use = rank, 0, False
        start, stride = self.layout(size, numel, dtype, counters)
        self.buffers = [torch.frombuffer(segment.memory, dtype=dtype, count=numel, offset=start + r * stride) for r in range(size)]
        self._blocks: dict[Fold | None, list[Block]] = {}

    def blocks(self, fold: Fold | None) -> list[Block]:
        """The blocks that write this rank's slice of the total to row 0 of every rank; made once. ``fold=None`` is a reduction."""
        found = self._blocks.get(fold)
        if found is None:
            rows = [rows_of(buffer, 1 if fold is None else fold.width) for buffer in self.buffers]
            low, high = slice_of(self._rank, len(rows), rows[0].shape[1], rows[0].element_size())
            values = values_of(rows, fold or reduction(len(rows)))
            found = self._blocks[fold] = fold_blocks(values, fold, [own[0] for own in rows], low, high)
        return found

    def deposit(self) -> None:
        """Publish that this rank's buffer is filled; other ranks may then read and write it."""
        if self._in_use:
            raise InvariantError("a shared bucket was given to a second operation while the first one is in flight")
        self._in_use = True
        self._uses += 1
        self._deposited.publish(self._rank, self._uses)

    def is_deposited(self) -> bool:
        """Whether every rank's buffer is filled."""
        return self._deposited.reached(self._uses)

    def publish_reduced(self) -> None:
        """Publish that this rank has written its slices of the total to every rank."""
        self._reduced.publish(self._rank, self._uses)

    def is_reduced(self) -> bool:
        """Whether every rank has written its slices; this rank's buffer may then be filled again."""
        self._in_use = not self._reduced.reached(self._uses)
        return not self._in_use

    @staticmethod
    def layout(size: int, numel: int, dtype: torch.dtype, counters: type[PlainCounters]) -> tuple[int, int]:
        """(offset of rank 0's buffer, distance between buffers), in bytes."""
        return round_up(2 * counters.nbytes(size), PAGE_BYTES), round_up(max(1, numel * dtype.itemsize), PAGE_BYTES)

    @staticmethod
    def nbytes(size: int, numel: int, dtype: torch.dtype, counters: type[PlainCounters]) -> int:
        start, stride = SharedBucket.layout(size, numel, dtype, counters)
        return start + size * stride


def slice_of(rank: int, size: int, numel: int, itemsize: int) -> tuple[int, int]:
    """(first, last) element of rank's slice of a bucket: equal slices, cut at cache lines, so that no line has two owners."""
    line = max(1, LINE_BYTES // itemsize)
    lines = -(-numel // line)
    return min(numel, lines * rank // size * line), min(numel, lines * (rank + 1) // size * line)


def round_up(value: int, to: int) -> int:
    return -(-value // to) * to
