"""For whom the workers wait at the end of the backward, and how long the transport takes when all have arrived. Pure.

    rank 0   backward      | waits for rank 2 .......... | transport |
    rank 1   backward ........ | waits for rank 2 ...... | transport |
    rank 2   backward .................................. | transport |
                                                         ^ the last bucket of the last worker is deposited

Needs the common clock of the records (``StepRecord.at``): a wait that is shorter than the clocks are apart means nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf

from lockstep.recording.records import EXCHANGE, StepRecord


@dataclass
class Waits:
    """The mean waits of one worker per step. ``for_rank``: rank -> seconds."""

    rank: int
    steps: int = 0
    for_rank: dict[int, float] = field(default_factory=dict)
    transport_s: float = 0.0
    """The rest of the exchange, after the last worker had deposited everything."""

    @property
    def longest(self) -> tuple[int, float] | None:
        """The rank for which this worker waits longest, and for how long; None if it waits for nobody."""
        return max(self.for_rank.items(), key=lambda each: each[1], default=None)


def waits(records: Iterable[StepRecord]) -> dict[int, Waits]:
    """Return the waits of each rank. Steps whose records are not complete, or that were repeated, are left out."""
    by_step: dict[tuple[int, int], list[StepRecord]] = {}
    for record in records:
        if record.kind == "step" and record.committed and record.buckets:
            by_step.setdefault((record.generation, record.step), []).append(record)
    found: dict[int, Waits] = {}
    for step in by_step.values():
        if len(step) == step[0].size > 1:
            _add_step(found, step)
    for each in found.values():
        each.for_rank = {rank: seconds / each.steps for rank, seconds in sorted(each.for_rank.items())}
        each.transport_s /= each.steps
    return found


def _add_step(found: dict[int, Waits], step: Sequence[StepRecord]) -> None:
    deposits = sorted((record.at + bucket.sent_us / 1e6, record.rank) for record in step for bucket in record.buckets)
    for record in step:
        mine = found.setdefault(record.rank, Waits(record.rank))
        mine.steps += 1
        exchanges = [span for span in record.spans if span.phase == EXCHANGE]
        ended = -inf
        for span in exchanges:  # a step of run.steps may have several
            begin, end = record.at + span.begin_us / 1e6, record.at + span.end_us / 1e6
            until = inf if span is exchanges[-1] else end  # the clocks of two machines are not quite equal
            at, last = _last_of_others(deposits, record.rank, until)
            waited = max(0.0, min(end, at) - begin) if at > ended else 0.0
            if waited:
                mine.for_rank[last] = mine.for_rank.get(last, 0.0) + waited
            mine.transport_s += max(0.0, end - begin - waited)
            ended = end


def _last_of_others(deposits: Sequence[tuple[float, int]], rank: int, until: float) -> tuple[float, int]:
    """The last deposit up to this time of a worker with another rank, as (time, rank). ``deposits`` are sorted."""
    place = bisect_right(deposits, (until, len(deposits)))
    while place and deposits[place - 1][1] == rank:
        place -= 1
    return deposits[place - 1] if place else (-inf, rank)
