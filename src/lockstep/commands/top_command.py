"""`lockstep top RUN`: a table of the workers of a run that is redrawn while the run lasts. Imports rich only on a terminal."""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lockstep.commands.list_command import state_text, why_text, worker_count_text
from lockstep.commands.plain_text import age_text, table
from lockstep.commands.standard_output import ends_quietly, print_text
from lockstep.commands.status_command import add_run
from lockstep.commands.worker_table import worker_rows
from lockstep.launcher.arguments import write
from lockstep.launcher.console import can_draw
from lockstep.launcher.progress_text import value_texts
from lockstep.launcher.run_registry import find_run
from lockstep.launcher.run_status import SILENT, UNKNOWN, RunStatus, read_status
from lockstep.recording.text import printable

_REDRAW_S = 0.5
_QUIT = (b"q", b"Q", b"\x1b", b"\x03")


def add_parsers(commands: Any) -> None:
    help = "show a live table of the workers of a run: pid, step, lanes, phase, memory; q ends it"
    parser = commands.add_parser("top", help=help, allow_abbrev=False)
    parser.set_defaults(execute=top)
    add_run(parser, is_optional=True)
    help = "print the table once, as plain text; so it is in a pipe, and on a terminal that cannot move the cursor (TERM=dumb)"
    parser.add_argument("--once", action="store_true", help=help)


@ends_quietly
def top(given: argparse.Namespace) -> int:
    """Returns 0, also if a person ends it; 1 if the run does not run."""
    path = find_run(given.run)
    status = read_status(path)
    if status.live is None:
        write(2, f"lockstep: {_not_running(status)}\n")
        return 1
    if given.once or not (os.isatty(0) and can_draw(1)):
        print_text(f"{_headline(status, time.time())}\n\n{table(*worker_rows(status.live))}")
        return 0
    signal.signal(signal.SIGTERM, _end)  # so that the terminal is left as it was
    signal.signal(signal.SIGHUP, _end)
    try:
        last = _show_live(path, status)
    except KeyboardInterrupt:
        return 0
    if last.live is None:
        print_text(f"{_not_running(last)}\n")
    return 0


def _show_live(path: Path, status: RunStatus) -> RunStatus:
    """Redraw until the run has ended or a key is pressed. Returns the last status."""
    from rich.live import Live

    with _single_keys(), Live(_drawing(status), auto_refresh=False, screen=True) as live:
        while status.live is not None and not _is_quit(_REDRAW_S):
            status = read_status(path)
            if status.live is None and not status.is_over:  # it does not answer for the moment
                live.update(_message(_not_running(status)), refresh=True)
                while not _is_quit(_REDRAW_S) and status.live is None and not status.is_over:
                    status = read_status(path)
            if status.live is not None:
                live.update(_drawing(status), refresh=True)
    return status


def _end(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def _drawing(status: RunStatus) -> Any:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    assert status.live is not None
    headers, rows = worker_rows(status.live)
    drawn = Table(box=None, pad_edge=False, header_style="bold")
    for name in headers:
        drawn.add_column(name, justify="left" if name in ("PHASE", "HOST", "LANES") else "right", no_wrap=True)
    for row, worker in zip(rows, status.live["workers"]):
        drawn.add_row(*map(Text, row), style="dim" if worker["is_spare"] else "" if worker["status"] == "member" else "yellow")
    notes = [Text(status.verdict, style="yellow")] if status.verdict else []
    return Group(Text(_headline(status, time.time()), style="bold"), *notes, Text(), drawn, Text(), Text("q: quit", style="dim"))


def _message(text: str) -> Any:
    from rich.text import Text

    return Text(f"{text} (q: quit)")


def _headline(status: RunStatus, now: float) -> str:
    """ "20261118-221500-4711  running for 3 min  step 120  loss 0.532  3 of 4 workers  generation 2"."""
    live = status.live
    assert live is not None
    parts = [printable(status.path.name), f"{status.state} for {age_text(now - live['began'])}", f"step {live['step']}"]
    parts += value_texts(live["values"])
    parts.append(f"{worker_count_text(live)} worker{'' if worker_count_text(live) == '1' else 's'}")
    if live["generation"] >= 0:
        parts.append(f"generation {live['generation']}")
    return "  ".join(parts)


def _not_running(status: RunStatus) -> str:
    name = printable(status.path.name)
    if status.role == "agent":
        return f"{name} belongs to the agent of one machine. `lockstep top` shows the run on the machine of its head."
    if status.state == UNKNOWN:
        return f"{name} may run on another machine: {status.origin}. `lockstep top` shows it there."
    if status.is_over:
        return f"{name} does not run any more: {state_text(status)}{f' ({why})' if (why := why_text(status)) else ''}."
    if status.state == SILENT:
        return f"{name} is silent: pid {status.pid} does not answer. It may be stopped (SIGSTOP), or wait for a disk."
    return f"{name} is {status.state}, and has no workers to show yet or does not answer."


@contextmanager
def _single_keys() -> Iterator[None]:
    """Keys arrive one by one and are not shown; afterwards the terminal is as it was."""
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _is_quit(timeout_s: float) -> bool:
    """Wait for a key that ends the command."""
    deadline = time.monotonic() + timeout_s
    while (left := deadline - time.monotonic()) > 0:
        if select.select([0], [], [], left)[0]:
            key = os.read(0, 64)
            if not key or (key[:1] in _QUIT and len(key) == 1):
                return True
    return False
