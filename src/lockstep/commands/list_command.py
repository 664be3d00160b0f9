"""`lockstep ls`: the runs of this user on this machine, newest first."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lockstep.commands.plain_text import age_text, cut, one_line, path_text, table
from lockstep.commands.standard_output import ends_quietly, print_text
from lockstep.launcher.run_folder import is_in_use
from lockstep.launcher.run_registry import RUNS_FOLDER, known_runs
from lockstep.launcher.run_removal import without_parts
from lockstep.launcher.run_status import LOST, RunStatus, read_status
from lockstep.recording.text import printable

_SHOWN = 20
_WORDS_CHARS = 40


def add_parsers(commands: Any) -> None:
    parser = commands.add_parser("ls", help="list the runs of this machine, newest first", allow_abbrev=False)
    parser.set_defaults(execute=ls)
    help = f"list all runs (default: those that run, and the newest {_SHOWN})"
    parser.add_argument("-a", "--all", action="store_true", help=help)
    parser.add_argument("--json", action="store_true", help="print one JSON object for each run")


@ends_quietly
def ls(given: argparse.Namespace) -> int:
    """Print a line for each run."""
    runs = without_parts(known_runs())
    chosen = [path for number, path in enumerate(runs) if given.all or number < _SHOWN or _is_in_use(path)]
    shown = [status for path in chosen if (status := _status(path)) is not None]
    if given.json:
        print_text("".join(json.dumps(as_json(status)) + "\n" for status in shown))
        return 0
    if not shown:
        print_text(f"no run of this machine is known, and there is none in ./{RUNS_FOLDER}.\n")
        return 0
    print_text(_lines(shown, time.time()))
    if len(chosen) < len(runs):
        print_text(f"{len(runs) - len(chosen)} older runs are not shown: `lockstep ls --all` shows them.\n")
    return 0


def state_text(status: RunStatus) -> str:
    """ "running", "failed (1)"."""
    return f"{status.state} ({status.code})" if status.code is not None and status.is_over else status.state


def why_text(status: RunStatus) -> str:
    """Why the run has ended, in one line; empty if that is not known."""
    if status.state == LOST:
        return "the process that supervised it was killed"
    return one_line(status.why) if status.why else ""


def as_json(status: RunStatus) -> dict[str, Any]:
    """As plain data, without the list of the workers."""
    facts = asdict(status)
    live = facts.pop("live") or {}
    return {
        **facts,
        "path": str(status.path),
        "name": status.path.name,
        "workers": live.get("members"),
        "wanted": live.get("wanted"),
    }


def _status(path: Path) -> RunStatus | None:
    try:
        return read_status(path)
    except OSError:  # it was removed meanwhile
        return None


def _is_in_use(path: Path) -> bool:
    try:
        return is_in_use(path)
    except OSError:
        return False


def _lines(shown: Sequence[RunStatus], now: float) -> str:
    rows = []
    for status in shown:
        live = status.live or {}
        rows.append(
            (
                printable(status.path.name),
                state_text(status),
                f"{age_text(now - status.began)} ago" if status.began else "-",
                str(status.step) if status.step >= 0 else "-",
                worker_count_text(live) if live else "-",
                cut(printable(status.command), _WORDS_CHARS) or f"({status.role})",
                path_text(status.path),
            )
        )
    return table(("RUN", "STATE", "STARTED", "STEP", "WORKERS", "SCRIPT", "FOLDER"), rows)


def worker_count_text(live: dict[str, Any]) -> str:
    """ "4", or "3 of 4" while one is missing."""
    present = live["members"] if live["generation"] >= 0 else sum(worker["pid"] is not None for worker in live["workers"])
    return str(present) if present == live["wanted"] else f"{present} of {live['wanted']}"
