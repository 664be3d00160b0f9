"""What people read about workers that die, join or leave, as plan/membership.py decides it: one sentence or two per event. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.plan.membership_state import Worker


@dataclass(frozen=True)
class Replacement:
    """What takes the place of a worker that is gone. ``by``: the worker that waits already, or is started; empty: none.

    ``refused``: why none is started; empty: none is needed, or none is missing any more. ``is_later``: another spare starts later.
    """

    by: str = ""
    delay_s: float = 0.0
    is_waiting: bool = False
    is_later: bool = False
    refused: str = ""

    @property
    def sentence(self) -> str:
        """ "a replacement is starting"; empty: nothing follows."""
        parts = []
        if self.is_waiting:
            parts.append(f"{self.by} takes its place")
        elif self.by:
            parts.append(f"a replacement starts in {self.delay_s:g} s" if self.delay_s else "a replacement is starting")
        elif self.is_later:
            parts.append("another one will start")
        if self.refused:
            parts.append(f"no {'other spare' if self.is_waiting else 'replacement'} is started: {self.refused}")
        return "; ".join(parts)


def death_text(worker: Worker, how: str, others: int | None, replacement: Replacement) -> str:
    """ "worker 2 (pid 4711) died: SIGKILL. 3 workers go on; a replacement is starting".

    ``others``: how many members are left; None if the worker was no member: then nobody else is concerned.
    """
    name = worker.name.replace("worker", "spare", 1) if others is None and worker.is_spare else worker.name
    if others is None and worker.is_replacement and not worker.is_spare:
        name += ", which was to join,"
    first, then = f"{name} {manner(worker, how)}", replacement.sentence
    if others is None:
        return f"{first}. {then[0].upper()}{then[1:]}" if then else first
    return f"{first}. {go_on(others)}{f'; {then}' if then else ''}"


def manner(worker: Worker, how: str) -> str:
    """ "died: SIGKILL", "ended with exit code 1", "hung and was killed", "could not be started"."""
    if worker.hung:
        return "hung and was killed"
    if how.startswith("exit code"):
        return f"ended with {how}"
    return f"died: {how}" if how.startswith(("SIG", "signal ")) else how


def go_on(workers: int) -> str:
    """ "3 workers go on"."""
    return "1 worker goes on" if workers == 1 else f"{count(workers)} go on"


def start_again(number: int, limit: int) -> str:
    """ "All workers are stopped and start again (restart 1 of 3)"."""
    return f"All workers are stopped and start again (restart {number} of {limit})"


def members_text(gone: Sequence[str], joined: Sequence[Worker], members: int, generation: int) -> str:
    """ "worker 1 (pid 11) left, worker 3 (pid 13) joined. 3 workers, generation 2". ``gone``: whole statements."""
    names = [each.name.replace("worker", "spare", 1) if each.is_spare else each.name for each in joined]
    parts = [*gone, *([f"{', '.join(names)} joined"] if names else [])]
    return f"{', '.join(parts)}. {count(members)}, generation {generation}"


def count(workers: int) -> str:
    return f"{workers} worker{'' if workers == 1 else 's'}"
