"""A Comm whose ranks are threads of one process: for tests, for a lone worker, and for learning.

``loopback(n)`` returns one comm per rank. The last rank that arrives at an operation performs it for all, always in rank order, so
results do not depend on timing. Faults are scripted: ``comm.group.fail(rank=1, at=3)`` makes rank 1's fourth operation raise, and
the other ranks get the ``PeerError`` that a real death would give them.
"""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lockstep.comm.base import Op, Pending
from lockstep.comm.blame import FailedWait, again, name_ranks, never_sent
from lockstep.comm.fold import check_fold, fold_values, reduction, rows_of, values_of
from lockstep.errors import InvariantError, PeerError, UsageError
from lockstep.plan.tree import Fold


@dataclass
class _Collective:
    """One operation of all ranks: what must be equal on every rank, and each rank's (tensor, output)."""

    kind: str
    what: str
    source: int = -1
    fold: Fold | None = None
    scale: float | None = None
    tensors: dict[int, tuple[Tensor, Tensor | None]] = field(default_factory=dict)
    done: bool = False

    def matches(self, other: _Collective) -> bool:
        mine, theirs = ((c.kind, c.what, c.source, c.fold, c.scale) for c in (self, other))
        return mine == theirs

    def perform(self, size: int) -> None:
        if size == 1 and self.kind not in ("gather", "fold"):
            return
        tensors = [self.tensors[r][0] for r in range(size)]
        with torch.no_grad():
            if self.kind in ("reduce", "fold"):
                fold = self.fold or reduction(size)
                rows = [rows_of(tensor, fold.width) for tensor in tensors]
                fold_values(values_of(rows, fold), self.fold, self.scale, [own[0] for own in rows])
            elif self.kind == "broadcast":
                for rank, tensor in enumerate(tensors):
                    if rank != self.source:
                        tensor.copy_(tensors[self.source])
            elif self.kind == "gather":
                for _, output in self.tensors.values():
                    assert output is not None
                    torch.stack(tensors, out=output)
            elif self.kind != "barrier":
                raise InvariantError(f"loopback has no collective {self.kind!r}")


class LoopbackGroup:
    """What the ranks of one loopback share."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self.size = size
        self.timeout_s, self.postponed_until = timeout_s, -math.inf
        self.changed = threading.Condition()
        self.collectives: dict[int, _Collective] = {}
        self.error: PeerError | UsageError | None = None
        self.faults: dict[int, int] = {}

    def fail(self, rank: int, at: int) -> LoopbackGroup:
        """Script a fault: ``rank`` dies in its operation number ``at``, counted from 0. Returns self, to chain."""
        self.faults[rank] = at
        return self

    def fail_with(self, error: PeerError | UsageError) -> None:
        """End every wait with ``error``, unless the group has failed before."""
        with self.changed:
            self.error = self.error or error
            self.changed.notify_all()

    def join(self, index: int, mine: _Collective, rank: int, pair: tuple[Tensor, Tensor | None]) -> _Collective:
        """Add ``rank``'s tensors to the collective number ``index``; the last rank performs it."""
        with self.changed:
            collective = self.collectives.setdefault(index, mine)
            if not collective.matches(mine):
                error = UsageError(
                    f"the workers are in different calls: rank {rank} is in {mine.what} ({mine.kind}); "
                    f"{name_ranks(sorted(collective.tensors))} called {collective.what} ({collective.kind}). All workers must make "
                    "the same calls in the same order."
                )
                self.fail_with(error)
                raise error
            collective.tensors[rank] = pair
            if len(collective.tensors) == self.size:
                collective.perform(self.size)
                collective.done = True
                del self.collectives[index]
                self.changed.notify_all()
        return collective


class _LoopbackPending:
    def __init__(self, group: LoopbackGroup, collective: _Collective, rank: int) -> None:
        self._group, self._collective, self._rank = group, collective, rank

    def wait(self, timeout_s: float | None = None) -> None:
        if self._collective.done:
            return
        limit_s = self._group.timeout_s if timeout_s is None else timeout_s
        started = time.monotonic()
        with self._group.changed:
            while not self._collective.done and self._group.error is None:
                left_s = max(started, self._group.postponed_until) + limit_s - time.monotonic()
                if left_s <= 0:
                    break
                self._group.changed.wait(left_s)
            if self._collective.done:
                return
            if self._group.error is None:
                failed = FailedWait(self._rank, 0, self._collective.what, time.monotonic() - started, "")
                missing = [r for r in range(self._group.size) if r not in self._collective.tensors]
                message = never_sent(failed, missing, sorted(self._collective.tensors))
                self._group.fail_with(PeerError(message, missing, hung=True))
            assert self._group.error is not None
            raise again(self._group.error)

    def done(self) -> bool:
        return self._collective.done


class Loopback:
    """The comm of one rank of a ``LoopbackGroup``."""

    name = "loopback"

    def __init__(self, group: LoopbackGroup, rank: int) -> None:
        self.group = group
        self.rank = rank
        self.size = group.size
        self.timeout_s = group.timeout_s
        self._operations = 0
        self._closed = False

    def averages(self, tensor: Tensor) -> bool:
        return True

    def buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.zeros(numel, dtype=dtype, device=device)

    def reduce(self, tensor: Tensor, op: Op, what: str) -> Pending:
        return self._issue(_Collective("reduce", what, scale=1.0 / self.size if op == "mean" else None), tensor)

    def fold(self, tensor: Tensor, fold: Fold, scale: float | None, what: str) -> Pending:
        check_fold(tensor, fold, self.size)
        return self._issue(_Collective("fold", what, fold=fold, scale=scale), tensor)

    def broadcast(self, tensor: Tensor, source: int, what: str) -> Pending:
        return self._issue(_Collective("broadcast", what, source), tensor)

    def all_gather(self, output: Tensor, tensor: Tensor, what: str) -> Pending:
        return self._issue(_Collective("gather", what), tensor, output)

    def barrier(self, what: str = "a barrier") -> None:
        self._issue(_Collective("barrier", what), torch.empty(0)).wait()

    def _issue(self, collective: _Collective, tensor: Tensor, output: Tensor | None = None) -> Pending:
        if self._closed:
            raise UsageError(f"rank {self.rank} used its comm for {collective.what} after closing it.")
        if self.group.error is not None:
            raise again(self.group.error)
        index = self._operations
        self._operations += 1
        if self.group.faults.get(self.rank) == index:
            error = PeerError(f"rank {self.rank} died before {collective.what}, as the fault script says.", (self.rank,))
            self.group.fail_with(error)
            raise error
        return _LoopbackPending(self.group, self.group.join(index, collective, self.rank, (tensor, output)), self.rank)

    def await_device(self) -> None:
        return None

    def progress(self) -> None:
        return None

    def abort(self, reason: str) -> None:
        self.group.fail_with(PeerError(reason))

    def postpone_timeouts(self, until: float) -> None:
        with self.group.changed:
            self.group.postponed_until = until
            self.group.changed.notify_all()

    def link_us(self) -> int:
        return 0

    def close(self) -> None:
        self._closed = True


def loopback(size: int = 1, timeout_s: float = 60.0) -> list[Loopback]:
    """Return one comm per rank; each belongs to a thread of its own. ``comms[0].group`` takes the fault script."""
    group = LoopbackGroup(size, timeout_s)
    return [Loopback(group, rank) for rank in range(size)]
