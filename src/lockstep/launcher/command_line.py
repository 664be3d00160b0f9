"""The commands `lockstep run` and `lockstep scale`: their arguments and checks. Does not know how a run is supervised."""

from __future__ import annotations

import argparse
import glob
import importlib.util
import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.errors import UsageError
from lockstep.launcher.arguments import did_you_mean, seconds, whole_number, write
from lockstep.launcher.control_client import ControlClient, NoAnswerError, RefusedError
from lockstep.launcher.run_registry import find_run
from lockstep.launcher.run_removal import KEPT_RUNS
from lockstep.launcher.run_status import read_status
from lockstep.launcher.worker import Entrypoint
from lockstep.plan.membership_state import Policy

_SCALE_TIMEOUT_S = 10.0
_DEBUG_HANG_TIMEOUT_S = 7 * 86400.0
"""Of a run in which a person stops a worker in a debugger."""


def add_parsers(commands: Any) -> None:
    """Add `run` and `scale` to the subcommands of a parser. ``execute`` of the parsed arguments runs the command."""
    parser = commands.add_parser(
        "run",
        help="run a script on several workers of this machine",
        usage="lockstep run [-n N] [options] script.py [args ...]\n       lockstep run [-n N] [options] -m module [args ...]",
        epilog="Options before the script belong to lockstep, options after it to the script.",
        allow_abbrev=False,
    )
    parser.set_defaults(execute=run)
    parser.add_argument("-n", type=whole_number(1), metavar="N", help="how many workers (default: one per GPU; without GPUs, one)")
    parser.add_argument("--preload", metavar="MOD,...", help="modules to import once, before the workers are forked")
    parser.add_argument("--run-dir", metavar="DIR", help="folder for logs and events (default: ./lockstep-runs/DATE-TIME-PID)")
    help = f"without --run-dir: leave only the N newest folders in ./lockstep-runs (default: {KEPT_RUNS})"
    parser.add_argument("--keep-runs", type=whole_number(1), default=KEPT_RUNS, metavar="N", help=help)
    add_policy(parser)
    help = "give worker K this terminal, for breakpoint() and pdb; no worker is taken for hung"
    parser.add_argument("--debug-rank", type=whole_number(0), metavar="K", help=help)
    add_script(parser)
    parser = commands.add_parser("scale", help="change the number of workers of a running run", allow_abbrev=False)
    parser.set_defaults(execute=scale)
    help = "the folder of the run, its name, the beginning of its name, or last: the newest run"
    parser.add_argument("run_dir", metavar="RUN", help=help)
    parser.add_argument("size", type=whole_number(1), metavar="N", help="how many workers it should have")


def add_policy(parser: argparse.ArgumentParser) -> None:
    """Add the options that ``read_policy`` reads, ``--grace``, ``--ledger`` and ``--plain``."""
    parser.add_argument(
        "--grace", type=seconds, default=10.0, metavar="S", help="seconds to stop after Ctrl-C or SIGTERM (default: 10)"
    )
    help = "kill a worker for which other workers wait this many seconds (default: 30)"
    parser.add_argument("--hang-timeout", type=seconds, default=30.0, metavar="S", help=help)
    parser.add_argument("--no-respawn", action="store_true", help="do not replace workers that die")
    help = "replace at most N workers in 5 minutes (default: 10)"
    parser.add_argument("--max-respawns", type=whole_number(0), default=10, metavar="N", help=help)
    help = "start all workers of a script without lockstep.Run again at most N times (default: 3)"
    parser.add_argument("--max-restarts", type=whole_number(0), default=3, metavar="N", help=help)
    help = "K more workers stand by, to take the place of one that is lost (default: 0)"
    parser.add_argument("--spares", type=whole_number(0), default=0, metavar="K", help=help)
    parser.add_argument("--ledger", action="store_true", help="record which sample was committed in which step")
    help = "show progress in lines of plain text on a terminal too, as in a pipe or a file"
    parser.add_argument("--plain", action="store_true", help=help)


def read_policy(given: argparse.Namespace) -> Policy:
    return Policy(
        respawn=not given.no_respawn,
        max_respawns=given.max_respawns,
        hang_timeout_s=given.hang_timeout,
        max_restarts=given.max_restarts,
        spares=given.spares,
    )


