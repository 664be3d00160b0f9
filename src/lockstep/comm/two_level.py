"""A Comm for several machines with several workers each: shared memory within a machine, gloo between machines.

A bucket is cut into S slices, S being the largest number of workers on a machine. On each machine local worker s mod n carries
slice s: it adds the slice over its machine's workers in shared memory, reduces the sum with the carriers of slice s on the other
machines over gloo, and writes the total to its machine's workers:

    machine A (3 workers)    slices  0 1 2            group 0: A0 B0
    machine B (2 workers)    carried by B0 B1 B0      group 1: A1 B1      group 2: A2 B0

Each of M machines sends 2(M-1)/M of the bucket, however many workers it has, and all its workers share the sending. Tensors that
are not in a shared bucket travel over one gloo group of all workers.

A fold follows its tree: the carrier performs the additions between rows of its own machine, then finishes the tree with the other
carriers (comm/fold_gloo.py). If the lanes of a machine are one subtree, one row is left, and the machine sends as much as in a
reduction. A reduction is not a fold here: gloo's own all-reduce needs no thread of ours, and is faster for small buckets.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.base import Op, Pending
from lockstep.comm.connections import Connections
from lockstep.comm.fold import Block, add_blocks, check_fold, fold_blocks, rows_of
from lockstep.comm.fold_gloo import FoldGroup, GroupRef, ScratchPool, cut_into_pieces, finish_fold
from lockstep.comm.gloo_devices import build_gloo, destroy_gloo
from lockstep.comm.operation import InOrder, OpGenerator, wait_for_works
from lockstep.comm.peer_health import PeerHealth
from lockstep.comm.shared_bucket import SharedBucket, slice_of
from lockstep.comm.shm import Shm
from lockstep.comm.torch_group import TorchGroup
from lockstep.plan.tree import Fold


@dataclass(frozen=True)
class _CarriedSlice:
    """A slice that this worker carries: the additions on this machine, the rows they leave, and where the total goes."""

    blocks: list[Block]
    rows: list[Tensor]
    out: Tensor
    others: list[Tensor]


class TwoLevel:
    """All ranks must construct it. ``machines[r]`` names rank r's machine; all ranks pass the same list."""

    name = "twolevel"

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        machines: list[str],
        *,
        timeout_s: float = 600.0,
        need_bytes: int = 0,
        place: Callable[[], str] = lambda: "",
        helper_thread: str = "off",
    ) -> None:
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self._ranks = [[r for r in range(size) if machines[r] == name] for name in dict.fromkeys(machines)]  # by machine
        self._machine = next(m for m, ranks in enumerate(self._ranks) if rank in ranks)
        self._local_rank = self._ranks[self._machine].index(rank)
        health = PeerHealth(store, rank, size, timeout_s, place)
        weakref.finalize(self, health.close)  # also if this constructor fails
        self._local = Shm(
            dist.PrefixStore(f"machine/{self._machine}", store),
            self._local_rank,
            len(self._ranks[self._machine]),
            timeout_s=timeout_s,
            need_bytes=need_bytes,
            health=health,
            helper_thread=helper_thread,
        )
        self._all = TorchGroup(dist.PrefixStore("all", store), rank, size, timeout_s=timeout_s, driver=self._local)
        self._connections = Connections()
        self._values: list[Any] = []  # the gloo groups of the slices this worker carries, for values
        self._results: list[Any] = []  # the same for results
        self._carried: list[int] = []  # the slices, in the same order
        self._slices = max(map(len, self._ranks))
        self._connect_carriers(store)
        health.on_failure(self._connections.cut)
        self._issued, self._shares = InOrder(), InOrder()
        self._scratch = ScratchPool()
        self._plans: weakref.WeakKeyDictionary[SharedBucket, dict[Fold | None, list[_CarriedSlice]]] = weakref.WeakKeyDictionary()
        self._merged: dict[Fold, Fold] = {}  # the folds between machines
        self.bytes_between = 0
        """Gradient bytes this worker has reduced with other machines; it sent 2(M-1)/M of them."""
        self._finalizer = weakref.finalize(self, _close, self._all, self._local, self._connections, self._values, self._results)

    def _connect_carriers(self, store: dist.Store) -> None:
        """Build two gloo groups for each slice that this worker carries; all ranks build them in the order of the slices."""
        here = self._ranks[self._machine]
        for s in range(self._slices):
            if self.rank == here[s % len(here)]:
                self._carried.append(s)
                for groups, prefix in ((self._values, "values"), (self._results, "results")):
                    cross = dist.PrefixStore(f"{prefix}/{s}", store)
                    groups.append(build_gloo(cross, self._machine, len(self._ranks), self._connections))

    def averages(self, tensor: Tensor) -> bool:
        return self._local.averages(tensor)

    def buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._local.buffer(numel, dtype, device)

    def reduce(self, tensor: Tensor, op: Op, what: str) -> Pending:
        bucket = self._local.bucket_of(tensor)
        if bucket is None:
            return self._all.reduce(tensor, op, what)
        slices = self._slices_of(bucket, None)
        scale = 1.0 / self.size if op == "mean" else None
        return self._start(bucket, slices, self._reduce_between(slices, scale, self._issued.take_ticket()), what)

    def fold(self, tensor: Tensor, fold: Fold, scale: float | None, what: str) -> Pending:
        bucket = self._local.bucket_of(tensor)
        if bucket is None:
            return self._all.fold(tensor, fold, scale, what)
        check_fold(tensor, fold, self.size)
        if fold not in self._merged:
            self._merged[fold] = fold.merged(self._ranks)
        slices = self._slices_of(bucket, fold)
        tickets = self._issued.take_ticket(), self._shares.take_ticket()
        return self._start(bucket, slices, self._fold_between(slices, self._merged[fold], scale, *tickets), what)

    def _start(self, bucket: SharedBucket, slices: list[_CarriedSlice], between: OpGenerator, what: str) -> Pending:
        number = self._local.health.begin(what)
        bucket.deposit()
        return self._local.start(self._run(bucket, slices, between), number, what)

    def _run(self, bucket: SharedBucket, slices: list[_CarriedSlice], between: OpGenerator) -> OpGenerator:
        """Add on this machine, then ``between`` machines, then copy the totals to the other workers of this machine."""
        while not bucket.is_deposited():
            yield
        for carried in slices:
            yield from self._local.run_blocks(carried.blocks, None)
            self.bytes_between += (len(carried.rows) + 1) * carried.out.nbytes // 2
        yield from between
        for carried in slices:
            for other in carried.others:
                other.copy_(carried.out)
        bucket.publish_reduced()
        while not bucket.is_reduced():
            yield

    def _reduce_between(self, slices: list[_CarriedSlice], scale: float | None, ticket: int) -> OpGenerator:
        yield from self._issued.wait_for(ticket)
        works = [group.allreduce([carried.out]) for group, carried in zip(self._values, slices, strict=True) if carried.out.numel()]
        self._issued.next_ticket()
        yield from wait_for_works(works)
        if scale is not None:
            for carried in slices:
                carried.out.mul_(scale)

    def _fold_between(
        self, slices: list[_CarriedSlice], fold: Fold, scale: float | None, ticket: int, share_ticket: int
    ) -> OpGenerator:
        pieces = []
        for index, carried in enumerate(slices):
            groups = GroupRef(self._values, index), GroupRef(self._results, index)
            group = FoldGroup(self._machine, len(self._ranks), *groups, self._scratch)
            pieces += cut_into_pieces(group, carried.rows, fold, carried.out)
        yield from self._issued.wait_for(ticket)
        for piece in pieces:
            piece.scatter()
        self._issued.next_ticket()
        yield from finish_fold(pieces, scale, self._shares, share_ticket)

    def _slices_of(self, bucket: SharedBucket, fold: Fold | None) -> list[_CarriedSlice]:
        """The slices that this worker carries in a fold of a bucket, or in a reduction if ``fold`` is None. Made once."""
        plans = self._plans.setdefault(bucket, {})
        if fold not in plans:
            rows = [rows_of(buffer, 1 if fold is None else fold.width) for buffer in bucket.buffers]
            plans[fold] = [self._carry(s, rows, fold) for s in self._carried]
        return plans[fold]

    def _carry(self, s: int, rows: list[Tensor], fold: Fold | None) -> _CarriedSlice:
        """The work on slice ``s`` of the ``rows`` of all workers of this machine."""
        low, high = slice_of(s, self._slices, rows[0].shape[1], rows[0].element_size())
        others = [own[0, low:high] for own in rows]
        out = others.pop(self._local_rank)
        if fold is None:
            blocks = fold_blocks([own[0, low:high] for own in rows], None, [out], 0, high - low)
            return _CarriedSlice(blocks, [out], out, others)
        here = self._ranks[self._machine]
        values = [own[k] for own, rank in zip(rows, here, strict=True) for k in range(len(fold.held[rank]))]
        adds, ends = fold.among(here)
        return _CarriedSlice(add_blocks(values, adds, low, high), [values[end][low:high] for end in ends], out, others)

    def broadcast(self, tensor: Tensor, source: int, what: str) -> Pending:
        return self._all.broadcast(tensor, source, what)

    def all_gather(self, output: Tensor, tensor: Tensor, what: str) -> Pending:
        return self._all.all_gather(output, tensor, what)

    def barrier(self, what: str = "a barrier") -> None:
        self._all.barrier(what)

    def await_device(self) -> None:
        """All results are on the host."""

    def progress(self) -> None:
        self._local.progress()

    def abort(self, reason: str) -> None:
        self._local.abort(reason)

    def postpone_timeouts(self, until: float) -> None:
        self._local.postpone_timeouts(until)

    def link_us(self) -> int:
        return self._connections.link_us() + self._all.link_us()

    def close(self) -> None:
        self._finalizer()


def _close(all_ranks: TorchGroup, local: Shm, connections: Connections, values: list[Any], results: list[Any]) -> None:
    local.close()
    all_ranks.close()
    connections.cut()
    values.clear()
    destroy_gloo(connections, results)
