"""The command line: reads arguments and refuses wrong ones in a sentence. Knows what may be asked for, not how it is done."""

from __future__ import annotations

import argparse
import difflib
import glob
import importlib.util
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import lockstep
from lockstep.errors import UsageError
from lockstep.launch import packets
from lockstep.launch.arguments import Parser, open_standard_streams, seconds_of, whole_number, write
from lockstep.launch.run_folder import RunFolder, connect
from lockstep.launch.worker import Job

_SCALE_TIMEOUT_S = 10.0


def main(argv: Sequence[str] | None = None) -> int:
    """The `lockstep` command. Returns its exit code: the script's, or 2 for arguments that cannot work."""
    open_standard_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        head, script, module, rest = split(arguments)
        given = _parser().parse_args(head)
        if given.command == "scale":
            return scale(given.run_dir, given.size)
        if given.command != "run":
            raise UsageError("what should be done? `lockstep run -n 4 train.py` starts four workers; `lockstep --help` tells more.")
        return run(given, script, module, rest)
    except UsageError as error:
        write(2, f"lockstep: {error}\n")
        return 2


def run(given: argparse.Namespace, script: str | None, module: str | None, args: list[str]) -> int:
    from lockstep.launch.agent import Agent, Settings
    from lockstep.plan.membership import Policy

    first_path = check_target(script, module)
    preload = [name for name in (given.preload or "").split(",") if name]
    for name in preload:
        check_module(name, first_path, "--preload")
    policy = replace(Policy(), respawn=not given.no_respawn, max_respawns=given.max_respawns, hang_timeout_s=given.hang_timeout)
    size = given.n if given.n is not None else count_gpus(os.environ.get("CUDA_VISIBLE_DEVICES")) or 1
    settings = Settings(size, tuple(preload), given.grace, policy, given.ledger)
    job = Job(script, module, tuple(args), os.getpid(), first_path, {})
    return Agent(settings, job, RunFolder.create(given.run_dir, time.time())).run()


def scale(run_dir: str, size: int) -> int:
    """Ask the agent of a run for another number of workers; its answer is printed."""
    try:
        with connect(Path(run_dir), _SCALE_TIMEOUT_S) as line:
            line.sendall(packets.frame({"type": "scale", "size": size}))
            frames, messages = packets.Frames(), list[packets.Packet]()
            while not messages:
                data = line.recv(1 << 16)
                if not data:
                    raise UsageError(f"the run in {run_dir} ended before it answered.")
                messages = frames.feed(data)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(
            f"no run answers in {run_dir} ({reason}: agent.sock). Name the directory of one that is going on: "
            "`lockstep run` takes it by --run-dir, or makes one under ./lockstep-runs."
        ) from error
    answer = messages[0]
    write(1 if answer["ok"] else 2, f"{answer['value'] if answer['ok'] else 'lockstep: ' + answer['error']}\n")
    return 0 if answer["ok"] else 1


# -- arguments -------------------------------------------------------------------------------------


def split(argv: list[str]) -> tuple[list[str], str | None, str | None, list[str]]:
    """(our arguments, script, module, the script's arguments): what follows the script's name is the script's alone."""
    if not argv or argv[0] != "run":
        return argv, None, None, []
    at = 1
    while at < len(argv):
        token = argv[at]
        if token == "-m":
            if at + 1 == len(argv):
                raise UsageError("-m needs the name of a module: `lockstep run -m package.module`.")
            return argv[:at], None, argv[at + 1], argv[at + 2 :]
        if token == "--":
            return argv[:at], argv[at + 1] if at + 1 < len(argv) else None, None, argv[at + 2 :]
        if not token.startswith("-") or token == "-":
            return argv[:at], token, None, argv[at + 1 :]
        at += 2 if token in _WITH_VALUE else 1
    return argv, None, None, []


_WITH_VALUE = ("-n", "--preload", "--run-dir", "--grace", "--hang-timeout", "--max-respawns")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="lockstep", description="Data-parallel training for PyTorch.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"lockstep {lockstep.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    run = commands.add_parser(
        "run",
        help="run a script on several workers of this machine",
        usage="lockstep run [-n N] [options] script.py [args ...]\n       lockstep run [-n N] [options] -m module [args ...]",
        allow_abbrev=False,
    )
    whole, seconds = whole_number(1), seconds_of
    run.add_argument("-n", type=whole, metavar="N", help="how many workers (default: one per GPU, one where there is none)")
    run.add_argument("--preload", metavar="MOD,...", help="modules to import once, before workers are forked")
    run.add_argument("--run-dir", metavar="DIR", help="where logs and events go (default: ./lockstep-runs/DATE-TIME-PID)")
    run.add_argument(
        "--grace", type=seconds, default=10.0, metavar="S", help="seconds to end in after Ctrl-C or SIGTERM (default: 10)"
    )
    run.add_argument(
        "--hang-timeout", type=seconds, default=30.0, metavar="S", help="a worker that holds up others so long is killed"
    )
    run.add_argument("--no-respawn", action="store_true", help="do not replace workers that die")
    run.add_argument("--max-respawns", type=whole_number(0), default=10, metavar="N", help="at most so many in 5 minutes")
    run.add_argument("--ledger", action="store_true", help="write down which sample was committed in which step")
    commands.add_parser("checkpoint", help="list, verify or export what a run has saved")  # checkpoint/cli.py
    scale = commands.add_parser("scale", help="change the number of workers of a run that is going on", allow_abbrev=False)
    scale.add_argument("run_dir", metavar="RUN_DIR")
    scale.add_argument("size", type=whole, metavar="N")
    return parser


def check_target(script: str | None, module: str | None) -> str:
    """What is to be run must be there; returns the sys.path[0] it will have."""
    if module is not None:
        check_module(module, os.getcwd(), "-m")
        return os.getcwd()
    if script is None:
        raise UsageError(
            "no script was given. Name one: `lockstep run -n 4 train.py`, or a module: `lockstep run -n 4 -m package.train`."
        )
    path = Path(script)
    if path.is_dir():
        raise UsageError(f"{script} is a directory, not a script. Name the file in it, or run a package by `-m {path.name}`.")
    if not path.exists():
        folder = path.parent
        names = sorted(entry.name for entry in folder.iterdir() if entry.is_file()) if folder.is_dir() else []
        near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.5)
        hint = f"Did you mean {folder / near[0]}?" if near else f"Look at its name; the current directory is {os.getcwd()}."
        raise UsageError(f"there is no script {script}. {hint}")
    if not os.access(path, os.R_OK):
        raise UsageError(f"the script {script} cannot be read by this user. Change its permissions.")
    return str(path.resolve().parent)


def check_module(name: str, first_path: str, option: str) -> None:
    """The top of ``name`` must be findable; nothing is imported here."""
    top = name.partition(".")[0]
    before = list(sys.path)
    sys.path.insert(0, first_path)
    try:
        found = top.isidentifier() and (top in sys.modules or importlib.util.find_spec(top) is not None)
    finally:
        sys.path[:] = before
    if not found:
        raise UsageError(
            f"{option} {name}: there is no module {top} in {first_path} nor among the installed ones ({sys.executable}). "
            "Correct its name, or install it."
        )


def count_gpus(visible: str | None) -> int:
    """GPUs that workers may use, without asking torch."""
    devices = len(glob.glob("/dev/nvidia[0-9]*"))
    if visible is None or devices == 0:
        return devices
    return min(devices, len([each for each in visible.split(",") if each.strip() not in ("", "-1")]))
