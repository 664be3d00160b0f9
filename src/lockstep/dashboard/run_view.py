"""RunView: all that the page, the report and the Prometheus text show of one run, in bounded memory. No files, no clock.

It is fed with what RecordingReader finds. ``changes(since)`` returns what is new after a version, as plain data: the page gets
everything once and then only changes.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from itertools import count
from typing import Any

from lockstep.dashboard.run_history import RunHistory
from lockstep.dashboard.step_groups import StepGroup, ValueGroup, short
from lockstep.dashboard.step_tiers import StepTiers
from lockstep.recording.breakdown import breakdown
from lockstep.recording.costs_text import LEAST_WAIT, costs_text
from lockstep.recording.reader import NewRecords
from lockstep.recording.records import CHECKPOINT, EVALUATE, RECOVERY, Metrics, StepRecord
from lockstep.recording.summary import RunSummary
from lockstep.recording.waits import waits

MAX_METRICS = 64
"""So many names of logged values are shown, in the order in which they first appear."""
_MAX_PAUSES = 2000
_MIN_PAUSE_S = 0.005
_RECENT = 400
_RECENT_STEPS = 12
"""If a run has so many workers that 400 records are fewer steps than this, more records are kept."""
_RARE = frozenset({CHECKPOINT, EVALUATE, RECOVERY})


class RunView:
    """``name`` is what the page calls the run."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.version = 1
        self.history = RunHistory()
        self.summary = RunSummary()
        self.steps: StepTiers[StepGroup] = StepTiers(StepGroup)
        self.metrics: StepTiers[ValueGroup] = StepTiers(ValueGroup)
        self.latest: dict[int, StepRecord] = {}
        """The newest record of each worker."""
        self.values: dict[str, float] = {}
        """The newest value of each name."""
        self.phase_seconds: dict[str, float] = {}
        """Seconds in each phase, as mean over the workers. Grows only. Steps between recorded ones are like them."""
        self.failures = 0
        """How many members of a generation were lost."""
        self.step = 0
        """The newest committed step."""
        self.newest_record = 0.0
        """When the newest record ended, in seconds since 1970."""
        self._value_steps: dict[str, int] = {}
        self._latest_changed: dict[int, int] = {}
        self._pauses: deque[tuple[int, dict[str, Any]]] = deque(maxlen=_MAX_PAUSES)
        self._recent: list[tuple[int, int, StepRecord]] = []
        """A heap of those with the largest steps: older files are read after newer ones."""
        self._order = count()
        self._sums_version, self._costs_text, self._summary_lines = 0, "", list[str]()
        self._waits: dict[int, tuple[float, int | None]] = {}
        self._new_records = 0
        self._samples = 0.0

    def feed(self, found: NewRecords) -> bool:
        """Take what is new. Returns whether there was anything."""
        if not (found.steps or found.metrics or found.events):
            return False
        self.version += 1
        for line in found.events:
            self.history.add(line, self.version)
            self.summary.add_event(line)
            if line.get("kind") == "end" and isinstance(line.get("step"), int):
                self.step = max(self.step, line["step"])
        for record in found.steps:
            self._take_record(record)
            self.summary.add_record(record)
        for metrics in found.metrics:
            self._take_metrics(metrics)
        self.summary.values = self.values
        if found.events:
            self.failures = len(self.summary.faults)
        return True

    def changes(self, since: int = 0) -> dict[str, Any]:
        """What is new after version ``since``, as plain data. 0: everything. Times count from the beginning of the run."""
        began = self.began
        self._sum_up()
        workers = [self._worker(id) for id, record in self.latest.items() if self._latest_changed[id] > since]
        pauses = [{**facts, "t": round(facts["t"] - began, 3)} for changed, facts in self._pauses if changed > since]
        return {
            "version": self.version,
            "run": self._facts(),
            "steps": self.steps.changes(since, lambda group: group.to_json(began)),
            "metrics": self.metrics.changes(since, lambda group: group.to_json(began)),
            "workers": workers,
            "pauses": pauses,
            "summary": self._summary_lines,
            **self.history.since(since),
        }

    @property
    def began(self) -> float:
        return self.history.began

    @property
    def newest(self) -> float:
        """When the last thing happened that is known, in seconds since 1970."""
        return max(self.history.newest, self.newest_record)

    @property
    def samples(self) -> int:
        """How many samples were committed. Steps that were not recorded count as many as recorded ones near them."""
        last, total = 0, 0.0
        for group in self.steps.coarse():
            total += group.samples_per_step * (group.last - last)
            last = group.last
        self._samples = max(self._samples, total)  # so that the number never falls
        return round(self._samples)

    @property
    def samples_per_s(self) -> float:
        """Over the last recorded steps."""
        groups = list(self.steps.fine())[-20:]
        seconds = sum(group.seconds / group.size for group in groups if group.size)
        return sum(group.samples for group in groups) / seconds if seconds else 0.0

    def _take_record(self, record: StepRecord) -> None:
        self.newest_record = max(self.newest_record, record.at + record.seconds)
        self._take_pauses(record)
        self._add_phases(record)
        if record.kind == "pause":
            self.step = max(self.step, record.step)  # the steps before it may not be recorded, if they are short
            return
        if record.step < 1 or not math.isfinite(record.at):
            return
        self.steps.add(record.step, self.version, lambda group: group.add(record))
        push = heapq.heappush if len(self._recent) < max(_RECENT, _RECENT_STEPS * record.size) else heapq.heappushpop
        push(self._recent, (record.step, next(self._order), record))
        self._new_records += 1
        if record.committed:
            self.step = max(self.step, record.step)
        before = self.latest.get(record.worker)
        if before is None or record.at >= before.at:
            self.latest[record.worker] = record
            self._latest_changed[record.worker] = self.version

    def _add_phases(self, record: StepRecord) -> None:
        """Steps that are not recorded are like the next one that is, but for rare phases: those are always recorded."""
        steps = record.stride if record.kind == "step" and record.committed else 1
        for span in record.spans:
            seconds = span.us / 1e6 / max(1, record.size) * (1 if span.phase in _RARE else steps)
            self.phase_seconds[span.phase] = self.phase_seconds.get(span.phase, 0.0) + seconds

    def _take_pauses(self, record: StepRecord) -> None:
        for span in record.spans:
            if span.us >= _MIN_PAUSE_S * 1e6 and (record.kind == "pause" or span.phase in _RARE):
                began = record.at + span.begin_us / 1e6
                facts = {"worker": record.worker, "t": began, "d": round(span.us / 1e6, 4), "phase": span.phase}
                self._pauses.append((self.version, facts))

    def _take_metrics(self, metrics: Metrics) -> None:
        free = iter(range(MAX_METRICS - len(self.values)))  # so many new names may come
        known = {name: value for name, value in metrics.values.items() if name in self.values or next(free, None) is not None}
        for name, value in known.items():
            if metrics.step >= self._value_steps.get(name, metrics.step):
                self.values[name], self._value_steps[name] = value, metrics.step
        self.step = max(self.step, metrics.step)
        kept = Metrics(metrics.step, metrics.at, known)
        if metrics.step >= 1:
            self.metrics.add(metrics.step, self.version, lambda group: group.add(kept))

    def _facts(self) -> dict[str, Any]:
        history = self.history
        return {
            "name": self.name,
            "began": history.began,
            "elapsed": round(max(0.0, self.newest - history.began), 3),
            "ended": round(history.ended - history.began, 3) if history.ended else None,
            "code": history.code,
            "why": history.why,
            "step": self.step,
            "generation": history.generations[-1].number if history.generations else None,
            "members": list(history.members),
            "failures": self.failures,
            "costs": self._costs_text,
            "checkpoint": history.checkpoint_step,
            "rate": short(self.samples_per_s),
            "verdict": history.verdict,
            "values": {name: f"{value:.5g}" for name, value in self.values.items()},
        }

    def _sum_up(self) -> None:
        """Compute what takes long, once for each version."""
        if self._sums_version != self.version:
            self._sums_version = self.version
            if self._new_records * 20 >= len(self._recent) or self.history.ended:  # of many workers it takes long
                recent, self._new_records = [record for *_, record in self._recent], 0
                self._costs_text, self._waits = costs_text(recent), waits_of_workers(recent)
            self._summary_lines = list(self.history.summary) or self.summary.lines()

    def _worker(self, id: int) -> dict[str, Any]:
        record = self.latest[id]
        return {
            "id": id,
            "rank": record.rank,
            "step": record.step,
            "lanes": list(record.lanes),
            "size": record.size,
            "generation": record.generation,
            "waits": self._waits.get(id),
            "memory": record.memory_bytes,
            "gpuMemory": record.gpu_memory_bytes,
            "gpu": record.gpu_percent,
            "phases": {phase: round(record.phase_s(phase), 6) for phase in dict.fromkeys(span.phase for span in record.spans)},
        }


def waits_of_workers(records: Sequence[StepRecord]) -> dict[int, tuple[float, int | None]]:
    """For each worker the part of a step that it waits, and the worker for which it waits most. None: for none of them long."""
    found: dict[int, tuple[float, int | None]] = {}
    waited = waits(records)
    for each in breakdown(records).workers:
        longest = waited[each.worker].longest if each.worker in waited else None
        whom = longest[0] if longest is not None and longest[1] >= LEAST_WAIT * each.seconds else None
        found[each.worker] = (short(each.waits_s / each.seconds) or 0.0 if each.seconds else 0.0, whom)
    return found
