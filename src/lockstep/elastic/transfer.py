"""The state of a run from one worker to others: a newcomer, or one that missed a commit. Collective; nothing is unpickled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch

from lockstep.comm.base import Comm
from lockstep.comm.exchange import broadcast_in_place, gather_bytes
from lockstep.state import empty_tensors, flatten, unflatten


@dataclass(frozen=True)
class Place:
    """How far a worker is: steps committed (-1: it holds nothing), and collective acts completed in the generation it entered last.

    ``since``: the first generation it entered; -1: none.
    """

    steps: int = -1
    generation: int = -1
    acts: int = 0
    since: int = -1


@dataclass(frozen=True)
class Verdict:
    """How a generation ended: the acts that at least one of its members had completed, and what the last of them gave."""

    acts: int
    result: Any = None


@dataclass(frozen=True)
class Aligned:
    """``state``: where this worker was behind a commit, that of one that was not. ``verdict``: on the generation it comes from."""

    verdict: Verdict
    state: Any = None


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


def align(
    comm: Comm, mine: Place, state: Callable[[], Any], result: Any, verdicts: Mapping[int, Verdict], device: torch.device
) -> Aligned:
    """All ranks: bring those that are behind to the greatest committed step, and tell all how their last generation ended.

    ``state()`` captures this worker's, where others need it; ``result`` is what its last act gave. Nobody can be more than one
    act behind in a generation: to complete one, all must have come to it. A worker that did not get as far as to enter the
    latest generation hears from one that did (``verdicts``), and was in the same one before.
    """
    everyone = places(comm, mine)
    steps = max(place.steps for place in everyone)
    behind = [rank for rank, place in enumerate(everyone) if place.steps < steps]
    received = None
    if behind:
        received = carry(comm, state, _first(everyone, lambda place: place.steps == steps), behind, device)
    latest = max(place.generation for place in everyone)
    acts = max(place.acts for place in everyone if place.generation == latest)
    missing = [rank for rank, place in enumerate(everyone) if place.generation == latest and place.acts < acts]
    verdict = Verdict(acts, result)
    if missing:
        source = _first(everyone, lambda place: place.generation == latest and place.acts == acts)
        given = carry(comm, lambda: result, source, missing, device)
        verdict = Verdict(acts, given if comm.rank in missing else result)
    elsewhere = [rank for rank, place in enumerate(everyone) if 0 <= place.generation < latest]
    if elsewhere:
        oldest = min(everyone[rank].generation for rank in elsewhere)
        source = _first(everyone, lambda place: place.generation == latest and place.since <= oldest)
        known = {number: [each.acts, each.result] for number, each in verdicts.items() if number >= oldest}
        told = carry(comm, lambda: known, source, elsewhere, device)
        if told is not None:
            verdict = Verdict(*told[mine.generation])
    return Aligned(verdict, received)


def places(comm: Comm, mine: Place) -> list[Place]:
    """Everybody's, by rank."""
    everyone = torch.zeros(comm.size, 4, dtype=torch.int64)
    comm.all_gather(everyone, torch.tensor(astuple(mine)), "how far each has come").wait()
    return [Place(*row) for row in everyone.tolist()]


def _first(everyone: Sequence[Place], fits: Callable[[Place], bool]) -> int:
    return next(rank for rank, place in enumerate(everyone) if fits(place))
