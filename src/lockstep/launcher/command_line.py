"""The commands `lockstep run` and `lockstep scale`: their arguments and checks. Does not know how a run is supervised."""

from __future__ import annotations

import argparse
import glob
import importlib.util
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.errors import UsageError
from lockstep.launcher import packets
from lockstep.launcher.arguments import did_you_mean, seconds, whole_number, write
from lockstep.launcher.run_folder import RunFolder, connect
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
    add_policy(parser)
    help = "give worker K this terminal, for breakpoint() and pdb; no worker is taken for hung"
    parser.add_argument("--debug-rank", type=whole_number(0), metavar="K", help=help)
    add_script(parser)
    parser = commands.add_parser("scale", help="change the number of workers of a running run", allow_abbrev=False)
    parser.set_defaults(execute=scale)
    parser.add_argument("run_dir", metavar="RUN_DIR", help="the folder of the run")
    parser.add_argument("size", type=whole_number(1), metavar="N", help="how many workers it should have")


def add_policy(parser: argparse.ArgumentParser) -> None:
    """Add the options that ``read_policy`` reads, ``--grace`` and ``--ledger``."""
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
    parser.add_argument("--ledger", action="store_true", help="record which sample was committed in which step")


def read_policy(given: argparse.Namespace) -> Policy:
    return Policy(
        respawn=not given.no_respawn,
        max_respawns=given.max_respawns,
        hang_timeout_s=given.hang_timeout,
        max_restarts=given.max_restarts,
    )


def add_script(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that ``read_entrypoint`` reads."""
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="run a module instead of a script, with its arguments")
    parser.add_argument("script", nargs=argparse.REMAINDER, help="the script and its arguments")


def run(given: argparse.Namespace) -> int:
    """Run a script or a module on several workers. Returns the exit code of the script."""
    from lockstep.launcher.local_run import LocalRun
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
    if given.debug_rank is not None:
        policy = replace(policy, hang_timeout_s=_DEBUG_HANG_TIMEOUT_S)
    settings = Settings(size, given.grace, policy, given.ledger, given.debug_rank)
    return LocalRun(settings, InterpreterStart(entrypoint, preload), RunFolder.create(given.run_dir, time.time())).run()


def scale(given: argparse.Namespace) -> int:
    """Ask the agent of a run for another number of workers, and print its answer."""
    try:
        with connect(Path(given.run_dir), _SCALE_TIMEOUT_S) as connection:
            packets.send(connection, {"type": "scale", "size": given.size})
            answer = packets.receive(connection)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(
            f"no run answers in {given.run_dir} ({reason}: agent.sock). Name the folder of a running run: "
            "`lockstep run` takes it by --run-dir, or makes one under ./lockstep-runs."
        ) from error
    if answer is None:
        raise UsageError(f"the run in {given.run_dir} ended before it answered.")
    write(1 if answer["ok"] else 2, f"{answer['value'] if answer['ok'] else 'lockstep: ' + answer['error']}\n")
    return 0 if answer["ok"] else 1


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
