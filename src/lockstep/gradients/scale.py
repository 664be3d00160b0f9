"""Factors of gradients: many tensors times one number, and room for the sum of many lanes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def headroom(dtype: torch.dtype, lanes: int) -> float:
    """What every lane's value is multiplied with before they are summed, so that the sum of ``lanes`` large ones stays finite.

    1 where the exponent is wide enough; a power of two, hence exact, for fp16.
    """
    return 2.0 ** -(lanes - 1).bit_length() if dtype == torch.float16 else 1.0


def multiply(tensors: Sequence[Tensor], scale: float) -> None:
    """In place, with the bits of ``tensor.mul_(scale)`` for each: on CUDA in few launches.

    On the host torch's multi-tensor form would first round ``scale`` to a bf16 tensor's own dtype.
    """
    on_device = [tensor for tensor in tensors if tensor.is_cuda]
    if on_device:
        torch._foreach_mul_(on_device, scale)
    for tensor in tensors:
        if not tensor.is_cuda:
            tensor.mul_(scale)
