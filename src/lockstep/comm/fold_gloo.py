"""A fold among the members of gloo groups: an all-to-all of slices, the tree, an all-gather of results.

    member 0  [a0|a1|a2]  --.  scatter           add               share  .-->  [t0|t1|t2]
    member 1  [b0|b1|b2]  --|  a0 b0 c0 -> 0     t0 = a0+b0+c0        0  -|-->  [t0|t1|t2]
    member 2  [c0|c1|c2]  --'  a1 b1 c1 -> 1     t1 = a1+b1+c1        1  -'-->  [t0|t1|t2]

Each member sends (N-1)/N of its rows and (N-1)/N of the result: as much as a ring all-reduce if every member has one row. Long
rows are first cut into pieces, so that some pieces are added while others travel.

Note: two groups
----------------
A group matches operations by the order in which they are issued. ``scatter`` is issued at once, in the order of the calls.
``share`` is issued only after the additions, and workers get there at different times: one worker before the ``scatter`` of the
next call, another worker after it. So values and results have groups of their own, and shares are issued in the order of the calls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.comm.base import Pending, bits
from lockstep.comm.fold import fold_values
from lockstep.comm.operation import InOrder, OpGenerator, wait_for_works
from lockstep.comm.shared_bucket import slice_of
from lockstep.plan.tree import Fold

PIECE_BYTES = 2 << 20  # of one member's slice
COPIED_BYTES = 1 << 20  # up to this size a piece's result is copied for each member and sent by one operation
KEPT_BYTES = 128 << 20


@dataclass(frozen=True)
class GroupRef:
    """A gloo group by its index in its owner's list, so that an operation in flight does not keep a closed group alive."""

    groups: list[Any]
    index: int

    def all_to_all(self, output: Tensor, received: Sequence[int], send: Tensor, sent: Sequence[int]) -> Any:
        """Send ``sent[m]`` elements of ``send`` to each member m, in order; receive ``received[m]`` elements into ``output``."""
        if not self.groups:
            raise RuntimeError("the comm was closed")
        item = send.element_size()
        counts = [[item * count for count in side] for side in (received, sent)]
        return self.groups[self.index].alltoall_base(bits(output), bits(send), *counts)


class ScratchPool:
    """Keeps scratch memory between uses: the page faults of fresh memory cost more than the copy that fills it.

    Any thread may use it: one thread may issue a fold while another one advances an earlier fold.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: dict[int, list[Tensor]] = {}
        self._kept_bytes = 0

    def acquire(self, numel: int, dtype: torch.dtype) -> Tensor:
        with self._lock:
            free = self._free.get(numel * dtype.itemsize)
            if free:
                self._kept_bytes -= numel * dtype.itemsize
                return free.pop().view(dtype)
        return torch.empty(numel, dtype=dtype)

    def release(self, tensor: Tensor) -> None:
        with self._lock:
            if self._kept_bytes + tensor.nbytes > KEPT_BYTES:  # most likely memory of sizes that are no longer used
                self._free, self._kept_bytes = {}, 0
            self._free.setdefault(tensor.nbytes, []).append(tensor)
            self._kept_bytes += tensor.nbytes


@dataclass(frozen=True)
class FoldGroup:
    """The members of a fold: this member's rank among ``size``, the groups for values and for results, and scratch memory."""

    rank: int
    size: int
    values: GroupRef
    results: GroupRef
    scratch: ScratchPool


