"""`lockstep status RUN`: what one run does now, or how it has ended."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from lockstep.commands.list_command import as_json, state_text, worker_count_text
from lockstep.commands.plain_text import age_text, one_line, path_text, table
from lockstep.commands.standard_output import ends_quietly, print_text
from lockstep.commands.worker_table import worker_rows
from lockstep.launcher.progress_text import value_texts
from lockstep.launcher.run_registry import LAST, find_run
from lockstep.launcher.run_status import LOST, SILENT, UNKNOWN, RunStatus, read_status
from lockstep.recording.text import duration, printable

_SHOWN_WORKERS = 40
RUN_HELP = (
    "the folder of a run, its name in ./lockstep-runs or as `lockstep ls` shows it, the beginning of such a name, "
    "or last: the newest run below the current directory, or of this machine"
)


def add_run(parser: argparse.ArgumentParser, *, is_optional: bool) -> None:
    """Add the argument RUN, which ``find_run`` reads."""
    default = " (default: last)" if is_optional else ""
    parser.add_argument("run", metavar="RUN", nargs="?" if is_optional else None, default=LAST, help=RUN_HELP + default)


def add_parsers(commands: Any) -> None:
    parser = commands.add_parser("status", help="show what a run does now, or how it has ended", allow_abbrev=False)
    parser.set_defaults(execute=status)
    add_run(parser, is_optional=True)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


@ends_quietly
def status(given: argparse.Namespace) -> int:
    """Print some lines about a run, and a table of its workers if it runs."""
    path = find_run(given.run)
    found = read_status(path)
    if given.json:
        print_text(json.dumps(as_json(found) | {"live": found.live}) + "\n")
        return 0
    print_text("".join(f"{name:<10}  {printable(text)}\n" for name, text in _facts(found, time.time())))
    if found.live is not None and found.live["workers"]:
        headers, rows = worker_rows(found.live)
        print_text("\n" + table(headers, rows[:_SHOWN_WORKERS]))
        if len(rows) > _SHOWN_WORKERS:
            print_text(f"{len(rows) - _SHOWN_WORKERS} more workers: `lockstep top --once {found.path.name}` shows all.\n")
    return 0


def _facts(found: RunStatus, now: float) -> list[tuple[str, str]]:
    facts = [("run", found.path.name), ("folder", path_text(found.path)), ("script", found.command or f"({found.role})")]
    facts.append(("state", _state(found, now)))
    if found.live is not None:
        facts += _live_facts(found.live)
    elif found.step >= 0:
        facts.append(("step", str(found.step)))
    if found.checkpoint is not None:
        facts.append(("saved", f"step {found.checkpoint[0]} ({found.checkpoint[1]})"))
    facts += [("so far" if found.live is not None else "in all", line) for line in found.summary]
    if found.verdict:
        facts.append(("straggler", found.verdict))
    return facts


def _state(found: RunStatus, now: float) -> str:
    text = state_text(found)
    if found.state == LOST:
        text += f": {_supervisor(found)} was killed, or its machine went down, before it could say how the run ended"
    elif found.state == SILENT:
        text += f": pid {found.pid} does not answer. It may be stopped (SIGSTOP), or wait for a disk"
    elif found.state == UNKNOWN:
        text += f": {found.origin}. It may still run there: type `lockstep status` on that machine"
    elif found.why:
        text += f": {one_line(found.why)}"
    if found.ended is not None:
        return f"{text}; {age_text(now - found.ended)} ago, after {duration(max(0.0, found.ended - found.began))}"
    pid = f", pid {found.pid}" if found.pid and found.state != SILENT else ""
    return f"{text}; began {age_text(now - found.began)} ago{pid}" if found.began else text


def _supervisor(found: RunStatus) -> str:
    return f"the process that supervised it (pid {found.pid})" if found.pid else "the process that supervised it"


def _live_facts(live: dict[str, Any]) -> list[tuple[str, str]]:
    progress = [str(live["step"])]
    if live["epoch"] is not None:
        progress.append(f"epoch {live['epoch']}")
    progress += value_texts(live["values"])
    generation = f", generation {live['generation']}" if live["generation"] >= 0 else ""
    return [("step", ", ".join(progress)), ("workers", worker_count_text(live) + generation)]
