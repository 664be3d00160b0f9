"""The options of `lockstep run` for several machines, and which engine they name. Does not know what an engine does."""

from __future__ import annotations

import argparse
import importlib
import math
from typing import Any

from lockstep.errors import UsageError
from lockstep.launcher import command_line
from lockstep.launcher.arguments import whole_number

ENGINES = ("ray", "slurm")
_RAY_OPTIONS = ("gpus_per_worker", "workers_per_node", "address", "working_dir", "runtime_env")


def add_parsers(commands: Any) -> None:
    """Add `run`, with the options of the engines, and `scale` to the subcommands of a parser."""
    command_line.add_parsers(commands)
    add_options(commands.choices["run"])


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to the parser of `lockstep run`. Without them, it runs on this machine alone."""
    parser.set_defaults(execute=run)
    group = parser.add_argument_group("several machines")
    help = "run on these machines, with this many workers on each, started by ssh; localhost is this machine, without ssh"
    group.add_argument("--hosts", metavar="HOST:N,...", help=help)
    help = (
        "run on the machines of this engine: ray, with -n workers together; slurm, in an allocation, with -n workers on each node"
    )
    group.add_argument("--engine", choices=ENGINES, help=help)
    help = 'how ssh is called, with its options: --ssh "ssh -F FILE" (default: LOCKSTEP_SSH, or ssh)'
    group.add_argument("--ssh", metavar="COMMAND", help=help)
    group.add_argument("--python", metavar="PATH", help="the Python on the other machines (default: the path of this one)")
    help = "the network interface of each machine through which its workers are reached (default: by the route to the head)"
    group.add_argument("--interface", metavar="NAME", help=help)
    help = "the address of this machine at which the others reach it (default: by the routes to them)"
    group.add_argument("--listen", metavar="ADDRESS", help=help)
    _add_ray(parser.add_argument_group("--engine ray"))


def _add_ray(group: Any) -> None:
    help = "the cluster: auto, local, HOST:PORT or ray://HOST:PORT (default: RAY_ADDRESS, or a cluster on this machine)"
    group.add_argument("--address", metavar="ADDRESS", help=help)
    help = "how many CPUs Ray reserves for a worker (default: 1)"
    group.add_argument("--cpus-per-worker", type=_amount, default=1.0, metavar="N", help=help)
    help = "how many GPUs Ray reserves for a worker (default: 1 if the cluster has GPUs, else 0)"
    group.add_argument("--gpus-per-worker", type=_amount, metavar="N", help=help)
    help = "how many workers a node has (default: as few nodes as possible)"
    group.add_argument("--workers-per-node", type=whole_number(1), metavar="K", help=help)
    help = "a folder that Ray copies to the nodes, and in which the script is (default: this directory, which all nodes must have)"
    group.add_argument("--working-dir", metavar="DIR", help=help)
    group.add_argument("--runtime-env", metavar="JSON", help="Ray's runtime environment of the workers, a JSON object")


def run(given: argparse.Namespace) -> int:
    """Execute `lockstep run` on this machine, or by an engine. Returns the exit code of the run."""
    if given.hosts is not None and given.engine is not None:
        raise UsageError(f"--hosts and --engine {given.engine} exclude each other: the engine has its own machines. Leave one out.")
    if given.hosts is None and given.ssh is not None:
        raise UsageError("--ssh says how the machines of --hosts are reached, and there is no --hosts. Name them: --hosts a:4,b:4.")
    for option in _RAY_OPTIONS:
        if given.engine != "ray" and getattr(given, option) is not None:
            shown = f"--{option.replace('_', '-')}"
            raise UsageError(f"{shown} is for --engine ray. Add --engine ray, or leave {shown} out.")
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


def _amount(text: str) -> float:
    """The ``type=`` of an argument that is a number of CPUs or GPUs, perhaps a fraction."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return value
