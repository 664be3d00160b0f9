"""Where the time of the steps goes: mean seconds per phase, how much communication is hidden, what exactness costs. Pure.

If steps are short, only some of them are recorded, and what happens in every step is taken from those. Checkpoints, evaluations and
recoveries happen in few steps, and each of them is recorded, as a pause if its step is not (``Recorder.within``): they are added up
and divided by the number of all steps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from lockstep.recording.records import (
    BACKWARD,
    CHECKPOINT,
    EVALUATE,
    LANE,
    OUTSIDE,
    OWN_WORK,
    PHASES,
    RECOVERY,
    UNKNOWN,
    WAITS,
    StepRecord,
)

_RARE = frozenset({CHECKPOINT, EVALUATE, RECOVERY})


@dataclass(frozen=True)
class WorkerBreakdown:
    """The mean step of one worker."""

    worker: int
    rank: int
    """Its rank in its last step."""
    lanes: int
    steps: int
    seconds: float
    phases: dict[str, float]
    """Phase -> mean seconds per step, in the order of ``records.PHASES``. Phases that did not occur are left out."""
    generation: int = 0
    """Of its last step."""

    @property
    def own_s(self) -> float:
        """The mean of what it did itself, without waits."""
        return sum(seconds for phase, seconds in self.phases.items() if phase in OWN_WORK)

    @property
    def waits_s(self) -> float:
        return sum(seconds for phase, seconds in self.phases.items() if phase in WAITS)


@dataclass(frozen=True)
class Breakdown:
    """The mean step over some steps. Everything is 0 or empty if there are none."""

    steps: int
    """How many different steps."""
    seconds: float
    """How long a step took."""
    phases: dict[str, float]
    """Phase -> mean seconds per step and worker."""
    workers: tuple[WorkerBreakdown, ...]
    """By rank."""
    hidden: float | None
    """The part of communication that the backward hides: the part of the time between the deposit of a bucket and its completion
    in which the worker was still in its backward. None if there was no communication, or if its end is not known."""
    exactness: float
    """The part of a step that keeps the result independent of the number of workers: the phase "lane"."""

    @property
    def lanes(self) -> dict[int, int]:
        """Rank -> how many lanes, in the last generation."""
        last = max((each.generation for each in self.workers), default=0)
        return {each.rank: each.lanes for each in self.workers if each.generation == last}

    @property
    def lane_balance(self) -> float:
        """Mean lanes of a worker over the most lanes of a worker: 1 if all have the same number. Steps wait for the most."""
        counts = self.lanes.values()
        most = max(counts, default=0)
        return sum(counts) / len(counts) / most if most else 1.0


def breakdown(records: Iterable[StepRecord]) -> Breakdown:
    """Add up committed steps. Of pauses, only what happens rarely inside loops counts."""
    steps, by_worker = list[StepRecord](), dict[int, list[StepRecord]]()
    for record in records:
        if record.committed and record.spans and (record.kind == "step" or all(span.phase != OUTSIDE for span in record.spans)):
            by_worker.setdefault(record.worker, []).append(record)
            if record.kind == "step":
                steps.append(record)
    by_worker = {worker: mine for worker, mine in by_worker.items() if any(each.kind == "step" for each in mine)}
    workers = tuple(sorted((_of_worker(mine) for mine in by_worker.values()), key=lambda each: (each.rank, each.worker)))
    phases: dict[str, float] = {}
    for phase in _in_order({phase for each in workers for phase in each.phases}):
        phases[phase] = sum(each.phases.get(phase, 0.0) * each.steps for each in workers) / len(steps)
    seconds = sum(phases.values())
    exactness = phases.get(LANE, 0.0) / seconds if seconds else 0.0
    return Breakdown(len({each.step for each in steps}), seconds, phases, workers, _hidden(steps), exactness)


def _of_worker(records: Sequence[StepRecord]) -> WorkerBreakdown:
    """``records``: its steps, and its pauses inside loops."""
    steps = [each for each in records if each.kind == "step"]
    last = max(steps, key=lambda each: each.step)
    phases = _mean_phases(records, len(steps), sum(each.stride for each in steps))
    return WorkerBreakdown(last.worker, last.rank, last.lane_count, len(steps), sum(phases.values()), phases, last.generation)


def _mean_phases(records: Sequence[StepRecord], recorded: int, all_steps: int) -> dict[str, float]:
    totals: dict[str, int] = {}
    for record in records:
        for span in record.spans:
            if record.kind == "step" or span.phase in _RARE:
                totals[span.phase] = totals.get(span.phase, 0) + span.us
    return {phase: totals[phase] / 1e6 / (all_steps if phase in _RARE else recorded) for phase in _in_order(totals)}


def _in_order(phases: Collection[str]) -> list[str]:
    return [phase for phase in PHASES if phase in phases] + sorted(phase for phase in phases if phase not in PHASES)


def _hidden(records: Sequence[StepRecord]) -> float | None:
    """Times in which several buckets are under way count once."""
    hidden = total = 0
    for record in records:
        if record.size < 2 or not record.buckets:
            continue
        backwards = [(span.begin_us, span.end_us) for span in record.spans if span.phase == BACKWARD]
        for begin, end in _union([(each.sent_us, each.done_us) for each in record.buckets if each.done_us != UNKNOWN]):
            total += end - begin
            hidden += sum(max(0, min(end, until) - max(begin, since)) for since, until in backwards)
    return hidden / total if total else None


def _union(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for begin, end in sorted(each for each in intervals if each[1] > each[0]):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found
