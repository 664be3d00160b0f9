"""The state of a run from one worker to others: a newcomer, or one that missed a commit. Collective; nothing is unpickled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lockstep.comm.base import Comm
from lockstep.comm.exchange import broadcast_in_place, gather_bytes
from lockstep.state import empty_tensors, flatten, unflatten


def who_is_ahead(comm: Comm, step: int) -> tuple[int, list[int]]:
    """(the first rank with the greatest number of committed steps, those that are behind). ``step`` -1: holds nothing."""
    steps = torch.zeros(comm.size, 1, dtype=torch.int64)
    comm.all_gather(steps, torch.tensor([step]), "how many steps each has committed").wait()
    each = steps[:, 0].tolist()
    return each.index(max(each)), [rank for rank, count in enumerate(each) if count < max(each)]


def send(comm: Comm, state: Any, source: int, device: torch.device) -> None:
    """On the source, and on ranks that need nothing (``state`` None there: they only take part)."""
    skeleton, tensors = flatten(state, "the state of the run") if comm.rank == source else ("", [])
    texts = gather_bytes(comm, skeleton.encode(), "the state's outline")
    if comm.rank != source:
        tensors = empty_tensors(texts[source].decode(), str(device))
    broadcast_in_place(comm, tensors, source, "the state of the run")


def receive(comm: Comm, source: int, device: torch.device) -> Any:
    texts = gather_bytes(comm, b"", "the state's outline")
    skeleton = texts[source].decode()
    tensors = empty_tensors(skeleton, str(device))
    broadcast_in_place(comm, tensors, source, "the state of the run")
    return unflatten(skeleton, tensors)


def align(comm: Comm, step: int, state: Callable[[], Any], device: torch.device) -> Any:
    """All ranks: bring those that are behind to the greatest committed step. Returns the state on those, None on the others.

    ``state()`` captures this worker's, where others need it.
    """
    source, behind = who_is_ahead(comm, step)
    if not behind:
        return None
    if comm.rank in behind:
        return receive(comm, source, device)
    send(comm, state() if comm.rank == source else None, source, device)
    return None
