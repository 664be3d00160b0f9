"""The state of a run from one worker to others: a newcomer, or one that missed a commit. Collective; nothing is unpickled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.comm.base import Comm
from lockstep.comm.exchange import broadcast_in_place, gather_bytes
from lockstep.state import empty_tensors, flatten, unflatten


@dataclass(frozen=True)
class Place:
    """How far a worker is: steps committed (-1: it holds nothing), and collective acts completed between them."""

    steps: int
    acts: int


def places(comm: Comm, mine: Place) -> list[Place]:
    """Everybody's, by rank."""
    everyone = torch.zeros(comm.size, 2, dtype=torch.int64)
    comm.all_gather(everyone, torch.tensor([mine.steps, mine.acts]), "how far each has come").wait()
    return [Place(*row) for row in everyone.tolist()]


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


def carry(comm: Comm, value: Callable[[], Any], source: int, to: Sequence[int], device: torch.device) -> Any:
    """All ranks: the source's value on the ranks in ``to``, None on the others."""
    if comm.rank in to:
        return receive(comm, source, device)
    send(comm, value() if comm.rank == source else None, source, device)
    return None


@dataclass(frozen=True)
class Aligned:
    """``state``: where this worker was behind a commit, that of one that was not. ``result``: of the act it had not completed."""

    acts: int
    state: Any = None
    result: Any = None


def align(comm: Comm, mine: Place, state: Callable[[], Any], result: Any, device: torch.device) -> Aligned:
    """All ranks: bring those that are behind to the greatest committed step, and to the last act that anybody has completed.

    ``state()`` captures this worker's, where others need it; ``result`` is what its last act gave. Nobody can be more than one
    act behind: to complete one, all must have come to it.
    """
    everyone = places(comm, mine)
    steps = max(place.steps for place in everyone)
    acts = max(place.acts for place in everyone)
    behind = [rank for rank, place in enumerate(everyone) if place.steps < steps]
    missing = [rank for rank, place in enumerate(everyone) if place.acts < acts and place.steps == steps >= 0]
    received = None
    if behind:
        source = next(rank for rank, place in enumerate(everyone) if place.steps == steps)
        received = carry(comm, state, source, behind, device)
    if missing:
        source = next(rank for rank, place in enumerate(everyone) if place.acts == acts)
        result = carry(comm, lambda: result, source, missing, device)
    return Aligned(acts, received, result if comm.rank in missing else None)
