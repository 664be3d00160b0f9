"""The batch script of a run under Slurm, as `lockstep render slurm` prints it. Makes text; talks to no Slurm."""

from __future__ import annotations

import shlex
from dataclasses import dataclass


@dataclass(frozen=True)
class SlurmJob:
    """What `lockstep render slurm` was asked for. Every field has been checked."""

    name: str
    entrypoint: tuple[str, ...]
    """The script and its arguments, or "-m", the module and its arguments."""
    workers: int
    nodes: int
    time: str | None = None
    partition: str | None = None
    gpus_per_worker: int = 0
    cpus_per_worker: int = 1
    warning_s: int = 60
    """How long before the time limit Slurm sends SIGTERM."""


_SCRIPT = """
# The head runs here, on the first node, and one agent on each node. On SIGTERM before the time limit, all workers end the step and
# save a checkpoint. Then the job is requeued, and resumes from the checkpoint. (After scancel it is not requeued.)
exec lockstep run --engine slurm -n {per_node} {entrypoint}
"""


def render(job: SlurmJob) -> str:
    """Returns the script, for `sbatch`."""
    per_node = job.workers // job.nodes
    options = [f"--job-name={job.name}", f"--nodes={job.nodes}", "--ntasks-per-node=1"]
    options.append(f"--cpus-per-task={per_node * job.cpus_per_worker}")
    if job.gpus_per_worker:
        options.append(f"--gpus-per-node={per_node * job.gpus_per_worker}")
    if job.time is not None:
        options.append(f"--time={job.time}")
    if job.partition is not None:
        options.append(f"--partition={job.partition}")
    # B: the head alone gets the signal. Agents would take it for a request to leave the run.
    options += [f"--signal=B:TERM@{job.warning_s}", "--requeue", "--open-mode=append", "--no-kill"]
    directives = "".join(f"#SBATCH {option}\n" for option in options)
    return "#!/bin/bash\n" + directives + _SCRIPT.format(per_node=per_node, entrypoint=shlex.join(job.entrypoint))
