"""BucketReducer: the part that DdpReducer and LaneReducer share. Counts gradients, plans buckets and launches them in plan order.

Knows parameters, the bucket plan and the comm. Knows nothing of autograd (autograd_hooks.py calls it), modules or data.

Note: when a bucket is launched
-------------------------------
Buckets are launched in plan order, each when all its gradients are there. The last bucket is always launched at the end of the
backward, and so is every bucket that did not fill. A backward that raises half-way has therefore not sent its last bucket, and no
other rank can complete the step.

    plan order        bucket 0        bucket 1        bucket 2
    backward      ....full>launch.....full>launch.....full.....end>launch>wait for all

A gradient fires more than once in one backward only if reentrant checkpoints share its module. The reducer learns from earlier
backwards how often each gradient fires. It waits until the end of the backward for a gradient that it has never seen.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from lockstep.comm.base import Comm, Pending
from lockstep.errors import UsageError
from lockstep.gradients.bucket_memory import reals_of
from lockstep.plan.buckets import BucketPlan, BucketSpec, ParamSpec, plan_buckets
from lockstep.recording.recorder import Recorder

_profiler_runs: Callable[[], bool] = torch._C._autograd._profiler_enabled


class Bucket:
    """The memory of one ``BucketSpec``: ``rows`` rows of ``length`` elements, and a view of every row for every gradient.

        wire    | row 0: slot 0 |pad| slot 1 ... | row 1: slot 0 |pad| slot 1 ... | ... | presence |

    ``wire`` is what the comm sends (bucket_memory.py allocates it). ``flat`` is row 0 in the dtype of the gradients: it becomes the
    result, and ``param.grad`` becomes a view of it. ``views[row][slot]`` has the layout of the slot's parameter. ``presence`` are
    the last elements. ``missing`` counts the gradients that this backward has not put into the bucket yet.
    """

    def __init__(self, index: int, spec: BucketSpec, params: Sequence[Tensor], wire: Tensor, length: int, rows: int = 1) -> None:
        self.index, self.wire = index, wire
        self.members = [slot.param for slot in spec.slots]
        self.params = [params[i] for i in self.members]
        memory = torch.view_as_complex(wire.view(-1, 2)) if reals_of(spec) == 2 else wire
        row_tensors = [memory[r * length : (r + 1) * length] for r in range(rows)]
        self.flat, self.presence = row_tensors[0], memory[rows * length :]
        self.views = [
            [_view_like(row, slot.offset, param) for slot, param in zip(spec.slots, self.params, strict=True)]
            for row in row_tensors
        ]
        self.missing = len(self.members)


B = TypeVar("B", bound=Bucket)


class BucketReducer(ABC, Generic[B]):
    """Base of the reducers. A subclass says what happens to complete gradients (``_take``) and how a bucket is sent (``_launch``).

    ``sparse`` holds the indices of the parameters that get sparse gradients: they have no place in a bucket. ``dtypes`` holds the
    dtype of each gradient in its bucket. Default: that of its parameter.
    """

    _plans_kept = 1
    """How many plans keep their buckets: more than 1 if parameters are frozen and unfrozen in turn (two models in one step)."""

    def __init__(
        self,
        params: Sequence[Tensor],
        names: Sequence[str],
        comm: Comm,
        cap_bytes: int,
        sparse: frozenset[int] = frozenset(),
        dtypes: Sequence[torch.dtype] | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.step = 0
        self._recorder = recorder or Recorder()
        self.plan = BucketPlan((), ())
        self._params, self._names, self._comm, self._cap_bytes, self._sparse = params, names, comm, cap_bytes, sorted(sparse)
        self._dtypes = [p.dtype for p in params] if dtypes is None else dtypes
        self._specs = [
            ParamSpec(name, p.numel(), dtype.itemsize, str(dtype), str(p.device))
            for name, p, dtype in zip(names, params, self._dtypes, strict=True)
        ]
        self._usual_fires = [0] * len(params)  # how often each gradient fired per backward, at most, so far
        self._order = list(range(len(params)))[::-1]  # in which gradients become ready; until it is learned: later layers first
        self._order_is_learned = False
        self._seen: list[int] = []  # parameters in the order in which they fired, while the order is not learned
        self._planned: list[bool] = []  # for every parameter; empty: a new plan is needed
        self._kept: dict[bytes, tuple[BucketPlan, list[B]]] = {}  # planned -> the plan and its buckets, the latest ones
        self._place: dict[int, tuple[int, int]] = {}  # parameter -> (bucket, slot)
        self._report_mask = b""
        self._buckets: list[B] = []
        self._reset()

    @abstractmethod
    def _allocate(self) -> list[B]:
        """Allocate the buckets of ``self.plan``. Collective: all ranks allocate the same buckets in the same order."""

    @abstractmethod
    def _take(self, indices: Sequence[int]) -> None:
        """Use the gradients of these parameters, which are complete; lower ``missing`` of their buckets."""

    @abstractmethod
    def _launch(self, bucket: B) -> Pending:
        """Send a bucket. Does not wait."""

    # -- one backward ------------------------------------------------------------------------

    def _reset(self) -> None:
        """A backward begins: no gradient has fired and no bucket was launched."""
        self._fires = [0] * len(self._params)
        self._taken = bytearray(len(self._params))  # 1: another gradient of this parameter would come too late
        self._pending: list[Pending] = []
        self._launched = 0
        for bucket in self._buckets:
            bucket.missing = len(bucket.members)

    def ready(self, indices: Sequence[int]) -> None:
        """These parameters have received gradients, in this order. (An index may come again under reentrant checkpointing.)"""
        fires, usual, taken, planned = self._fires, self._usual_fires, self._taken, self._planned
        complete = []
        for index in indices:
            fires[index] += 1
            if taken[index]:
                raise self._too_late(index)
            if fires[index] == usual[index] and planned[index]:
                complete.append(index)
        self.note_order(indices)
        if complete:
            with torch.no_grad():
                self._take(complete)
                self._launch_buckets(at_end=False)
        self._comm.progress()

    def note_order(self, indices: Sequence[int]) -> None:
        """These parameters have received gradients, in this order, which may not be complete yet."""
        if not self._order_is_learned:
            self._seen += indices

    def _launch_buckets(self, at_end: bool) -> None:
        """Launch the buckets that are full and next in plan order, except the last one; at the end of a backward, all the rest."""
        limit = len(self._buckets) - (not at_end)
        while self._launched < limit and (at_end or self._buckets[self._launched].missing == 0):
            bucket = self._buckets[self._launched]
            self._recorder.bucket_sent(bucket.index, bucket.wire.nbytes)
            if _profiler_runs():  # record_function costs microseconds even if no profiler runs
                with torch.profiler.record_function(f"lockstep::reduce bucket {bucket.index}"):
                    self._pending.append(self._launch(bucket))
            else:
                self._pending.append(self._launch(bucket))
            self._launched += 1

    def _too_late(self, index: int) -> UsageError:
        return UsageError(
            f"parameter {self._names[index]} received gradient number {self._fires[index]} of one backward in step {self.step} "
            f"after the reducer had used its gradient: earlier backwards gave it {self._usual_fires[index]}. The number of "
            "reentrant checkpoints that share it grew during training. Pass use_reentrant=False to torch.utils.checkpoint."
        )

    def _vanished(self, index: int) -> UsageError:
        return UsageError(
            f"parameter {self._names[index]} received a gradient in step {self.step}, but param.grad was None before the gradient "
            "could be averaged: one of your hooks removes it (an optimizer inside backward?). Use gradients only after backward() "
            "has returned."
        )

    # -- the plan ----------------------------------------------------------------------------

    def _build_plan(self, planned: list[bool]) -> None:
        """Plan and allocate buckets for the ``planned`` parameters. Collective: ``planned`` must be equal on all ranks.

        Gradients that are views of old buckets stay valid: they keep the old memory alive.
        """
        if not self._planned:
            self._kept.clear()  # the order or the workers have changed
        self._planned = planned
        order = [i for i in self._order if planned[i] and i not in self._sparse]
        kept = self._kept.pop(bytes(planned), None)
        self.plan = plan_buckets(self._specs, order, self._cap_bytes) if kept is None else kept[0]
        self._place = {slot.param: (k, s) for k, spec in enumerate(self.plan.buckets) for s, slot in enumerate(spec.slots)}
        self._report_mask = self.plan.report_mask(len(self._params))
        self._buckets = []  # release the old memory before allocating the new
        while len(self._kept) >= self._plans_kept:
            del self._kept[next(iter(self._kept))]
        self._buckets = self._allocate() if kept is None else kept[1]
        self._kept[bytes(planned)] = self.plan, self._buckets

    def _learn_fires(self) -> None:
        """After a backward: remember how often each gradient fired."""
        if self._fires != self._usual_fires:
            self._usual_fires = [max(usual, fires) for usual, fires in zip(self._usual_fires, self._fires, strict=True)]

    def _learn_order(self, source: int) -> None:
        """After the first step: adopt the order in which the gradients of rank ``source`` became ready. Collective, once."""
        if self._order_is_learned:
            return
        order = torch.tensor(list(dict.fromkeys([*self._seen, *self._order])), dtype=torch.int64)
        self._comm.broadcast(order, source, f"the bucket order after step {self.step}").wait()
        self._order, self._order_is_learned, self._seen = order.tolist(), True, []
        self._planned = []  # the next step makes a new plan


def _view_like(memory: Tensor, offset: int, param: Tensor) -> Tensor:
    """A view of ``memory`` with the parameter's shape, and with its strides if they are dense (for example channels_last)."""
    if _is_dense(param):
        return memory.as_strided(param.shape, param.stride(), offset + memory.storage_offset())
    return memory[offset : offset + param.numel()].view(param.shape)


def _is_dense(param: Tensor) -> bool:
    """Whether the strides visit ``numel`` consecutive elements, in any order of the dimensions."""
    expected = 1
    for stride, extent in sorted((param.stride(d), param.shape[d]) for d in range(param.dim()) if param.shape[d] != 1):
        if stride != expected:
            return False
        expected *= extent
    return param.numel() > 0
