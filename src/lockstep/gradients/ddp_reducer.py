"""DdpReducer: averages the gradients of one backward over all ranks (replicate and DistributedDataParallel).

Note: what a parameter sends
----------------------------
At the end of a synchronised backward every planned parameter has sent something. A parameter with a ``grad`` sends it. (The
gradient may come from this backward, from earlier ones under ``no_sync``, or from an earlier synchronised backward of the same
step; in the last case it is equal on all ranks, and the mean keeps it.) A parameter without a ``grad`` sends zeros, even if its
hook fired: autograd calls the hook of a parameter whose gradient is undefined (a custom function returned None for it). A presence
element, 1 or 0, for every parameter is sent at the end of the last bucket. A rank reads the sums of the presence elements only if
it lacks a gradient: if some rank had one, the mean becomes ``grad``; if none had, ``grad`` stays None, as in one process. On CUDA
a rank that lacks nothing never synchronises with the device.

A rank that is alone sends nothing: its gradients stay where autograd has put them, and it has no buckets. Only a communication
hook or another ``reduce_dtype`` needs buckets then, because they change the gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.comm.base import Comm, Op, Pending
from lockstep.errors import TorchUsageError
from lockstep.gradients.bucket_memory import allocate
from lockstep.gradients.bucket_reducer import BucketReducer
from lockstep.gradients.comm_hook import Hook, run_hook
from lockstep.gradients.ddp_bucket import DdpBucket
from lockstep.gradients.sparse import reduce_sparse


@dataclass(frozen=True)
class Averaging:
    """How one backward is averaged. Inside ``join`` it differs from backward to backward."""

    divisor: int
    active: bool = True
    """Whether this rank still has data. If not, it sends zeros and keeps its own gradients."""
    source: int = 0
    """The rank whose buffers and bucket order all ranks take: the first rank that still has data."""
    unfrozen: bool | None = None
    """Whether some rank unfroze parameters since the plan was made. None: every rank decides for itself."""


@dataclass(frozen=True)
class _Scaling:
    """How a bucket's sum becomes a mean: by a factor while copying, by the collective, or by a factor afterwards."""

    op: Op
    before: float | None = None
    after: bool = False


class CastPending:
    """A reduction in another dtype: the constructor casts and sends, ``wait`` copies the sum back into ``wire``."""

    def __init__(self, comm: Comm, wire: Tensor, dtype: torch.dtype, what: str) -> None:
        self._wire, self._cast = wire, wire.to(dtype)
        self._pending = comm.reduce(self._cast, "sum", what)

    def wait(self, timeout_s: float | None = None) -> None:
        self._pending.wait(timeout_s)
        self._wire.copy_(self._cast)

    def done(self) -> bool:
        return self._pending.done()


