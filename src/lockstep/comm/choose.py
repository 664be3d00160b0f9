"""Opens the right Comm for a model's devices and the world it finds itself in."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist

from lockstep.comm.base import Comm
from lockstep.comm.loopback import loopback
from lockstep.comm.store import open_store
from lockstep.comm.torch_group import TorchGroup
from lockstep.world import World

_opened: Counter[str] = Counter()  # members of a group open their comms in the same order, so numbers agree


def _number(of: str) -> int:
    _opened[of] += 1
    return _opened[of]


def open_comm(device: torch.device, *, world: World | None = None, group: Any = None, timeout_s: float = 600.0) -> Comm:
    """A comm for tensors on ``device``. Collective: all ranks must call it, in the same order.

    ``group``, or the default process group where the script made one, gives ranks and meeting
    place; otherwise ``world`` (default: ``World.detect()``) does. A lone worker gets a loopback.
    """
    if world is None and (group is not None or (dist.is_available() and dist.is_initialized())):
        return _over_group(device, group, timeout_s)
    world = world or World.detect()
    if world.size == 1:
        return loopback(1, timeout_s)[0]
    store = dist.PrefixStore(f"lockstep/{world.run_id}/{_number(world.rendezvous)}", open_store(world, timeout_s))
    shared = device.type == "cuda" and world.local_size > torch.cuda.device_count()
    cuda = "nccl" if device.type == "cuda" and not shared else "gloo"
    return TorchGroup(store, world.rank, world.size, timeout_s=timeout_s, cuda=cuda, device=device)  # type: ignore[arg-type]


def _over_group(device: torch.device, group: Any, timeout_s: float) -> Comm:
    """A comm among the members of a torch process group.

    CUDA tensors ride on the group's own NCCL communicator (a second one would cost GPU memory);
    gloo connections are our own, since those of a foreign group cannot be broken from outside.
    """
    group = group if group is not None else dist.group.WORLD
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if size == 1 and device.type != "cuda":
        return loopback(1, timeout_s)[0]
    store = dist.PrefixStore(f"lockstep/{_number(group.group_name)}", dist.distributed_c10d._get_process_group_store(group))
    carries_cuda = device.type == "cuda" and "nccl" in dist.get_backend_config(group)
    return TorchGroup(store, rank, size, timeout_s=timeout_s, cuda=group if carries_cuda else "gloo", device=device)