def add_script(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that ``read_entrypoint`` reads."""
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="run a module instead of a script, with its arguments")
    parser.add_argument("script", nargs=argparse.REMAINDER, help="the script and its arguments")


def run(given: argparse.Namespace) -> int:
    """Run a script or a module on several workers. Returns the exit code of the script."""
    from lockstep.launcher.local_run import LocalRun
    from lockstep.launcher.new_run import create_run_folder
    from lockstep.launcher.supervisor import Settings
    from lockstep.launcher.zygote_start import InterpreterStart

    entrypoint = read_entrypoint(given)
    preload = [name for name in (given.preload or "").split(",") if name]
    for name in preload:
        check_module(name, entrypoint.sys_path_0, "--preload")
    size = given.n if given.n is not None else count_gpus(os.environ.get("CUDA_VISIBLE_DEVICES")) or 1
    if given.debug_rank is not None and given.debug_rank >= size:
        workers = f"{size} workers have the ranks 0 to {size - 1}" if size > 1 else "1 worker has rank 0"
        raise UsageError(f"--debug-rank {given.debug_rank}: {workers}. Name one of these ranks, or start more workers with -n.")
    policy = read_policy(given)
    if policy.spares and size == 1:
        raise UsageError(
            f"--spares {policy.spares} with 1 worker: a spare gets the state of the run from a living worker, and there is none. "
            "Start two workers or more with -n 2, or leave --spares out and save checkpoints."
        )
    if given.debug_rank is not None:
        policy = replace(policy, hang_timeout_s=_DEBUG_HANG_TIMEOUT_S)
    settings = Settings(size, given.grace, policy, given.ledger, given.debug_rank, is_plain=given.plain)
    start = InterpreterStart(entrypoint, preload)
    run_folder = create_run_folder(given.run_dir, "run", entrypoint.words, keep_runs=given.keep_runs)
    return LocalRun(settings, start, run_folder).run()


def scale(given: argparse.Namespace) -> int:
    """Ask the agent of a run for another number of workers, and print its answer."""
    path = find_run(given.run_dir)
    try:
        with ControlClient(path, _SCALE_TIMEOUT_S) as client:
            answer = client.ask({"type": "scale", "size": given.size})
    except RefusedError as error:
        write(2, f"lockstep: {error}\n")
        return 1
    except NoAnswerError as error:
        raise UsageError(_explain_no_answer(path, error)) from error
    write(1, f"{answer}\n")
    return 0


def _explain_no_answer(path: Path, error: NoAnswerError) -> str:
    status = read_status(path, ask=False)
    if status.is_over:
        return f"the run in {path} does not run any more: it is {status.state}. `lockstep ls` lists the runs."
    if not status.is_here:
        return f"the run in {path} does not run on this machine: {status.origin}. Type the command on that machine."
    return f"the run in {path} does not answer ({error}). `lockstep status {shlex.quote(str(path))}` shows what it does."


def read_entrypoint(given: argparse.Namespace) -> Entrypoint:
    """What to run, which must exist."""
    if given.module is not None:
        if not given.module:
            raise UsageError("-m needs the name of a module: `lockstep run -m package.module`.")
        check_module(given.module[0], os.getcwd(), "-m")
        return Entrypoint(None, given.module[0], (*given.module[1:], *given.script), os.getcwd())
    words = given.script[1:] if given.script[:1] == ["--"] else given.script
    if not words:
        raise UsageError(
            "no script was given. Name one: `lockstep run -n 4 train.py`, or a module: `lockstep run -n 4 -m package.train`."
        )
    _check_script(words[0])
    return Entrypoint(words[0], None, tuple(words[1:]), str(Path(words[0]).resolve().parent))


def _check_script(script: str) -> None:
    path = Path(script)
    if path.is_dir():
        raise UsageError(f"{script} is a directory, not a script. Name the file in it, or run a package by `-m {path.name}`.")
    if not path.exists():
        folder = path.parent
        files = [str(folder / entry.name) for entry in folder.iterdir() if entry.is_file()] if folder.is_dir() else []
        hint = did_you_mean(str(path), sorted(files)) or f"Check its name; the current directory is {os.getcwd()}."
        raise UsageError(f"there is no script {script}. {hint.rstrip()}")
    if not os.access(path, os.R_OK):
        raise UsageError(f"the script {script} cannot be read by this user. Change its permissions.")


def check_module(name: str, sys_path_0: str, option: str) -> None:
    """The top-level package of ``name`` must exist. Nothing is imported."""
    top = name.partition(".")[0]
    before = list(sys.path)
    sys.path.insert(0, sys_path_0)
    try:
        found = top.isidentifier() and (top in sys.modules or importlib.util.find_spec(top) is not None)
    finally:
        sys.path[:] = before
    if not found:
        raise UsageError(
            f"{option} {name}: there is no module {top} in {sys_path_0}, and {sys.executable} has none installed. "
            "Correct its name, or install it."
        )


def count_gpus(visible: str | None) -> int:
    """How many GPUs workers may use, found without torch."""
    devices = len(glob.glob("/dev/nvidia[0-9]*"))
    if visible is None or devices == 0:
        return devices
    return min(devices, len([each for each in visible.split(",") if each.strip() not in ("", "-1")]))
