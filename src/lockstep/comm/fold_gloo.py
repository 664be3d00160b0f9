"""A fold among the members of gloo groups: an all-to-all of slices, the tree, an all-gather of results.

    member 0  [a0|a1|a2]  --.  scatter           add               share  .-->  [t0|t1|t2]
    member 1  [b0|b1|b2]  --|  a0 b0 c0 -> 0     t0 = a0+b0+c0        0  -|-->  [t0|t1|t2]
    member 2  [c0|c1|c2]  --'  a1 b1 c1 -> 1     t1 = a1+b1+c1        1  -'-->  [t0|t1|t2]

Each member sends (N-1)/N of its rows and (N-1)/N of the result: what a ring all-reduce sends where
everybody holds one row. LaneBucket are cut into pieces first, so that some are added while others travel.

Note: two wires
---------------
A group matches operations by the order they are issued in. ``scatter`` can be issued at once, in
the order of the calls; ``share`` only after the tree, whenever a worker comes to it: before the
next call's ``scatter`` on one, after it on another. So they go over groups of their own, and the
shares take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lockstep.comm.base import Pending, bits
from lockstep.comm.fold import fold_here
from lockstep.comm.operation import InOrder, Steps, until
from lockstep.comm.shared_bucket import slice_of
from lockstep.plan.tree import Fold

PIECE_BYTES = 2 << 20  # of one member's slice
COPIED_BYTES = 1 << 20  # of a piece whose results are sent by one operation, from a copy for each member
KEPT_BYTES = 128 << 20


@dataclass(frozen=True)
class Wire:
    """A gloo group by its place in its owner's list: whoever holds a wire does not keep the group alive."""

    groups: list[Any]
    place: int

    def swap(self, output: Tensor, received: Sequence[int], send: Tensor, sent: Sequence[int]) -> Any:
        """Element counts by member: ``sent`` go out of ``send`` in this order, ``received`` come into ``output``."""
        if not self.groups:
            raise RuntimeError("the comm was closed")
        item = send.element_size()
        counts = [[item * count for count in side] for side in (received, sent)]
        return self.groups[self.place].alltoall_base(bits(output), bits(send), *counts)


class Spare:
    """Memory between two uses: that of fresh pages costs more than the copy that fills them."""

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = {}
        self._kept_bytes = 0

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        free = self._free.get(numel * dtype.itemsize)
        if not free:
            return torch.empty(numel, dtype=dtype)
        self._kept_bytes -= numel * dtype.itemsize
        return free.pop().view(dtype)

    def give(self, tensor: Tensor) -> None:
        if self._kept_bytes + tensor.nbytes > KEPT_BYTES:  # of sizes that nobody asks for any more, most likely
            self._free, self._kept_bytes = {}, 0
        self._free.setdefault(tensor.nbytes, []).append(tensor)
        self._kept_bytes += tensor.nbytes


@dataclass(frozen=True)
class Mesh:
    """Who folds with whom: this member's number among ``size``, and the wires for values and for results."""

    rank: int
    size: int
    going: Wire
    returning: Wire
    spare: Spare = field(default_factory=Spare)


