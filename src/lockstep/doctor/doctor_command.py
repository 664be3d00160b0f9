"""`lockstep doctor`: its arguments, and how it starts its process on each machine: itself, by ssh, or by srun."""

from __future__ import annotations

import argparse
import os
import selectors
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from lockstep.cluster.address import Address
from lockstep.cluster.channel import Channel, ChannelCallbacks
from lockstep.cluster.tls import ClientTls, client_tls
from lockstep.cluster.token import new_token, read_token
from lockstep.doctor.findings import Finding, find
from lockstep.doctor.machine_probe import MachineProbe
from lockstep.doctor.survey import ProbeStart, Survey
from lockstep.engines import slurm
from lockstep.engines.ssh import parse_hosts, remote_command, ssh_command
from lockstep.errors import UsageError
from lockstep.launcher.arguments import write

THIS = "this machine"
_SSH_S = 6
_HEAD_S = 15.0


def add_parsers(commands: Any) -> None:
    """Add `doctor` to the subcommands of a parser. ``execute`` of the parsed arguments runs the command."""
    help = "check whether a run would start, on this machine or on several"
    parser = commands.add_parser("doctor", help=help, allow_abbrev=False)
    parser.set_defaults(execute=doctor)
    help = "check these machines, reached by ssh as in `lockstep run --hosts`; localhost is this machine"
    parser.add_argument("--hosts", metavar="HOST,...", help=help)
    parser.add_argument("--engine", choices=("slurm",), help="check the nodes of the allocation in which this command runs")
    help = "check whether this machine can reach a head that runs; of several, one is enough"
    parser.add_argument("--head", metavar="HOST:PORT[,HOST:PORT...]", help=help)
    help = "with --head: a file with the token of the run; -: one line of standard input"
    parser.add_argument("--token-file", metavar="FILE", help=help)
    parser.add_argument("--ca", metavar="PEM", help="with --head: use TLS, and trust this certificate or what it has signed")
    help = "a folder or URL for Run(checkpoint=...), to which every machine must be able to write"
    parser.add_argument("--checkpoint", metavar="PLACE", help=help)
    help = 'how ssh is called, with its options: --ssh "ssh -F FILE" (default: LOCKSTEP_SSH, or ssh)'
    parser.add_argument("--ssh", metavar="COMMAND", help=help)
    parser.add_argument("--python", default=sys.executable, metavar="PATH", help="the Python on the other machines")
    parser.add_argument("--serve", metavar="NAME", help=argparse.SUPPRESS)
    parser.add_argument("--no-workers", action="store_true", help=argparse.SUPPRESS)


def doctor(given: argparse.Namespace) -> int:
    """Look at the machines and print the findings. Returns 0 if a run would start, else 1."""
    if given.serve is not None:
        token = read_token("-", {})
        MachineProbe(given.serve, token, has_workers=not given.no_workers, place=given.checkpoint).run()
    if sum(each is not None for each in (given.hosts, given.engine, given.head)) > 1:
        raise UsageError("--hosts, --engine and --head name different machines. Leave all but one out.")
    began = time.monotonic()
    heads = [] if given.head is None else [Address.parse(each) for each in given.head.split(",")]
    token = read_token(given.token_file, os.environ) if heads else b""
    tls = client_tls(given.ca) if heads and given.ca is not None else None
    starts = _starts(given)
    survey = Survey(starts, new_token(), wants_checkpoint=given.checkpoint is not None)
    found = find(survey.take(), given.checkpoint)
    found += _reach_heads(heads, token, tls)
    for finding in found:
        write(1, f"{finding}\n")
    bad = sum(finding.level == "FAIL" for finding in found)
    machines = sum(len(start.machines) for start in starts if start.has_workers)
    where = f"{machines} machines" if machines > 1 else "this machine" if given.hosts is None else given.hosts
    took = f"({time.monotonic() - began:.1f} s)"
    said = f"a run would not start on {where}: mend what says FAIL above" if bad else f"a run would start on {where}"
    write(2, f"lockstep: {said} {took}\n")
    return 1 if bad else 0


def _starts(given: argparse.Namespace) -> list[ProbeStart]:
    if given.hosts is not None:
        return _by_ssh(given)
    if given.engine is not None:
        return [_by_srun(given)]
    return [_here(THIS, given)]


