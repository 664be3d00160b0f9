"""A Comm for several machines with several workers each: shared memory inside, gloo between.

A bucket is cut into S slices, S being the largest number of workers on a machine. On each machine
slice s is carried by local worker s mod n: it adds the slice over its machine's workers in shared
memory, reduces the sum with its counterparts on the other machines over gloo, and writes the
result back to its machine's workers:

    machine A (3 workers)    slices  0 1 2            group 0: A0 B0
    machine B (2 workers)    carried by B0 B1 B0      group 1: A1 B1      group 2: A2 B0

Between M machines each one sends 2(M-1)/M of the bucket, however many workers it has, and all of
them share the sending. Whatever is not a shared bucket goes over one gloo group of all workers.

A fold does the same along its tree: the carrier of a slice adds what its machine's rows allow, then
finishes the tree with its counterparts (comm/fold_wire.py). A machine whose lanes make up one
subtree is left with one row, and sends as much as in a reduction.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.base import Op, Pending
from lockstep.comm.fold import Block, add_blocks, check_fold, rows_of
from lockstep.comm.fold_gloo import Mesh, Spare, Wire, finish, pieces, through_host
from lockstep.comm.operation import InOrder, Steps
from lockstep.comm.shared_bucket import SharedBucket, combine, slice_of
from lockstep.comm.shm import Shm
from lockstep.comm.sockets import Connections
from lockstep.comm.torch_group import TorchGroup, build_gloo, connecting, destroy_gloo, options_for
from lockstep.errors import PeerError
from lockstep.plan.tree import Fold


@dataclass(frozen=True)
class _Carried:
    """One slice of a room's rows: what is added on this machine, what that leaves, and where the total goes."""

    blocks: list[Block]
    rows: list[Tensor]
    out: Tensor
    others: list[Tensor]


@dataclass(frozen=True)
class _Plan:
    """A fold seen from this worker: the tree that is left between machines, and the slices carried here."""

    fold: Fold
    carried: list[_Carried]


