"""The options of `lockstep run` for several machines, and which engine they name. Does not know what an engine does."""

from __future__ import annotations

import argparse
import importlib

from lockstep.errors import UsageError
from lockstep.launcher import command_line

ENGINES = ("slurm",)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to the parser of `lockstep run`. Without them, it runs on this machine alone."""
    parser.set_defaults(execute=run)
    group = parser.add_argument_group("several machines")
    help = "run on these machines, with this many workers on each, started by ssh; localhost is this machine, without ssh"
    group.add_argument("--hosts", metavar="HOST:N,...", help=help)
    help = "run on the machines of this engine: slurm, inside an allocation, with -n workers on each node"
    group.add_argument("--engine", choices=ENGINES, help=help)
    help = 'how ssh is called, with its options: --ssh "ssh -F FILE" (default: LOCKSTEP_SSH, or ssh)'
    group.add_argument("--ssh", metavar="COMMAND", help=help)
    group.add_argument("--python", metavar="PATH", help="the Python on the other machines (default: the path of this one)")
    help = "the network interface of each machine through which its workers are reached (default: by the route to the head)"
    group.add_argument("--interface", metavar="NAME", help=help)
    help = "the address of this machine at which the others reach it (default: by the routes to them)"
    group.add_argument("--listen", metavar="ADDRESS", help=help)


def run(given: argparse.Namespace) -> int:
    """Execute `lockstep run` on this machine, or by an engine. Returns the exit code of the run."""
    if given.hosts is not None and given.engine is not None:
        raise UsageError(f"--hosts and --engine {given.engine} exclude each other: the engine has its own machines. Leave one out.")
    if given.hosts is None and given.ssh is not None:
        raise UsageError("--ssh says how the machines of --hosts are reached, and there is no --hosts. Name them: --hosts a:4,b:4.")
    name = "ssh" if given.hosts is not None else given.engine
    if name is None:
        for option in ("python", "interface", "listen"):
            if getattr(given, option) is not None:
                raise UsageError(
                    f"--{option} is for several machines. Name them with --hosts or --engine, or leave --{option} out."
                )
        return command_line.run(given)
    code: int = importlib.import_module(f"lockstep.engines.{name}").run(given)
    return code
