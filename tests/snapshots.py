"""States of tensors for the tests of snapshots."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lockstep.comm.plain_state import buffer_of


def tensors_of_many_kinds(device: str) -> dict[str, Tensor]:
    """Return tensors with items of each size, empty ones, and not contiguous ones. Some are on the host, small and large."""
    torch.manual_seed(3)
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)  # every bit pattern of 2 bytes, also of NaNs
    tensors = {
        "weight": torch.randn(300, 1000, device=device),
        "steps": torch.tensor(3.0),
        "bias": torch.randn(7, device=device),
        "half": bits.view(torch.bfloat16).to(device),
        "float16": bits.view(torch.float16).to(device),
        "large on the host": torch.randn(40_000),
        "after the large one": torch.randn(33, 9, device=device),
        "flags": torch.rand(13, device=device) > 0.5,
        "empty": torch.zeros(0, 4, device=device),
        "scalar": torch.tensor(5, device=device),
        "complex128": torch.randn(5, dtype=torch.complex128, device=device),
        "conjugate": torch.randn(5, dtype=torch.complex64, device=device).conj(),
        "float8": torch.randn(11, device=device).to(torch.float8_e4m3fn),
        "uint16": torch.arange(9).to(torch.uint16).to(device),
        "channels last": torch.randn(4, 3, 5, 5, device=device).to(memory_format=torch.channels_last),
        "transposed": torch.randn(65, 33, device=device).t(),
        "bytes of the host": torch.arange(50, dtype=torch.uint8),
        "last": torch.randn(5_000_000, device=device),
    }
    return tensors


def bytes_of(tensors: Mapping[str, Tensor]) -> dict[str, bytes]:
    return {name: bytes(buffer_of(tensor.resolve_conj())) for name, tensor in tensors.items()}
