"""Allocates the memory of buckets: on the host one buffer of the comm per bucket, on a GPU one for all buckets of a dtype.

torch's CUDA allocator may give a large tensor up to 2 MB more than was asked for. With a tensor per bucket, that would add up to
more memory than torch DDP needs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.comm.base import Comm
from lockstep.comm.fold_nccl import row_length
from lockstep.plan.buckets import BucketSpec

_ALIGN_BYTES = 512  # as torch's allocator aligns tensors


def allocate(specs: Sequence[BucketSpec], numels: Sequence[int], comm: Comm) -> list[Tensor]:
    """Returns a flat tensor of real numbers for each bucket, of ``numels[k]`` elements of its dtype. Collective."""
    places: list[tuple[tuple[torch.dtype, torch.device], int, int]] = []  # (dtype and device, first element, number of elements)
    ends: dict[tuple[torch.dtype, torch.device], int] = {}
    for spec, numel in zip(specs, numels, strict=True):
        key = dtype_of(spec).to_real(), torch.device(spec.device)
        places.append((key, ends.get(key, 0), numel * reals_of(spec)))
        unit = _ALIGN_BYTES // key[0].itemsize
        ends[key] = places[-1][1] + -(-places[-1][2] // unit) * unit
    memory = {key: comm.buffer(end, *key) for key, end in ends.items() if key[1].type != "cpu"}
    return [memory[key][start : start + numel] if key in memory else comm.buffer(numel, *key) for key, start, numel in places]


def length_of_row(spec: BucketSpec, comm: Comm) -> int:
    """Returns how many elements a row to fold has: on a GPU as many as can be cut into equal slices, one for each rank."""
    return spec.numel if spec.device == "cpu" else row_length(spec.numel, comm.size)


def dtype_of(spec: BucketSpec) -> torch.dtype:
    dtype = getattr(torch, spec.dtype.removeprefix("torch."))
    assert isinstance(dtype, torch.dtype)
    return dtype


def reals_of(spec: BucketSpec) -> int:
    """Returns how many real numbers an element consists of."""
    return 2 if dtype_of(spec).is_complex else 1
