"""`lockstep stop RUN`: lets the workers finish the step, save and exit, and waits until they have."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import socket
import time
from pathlib import Path
from typing import Any

from lockstep.commands.list_command import why_text
from lockstep.commands.plain_text import path_text
from lockstep.commands.standard_output import ends_quietly, print_text
from lockstep.commands.status_command import add_run
from lockstep.errors import UsageError
from lockstep.launcher.arguments import seconds, write
from lockstep.launcher.control_client import ControlClient, NoAnswerError, RefusedError
from lockstep.launcher.run_folder import is_in_use
from lockstep.launcher.run_registry import find_run
from lockstep.launcher.run_status import UNKNOWN, RunStatus, read_status
from lockstep.recording.text import printable

_MORE_S = 10.0
"""Beyond --grace of the run, after which its agent kills the workers."""
_POLL_S = 0.05


def add_parsers(commands: Any) -> None:
    help = "stop a run: its workers finish the step, save and exit"
    parser = commands.add_parser("stop", help=help, allow_abbrev=False)
    parser.set_defaults(execute=stop)
    add_run(parser, is_optional=False)
    parser.add_argument("--no-wait", action="store_true", help="return at once")
    help = f"wait at most this many seconds for the end (default: --grace of the run and {_MORE_S:g} more)"
    parser.add_argument("--timeout", type=seconds, metavar="S", help=help)
    help = "kill the workers at once, so that nothing is saved; kill the agent too if it does not answer"
    parser.add_argument("--kill", action="store_true", help=help)


@ends_quietly
def stop(given: argparse.Namespace) -> int:
    """Returns 0 if the run has ended, or was asked to with --no-wait; 1 if it has not ended in time."""
    path = find_run(given.run)
    before = read_status(path)
    if before.is_over:
        print_text(f"the run has ended already: {before.state}{_why(before)}. {path_text(path)}\n")
        return 0
    if before.role == "agent":
        raise UsageError(
            f"{path} belongs to the agent of one machine. Stop the run at its head, or take this machine out of the run: "
            f"`kill {before.pid}`{'' if before.is_here else f' on its machine ({before.origin})'}."
        )
    if before.state == UNKNOWN:
        raise UsageError(
            f"the run cannot be stopped from {socket.gethostname()}: {before.origin}. Type "
            f"`lockstep stop {shlex.quote(str(path))}` on that machine. If that machine is gone, the run is over."
        )
    grace_s = _ask_to_stop(path, before, kill=given.kill)
    if given.no_wait:
        print_text(f"the run was asked to stop. {path_text(path)}\n")
        return 0
    timeout_s = given.timeout if given.timeout is not None else grace_s + _MORE_S
    if not _wait_for_end(path, timeout_s):
        kill = f"`lockstep stop --kill {shlex.quote(given.run)}` kills its workers"
        write(2, f"lockstep: the run has not ended within {timeout_s:g} s. {kill}.\n")
        return 1
    print_text(f"{how_it_ended(read_status(path, ask=False))} {path_text(path)}\n")
    return 0


def _ask_to_stop(path: Path, status: RunStatus, *, kill: bool) -> float:
    """Returns how many seconds the workers have."""
    try:
        with ControlClient(path) as client:
            grace_s = client.ask({"type": "stop", "kill": kill})["grace_s"]
            return 0.0 if kill else float(grace_s)
    except RefusedError as error:
        raise UsageError(f"the run cannot be stopped: {error}.") from error
    except NoAnswerError as error:
        if not is_in_use(path):
            return 0.0  # it has just ended
        pid = _supervisor_pid(path, status)
        if (path / "agent.sock").exists() and not kill:
            raise UsageError(
                f"the run does not answer ({error}): its agent may be stopped (SIGSTOP). `kill -CONT {pid or 'PID'}` lets it "
                f"continue; `lockstep stop --kill {shlex.quote(str(path))}` kills it and its workers."
            ) from error
        if pid is None:
            raise UsageError(f"the run does not answer ({error}), and its process cannot be found. {path}") from error
        os.kill(pid, signal.SIGKILL if kill else signal.SIGTERM)  # without a socket: a head that waits for its first machine
        return 0.0


def _supervisor_pid(path: Path, status: RunStatus) -> int | None:
    """The process that supervises the run, if it is one that has opened the run folder: a pid may be that of another container."""
    return next((pid for pid in (status.pid, _noted_pid(path)) if pid is not None and _has_open(pid, path)), None)


def _noted_pid(path: Path) -> int | None:
    try:
        return int((path / "agent.pid").read_text())
    except (OSError, ValueError):
        return None


def _has_open(pid: int, path: Path) -> bool:
    try:
        folder, descriptors = path.stat(), list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False
    for each in descriptors:
        try:
            if os.path.samestat(each.stat(), folder):
                return True
        except OSError:  # it was closed meanwhile
            continue
    return False


def _wait_for_end(path: Path, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while is_in_use(path):
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
    return True


def how_it_ended(status: RunStatus) -> str:
    saved = "This run has saved no checkpoint."
    if status.checkpoint is not None:
        step, where = status.checkpoint[0], printable(status.checkpoint[1])
        if step == status.stopped_after:
            return f"stopped at step {step}, which is saved ({where})."
        saved = f"The newest checkpoint is of step {step} ({where})."
    if status.stopped_after is not None:
        return f"stopped at step {status.stopped_after}, which is not saved. {saved}"
    return f"the run has ended: {status.state}{_why(status)}. {saved}"


def _why(status: RunStatus) -> str:
    return f" ({why.rstrip('.')})" if (why := why_text(status)) else ""