class Piece:
    """Some columns of every row on their way: ``scatter``, ``add``, ``share``, each when the ``works`` before are over.

    ``rows`` are this member's values; ``out`` is where the total goes, and may be the first of them. A lone member has
    no works to wait for.
    """

    def __init__(self, mesh: Mesh, rows: Sequence[Tensor], fold: Fold, out: Tensor) -> None:
        rank, size = mesh.rank, mesh.size
        self._mesh, self._rank, self._size, self._rows, self._fold, self._out = mesh, rank, size, rows, fold, out
        self._cuts = [slice_of(s, size, out.numel(), out.element_size()) for s in range(size)]
        low, high = self._cuts[rank]
        self._own, self._length = slice(low, high), high - low
        # My own slice need not travel. At an end of the row it is left out; from the middle it comes along, to myself.
        self._stays = rank in (0, size - 1)
        self._others = slice(high if rank == 0 else 0, low if 0 < rank == size - 1 else out.numel())
        few = size > 2 and out.nbytes <= COPIED_BYTES
        self._copies = size - self._stays if few else 0
        self._received: list[int] = []
        self._used: list[Tensor] = []
        self.works: list[Any] = []

    def scatter(self) -> None:
        """Everybody's slice of my rows leaves; my slice of everybody's rows comes in."""
        if self._size == 1:
            return
        count, dtype = len(self._rows), self._out.dtype
        sent = [count * (high - low) for low, high in self._cuts]
        received = [len(held) * self._length for held in self._fold.held]
        if count != 1 or self._stays:
            sent[self._rank] = received[self._rank] = 0
        came = self._mesh.spare.take(sum(received), dtype)
        self._received, self._used = received, [came]
        if count == 1:
            send = self._rows[0][self._others]
        else:
            send = self._mesh.spare.take(sum(sent), dtype)
            away = [row[low:high] for s, (low, high) in enumerate(self._cuts) if s != self._rank for row in self._rows]
            if away:
                torch.cat(away, out=send)
            self._used.append(send)
        self.works = [self._mesh.going.swap(came, received, send, sent)]

    def add(self, scale: float | None) -> None:
        """My slice of the total, into ``out`` and wherever it leaves from."""
        mine = [row[self._own] for row in self._rows]
        values = mine if self._size == 1 else []
        for member, part in enumerate(self._used[0].split(self._received) if self._size > 1 else ()):
            values += mine if member == self._rank else part.view(len(self._fold.held[member]), self._length).unbind()
        outs = [self._out[self._own]]
        if self._copies:
            self._leaves = torch.empty(self._copies * self._length, dtype=self._out.dtype)
            outs += self._leaves.view(self._copies, self._length).unbind()
        fold_here(values, self._fold, scale, outs)
        for memory in self._used:
            self._mesh.spare.give(memory)

    def share(self) -> None:
        """My slice of the total goes to everybody, the others' slices come into ``out``. (gloo's all-gather copies twice.)"""
        lengths = [high - low for low, high in self._cuts]
        if self._copies:
            sent = [self._length] * self._size
            if self._stays:
                sent[self._rank] = lengths[self._rank] = 0
            self.works = [self._mesh.returning.swap(self._out[self._others], lengths, self._leaves, sent)]
            return
        self.works = []
        for distance in range(1, self._size):  # no copies, an operation for each member
            to, source = (self._rank + distance) % self._size, (self._rank - distance) % self._size
            sent = [self._length if member == to else 0 for member in range(self._size)]
            received = [length if member == source else 0 for member, length in enumerate(lengths)]
            came = self._out[slice(*self._cuts[source])]
            self.works.append(self._mesh.returning.swap(came, received, self._out[self._own], sent))


def pieces(mesh: Mesh, rows: Sequence[Tensor], fold: Fold, out: Tensor) -> list[Piece]:
    """``rows`` and ``out`` in stretches of columns. None where there are no columns."""
    numel, item = out.numel(), out.element_size()
    count = -(-out.nbytes // (mesh.size * PIECE_BYTES)) if mesh.size > 1 else 1
    cuts = [slice_of(p, count, numel, item) for p in range(count)] if numel else []
    return [Piece(mesh, [row[low:high] for row in rows], fold, out[low:high]) for low, high in cuts]


def finish(parts: Sequence[Piece], scale: float | None, turns: InOrder, turn: int) -> Steps:
    """What is left of a fold whose pieces have been scattered. ``turn`` was taken when it was issued."""
    for piece in parts:
        yield from until(piece.works)
        piece.add(scale)
        yield from turns.come(turn)
        piece.share()
    yield from turns.come(turn)
    turns.pass_on()
    yield from until([work for piece in parts for work in piece.works], last=True)


def through_host(tensor: Tensor, fold: Fold, rank: int, start: Callable[[Tensor], Pending]) -> Pending:
    """``start`` the fold of a tensor in host memory, which a CUDA tensor is copied to and back from."""
    if not tensor.is_cuda:
        return start(tensor)
    row, held = tensor.numel() // fold.width, len(fold.held[rank])
    host = torch.empty_like(tensor, device="cpu")
    host[: held * row].copy_(tensor[: held * row])
    return _FromHost(start(host), host[:row], tensor[:row])


class _FromHost:
    def __init__(self, pending: Pending, result: Tensor, target: Tensor) -> None:
        self._pending, self._result, self._target = pending, result, target

    def wait(self, timeout_s: float | None = None) -> None:
        self._pending.wait(timeout_s)
        self._target.copy_(self._result)  # on the stream of the one who waits

    def done(self) -> bool:
        return self._pending.done()
