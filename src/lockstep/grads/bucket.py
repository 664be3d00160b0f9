"""A bucket made real: a flat buffer from the comm, and a view of it for every gradient.

Knows its layout from the plan; knows nothing of readiness, order or other workers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.comm.base import Comm, real
from lockstep.plan.buckets import BucketSpec

_FUSE_BYTES = 1 << 16  # above this, one pass that copies and scales beats two passes in cache


class Bucket:
    """Flat memory for the gradients of ``spec.slots``.

    ``wire`` is what travels; ``flat`` the gradients' part of it in their own dtype; ``views[k]``
    the gradient of slot k, laid out like its parameter; ``control`` the presence elements.
    """

    def __init__(self, index: int, spec: BucketSpec, params: Sequence[Tensor], comm: Comm) -> None:
        self.index = index
        self.spec = spec
        self.params = [params[slot.param] for slot in spec.slots]
        first = self.params[0]
        per_element = 2 if first.is_complex() else 1
        self.wire = comm.buffer((spec.numel + spec.control) * per_element, real(first.detach()).dtype, first.device)
        memory = torch.view_as_complex(self.wire.view(-1, 2)) if first.is_complex() else self.wire
        self.flat, self.control = memory[: spec.numel], memory[spec.numel :]
        self.views = [_like(memory, slot.offset, param) for slot, param in zip(spec.slots, self.params, strict=True)]
        self._ones = torch.ones_like(self.control)

    def deposit(self, scale: float | None, skip: frozenset[int] = frozenset()) -> list[int]:
        """Bring every gradient into the buffer, times ``scale``: one multi-tensor copy for all.

        ``param.grad`` becomes the view. A parameter without a gradient, a frozen one, and one
        whose number is in ``skip`` send zeros and keep what they have. Returns the numbers of those.
        """
        views, grads, absent = [], [], []
        fused: list[tuple[Tensor, Tensor]] = []
        in_place: list[Tensor] = []
        for slot, param, view in zip(self.spec.slots, self.params, self.views, strict=True):
            grad = param.grad
            if grad is None or not param.requires_grad or slot.param in skip:
                absent.append(slot.param)
                if grad is view:
                    param.grad = grad.clone()  # stale, but the user's: the zeros below must not reach it
                view.zero_()
                continue
            if grad is view:
                in_place.append(view)
                continue
            if grad.is_sparse:
                grad = grad.to_dense()
            if scale is not None and not view.is_cuda and view.nbytes > _FUSE_BYTES:
                fused.append((view, grad))
            else:
                views.append(view)
                grads.append(grad)
            param.grad = view
        if views:
            torch._foreach_copy_(views, grads)
        if scale is not None:
            if views or in_place:
                torch._foreach_mul_(views + in_place, scale)
            for view, grad in fused:
                torch.mul(grad, scale, out=view)
        return absent

    def mark_present(self, absent: Sequence[int]) -> None:
        """Fill the presence elements (last bucket only): 1 for every planned parameter, 0 for ``absent`` slots."""
        self.control.copy_(self._ones)
        if absent:
            self.control[torch.tensor(absent, device=self.control.device)] = 0

    def presence(self) -> list[bool]:
        """After the reduction: who has a gradient on some rank. Reads the device: a synchronisation point."""
        return [value != 0 for value in self.control.tolist()]


def _like(memory: Tensor, offset: int, param: Tensor) -> Tensor:
    """A view with the parameter's shape, and its strides where they are dense (channels_last, say)."""
    if _is_dense(param):
        return memory.as_strided(param.shape, param.stride(), offset + memory.storage_offset())
    return memory[offset : offset + param.numel()].view(param.shape)


def _is_dense(param: Tensor) -> bool:
    """Whether the strides visit numel consecutive elements, in whatever order of dimensions."""
    expected = 1
    for stride, extent in sorted((param.stride(d), param.shape[d]) for d in range(param.dim()) if param.shape[d] != 1):
        if stride != expected:
            return False
        expected *= extent
    return param.numel() > 0
