"""The command lines of the head and of the agents, made from the arguments of `lockstep run`. Knows no engine."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from lockstep.errors import UsageError
from lockstep.launcher.command_line import read_entrypoint
from lockstep.launcher.run_registry import RUNS_FOLDER
from lockstep.launcher.run_removal import remove_oldest


def script_words(given: argparse.Namespace) -> list[str]:
    """Returns the script or `-m module` with its arguments. Raises UsageError if there is no such script or module here."""
    read_entrypoint(given)
    if given.module is not None:
        return ["-m", *given.module, *given.script]
    return list(given.script[1:] if given.script[:1] == ["--"] else given.script)


def refuse_debugger(given: argparse.Namespace, option: str) -> None:
    """A worker on another machine has no terminal."""
    if given.debug_rank is not None:
        raise UsageError(
            f"--debug-rank gives a worker this terminal, and with {option} workers run on other machines. "
            f"Leave {option} out to debug on this machine."
        )


def run_folder(given: argparse.Namespace) -> Path:
    """The folder of the run on this machine. It is made by the head. Old folders beside it are removed."""
    name = time.strftime("%Y%m%d-%H%M%S", time.localtime()) + f"-{os.getpid()}"
    if given.run_dir is None:
        remove_oldest(Path(os.path.abspath(RUNS_FOLDER)), given.keep_runs - 1)
    return Path(os.path.abspath(given.run_dir if given.run_dir is not None else Path(RUNS_FOLDER) / name))


def head_options(given: argparse.Namespace, workers: int) -> list[str]:
    """Options of the head besides its address, its token and its folder. ``workers``: how many there must be to begin."""
    options = ["--min-workers", str(workers), "--hang-timeout", f"{given.hang_timeout:g}", "--grace", f"{given.grace:g}"]
    options += ["--max-respawns", str(given.max_respawns), "--max-restarts", str(given.max_restarts)]
    options += ["--spares", str(given.spares)]
    return options + ["--no-respawn"] * given.no_respawn + ["--ledger"] * given.ledger + ["--plain"] * given.plain


def agent_words(given: argparse.Namespace, workers: int, run_dir: Path) -> list[str]:
    """What attached_agent.py takes after the address of the head: the run folder, options of the agent, and the script."""
    options = ["-n", str(workers), "--grace", f"{given.grace:g}"]
    for name in ("preload", "interface"):
        if getattr(given, name) is not None:
            options += [f"--{name}", getattr(given, name)]
    return [str(run_dir), *options, *script_words(given)]
