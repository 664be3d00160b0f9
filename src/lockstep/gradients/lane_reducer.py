"""LaneReducer: the gradients of every lane, folded along one tree, the same bits for every assignment of lanes.

Knows buckets and the comm; knows nothing of autograd, modules, data or optimizers. A worker runs
its lanes one after the other. Each lane's gradients are taken from ``param.grad`` as they become
ready, weighted, and folded into what is there of the lanes before (grads/stack.py); in the last
lane the result goes to the buckets, which leave in plan order while backward goes on:

    lane 2      g g g g          taken, kept
    lane 3      g g g g          taken, added to lane 2's: node (2,4), into the buckets
                  full>launch  ... end>launch the rest>wait       comm.fold finishes the tree

Until then ``param.grad`` is None: there is no gradient of the step yet. A lone worker has no
buckets: what it folds is the gradient. With ``exact=False`` lanes are added in the order they come,
and the buckets all-reduced as the backend likes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.comm.base import Comm, Pending
from lockstep.errors import UsageError
from lockstep.gradients.lane_bucket import LaneBucket
from lockstep.gradients.param_specs import sentinels, specs_of
from lockstep.gradients.partial_sums import PartialSums, Value
from lockstep.gradients.scale import headroom, multiply
from lockstep.gradients.sparse import fold_sparse
from lockstep.plan.buckets import BucketPlan, plan_buckets
from lockstep.plan.tree import Fold, carries


@dataclass(frozen=True)
class Turn:
    """One lane on this worker: its weight relative to the step's unit, and what the sum of all is multiplied with.

    ``share == 0``: its gradients count as zeros. ``scale`` None: not known before all weights are.
    """

    lane: int
    share: float
    scale: float | None
    is_last: bool


class LaneReducer:
    """Averages the gradients of ``params`` over all lanes. ``sparse``: numbers of those that get sparse gradients.

    Per step: ``start``, then for each lane with samples ``begin``, ``ready``..., ``end``; after the
    last one ``finish``. All ranks must call them for the same step.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        names: Sequence[str],
        comm: Comm,
        cap_bytes: int,
        sparse: frozenset[int] = frozenset(),
        exact: bool = True,
    ) -> None:
        self._params, self._names, self._comm, self._cap_bytes, self._exact = params, names, comm, cap_bytes, exact
        self._sparse = sorted(sparse)
        self._specs = specs_of(params, names)
        self._usual_fires = [0] * len(params)
        self._order: list[int] = []
        self._order_is_learned = False
        self._seen: list[int] = []
        self._planned: list[bool] = []
        self._buckets: list[LaneBucket] = []
        self.plan = BucketPlan((), ())
        self._mask = b""
        self.step = 0

    def rebind(self, comm: Comm) -> None:
        """Another generation: its comm, and rank 0's order of buckets. Collective. ``assign_lanes`` follows."""
        self._comm, self._buckets, self._planned = comm, [], []
        order = torch.tensor(self._order or [-1] * len(self._params), dtype=torch.int64)
        comm.broadcast(order, 0, "the bucket order").wait()
        self._order = [index for index in order.tolist() if index >= 0]
        self._order_is_learned = bool(self._order)

    def assign_lanes(self, fold: Fold, lanes: tuple[int, int]) -> None:
        """From the next step on this worker has lanes [first, last), and ``fold`` says who holds what."""
        self._fold, self._first, self._last = fold, *lanes
        self._carries = carries(fold.lanes, *lanes) if self._exact else (0, *(1 for _ in range(*lanes)))[:-1]
        self._planned = []  # buckets depend on it
        self._headroom = [headroom(p.dtype, fold.lanes) for p in self._params]

    # -- one step ----------------------------------------------------------------------------

    def start(self, step: int) -> None:
        """A step begins, perhaps again: nothing is kept of an unfinished one."""
        self.step = step
        wanted = [p.requires_grad for p in self._params]
        if wanted != self._planned:
            self._build(wanted)
        self._stack = PartialSums(len(self._params), self._carries)
        self._lane = self._first
        self._rows_of_lanes: dict[int, list[Tensor]] = {i: [] for i in self._sparse}
        self.present = bytearray(len(self._params))
        """1 for the parameters that had a gradient in some lane of this worker."""
        self._pending: list[Pending] = []
        self._launched = 0
        for bucket in self._buckets:
            bucket.missing = len(bucket.members)

    def begin(self, turn: Turn) -> bytes:
        """A lane's backward begins. Returns the mask of parameters at which ``ready`` should be called."""
        while self._lane < turn.lane:
            self._stack.skip()
            self._lane += 1
        self._stack.open()
        self._lane += 1
        self._turn = turn
        self._fires = [0] * len(self._params)
        self._taken = bytearray(len(self._params))
        return self._mask

    def ready(self, indices: Sequence[int]) -> None:
        """These parameters have their gradients (some again, if reentrant), in this order."""
        fires, usual = self._fires, self._usual_fires
        complete = []
        for index in indices:
            if not self._planned[index]:
                self._params[index].grad = None  # unfrozen in mid-step: from the next one on, in every lane alike
                continue
            fires[index] += 1
            if self._taken[index]:
                raise self._too_late(index)
            if fires[index] == usual[index]:
                complete.append(index)
        if not self._order_is_learned:
            self._seen += [i for i in indices if fires[i] == 1 and self._planned[i]]
        if complete:
            with torch.no_grad():
                self._take(complete)
                self._launch_full(len(self._buckets) - 1)  # the last one leaves at the end: see ``end``
        self._comm.progress()

    def end(self) -> None:
        """The lane's backward is over. In the last lane everything leaves that has not yet; does not wait."""
        rest = [i for i in range(len(self._params)) if self._planned[i] and not self._taken[i]]
        with torch.no_grad():
            self._take(rest)
            if self._turn.is_last:
                # A backward that raises half-way has not sent its last bucket: no other rank can complete the step.
                self._launch_full(len(self._buckets))
            else:
                self._stack.close()
        if self._fires != self._usual_fires:
            self._usual_fires = [max(usual, fires) for usual, fires in zip(self._usual_fires, self._fires, strict=True)]

    def finish(self, present: Sequence[int], scale: float) -> None:
        """Wait, and hand out the averages. ``present[i]``: whether some lane anywhere had a gradient for parameter i."""
        with torch.no_grad():
            for index in self._sparse:
                self._finish_sparse(index, bool(present[index]), scale)
            for pending in self._pending:
                pending.wait()
            for bucket in self._buckets:
                if self._turn.scale is None or (not self._exact and bucket.wire.is_cuda):
                    bucket.total.mul_(scale / bucket.headroom)
                for slot, index in enumerate(bucket.members):
                    self._params[index].grad = bucket.views[0][slot] if present[index] else None
        self._learn()

    # -- taking gradients --------------------------------------------------------------------

    def _take(self, indices: Sequence[int]) -> None:
        """Fold the gradients of ``indices`` (None: zeros) into the stack, or into what leaves."""
        dense, values = [], []
        for index in indices:
            self._taken[index] = 1
            param = self._params[index]
            grad, param.grad = param.grad, None
            if grad is not None and self._turn.share != 0:
                self.present[index] = 1
            else:
                if grad is None and self._fires[index]:
                    raise self._vanished(index)
                grad = None
            if index in self._rows_of_lanes:
                if grad is not None:
                    self._rows_of_lanes[index].append(self._weighted(grad.detach()))
                continue
            dense.append(index)
            values.append(None if grad is None else grad.detach().to_dense() if grad.is_sparse else grad.detach())
        if dense:
            self._settle(dense, values)

    def _settle(self, indices: list[int], values: list[Value]) -> None:
        for room in {self._headroom[index] for index in indices}:
            factor = self._turn.share * room
            if factor not in (0, 1):
                multiply(self._with_headroom(room, indices, values), factor)
        if not self._turn.is_last:
            self._stack.fold(indices, values)
        elif not self._buckets:
            self._open_checkpoints(indices, self._stack.rest(indices, values)[0])
        else:
            scale = self._turn.scale if not self._exact else None  # a fold scales by itself
            for bucket, chosen in self._by_bucket(indices):
                rows = [[views[slot] for slot, _ in chosen] for views in bucket.views]
                if bucket.wire.is_cuda:
                    scale = None
                final = None if scale is None else scale / bucket.headroom
                self._stack.finish([indices[k] for _, k in chosen], [values[k] for _, k in chosen], rows, final)
                bucket.missing -= len(chosen)

    def _open_checkpoints(self, indices: list[int], values: list[Value]) -> None:
        """A lone worker: the fold is the sum of all lanes."""
        scale = self._turn.scale
        assert scale is not None
        for room in {self._headroom[index] for index in indices}:
            if scale / room != 1:
                multiply(self._with_headroom(room, indices, values), scale / room)
        for index, value in zip(indices, values, strict=True):
            self._params[index].grad = value

    def _with_headroom(self, room: float, indices: Sequence[int], values: Sequence[Value]) -> list[Tensor]:
        return [v for i, v in zip(indices, values, strict=True) if v is not None and self._headroom[i] == room]

    def _by_bucket(self, indices: Sequence[int]) -> list[tuple[LaneBucket, list[tuple[int, int]]]]:
        """(bucket, [(slot, place in ``indices``)]) for the buckets touched."""
        found: dict[int, list[tuple[int, int]]] = {}
        for k, index in enumerate(indices):
            bucket, slot = self._place[index]
            found.setdefault(bucket, []).append((slot, k))
        return [(self._buckets[bucket], chosen) for bucket, chosen in found.items()]

    def _weighted(self, grad: Tensor) -> Tensor:
        return grad if self._turn.share == 1 else grad * self._turn.share

    # -- leaving -----------------------------------------------------------------------------

    def _launch_full(self, limit: int) -> None:
        while self._launched < limit and self._turn.is_last and self._buckets[self._launched].missing == 0:
            bucket = self._buckets[self._launched]
            what = f"bucket {bucket.index} of step {self.step}"
            if self._exact:
                scale = None if self._turn.scale is None else self._turn.scale / bucket.headroom
                scale = None if scale == 1 else scale
                self._pending.append(self._comm.fold(bucket.wire, self._fold, scale, what))
            else:
                self._pending.append(self._comm.reduce(bucket.wire, "sum", what))
            self._launched += 1

    def _finish_sparse(self, index: int, present: bool, scale: float) -> None:
        param = self._params[index]
        if not present or not param.requires_grad:
            return
        what = f"sparse gradient of {self._names[index]} of step {self.step}"
        param.grad = fold_sparse(self._comm, param, self._rows_of_lanes[index], scale, what)

    # -- the plan ----------------------------------------------------------------------------

    def _build(self, wanted: list[bool]) -> None:
        """Plan the parameters that want gradients now. Collective: all ranks must (un)freeze before the same step."""
        self._planned = wanted
        dense = [i for i, wants in enumerate(wanted) if wants and i not in self._sparse]
        known = [i for i in self._order if i in set(dense)]
        order = known + [i for i in reversed(dense) if i not in set(known)]  # unseen ones: later layers first
        self.plan = plan_buckets(self._specs, order, self._cap_bytes)
        self._place = {slot.param: (k, s) for k, spec in enumerate(self.plan.buckets) for s, slot in enumerate(spec.slots)}
        self._mask = sentinels(self.plan, len(self._params))
        self._buckets = []  # let go of the old memory before asking for the new
        if self._comm.size > 1:
            width = self._fold.width if self._exact else 1
            self._buckets = [
                LaneBucket(k, spec, width, self._params, self._comm, self._fold.lanes) for k, spec in enumerate(self.plan.buckets)
            ]

    def _learn(self) -> None:
        """Once, adopt the order in which rank 0's gradients became ready."""
        if self._order_is_learned:
            return
        self._order_is_learned = True
        order = list(dict.fromkeys(self._seen + list(range(len(self._params)))))
        agreed = torch.tensor(order, dtype=torch.int64)
        self._comm.broadcast(agreed, 0, f"the bucket order after step {self.step}").wait()
        self._order = agreed.tolist()
        self._planned = []  # build anew

    def _too_late(self, index: int) -> UsageError:
        return UsageError(
            f"parameter {self._names[index]} received its gradient number {self._fires[index]} of a backward in step {self.step} "
            f"after it had been taken: so far it had {self._usual_fires[index]} per backward. The number of reentrant checkpoints "
            "that share it grew during training: pass use_reentrant=False to torch.utils.checkpoint."
        )

    def _vanished(self, index: int) -> UsageError:
        return UsageError(
            f"parameter {self._names[index]} received a gradient in step {self.step}, which was gone before it could be averaged: "
            "a hook of yours takes it (an optimizer inside backward?). Use gradients only after backward() has returned."
        )
