"""Opens the right Comm for the device of a model and the world of a worker.

    CPU, all workers on one machine        shm       (gloo, with a warning, if memory cannot be shared)
    CPU, machines with several workers     twolevel
    CPU, machines with one worker each     gloo
    CUDA, no two workers on one GPU        nccl
    CUDA, workers that share a GPU         gloo
    one worker                             loopback

``LOCKSTEP_COMM`` or an argument overrides the choice.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from lockstep.comm import segment
from lockstep.comm.agent_store import open_agent_store
from lockstep.comm.base import Comm
from lockstep.comm.loopback import loopback
from lockstep.comm.segment import SegmentError
from lockstep.comm.shm import Shm
from lockstep.comm.store import await_ranks, open_store
from lockstep.comm.torch_group import TorchGroup
from lockstep.comm.two_level import TwoLevel
from lockstep.errors import UsageError
from lockstep.world import (
    AGENT_STORE,
    World,
    agent_endpoint,
    machine_name,
    nccl_may_share_gpus,
    requested_comm,
    requested_helper_thread,
    requested_machine,
    require_comm,
)

_GLOO_MEANWHILE_BYTES = 32 << 20
"""Of the buckets of one rank. To average so much over gloo takes less time than to connect NCCL."""
_opened: Counter[str] = Counter()  # all members of a group open their comms in the same order, so these numbers agree


@dataclass(frozen=True)
class Rendezvous:
    """The store through which the workers of one comm find each other, and this worker's place among them."""

    store: dist.Store
    rank: int
    size: int
    timeout_s: float
    place: Callable[[], str]
    machine: str = ""
    group: Any = None


def open_comm(
    device: torch.device,
    *,
    world: World | None = None,
    group: Any = None,
    timeout_s: float = 600.0,
    kind: str | None = None,
    need_bytes: int = 0,
    store: dist.Store | None = None,
    place: Callable[[], str] = lambda: "",
) -> Comm:
    """Open a comm for tensors on ``device``. All ranks must call it, in the same order.

    Args:
        device: The device of the tensors.
        world: Rank, size and store address of this worker; by default ``World.detect()``.
        group: A torch process group that gives ranks and store instead of ``world``. If neither is given and the script has
            initialised ``torch.distributed``, its default group is used.
        timeout_s: How long a wait may take.
        kind: One of ``lockstep.world.COMMS``; by default what ``LOCKSTEP_COMM`` says.
        need_bytes: How many bytes the buckets of one rank will need.
        store: The store at ``world.rendezvous``, if the caller has opened it. It serves one generation of a run that recovers: this
            function then does not wait until NCCL is connected.
        place: Returns where the script is now, for example "run.evaluate(...) at train.py:41, step 12 of loop 0". The error of
            workers that make different calls shows it. Any thread may call it.

    Raises:
        UsageError: The kind cannot carry these tensors, or cannot connect these workers.
        PeerError: Names the ranks that did not call it within ``timeout_s``.
    """
    kind = require_comm(kind, "comm") if kind is not None else requested_comm()
    if world is None and (group is not None or (dist.is_available() and dist.is_initialized())):
        rendezvous: Rendezvous | None = _group_rendezvous(group, timeout_s, place)
    else:
        rendezvous = _world_rendezvous(world or World.detect(), timeout_s, store, place)
    if rendezvous is None or (rendezvous.size == 1 and device.type == "cpu"):
        return loopback(1, timeout_s)[0]
    if device.type == "cuda":
        # A small model trains on over gloo until NCCL is connected; the first fold of a large one waits.
        return _open_cuda(rendezvous, device, kind, None if store is None else need_bytes <= _GLOO_MEANWHILE_BYTES)
    if kind == "nccl":
        raise UsageError(f"nccl carries CUDA tensors only, and this model is on {device}. Choose shm, twolevel or gloo.")
    if kind == "gloo":
        return TorchGroup(rendezvous.store, rendezvous.rank, rendezvous.size, timeout_s=timeout_s, place=place)
    return _open_host(rendezvous, kind, need_bytes)


def _open_cuda(rendezvous: Rendezvous, device: torch.device, kind: str, gloo_meanwhile: bool | None) -> Comm:
    if kind in ("shm", "twolevel"):
        raise UsageError(f"{kind} carries host memory only, and this model's parameters are on {device}. Choose nccl or gloo.")
    carrier: Any = "gloo"
    group = rendezvous.group
    if kind != "gloo" and group is not None and "nccl" in str(dist.get_backend_config(group)):
        carrier = group  # use its communicator: a second one would cost GPU memory
    elif group is None and (kind == "nccl" or (kind == "auto" and _have_a_gpu_each(rendezvous, device))):
        carrier = "nccl"
    return TorchGroup(
        rendezvous.store,
        rendezvous.rank,
        rendezvous.size,
        timeout_s=rendezvous.timeout_s,
        cuda=carrier,
        device=device,
        gloo_meanwhile=gloo_meanwhile if carrier == "nccl" else None,
        place=rendezvous.place,
    )


