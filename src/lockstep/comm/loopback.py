"""N ranks as threads of one process: a Comm for tests, for a lone worker, and for learning.

``loopback(n)`` gives one comm per rank. Sums are taken in rank order by whoever arrives last, so
results never depend on timing. Faults are a script: ``hub.fail(rank=1, at=3)`` makes rank 1's
fourth operation raise, and the others get the ``PeerError`` they would get from a real death.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lockstep.comm.base import Op, Pending
from lockstep.comm.fold import check_fold, fold_here, rows_of, values_of
from lockstep.errors import InvariantError, PeerError, UsageError
from lockstep.plan.tree import Fold


@dataclass
class _Round:
    """One collective: what every rank brought, and whether it is over."""

    kind: str
    what: str
    source: int
    plan: tuple[Fold, float | None] | None = None
    brought: dict[int, tuple[Tensor, Tensor | None]] = field(default_factory=dict)
    over: bool = False


class Hub:
    """What the ranks of one loopback share."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self.size = size
        self.timeout_s = timeout_s
        self.changed = threading.Condition()
        self.rounds: dict[int, _Round] = {}
        self.broken: PeerError | None = None
        self.faults: dict[int, int] = {}

    def fail(self, rank: int, at: int) -> Hub:
        """Script: ``rank`` dies in its operation number ``at`` (from 0). Returns self, to chain."""
        self.faults[rank] = at
        return self

    def break_with(self, error: PeerError) -> None:
        with self.changed:
            self.broken = self.broken or error
            self.changed.notify_all()

    def bring(self, index: int, mine: _Round, rank: int, pair: tuple[Tensor, Tensor | None]) -> _Round:
        with self.changed:
            round_ = self.rounds.setdefault(index, mine)
            if (round_.kind, round_.source, round_.plan) != (mine.kind, mine.source, mine.plan):
                error = PeerError(
                    f"rank {rank} is at {mine.what!r} ({mine.kind}) where others are at {round_.what!r} ({round_.kind})", (rank,)
                )
                self.broken = self.broken or error
                self.changed.notify_all()
                raise error
            round_.brought[rank] = pair
            if len(round_.brought) == self.size:
                _perform(round_, self.size)
                round_.over = True
                del self.rounds[index]
                self.changed.notify_all()
        return round_


def _perform(round_: _Round, size: int) -> None:
    if size == 1 and round_.kind not in ("gather", "fold"):
        return
    tensors = [round_.brought[r][0] for r in range(size)]
    with torch.no_grad():
        if round_.kind in ("sum", "mean", "max"):
            total = tensors[0].clone()
            for other in tensors[1:]:
                total = torch.maximum(total, other) if round_.kind == "max" else total.add_(other)
            if round_.kind == "mean":
                total.div_(size)
            for tensor in tensors:
                tensor.copy_(total)
        elif round_.kind == "fold":
            assert round_.plan is not None
            fold, scale = round_.plan
            rows = [rows_of(tensor, fold.width) for tensor in tensors]
            values = [value.clone() for value in values_of(rows, fold)]
            fold_here(values, fold, scale, [mine[0] for mine in rows])
        elif round_.kind == "broadcast":
            for rank, tensor in enumerate(tensors):
                if rank != round_.source:
                    tensor.copy_(tensors[round_.source])
        elif round_.kind == "gather":
            for _, output in round_.brought.values():
                assert output is not None
                torch.stack(tensors, out=output)
        elif round_.kind != "barrier":
            raise InvariantError(f"loopback knows no collective {round_.kind!r}")


class _LoopbackPending:
    def __init__(self, hub: Hub, round_: _Round, rank: int) -> None:
        self._hub, self._round, self._rank = hub, round_, rank

    def wait(self, timeout_s: float | None = None) -> None:
        if self._round.over:
            return
        limit_s = self._hub.timeout_s if timeout_s is None else timeout_s
        started = time.monotonic()
        with self._hub.changed:
            self._hub.changed.wait_for(lambda: self._round.over or self._hub.broken, limit_s)
            if self._round.over:
                return
            error = self._hub.broken
            if error is None:
                missing = [r for r in range(self._hub.size) if r not in self._round.brought]
                there = sorted(self._round.brought)
                error = PeerError(
                    f"rank {', '.join(map(str, missing))} never sent {self._round.what} (rank {self._rank} waited "
                    f"{time.monotonic() - started:.1f} s; ranks {', '.join(map(str, there))} are there).",
                    missing,
                    hung=True,
                )
                self._hub.broken = error
                self._hub.changed.notify_all()
        raise error.copy()

    def done(self) -> bool:
        return self._round.over


class Loopback:
    """One rank's end of a Hub."""

    name = "loopback"

    def __init__(self, hub: Hub, rank: int) -> None:
        self.hub = hub
        self.rank = rank
        self.size = hub.size
        self.timeout_s = hub.timeout_s
        self._operations = 0
        self._closed = False

    def averages(self, tensor: Tensor) -> bool:
        return True

    def buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.zeros(numel, dtype=dtype, device=device)

    def reduce(self, tensor: Tensor, op: Op, what: str) -> Pending:
        return self._enter(op, what, -1, (tensor, None))

    def fold(self, tensor: Tensor, fold: Fold, scale: float | None, what: str) -> Pending:
        check_fold(tensor, fold, self.size)
        return self._enter("fold", what, -1, (tensor, None), (fold, scale))

    def broadcast(self, tensor: Tensor, source: int, what: str) -> Pending:
        return self._enter("broadcast", what, source, (tensor, None))

    def all_gather(self, output: Tensor, tensor: Tensor, what: str) -> Pending:
        return self._enter("gather", what, -1, (tensor, output))

    def barrier(self, what: str = "a barrier") -> None:
        self._enter("barrier", what, -1, (torch.empty(0), None)).wait()

    def _enter(
        self,
        kind: str,
        what: str,
        source: int,
        pair: tuple[Tensor, Tensor | None],
        plan: tuple[Fold, float | None] | None = None,
    ) -> Pending:
        if self._closed:
            raise UsageError(f"rank {self.rank} used its comm for {what} after closing it.")
        if self.hub.broken is not None:
            raise self.hub.broken.copy()
        index = self._operations
        self._operations += 1
        if self.hub.faults.get(self.rank) == index:
            error = PeerError(f"rank {self.rank} died before {what}, as its script told it to.", (self.rank,))
            self.hub.break_with(error)
            raise error
        return _LoopbackPending(self.hub, self.hub.bring(index, _Round(kind, what, source, plan), self.rank, pair), self.rank)

    def progress(self) -> None:
        return None

    def abort(self, reason: str) -> None:
        self.hub.break_with(PeerError(reason))

    def close(self) -> None:
        self._closed = True


def loopback(size: int = 1, timeout_s: float = 60.0) -> list[Loopback]:
    """One comm per rank; give each to a thread of its own. ``comms[0].hub`` takes the fault script."""
    hub = Hub(size, timeout_s)
    return [Loopback(hub, rank) for rank in range(size)]