class FoldPiece:
    """Some columns of every row: ``scatter``, ``add``, ``share``, each when the ``works`` of the stage before are complete.

    ``rows`` are this member's values; ``out`` receives the total, and may be the first of the rows. A lone member has no works.
    """

    def __init__(self, group: FoldGroup, rows: Sequence[Tensor], fold: Fold, out: Tensor) -> None:
        rank, size = group.rank, group.size
        self._group, self._rank, self._size, self._rows, self._fold, self._out = group, rank, size, rows, fold, out
        self._cuts = [slice_of(s, size, out.numel(), out.element_size()) for s in range(size)]
        low, high = self._cuts[rank]
        self._own, self._length = slice(low, high), high - low
        # My own slice need not travel. The first and last member leave it out; the others send it to themselves, in one range.
        self._own_stays = rank in (0, size - 1)
        self._others = slice(high if rank == 0 else 0, low if 0 < rank == size - 1 else out.numel())
        is_small = size > 2 and out.nbytes <= COPIED_BYTES
        self._copies = size - self._own_stays if is_small else 0
        self._received: list[int] = []
        self._scratch: list[Tensor] = []
        self.works: list[Any] = []

    def scatter(self) -> None:
        """Send every other member its slice of my rows; receive my slice of their rows."""
        if self._size == 1:
            return
        count, dtype = len(self._rows), self._out.dtype
        sent = [count * (high - low) for low, high in self._cuts]
        received = [len(nodes) * self._length for nodes in self._fold.held]
        if count != 1 or self._own_stays:
            sent[self._rank] = received[self._rank] = 0
        output = self._group.scratch.acquire(sum(received), dtype)
        self._received, self._scratch = received, [output]
        if count == 1:
            send = self._rows[0][self._others]
        else:
            send = self._group.scratch.acquire(sum(sent), dtype)
            slices = [row[low:high] for s, (low, high) in enumerate(self._cuts) if s != self._rank for row in self._rows]
            if slices:
                torch.cat(slices, out=send)
            self._scratch.append(send)
        self.works = [self._group.values.all_to_all(output, received, send, sent)]

    def add(self, scale: float | None) -> None:
        """Write my slice of the total to ``out``, and to the copies that ``share`` sends."""
        mine = [row[self._own] for row in self._rows]
        values = mine if self._size == 1 else []
        for member, part in enumerate(self._scratch[0].split(self._received) if self._size > 1 else ()):
            values += mine if member == self._rank else part.view(len(self._fold.held[member]), self._length).unbind()
        outs = [self._out[self._own]]
        if self._copies:
            self._copied = torch.empty(self._copies * self._length, dtype=self._out.dtype)
            outs += self._copied.view(self._copies, self._length).unbind()
        fold_values(values, self._fold, scale, outs)
        for memory in self._scratch:
            self._group.scratch.release(memory)

    def share(self) -> None:
        """Send my slice of the total to every member, receive theirs into ``out``. (gloo's all-gather would copy twice.)"""
        lengths = [high - low for low, high in self._cuts]
        if self._copies:
            sent = [self._length] * self._size
            if self._own_stays:
                sent[self._rank] = lengths[self._rank] = 0
            self.works = [self._group.results.all_to_all(self._out[self._others], lengths, self._copied, sent)]
            return
        self.works = []
        for distance in range(1, self._size):  # no copies, but one operation for each member
            to, source = (self._rank + distance) % self._size, (self._rank - distance) % self._size
            sent = [self._length if member == to else 0 for member in range(self._size)]
            received = [length if member == source else 0 for member, length in enumerate(lengths)]
            output = self._out[slice(*self._cuts[source])]
            self.works.append(self._group.results.all_to_all(output, received, self._out[self._own], sent))


def cut_into_pieces(group: FoldGroup, rows: Sequence[Tensor], fold: Fold, out: Tensor) -> list[FoldPiece]:
    """Cut ``rows`` and ``out`` into ranges of columns. Returns an empty list if there are no columns."""
    numel, item = out.numel(), out.element_size()
    count = -(-out.nbytes // (group.size * PIECE_BYTES)) if group.size > 1 else 1
    cuts = [slice_of(p, count, numel, item) for p in range(count)] if numel else []
    return [FoldPiece(group, [row[low:high] for row in rows], fold, out[low:high]) for low, high in cuts]


def finish_fold(pieces: Sequence[FoldPiece], scale: float | None, shares: InOrder, ticket: int) -> OpGenerator:
    """The rest of a fold whose pieces have been scattered. ``ticket`` was taken from ``shares`` when the fold was issued."""
    for piece in pieces:
        yield from wait_for_works(piece.works)
        piece.add(scale)
        yield from shares.wait_for(ticket)
        piece.share()
    yield from shares.wait_for(ticket)
    shares.next_ticket()
    yield from wait_for_works([work for piece in pieces for work in piece.works], final=True)


def fold_through_host(tensor: Tensor, fold: Fold, rank: int, start: Callable[[Tensor], Pending]) -> Pending:
    """Call ``start`` with the tensor if it is in host memory, else with a copy in host memory; ``wait`` copies the total back."""
    if not tensor.is_cuda:
        return start(tensor)
    row, count = tensor.numel() // fold.width, len(fold.held[rank])
    host = torch.empty_like(tensor, device="cpu")
    host[: count * row].copy_(tensor[: count * row])
    return _CopyBack(start(host), host[:row], tensor[:row])


class _CopyBack:
    def __init__(self, pending: Pending, result: Tensor, target: Tensor) -> None:
        self._pending, self._result, self._target = pending, result, target

    def wait(self, timeout_s: float | None = None) -> None:
        self._pending.wait(timeout_s)
        self._target.copy_(self._result)  # on the current stream of the thread that waits

    def done(self) -> bool:
        return self._pending.done()
