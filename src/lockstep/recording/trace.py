"""Some steps of a run as a trace: JSON in Chrome's trace event format, which ui.perfetto.dev and chrome://tracing open. Pure.

    process "rank 2 (worker 5)"     one for each worker, and one named "run"
      thread "steps"                a slice for each step; below it a slice for each phase
      thread "buckets"              a slice for each bucket, from its deposit to its completion; more threads if they overlap
      thread "complete"             a slice of 1 us when the average of a bucket is complete
    flows                           from the deposit of a bucket on each worker to its completion on each worker
    instant events                  faults, generations, checkpoints, verdicts

All times are by the clock of the machine that supervises the run, in microseconds from the first step of the trace. Buckets whose
completion is not known are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lockstep.recording.records import UNKNOWN, StepRecord
from lockstep.recording.text import plural

Event = dict[str, Any]

_RUN = 0
_STEPS, _COMPLETE, _BUCKETS = 1, 2, 3
"""Threads of a worker. Those of buckets have the numbers from 3 on."""
_MAX_ALL_TO_ALL = 8
"""Among more workers, only the last deposit of a bucket has flows: the others waited for it."""


def make_trace(records: Iterable[StepRecord], events: Iterable[Mapping[str, Any]], first: int, last: int) -> dict[str, Any]:
    """Return the trace of the steps ``first`` to ``last``, both included, with the pauses between them.

    ``events``: lines of events.jsonl that are not damaged. Those in the time of these steps become instant events.
    """
    chosen = sorted((each for each in records if first <= each.step <= last and each.spans), key=lambda each: each.at)
    if not chosen:
        return {"traceEvents": [], "displayTimeUnit": "ms"}
    begin = chosen[0].at
    end = max(each.at + each.seconds for each in chosen)
    by_worker: dict[int, list[StepRecord]] = {}
    for record in chosen:
        by_worker.setdefault(record.worker, []).append(record)
    made = _names(_RUN, "run", -1, {_STEPS: "events"})
    buckets: list[_Bucket] = []
    for worker, mine in by_worker.items():
        made += _steps_of(worker, mine, begin)
        found = _buckets_of(worker, mine, begin)
        made += [event for bucket in found for event in bucket.slices()]
        tracks = {each.thread for each in found}
        threads = {_STEPS: "steps", **({_COMPLETE: "complete"} if found else {})}
        threads |= {thread: "buckets" if thread == _BUCKETS else f"buckets {thread - _BUCKETS + 1}" for thread in sorted(tracks)}
        made += _names(_pid(worker), f"rank {mine[-1].rank} (worker {worker})", mine[-1].rank, threads)
        buckets += found
    made += _flows(buckets)
    made += [each for line in events if (each := _instant(line, begin, end)) is not None]
    return {"traceEvents": made, "displayTimeUnit": "ms"}


def _steps_of(worker: int, records: Sequence[StepRecord], begin: float) -> list[Event]:
    """Slices of one thread must not overlap, though clocks are rounded."""
    made: list[Event] = []
    free_us = 0
    for record in records:
        at_us = _us(record.at - begin)
        first_us = max(at_us, free_us)
        free_us = max(first_us, at_us + record.spans[-1].end_us)
        name = f"step {record.step}" if record.kind == "step" else f"pause after step {record.step}"
        facts: dict[str, Any] = {"step": record.step, "epoch": record.epoch, "generation": record.generation}
        facts |= {"lanes": f"{record.lanes[0]} to {record.lanes[1] - 1}", "samples": record.samples}
        facts |= {"memory_bytes": record.memory_bytes, "link_us": record.link_us, "page_faults": record.page_faults}
        if not record.committed:
            name += " (repeated)"
        made.append(_slice(name, record.kind, _pid(worker), _STEPS, first_us, free_us - first_us, facts))
        for span in record.spans:
            from_us, to_us = max(first_us, at_us + span.begin_us), at_us + span.end_us
            if to_us > from_us:
                cpu = {"cpu_us": span.cpu_us, "queue_us": span.queue_us}
                made.append(_slice(span.phase, "phase", _pid(worker), _STEPS, from_us, to_us - from_us, cpu))
    return made


class _Key(NamedTuple):
    """The same on all workers. ``phase``: a step with several phases deposits a bucket in each of them; 0 is the first."""

    generation: int
    step: int
    committed: bool
    bucket: int
    phase: int


@dataclass(frozen=True)
class _Bucket:
    """One bucket of one phase of a step on one worker."""

    key: _Key
    worker: int
    thread: int
    sent_us: int
    done_us: int
    complete_us: int
    nbytes: int

    def slices(self) -> list[Event]:
        name, step = f"bucket {self.key.bucket}", {"step": self.key.step, "bytes": self.nbytes}
        pid = _pid(self.worker)
        return [
            _slice(name, "bucket", pid, self.thread, self.sent_us, max(1, self.done_us - self.sent_us), step),
            _slice(f"{name} complete", "bucket", pid, _COMPLETE, self.complete_us, 1, step),
        ]


def _buckets_of(worker: int, records: Sequence[StepRecord], begin: float) -> list[_Bucket]:
    found: list[_Bucket] = []
    free_us: list[int] = []  # by thread: when its last slice ends
    complete_us = 0
    rows: list[tuple[int, int, _Key, int]] = []  # (sent, done, key, bytes)
    for record in records:
        at_us, phases = _us(record.at - begin), Counter[int]()
        for each in record.buckets:
            if each.done_us != UNKNOWN:
                key = _Key(record.generation, record.step, record.committed, each.bucket, phases[each.bucket])
                rows.append((at_us + each.sent_us, at_us + each.done_us, key, each.nbytes))
            phases[each.bucket] += 1
    places = {}
    for sent, done, key, _ in sorted(rows, key=lambda row: row[0]):
        thread = next((number for number, free in enumerate(free_us) if free <= sent), len(free_us))
        free_us[thread : thread + 1] = [max(done, sent + 1)]
        places[key] = _BUCKETS + thread
    for sent, done, key, nbytes in sorted(rows, key=lambda row: row[1]):
        complete_us = max(done, complete_us + 1, sent)
        found.append(_Bucket(key, worker, places[key], sent, done, complete_us, nbytes))
    return found


def _flows(buckets: Sequence[_Bucket]) -> list[Event]:
    """The average is complete on a worker when all workers have deposited their part."""
    made: list[Event] = []
    same: dict[_Key, list[_Bucket]] = {}
    for bucket in buckets:
        same.setdefault(bucket.key, []).append(bucket)
    for key, everywhere in same.items():
        last = max(everywhere, key=lambda each: each.sent_us)
        sources = everywhere if len(everywhere) <= _MAX_ALL_TO_ALL else [last]
        for source in sources:
            for target in everywhere:
                common = {"name": f"bucket {key.bucket}", "cat": "flow", "id": len(made) // 2 + 1}
                at = {"pid": _pid(source.worker), "tid": source.thread, "ts": source.sent_us}
                made.append({"ph": "s", **common, **at})
                at = {"pid": _pid(target.worker), "tid": _COMPLETE, "ts": target.complete_us}
                made.append({"ph": "f", "bp": "e", **common, **at})
    return made


def _instant(line: Mapping[str, Any], begin: float, end: float) -> Event | None:
    time, name = line["time"], _event_name(line)
    if not begin <= time <= end or not name:
        return None
    facts = {key: value for key, value in line.items() if key not in ("time", "kind")}
    return {
        "ph": "i",
        "s": "g",
        "name": name,
        "cat": line["kind"],
        "pid": _RUN,
        "tid": _STEPS,
        "ts": _us(time - begin),
        "args": facts,
    }


def _event_name(line: Mapping[str, Any]) -> str:
    """What people should see of a line of events.jsonl; empty: nothing."""
    kind = line["kind"]
    if kind == "event":
        forms = [action["Form"] for action in line.get("actions") or () if "Form" in action]
        return f"generation {forms[-1]['number']}: {plural(len(forms[-1]['members']), 'worker')}" if forms else ""
    if kind == "exited":
        return f"worker {line['worker']} ended: {line.get('how')}"
    if kind == "stopped":
        return f"worker {line['worker']} continues after a stop"
    if kind == "verdict":
        return line.get("sentence") or "no worker is slower than the others"
    if kind == "saved":
        return f"checkpoint of step {line['step']}"
    return kind if kind in ("signal", "machine lost") else ""


def _names(pid: int, process: str, place: int, threads: Mapping[int, str]) -> list[Event]:
    made = [_meta("process_name", pid, 0, name=process), _meta("process_sort_index", pid, 0, sort_index=place)]
    for thread, name in threads.items():
        made += [_meta("thread_name", pid, thread, name=name), _meta("thread_sort_index", pid, thread, sort_index=thread)]
    return made


def _meta(kind: str, pid: int, tid: int, **args: Any) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _slice(name: str, category: str, pid: int, tid: int, at_us: int, us: int, args: Mapping[str, Any]) -> Event:
    return {"ph": "X", "name": name, "cat": category, "pid": pid, "tid": tid, "ts": at_us, "dur": us, "args": dict(args)}


def _pid(worker: int) -> int:
    return worker + 1


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
