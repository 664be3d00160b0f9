"""Which GPU a rank uses, and over what so many ranks can meet on this machine.

With as many GPUs as ranks, each rank has a GPU of its own and they meet over NCCL. Otherwise they share GPUs: over gloo, and over
NCCL too if LOCKSTEP_NCCL_LIB names a library that allows it (tests/shared_gpu.py).
"""

from __future__ import annotations

import torch

import lockstep
from tests import shared_gpu

HAS_GPU = torch.cuda.is_available()


def use_gpu() -> torch.device:
    """In a worker: choose the GPU of this rank, with exact arithmetic. Rank r has GPU r, counted around."""
    device = lockstep.World.detect().device()
    torch.cuda.set_device(device)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    return device


def why_no_nccl(size: int) -> str | None:
    """Why so many ranks cannot meet over NCCL here, or None if they can."""
    return shared_gpu.why_no_nccl(size, torch.cuda.device_count())


def sizes_over_nccl() -> list[int]:
    """Of 2 and 4 ranks, those that can meet over NCCL here."""
    return [size for size in (2, 4) if why_no_nccl(size) is None]
