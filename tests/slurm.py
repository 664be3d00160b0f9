"""Slurm: a real slurmctld with one slurmd per host of tests/hosts.py. The nodes n1, n2, ... have names that do not resolve.

with Hosts(3) as hosts, Slurm(hosts) as slurm:        # or the fixture ``slurm``
    job = slurm.sbatch("#!/bin/sh\\nsrun hostname", "--nodes=3", cwd=folder)
    slurm.wait(job)                                    # its state: COMPLETED, FAILED, ...
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.hosts import Hosts
from tests.waiting import wait_until

_PROGRAMS = {"slurmctld": "slurm-wlm", "slurmd": "slurm-wlm", "srun": "slurm-wlm", "munged": "munge"}
_START_S = 60.0
_POLL_S = 0.1  # each look starts a program
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")


def missing_slurm() -> str | None:
    """Returns why there can be no Slurm here, or None."""
    packages = sorted({package for program, package in _PROGRAMS.items() if shutil.which(program) is None})
    return f"Slurm needs the Debian packages {', '.join(packages)}" if packages else None


class Slurm:
    """Use it in a ``with`` statement, inside that of ``hosts``, whose end kills the daemons. Each host is one node with 2 CPUs.

    ``node_timeout_s``: a node that does not answer for this long is down.
    """

    def __init__(self, hosts: Hosts, node_timeout_s: int = 300) -> None:
        self.hosts, self._node_timeout_s = hosts, node_timeout_s
        self.nodes = {f"n{number}": host for number, host in enumerate(hosts.names, 1)}
        self.folder = hosts.folder / "slurm"

    def __enter__(self) -> Slurm:
        (self.folder / "state").mkdir(parents=True)
        self._start_munge()
        self._write_config()
        first = self.hosts.names[0]
        self._start(first, "slurmctld", ["-D", "-i"])
        for node, host in self.nodes.items():
            self._start(host, f"slurmd-{node}", ["-D", "-N", node])
        wait_until(self._all_nodes_are_idle, "all nodes are idle", _START_S, _POLL_S)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        pass  # what runs on the hosts ends with them

    # -- jobs -------------------------------------------------------------------------------------

    @property
    def env(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(self, command: Iterable[str], **popen: Any) -> subprocess.Popen[Any]:
        """Start a command on the first node and return at once, like ``hosts.run``."""
        env = {**self.env, **popen.pop("env", {})}
        return self.hosts.run(self.hosts.names[0], list(command), env, **popen)

    def output(self, *command: str, env: dict[str, str] | None = None) -> str:
        """Run a command on the first node. Returns what it has printed."""
        process = self.run(command, env=env or {}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        out, err = process.communicate(timeout=_START_S)
        return str(out or err)

    def sbatch(self, script: str, *options: str, cwd: Path, env: dict[str, str] | None = None) -> str:
        """Submit a script. Returns the id of the job, whose output goes to cwd/slurm-ID.out. ``env`` is added to its variables."""
        (cwd / "job.sh").write_text(script)
        command = ["sbatch", "--parsable", f"--chdir={cwd}", *options, str(cwd / "job.sh")]
        out = self.output(*command, env=env or {})
        assert re.fullmatch(r"\d+\n", out), out
        return out.strip()

    def job(self, job: str) -> dict[str, str]:
        """What `scontrol show job` says: JobState, Restarts, ..."""
        return dict(re.findall(r"(\w+)=(\S+)", self.output("scontrol", "--oneliner", "show", "job", job)))

    def node_states(self) -> dict[str, str]:
        """Node -> idle, mixed, draining, down*, ..."""
        words = self.output("sinfo", "--noheader", "--Node", "--format=%N %T").split()
        return dict(zip(words[::2], words[1::2], strict=True))

    def wait(self, job: str, deadline_s: float = 90.0) -> str:
        """Wait until the job is over. Returns its state."""
        state: list[str] = []

        def over() -> bool:
            state[:] = [self.job(job).get("JobState", "")]
            return state[0] in OVER

        wait_until(over, f"job {job} is over", deadline_s, _POLL_S)
        return state[0]

    def logs(self) -> str:
        """The last lines of all daemons: for the message of a test that fails."""
        return "\n".join(f"-- {path.name}\n{path.read_text()[-2000:]}" for path in sorted(self.folder.glob("*.log")))

    # -- daemons ----------------------------------------------------------------------------------

    def _start_munge(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        self.folder.chmod(0o755)
        paths = {"--key-file": key, "--socket": self.folder / "munge.sock", "--pid-file": self.folder / "munge.pid"}
        paths |= {"--log-file": self.folder / "munge.log", "--seed-file": self.folder / "munge.seed"}
        options = [f"{option}={path}" for option, path in paths.items()]
        process = self.hosts.run(self.hosts.names[0], ["munged", "--foreground", "--force", *options], stderr=subprocess.DEVNULL)
        wait_until(lambda: (self.folder / "munge.sock").exists() or process.poll() is not None, "munged listens", _START_S)
        assert process.poll() is None, "munged has ended"

    def _write_config(self) -> None:
        first = self.hosts.names[0]
        prolog = self.folder / "task_prolog"
        prolog.write_text('#!/bin/sh\necho "export LOCKSTEP_MACHINE=$SLURMD_NODENAME"\n')
        prolog.chmod(0o755)
        name = socket.gethostname()
        nodes = [
            f"NodeName={node} NodeHostname={name} NodeAddr={self.hosts.address(host)} CPUs=2 State=UNKNOWN"
            for node, host in self.nodes.items()
        ]
        settings = f"""
ClusterName=test
SlurmctldHost={name}({self.hosts.address(first)})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={self.folder}/munge.sock,cred_expire=5
StateSaveLocation={self.folder}/state
SlurmdSpoolDir={self.folder}/spool-%n
SlurmctldPidFile={self.folder}/slurmctld.pid
SlurmdPidFile={self.folder}/slurmd-%n.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
TaskProlog={prolog}
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
SchedulerType=sched/backfill
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
MinJobAge=300
KillWait=30
SlurmdTimeout={self._node_timeout_s}
UnkillableStepTimeout=60
{chr(10).join(nodes)}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverTimeLimit=0
"""
        (self.folder / "slurm.conf").write_text(settings)
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")

    def _start(self, host: str, name: str, options: list[str]) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            self.hosts.run(host, [name.partition("-")[0], *options], self.env, stdout=log, stderr=log)

    def _all_nodes_are_idle(self) -> bool:
        return self.node_states() == dict.fromkeys(self.nodes, "idle")
