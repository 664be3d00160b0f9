"""Reducer: from "gradient i is ready" to averaged gradients. Readiness, ordered launch, finish.

Knows buckets and the comm; knows nothing of autograd (hooks.py calls it), modules or data.

Note: what a parameter sends
----------------------------
At the end of a synced backward every planned parameter has sent something: its ``grad`` if it has
one (touched now, or accumulated before under ``no_sync``, or left over from an earlier backward of
the same step: then it is equal everywhere, and the mean keeps it), otherwise zeros. Next to it
travels a presence element, 1 or 0, in the tail of the last bucket. A parameter that is absent here
looks at the sum of its presence elements: if some rank had a gradient, the mean is ours too; if
none had, ``grad`` stays as it was, None as in one process. Ranks that lack nothing never look, so
on CUDA nothing synchronises.

Note: when a bucket leaves
--------------------------
Buckets leave in plan order, each when all its gradients are there; the last one, which carries the
presence elements, at the end of the backward, and so do buckets that did not fill. How often a
gradient fires in one backward (more than once only under reentrant checkpointing of a shared
module) is learned from earlier backwards; a parameter never seen before is waited for until the
end. So a backward that raises half-way has not sent its last bucket, and no other rank can
complete the step.

    plan order        bucket 0        bucket 1        bucket 2 (+ presence)
    backward      ....full>launch.....full>launch.....full.....end>launch>wait all
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.comm.base import Comm, Op, Pending
from lockstep.errors import InvariantError, UsageError
from lockstep.gradients.comm_hook import Hook, run_hook
from lockstep.gradients.ddp_bucket import DdpBucket
from lockstep.gradients.param_specs import sentinels, specs_of
from lockstep.gradients.sparse import reduce_sparse
from lockstep.plan.buckets import BucketPlan, plan_buckets


class State(enum.Enum):
    IDLE = "idle"  # between backwards
    OPEN = "open"  # from a backward's first gradient to its end


@dataclass(frozen=True)
class Share:
    """How one backward is averaged: over how many ranks, and whether this one has data (see join)."""

    divisor: int
    active: bool = True
    source: int = 0
    """The rank whose word counts where one must decide (buffers, bucket order): the first with data."""
    unfrozen: bool | None = None
    """Whether some rank unfroze parameters since the plan was made; None: as this rank sees it."""


@dataclass(frozen=True)
class Way:
    """How a bucket becomes a mean: scaled on the way in, by the collective, or afterwards; whichever is free."""

    op: Op
    scale: float | None = None
    scales_after: bool = False


class DdpReducer:
    """Averages the gradients of ``params`` over the ranks of ``comm``.

    ``sparse`` holds the numbers of parameters that get sparse gradients. All ranks call
    ``begin``/``ready``/``launch_rest``/``finish`` once per synced backward.
    """

    def __init__(
        self, params: Sequence[Tensor], names: Sequence[str], comm: Comm, cap_bytes: int, sparse: frozenset[int] = frozenset()
    ) -> None:
        self.step = 0
        self._params, self._names, self._comm, self._cap_bytes = params, names, comm, cap_bytes
        self._sparse = sorted(sparse)
        self._specs = specs_of(params, names)
        self._hook: tuple[Hook, Any] | None = None
        self._usual_fires = [0] * len(params)
        # Until a backward was seen: later layers first. Frozen parameters get no memory until they need it.
        trainable = [i for i, p in enumerate(params) if p.requires_grad and i not in sparse]
        self._next_order: list[int] | None = trainable[::-1]
        self._order_is_learned = False
        self._state = State.IDLE
        self._share = Share(comm.size)
        self._ways: list[Way] = []
        self.plan = BucketPlan((), ())
        self.looks_at = b""
        """1 for the parameters at whose gradient ``ready`` should be called with all that came before."""
        self._buckets: list[DdpBucket] = []
        self._place: dict[int, tuple[int, int]] = {}  # parameter -> (bucket, slot)
        self._position: dict[int, int] = {}  # parameter -> presence element
        self._unplanned: list[int] = []
        self._reset()

    def set_hook(self, hook: Hook, state: Any) -> None:
        if self._hook is not None:
            raise UsageError("a communication hook is registered already; a model takes one, once.")
        self._hook = (hook, state)
        self._ways = []

    # -- one backward ------------------------------------------------------------------------

    def begin(self, share: Share) -> None:
        """Start a backward; ``share`` holds until its end. From here on ``looks_at`` is valid."""
        if self._state is State.OPEN and self._launched and self._comm.size > 1:
            self._comm.abort(  # the next operation raises this, here and on the others
                f"rank {self._comm.rank}'s backward of step {self.step} raised after {self._launched} of {len(self._buckets)} "
                "buckets had left, and cannot be repeated: the others hold half of it. Restart from a checkpoint."
            )
        elif self._state is State.OPEN:
            for bucket, way in zip(self._buckets, self._ways, strict=True):
                bucket.take_back(way.scale)
        if self._next_order is not None:
            self._build(self._next_order)
        self._reset()
        if share != self._share or not self._ways:
            self._share = share
            self._ways = [self._way(bucket) for bucket in self._buckets]
        self._state = State.OPEN

    def ready(self, indices: Sequence[int]) -> None:
        """These parameters have their gradients (some again, if reentrant), in this order."""
        self._require_open("ready")
        fires, usual, place, buckets = self._fires, self._usual_fires, self._place, self._buckets
        for index in indices:
            fires[index] += 1
            home = place.get(index)
            if home is None:
                continue  # sparse, or unfrozen since the plan was made: handled at the end
            bucket, slot = buckets[home[0]], home[1]
            if bucket.holds(slot):
                raise self._too_late(index)
            if fires[index] == usual[index]:
                bucket.offer(slot)
        if not self._order_is_learned:
            self._seen += [i for i in indices if fires[i] == 1]
        with torch.no_grad():
            for bucket, way in zip(buckets[self._launched :], self._ways[self._launched :], strict=True):
                bucket.copy(way.scale)
            while self._launched < len(buckets) - 1 and buckets[self._launched].missing == 0:
                self._launch()
        self._comm.progress()

    def _too_late(self, index: int) -> UsageError:
        return UsageError(
            f"parameter {self._names[index]} received its gradient number {self._fires[index]} of step {self.step} after its "
            f"bucket had been filled: so far it had {self._usual_fires[index]} per backward. The number of reentrant checkpoints "
            "that share it grew during training: pass use_reentrant=False to torch.utils.checkpoint."
        )

    def _vanished(self, index: int) -> UsageError:
        return UsageError(
            f"parameter {self._names[index]} received a gradient in step {self.step}, which was gone before it could be averaged: "
            "a hook of yours takes it (an optimizer inside backward?). Use gradients only after backward() has returned."
        )

    def launch_rest(self) -> None:
        """End of backward: send what has not left yet. Does not wait."""
        self._require_open("launch_rest")
        with torch.no_grad():
            while self._launched < len(self._buckets):
                self._launch()
        if self._hook is not None and self._buckets:
            last = self._buckets[-1]
            self._pending.append(self._comm.reduce(last.control, "sum", f"presence of step {self.step}"))

    def finish(self) -> None:
        """Wait for everything and hand out the averages. Blocks up to the comm's timeout."""
        self._require_open("finish")
        for index in self._sparse:
            self._reduce_sparse(index)
        for pending in self._pending:
            pending.wait()
        for bucket, way in zip(self._buckets, self._ways, strict=True):
            if way.scales_after:
                bucket.flat.mul_(1.0 / self._share.divisor)
        if self._share.active:
            self._adopt_others()
        self._reduce_unplanned()
        self._learn()
        self._state = State.IDLE
        self.step += 1

    # -- launching ---------------------------------------------------------------------------

    def _launch(self) -> None:
        bucket = self._buckets[self._launched]
        is_last = self._launched == len(self._buckets) - 1
        what = f"bucket {bucket.index} of step {self.step}"
        way = self._ways[self._launched]
        absent = bucket.close(way.scale, skip=not self._share.active)
        for index in absent:
            if self._fires[index] and self._share.active and self._params[index].requires_grad:
                raise self._vanished(index)
        self._absent += absent
        if is_last:
            bucket.mark_present([self._position[i] for i in self._absent])
        if self._hook is not None:
            hook, state = self._hook
            self._pending.append(run_hook(hook, state, bucket, is_last, what, self._comm.timeout_s))
        else:
            self._pending.append(self._comm.reduce(bucket.wire, way.op, what))
        self._launched += 1

    def _way(self, bucket: DdpBucket) -> Way:
        if self._hook is not None or self._share.divisor == 1:
            return Way("sum")
        if self._comm.averages(bucket.wire) and self._share.divisor == self._comm.size:
            return Way("mean")
        if bucket.wire.is_cuda:
            return Way("sum", scales_after=True)
        return Way("sum", scale=1.0 / self._share.divisor)

    # -- finishing ---------------------------------------------------------------------------

    def _adopt_others(self) -> None:
        """Parameters without a gradient here take the others' mean, if any rank has one."""
        if not self._absent:
            return
        present = self._buckets[-1].presence()
        for index in self._absent:
            if present[self._position[index]]:
                bucket, slot = self._place[index]
                self._params[index].grad = self._buckets[bucket].views[slot]

    def _reduce_sparse(self, index: int) -> None:
        param = self._params[index]
        grad = param.grad if self._share.active and param.requires_grad else None
        what = f"sparse gradient of {self._names[index]} of step {self.step}"
        with torch.no_grad():
            mean = reduce_sparse(self._comm, param, grad, 1.0 / self._share.divisor, what)
        if mean is not None and self._share.active:
            param.grad = mean

    def _reduce_unplanned(self) -> None:
        """Parameters that were frozen when the plan was made and no longer are: agree, reduce, re-plan.

        All ranks must unfreeze them before the same backward; the agreement is another kind of
        collective than a bucket's, so a rank that does not take part is found, never mixed up.
        """
        if not (self.has_unfrozen() if self._share.unfrozen is None else self._share.unfrozen):
            return
        mine = [0 if not p.requires_grad else 1 if p.grad is None else 2 for p in (self._params[i] for i in self._unplanned)]
        everyone = torch.zeros(self._comm.size, len(mine), dtype=torch.int64)
        self._comm.all_gather(everyone, torch.tensor(mine), f"the newly unfrozen parameters of step {self.step}").wait()
        most = dict(zip(self._unplanned, everyone.amax(0).tolist(), strict=True))
        for index in (i for i, value in most.items() if value == 2):
            param = self._params[index]
            with torch.no_grad():
                has = param.grad is not None and self._share.active and param.requires_grad
                mean = param.grad.to_dense().mul(1.0 / self._share.divisor) if has else torch.zeros_like(param)  # type: ignore[union-attr]
                mean = mean.contiguous()
                self._comm.reduce(mean, "sum", f"the unfrozen {self._names[index]} of step {self.step}").wait()
            if self._share.active:
                param.grad = mean
        self._next_order = [*self.plan.params, *(i for i, value in most.items() if value)]

    def has_unfrozen(self) -> bool:
        """Whether a parameter outside the plan wants gradients now."""
        return any(self._params[i].requires_grad for i in self._unplanned)

    def _learn(self) -> None:
        """Remember how often gradients fire; once, adopt the order in which they became ready."""
        if self._fires != self._usual_fires:
            self._usual_fires = [max(usual, fires) for usual, fires in zip(self._usual_fires, self._fires, strict=True)]
        if self._order_is_learned:
            return
        planned = [i for i in self._seen if i in self._place]
        order = planned + [i for i in self.plan.params if i not in set(planned)]
        if self._next_order is not None:  # newly unfrozen ones follow
            order += [i for i in self._next_order if i not in self._place]
        agreed = torch.tensor(order, dtype=torch.int64)
        if order:
            self._comm.broadcast(agreed, self._share.source, f"the bucket order after step {self.step}").wait()
        self._next_order = agreed.tolist()
        self._order_is_learned = True

    # -- the plan ----------------------------------------------------------------------------

    def _build(self, order: Sequence[int]) -> None:
        """Allocate the buckets of a new plan. Old gradients stay valid: they keep the old buffers alive."""
        self.plan = plan_buckets(self._specs, order, self._cap_bytes)
        self._buckets = []  # let go of the old memory before asking for the new
        self._buckets = [DdpBucket(k, spec, self._params, self._comm) for k, spec in enumerate(self.plan.buckets)]
        self._place = {slot.param: (k, s) for k, spec in enumerate(self.plan.buckets) for s, slot in enumerate(spec.slots)}
        self._position = {param: at for at, param in enumerate(self.plan.params)}
        self._unplanned = [i for i in range(len(self._params)) if i not in self._place and i not in self._sparse]
        self.looks_at = sentinels(self.plan, len(self._params))
        self._ways = []
        self._next_order = None

    def _reset(self) -> None:
        self._fires = [0] * len(self._params)
        self._launched = 0
        self._pending: list[Pending] = []
        for bucket in self._buckets:
            bucket.reset()
        self._absent: list[int] = []
        self._seen: list[int] = []
        self._state = State.IDLE

    def _require_open(self, event: str) -> None:
        if self._state is not State.OPEN:
            raise InvariantError(f"reducer got {event} in state {self._state.value}")
