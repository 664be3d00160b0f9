"""The environment variables that the agent gives to a worker: its number and rank, the run folder, its threads. Knows no processes.

A worker gets torchrun's variables too, so that scripts written for torchrun run unchanged. Lockstep itself reads its own variables
first (world.py).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.launcher.run_folder import RunFolder
from lockstep.world import AGENT_STORE

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_NAMES = "WORKER RUN_DIR AGENT_FD RANK SIZE LOCAL_RANK LOCAL_SIZE STORE LEDGER HANG_TIMEOUT START_SIZE DEBUG_RANK ADDRESS"
_RANK_NAMES = "RANK LOCAL_RANK GROUP_RANK ROLE_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_WORLD_SIZE ROLE_WORLD_SIZE ROLE_NAME"
_TORCHELASTIC_NAMES = "RUN_ID RESTART_COUNT MAX_RESTARTS USE_AGENT_STORE ERROR_FILE"
WORKER_VARIABLES = (
    *(f"LOCKSTEP_{name}" for name in _NAMES.split()),
    *_RANK_NAMES.split(),
    *("MASTER_ADDR", "MASTER_PORT"),
    *(f"TORCHELASTIC_{name}" for name in _TORCHELASTIC_NAMES.split()),
)
"""Workers do not inherit these from the agent: a worker of another run may have started it."""
_LAUNCHER_PREFIXES = ("OMPI_", "PMIX_", "PMI_", "MPI_LOCAL", "SLURM_STEP_", "SLURM_NTASKS")
_SLURM_TASK_NAMES = "PROCID LOCALID NODEID GTIDS NPROCS TASKS_PER_NODE TASK_PID"
_LAUNCHER_NAMES = tuple(f"SLURM_{name}" for name in _SLURM_TASK_NAMES.split())


@dataclass(frozen=True)
class RunSettings:
    """What is the same in the environment of all workers of a run, or of one restart of it."""

    size: int
    ledger: bool
    hang_timeout_s: float
    restarts: int
    """How often all workers have been started again."""
    max_restarts: int
    debug_rank: int | None
    threads: int | None = None
    """Of each worker; None: what the user has set, or an equal share of the cores."""


@dataclass(frozen=True)
class Placement:
    """The rank with which a worker is started, among ``size`` workers, ``local_size`` of them on its machine."""

    rank: int
    size: int
    local_size: int
    master_address: str
    master_port: int
    """Where a script without ``lockstep.Run`` finds the other workers; rank 0 serves it."""
    machine_rank: int = 0
    machines: int = 1
    address: str = ""
    """The address of this machine that others can reach; empty: there is only this machine."""
    interface: str = ""
    """The network interface that has this address."""
    is_spare: bool = False
    """Whether it shares its local rank with another worker. Its rank is one that no member is started with."""


def inherited_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of the agent that its workers inherit.

    If mpirun or srun has started the agent, its variables describe the agent: libraries in a worker would take that for the rank
    and the number of the workers. What describes a whole Slurm job (``SLURM_JOB_ID``) is inherited.
    """
    dropped = {*WORKER_VARIABLES, *_LAUNCHER_NAMES}
    return {name: value for name, value in environ.items() if name not in dropped and not name.startswith(_LAUNCHER_PREFIXES)}


def threads_per_worker(size: int, environ: Mapping[str, str]) -> int:
    """Returns the number of threads that the user has set, else an equal share of the cores that this process may use."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        requested = environ.get(name, "").split(",")[0]
        if requested.isdecimal() and int(requested) > 0:
            return int(requested)
    return max(1, len(os.sched_getaffinity(0)) // size)


def worker_environment(
    id: int,
    local_rank: int,
    place: Placement,
    settings: RunSettings,
    run_folder: RunFolder,
    threads: int,
    environ: Mapping[str, str],
) -> dict[str, str]:
    """Returns what is added to the user's variables.

    ``local_rank``: the number of the worker on this machine. A replacement has the number of the lost worker, and a spare that of
    a member. In a
    ``lockstep.Run`` the agent tells each worker its rank; the variables hold the rank with which the worker was started.
    """
    env = {name: str(threads) for name in THREAD_VARIABLES if name not in environ}
    env |= {"LOCKSTEP_WORKER": str(id), "LOCKSTEP_RUN_DIR": str(run_folder.path)}
    env |= {"LOCKSTEP_HANG_TIMEOUT": f"{settings.hang_timeout_s:g}", "LOCKSTEP_START_SIZE": str(settings.size)}
    if settings.ledger:
        env["LOCKSTEP_LEDGER"] = str(run_folder.ledger)
    if settings.debug_rank is not None:
        env["LOCKSTEP_DEBUG_RANK"] = str(settings.debug_rank)
    if place.address:
        env["LOCKSTEP_ADDRESS"] = place.address
    if place.interface:  # for process groups that the script makes itself
        env |= {name: place.interface for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if name not in environ}
    env |= {"LOCKSTEP_RANK": str(place.rank), "LOCKSTEP_SIZE": str(place.size), "LOCKSTEP_STORE": AGENT_STORE}
    env |= {"LOCKSTEP_LOCAL_RANK": str(local_rank), "LOCKSTEP_LOCAL_SIZE": str(place.local_size)}
    return env | _torchrun_environment(local_rank, place, settings, run_folder.path.name)


def _torchrun_environment(local_rank: int, place: Placement, settings: RunSettings, run_id: str) -> dict[str, str]:
    """torchrun's variables. ``RANK`` 0 serves ``MASTER_PORT`` itself, because the agent has no torch."""
    env = {name: str(place.rank) for name in ("RANK", "ROLE_RANK")} | {"LOCAL_RANK": str(local_rank)}
    env |= {name: str(place.size) for name in ("WORLD_SIZE", "ROLE_WORLD_SIZE")} | {"LOCAL_WORLD_SIZE": str(place.local_size)}
    env |= {"GROUP_RANK": str(place.machine_rank), "GROUP_WORLD_SIZE": str(place.machines), "ROLE_NAME": "default"}
    env |= {"MASTER_ADDR": place.master_address, "MASTER_PORT": str(place.master_port)}
    env |= {"TORCHELASTIC_RUN_ID": run_id, "TORCHELASTIC_USE_AGENT_STORE": "False"}
    env |= {"TORCHELASTIC_RESTART_COUNT": str(settings.restarts), "TORCHELASTIC_MAX_RESTARTS": str(settings.max_restarts)}
    return env
