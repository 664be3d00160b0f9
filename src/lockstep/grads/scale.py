"""Many tensors times one number, in place, with the bits of ``tensor.mul_(number)`` for each of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def multiply(tensors: Sequence[Tensor], scale: float) -> None:
    """On CUDA in few launches. On the host torch's multi-tensor form would first round ``scale`` to a bf16 tensor's own dtype."""
    on_device = [tensor for tensor in tensors if tensor.is_cuda]
    if on_device:
        torch._foreach_mul_(on_device, scale)
    for tensor in tensors:
        if not tensor.is_cuda:
            tensor.mul_(scale)
