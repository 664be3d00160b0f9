"""A Comm over torch process groups: gloo for host memory, NCCL (or gloo) for CUDA memory.

One object serves one generation: its groups are built under a fresh store prefix and end with it. Knows nothing of buckets or steps
beyond the ``what`` it prints. A fold over gloo (comm/fold_gloo.py) needs this thread between its two stages, so it is a generator
(comm/operation.py). CUDA tensors go to comm/nccl_group.py. ``reduce`` is the backend's own all-reduce, which needs no thread of
ours. A gather over gloo carries its name in a frame (comm/frame.py).

Note: gloo until NCCL is connected
----------------------------------
NCCL takes half a second or more to connect, and a recovery should not wait for it. With ``gloo_meanwhile`` CUDA tensors travel
through host memory until all ranks are connected. All ranks must change over at the same operation: each frame says whether its
rank is connected, and all ranks have the same frames. A fold has the same bits either way.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.base import Op, Pending, bits, real
from lockstep.comm.connections import Connections
from lockstep.comm.device_check import require_working
from lockstep.comm.fold import check_fold, fold_values, rows_of
from lockstep.comm.fold_gloo import FoldGroup, GroupRef, ScratchPool, cut_into_pieces, finish_fold, fold_through_host
from lockstep.comm.frame import FRAME_BYTES, FramePending, Frames
from lockstep.comm.gloo_devices import build_gloo, destroy_gloo
from lockstep.comm.nccl_connect import build_nccl, require_cuda
from lockstep.comm.nccl_group import NcclGroup
from lockstep.comm.operation import Done, Driver, FinalWork, InOrder, Operation, OpGenerator
from lockstep.comm.peer_health import PeerHealth
from lockstep.comm.store import await_ranks
from lockstep.comm.torch_pending import GlooPending, slice_of_wait
from lockstep.errors import PeerError
from lockstep.plan.tree import Fold


def _options(op: Any) -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.reduceOp = op
    return options


_OPTIONS: dict[Op, dist.AllreduceOptions] = {"sum": _options(dist.ReduceOp.SUM), "mean": _options(dist.ReduceOp.AVG)}


class TorchGroup:
    """gloo and NCCL process groups among the ranks of a store. All ranks must construct it; blocks until they have.

    Args:
        store: The store through which the ranks find each other.
        rank, size: This worker's number, and how many workers there are.
        timeout_s: How long a wait may take.
        cuda: What carries CUDA tensors: ``"nccl"``, ``"gloo"`` (through host memory; several ranks may share a GPU), or a process
            group that exists already.
        device: The CUDA device of this worker; needed for ``cuda="nccl"``.
        gloo_meanwhile: Let CUDA tensors travel over gloo until NCCL is connected. None: the constructor waits for the connection.
            False: the first operation on a CUDA tensor waits.
        driver: If this group is part of a larger comm: drives the operations of both, and has their common health.
        place: Returns where the script is now, for error messages (``PeerHealth``).

    Raises:
        PeerError: Names the ranks that did not construct it within ``timeout_s``.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        *,
        timeout_s: float = 600.0,
        cuda: Literal["nccl", "gloo"] | dist.ProcessGroup = "gloo",
        device: torch.device | None = None,
        gloo_meanwhile: bool | None = None,
        driver: Driver | None = None,
        place: Callable[[], str] = lambda: "",
    ) -> None:
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self._in_flight: list[Operation] = []  # folds over gloo
        self._shares = InOrder()
        self._scratch = ScratchPool()
        self._store, self._larger, self._device = store, driver, device
        store.set_timeout(timedelta(seconds=timeout_s))
        await_ranks(store, rank, size, timeout_s)
        self._connections = Connections()
        self._gloo = [build_gloo(dist.PrefixStore("gloo", store), rank, size, self._connections)]
        self.name = "gloo" if cuda == "gloo" else "nccl"
        self.health = PeerHealth(store, rank, size, timeout_s, place) if driver is None else driver.health
        self.health.on_failure(self._connections.cut)
        self._nccl = self._open_nccl(cuda)
        self._over_nccl = self._nccl is not None and not gloo_meanwhile
        self._finalizer = weakref.finalize(self, _close, self.health, self._connections, self._gloo, self._nccl)
        if self._nccl is not None and gloo_meanwhile is None:
            try:
                self._nccl.await_ready(0, "its connections over NCCL")
            except BaseException:
                self._finalizer()
                raise

    def _open_nccl(self, cuda: Literal["nccl", "gloo"] | dist.ProcessGroup) -> NcclGroup | None:
        if cuda == "gloo":
            return None
        common = self.health, self.rank, self.size, require_cuda(self._device), self.timeout_s
        if isinstance(cuda, dist.ProcessGroup):
            return NcclGroup(*common, backend=cuda._get_backend(torch.device("cuda")))  # skips a dispatch per operation
        rank, size, device = self.rank, self.size, self._device
        own: dist.Store = self._store.clone()  # type: ignore[attr-defined]  # a store client serves one thread at a time
        return NcclGroup(*common, build=lambda: build_nccl(dist.PrefixStore("nccl", own), rank, size, device))

    def averages(self, tensor: Tensor) -> bool:
        return self._nccl_for(tensor) is not None

    def _nccl_for(self, tensor: Tensor) -> NcclGroup | None:
        """What carries the tensor; None: gloo."""
        return self._nccl if self._over_nccl and tensor.is_cuda else None

    def buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.zeros(numel, dtype=dtype, device=device)

    def reduce(self, tensor: Tensor, op: Op, what: str) -> Pending:
        number = self.health.begin(what)
        numbers = real(tensor)
        if op == "mean" and not self.averages(tensor):
            op = "sum"
            numbers.mul_(1.0 / self.size)
        return self._issue("allreduce", ([numbers], _OPTIONS[op]), tensor, number, what)

    def fold(self, tensor: Tensor, fold: Fold, scale: float | None, what: str) -> Pending:
        number = self.health.begin(what)
        check_fold(tensor, fold, self.size)
        if self.size == 1:
            rows = rows_of(tensor, fold.width)
            fold_values(rows[: len(fold.held[0])].unbind(), fold, scale, [rows[0]])
            return Done()
        nccl = self._nccl_for(tensor)
        if nccl is not None:
            return nccl.fold(tensor, fold, scale, number, what)
        if len(self._gloo) == 1:
            self._connect_for_results(what)

        def start(host: Tensor) -> Operation:
            return self._driver.start(self._fold_over_gloo(host, fold, scale, number, what), number, what)

        return fold_through_host(tensor, fold, self.rank, start)

    def broadcast(self, tensor: Tensor, source: int, what: str) -> Pending:
        number = self.health.begin(what)
        options = dist.BroadcastOptions()
        options.rootRank = source
        return self._issue("broadcast", ([bits(tensor)], options), tensor, number, what)

    def all_gather(self, output: Tensor, tensor: Tensor, what: str) -> Pending:
        number = self.health.begin(what)
        data = bits(tensor)
        rows = bits(output).view(self.size, data.numel())
        if self._nccl_for(tensor) is None:
            first = self._gather_frames(data, rows, number, what)
            if data.numel() <= FRAME_BYTES:
                return first
            first.wait()
            data, rows = data[FRAME_BYTES:], rows[:, FRAME_BYTES:]
        return self._issue("allgather", ([list(rows.unbind())], [data]), tensor, number, what)

    def barrier(self, what: str = "a barrier") -> None:
        number = self.health.begin(what)
        nothing = torch.empty(0, dtype=torch.uint8)
        self._gather_frames(nothing, nothing, number, what).wait()

    def _gather_frames(self, data: Tensor, rows: Tensor, number: int, what: str) -> FramePending:
        """Gather the first ``FRAME_BYTES`` of ``data`` over gloo, and compare ``what`` and the size of ``data``."""
        frames = Frames(data, self.size, what, is_connected=self._nccl is not None and self._nccl.is_ready)
        pending = self._issue("allgather", ([frames.received], [frames.mine]), frames.mine, number, what)
        return FramePending(pending, self.health, frames, rows, number, what, self._on_frames)

    def _on_frames(self, frames: Frames) -> None:
        """All ranks call this with the same frames, after the same operation."""
        self._over_nccl = self._over_nccl or frames.all_connected()

    def await_device(self) -> None:
        if self._nccl is not None:
            self._nccl.await_device()

    def progress(self) -> None:
        """Advance folds over gloo. All other operations have threads of gloo's or NCCL's."""
        if self._in_flight:
            self._in_flight = [operation for operation in self._in_flight if not operation.advance()]

    def abort(self, reason: str) -> None:
        """End every pending wait of this rank, and of all ranks through the closed connections."""
        self.health.fail(PeerError(reason))

    def postpone_timeouts(self, until: float) -> None:
        self.health.postponed_until = until

    def link_us(self) -> int:
        return self._connections.link_us()

    def close(self) -> None:
        has_failed = self._finalizer.alive and self.health.error is not None
        self._finalizer()
        if has_failed and self._device is not None and self._device.type == "cuda":
            require_working(self._device, self._nccl.streams if self._nccl is not None else ())

    def _issue(self, operation: str, arguments: tuple[Any, ...], tensor: Tensor, number: int, what: str) -> Pending:
        nccl = self._nccl_for(tensor)
        if nccl is not None:
            return nccl.issue(operation, arguments, number, what)
        try:
            work = getattr(self._gloo[0], operation)(*arguments)
        except RuntimeError as error:  # the connection was cut before the operation began
            raise self.health.explain(number, what, 0.0, error) from error
        return GlooPending(self._driver, self.timeout_s, work, number, what)

    # -- folds over gloo, and the Driver of them -----------------------------------------------

    @property
    def _driver(self) -> Driver:
        return self if self._larger is None else self._larger

    def _connect_for_results(self, what: str) -> None:
        """Build the group for the results of folds, when all ranks have reached their first fold."""
        self.barrier(what)  # building a group cannot name a missing rank; this wait can
        try:
            self._gloo.append(build_gloo(dist.PrefixStore("results", self._store), self.rank, self.size, self._connections))
        except RuntimeError as error:
            raise self.health.explain(self.health.count, "its connections for folds", 0.0, error) from error
        self.health.raise_if_failed()  # an abort may have happened before the new connections existed

    def _fold_over_gloo(self, tensor: Tensor, fold: Fold, scale: float | None, number: int, what: str) -> OpGenerator:
        """Send this rank's values at once, in the order of the calls, and return the rest of the fold."""
        rows = rows_of(tensor, fold.width)
        group = FoldGroup(self.rank, self.size, GroupRef(self._gloo, 0), GroupRef(self._gloo, 1), self._scratch)
        pieces = cut_into_pieces(group, rows[: len(fold.held[self.rank])].unbind(), fold, rows[0])
        ticket = self._shares.take_ticket()
        try:
            for piece in pieces:
                piece.scatter()
        except RuntimeError as error:  # the connection was cut before the operation began
            raise self.health.explain(number, what, 0.0, error) from error
        return finish_fold(pieces, scale, self._shares, ticket)

    def start(self, body: OpGenerator, number: int, what: str) -> Operation:
        operation = Operation(self, body, number, what)
        self._in_flight.append(operation)
        self.progress()
        return operation

    def advance(self) -> bool:
        self.progress()
        return bool(self._in_flight)

    def wait_for(self, operation: Operation, timeout_s: float | None) -> None:
        """Block on one torch work at a time, for a slice of the timeout, and advance all folds after each slice."""
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        started = time.monotonic()
        while True:
            self.progress()
            if operation.done():
                return
            self.health.raise_if_failed()
            waited_s, left_s = time.monotonic() - started, self.health.time_left_s(started, limit_s)
            if left_s <= 0:
                raise self.health.explain(operation.number, operation.what, waited_s)
            self.health.compare_calls(operation.number, waited_s)
            try:
                self._next_work(operation).wait(slice_of_wait(left_s, len(self._in_flight) > 1))
            except RuntimeError:
                continue  # the slice is over, or the work failed: then the operation raises its error

    def _next_work(self, operation: Operation) -> Any:
        """The oldest work after which this thread must add values; if there is none, the final work of ``operation``."""
        for other in self._in_flight:
            if other.waits_for is not None and not isinstance(other.waits_for, FinalWork):
                return other.waits_for
        assert isinstance(operation.waits_for, FinalWork), "every operation waits for its ticket"
        return operation.waits_for.work


def _close(health: PeerHealth, connections: Connections, gloo: list[Any], nccl: NcclGroup | None) -> None:
    health.close()
    if nccl is not None:
        nccl.close()
    destroy_gloo(connections, gloo)
