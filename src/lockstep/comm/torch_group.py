"""A Comm over torch process groups: gloo for the host's memory, NCCL (or gloo) for CUDA's.

One object is one generation: groups are built for it under a fresh store prefix and end with it.
Knows nothing of buckets or steps beyond the ``what`` it prints. A fold (comm/fold_wire.py) needs this
thread between its two stages: it is a generator, as in shm.py, and NCCL's is a queue on a stream.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.base import Op, Pending, bits, real
from lockstep.comm.fold import check_fold, fold_here, rows_of
from lockstep.comm.fold_gloo import Mesh, Spare, Wire, finish, pieces, through_host
from lockstep.comm.fold_nccl import fold_on_stream
from lockstep.comm.operation import Done, InOrder, Last, Operation, Steps
from lockstep.comm.peer_health import PeerHealth
from lockstep.comm.sockets import Connections
from lockstep.comm.store import await_ranks
from lockstep.comm.waits import CudaPending, GlooPending, Recorded, first_line, slice_of_wait
from lockstep.errors import PeerError, UsageError
from lockstep.plan.tree import Fold


def _options(op: Any) -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.reduceOp = op
    return options


_OPTIONS: dict[Op, dist.AllreduceOptions] = {
    "sum": _options(dist.ReduceOp.SUM),
    "mean": _options(dist.ReduceOp.AVG),
    "max": _options(dist.ReduceOp.MAX),
}
_BACKSTOP = timedelta(days=7)  # our own waits time out and name the rank; gloo's timeout never should


def options_for(op: Op) -> dist.AllreduceOptions:
    return _OPTIONS[op]


class TorchGroup:
    """gloo and NCCL process groups among ``size`` ranks that meet in ``store``.

    All ranks must construct it; blocks until they have (``PeerError`` names who has not after
    ``timeout_s``). ``cuda`` says what carries CUDA tensors: ``"nccl"``, ``"gloo"`` (through the
    host; several ranks may share a GPU), or a process group that exists already.
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
    ) -> None:
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self._in_flight: deque[CudaPending] = deque()
        self._in_flight_lock = threading.Lock()
        self._running: list[Operation] = []  # folds over gloo
        self._returning = InOrder()
        self._spare = Spare()
        self.beside: Callable[[], bool] | None = None
        """What a wait lets go on instead of our own folds, where this is part of a larger comm: see ``GlooPending``."""
        self._side: torch.cuda.Stream | None = None  # where NCCL's folds are added
        self._store = store
        store.set_timeout(timedelta(seconds=timeout_s))
        await_ranks(store, rank, size, timeout_s)
        self._connections = Connections()
        self._gloo = [build_gloo(dist.PrefixStore("gloo", store), rank, size, self._connections)]
        self._nccl: Any = None if cuda == "gloo" else cuda
        if isinstance(cuda, dist.ProcessGroup):
            self._nccl = cuda._get_backend(torch.device("cuda"))  # skips a dispatch per operation
        self._owns_nccl = cuda == "nccl"
        if self._owns_nccl:
            if device is None or device.type != "cuda":
                raise UsageError(f"NCCL needs the CUDA device this worker uses, not {device}. Pass device=torch.device('cuda', N).")
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = _BACKSTOP
            self._nccl = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), rank, size, options)
            self._nccl.eager_connect_single_device(device)
        self.name = "gloo" if self._nccl is None else "nccl"
        self.guard = PeerHealth(store, rank, size, _breaker(self._connections, self._nccl))
        if self._nccl is not None:
            self.guard.watch.each_poll(_weakly(self._check_cuda))
        self._finalizer = weakref.finalize(
            self, _shut, self.guard, self._connections, self._gloo, self._nccl if self._owns_nccl else None
        )

    def averages(self, tensor: Tensor) -> bool:
        return tensor.is_cuda and self._nccl is not None

    def buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.zeros(numel, dtype=dtype, device=device)

    def reduce(self, tensor: Tensor, op: Op, what: str) -> Pending:
        count = self.guard.enter(what)
        wire = real(tensor)
        if op == "mean" and not self.averages(tensor):
            op = "sum"
            wire.mul_(1.0 / self.size)
        return self._issue("allreduce", ([wire], options_for(op)), tensor, count, what)

    def fold(self, tensor: Tensor, fold: Fold, scale: float | None, what: str) -> Pending:
        count = self.guard.enter(what)
        check_fold(tensor, fold, self.size)
        if self.size == 1:
            rows = rows_of(tensor, fold.width)
            fold_here(rows[: len(fold.held[0])].unbind(), fold, scale, [rows[0]])
            return Done()
        if tensor.is_cuda and self._nccl is not None:
            return self._fold_on_stream(tensor, fold, scale, count, what)
        if not self.can_fold:
            self.barrier(what)  # nobody connects before all have come: this wait ends and names who has not
            self.prepare_to_fold()
        return through_host(tensor, fold, self.rank, lambda host: self._start(host, fold, scale, count, what))

    def broadcast(self, tensor: Tensor, source: int, what: str) -> Pending:
        count = self.guard.enter(what)
        options = dist.BroadcastOptions()
        options.rootRank = source
        return self._issue("broadcast", ([bits(tensor)], options), tensor, count, what)

    def all_gather(self, output: Tensor, tensor: Tensor, what: str) -> Pending:
        count = self.guard.enter(what)
        outputs = [bits(output[r]) for r in range(self.size)]
        return self._issue("allgather", ([outputs], [bits(tensor)]), tensor, count, what)

    def barrier(self, what: str = "a barrier") -> None:
        self.reduce(torch.zeros(1), "sum", what).wait()

    def progress(self) -> None:
        """gloo and NCCL have threads of their own; folds over gloo have not."""
        if self._running:
            self._running = [running for running in self._running if not running.go_on()]

    def _meanwhile(self) -> bool:
        if self.beside is not None:
            return self.beside()
        self.progress()
        return bool(self._running)

    def abort(self, reason: str) -> None:
        """Break every pending wait of this rank, and through the closed connections everybody's."""
        self.guard.fail(PeerError(reason))

    def close(self) -> None:
        self._finalizer()

    def _issue(self, operation: str, arguments: tuple[Any, ...], tensor: Tensor, count: int, what: str) -> Pending:
        if tensor.is_cuda and self._nccl is not None:
            return self._track(getattr(self._nccl, operation)(*arguments), count, what)
        try:
            work = getattr(self._gloo[0], operation)(*arguments)
        except RuntimeError as error:  # the peer's connection was gone before we began
            raise self.guard.explain(count, what, 0.0, first_line(error)) from error
        return GlooPending(self.guard, self.timeout_s, work, count, what, self._meanwhile)

    # -- folds -------------------------------------------------------------------------------

    @property
    def can_fold(self) -> bool:
        return len(self._gloo) > 1

    def prepare_to_fold(self) -> None:
        """Connect the group that results come back on. All ranks must call it, at the same time: none waits long."""
        with connecting(self.guard):
            self._gloo.append(build_gloo(dist.PrefixStore("results", self._store), self.rank, self.size, self._connections))

    def _start(self, tensor: Tensor, fold: Fold, scale: float | None, count: int, what: str) -> Operation:
        running = Operation(self, self.fold_steps(tensor, fold, scale, count, what), count, what)
        self._running.append(running)
        self.progress()
        return running

    def fold_steps(self, tensor: Tensor, fold: Fold, scale: float | None, count: int, what: str) -> Steps:
        """A fold of host memory for somebody else to drive. What this rank sends leaves at once, in the order of the calls."""
        rows = rows_of(tensor, fold.width)
        mesh = Mesh(self.rank, self.size, Wire(self._gloo, 0), Wire(self._gloo, 1), self._spare)
        parts = pieces(mesh, rows[: len(fold.held[self.rank])].unbind(), fold, rows[0])
        turn = self._returning.take()
        try:
            for piece in parts:
                piece.scatter()
        except RuntimeError as error:  # the peer's connection was gone before we began
            raise self.guard.explain(count, what, 0.0, first_line(error)) from error
        return finish(parts, scale, self._returning, turn)

    def _fold_on_stream(self, tensor: Tensor, fold: Fold, scale: float | None, count: int, what: str) -> Pending:
        """All of it is given to a side stream now: a backward goes on meanwhile."""
        with torch.cuda.device(tensor.device):
            if self._side is None:
                self._side = torch.cuda.Stream()
            self._side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._side):
                fold_on_stream(self._nccl, self.rank, self.size, tensor, fold, scale)
            tensor.record_stream(self._side)
            return self._track(Recorded(self._side, tensor.device), count, what)

    def await_(self, running: Operation, timeout_s: float | None) -> None:
        """Block on one work at a time, and look up now and then."""
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        started = time.monotonic()
        while True:
            self.progress()
            if running.done():
                return
            if self.guard.error is not None:
                raise self.guard.again()
            waited_s = time.monotonic() - started
            if waited_s >= limit_s:
                raise self.guard.explain(running.count, running.what, waited_s)
            try:
                self._next_work(running).wait(slice_of_wait(limit_s - waited_s, len(self._running) > 1))
            except RuntimeError:
                continue  # the slice is over, or the work failed: its steps find out

    def _next_work(self, running: Operation) -> Any:
        """The oldest values that have to be added here, before results that come by themselves."""
        for one in self._running:
            if one.waits_for is not None and not isinstance(one.waits_for, Last):
                return one.waits_for
        assert isinstance(running.waits_for, Last), "a turn that nobody has"
        return running.waits_for.work

    def explain(self, running: Operation, error: RuntimeError) -> PeerError:
        return self.guard.explain(running.count, running.what, 0.0, first_line(error))

    # -- CUDA --------------------------------------------------------------------------------

    def _track(self, work: Any, count: int, what: str) -> CudaPending:
        pending = CudaPending(self.guard, work, count, what)
        self._in_flight.append(pending)
        if len(self._in_flight) > 32:  # a work keeps its tensors alive, so not many
            self._forget_finished()
        return pending

    def _check_cuda(self) -> None:
        """From the watch thread: CUDA waits never block the host, so nobody else would notice."""
        head = self._forget_finished()
        if head is not None and head.waited_s() > self.timeout_s:
            self.guard.explain(head.count, head.what, head.waited_s())

    def _forget_finished(self) -> CudaPending | None:
        with self._in_flight_lock:
            while self._in_flight and self._in_flight[0].done():
                self._in_flight.popleft()
            return self._in_flight[0] if self._in_flight else None


