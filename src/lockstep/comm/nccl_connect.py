"""Builds NCCL communicators that nothing but their NcclGroup watches, and connects their ranks.

Note: no watchdog of torch's
----------------------------
torch watches each of its NCCL groups with two threads. After an error of NCCL they sleep for a minute, tell the threads of every
other NCCL group of the process, or end the process: a run that recovers cannot use them. A group that was built for blocking waits
has neither thread. We never call its blocking wait: ``Work.block_current_stream`` makes a stream wait, as in any other group.

torch 2.14 can change the ranks of a group that exists (``enable_reconfigure``). ``build_nccl`` could do that with the group of the
generation before, which would save NCCL's set-up. It does not: no torch that has it could be tried.

Note: connected at once
-----------------------
NCCL connects two ranks when they first need it, inside the first all-to-all and the first all-gather. If a rank is dead by then,
the call blocks the host. Therefore ``warm_up`` makes the first call of each kind that a fold needs, in the thread that builds.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lockstep.errors import UsageError
from lockstep.world import no_nccl_watchdog

_TIMEOUT = timedelta(days=7)  # our own waits time out first, and name the rank


def build_nccl(store: dist.Store, rank: int, size: int, device: torch.device | None) -> Any:
    """Build a communicator. All ranks must call it. Blocks until all have: nothing but the death of a connected rank ends it early.

    Raises:
        UsageError: ``device`` is no CUDA device.
        RuntimeError: NCCL cannot connect the ranks.
    """
    device = require_cuda(device)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _TIMEOUT
    with no_nccl_watchdog():
        nccl = dist.ProcessGroupNCCL(store, rank, size, options)
    nccl.eager_connect_single_device(device)
    return nccl


def require_cuda(device: torch.device | None) -> torch.device:
    if device is None or device.type != "cuda":
        raise UsageError(f"NCCL needs the CUDA device of this worker, not {device}. Pass device=torch.device('cuda', N).")
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())


def warm_up(backend: Any, size: int, device: torch.device) -> Any:
    """Enqueue the first all-to-all and the first all-gather on the current stream. Returns the work of the last one."""
    mine, everyone = (torch.zeros(count, dtype=torch.uint8, device=device) for count in (size, size))
    ones = [1] * size
    backend.alltoall_base(everyone, mine, ones, ones).wait()
    last = backend._allgather_base(everyone, mine[:1])
    last.wait()
    return last
