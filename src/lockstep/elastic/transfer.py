"""The state of a run from one worker to others: a newcomer, or one that missed a commit. Collective; nothing is unpickled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch

from lockstep.comm.base import Comm
from lockstep.comm.exchange import broadcast_in_place, gather_bytes
from lockstep.comm.plain_state import empty_tensors, flatten, unflatten


@dataclass(frozen=True)
class Progress:
    """How far a worker is: steps committed (-1: it holds no state), collective points passed since, and the one it is in."""

    steps: int = -1
    passed: int = 0
    inside: int = 0


@dataclass(frozen=True)
class Aligned:
    """``state``: where this worker was behind a commit, that of one that was not, which had passed ``passed`` sites since.
    ``is_told``: another had completed the action that this one is in, with ``result``.
    """

    state: Any = None
    passed: int = 0
    is_told: bool = False
    result: Any = None


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


def align(comm: Comm, mine: Progress, state: Callable[[], Any], results: Mapping[int, Any], device: torch.device) -> Aligned:
    """All ranks: bring those that are behind to the greatest committed step, and those out of an action that another has completed.

    ``state()`` captures this worker's, where others need it; ``results`` are those of its journal since the last commit.
    """
    everyone = gather_progress(comm, mine)
    steps = max(place.steps for place in everyone)
    behind = [rank for rank, place in enumerate(everyone) if place.steps < steps]
    aligned = Aligned()
    if behind:
        source = _first(everyone, lambda place: place.steps == steps)
        aligned = Aligned(carry(comm, state, source, behind, device), everyone[source].passed)
    abreast = [place for place in everyone if place.steps == steps]
    for site in sorted({place.inside for place in abreast if place.inside}):
        if max(place.passed for place in abreast) >= site:
            inside = [rank for rank, place in enumerate(everyone) if place.steps == steps and place.inside == site]
            source = _first(everyone, lambda place, site=site: place.steps == steps and place.passed >= site)  # type: ignore[misc]
            result = carry(comm, lambda site=site: results.get(site), source, inside, device)  # type: ignore[misc]
            if comm.rank in inside:
                aligned = Aligned(is_told=True, result=result)
    return aligned


def gather_progress(comm: Comm, mine: Progress) -> list[Progress]:
    """Everybody's, by rank."""
    everyone = torch.zeros(comm.size, 3, dtype=torch.int64)
    comm.all_gather(everyone, torch.tensor(astuple(mine)), "how far each has come").wait()
    return [Progress(*row) for row in everyone.tolist()]


def _first(everyone: Sequence[Progress], fits: Callable[[Progress], bool]) -> int:
    return next(rank for rank, place in enumerate(everyone) if fits(place))
