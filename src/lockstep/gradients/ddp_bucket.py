"""DdpBucket: a bucket that copies gradients into its memory and makes ``param.grad`` a view of it.

Knows nothing of readiness, order or other workers: DdpReducer decides when to copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.gradients.bucket_reducer import Bucket
from lockstep.gradients.partial_sums import copy_scaled, multiply
from lockstep.plan.buckets import BucketSpec


class DdpBucket(Bucket):
    """One row of gradients, in the last bucket followed by one presence element per planned parameter."""

    def __init__(self, index: int, spec: BucketSpec, params: Sequence[Tensor], wire: Tensor, length: int) -> None:
        super().__init__(index, spec, params, wire, length)
        self.gradients = self.views[0]
        self.ready_slots: list[int] = []
        """Slots whose gradients are complete and not copied yet."""
        # On the host a copy is cheap to issue and memory traffic is expensive: copy while gradients are in the cache, and free
        # their memory at once. On a device it is the other way round: one copy per bucket.
        self.copies_early = self.wire.device.type == "cpu"

    def copy_ready(self, scale: float | None, taken: bytearray) -> None:
        """One multi-tensor copy of the gradients in ``ready_slots``, times ``scale``. Sets ``taken`` of their parameters."""
        views, grads, in_place = [], [], []
        for slot in self.ready_slots:
            param, view = self.params[slot], self.gradients[slot]
            grad = param.grad
            if grad is None:
                self.missing += 1  # undefined in autograd, or a hook of the user removed it: ``complete`` reports it as absent
                continue
            taken[self.members[slot]] = 1
            if grad is view:
                in_place.append(view)
                continue
            views.append(view)
            grads.append(grad.to_dense() if grad.is_sparse else grad)
            param.grad = view
        if views:
            copy_scaled(views, grads, scale)
        if scale is not None and in_place:
            multiply(in_place, scale)
        self.ready_slots = []

    def complete(self, scale: float | None, taken: bytearray, skip: bool) -> list[int]:
        """Fill what is not filled yet, with gradients that are there or with zeros. Returns the parameters that send zeros.

        These are parameters without a gradient, frozen ones, and with ``skip`` all parameters. Their ``param.grad`` is kept.
        """
        if self.ready_slots:
            self.copy_ready(scale, taken)
        if not self.missing:
            return []
        absent = []
        for slot, (param, view) in enumerate(zip(self.params, self.gradients, strict=True)):
            if taken[self.members[slot]]:
                continue
            if param.grad is None or not param.requires_grad or skip:
                absent.append(self.members[slot])
                if param.grad is view:
                    param.grad = view.clone()  # from an earlier step, but the user's: the zeros must not overwrite it
                view.zero_()
            else:
                self.ready_slots.append(slot)
        if self.ready_slots:
            self.copy_ready(scale, taken)
        return absent

    def undo_scale(self, scale: float | None, taken: bytearray) -> None:
        """The backward raised before a bucket was sent: the gradients in the bucket become this rank's own again."""
        self.ready_slots = []
        if scale is not None:
            for index, view in zip(self.members, self.gradients, strict=True):
                if taken[index]:
                    view.div_(scale)

    def set_presence(self, absent: Sequence[int]) -> None:
        """Fill the presence elements (last bucket only): 0 at the positions ``absent``, 1 elsewhere."""
        self.presence.fill_(1)
        if absent:
            self.presence[torch.tensor(absent, device=self.presence.device)] = 0

    def read_presence(self) -> list[bool]:
        """After the reduction: for each planned parameter, whether some rank has a gradient. Synchronises with a CUDA device."""
        return [value != 0 for value in self.presence.tolist()]
