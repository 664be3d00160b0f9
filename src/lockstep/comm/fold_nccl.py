"""A fold on a CUDA stream over NCCL: an all-to-all of slices, the tree and an all-gather, all enqueued on the stream at once.

    rank 0  | a0 | a1 |  --.  all-to-all     one kernel       all-gather    .-->  | t0 | t1 |
    rank 1  | b0 | b1 |  --'  a0 b0 -> 0     t0 = a0 + b0     in place, of  '-->  | t0 | t1 |
                              a1 b1 -> 1     t1 = a1 + b1     one slice each

Two ranks with one value each need one message instead of two: they swap the values, and both add. That is as many bytes, and
a + b = b + a to the bit.

    rank 0  | a |  --.  swap    t = a + b
    rank 1  | b |  --'          t = b + a

Nothing here waits for the device. So every rank issues its collectives in the order of the calls, and one group suffices. The only
memory that a fold needs besides its tensor is one slice of every rank's values, together as much as this rank's own values. A
tensor whose rows cannot be cut into slices of one length is copied first; buckets can always be cut (``row_length``).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions

from lockstep.comm.fold import rows_of
from lockstep.comm.tree_sum import UNIT, TreeSum
from lockstep.plan.tree import Fold


def _on_current_stream(options: Any) -> Any:
    """Let the backend use the current stream, instead of a stream of its own and an event before and after each operation."""
    options.asyncOp = False
    return options


_TO_ALL, _GATHER = _on_current_stream(AllToAllOptions()), _on_current_stream(AllgatherOptions())


@dataclass(frozen=True)
class _Exchange:
    """One all-to-all: row number ``row`` of every rank that has one. Received is elements ``low`` to ``high`` of the memory."""

    row: int
    low: int
    high: int
    received: list[int]
    sent: list[int]
    """The elements from and to each rank. Empty lists: equally many."""
    sends: bool


@dataclass(frozen=True)
class _Steps:
    """What one rank does in a fold of rows of ``size * length`` elements."""

    exchanges: tuple[_Exchange, ...]
    sum: TreeSum
    low: int
    high: int


@cache
def _plan(fold: Fold, rank: int, size: int, length: int) -> _Steps:
    counts = [len(nodes) for nodes in fold.held]
    first = [sum(counts[:r]) for r in range(size)]  # the number of each rank's first value
    exchanges: list[_Exchange] = []
    place: dict[int, int] = {}  # the number of a value -> its place in memory
    for row in range(fold.width):
        owners = [r for r in range(size) if counts[r] > row]
        low = len(place)
        place.update({first[r] + row: low + at for at, r in enumerate(owners)})
        is_even = len(owners) == size
        received = [] if is_even else [length if r in owners else 0 for r in range(size)]
        sent = [] if is_even else [length if rank in owners else 0] * size
        exchanges.append(_Exchange(row, low * length, len(place) * length, received, sent, rank in owners))
    adds = tuple((place[to], place[other]) for to, other in fold.adds)
    return _Steps(tuple(exchanges), TreeSum(len(place), adds, place[fold.root]), rank * length, (rank + 1) * length)


def row_length(numel: int, size: int) -> int:
    """Returns how long a row of at least ``numel`` elements should be, so that ``size`` ranks fold it with the fewest copies."""
    return -(-numel // (size * UNIT)) * size * UNIT


def fold_on_stream(backend: Any, rank: int, size: int, tensor: Tensor, fold: Fold, scale: float | None) -> None:
    """Enqueue the fold of ``tensor`` on the current stream. Works of ``backend`` make that stream wait, not the host."""
    rows = rows_of(tensor, fold.width)
    numel = rows.shape[1]
    if numel == 0:
        return
    if size == 2 and all(len(nodes) == 1 for nodes in fold.held):
        _swap_and_add(backend, rows[0], rank, scale)
        return
    if numel % size == 0:
        _fold_even_rows(backend, rows, fold, rank, size, scale)
        return
    even = rows.new_zeros(fold.width, -(-numel // size) * size)
    even[:, :numel] = rows
    _fold_even_rows(backend, even, fold, rank, size, scale)
    rows[0].copy_(even[0, :numel])


def _swap_and_add(backend: Any, mine: Tensor, rank: int, scale: float | None) -> None:
    others = torch.empty_like(mine)
    counts = [0, mine.numel()] if rank == 0 else [mine.numel(), 0]  # elements to and from each rank
    _finish(backend.alltoall_base(others, mine, counts, counts, _TO_ALL))
    torch.add(mine, others, out=mine)
    if scale is not None:
        mine.mul_(scale)


def _fold_even_rows(backend: Any, rows: Tensor, fold: Fold, rank: int, size: int, scale: float | None) -> None:
    length = rows.shape[1] // size
    steps = _plan(fold, rank, size, length)
    values = rows.new_empty(steps.sum.count * length)
    for each in steps.exchanges:
        output = values[each.low : each.high]
        send = rows[each.row] if each.sends else values[:0]
        _finish(backend.alltoall_base(output, send, each.received, each.sent, _TO_ALL))
    result = rows[0]
    mine = result[steps.low : steps.high]  # of the row that was sent: the all-to-all has read it when the stream gets here
    steps.sum.run(values.view(-1, length), scale, mine)
    _finish(backend._allgather_base(result, mine, _GATHER))


def _finish(work: Any) -> None:
    """Wait for a work, on the stream. A backend that used the current stream returns None."""
    if work is not None:
        work.wait()
