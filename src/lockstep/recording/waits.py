"""For whom the workers wait at the end of the backward, and how long the transport takes when all have arrived. Pure.

    worker 0   backward      | waits for worker 2 ........ | transport |
    worker 1   backward ........ | waits for worker 2 .... | transport |
    worker 2   backward .................................. | transport |
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
    """The mean waits of one worker per step. ``for_worker``: worker -> seconds."""

    worker: int
    steps: int = 0
    for_worker: dict[int, float] = field(default_factory=dict)
    transport_s: float = 0.0
    """The rest of the exchange, after the last worker had deposited everything."""

    @property
    def longest(self) -> tuple[int, float] | None:
        """The worker for which this one waits longest, and for how long; None if it waits for nobody."""
        return max(self.for_worker.items(), key=lambda each: each[1], default=None)


def waits(records: Iterable[StepRecord]) -> dict[int, Waits]:
    """Return the waits of each worker. Steps whose records are not complete, or that were repeated, are left out."""
    by_step: dict[tuple[int, int], list[StepRecord]] = {}
    for record in records:
        if record.kind == "step" and record.committed and record.buckets:
            by_step.setdefault((record.generation, record.step), []).append(record)
    found: dict[int, Waits] = {}
    for step in by_step.values():
        if len(step) == step[0].size > 1:
            _add_step(found, step)
    for each in found.values():
        each.for_worker = {worker: seconds / each.steps for worker, seconds in sorted(each.for_worker.items())}
        each.transport_s /= each.steps
    return found


def _add_step(found: dict[int, Waits], step: Sequence[StepRecord]) -> None:
    deposits = sorted((record.at + bucket.sent_us / 1e6, record.worker) for record in step for bucket in record.buckets)
    for record in step:
        mine = found.setdefault(record.worker, Waits(record.worker))
        mine.steps += 1
        exchanges = [span for span in record.spans if span.phase == EXCHANGE]
        ended = -inf
        for span in exchanges:  # a step of run.steps may have several
            begin, end = record.at + span.begin_us / 1e6, record.at + span.end_us / 1e6
            until = inf if span is exchanges[-1] else end  # the clocks of two machines are not quite equal
            at, last = _last_of_others(deposits, record.worker, until)
            waited = max(0.0, min(end, at) - begin) if at > ended else 0.0
            if waited:
                mine.for_worker[last] = mine.for_worker.get(last, 0.0) + waited
            mine.transport_s += max(0.0, end - begin - waited)
            ended = end


def _last_of_others(deposits: Sequence[tuple[float, int]], worker: int, until: float) -> tuple[float, int]:
    """The last deposit up to this time of another worker, as (time, worker). ``deposits`` are sorted."""
    place = bisect_right(deposits, until, key=lambda each: each[0])
    while place and deposits[place - 1][1] == worker:
        place -= 1
    return deposits[place - 1] if place else (-inf, worker)
