"""`lockstep run --engine slurm script.py` inside an allocation: an agent on each node, started by one srun. Knows no membership.

The head runs here, on the node of the batch script. The token goes through the standard input of srun, which passes it on to all
tasks (--input=all); no common file system is needed. A task that is lost costs no other task (--kill-on-bad-exit=0), nor does a
node that fails (--no-kill). Slurm's SIGTERM before the time limit reaches the agents (with --signal=B:TERM@60, this process): the
workers save and stop. Then the job is requeued if it may be, and the same script resumes from the checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from lockstep.cluster.address import Address
from lockstep.cluster.token import new_token
from lockstep.engines.agent_options import agent_words, head_options, refuse_debugger, run_folder, script_words
from lockstep.engines.engine_run import AgentStart, EngineRun
from lockstep.engines.head_process import HeadProcess
from lockstep.engines.hostlist import expand
from lockstep.engines.route import listen_host, source_address, without_loopback
from lockstep.errors import UsageError
from lockstep.launcher.arguments import write

_SCONTROL_S = 30.0


def run(given: argparse.Namespace) -> int:
    """Execute `lockstep run --engine slurm`. Returns the exit code of the run."""
    nodes, per_node = allocation(os.environ), workers_per_node(given.n, os.environ)
    refuse_debugger(given, "--engine slurm")
    script_words(given)
    reached_at = [given.listen] if given.listen else without_loopback(filter(None, map(source_address, node_addresses(nodes))))
    token, folder = new_token(), run_folder(given)
    host = listen_host(reached_at or ["0.0.0.0"])
    head = HeadProcess(host, token, folder, head_options(given, len(nodes) * per_node))

    def agents(port: int) -> list[AgentStart]:
        heads = ",".join(str(Address(address, port)) for address in reached_at or ["127.0.0.1"])
        agent = [given.python or sys.executable, "-m", "lockstep.engines.attached_agent", heads]
        agent += agent_words(given, per_node, folder / "machines" / "{node}")
        return [AgentStart("Slurm", tuple(srun_command(len(nodes), agent)), _explain, outlives=True)]

    code = EngineRun(head, token, agents).run()
    if code == 0 and was_stopped(folder):
        requeue(os.environ["SLURM_JOB_ID"])
    return code


def allocation(environ: Mapping[str, str]) -> list[str]:
    """Returns the names of the nodes of the job in which this process runs. Raises UsageError if there is none."""
    nodelist = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    if "SLURM_JOB_ID" not in environ or not nodelist:
        raise UsageError(
            "--engine slurm runs inside an allocation, and SLURM_JOB_ID is not set. Put the command into a script for sbatch "
            "(`lockstep render slurm` prints one), or type `salloc -N 4` first."
        )
    if int(environ.get("SLURM_STEP_NUM_TASKS") or 1) > 1:
        raise UsageError(
            f"--engine slurm calls srun itself, but srun has started this command {environ['SLURM_STEP_NUM_TASKS']} times. "
            "Type it without srun."
        )
    if shutil.which("srun") is None:
        raise UsageError("--engine slurm needs srun, which is not in PATH. Add the folder of Slurm's commands to PATH.")
    return expand(nodelist)


def workers_per_node(requested: int | None, environ: Mapping[str, str]) -> int:
    """Returns -n, or what the job was submitted with: GPUs per node, or tasks per node. Raises UsageError if nodes differ."""
    if requested is not None:
        return requested
    if environ.get("SLURM_GPUS_ON_NODE", "").isdecimal():
        return int(environ["SLURM_GPUS_ON_NODE"])
    tasks = environ.get("SLURM_TASKS_PER_NODE", "1")
    found = re.fullmatch(r"(\d+)(?:\(x\d+\))?", tasks)
    if found is None:
        raise UsageError(
            f"the nodes have different numbers of tasks (SLURM_TASKS_PER_NODE={tasks}). Say with -n how many workers each node has."
        )
    return int(found[1])


def srun_command(nodes: int, agent: Sequence[str]) -> list[str]:
    """Returns the srun that starts one agent on each node, with everything that the job has there."""
    count = [f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
    faults = ["--kill-on-bad-exit=0", "--no-kill", "--wait=0"]
    return ["srun", *count, *faults, "--input=all", "--unbuffered", "--overlap", "--cpu-bind=none", *agent]


def node_addresses(nodes: Sequence[str]) -> list[str]:
    """Returns the addresses that Slurm itself uses for the nodes. Their names need not resolve."""
    shown = _scontrol("--oneliner", "show", "node", ",".join(nodes))
    return list(dict.fromkeys(re.findall(r"\bNodeAddr=(\S+)", shown)))


def was_stopped(run_folder: Path) -> bool:
    """Whether a signal has stopped all workers before the end of the script, as the head has noted it at its end."""
    try:
        events = [json.loads(line) for line in (run_folder / "events.jsonl").read_text().splitlines()]
    except (OSError, ValueError):
        return False
    ends = [event for event in events if event["kind"] == "end"]
    by_person = any(event["kind"] == "stop requested" for event in events)  # `lockstep stop`
    return bool(ends) and ends[-1].get("stopped_after") is not None and not by_person


def requeue(job: str) -> None:
    """Slurm's signal has stopped the run, and its state is saved. Let Slurm start the job again, if it may (--requeue)."""
    shown = _scontrol("--oneliner", "show", "job", job)
    # A job that scancel or a preemption ends gets SIGTERM too, and is not RUNNING any more.
    if not all(fact in shown for fact in ("JobState=RUNNING", "Requeue=1", "BatchFlag=1")):
        return
    done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, timeout=_SCONTROL_S, check=False)
    said = f"job {job} is requeued and resumes from the checkpoint" if done.returncode == 0 else done.stderr.strip()
    write(2, f"lockstep: {said}.\n")


def _scontrol(*words: str) -> str:
    try:
        done = subprocess.run(["scontrol", *words], capture_output=True, text=True, timeout=_SCONTROL_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def _explain(last_line: str, code: int) -> str:
    return (
        f"srun could not start the agents (code {code}): {last_line.rstrip('.')}. The current directory must exist on every node, "
        f"and {sys.executable} must have Lockstep there; --python names another Python."
    )
