"""StepGroup and ValueGroup: what StepTiers adds up of the records of a group of steps, and how it is sent to the page. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep.recording.records import OWN_WORK, Metrics, StepRecord


@dataclass
class WorkerSums:
    """One worker in a group of steps. ``own_s``: the time of its own work, in which it waits for nobody."""

    steps: int = 0
    seconds: float = 0.0
    own_s: float = 0.0
    lanes: int = 0

    def absorb(self, other: WorkerSums) -> None:
        self.steps += other.steps
        self.seconds += other.seconds
        self.own_s += other.own_s
        self.lanes = other.lanes or self.lanes


@dataclass
class StepGroup:
    """Times and samples of a group of steps, as sums over all workers. Steps that were repeated add time and no samples."""

    first: int = 0
    last: int = 0
    changed: int = 0
    begin: float = math.inf
    end: float = -math.inf
    commits: int = 0
    """Records of committed steps: one for each worker and step."""
    records: int = 0
    sizes: int = 0
    samples: int = 0
    seconds: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    workers: dict[int, WorkerSums] = field(default_factory=dict)

    def add(self, record: StepRecord) -> None:
        self.begin, self.end = min(self.begin, record.at), max(self.end, record.at + record.seconds)
        self.records += 1
        self.sizes += record.size
        self.seconds += record.seconds
        for span in record.spans:
            self.phases[span.phase] = self.phases.get(span.phase, 0.0) + span.us / 1e6
        if record.committed:
            self.commits += 1
            self.samples += record.samples
            sums = WorkerSums(1, record.seconds, record.phase_s(*OWN_WORK), record.lane_count)
            self.workers.setdefault(record.worker, WorkerSums()).absorb(sums)

    def absorb(self, other: StepGroup) -> None:
        self.begin, self.end = min(self.begin, other.begin), max(self.end, other.end)
        self.commits += other.commits
        self.records += other.records
        self.sizes += other.sizes
        self.samples += other.samples
        self.seconds += other.seconds
        for phase, seconds in other.phases.items():
            self.phases[phase] = self.phases.get(phase, 0.0) + seconds
        for worker, sums in other.workers.items():
            self.workers.setdefault(worker, WorkerSums()).absorb(sums)

    @property
    def cells(self) -> int:
        return 8 + len(self.phases) + 4 * len(self.workers)

    @property
    def size(self) -> float:
        """The mean number of workers. It is right too while the records of some workers are still missing."""
        return self.sizes / self.records if self.records else 0.0

    @property
    def samples_per_step(self) -> float:
        return self.samples / self.commits * self.size if self.commits else 0.0

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.seconds * self.size if self.seconds else 0.0

    @property
    def phase_seconds(self) -> dict[str, float]:
        """Mean seconds per committed step, for each phase."""
        return {phase: seconds / self.commits for phase, seconds in self.phases.items()} if self.commits else {}

    def to_json(self, began: float) -> dict[str, Any]:
        """``t`` counts from ``began``. ``w``: for each worker [own seconds per step, lanes, seconds per step]."""
        mean = 1 / max(1, self.commits)
        return {
            "s": self.first,
            "e": self.last,
            "t": round((self.begin + self.end) / 2 - began, 3),
            "b": round(self.begin - began, 3),
            "d": short(self.seconds * mean),
            "r": short(self.samples_per_s),
            "q": short(self.commits / self.seconds if self.seconds else 0.0),
            "n": short(self.size),
            "ph": {phase: short(seconds * mean) for phase, seconds in self.phases.items()},
            "w": {
                id: [short(each.own_s / each.steps), each.lanes, short(each.seconds / each.steps)]
                for id, each in self.workers.items()
            },
        }


@dataclass
class ValueSums:
    """One name in a group of steps."""

    count: int = 0
    total: float = 0.0
    least: float = math.inf
    most: float = -math.inf

    def add(self, value: float) -> None:
        self.absorb(ValueSums(1, value, value, value))

    def absorb(self, other: ValueSums) -> None:
        self.count += other.count
        self.total += other.total
        self.least, self.most = min(self.least, other.least), max(self.most, other.most)


@dataclass
class ValueGroup:
    """The logged values of a group of steps. Values that are not finite are counted, and not added."""

    first: int = 0
    last: int = 0
    changed: int = 0
    at: float = 0.0
    values: dict[str, ValueSums] = field(default_factory=dict)

    def add(self, metrics: Metrics) -> None:
        self.at = max(self.at, metrics.at)
        for name, value in metrics.values.items():
            sums = self.values.setdefault(name, ValueSums())
            if math.isfinite(value):
                sums.add(value)

    def absorb(self, other: ValueGroup) -> None:
        self.at = max(self.at, other.at)
        for name, sums in other.values.items():
            self.values.setdefault(name, ValueSums()).absorb(sums)

    @property
    def cells(self) -> int:
        return 4 + 4 * len(self.values)

    def to_json(self, began: float) -> dict[str, Any]:
        """``v``: for each name [mean, least, most]; null if no value was finite."""
        values: Mapping[str, Any] = {
            name: [short(each.total / each.count), short(each.least), short(each.most)] if each.count else None
            for name, each in self.values.items()
        }
        return {"s": self.first, "e": self.last, "t": round(self.at - began, 3), "v": values}


def short(value: float) -> float | None:
    """Five significant digits; None if the number is not finite, which JSON cannot say."""
    return float(f"{value:.5g}") if math.isfinite(value) else None
