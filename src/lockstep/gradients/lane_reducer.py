"""LaneReducer: averages the gradients of all lanes of a step, with the same bits for every assignment of lanes to workers.

Knows buckets and the comm; knows nothing of autograd, modules, data or optimizers. A worker runs its lanes one after the other.
The reducer takes each lane's gradients from ``param.grad`` as they become ready, multiplies them by the lane's share, and adds
them to the partial sums of the lanes before (partial_sums.py). In the last lane the partial sums go to the buckets, which are
launched in plan order while the backward runs:

    lane 2      g g g g          taken, kept
    lane 3      g g g g          taken, added to lane 2's: node (2,4) of the tree, into the buckets
                  full>launch  ... end>launch the rest>wait       comm.fold completes the tree

Until then ``param.grad`` is None: the step has no gradient yet. A worker that is alone has no buckets: its sum is the gradient.
With ``exact=False`` a worker adds its lanes one after the other, and the buckets are all-reduced in the order the backend chooses.

Note: sums in another dtype
---------------------------
With ``reduce_dtype`` gradients of a less precise dtype are cast when they are taken, and multiplied, added and sent in that dtype.
The total is rounded once, to the dtype of the parameter. ``_rounded`` holds the memory of the rounded gradients, which each step
writes again, like a bucket. The sums of a worker that is alone are kept in ``_wide_totals`` until ``finish`` has applied the
correction, so that they are rounded once too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.comm.base import Comm, Pending
from lockstep.errors import UsageError
from lockstep.gradients.bucket_memory import allocate, length_of_row
from lockstep.gradients.bucket_reducer import Bucket, BucketReducer
from lockstep.gradients.control_word import COUNTED, WEIGHED
from lockstep.gradients.partial_sums import PartialSums, Value, cast, headroom_of, multiply, sum_dtype
from lockstep.gradients.sparse import fold_sparse
from lockstep.plan.tree import Fold, carries
from lockstep.recording.recorder import Recorder


class LaneWeights:
    """The weights of this worker's lanes in one step, and the factors that make a weighted mean of them.

    A lane's weight is its number of samples, or what the user passed to ``run.weigh``. The step's gradient is sum(weight *
    gradient) / sum(weight) over all lanes. It is computed as sum(share * gradient) * scale * correction:

        share        weight / (largest number of samples of a lane): 1 for most lanes, which costs no multiplication
        scale        (largest number of samples of a lane) / (samples of all lanes): known before the step, so it is applied when
                     a bucket is sent
        correction   (samples of all lanes) / (weights of all lanes): 1 unless the user weighed or skipped a lane; known when the
                     control words are exchanged

    ``counts`` holds the number of samples of every lane of the run, ``mine`` the weight of each lane of this worker.
    """

    def __init__(self, counts: Sequence[int], my_lanes: tuple[int, int]) -> None:
        self.counts, self._unit = counts, max(counts)
        self.mine = {lane: float(counts[lane]) for lane in range(*my_lanes)}
        self._weighed: set[int] = set()
        self._skipped: set[int] = set()

    def weigh(self, lane: int, weight: float) -> None:
        """Give a lane this weight instead of its number of samples. A lane without samples keeps weight 0."""
        if not (weight >= 0 and math.isfinite(weight)):
            raise UsageError(
                f"run.weigh({weight}) is not a weight. Pass a finite number of samples, tokens, ... that is 0 or more."
            )
        if weight == 0:
            self.skip(lane)
        elif self.counts[lane]:
            self.mine[lane] = float(weight)
            self._weighed.add(lane)
            self._skipped.discard(lane)

    def skip(self, lane: int) -> None:
        """Let a lane count for nothing."""
        self.mine[lane] = 0.0
        self._skipped.add(lane)
        self._weighed.discard(lane)

    def counts_for_something(self, lane: int) -> bool:
        return self.mine[lane] > 0

    def kinds(self) -> int:
        """Returns the bits WEIGHED (the user weighed a lane of this worker) and COUNTED (a lane with samples was not weighed)."""
        counted = any(self.counts[lane] and lane not in self._weighed and lane not in self._skipped for lane in self.mine)
        return (WEIGHED if self._weighed else 0) | (COUNTED if counted else 0)

    def share(self, lane: int) -> float:
        return self.mine[lane] / self._unit if len(self.counts) > 1 else float(self.mine[lane] > 0)

    @property
    def scale(self) -> float:
        return self._unit / sum(self.counts) if len(self.counts) > 1 else 1.0

    def correction(self, weights: Sequence[float]) -> float:
        """Returns 0 if all ``weights`` (of every lane of the run) are 0: then the step has no gradient."""
        total = math.fsum(weights)
        return 0.0 if total == 0 else sum(self.counts) / total if len(self.counts) > 1 else 1.0

    def scale_of_buffers(self, weights: Sequence[float]) -> float:
        """``scale * correction``, rounded once."""
        return self._unit / math.fsum(weights) if len(self.counts) > 1 else 1.0


@dataclass(frozen=True)
class WeightedMicroBatch:
    """One lane on this worker. ``share`` and ``scale``: see LaneWeights. ``is_last``: this worker's last lane with samples.

    If ``share`` is 0, the gradients count as zeros.
    """

    lane: int
    share: float
    scale: float
    is_last: bool


class LaneReducer(BucketReducer[Bucket]):
    """Averages the gradients of ``params`` over all lanes. ``fold`` says which rank has which lanes.

    Each phase: ``start_phase``; for each lane with samples ``begin``, ``ready`` (any number of times) and ``end``; after the last
    lane ``finish``. All ranks must call them for the same step.
    """

    _plans_kept = 2

    def __init__(
        self,
        params: Sequence[Tensor],
        names: Sequence[str],
        comm: Comm,
        fold: Fold,
        cap_bytes: int,
        sparse: frozenset[int] = frozenset(),
        exact: bool = True,
        reduce_dtype: torch.dtype | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        super().__init__(params, names, comm, cap_bytes, sparse, [sum_dtype(p.dtype, reduce_dtype) for p in params], recorder)
        self._exact = exact
        self._is_wide = [dtype != p.dtype for dtype, p in zip(self._dtypes, params, strict=True)]
        self._rounded: dict[int, Tensor] = {}
        self._assign_lanes(fold)

    def rebind(self, comm: Comm, fold: Fold) -> None:
        """Continue with another set of workers. They take the bucket order of rank 0. Collective."""
        self._comm, self._buckets = comm, []
        self._kept.clear()
        learned = torch.tensor([int(self._order_is_learned), *self._order], dtype=torch.int64)
        comm.broadcast(learned, 0, "the bucket order").wait()
        self._order_is_learned, self._order = bool(learned[0]), learned[1:].tolist()
        self._assign_lanes(fold)

    def _assign_lanes(self, fold: Fold) -> None:
        lanes = fold.lanes_of(self._comm.rank)
        self._fold, self._first_lane = fold, lanes[0]
        self._carries = carries(fold.lanes, *lanes) if self._exact else (0, *(1 for _ in range(*lanes)))[:-1]
        self._headroom = [headroom_of(dtype, fold.lanes) for dtype in self._dtypes]
        self._planned = []  # the number of rows of a bucket depends on the fold

    # -- one step ----------------------------------------------------------------------------

    def start_phase(self, step: int) -> None:
        """A phase of a step begins, possibly again: nothing is kept of an unfinished one."""
        self.step = step
        planned = [p.requires_grad for p in self._params]
        if planned != self._planned:
            self._build_plan(planned)
        self._partial_sums = PartialSums(len(self._params), self._carries)
        self._next_lane = self._first_lane
        self._sparse_gradients: dict[int, list[Tensor]] = {i: [] for i in self._sparse}
        self._wide_totals: dict[int, Tensor] = {}
        self.present = bytearray(len(self._params))
        """1 for the parameters that had a gradient in some lane of this worker."""

    def begin(self, micro_batch: WeightedMicroBatch) -> bytes:
        """A lane's backward begins. Returns the mask of parameters at whose gradient ``ready`` should be called."""
        while self._next_lane < micro_batch.lane:
            self._partial_sums.skip_lane()
            self._next_lane += 1
        self._partial_sums.start_lane()
        self._next_lane += 1
        self._micro_batch = micro_batch
        self._reset()
        return self._report_mask

    def end(self) -> None:
        """A lane's backward is over. In the last lane all buckets are sent that were not sent yet. Does not wait."""
        rest = []
        for index, taken in enumerate(self._taken):
            if not taken and self._planned[index]:
                rest.append(index)
            elif not taken:
                self._params[index].grad = None  # unfrozen in the middle of a step: it takes part from the next step on
        with torch.no_grad():
            self._take(rest)
            if self._micro_batch.is_last:
                self._launch_buckets(at_end=True)
            else:
                self._partial_sums.end_lane()
        self._learn_fires()

    def finish(self, present: Sequence[int], correction: float) -> None:
        """Wait for all buckets and set the averages. ``present[i]``: whether a lane of the run had a gradient of parameter i."""
        with torch.no_grad():
            for index in self._sparse:
                self._finish_sparse(index, bool(present[index]), self._micro_batch.scale * correction)
            for number, pending in enumerate(self._pending):
                pending.wait()
                self._recorder.bucket_done(number, getattr(pending, "done_ns", 0))  # 0: the transport does not say when
            if not self._buckets:
                self._finish_alone(correction)
            for bucket in self._buckets:
                is_scaled = self._exact or not bucket.wire.is_cuda
                factor = correction if is_scaled else self._scale_of(bucket) * correction
                if factor != 1:
                    bucket.flat.mul_(factor)
                self._set_averages(
                    bucket.members, [v if present[i] else None for i, v in zip(bucket.members, bucket.views[0], strict=True)]
                )
        self._learn_order(0)

    def _finish_alone(self, correction: float) -> None:
        if correction != 1:
            dense = [g for i, p in enumerate(self._params) if i not in self._sparse and (g := p.grad) is not None]
            multiply([*dense, *self._wide_totals.values()], correction)
        self._set_averages(list(self._wide_totals), list(self._wide_totals.values()))
        self._wide_totals = {}

    def _set_averages(self, indices: Sequence[int], averages: Sequence[Value]) -> None:
        rounded, wide = [], []
        for index, average in zip(indices, averages, strict=True):
            if average is not None and self._is_wide[index]:
                if index not in self._rounded:
                    self._rounded[index] = torch.empty_like(self._params[index])
                rounded.append(self._rounded[index])
                wide.append(average)
                average = self._rounded[index]
            self._params[index].grad = average
        if wide:
            torch._foreach_copy_(rounded, wide)

    # -- taking gradients --------------------------------------------------------------------

    def _take(self, indices: Sequence[int]) -> None:
        """Add the gradients of ``indices`` (zeros if there is none) to the partial sums. In the last lane, fill the buckets."""
        params, taken, fires, present, share = self._params, self._taken, self._fires, self.present, self._micro_batch.share
        dense: list[int] = []
        values: list[Value] = []
        for index in indices:
            taken[index] = 1
            param = params[index]
            grad, param.grad = param.grad, None
            if grad is None:
                if fires[index]:
                    raise self._vanished(index)
            elif share == 0:
                grad = None
            else:
                present[index] = 1
                grad = grad.detach()
            if index in self._sparse_gradients:
                if grad is not None:
                    grad = grad.to(self._dtypes[index])
                    self._sparse_gradients[index].append(grad if share == 1 else grad * share)
                continue
            dense.append(index)
            values.append(grad.to_dense() if grad is not None and grad.is_sparse else grad)
        if dense:
            if any(self._is_wide) and not self._are_copied_as_they_are():
                values = cast(values, [self._dtypes[index] for index in dense])
            self._multiply(dense, values, lambda headroom: share * headroom)
            self._add(dense, values)

    def _are_copied_as_they_are(self) -> bool:
        """Whether the gradients of this lane go to the buckets without arithmetic: then the copy casts them."""
        now, scales_by_itself = self._micro_batch, self._exact or (bool(self._buckets) and self._buckets[0].wire.is_cuda)
        return bool(self._buckets) and now.is_last and now.share == 1 and scales_by_itself and self._partial_sums.copies_last_lane

    def _add(self, indices: list[int], values: list[Value]) -> None:
        if not self._micro_batch.is_last:
            self._partial_sums.add(indices, values)
        elif not self._buckets:
            self._set_gradients(indices, self._partial_sums.totals(indices, values)[0])
        else:
            self._fill_buckets(indices, values)

    def _set_gradients(self, indices: list[int], totals: list[Value]) -> None:
        """This worker is alone: its total is the sum of all lanes."""
        scale = self._micro_batch.scale
        self._multiply(indices, totals, lambda headroom: scale / headroom)
        for index, total in zip(indices, totals, strict=True):
            if not self._is_wide[index]:
                self._params[index].grad = total
            elif total is not None:
                self._wide_totals[index] = total

    def _fill_buckets(self, indices: list[int], values: list[Value]) -> None:
        chosen: dict[int, list[tuple[int, int]]] = {}  # bucket -> [(slot, position in indices)]
        for at, index in enumerate(indices):
            k, slot = self._place[index]
            chosen.setdefault(k, []).append((slot, at))
        for k, slots in chosen.items():
            bucket = self._buckets[k]
            rows = [[views[slot] for slot, _ in slots] for views in bucket.views]
            scale = None if self._exact or bucket.wire.is_cuda else self._scale_of(bucket)  # a fold scales by itself
            self._partial_sums.write_totals([indices[at] for _, at in slots], [values[at] for _, at in slots], rows, scale)
            bucket.missing -= len(slots)

    def _multiply(self, indices: Sequence[int], values: Sequence[Value], factor: Callable[[float], float]) -> None:
        """Multiply each value by ``factor(headroom of its dtype)``."""
        for headroom in {self._headroom[index] for index in indices}:
            if factor(headroom) not in (0, 1):
                chosen = [v for i, v in zip(indices, values, strict=True) if v is not None and self._headroom[i] == headroom]
                multiply(chosen, factor(headroom))

    # -- launching ---------------------------------------------------------------------------

    def _allocate(self) -> list[Bucket]:
        if self._comm.size == 1:
            return []
        specs, rows = self.plan.buckets, self._fold.width if self._exact else 1
        lengths = [length_of_row(spec, self._comm) for spec in specs]
        wires = allocate(specs, [rows * length for length in lengths], self._comm)
        return [Bucket(k, specs[k], self._params, wires[k], lengths[k], rows) for k in range(len(specs))]

    def _scale_of(self, bucket: Bucket) -> float:
        return self._micro_batch.scale / self._headroom[bucket.members[0]]

    def _launch(self, bucket: Bucket) -> Pending:
        what = f"bucket {bucket.index} of step {self.step}"
        if not self._exact:
            return self._comm.reduce(bucket.wire, "sum", what)
        scale = self._scale_of(bucket)
        return self._comm.fold(bucket.wire, self._fold, None if scale == 1 else scale, what)

    def _finish_sparse(self, index: int, present: bool, scale: float) -> None:
        param = self._params[index]
        if present and param.requires_grad:
            what = f"sparse gradient of {self._names[index]} of step {self.step}"
            total = fold_sparse(self._comm, param, self._sparse_gradients[index], scale, what, self._dtypes[index])
            param.grad = total.to(param.dtype)
