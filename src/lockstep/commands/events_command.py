"""`lockstep events RUN_DIR`: prints the recording of a run and its events.jsonl, filtered, as JSON lines or as text."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, get_args

from lockstep.commands.event_text import event_text, time_of
from lockstep.commands.standard_output import ends_quietly, print_text
from lockstep.commands.status_command import add_run
from lockstep.commands.step_argument import step_range
from lockstep.commands.time_arguments import moment
from lockstep.errors import UsageError
from lockstep.launcher.arguments import did_you_mean, whole_number
from lockstep.launcher.run_folder import is_in_use
from lockstep.launcher.run_registry import find_run
from lockstep.launcher.worker_ranks import WorkerRanks
from lockstep.plan.membership_events import Event
from lockstep.recording.event_lines import is_event
from lockstep.recording.kinds import KINDS
from lockstep.recording.reader import RecordingReader

_POLL_S = 0.2
_PRINTED = 100
"""How many lines one system call prints."""
_EVENTS = [event.__name__ for event in get_args(Event)]
"""The names of events of membership, in lines of the kind "event"."""


def add_parsers(commands: Any) -> None:
    help = "print what a run has recorded of itself: steps, metrics, faults, decisions"
    parser = commands.add_parser("events", help=help, allow_abbrev=False)
    parser.set_defaults(execute=events)
    add_run(parser, is_optional=False)
    help = "only lines of these kinds: step, metrics, exited, saved, ...; or events of membership: Died, Ready, ..."
    parser.add_argument("--kind", action="append", metavar="KIND,...", help=help)
    parser.add_argument("--rank", type=whole_number(0), metavar="K", help="only lines about the worker that had rank K then")
    parser.add_argument("--worker", type=whole_number(0), metavar="K", help="only lines about worker K")
    help = "only lines about the steps from A up to B, without B; A: and :B and a single number work too"
    parser.add_argument("--steps", type=step_range, metavar="A:B", help=help)
    help = "only lines from this time on: 10min (ago), 14:30 (today), 2026-11-18 14:30, or seconds since 1970"
    parser.add_argument("--since", type=moment, metavar="TIME", help=help)
    parser.add_argument("--until", type=moment, metavar="TIME", help="only lines up to this time")
    help = "go on with what is recorded from now on, until the run has ended"
    parser.add_argument("-f", "--follow", action="store_true", help=help)
    parser.add_argument("--text", action="store_true", help="print sentences for people, not JSON")


@ends_quietly
def events(given: argparse.Namespace) -> int:
    """Print the lines in the order of time. Lines that are recorded later follow in the order in which they arrive."""
    path = find_run(given.run)
    reader, ranks, kinds = RecordingReader(path), WorkerRanks(), kinds_of(given)
    known, is_checked, follows = {*KINDS, *_EVENTS}, False, True

    def is_needed(line: dict[str, Any]) -> bool:
        known.add(str(line.get("kind")))
        return _is_wanted(line, given, kinds) or (given.rank is not None and is_event(line))  # events say who has which rank

    while follows:
        follows = given.follow and is_in_use(path)  # before the files are read: when the run has ended, they are complete
        lines = reader.poll_lines(is_needed)
        if not is_checked:
            _check_kinds(kinds, known)
            is_checked = True
        shown = (line for line in _of_rank(lines, given.rank, ranks) if _is_wanted(line, given, kinds))
        _print(shown, as_text=given.text)
        if follows:
            time.sleep(_POLL_S)
    return 0


def _print(lines: Iterator[dict[str, Any]], *, as_text: bool) -> None:
    while some := list(islice(lines, _PRINTED)):
        print_text("".join((event_text(line) if as_text else json.dumps(line)) + "\n" for line in some))


def _of_rank(lines: Iterable[dict[str, Any]], rank: int | None, ranks: WorkerRanks) -> Iterator[dict[str, Any]]:
    """``lines`` must have all events, in the order of time, unless ``rank`` is None: then all are returned."""
    for line in lines:
        if rank is not None and is_event(line):
            ranks.add(line)
        if rank is None or rank in _ranks_in(line, ranks):
            yield line


def _is_wanted(line: Mapping[str, Any], given: argparse.Namespace, kinds: Collection[str]) -> bool:
    """Whether the line is one that was asked for, but for ``--rank``: not every line says which rank it is about."""
    if kinds and str(line.get("kind")) not in kinds and _event_name(line) not in kinds:
        return False
    if given.worker is not None and given.worker not in workers_in(line):
        return False
    if given.steps is not None and not given.steps[0] <= step_in(line) <= given.steps[1]:
        return False
    at = time_of(line)
    return (given.since is None or at >= given.since) and (given.until is None or at <= given.until)


def kinds_of(given: argparse.Namespace) -> set[str]:
    return {kind.strip() for each in given.kind or () for kind in each.split(",") if kind.strip()}


def _check_kinds(kinds: set[str], known: set[str]) -> None:
    for kind in sorted(kinds - known):
        raise UsageError(f"there is no kind {kind}. {did_you_mean(kind, known)}The kinds are: {', '.join(sorted(KINDS))}.")


def step_in(line: Mapping[str, Any]) -> float:
    """The step that the line is about; NaN, which is in no range, if it is about none."""
    value = line.get("step", _event(line).get("step"))
    return value if isinstance(value, int) and value >= 0 else math.nan


def workers_in(line: Mapping[str, Any]) -> set[int]:
    """The workers that the line is about."""
    several = line.get("workers")
    found = [line.get("worker"), _event(line).get("worker"), *(several if isinstance(several, list) else ())]
    return {each for each in found if isinstance(each, int)}


def _ranks_in(line: Mapping[str, Any], ranks: WorkerRanks) -> set[int | None]:
    return {line["rank"]} if isinstance(line.get("rank"), int) else {ranks.rank_of.get(worker) for worker in workers_in(line)}


def _event(line: Mapping[str, Any]) -> Mapping[str, Any]:
    event = line.get("event")
    inner = next(iter(event.values()), None) if isinstance(event, dict) else None
    return inner if isinstance(inner, dict) else {}


def _event_name(line: Mapping[str, Any]) -> str:
    event = line.get("event")
    return next(iter(event), "") if isinstance(event, dict) else ""
