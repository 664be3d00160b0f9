"""`lockstep run --hosts a:4,b:4,c:2 script.py`: an agent on each host, started by the system's own ssh. Knows no membership.

The head runs on this machine. The token goes through the standard input of ssh. When this command ends, however it ends, the
standard input of every agent ends, and so does the agent (attached_agent.py).
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from lockstep.cluster.address import Address
from lockstep.cluster.token import new_token
from lockstep.engines.agent_options import agent_words, head_options, refuse_debugger, run_folder, script_words
from lockstep.engines.engine_run import AgentStart, EngineRun
from lockstep.engines.head_process import HeadProcess
from lockstep.engines.route import listen_host, source_address, without_loopback
from lockstep.errors import UsageError

LOCAL = ("localhost", "127.0.0.1", "::1")
_HOST = re.compile(r"(?:(?P<user>[\w.][\w.@-]*)@)?(?:\[(?P<v6>[0-9A-Fa-f:.%\w]+)\]|(?P<name>\w[\w.-]*))(?::(?P<workers>\d+))?")
_OPTIONS = ("BatchMode=yes", "ConnectTimeout=15", "ServerAliveInterval=5", "ServerAliveCountMax=3", "LogLevel=ERROR")
_RESOLVE_S = 10.0


@dataclass(frozen=True)
class Host:
    """One entry of --hosts. ``name``: what ssh is called with, with the user if one was given."""

    name: str
    workers: int

    @property
    def is_local(self) -> bool:
        return self.name in LOCAL

    @property
    def folder(self) -> str:
        """The name of the folder for the files of this host."""
        return re.sub(r"[^\w.-]", "_", self.name)


def parse_hosts(text: str, per_host: int | None) -> list[Host]:
    """Read `a:4,user@b:4,[::1]:2`. ``per_host``: the workers of a host without a number. Raises UsageError."""
    hosts: list[Host] = []
    for entry in text.split(","):
        found = _HOST.fullmatch(entry.strip())
        if found is None:
            raise UsageError(f"--hosts {text}: {entry!r} is not a host. Write HOST:WORKERS, separated by commas: --hosts a:4,b:4.")
        name = (f"{found['user']}@" if found["user"] else "") + (found["v6"] or found["name"])
        workers = int(found["workers"]) if found["workers"] else per_host or 1
        if workers < 1:
            raise UsageError(f"--hosts {text}: {entry} has no worker. Give it at least one, or take it out.")
        if any(host.name == name for host in hosts):
            raise UsageError(f"--hosts {text}: {name} is named twice. Name it once, with all of its workers.")
        hosts.append(Host(name, workers))
    return hosts


def run(given: argparse.Namespace) -> int:
    """Execute `lockstep run --hosts`. Returns the exit code of the run."""
    hosts = parse_hosts(given.hosts, given.n)
    ssh = ssh_command(given.ssh or os.environ.get("LOCKSTEP_SSH") or "ssh")
    refuse_debugger(given, "--hosts")
    script_words(given)
    others = [host for host in hosts if not host.is_local]
    heads = {host: given.listen or source_address(_real_name(host.name, ssh)) for host in others}
    reached_at = without_loopback(filter(None, heads.values())) or ["127.0.0.1"]
    # Behind a jump host, a name may mean nothing here. Then the agent knows where ssh came from (attached_agent.py).
    listen = "0.0.0.0" if None in heads.values() else listen_host(reached_at)
    token, folder = new_token(), run_folder(given)
    head = HeadProcess(listen, token, folder, head_options(given, sum(host.workers for host in hosts)))

    def agents(port: int) -> list[AgentStart]:
        starts = []
        for host in hosts:
            words = [str(Address(heads.get(host) or reached_at[0], port))]
            words += agent_words(given, host.workers, folder / "machines" / host.folder)
            starts.append(agent_start(host, ssh, given.python or sys.executable, os.getcwd(), words))
        return starts

    return EngineRun(head, token, agents).run()


def agent_start(host: Host, ssh: Sequence[str], python: str, folder: str, words: Sequence[str]) -> AgentStart:
    """Returns how the agent of ``host`` is started. ``folder``: its working directory. ``words``: what attached_agent.py takes."""
    agent = [python, "-m", "lockstep.engines.attached_agent", *words]
    explain = partial(_explain, host.name, shlex.join([*ssh, host.name]), python, folder)
    if host.is_local:
        return AgentStart(host.name, tuple(agent), explain)
    return AgentStart(host.name, remote_command(host, ssh, folder, agent), explain)


def remote_command(host: Host, ssh: Sequence[str], folder: str, words: Sequence[str]) -> tuple[str, ...]:
    """Returns the command that executes ``words`` on ``host``, in ``folder``."""
    options = [word for option in _OPTIONS for word in ("-o", option)]
    return (*ssh, *options, "-T", "--", host.name, f"cd {shlex.quote(folder)} && exec {shlex.join(words)}")


def _explain(host: str, ssh: str, python: str, folder: str, last_line: str, code: int) -> str:
    if code == 255:  # ssh's own
        return (
            f"{host} cannot be reached by ssh: {last_line.rstrip('.')}. `{ssh} true` must work without a question; "
            "--ssh or LOCKSTEP_SSH give ssh options."
        )
    return (
        f"no agent could be started on {host}: {last_line.rstrip('.')}. The directory {folder} must exist there, and {python} "
        "must have Lockstep; --python names another Python."
    )


def ssh_command(text: str) -> list[str]:
    """Returns the words of ``--ssh`` or ``LOCKSTEP_SSH``. Raises UsageError if there is no such program."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(
            f'the ssh command {text!r} cannot be split into words: {error}. Write it like --ssh "ssh -F FILE".'
        ) from None
    if not words or shutil.which(words[0]) is None:
        raise UsageError(
            f"--hosts needs ssh, and there is no program {words[0] if words else text}. Install it (Debian: openssh-client), "
            "or name another one with --ssh."
        )
    return words


def _real_name(host: str, ssh: Sequence[str]) -> str:
    """The name or address that ssh's configuration has for ``host``."""
    try:
        done = subprocess.run([*ssh, "-G", "--", host], capture_output=True, text=True, timeout=_RESOLVE_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return host.rpartition("@")[2]
    names = [line.removeprefix("hostname ") for line in done.stdout.splitlines() if line.startswith("hostname ")]
    return names[0] if names else host.rpartition("@")[2]
