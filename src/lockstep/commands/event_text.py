"""One line of a recording or of events.jsonl as a sentence for people. Pure."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from lockstep.recording.event_lines import is_event, is_time
from lockstep.recording.records import PHASES, Metrics, StepRecord, parse
from lockstep.recording.text import number, printable

_LEFT_OUT = {"kind", "time", "at"}
_KIND_CHARS = 8


def event_text(line: Mapping[str, Any]) -> str:
    """ "22:15:03.120  exited    worker 1 (pid 4711): SIGKILL"."""
    when = time_of(line)
    clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when)) + f".{int(when % 1 * 1000):03d}"
    return f"{clock}  {printable(str(line.get('kind', ''))):<{_KIND_CHARS}}  {printable(_text(line))}"


def time_of(line: Mapping[str, Any]) -> float:
    """In seconds since 1970; 0 if the line has no time."""
    value = line.get("time", line.get("at"))
    return float(value) if is_time(value) else 0.0


def _text(line: Mapping[str, Any]) -> str:
    record = parse(line)
    if isinstance(record, StepRecord):
        return _step(record)
    if isinstance(record, Metrics):
        return f"step {record.step}: " + ", ".join(f"{name} {number(value)}" for name, value in record.values.items())
    match line.get("kind") if is_event(line) else None:
        case "event":
            event = next(iter(line["event"]), "")
            done = ", ".join(name for action in line.get("actions") or () for name in action)
            return f"{event}: {line.get('why') or _facts(line['event'].get(event, {}))}" + (f" -> {done}" if done else "")
        case "exited" if line.get("how"):
            return f"worker {line['worker']} (pid {line.get('pid')}): {line['how']}"
        case "saved":
            return f"step {line.get('step')} in {line.get('where')}"
        case "signal":
            return f"the run was told to end (signal {line.get('signal')})"
        case "stop requested":
            return "`lockstep stop --kill` was called" if line.get("kill") else "`lockstep stop` was called"
        case "stopped":
            return f"worker {line.get('worker')} was stopped (SIGSTOP) for {number(line['seconds'])} s"
        case "summary":
            return "; ".join(line["lines"])
        case "end":
            return f"code {line.get('code')}: {line.get('why')}"
        case "verdict":
            return line.get("sentence") or "no worker is slower than the others any more"
    return _facts({name: value for name, value in line.items() if name not in _LEFT_OUT})


def _step(record: StepRecord) -> str:
    phases = [f"{phase} {number(record.phase_s(phase) * 1e3)}" for phase in PHASES if record.phase_s(phase) > 0]
    what = "after step" if record.kind == "pause" else "step"
    again = "" if record.committed else ", repeated"
    return f"{what} {record.step}, rank {record.rank}{again}: {number(record.seconds * 1e3)} ms ({', '.join(phases)})"


def _facts(facts: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value if isinstance(value, str) else json.dumps(value)}" for name, value in facts.items())
