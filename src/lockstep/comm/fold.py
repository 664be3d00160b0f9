"""The arithmetic of a fold on one worker: the additions of plan/tree.py on memory, in blocks that fit the cache.

Every node is one plain elementwise addition in the tensor's own dtype (complex numbers as pairs of
reals), rounded there, so its bits do not depend on who computes it or how the memory is cut. Knows
nothing of how values got here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.comm.base import real
from lockstep.errors import InvariantError
from lockstep.plan.tree import Fold

BLOCK_BYTES = 1 << 18  # two blocks fit a small second-level cache


def check_fold(tensor: Tensor, fold: Fold, size: int) -> None:
    if len(fold.held) != size:
        raise InvariantError(f"a fold of {len(fold.held)} holders was given to {size} workers")
    if tensor.numel() % fold.width:
        raise InvariantError(f"{tensor.numel()} elements are not {fold.width} rows")


def rows_of(tensor: Tensor, width: int) -> Tensor:
    """The same memory as ``width`` rows of real numbers."""
    flat = real(tensor).reshape(-1)
    return flat.view(width, flat.numel() // width)


def values_of(rows: Sequence[Tensor], fold: Fold) -> list[Tensor]:
    """The values of ``fold``, numbered as it does, from every holder's rows."""
    return [mine[k] for mine, held in zip(rows, fold.held, strict=True) for k in range(len(held))]


class Block:
    """The same stretch of every value: views made once, added up as often as their memory is filled again."""

    __slots__ = ("_adds", "_copies", "_total")

    def __init__(self, adds: list[tuple[Tensor, Tensor, Tensor]], total: Tensor | None, copies: list[Tensor]) -> None:
        self._adds, self._total, self._copies = adds, total, copies

    def run(self, scale: float | None) -> None:
        for left, right, into in self._adds:
            torch.add(left, right, out=into)
        if self._total is not None:
            if scale is not None:
                self._total.mul_(scale)
            for copy in self._copies:
                copy.copy_(self._total)


def fold_blocks(values: Sequence[Tensor], fold: Fold, outs: Sequence[Tensor], low: int, high: int) -> list[Block]:
    """Elements low to high: the total of ``values`` (used up) goes to the same elements of all ``outs``, one at least.

    The last addition is written straight to the first of them, which may be one of the values.
    """
    blocks = []
    for at, end in _cuts(values, low, high):
        views = [value[at:end] for value in values]
        targets = [out[at:end] for out in outs]
        total = targets[0] if fold.adds else views[fold.root]
        adds = [(views[to], views[other], views[to]) for to, other in fold.adds]
        adds[-1:] = [(left, right, total) for left, right, _ in adds[-1:]]
        blocks.append(Block(adds, total, [target for target in targets if target.data_ptr() != total.data_ptr()]))
    return blocks


def add_blocks(values: Sequence[Tensor], adds: Sequence[tuple[int, int]], low: int, high: int) -> list[Block]:
    """Elements low to high: only ``adds`` (to, from), in place."""
    return [
        Block([(values[to][at:end], values[other][at:end], values[to][at:end]) for to, other in adds], None, [])
        for at, end in _cuts(values, low, high)
    ]


def fold_here(values: Sequence[Tensor], fold: Fold, scale: float | None, outs: Sequence[Tensor]) -> None:
    """The total of ``values`` (used up), scaled, to all ``outs``."""
    for block in fold_blocks(values, fold, outs, 0, outs[0].numel()):
        block.run(scale)


def _cuts(values: Sequence[Tensor], low: int, high: int) -> list[tuple[int, int]]:
    if not values:
        return []
    like = values[0]
    step = max(1, high - low) if like.is_cuda else max(1, BLOCK_BYTES // like.element_size())
    return [(at, min(at + step, high)) for at in range(low, high, step)]
