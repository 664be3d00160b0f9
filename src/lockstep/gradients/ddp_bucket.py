"""A bucket made real: a flat buffer from the comm, and a view of it for every gradient.

Knows its layout from the plan; knows nothing of readiness, order or other workers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.comm.base import Comm, real
from lockstep.gradients.scale import multiply
from lockstep.plan.buckets import BucketSpec

_FUSE_BYTES = 1 << 16  # above this, one pass that copies and scales beats two passes in cache


class DdpBucket:
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
        self.views = [like(memory, slot.offset, param) for slot, param in zip(spec.slots, self.params, strict=True)]
        self._ones = torch.ones_like(self.control)
        # On the host a launch is cheap and memory is not: copy while gradients are in cache, and give their
        # pages back at once. On a device it is the other way round: one copy per bucket.
        self._copies_at_once = first.device.type == "cpu"
        self.reset()

    def reset(self) -> None:
        """A new backward: nothing has been offered."""
        self.missing = len(self.params)
        self._waiting: list[int] = []
        self._inside = [False] * len(self.params)

    def holds(self, slot: int) -> bool:
        """Whether the slot's gradient is in the buffer already: another one would come too late."""
        return self._inside[slot]

    def offer(self, slot: int) -> None:
        """The slot's gradient is ready; it enters the buffer with the next ``copy`` or ``close``."""
        self._waiting.append(slot)
        self.missing -= 1

    def copy(self, scale: float | None) -> None:
        """Between gradients: bring in what was offered, where that is better done early."""
        if self._copies_at_once and self._waiting:
            self._copy(scale)

    def close(self, scale: float | None, skip: bool = False) -> list[int]:
        """Bring everything into the buffer that is not there yet, whether it was offered or not.

        A parameter without a gradient, a frozen one, and with ``skip`` every one sends zeros and
        keeps what it has. Returns the parameter numbers of those.
        """
        if self._waiting:
            self._copy(scale)
        absent = self._close_unready(skip) if self.missing else []
        if self._waiting:
            self._copy(scale)
        return absent

    def take_back(self, scale: float | None) -> None:
        """The backward raised and nothing left: gradients in the buffer become local ones again."""
        if scale is not None:
            for slot, view in enumerate(self.views):
                if self._inside[slot]:
                    view.div_(scale)
        self.reset()

    def _close_unready(self, skip: bool) -> list[int]:
        absent = []
        for slot, (param, view) in enumerate(zip(self.params, self.views, strict=True)):
            if self._inside[slot]:
                continue
            if param.grad is None or not param.requires_grad or skip:
                absent.append(self.spec.slots[slot].param)
                if param.grad is view:
                    param.grad = view.clone()  # stale, but the user's: the zeros must not reach it
                view.zero_()
            else:
                self._waiting.append(slot)
        return absent

    def _copy(self, scale: float | None) -> None:
        """One multi-tensor copy of all that waits, times ``scale``; ``param.grad`` becomes the view."""
        views, grads, in_place = [], [], []
        for slot in self._waiting:
            param, view = self.params[slot], self.views[slot]
            grad = param.grad
            if grad is None:
                self.missing += 1  # somebody took it: ``close`` reports it as absent
                continue
            self._inside[slot] = True
            if grad is view:
                in_place.append(view)
                continue
            if grad.is_sparse:
                grad = grad.to_dense()
            if scale is not None and view.nbytes > _FUSE_BYTES:
                torch.mul(grad, scale, out=view)
            else:
                views.append(view)
                grads.append(grad)
            param.grad = view
        if views:
            torch._foreach_copy_(views, grads)
        if scale is not None and (views or in_place):
            multiply(views + in_place, scale)
        self._waiting = []

    def mark_present(self, absent: Sequence[int]) -> None:
        """Fill the presence elements (last bucket only): 1 for every planned parameter, 0 for ``absent`` slots."""
        self.control.copy_(self._ones)
        if absent:
            self.control[torch.tensor(absent, device=self.control.device)] = 0

    def presence(self) -> list[bool]:
        """After the reduction: who has a gradient on some rank. Reads the device: a synchronisation point."""
        return [value != 0 for value in self.control.tolist()]


def like(memory: Tensor, offset: int, param: Tensor) -> Tensor:
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
