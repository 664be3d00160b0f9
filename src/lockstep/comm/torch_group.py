"""A Comm over torch process groups: gloo for the host's memory, NCCL (or gloo) for CUDA's.

One object is one generation: groups are built for it under a fresh store prefix and end with it.
Knows nothing of buckets or steps beyond the ``what`` it prints.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.base import Op, Pending, bits, real
from lockstep.comm.guard import Guard
from lockstep.comm.sockets import Connections
from lockstep.comm.store import await_ranks
from lockstep.errors import PeerError, UsageError


def _options(op: Any) -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.reduceOp = op
    return options


_OPTIONS: dict[Op, dist.AllreduceOptions] = {
    "sum": _options(dist.ReduceOp.SUM),
    "mean": _options(dist.ReduceOp.AVG),
    "max": _options(dist.ReduceOp.MAX),
}
_SLICE_S = 0.5  # a wait looks up this often, so that Ctrl-C gets through
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
        self._in_flight: deque[_CudaPending] = deque()
        self._in_flight_lock = threading.Lock()
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
        self.guard = Guard(store, rank, size, _breaker(self._connections, self._nccl))
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
        return None  # gloo and NCCL have threads of their own

    def abort(self, reason: str) -> None:
        """Break every pending wait of this rank, and through the closed connections everybody's."""
        self.guard.fail(PeerError(reason))

    def close(self) -> None:
        self._finalizer()

    def _issue(self, operation: str, arguments: tuple[Any, ...], tensor: Tensor, count: int, what: str) -> Pending:
        if tensor.is_cuda and self._nccl is not None:
            pending = _CudaPending(self, getattr(self._nccl, operation)(*arguments), count, what)
            self._in_flight.append(pending)
            if len(self._in_flight) > 32:  # a work keeps its tensors alive, so not many
                self._forget_finished()
            return pending
        try:
            work = getattr(self._gloo[0], operation)(*arguments)
        except RuntimeError as error:  # the peer's connection was gone before we began
            raise self.guard.explain(count, what, 0.0, first_line(error)) from error
        return _GlooPending(self, work, count, what)

    def _check_cuda(self) -> None:
        """From the watch thread: CUDA waits never block the host, so nobody else would notice."""
        head = self._forget_finished()
        if head is not None and head.waited_s() > self.timeout_s:
            self.guard.explain(head.count, head.what, head.waited_s())

    def _forget_finished(self) -> _CudaPending | None:
        with self._in_flight_lock:
            while self._in_flight and self._in_flight[0].done():
                self._in_flight.popleft()
            return self._in_flight[0] if self._in_flight else None


class _GlooPending:
    def __init__(self, comm: TorchGroup, work: Any, count: int, what: str) -> None:
        self._comm, self._work, self._count, self._what = comm, work, count, what

    def wait(self, timeout_s: float | None = None) -> None:
        limit_s = self._comm.timeout_s if timeout_s is None else timeout_s
        started = time.monotonic()
        while True:
            waited_s = time.monotonic() - started
            slice_s = max(0.001, min(_SLICE_S, limit_s - waited_s))
            try:
                self._work.wait(timedelta(seconds=slice_s))
                return
            except RuntimeError as error:
                waited_s = time.monotonic() - started
                if self._work.is_completed():
                    if self._work.exception() is None:
                        return  # it ended just after its slice did
                    raise self._comm.guard.explain(self._count, self._what, waited_s, first_line(error)) from error
                if waited_s >= limit_s:
                    raise self._comm.guard.explain(self._count, self._what, waited_s) from None

    def done(self) -> bool:
        return bool(self._work.is_completed())


class _CudaPending:
    def __init__(self, comm: TorchGroup, work: Any, count: int, what: str) -> None:
        self._comm, self._work, self.count, self.what = comm, work, count, what
        self._since: float | None = None

    def wait(self, timeout_s: float | None = None) -> None:
        """The current stream waits; the host goes on. The watch thread holds the clock."""
        if self._comm.guard.error is not None:
            raise self._comm.guard.again()
        self._work.wait()
        self._since = time.monotonic()

    def waited_s(self) -> float:
        return 0.0 if self._since is None else time.monotonic() - self._since

    def done(self) -> bool:
        return bool(self._work.is_completed())


def build_gloo(store: dist.Store, rank: int, size: int, connections: Connections) -> Any:
    """A gloo group whose sockets ``connections`` can cut."""
    with connections.captured():
        return dist.ProcessGroupGloo(store, rank, size, _BACKSTOP)


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:160]


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


def _shut(guard: Guard, connections: Connections, gloo: list[Any], nccl: Any) -> None:
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
