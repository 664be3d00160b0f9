"""`lockstep doctor`: its arguments, and how it starts its process on each machine: itself, by ssh, or by srun."""

from __future__ import annotations

import argparse
import os
import re
import selectors
import shlex
import shutil
import sys
import time
from typing import Any

from lockstep.cluster.address import Address
from lockstep.cluster.channel import Channel, ChannelCallbacks
from lockstep.cluster.token import new_token, read_token
from lockstep.doctor.findings import Finding, find
from lockstep.doctor.machine_probe import MachineProbe
from lockstep.doctor.survey import ProbeStart, Survey
from lockstep.errors import UsageError
from lockstep.launcher.arguments import write

THIS = "this machine"
_LOCAL = ("localhost", "127.0.0.1", "::1")
_SSH_OPTIONS = ("BatchMode=yes", "ConnectTimeout=6", "LogLevel=ERROR")
_HEAD_S = 15.0


def add_parser(commands: Any) -> None:
    """Add `doctor` to the subcommands of a parser. ``execute`` of the parsed arguments runs the command."""
    help = "check whether a run would start, on this machine or on several"
    parser = commands.add_parser("doctor", help=help, allow_abbrev=False)
    parser.set_defaults(execute=doctor)
    help = "check these machines, reached by ssh as in `lockstep run --hosts`; localhost is this machine"
    parser.add_argument("--hosts", metavar="HOST,...", help=help)
    parser.add_argument("--engine", choices=("slurm",), help="check the nodes of the allocation in which this command runs")
    parser.add_argument("--head", metavar="HOST:PORT", help="check whether this machine can reach a head that runs")
    help = "with --head: a file with the token of the run; -: one line of standard input"
    parser.add_argument("--token-file", metavar="FILE", help=help)
    help = "a folder or URL for Run(checkpoint=...), to which every machine must be able to write"
    parser.add_argument("--checkpoint", metavar="PLACE", help=help)
    parser.add_argument("--ssh", default="ssh", metavar="COMMAND", help='how ssh is called: --ssh "ssh -F FILE" (default: ssh)')
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
    starts = _starts(given)
    survey = Survey(starts, new_token(), wants_checkpoint=given.checkpoint is not None)
    found = find(survey.take(), given.checkpoint)
    if given.head is not None:
        found.append(_reach_head(given))
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
    hosts = [re.sub(r":\d+$", "", entry.strip()) for entry in given.hosts.split(",")]
    hosts = [re.sub(r"^\[(.*)\]$", r"\1", host) for host in hosts]
    for host in hosts:
        if not re.fullmatch(r"[\w.][\w.@:%-]*", host):
            raise UsageError(f"--hosts {given.hosts}: {host!r} is not a host. Write them separated by commas: --hosts a,b.")
        if hosts.count(host) > 1:
            raise UsageError(f"--hosts {given.hosts}: {host} is named twice. Name it once.")
    ssh = shlex.split(given.ssh)
    if not ssh or shutil.which(ssh[0]) is None:
        raise UsageError(f"--hosts needs ssh, and there is no program {given.ssh!r}. Install it, or name another one with --ssh.")
    starts = [] if any(host in _LOCAL for host in hosts) else [_here(THIS, given, has_workers=False)]
    for host in hosts:
        if host in _LOCAL:
            starts.append(_here(host, given))
            continue
        options = [word for option in _SSH_OPTIONS for word in ("-o", option)]
        remote = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(_command(host, given.python, given))}"
        login = shlex.join([*ssh, host])
        command = (*ssh, *options, "-T", "--", host, remote)

        def explain(line: str, code: int, host: str = host, login: str = login) -> str:
            if code == 255:  # ssh's own
                return f"{host} cannot be reached by ssh: {line.rstrip('.')}. `{login} true` must work without a question."
            return (
                f"{host} cannot run Lockstep: {line.rstrip('.')}. The directory {os.getcwd()} must exist there, and {given.python} "
                "must have Lockstep; --python names another Python."
            )

        starts.append(ProbeStart((host,), command, explain))
    return starts


def _by_srun(given: argparse.Namespace) -> ProbeStart:
    from lockstep.engines import slurm

    nodes = slurm.allocation(os.environ)
    words = shlex.join(_command("NAME", given.python, given)).replace("NAME", '"$SLURMD_NODENAME"', 1)
    command = slurm.srun_command(len(nodes), ["sh", "-c", f"exec {words}"])
    return ProbeStart(tuple(nodes), tuple(command), lambda line, code: f"srun has failed (code {code}): {line}")


def _command(name: str, python: str, given: argparse.Namespace) -> list[str]:
    place = [] if given.checkpoint is None else ["--checkpoint", given.checkpoint]
    return [python, "-m", "lockstep", "doctor", "--serve", name, *place]


def _explain_here(line: str, code: int) -> str:
    return f"the doctor's own process has failed (code {code}): {line}"


def _reach_head(given: argparse.Namespace) -> Finding:
    """Connect to the head as an agent does, up to the proof of the token, and close the connection."""
    address = Address.parse(given.head)
    token = read_token(given.token_file, os.environ)
    answers: list[str] = []
    began = time.monotonic()
    with selectors.DefaultSelector() as selector:
        callbacks = ChannelCallbacks(
            on_open=lambda channel: answers.append(""),
            on_message=lambda channel, message: None,
            on_closed=lambda channel, why: answers.append(why),
        )
        channel = Channel.client(address, token, "agent", selector, callbacks, {})
        while not answers and time.monotonic() - began < _HEAD_S:
            for key, _ in selector.select(0.05):
                key.data()
            channel.on_time(time.monotonic())
        channel.close()
    why = answers[0] if answers else f"no answer within {_HEAD_S:g} s"
    if not why:
        return Finding("ok", f"the head at {address} has this token, and answers in {1000 * (time.monotonic() - began):.1f} ms")
    return Finding("FAIL", f"{why.rstrip('.')}. Check that `lockstep head` runs there, and that --token-file is its token.")
