"""LaneLog: averages what the user logs in each lane over all lanes, by weight. The averages have the same bits on every worker.

Logged values are part of the state. Each worker shares its entries with all others: before a step commits (under an agent,
where the host has waited for the averages on the GPU anyway), before the workers change, before a checkpoint, and every few
steps. From then on every worker holds them, so they survive its death, and a newcomer or a checkpoint receives them. A step
commits only when every worker has the entries of all. A worker that dies takes along what it has logged since: log before
``opt.step()``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from lockstep.comm.base import Comm
from lockstep.comm.exchange import gather_bytes
from lockstep.errors import UsageError
from lockstep.observe.tracker_backlog import TrackerBacklog, TrackerReport

_REPORT = "report"  # beside the keys of entries, which have slashes
Sink = Callable[[int, dict[str, float]], None]
"""Receives (step, averages) on rank 0."""
Averages = list[tuple[int, float, dict[str, float]]]
"""(step, the weight of all lanes of the step, averages), sorted by step."""
Collected = tuple[Averages, TrackerReport | None]
"""The averages, and what rank 0 has said about its trackers."""


class LaneLog:
    """Collects logged values: ``note`` in any micro-batch, ``share`` in each step, ``collect`` and ``publish`` between steps.

    ``latest`` holds the newest averages. ``epoch_means`` returns those of an epoch: of the averages of its steps so far, by the
    weight of each step. They are updated in the order of the steps, so they have the same bits on any number of workers.
    """

    def __init__(self, sinks: list[Sink], backlog: TrackerBacklog) -> None:
        self.latest: dict[str, float] = {}
        self._sinks, self._backlog = sinks, backlog
        self._mine: list[_Entry] = []  # what this worker has not shared yet
        # "step/phase/lane/number" -> [step, lane, weight, {name: hex}], equal on every worker
        self._shared: dict[str, list[Any]] = {}
        self._published = -1  # the last step whose averages were published
        self._step_weights: dict[int, float] = {}  # of all lanes, for each committed step since the last exchange
        self._whole = -1  # the last step whose loop body has ended on this worker
        self._epoch_start = 0  # the step after which the current epoch began
        self._means: dict[str, list[float]] = {}  # name -> [mean, weight], of the epoch that began after step ...
        self._means_of = 0  # ... this one
        self._number = 0
        self._noted_step, self._number_in_step = -1, 0

    def note(self, step: int, lane: int, values: Mapping[str, Any], *, phase: int = 0) -> None:
        """Keep what the user logged in one lane of a phase of a step. Its weight is known when the lane has ended.

        Raises:
            UsageError: If a value is not a number or a tensor of one element.
        """
        self._number += 1
        self._mine.append(_Entry(step, phase, lane, self._number, self._plain(values), None))

    def note_of_step(self, step: int, values: Mapping[str, Any], *, phase: int = 0) -> None:
        """Keep what the user logged for the step, on every worker alike: as one value of weight 1, not one of each worker."""
        self._number_in_step = self._number_in_step + 1 if step == self._noted_step else 0
        self._noted_step = step
        self._mine.append(_Entry(step, phase, -1, self._number_in_step, self._plain(values), 1.0))

    def _plain(self, values: Mapping[str, Any]) -> dict[str, Any]:
        kept: dict[str, Any] = {}
        for name, value in values.items():
            if isinstance(value, Tensor):
                if value.numel() != 1:
                    raise UsageError(
                        f"run.log({name}=...) got a tensor of shape {list(value.shape)}. Log one number, for example {name}.mean()."
                    )
                kept[name] = value.detach().clone()
            else:
                try:
                    kept[name] = float(value)
                except (TypeError, ValueError):
                    raise UsageError(
                        f"run.log({name}={value!r:.60}) is not a number. Log a number or a tensor of one element."
                    ) from None
        return kept

    def weigh(self, weight: float) -> None:
        """Give the values that were noted since the last call this weight. Called at the end of each micro-batch."""
        for entry in self._mine:
            if entry.weight is None:
                entry.weight = weight

    def weigh_step(self, step: int, weight: float, *, is_whole: bool = True) -> None:
        """Note the weight of all lanes of a committed step. All workers call it. ``is_whole``: its loop body has ended."""
        self._step_weights[step] = weight
        if is_whole:
            self._whole = step

    @property
    def is_settled(self) -> bool:
        """Whether every committed step was exchanged, and rank 0's trackers hold it. The same on every worker."""
        return not self._step_weights and not self._backlog.steps

    def start_epoch(self, step: int) -> None:
        """An epoch begins after ``step`` steps. Until values of it are published, ``epoch_means`` shows the epoch before it."""
        self._epoch_start = step

    def epoch_means(self) -> dict[str, float]:
        return {name: mean for name, (mean, _) in self._means.items()}

    def discard_step(self, step: int, phase: int) -> None:
        """Drop the values of a phase that did not commit: it will run again, and log again."""
        self._mine = [entry for entry in self._mine if (entry.step, entry.phase) != (step, phase)]
        self._shared = {key: entry for key, entry in self._shared.items() if not key.startswith(f"{step}/{phase}/")}

    def means(self, comm: Comm, step: int, phase: int) -> dict[str, float]:
        """Return the averages of what was logged in the lanes of one phase. All workers must call this after the phase."""
        self.share(comm)
        found = [entry for key, entry in self._shared.items() if key.startswith(f"{step}/{phase}/") and entry[1] >= 0]
        averages = average(found)
        return averages[0][1] if averages else {}

    def share(self, comm: Comm) -> None:
        """Give this worker's new entries to all workers. All workers must call this. The host waits for values on a GPU."""
        self.share_report(comm, None)

    def share_report(self, comm: Comm, report: TrackerReport | None) -> TrackerReport | None:
        """Do what ``share`` does, and return the ``report`` of rank 0."""
        mine: dict[str, Any] = self._to_share()
        if report is not None:
            mine[_REPORT] = report
        texts = [json.dumps(mine).encode() if mine else b""]
        if comm.size > 1:
            texts = gather_bytes(comm, texts[0], "what was logged")
        everyone = [json.loads(text) if text else {} for text in texts]
        told = [each.pop(_REPORT, None) for each in everyone]
        self._merge(everyone)
        return (told[0][0], told[0][1]) if told[0] is not None else None

    def _to_share(self) -> dict[str, Any]:
        return {entry.key: entry.packed() for entry in self._mine if entry.weight is not None}

    def collect(self, comm: Comm, report: TrackerReport | None = None) -> Collected:
        """Return the averages of all entries that were not published yet, by step, and the ``report`` of rank 0.

        All workers must call this between steps.
        """
        report = self.share_report(comm, report)
        return self._averages_of(list(self._shared.values())), report

    def collect_alone(self, *, is_lone: bool) -> Collected:
        """Return what ``collect`` returns, as far as this worker knows it alone. ``is_lone``: there are no other workers.

        Under an agent every worker holds the values of all steps, except what was logged in the last one after the commit. So if
        there are other workers, the last step is left out unless its loop body has ended, and nothing was logged then.
        """
        if is_lone:
            self._merge([self._to_share()])
            last = max(self._step_weights, default=-1)
        else:
            last = min([self._whole, *(entry.step - 1 for entry in self._mine)])
        return self._averages_of([entry for entry in self._shared.values() if entry[0] <= last]), None

    def _averages_of(self, entries: list[Any]) -> Averages:
        return [(step, self._step_weights.get(step, 0.0), values) for step, values in average(entries)]

    def publish(self, collected: Collected, *, is_main: bool) -> None:
        """Remember averages as published, add them to the backlog, and pass them to the sinks if this worker is rank 0.

        A sink gets each step at most once: not at all if rank 0 dies before it has called the sink.
        """
        averages, report = collected
        self._backlog.confirm(report)
        for step, weight, values in averages:
            self.latest, self._published = values, step
            self._add_to_epoch(step, weight, values)
            self._backlog.add(step, values)
            for sink in self._sinks if is_main else []:
                sink(step, values)
        self._step_weights = {}
        self._merge([])

    def confirm(self, report: TrackerReport | None) -> None:
        """Remember what rank 0 has said about its trackers."""
        self._backlog.confirm(report)

    def realign(self, comm: Comm) -> None:
        """Give every worker what some worker has received. All workers must call this, after a worker was lost."""
        if comm.size > 1:
            texts = gather_bytes(comm, json.dumps(self._shared).encode(), "what was logged before a worker was lost")
            self._merge([json.loads(text) for text in texts])

    def capture(self) -> dict[str, Any]:
        return {
            "published": self._published,
            "shared": json.dumps(self._shared),
            "step_weights": dict(self._step_weights),
            "epoch_start": self._epoch_start,
            "trackers": self._backlog.capture() if self._backlog.is_kept else None,
            **self.averages(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self._published, self._epoch_start = state["published"], state["epoch_start"]
        self._shared, self._mine = json.loads(state["shared"]), []
        self._step_weights = dict(state["step_weights"])
        self._backlog.restore(state.get("trackers"))  # checkpoints of earlier versions have none
        self.adopt_averages(state)

    def averages(self) -> dict[str, Any]:
        """Return what the user can read, as plain data."""
        means = {name: list(mean) for name, mean in self._means.items()}
        return {"latest": dict(self.latest), "means": means, "means_of": self._means_of}

    def adopt_averages(self, state: Mapping[str, Any]) -> None:
        """Let the user read what ``averages`` returned, on this worker or another one."""
        self.latest, self._means_of = dict(state["latest"]), state["means_of"]
        self._means = {name: list(mean) for name, mean in state["means"].items()}

    def _add_to_epoch(self, step: int, weight: float, values: Mapping[str, float]) -> None:
        if step <= self._epoch_start:  # of an epoch that was left before its values were exchanged
            return
        if self._means_of != self._epoch_start:
            self._means, self._means_of = {}, self._epoch_start
        for name, value in values.items():
            mean, total = self._means.get(name, (value, 0.0))
            total += weight
            if value != mean and total:  # equal values have exactly this mean
                mean += (value - mean) * (weight / total)
            self._means[name] = [mean, total]

    def _merge(self, received: list[dict[str, Any]]) -> None:
        for entries in received:
            self._shared |= entries
        self._shared = {key: entry for key, entry in self._shared.items() if entry[0] > self._published}
        self._mine = [entry for entry in self._mine if entry.key not in self._shared and entry.step > self._published]


class _Entry:
    """What the user logged with one call. ``weight`` is None until the micro-batch's weight is known."""

    def __init__(self, step: int, phase: int, lane: int, number: int, values: dict[str, Any], weight: float | None) -> None:
        self.step, self.phase, self.lane, self.values, self.weight = step, phase, lane, values, weight
        self.key = f"{step}/{phase}/{lane}/{number}"

    def packed(self) -> list[Any]:
        return [self.step, self.lane, self.weight, {name: float(value).hex() for name, value in self.values.items()}]


def average(entries: list[Any]) -> list[tuple[int, dict[str, float]]]:
    """Convert entries [step, lane, weight, {name: hex}] into (step, weighted means), sorted by step.

    Sums are exactly rounded (``math.fsum``), so the result does not depend on the order of the lanes.
    """
    by_step: dict[int, dict[str, list[tuple[float, float]]]] = {}
    for step, _, weight, values in sorted(entries, key=lambda entry: entry[:2]):
        for name, value in values.items():
            by_step.setdefault(step, {}).setdefault(name, []).append((weight, float.fromhex(value)))
    return [(step, {name: _mean(pairs) for name, pairs in by_step[step].items()}) for step in sorted(by_step)]


def _mean(pairs: list[tuple[float, float]]) -> float:
    total = math.fsum(weight for weight, _ in pairs)
    if total == 0:
        return math.nan
    values = {value for weight, value in pairs if weight}
    if len(values) == 1:  # a value of the step: which lanes have logged it depends on the number of workers
        return values.pop()
    products = [weight * value for weight, value in pairs if weight]
    return math.fsum(products) / total if all(map(math.isfinite, products)) else sum(products)