class TwoLevel:
    """All ranks must construct it. ``machines[r]`` names rank r's machine, the same list everywhere."""

    name = "twolevel"

    def __init__(
        self, store: dist.Store, rank: int, size: int, machines: list[str], *, timeout_s: float = 600.0, need_bytes: int = 0
    ) -> None:
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self._all = TorchGroup(dist.PrefixStore("all", store), rank, size, timeout_s=timeout_s)
        homes = {name: [r for r in range(size) if machines[r] == name] for name in dict.fromkeys(machines)}
        mine = homes[machines[rank]]
        self._store = store
        self._homes = list(homes.values())
        self._machine = self._homes.index(mine)
        self._place = mine.index(rank)
        self._local = Shm(
            dist.PrefixStore(f"machine/{self._machine}", store),
            self._place,
            len(mine),
            timeout_s=timeout_s,
            need_bytes=need_bytes,
            guard=self._all.guard,
        )
        self._all.beside = self._local.go_on  # whoever waits for one operation lets all go on
        self._slices = max(len(ranks) for ranks in homes.values())
        self._connections = Connections()
        self._groups: list[Any] = []
        self._returns: list[Any] = []  # the same groups again, for the results of folds
        self._carried: list[int] = []  # the slices this worker carries, each over the group at the same place
        for s in range(self._slices):
            members = [ranks[s % len(ranks)] for ranks in homes.values()]
            if rank in members:
                cross = dist.PrefixStore(f"slice/{s}", store)
                self._groups.append(build_gloo(cross, members.index(rank), len(members), self._connections))
                self._carried.append(s)
        self._all.guard.also_break(self._connections.cut)
        self._all.guard.also_break(self._local.flag_abort)
        self._going, self._returning = InOrder(), InOrder()
        self._spare = Spare()
        self._plans: weakref.WeakKeyDictionary[SharedBucket, dict[Fold, _Plan]] = weakref.WeakKeyDictionary()
        self.bytes_between = 0
        """Gradient bytes this worker has handed to gloo for other machines; times 2(M-1)/M is what it sent."""
        self._finalizer = weakref.finalize(self, _shut, self._all, self._local, self._connections, self._groups, self._returns)

    def averages(self, tensor: Tensor) -> bool:
        return self._local.averages(tensor)

    def buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._local.buffer(numel, dtype, device)

    def reduce(self, tensor: Tensor, op: Op, what: str) -> Pending:
        room = self._local.room_of(tensor)
        if room is None:
            return self._all.reduce(tensor, op, what)
        count = self._all.guard.enter(what)
        return self._local.start(self._reduce_room(room, op, self._going.take()), count, what)

    def _reduce_room(self, room: SharedBucket, op: Op, turn: int) -> Steps:
        epoch = room.deposit()
        while not room.deposited.reached(epoch):
            yield
        mine = room.buffers[self._place]
        inner: Op = "max" if op == "max" else "sum"
        parts = []
        for s in self._carried:
            low, high = slice_of(s, self._slices, mine.numel(), mine.element_size())
            for block in room.cut(low, high):
                _gather(block, self._place, inner)
            parts.append((low, high))
        yield from self._going.come(turn)  # counterparts must meet in the same order
        self._going.pass_on()
        works = [
            group.allreduce([mine[low:high]], options_for(inner))
            for group, (low, high) in zip(self._groups, parts, strict=True)
            if high > low
        ]
        self.bytes_between += sum(high - low for low, high in parts) * mine.element_size()
        while not all(work.is_completed() for work in works):
            yield
        for work in works:
            work.wait()
        for low, high in parts:
            if op == "mean":
                mine[low:high].mul_(1.0 / self.size)
            for block in room.cut(low, high):
                _spread(block, self._place)
        room.reduced.publish(self._place, epoch)
        while not room.reduced.reached(epoch):
            yield

    def fold(self, tensor: Tensor, fold: Fold, scale: float | None, what: str) -> Pending:
        count = self._all.guard.enter(what)
        check_fold(tensor, fold, self.size)
        if not self._all.can_fold:
            self._prepare_to_fold(what)
        room = self._local.room_of(tensor)
        if room is not None:
            steps = self._fold_room(room, fold, scale, self._going.take(), self._returning.take())
            return self._local.start(steps, count, what)
        return through_host(
            tensor,
            fold,
            self.rank,
            lambda host: self._local.start(self._all.fold_steps(host, fold, scale, count, what), count, what),
        )

    def _prepare_to_fold(self, what: str) -> None:
        """Connect the groups that results come back on, when all workers have come to their first fold."""
        self._all.barrier(what)
        self._all.prepare_to_fold()
        with connecting(self._all.guard):
            for s in self._carried if len(self._homes) > 1 else []:
                store = dist.PrefixStore(f"results/{s}", self._store)
                self._returns.append(build_gloo(store, self._machine, len(self._homes), self._connections))

    def _fold_room(self, room: SharedBucket, fold: Fold, scale: float | None, turn: int, back: int) -> Steps:
        epoch = room.deposit()
        while not room.deposited.reached(epoch):
            yield
        plan = self._plan(room, fold)
        for carried in plan.carried:
            for block in carried.blocks:
                block.run(None)
        parts = []
        for place, carried in enumerate(plan.carried):
            wires = Wire(self._groups, place), Wire(self._returns, place)
            mesh = Mesh(self._machine, len(self._homes), *wires, self._spare)
            parts += pieces(mesh, carried.rows, plan.fold, carried.out)
            self.bytes_between += (len(carried.rows) + 1) * carried.out.nbytes // 2
        yield from self._going.come(turn)
        for piece in parts:
            piece.scatter()
        self._going.pass_on()
        yield from finish(parts, scale, self._returning, back)
        for carried in plan.carried:
            for other in carried.others:
                other.copy_(carried.out)
        room.reduced.publish(self._place, epoch)
        while not room.reduced.reached(epoch):
            yield

    def _plan(self, room: SharedBucket, fold: Fold) -> _Plan:
        plans = self._plans.setdefault(room, {})
        if fold not in plans:
            here = self._homes[self._machine]
            rows = [rows_of(buffer, fold.width) for buffer in room.buffers]
            values = [rows[place][k] for place, rank in enumerate(here) for k in range(len(fold.held[rank]))]
            adds, ends = fold.among(here)
            carried = []
            for s in self._carried:
                low, high = slice_of(s, self._slices, rows[0].shape[1], rows[0].element_size())
                first_rows = [mine[0, low:high] for mine in rows]
                out = first_rows.pop(self._place)
                blocks = add_blocks(values, adds, low, high)
                carried.append(_Carried(blocks, [values[end][low:high] for end in ends], out, first_rows))
            plans[fold] = _Plan(fold.merged(self._homes), carried)
        return plans[fold]

    def broadcast(self, tensor: Tensor, source: int, what: str) -> Pending:
        return self._all.broadcast(tensor, source, what)

    def all_gather(self, output: Tensor, tensor: Tensor, what: str) -> Pending:
        return self._all.all_gather(output, tensor, what)

    def barrier(self, what: str = "a barrier") -> None:
        self._all.barrier(what)

    def progress(self) -> None:
        self._local.progress()

    def abort(self, reason: str) -> None:
        self._all.guard.fail(PeerError(reason))

    def close(self) -> None:
        self._finalizer()


def _gather(block: list[Tensor], place: int, op: Op) -> None:
    """My block becomes the sum of all local ones. In rank order, wherever mine stands."""
    total = block[0].clone()
    combine([total, *(b.clone() for b in block[1:])], op, None)
    block[place].copy_(total)


def _spread(block: list[Tensor], place: int) -> None:
    for other in range(len(block)):
        if other != place:
            block[other].copy_(block[place])


def _shut(everyone: TorchGroup, local: Shm, connections: Connections, groups: list[Any], returns: list[Any]) -> None:
    local.close()
    everyone.close()
    connections.cut()
    returns.clear()
    destroy_gloo(connections, groups)
