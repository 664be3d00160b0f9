"""The commands `lockstep head` and `lockstep agent`: their arguments and checks. Does not know how a run is supervised."""

from __future__ import annotations

import argparse
import os
import shlex
from typing import Any

from lockstep.cluster.address import Address
from lockstep.errors import UsageError
from lockstep.launcher.arguments import seconds, whole_number
from lockstep.launcher.command_line import add_policy, add_script, check_module, count_gpus, read_entrypoint, read_policy
from lockstep.world import gloo_interfaces


def add_parsers(commands: Any) -> None:
    """Add `head` and `agent` to the subcommands of a parser. ``execute`` of the parsed arguments runs the command."""
    _add_head(commands)
    _add_agent(commands)


def _add_head(commands: Any) -> None:
    help = "decide for the workers of several machines, whose agents connect to this process"
    parser = commands.add_parser("head", help=help, allow_abbrev=False)
    parser.set_defaults(execute=head)
    help = "where agents connect; port 0: a free port, which is written to head.address in the run folder"
    parser.add_argument("--listen", required=True, metavar="HOST:PORT", help=help)
    _add_token(parser)
    help = "begin when the agents have room for K workers (default: 1)"
    parser.add_argument("--min-workers", type=whole_number(1), default=1, metavar="K", help=help)
    help = "a machine that is silent for this many seconds is lost (default: 2)"
    parser.add_argument("--heartbeat-timeout", type=seconds, default=2.0, metavar="S", help=help)
    parser.add_argument("--run-dir", metavar="DIR", help="folder for events (default: ./lockstep-runs/DATE-TIME-PID)")
    add_policy(parser)
    parser.add_argument("--cert", metavar="PEM", help="encrypt all connections with TLS, with this certificate")
    parser.add_argument("--key", metavar="PEM", help="the private key of --cert")


def _add_agent(commands: Any) -> None:
    parser = commands.add_parser(
        "agent",
        help="start workers on this machine for a head",
        usage="lockstep agent --head HOST:PORT [-n N] [options] script.py [args ...]",
        epilog="Options before the script belong to lockstep, options after it to the script.",
        allow_abbrev=False,
    )
    parser.set_defaults(execute=agent)
    help = "the head, or several heads of which the first that answers is used"
    parser.add_argument("--head", metavar="HOST:PORT[,HOST:PORT...]", help=help)
    help = "a file with the address of the head, read again before each attempt to connect: the head may move"
    parser.add_argument("--head-file", metavar="FILE", help=help)
    _add_token(parser)
    parser.add_argument("-n", type=whole_number(1), metavar="N", help="how many workers (default: one per GPU; without GPUs, one)")
    help = "the network interface through which workers of other machines reach this one"
    parser.add_argument("--interface", metavar="NAME", help=help)
    parser.add_argument("--preload", metavar="MOD,...", help="modules to import once, before the workers are forked")
    parser.add_argument("--run-dir", metavar="DIR", help="folder for logs (default: ./lockstep-runs/DATE-TIME-PID)")
    help = "how many seconds the head may take to answer at the start (default: 60)"
    parser.add_argument("--connect-timeout", type=seconds, default=60.0, metavar="S", help=help)
    help = "end if there has been no head for this many seconds (default: 600)"
    parser.add_argument("--head-timeout", type=seconds, default=600.0, metavar="S", help=help)
    parser.add_argument("--grace", type=seconds, default=10.0, metavar="S", help="seconds to leave after a signal (default: 10)")
    parser.add_argument("--ends-with-stdin", action="store_true", help="end when standard input ends")
    parser.add_argument("--ca", metavar="PEM", help="use TLS, and trust this certificate or what it has signed")
    add_script(parser)


def _add_token(parser: argparse.ArgumentParser) -> None:
    help = "a file with the token of the run, 64 hexadecimal digits; -: one line of standard input"
    parser.add_argument("--token-file", metavar="FILE", help=help)


def head(given: argparse.Namespace) -> int:
    """Run a head. Returns the exit code of the run."""
    from lockstep.cluster.head import Head, HeadSettings
    from lockstep.cluster.tls import server_tls
    from lockstep.cluster.token import read_token
    from lockstep.launcher.new_run import create_run_folder, discard_run_folder
    from lockstep.launcher.supervisor import Settings

    if (given.cert is None) != (given.key is None):
        raise UsageError("--cert and --key belong together. Pass both, or neither.")
    run = Settings(0, given.grace, read_policy(given), given.ledger, is_plain=given.plain)
    settings = HeadSettings(Address.parse(given.listen), run, given.min_workers, given.heartbeat_timeout)
    token = read_token(given.token_file, os.environ)
    tls = server_tls(given.cert, given.key) if given.cert is not None else None
    run_folder = create_run_folder(given.run_dir, "head", ())
    try:
        made = Head(settings, token, tls, run_folder)
    except UsageError:  # it cannot listen there
        discard_run_folder(run_folder, given.run_dir)
        raise
    return made.run()


def agent(given: argparse.Namespace) -> int:
    """Run the agent of this machine. Returns the exit code of the run."""
    from lockstep.cluster.agent import Agent, AgentSettings
    from lockstep.cluster.head_link import HeadList
    from lockstep.cluster.tls import client_tls
    from lockstep.cluster.token import VARIABLE, read_token
    from lockstep.launcher.new_run import create_run_folder
    from lockstep.launcher.zygote_start import InterpreterStart

    entrypoint = read_entrypoint(given)
    preload = [name for name in (given.preload or "").split(",") if name]
    for name in preload:
        check_module(name, entrypoint.sys_path_0, "--preload")
    if (given.head is None) == (given.head_file is None):
        raise UsageError("name the head of the run: --head HOST:PORT, or --head-file FILE with its address.")
    heads = HeadList([Address.parse(each) for each in given.head.split(",")] if given.head else [], given.head_file)
    token = read_token(given.token_file, os.environ)
    os.environ.pop(VARIABLE, None)  # workers must not have it
    room = given.n if given.n is not None else count_gpus(os.environ.get("CUDA_VISIBLE_DEVICES")) or 1
    settings = AgentSettings(
        heads,
        room,
        shlex.join(entrypoint.words),
        given.interface or next(iter(gloo_interfaces()), None),
        given.connect_timeout,
        given.head_timeout,
        given.grace,
        given.ends_with_stdin,
    )
    tls = client_tls(given.ca) if given.ca is not None else None
    run_folder = create_run_folder(given.run_dir, "agent", entrypoint.words)
    return Agent(settings, token, tls, InterpreterStart(entrypoint, preload), run_folder).run()
