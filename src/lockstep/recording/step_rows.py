"""StepRow: one step on all workers, as numbers that can be compared. Made from records as they arrive, in any order. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lockstep.recording.records import BACKWARD, CONFIRM, DATA, EXCHANGE, FORWARD, LANE, OWN_WORK, StepRecord

_PER_LANE = frozenset({DATA, LANE, FORWARD, BACKWARD})
"""Phases that take longer if a worker has more lanes."""
_TRANSPORT = frozenset({EXCHANGE, CONFIRM})
_MAX_INCOMPLETE = 256
"""Steps of which the record of some worker has not arrived."""


@dataclass(frozen=True, slots=True)
class WorkerStep:
    """One step on one worker, in seconds. ``cpu``, ``queue``: of its own work. ``link``: how long its data was on its way."""

    worker: int
    lanes: int
    at: float
    seconds: float
    per_lane: float
    """Own work in phases that take longer if there are more lanes."""
    fixed: float
    """The rest of its own work."""
    data: float
    cpu: float
    queue: float
    transport: float
    """It waited for the gradients of others, or for the transport."""
    link: float
    page_faults: int
    on_gpu: bool = False

    @property
    def own(self) -> float:
        return self.per_lane + self.fixed

    def own_with(self, lanes: int) -> float:
        """Its own work, if it had this many lanes."""
        return self.per_lane * lanes / self.lanes + self.fixed if self.lanes else self.own


@dataclass(frozen=True, slots=True)
class StepRow:
    """``ranks[r]`` is what rank r did in this step."""

    step: int
    generation: int
    ranks: tuple[WorkerStep, ...]
    seconds: float
    """How long the step took: the mean over the workers, which end it together."""


def worker_step(record: StepRecord) -> WorkerStep:
    per_lane = fixed = data = cpu = queue = transport = 0
    for span in record.spans:
        phase, us = span.phase, span.end_us - span.begin_us
        if phase in OWN_WORK:
            cpu += span.cpu_us
            queue += span.queue_us
            if phase in _PER_LANE:
                per_lane += us
            else:
                fixed += us
            if phase == DATA:
                data += us
        elif phase in _TRANSPORT:
            transport += us
    return WorkerStep(
        record.worker,
        record.lane_count,
        record.at,
        record.seconds,
        per_lane / 1e6,
        fixed / 1e6,
        data / 1e6,
        cpu / 1e6,
        queue / 1e6,
        transport / 1e6,
        record.link_us / 1e6,
        record.page_faults,
        record.gpu_memory_bytes > 0,
    )


class RowBuilder:
    """Collects the records of the newest generation until a step is complete on every worker."""

    def __init__(self) -> None:
        self.generation = -1
        self._incomplete: dict[int, dict[int, WorkerStep]] = {}

    def add(self, record: StepRecord) -> StepRow | None:
        """Return the row that this record completes. Pauses, repeated steps and steps of older generations make no row."""
        if record.kind != "step" or not record.committed or record.generation < self.generation or not record.spans:
            return None
        if record.generation > self.generation:
            self.generation = record.generation
            self._incomplete.clear()
        ranks = self._incomplete.setdefault(record.step, {})
        ranks[record.rank] = worker_step(record)
        if len(ranks) < record.size:
            if len(self._incomplete) > _MAX_INCOMPLETE:
                del self._incomplete[min(self._incomplete)]
            return None
        del self._incomplete[record.step]
        found = tuple(ranks[rank] for rank in sorted(ranks))
        return StepRow(record.step, record.generation, found, sum(each.seconds for each in found) / len(found))


def rows_of(records: Iterable[StepRecord]) -> list[StepRow]:
    """Return the complete steps of the newest generation, in their order."""
    builder = RowBuilder()
    rows = [row for row in map(builder.add, records) if row is not None]
    return sorted((row for row in rows if row.generation == builder.generation), key=lambda row: row.step)