def build_gloo(store: dist.Store, rank: int, size: int, connections: Connections) -> Any:
    """A gloo group whose sockets ``connections`` can cut."""
    with connections.captured():
        return dist.ProcessGroupGloo(store, rank, size, _BACKSTOP)


@contextmanager
def connecting(guard: PeerHealth) -> Iterator[None]:
    """Around groups that are built in the middle of a comm's life: a failure is explained, and an abort is not missed."""
    try:
        yield
    except RuntimeError as error:
        raise guard.explain(guard.watch.count, "the connections for folds", 0.0, first_line(error)) from error
    if guard.error is not None:
        raise guard.again()


def _breaker(connections: Connections, nccl: Any) -> Callable[[], None]:
    """Ends all waits. Holds no reference to the comm, whose end must not wait for its own watch thread."""

    def end_waits() -> None:
        connections.cut()
        if nccl is not None:
            nccl.abort()

    return end_waits


def _weakly(method: Callable[[], None]) -> Callable[[], None]:
    ref = weakref.WeakMethod(method)

    def call() -> None:
        alive = ref()
        if alive is not None:
            alive()

    return call


def _shut(guard: PeerHealth, connections: Connections, gloo: list[Any], nccl: Any) -> None:
    guard.close()
    if nccl is not None:
        nccl.shutdown()
    destroy_gloo(connections, gloo)


def destroy_gloo(connections: Connections, groups: list[Any]) -> None:
    """End gloo groups while the interpreter lives: at its end a gloo thread that lets go of a Python object aborts the process.

    Connections are cut first, since a group waits for its pending operations, and those for peers that may never come.
    """
    connections.cut()
    groups.clear()
    connections.close()
