"""The arithmetic of a fold on one worker: the additions of plan/tree.py on memory, in blocks that fit the cache.

Every node is one plain elementwise addition in the tensor's own dtype (complex numbers as pairs of reals), rounded there, so its
bits depend neither on the worker that computes it nor on how the memory is cut. A reduction is a fold with one value per worker; it
promises less, and so adds fp16 and bf16 in fp32. Knows nothing of how the values came to this worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from lockstep.comm.base import real
from lockstep.errors import InvariantError
from lockstep.plan.tree import Fold

BLOCK_BYTES = 1 << 18  # two blocks fit a small second-level cache


def check_fold(tensor: Tensor, fold: Fold, size: int) -> None:
    if len(fold.held) != size:
        raise InvariantError(f"a fold for {len(fold.held)} workers was given to {size} workers")
    if tensor.numel() % fold.width:
        raise InvariantError(f"{tensor.numel()} elements are not {fold.width} rows")


@cache
def reduction(size: int) -> Fold:
    """The fold of a reduction: every worker has one value."""
    return Fold(size, tuple(((rank, rank + 1),) for rank in range(size)))


def rows_of(tensor: Tensor, width: int) -> Tensor:
    """View a tensor as ``width`` rows of real numbers."""
    flat = real(tensor).reshape(-1)
    return flat.view(width, flat.numel() // width)


def values_of(rows: Sequence[Tensor], fold: Fold) -> list[Tensor]:
    """The values of ``fold``, in the order in which it numbers them, from every rank's rows."""
    return [own[k] for own, nodes in zip(rows, fold.held, strict=True) for k in range(len(nodes))]


class Block:
    """The same range of elements of every value. Its views are made once; ``run`` adds whatever their memory then contains."""

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


class Fp32Block(Block):
    """Adds the fp16 or bf16 values of a reduction in fp32, from left to right, and rounds once."""

    __slots__ = ("_outs", "_values")

    def __init__(self, values: list[Tensor], outs: list[Tensor]) -> None:
        self._values, self._outs = values, outs

    def run(self, scale: float | None) -> None:
        total = self._values[0].float()
        for value in self._values[1:]:
            total += value
        if scale is not None:
            total *= scale
        first, *others = self._outs
        first.copy_(total)
        for out in others:
            out.copy_(first)


def fold_blocks(values: Sequence[Tensor], fold: Fold | None, outs: Sequence[Tensor], low: int, high: int) -> list[Block]:
    """Elements low to high: write the total of ``values``, which are overwritten, to the same elements of all ``outs``.

    The last addition writes straight to ``outs[0]``, which may be one of the values. ``fold=None`` is a reduction.
    """
    blocks: list[Block] = []
    for start, end in _cuts(values, low, high):
        views = [value[start:end] for value in values]
        targets = [out[start:end] for out in outs]
        blocks.append(_reduction_block(views, targets) if fold is None else _fold_block(views, fold, targets))
    return blocks


def _reduction_block(views: list[Tensor], targets: list[Tensor]) -> Block:
    if len(views) > 1 and views[0].dtype in (torch.float16, torch.bfloat16):
        return Fp32Block(views, targets)
    return _fold_block(views, reduction(len(views)), targets)


def _fold_block(views: list[Tensor], fold: Fold, targets: list[Tensor]) -> Block:
    total = targets[0] if fold.adds else views[fold.root]
    adds = [(views[to], views[other], views[to]) for to, other in fold.adds]
    adds[-1:] = [(left, right, total) for left, right, _ in adds[-1:]]
    return Block(adds, total, [target for target in targets if target.data_ptr() != total.data_ptr()])


def add_blocks(values: Sequence[Tensor], adds: Sequence[tuple[int, int]], low: int, high: int) -> list[Block]:
    """Elements low to high: perform ``adds``, pairs (to, from), in place."""
    return [
        Block([(values[to][start:end], values[other][start:end], values[to][start:end]) for to, other in adds], None, [])
        for start, end in _cuts(values, low, high)
    ]


def fold_values(values: Sequence[Tensor], fold: Fold | None, scale: float | None, outs: Sequence[Tensor]) -> None:
    """Write the scaled total of ``values``, which are overwritten, to all ``outs``. ``fold=None`` is a reduction."""
    for block in fold_blocks(values, fold, outs, 0, outs[0].numel()):
        block.run(scale)


def _cuts(values: Sequence[Tensor], low: int, high: int) -> list[tuple[int, int]]:
    if not values:
        return []
    like = values[0]
    block = max(1, high - low) if like.is_cuda else max(1, BLOCK_BYTES // like.element_size())
    return [(start, min(start + block, high)) for start in range(low, high, block)]
