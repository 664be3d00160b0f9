"""Opens the right Comm for a model's devices and the world it finds itself in.

    CPU, all workers on one machine        shm       (gloo, with a warning, where memory cannot be shared)
    CPU, machines with several workers     twolevel
    CPU, machines with one worker each     gloo
    CUDA, a GPU per worker                 nccl
    CUDA, workers that share a GPU         gloo
    one worker                             loopback

``LOCKSTEP_COMM`` or an argument overrides it.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from lockstep.comm import segment
from lockstep.comm.base import Comm
from lockstep.comm.loopback import loopback
from lockstep.comm.segment import SegmentError
from lockstep.comm.shm import Shm
from lockstep.comm.store import await_ranks, open_store
from lockstep.comm.torch_group import TorchGroup
from lockstep.comm.two_level import TwoLevel
from lockstep.errors import UsageError
from lockstep.world import World, machine_name, requested_comm, require_comm

_opened: Counter[str] = Counter()  # members of a group open their comms in the same order, so numbers agree


@dataclass(frozen=True)
class Meeting:
    """Where the workers of one comm meet, and who this one is among them."""

    store: dist.Store
    rank: int
    size: int
    timeout_s: float
    machine: str = ""
    group: Any = None
    local_size: int = 0


def open_comm(
    device: torch.device,
    *,
    world: World | None = None,
    group: Any = None,
    timeout_s: float = 600.0,
    kind: str | None = None,
    need_bytes: int = 0,
    store: dist.Store | None = None,
) -> Comm:
    """A comm for tensors on ``device``. Collective: all ranks must call it, in the same order.

    ``group``, or the default process group where the script made one, gives ranks and meeting
    place; otherwise ``world`` (default: ``World.detect()``) does. ``kind`` is one of
    ``lockstep.world.COMMS``; ``need_bytes`` what the buckets of one rank will hold.
    ``store``: where ``world`` meets, if it is open already.
    """
    kind = require_comm(kind, "comm") if kind is not None else requested_comm()
    meeting = _meet_group(group, timeout_s) if world is None and _has_group(group) else _meet_world(world, timeout_s, store)
    if meeting is None or (meeting.size == 1 and device.type == "cpu"):
        return loopback(1, timeout_s)[0]
    if device.type == "cuda":
        return _open_cuda(meeting, device, kind)
    if kind == "nccl":
        raise UsageError(f"nccl carries CUDA tensors only, and this model lies on {device}. Choose shm, twolevel or gloo.")
    if kind == "gloo":
        return TorchGroup(meeting.store, meeting.rank, meeting.size, timeout_s=timeout_s)
    return _open_host(meeting, kind, need_bytes)


def _open_cuda(meeting: Meeting, device: torch.device, kind: str) -> Comm:
    if kind in ("shm", "twolevel"):
        raise UsageError(f"{kind} carries host memory only, and this model's parameters lie on {device}. Choose nccl or gloo.")
    carrier: Any = "gloo"
    if kind != "gloo" and meeting.group is not None and "nccl" in str(dist.get_backend_config(meeting.group)):
        carrier = meeting.group  # its communicator: a second one would cost GPU memory
    elif kind != "gloo" and meeting.group is None and (kind == "nccl" or meeting.local_size <= torch.cuda.device_count()):
        carrier = "nccl"
    return TorchGroup(meeting.store, meeting.rank, meeting.size, timeout_s=meeting.timeout_s, cuda=carrier, device=device)


def _open_host(meeting: Meeting, kind: str, need_bytes: int) -> Comm:
    store, rank, size, timeout_s = meeting.store, meeting.rank, meeting.size, meeting.timeout_s
    machines = _machines(meeting)
    crowds = max(Counter(machines).values())
    if kind == "auto" and (crowds == 1 or not segment.supported()):
        return TorchGroup(store, rank, size, timeout_s=timeout_s)
    if kind == "shm" and len(set(machines)) > 1:
        raise UsageError(
            f"shm needs all workers on one machine, and these {size} are on {len(set(machines))}. Choose twolevel or gloo."
        )
    try:
        shared = dist.PrefixStore("shm", store)
        if kind == "twolevel" or (kind == "auto" and len(set(machines)) > 1):
            return TwoLevel(shared, rank, size, machines, timeout_s=timeout_s, need_bytes=need_bytes)
        return Shm(shared, rank, size, timeout_s=timeout_s, need_bytes=need_bytes)
    except SegmentError as error:
        if rank == 0:
            each = f"{crowds} workers x {need_bytes / (1 << 20):.0f} MB of gradients"
            warnings.warn(
                f"workers cannot share memory for {each}: {error.reason}. They talk over gloo instead, several times slower. "
                "Give the container more memory, or raise ulimit -f; LOCKSTEP_COMM=gloo silences this.",
                stacklevel=3,
            )
        return TorchGroup(dist.PrefixStore("instead", store), rank, size, timeout_s=timeout_s)


def _machines(meeting: Meeting) -> list[str]:
    """The name of every rank's machine. A rank that never comes is named before anybody waits for its answer."""
    await_ranks(dist.PrefixStore("machines", meeting.store), meeting.rank, meeting.size, meeting.timeout_s)
    meeting.store.set(f"machine/{meeting.rank}", f"{meeting.machine or machine_name()}/{os.getuid()}")
    return [meeting.store.get(f"machine/{r}").decode() for r in range(meeting.size)]


def _has_group(group: Any) -> bool:
    return group is not None or (dist.is_available() and dist.is_initialized())


def _meet_group(group: Any, timeout_s: float) -> Meeting:
    group = group if group is not None else dist.group.WORLD
    store = dist.PrefixStore(f"lockstep/{_number(group.group_name)}", dist.distributed_c10d._get_process_group_store(group))
    return Meeting(store, dist.get_rank(group), dist.get_world_size(group), timeout_s, group=group)


def _meet_world(world: World | None, timeout_s: float, opened: dist.Store | None = None) -> Meeting | None:
    world = world or World.detect()
    if world.size == 1:
        return None
    if opened is None:
        opened = open_store(world, timeout_s)
    store = dist.PrefixStore(f"lockstep/{world.run_id}/{_number(world.rendezvous)}", opened)
    return Meeting(store, world.rank, world.size, timeout_s, world.machine, local_size=world.local_size)


def _number(of: str) -> int:
    _opened[of] += 1
    return _opened[of]
