"""The variables of a worker: what it inherits from the agent, and how many threads it uses."""

from __future__ import annotations

import os

import pytest

from lockstep.launcher.environment import inherited_environment, threads_per_worker


@pytest.mark.parametrize(("workers", "threads"), [(1, 8), (2, 4), (3, 2), (8, 1), (16, 1)])
def test_workers_share_the_cores_that_the_agent_may_use(workers: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert threads_per_worker(workers, {}) == threads


@pytest.mark.parametrize(
    ("environ", "threads"),
    [
        ({"OMP_NUM_THREADS": "3"}, 3),
        ({"MKL_NUM_THREADS": "2"}, 2),
        ({"OMP_NUM_THREADS": "5,2"}, 5),
        ({"OMP_NUM_THREADS": "many"}, 4),
    ],
)
def test_what_the_user_has_set_counts(environ: dict[str, str], threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert threads_per_worker(2, environ) == threads


def test_workers_do_not_inherit_what_describes_the_agent_as_a_task_of_a_launcher() -> None:
    users = {"HOME": "/home/me", "SLURM_JOB_ID": "7", "SLURM_CPUS_ON_NODE": "4", "LOCKSTEP_MACHINE": "a"}
    launchers = (
        "OMPI_COMM_WORLD_RANK OMPI_MCA_ess PMIX_RANK PMI_SIZE MPI_LOCALRANKID SLURM_PROCID SLURM_NTASKS SLURM_NTASKS_PER_NODE"
    )
    launchers += " SLURM_STEP_NUM_TASKS SLURM_LOCALID SLURM_TASKS_PER_NODE RANK WORLD_SIZE MASTER_ADDR LOCKSTEP_RANK"
    assert inherited_environment({**users, **dict.fromkeys(launchers.split(), "1")}) == users