def _here(name: str, given: argparse.Namespace, *, has_workers: bool = True) -> ProbeStart:
    command = _command(name, sys.executable, given) + ([] if has_workers else ["--no-workers"])
    return ProbeStart((name,), tuple(command), _explain_here, has_workers)


def _by_ssh(given: argparse.Namespace) -> list[ProbeStart]:
    """The machine of the command takes part without workers if it is not among the hosts: its head must be reached."""
    hosts = parse_hosts(given.hosts, None)
    ssh = ssh_command(given.ssh or os.environ.get("LOCKSTEP_SSH") or "ssh")
    starts = [] if any(host.is_local for host in hosts) else [_here(THIS, given, has_workers=False)]
    for host in hosts:
        if host.is_local:
            starts.append(_here(host.name, given))
            continue
        words = _command(host.name, given.python, given)
        command = remote_command(host, [*ssh, "-o", f"ConnectTimeout={_SSH_S}"], os.getcwd(), words)
        starts.append(
            ProbeStart((host.name,), command, partial(_explain_ssh, host.name, shlex.join([*ssh, host.name]), given.python))
        )
    return starts


def _explain_ssh(host: str, login: str, python: str, last_line: str, code: int) -> str:
    if code == 255:  # ssh's own
        return f"{host} cannot be reached by ssh: {last_line.rstrip('.')}. `{login} true` must work without a question."
    return (
        f"{host} cannot run Lockstep: {last_line.rstrip('.')}. The directory {os.getcwd()} must exist there, and {python} must "
        "have Lockstep; --python names another Python."
    )


def _by_srun(given: argparse.Namespace) -> ProbeStart:
    """One srun, whose tasks get the same standard input. Lines of different tasks must not be mixed: srun keeps lines together."""
    nodes = slurm.allocation(os.environ)
    words = shlex.join(_command("", given.python, given)).replace("--serve ''", '--serve "$SLURMD_NODENAME"', 1)
    command = slurm.srun_command(len(nodes), ["sh", "-c", f"exec {words}"])
    return ProbeStart(tuple(nodes), tuple(word for word in command if word != "--unbuffered"), _explain_srun)


def _explain_srun(last_line: str, code: int) -> str:
    return f"srun cannot start a process on each node (code {code}): {last_line.rstrip('.')}. Try `srun hostname`."


def _command(name: str, python: str, given: argparse.Namespace) -> list[str]:
    place = [] if given.checkpoint is None else ["--checkpoint", given.checkpoint]
    return [python, "-m", "lockstep", "doctor", "--serve", name, *place]


def _explain_here(line: str, code: int) -> str:
    return f"the doctor's own process has failed (code {code}): {line}"


def _reach_heads(heads: Sequence[Address], token: bytes, tls: ClientTls | None) -> list[Finding]:
    """One head that answers is enough: the others may be there for the time when it does not."""
    found = [_reach_head(address, token, tls) for address in heads]
    is_one_there = any(finding.level == "ok" for finding in found)
    return [replace(finding, level="warn") if finding.level == "FAIL" and is_one_there else finding for finding in found]


def _reach_head(address: Address, token: bytes, tls: ClientTls | None = None) -> Finding:
    """Connect to the head as an agent does, up to the proof of the token, and close the connection."""
    answers: list[str] = []
    began = time.monotonic()
    with selectors.DefaultSelector() as selector:
        callbacks = ChannelCallbacks(
            on_open=lambda channel: answers.append(""),
            on_message=lambda channel, message: None,
            on_closed=lambda channel, why: answers.append(why),
        )
        channel = Channel.client(address, token, "agent", selector, callbacks, {}, tls=tls)
        while not answers and time.monotonic() - began < _HEAD_S:
            for key, _ in selector.select(0.05):
                key.data()
            channel.on_time(time.monotonic())
        channel.close()
    why = answers[0] if answers else f"no answer within {_HEAD_S:g} s"
    if not why:
        return Finding("ok", f"the head at {address} has this token, and answers in {1000 * (time.monotonic() - began):.1f} ms")
    return Finding("FAIL", f"{why.rstrip('.')}. Check that `lockstep head` runs there, and that --token-file is its token.")