def _have_a_gpu_each(rendezvous: Rendezvous, device: torch.device) -> bool:
    """Whether no two ranks use one GPU. All ranks call it, and all find the same.

    The number of workers does not say it: if three workers had two GPUs and one worker is lost, the other two may share one.
    """
    gpus = _tell_all(rendezvous, "gpu", _gpu_name(device) or f"{machine_name()}/{device}")
    if len(set(gpus)) == rendezvous.size:
        return True
    meant = World.detect().device()
    if meant != device and gpus.count(gpus[rendezvous.rank]) > 1:
        warnings.warn(
            f"rank {rendezvous.rank} shares the GPU {device} with another worker, so gradients travel through the memory of the "
            f"host. {meant} is meant for this worker: put its model and data on lockstep.World.detect().device().",
            stacklevel=2,
        )
    return False


def _gpu_name(device: torch.device) -> str:
    """A name that no other GPU has, on any machine; empty if the driver gives none."""
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))


def own_gpu(device: torch.device, kind: str | None, world: World) -> str:
    """Returns the name of the GPU ``device`` if no other worker may use it, because NCCL carries its tensors; else "".

    A worker that uses another GPU than ``world.device()`` may share it: then gloo carries the tensors, unless ``kind`` is "nccl".
    """
    kind = require_comm(kind, "comm") if kind is not None else requested_comm()
    if device.type != "cuda" or kind == "gloo" or nccl_may_share_gpus():
        return ""
    has_its_own = world.local_size <= torch.cuda.device_count() and device == world.device()
    return _gpu_name(device) if kind == "nccl" or has_its_own else ""


def _open_host(rendezvous: Rendezvous, kind: str, need_bytes: int) -> Comm:
    store, rank, size, timeout_s = rendezvous.store, rendezvous.rank, rendezvous.size, rendezvous.timeout_s
    place = rendezvous.place
    workers = Counter(machines := _machines(rendezvous))
    if kind == "auto" and (max(workers.values()) == 1 or not segment.supported()):
        return TorchGroup(store, rank, size, timeout_s=timeout_s, place=place)
    if kind == "shm" and len(workers) > 1:
        raise UsageError(f"shm needs all workers on one machine, and these {size} are on {len(workers)}. Choose twolevel or gloo.")
    try:
        shared, helper = dist.PrefixStore("shm", store), requested_helper_thread()
        if kind == "twolevel" or (kind == "auto" and len(workers) > 1):
            return TwoLevel(
                shared, rank, size, machines, timeout_s=timeout_s, need_bytes=need_bytes, place=place, helper_thread=helper
            )
        return Shm(shared, rank, size, timeout_s=timeout_s, need_bytes=need_bytes, place=place, helper_thread=helper)
    except SegmentError as error:
        if rank == 0:
            needed = f"{max(workers.values())} workers x {need_bytes / (1 << 20):.0f} MB of gradients"
            warnings.warn(
                f"workers cannot share memory for {needed}: {error.reason}. They use gloo instead, which is several times slower. "
                "Give the container more memory, or raise ulimit -f; LOCKSTEP_COMM=gloo silences this warning.",
                stacklevel=3,
            )
        return TorchGroup(dist.PrefixStore("instead", store), rank, size, timeout_s=timeout_s, place=place)


def _machines(rendezvous: Rendezvous) -> list[str]:
    """The name of every rank's machine and user. Raises ``PeerError`` if a rank does not call it."""
    return _tell_all(rendezvous, "machine", f"{rendezvous.machine or machine_name()}/{os.getuid()}")


def _tell_all(rendezvous: Rendezvous, name: str, text: str) -> list[str]:
    """Tell all ranks ``text``. Returns what each rank has told, by rank. Raises ``PeerError`` if a rank does not call it."""
    store, rank, size = dist.PrefixStore(name, rendezvous.store), rendezvous.rank, rendezvous.size
    store.set(f"of/{rank}", text)
    await_ranks(store, rank, size, rendezvous.timeout_s)
    return [store.get(f"of/{r}").decode() for r in range(size)]


def _group_rendezvous(group: Any, timeout_s: float, place: Callable[[], str]) -> Rendezvous:
    group = group if group is not None else dist.group.WORLD
    prefix = f"lockstep/{_count_opened(group.group_name)}"
    store = dist.PrefixStore(prefix, dist.distributed_c10d._get_process_group_store(group))
    return Rendezvous(store, dist.get_rank(group), dist.get_world_size(group), timeout_s, place, requested_machine(), group=group)


def _world_rendezvous(world: World, timeout_s: float, opened: dist.Store | None, place: Callable[[], str]) -> Rendezvous | None:
    """None for a lone worker."""
    if world.size == 1:
        return None
    endpoint = agent_endpoint() if world.rendezvous == AGENT_STORE else None
    if opened is None:
        opened = open_store(world, timeout_s) if endpoint is None else open_agent_store(endpoint.fd, timeout_s)
    store = dist.PrefixStore(f"lockstep/{world.run_id}/{_count_opened(world.rendezvous)}", opened)
    return Rendezvous(store, world.rank, world.size, timeout_s, place, world.machine)


def _count_opened(name: str) -> int:
    """How many comms this process has opened for a group or store, with the new one."""
    _opened[name] += 1
    return _opened[name]
