"""The Prometheus text of a run (text format 0.0.4): what a monitoring system reads at /metrics. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from lockstep.dashboard.run_view import RunView

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX = "lockstep_"


@dataclass
class Family:
    """All samples of one metric: pairs of labels and value."""

    name: str
    kind: str
    help: str
    samples: list[tuple[dict[str, str], float]] = field(default_factory=list)

    def text(self) -> str:
        name = _PREFIX + self.name
        lines = [f"# HELP {name} {_escape_help(self.help)}", f"# TYPE {name} {self.kind}"]
        lines += [f"{name}{_labels(labels)} {_number(value)}" for labels, value in self.samples]
        return "\n".join(lines) + "\n"


def prometheus_text(runs: Iterable[tuple[RunView, str]]) -> str:
    """The text for some runs, each with its state ("running", "finished", ...). The label ``run`` tells them apart."""
    families: dict[str, Family] = {}
    for view, state in runs:
        for family in _families(view, state):
            known = families.setdefault(family.name, Family(family.name, family.kind, family.help))
            known.samples += [({"run": view.name} | labels, value) for labels, value in family.samples]
    return "".join(family.text() for family in families.values() if family.samples)


def _families(view: RunView, state: str) -> Sequence[Family]:
    history, none = view.history, dict[str, str]()
    members = [view.latest[id] for id in history.members if id in view.latest]
    who = [{"worker": str(each.worker), "rank": str(each.rank)} for each in members]
    gpus = [(labels, each) for labels, each in zip(who, members, strict=True) if each.gpu_percent >= 0]
    is_running = state == "running"
    found = [
        Family("running", "gauge", "1 while the run goes on.", [(none, float(is_running))]),
        Family("steps_total", "counter", "Committed steps.", [(none, view.step)]),
        Family("samples_total", "counter", "Committed samples.", [(none, view.samples)]),
        Family("failures_total", "counter", "Members of a generation that were lost.", [(none, view.failures)]),
        Family("workers", "gauge", "Members of the generation.", [(none, len(history.members) if is_running else 0)]),
        Family("samples_per_second", "gauge", "Over the last recorded steps.", [(none, view.samples_per_s if is_running else 0.0)]),
        Family(
            "phase_seconds_total",
            "counter",
            "Seconds spent in each phase, as mean over workers.",
            [({"phase": phase}, seconds) for phase, seconds in sorted(view.phase_seconds.items())],
        ),
        Family("logged_value", "gauge", "What the script logged last.", [({"name": k}, v) for k, v in view.values.items()]),
        Family(
            "worker_memory_bytes", "gauge", "Resident memory.", [(w, m.memory_bytes) for w, m in zip(who, members, strict=True)]
        ),
        Family("worker_lanes", "gauge", "Lanes of the worker.", [(w, m.lane_count) for w, m in zip(who, members, strict=True)]),
        Family("worker_gpu_memory_bytes", "gauge", "Memory on the GPU.", [(w, m.gpu_memory_bytes) for w, m in gpus]),
        Family("worker_gpu_utilization_ratio", "gauge", "Use of the GPU.", [(w, m.gpu_percent / 100) for w, m in gpus]),
    ]
    if history.generations:
        found.append(Family("generation", "gauge", "Number of the generation.", [(none, history.generations[-1].number)]))
    if history.checkpoint_step >= 0:
        found.append(Family("checkpoint_step", "gauge", "Step of the newest checkpoint.", [(none, history.checkpoint_step)]))
    if view.newest_record:
        found.append(Family("last_record_timestamp_seconds", "gauge", "When the newest step ended.", [(none, view.newest_record)]))
    if history.code is not None:
        found.append(Family("exit_code", "gauge", "Exit code of the run.", [(none, history.code)]))
    return [*found, *(_straggler(view) if is_running else [])]


def _straggler(view: RunView) -> list[Family]:
    verdict = view.history.verdict
    if verdict is None:
        return []
    labels = {name: str(verdict.get(name, "")) for name in ("worker", "rank", "cause")}
    speedup = verdict.get("speedup")
    text = "How much faster the run would be without the worker that the others wait for: 0.11 means 11%."
    return (
        [Family("straggler_speedup_ratio", "gauge", text, [(labels, float(speedup))])] if isinstance(speedup, int | float) else []
    )


def _labels(labels: dict[str, str]) -> str:
    return "{" + ",".join(f'{name}="{_escape_label(value)}"' for name, value in labels.items()) + "}" if labels else ""


def _escape_label(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _escape_help(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(int(value)) if float(value).is_integer() else repr(float(value))
