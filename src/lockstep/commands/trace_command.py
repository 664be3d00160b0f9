"""`lockstep trace RUN --steps A:B -o FILE`: writes some steps of a run as a trace that Perfetto opens."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from lockstep.commands.standard_output import ends_quietly, print_text
from lockstep.commands.status_command import add_run
from lockstep.commands.step_argument import step_range
from lockstep.errors import UsageError
from lockstep.launcher.run_registry import find_run
from lockstep.recording.event_lines import is_event
from lockstep.recording.json_lines import JsonLinesTail
from lockstep.recording.reader import RecordingReader
from lockstep.recording.records import StepRecord
from lockstep.recording.text import plural
from lockstep.recording.trace import make_trace

_DEFAULT_STEPS = 20
_POLL_BYTES = 1 << 18
_LEAST_RECORDS = 2000
"""How many records are kept at least before those that are too old are dropped."""


def add_parsers(commands: Any) -> None:
    help = "write some steps of a run as a trace, which ui.perfetto.dev opens"
    parser = commands.add_parser("trace", help=help, allow_abbrev=False)
    parser.set_defaults(execute=trace)
    add_run(parser, is_optional=False)
    help = "the steps from A up to B, without B: 100:110 are the ten steps 100 to 109 (default: the last 20)"
    parser.add_argument("--steps", type=step_range, metavar="A:B", help=help)
    parser.add_argument("-o", dest="out", metavar="FILE", default="trace.json", help="default: trace.json")


@ends_quietly
def trace(given: argparse.Namespace) -> int:
    """Write the trace, and print where it is and what is in it."""
    path = find_run(given.run)
    recorded, chosen = _read(path, given.steps)
    first, last = steps_to_show(given.steps, recorded, path)
    made = make_trace(chosen, _events(path), first, last)
    try:
        Path(given.out).write_text(json.dumps(made, separators=(",", ":")))
    except OSError as error:
        raise UsageError(f"{given.out} cannot be written ({error.strerror}). Name another file with -o FILE.") from error
    shown = [each for each in chosen if each.kind == "step" and first <= each.step <= last]
    steps, workers = len({each.step for each in shown}), len({each.worker for each in shown})
    size = os.path.getsize(given.out) / 1e6
    print_text(f"{given.out}  {plural(steps, 'step')} on {plural(workers, 'worker')}, {size:.1f} MB. Open it in ui.perfetto.dev\n")
    return 0


def _read(path: Path, asked: tuple[float, float] | None) -> tuple[set[int], list[StepRecord]]:
    """Returns which steps are recorded, and the records of those that were asked for, or of the last ones and a few more."""
    recorded: set[int] = set()
    chosen: list[StepRecord] = []
    limit = _LEAST_RECORDS
    for record in _records(path):
        if record.kind == "step":
            recorded.add(record.step)
        if asked is None or asked[0] <= record.step <= asked[1]:
            chosen.append(record)
        if asked is None and len(chosen) > limit:
            newest = sorted({each.step for each in chosen if each.kind == "step"})[-_DEFAULT_STEPS:]
            chosen = [each for each in chosen if not newest or each.step >= newest[0]]
            limit = max(_LEAST_RECORDS, 2 * len(chosen))
    return recorded, chosen


def _records(path: Path) -> Iterator[StepRecord]:
    """All steps and pauses of a recording, which is read in parts, and is never in memory at once."""
    reader, more = RecordingReader(path), True
    while more:
        found = reader.poll(_POLL_BYTES)
        more = found.more
        yield from found.steps


def _events(path: Path) -> Iterator[dict[str, Any]]:
    """All lines of events.jsonl that are not damaged."""
    tail, more = JsonLinesTail(path / "events.jsonl"), True
    while more:
        yield from filter(is_event, tail.read(_POLL_BYTES))
        more = tail.has_more


def steps_to_show(asked: tuple[float, float] | None, recorded: Collection[int], path: Path) -> tuple[int, int]:
    """Return the first and the last step, both included. ``asked``: what ``--steps`` says. ``recorded``: the steps that there are.

    Raises:
        UsageError: The recording has none of these steps.
    """
    known = sorted(recorded)
    if not known:
        raise UsageError(f"{path} has no recorded step yet. Steps are recorded if the script uses lockstep.Run.")
    if asked is None:
        return known[-_DEFAULT_STEPS:][0], known[-1]
    first, last = max(int(asked[0]), known[0]), int(min(asked[1], known[-1]))
    if not any(first <= step <= last for step in known):
        raise UsageError(
            f"none of the steps of --steps is recorded. There are {len(known)} steps from {known[0]} to {known[-1]}; "
            "of short or old steps only some are kept."
        )
    return first, last
