"""What a worker finds in its environment: its place in the run, and how many threads it may use. Knows variables, not processes."""

from __future__ import annotations

import os
from collections.abc import Mapping

from lockstep.launch.run_folder import RunFolder

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
OURS = tuple(
    f"LOCKSTEP_{name}"
    for name in (
        "WORKER",
        "RUN_DIR",
        "AGENT_FD",
        "RANK",
        "SIZE",
        "LOCAL_RANK",
        "LOCAL_SIZE",
        "STORE",
        "LEDGER",
        "HANG_TIMEOUT",
        "START_SIZE",
    )
)
"""Not inherited from whoever started the agent: that may be a worker of another run."""


def threads_of(size: int, environ: Mapping[str, str]) -> int:
    """Threads for each of ``size`` workers: what the user has set, else an equal part of the cores this process may use."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        asked = environ.get(name, "").split(",")[0]
        if asked.isdecimal() and int(asked) > 0:
            return int(asked)
    return max(1, len(os.sched_getaffinity(0)) // size)


def worker_environment(
    id: int, size: int, run_dir: RunFolder, *, ledger: bool, hang_timeout_s: float, environ: Mapping[str, str]
) -> dict[str, str]:
    """What is added to the user's variables. The first ``size`` workers have a rank from the start; a replacement is told later."""
    env = {name: str(threads_of(size, environ)) for name in THREADS if name not in environ}
    env |= {"LOCKSTEP_WORKER": str(id), "LOCKSTEP_RUN_DIR": str(run_dir.path), "LOCKSTEP_HANG_TIMEOUT": f"{hang_timeout_s:g}"}
    env["LOCKSTEP_START_SIZE"] = str(size)
    if ledger:
        env["LOCKSTEP_LEDGER"] = str(run_dir.ledger)
    if id < size:
        env |= {"LOCKSTEP_RANK": str(id), "LOCKSTEP_SIZE": str(size), "LOCKSTEP_STORE": f"file://{run_dir.store}"}
        env |= {"LOCKSTEP_LOCAL_RANK": str(id), "LOCKSTEP_LOCAL_SIZE": str(size)}
    return env