class DdpReducer(BucketReducer[DdpBucket]):
    """Averages the gradients of ``params`` over the ranks of ``comm``.

    All ranks call ``begin``, ``ready`` (any number of times), ``end`` and ``finish`` for each synchronised backward.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        names: Sequence[str],
        comm: Comm,
        cap_bytes: int,
        sparse: frozenset[int] = frozenset(),
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(params, names, comm, cap_bytes, sparse)
        self._reduce_dtype = reduce_dtype
        self._hook: tuple[Hook, Any] | None = None
        self._in_backward = False
        self._averaging = Averaging(comm.size)
        self._scalings: list[_Scaling] = []
        # Parameters that are frozen now get no memory until they are unfrozen.
        self._wanted = [p.requires_grad and i not in sparse for i, p in enumerate(params)]
        self._unplanned: list[int] = []
        self._suspects: set[int] = set()
        """Parameters whose hooks have fired without leaving a gradient. It was undefined, or a hook of the user took it away."""
        self._defined: set[int] = set()
        """The suspects that had a gradient in this backward when their hooks fired."""

    def set_reduce_dtype(self, dtype: torch.dtype) -> None:
        """Send gradients in ``dtype`` from the next backward on. Equal on all ranks."""
        self._reduce_dtype, self._scalings = dtype, []
        self._plan_anew_if_alone()

    def set_hook(self, hook: Hook, state: Any) -> None:
        """Send every bucket through ``hook(state, bucket)`` instead of the comm. Raises TorchUsageError the second time."""
        if self._hook is not None:
            raise TorchUsageError("a communication hook is already registered. A model takes one hook, once.")
        self._hook = (hook, state)
        self._scalings = []
        self._plan_anew_if_alone()

    def _plan_anew_if_alone(self) -> None:
        """A rank that is alone has buckets only if it sends something else than gradients."""
        if self._comm.size == 1:
            self._planned = []

    @property
    def hook_name(self) -> str:
        """The name of the communication hook, or "" if there is none."""
        return "" if self._hook is None else getattr(self._hook[0], "__qualname__", type(self._hook[0]).__name__)

    @property
    def order_is_learned(self) -> bool:
        """Whether the buckets follow the order in which gradients become ready: from the end of the first backward on."""
        return self._order_is_learned

    # -- one backward ------------------------------------------------------------------------

    def begin(self, averaging: Averaging) -> bytes:
        """Start a backward. Returns the mask of parameters at whose gradient ``ready`` should be called."""
        if self._in_backward:
            self._recover_from_exception()
        if self._wanted != self._planned:
            self._build_plan(list(self._wanted))
            self._position = {param: at for at, param in enumerate(self.plan.params)}  # parameter -> presence element
            self._unplanned = [i for i, wanted in enumerate(self._wanted) if not wanted and i not in self._sparse]
            self._scalings = []
        self._reset()
        self._absent: list[int] = []
        for bucket in self._buckets:
            bucket.ready_slots = []
        if averaging != self._averaging or not self._scalings:
            self._averaging = averaging
            self._scalings = [self._scaling(bucket) for bucket in self._buckets]
        self._in_backward = True
        if not self._buckets:
            return bytes(len(self._params))
        return self._report_mask if not self._suspects else self._mask_with_suspects()

    def _recover_from_exception(self) -> None:
        """The last backward raised. It can be repeated if nothing was sent."""
        if self._launched and self._comm.size > 1:
            self._comm.abort(  # the next operation raises this, here and on the other ranks
                f"the backward of step {self.step} raised on rank {self._comm.rank} after {self._launched} of "
                f"{len(self._buckets)} buckets were sent. It cannot be repeated, because the other ranks have half of its "
                "gradients. Restart from a checkpoint."
            )
            return
        for bucket, scaling in zip(self._buckets, self._scalings, strict=True):
            bucket.undo_scale(scaling.before, self._taken)

    def _mask_with_suspects(self) -> bytes:
        """From their second backward on, suspects are reported one by one."""
        self._defined = set()
        return bytes(bit or index in self._suspects for index, bit in enumerate(self._report_mask))

    def ready(self, indices: Sequence[int]) -> None:
        if not self._buckets:
            self.note_order(indices)
            return
        if self._suspects and indices and indices[-1] in self._suspects and self._params[indices[-1]].grad is not None:
            self._defined.add(indices[-1])
        super().ready(indices)

    def _take(self, indices: Sequence[int]) -> None:
        buckets, place = self._buckets, self._place
        for index in indices:
            k, slot = place[index]
            bucket = buckets[k]
            bucket.ready_slots.append(slot)
            bucket.missing -= 1
        for bucket in buckets[self._launched :]:
            if bucket.copies_early and bucket.ready_slots:
                bucket.copy_ready(self._scalings[bucket.index].before, self._taken)

    def end(self) -> None:
        """End of the backward: send the buckets that were not sent yet. Does not wait."""
        for index in self._defined:
            if self._params[index].grad is None:
                raise self._vanished(index)
        with torch.no_grad():
            self._launch_buckets(at_end=True)
        if self._hook is not None and self._buckets:
            self._pending.append(self._comm.reduce(self._buckets[-1].presence, "sum", f"presence of step {self.step}"))

    def finish(self) -> None:
        """Wait for all buckets and set the averages. Blocks up to the comm's timeout."""
        for index in self._sparse:
            self._reduce_sparse(index)
        for pending in self._pending:
            pending.wait()
        for bucket, scaling in zip(self._buckets, self._scalings, strict=True):
            if scaling.after:
                bucket.flat.mul_(1.0 / self._averaging.divisor)
        if self._averaging.active and self._absent:
            self._set_absent_gradients()
        self._reduce_unplanned()
        self._learn_fires()
        self._learn_order(self._averaging.source)
        self._in_backward = False
        self.step += 1

    def _too_late(self, index: int) -> TorchUsageError:
        return TorchUsageError(str(super()._too_late(index)))

    def _vanished(self, index: int) -> TorchUsageError:
        return TorchUsageError(str(super()._vanished(index)))

    # -- launching ---------------------------------------------------------------------------

    def _allocate(self) -> list[DdpBucket]:
        if self._comm.size == 1 and self._hook is None and self._reduce_dtype is None:
            return []  # gradients stay where autograd has put them
        specs = self.plan.buckets
        wires = allocate(specs, [spec.numel + spec.presence for spec in specs], self._comm)
        return [DdpBucket(k, spec, self._params, wires[k], spec.numel) for k, spec in enumerate(specs)]

    def _launch(self, bucket: DdpBucket) -> Pending:
        scaling, active = self._scalings[bucket.index], self._averaging.active
        absent = bucket.complete(scaling.before, self._taken, skip=not active)
        self._absent += absent
        if absent and active:
            self._suspects.update(i for i in absent if self._fires[i] and self._params[i].requires_grad)
        is_last = bucket.index == len(self._buckets) - 1
        if is_last:
            bucket.set_presence([self._position[i] for i in self._absent])
        what = f"bucket {bucket.index} of step {self.step}"
        if self._hook is not None:
            hook, state = self._hook
            return run_hook(hook, state, bucket, is_last, what, self._comm.timeout_s)
        if self._reduce_dtype is not None and self._is_cast(bucket):
            return CastPending(self._comm, bucket.wire, self._reduce_dtype, what)
        return self._comm.reduce(bucket.wire, scaling.op, what)

    def _is_cast(self, bucket: DdpBucket) -> bool:
        """Whether the bucket is sent in another dtype than its own. (Complex gradients never are.)"""
        return self._reduce_dtype not in (None, bucket.wire.dtype) and not bucket.flat.is_complex()

    def _scaling(self, bucket: DdpBucket) -> _Scaling:
        divisor = self._averaging.divisor
        if self._hook is not None or divisor == 1:
            return _Scaling("sum")
        if self._is_cast(bucket):
            return _Scaling("sum", before=1.0 / divisor)  # before the cast: a sum may overflow in a low precision
        if self._comm.averages(bucket.wire) and divisor == self._comm.size:
            return _Scaling("mean")
        if bucket.wire.is_cuda:
            return _Scaling("sum", after=True)
        return _Scaling("sum", before=1.0 / divisor)

    # -- finishing ---------------------------------------------------------------------------

    def _set_absent_gradients(self) -> None:
        """Parameters without a gradient on this rank take the mean of the other ranks, if some rank has a gradient."""
        present = self._buckets[-1].read_presence()
        for index in self._absent:
            if present[self._position[index]]:
                bucket, slot = self._place[index]
                self._params[index].grad = self._buckets[bucket].gradients[slot]

    def _reduce_sparse(self, index: int) -> None:
        param = self._params[index]
        grad = param.grad if self._averaging.active and param.requires_grad else None
        what = f"sparse gradient of {self._names[index]} of step {self.step}"
        with torch.no_grad():
            mean = reduce_sparse(self._comm, param, grad, 1.0 / self._averaging.divisor, what)
        if mean is not None and self._averaging.active:
            param.grad = mean

    def has_unfrozen(self) -> bool:
        """Whether a parameter outside the plan requires gradients now."""
        return any(self._params[i].requires_grad for i in self._unplanned)

    def _reduce_unplanned(self) -> None:
        """Average the parameters that were unfrozen since the plan was made, and plan them from the next backward on.

        All ranks must unfreeze them before the same backward. The ranks first gather which parameters these are: that is another
        kind of collective than a bucket's, so a rank that does not take part is detected, and gradients are never mixed up.
        """
        unfrozen = self._averaging.unfrozen
        if not (self.has_unfrozen() if unfrozen is None else unfrozen):
            return
        mine = [0 if not p.requires_grad else 1 if p.grad is None else 2 for p in (self._params[i] for i in self._unplanned)]
        everyone = torch.zeros(self._comm.size, len(mine), dtype=torch.int64)
        self._comm.all_gather(everyone, torch.tensor(mine), f"the newly unfrozen parameters of step {self.step}").wait()
        for index, most in zip(self._unplanned, everyone.amax(0).tolist(), strict=True):
            self._wanted[index] = most > 0
            if most == 2:
                self._reduce_alone(index)

    def _reduce_alone(self, index: int) -> None:
        """Average one gradient outside the buckets."""
        param, active = self._params[index], self._averaging.active
        with torch.no_grad():
            grad = param.grad if active and param.requires_grad else None
            mean = torch.zeros_like(param) if grad is None else grad.to_dense().mul(1.0 / self._averaging.divisor)
            mean = mean.contiguous()
            self._comm.reduce(mean, "sum", f"the unfrozen {self._names[index]} of step {self.step}").wait()
        if active:
            param.grad = mean
