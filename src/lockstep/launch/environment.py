"""The environment variables that the agent gives to a worker: its number, the run folder, its threads. Knows no processes."""

from __future__ import annotations

import os
from collections.abc import Mapping

from lockstep.launch.run_folder import RunFolder

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_NAMES = "WORKER RUN_DIR AGENT_FD RANK SIZE LOCAL_RANK LOCAL_SIZE STORE LEDGER HANG_TIMEOUT START_SIZE"
WORKER_VARIABLES = tuple(f"LOCKSTEP_{name}" for name in _NAMES.split())
"""Workers do not inherit these from the agent: a worker of another run may have started it."""


def threads_per_worker(size: int, environ: Mapping[str, str]) -> int:
    """Returns the number of threads that the user has set, else an equal share of the cores that this process may use."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        requested = environ.get(name, "").split(",")[0]
        if requested.isdecimal() and int(requested) > 0:
            return int(requested)
    return max(1, len(os.sched_getaffinity(0)) // size)


def worker_environment(
    id: int, size: int, run_folder: RunFolder, *, ledger: bool, hang_timeout_s: float, environ: Mapping[str, str]
) -> dict[str, str]:
    """Returns what is added to the user's variables. The first ``size`` workers start with a rank; a replacement gets it later."""
    env = {name: str(threads_per_worker(size, environ)) for name in THREAD_VARIABLES if name not in environ}
    env |= {"LOCKSTEP_WORKER": str(id), "LOCKSTEP_RUN_DIR": str(run_folder.path)}
    env |= {"LOCKSTEP_HANG_TIMEOUT": f"{hang_timeout_s:g}", "LOCKSTEP_START_SIZE": str(size)}
    if ledger:
        env["LOCKSTEP_LEDGER"] = str(run_folder.ledger)
    if id < size:
        env |= {"LOCKSTEP_RANK": str(id), "LOCKSTEP_SIZE": str(size), "LOCKSTEP_STORE": f"file://{run_folder.store}"}
        env |= {"LOCKSTEP_LOCAL_RANK": str(id), "LOCKSTEP_LOCAL_SIZE": str(size)}
    return env
