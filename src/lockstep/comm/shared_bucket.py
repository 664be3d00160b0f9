"""A shared bucket: every rank's buffer in one segment, and the arithmetic on it. See shm.py for the protocol."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.comm.base import Op
from lockstep.comm.counters import LINE_BYTES, PlainCounters
from lockstep.comm.fold import BLOCK_BYTES, Block, fold_blocks, rows_of, values_of
from lockstep.comm.segment import Segment
from lockstep.plan.tree import Fold

PAGE_BYTES = 4096


class SharedBucket:
    """One shared bucket: every rank's buffer, seen from this one."""

    def __init__(
        self, segment: Segment, rank: int, size: int, numel: int, dtype: torch.dtype, counters: type[PlainCounters]
    ) -> None:
        head = counters.nbytes(size)
        first = rank == 0
        self.deposited = counters(segment.memory, 0, size, first)
        self.reduced = counters(segment.memory, head, size, first)
        self.epoch = 0
        self.rank, self.dtype = rank, dtype
        start, stride = self.layout(size, numel, dtype, counters)
        self.buffers = [torch.frombuffer(segment.memory, dtype=dtype, count=numel, offset=start + r * stride) for r in range(size)]
        self.blocks = self.cut(*slice_of(rank, size, numel, dtype.itemsize))
        self._folds: dict[Fold, list[Block]] = {}

    def cut(self, low: int, high: int) -> list[list[Tensor]]:
        """Elements low to high of all buffers, in blocks that fit the cache: for each block every rank's view."""
        step = max(1, BLOCK_BYTES // self.dtype.itemsize)
        return [[b[at : min(at + step, high)] for b in self.buffers] for at in range(low, high, step)]

    def fold_blocks(self, fold: Fold) -> list[Block]:
        """My slice of every rank's rows; the totals go to all ranks' first rows. Made once for each fold."""
        found = self._folds.get(fold)
        if found is None:
            rows = [rows_of(buffer, fold.width) for buffer in self.buffers]
            low, high = slice_of(self.rank, len(rows), rows[0].shape[1], rows[0].element_size())
            found = self._folds[fold] = fold_blocks(values_of(rows, fold), fold, [mine[0] for mine in rows], low, high)
        return found

    def deposit(self) -> int:
        """My buffer is filled: others may read it, and write my result into it. Returns this use's number."""
        self.epoch += 1
        self.deposited.publish(self.rank, self.epoch)
        return self.epoch

    @staticmethod
    def layout(size: int, numel: int, dtype: torch.dtype, counters: type[PlainCounters]) -> tuple[int, int]:
        """(offset of rank 0's buffer, distance between buffers), in bytes."""
        return round_up(2 * counters.nbytes(size), PAGE_BYTES), round_up(max(1, numel * dtype.itemsize), PAGE_BYTES)

    @staticmethod
    def nbytes(size: int, numel: int, dtype: torch.dtype, counters: type[PlainCounters]) -> int:
        start, stride = SharedBucket.layout(size, numel, dtype, counters)
        return start + size * stride


def combine(block: list[Tensor], op: Op, scale: float | None) -> None:
    """The same block of every rank's buffer becomes the sum (mean, maximum) of all."""
    if len(block) == 1:
        return
    first = block[0]
    if first.dtype in (torch.float16, torch.bfloat16) and op != "max":
        total = first.float()
        for other in block[1:]:
            total += other
        if scale is not None:
            total *= scale
        first.copy_(total)
    else:
        for other in block[1:]:
            torch.maximum(first, other, out=first) if op == "max" else first.add_(other)
        if scale is not None:
            first.mul_(scale)
    for other in block[1:]:
        other.copy_(first)


def sum_into(target: Tensor, parts: list[Tensor], op: Op, scale: float | None) -> None:
    """``target`` becomes the sum of ``parts``, which stay as they are."""
    wide = op != "max" and target.dtype in (torch.float16, torch.bfloat16)
    total = parts[0].float() if wide else parts[0].clone()
    for part in parts[1:]:
        total = torch.maximum(total, part) if op == "max" else total.add_(part)
    if scale is not None:
        total.mul_(scale)
    target.copy_(total)


def slice_of(rank: int, size: int, numel: int, itemsize: int) -> tuple[int, int]:
    """Rank's part of a bucket: equal parts, cut at cache lines, so that no line has two owners."""
    line = max(1, LINE_BYTES // itemsize)
    lines = -(-numel // line)
    return min(numel, lines * rank // size * line), min(numel, lines * (rank + 1) // size * line)


def round_up(value: int, to: int) -> int:
    return -(-value // to) * to
