"""Several tensors of one dtype and device, copied into one: one launch on a GPU instead of one for each tensor.

Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def group_by_kind(numbers: Iterable[int], tensors: Sequence[Tensor]) -> list[list[int]]:
    """Returns the ``numbers`` of tensors in groups of one dtype and device, in the order in which the first of each comes."""
    groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for k in numbers:
        groups.setdefault((tensors[k].dtype, tensors[k].device), []).append(k)
    return list(groups.values())


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the elements of all tensors, in new memory."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def differ(first: Tensor, second: Tensor, sizes: Sequence[int]) -> Tensor:
    """Compare the bits of two packs of tensors with ``sizes`` elements. Returns one bool for each tensor, on the device."""
    unequal = _words(first) != _words(second)
    if unequal.dim() > 1:
        unequal = unequal.any(1)
    return torch.stack(torch._foreach_norm(unequal.float().split(list(sizes)), 1)) != 0


def spread(flags: Tensor, sizes: Sequence[int]) -> Tensor:
    """Returns a pack in which every element of tensor k is ``flags[k]``."""
    return torch.cat([flag.expand(size) for flag, size in zip(flags.unbind(), sizes, strict=True)])


def _words(flat: Tensor) -> Tensor:
    flat = torch.view_as_real(flat) if flat.is_complex() else flat
    return flat.view(_WORDS[flat.element_size()])
