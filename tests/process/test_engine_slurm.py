"""`lockstep run --engine slurm`: a real slurmctld with three slurmd, on hosts in network namespaces (tests/slurm.py)."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine_job import DEADLINE_S, EngineJob
from tests.hosts import Hosts
from tests.slurm import OVER, Slurm, missing_slurm
from tests.training_run import SCRIPT
from tests.waiting import wait_until


@pytest.fixture
def slurm(hosts: Callable[[int], Hosts], request: pytest.FixtureRequest) -> Iterator[Slurm]:
    """A Slurm of three nodes. ``@pytest.mark.parametrize("slurm", [8], indirect=True)``: a node is down after 8 s."""
    if reason := missing_slurm():
        pytest.skip(reason)
    with Slurm(hosts(3), getattr(request, "param", 300)) as made:
        yield made


class SlurmJob(EngineJob):
    """An sbatch script that calls `lockstep run --engine slurm` on three nodes."""

    def __init__(self, slurm: Slurm, folder: Path, *options: str, **settings: Any) -> None:
        super().__init__(folder, self.printed, lambda: slurm.job(self.id)["JobState"] in OVER)
        command = f'"{sys.executable}" -m lockstep run --engine slurm --run-dir run "{SCRIPT}"'
        tasks = ["--nodes=3", "--ntasks-per-node=1", "--no-kill", "--open-mode=append"]
        self.id = slurm.sbatch(f"#!/bin/sh\nexec {command}\n", *tasks, *options, cwd=folder, env=self.environment(settings))

    def printed(self) -> str:
        path = self.folder / f"slurm-{self.id}.out"
        return path.read_text() if path.exists() else ""


def test_the_bits_of_one_process_although_an_agent_and_a_task_are_killed(slurm: Slurm, tmp_path: Path, expected: str) -> None:
    job = SlurmJob(slurm, tmp_path, hold_at=10, hold_s=0.3)
    job.wait_for_step(10)
    (agent,) = slurm.hosts.pids_of("b", "-m lockstep agent")
    os.kill(agent, signal.SIGKILL)
    job.wait_for_size(2)
    job.wait_for_size(3)  # the task has started another agent
    assert "the agent on n2 was killed by SIGKILL and is started again" in job.output()
    (task,) = slurm.hosts.pids_of("c", "attached_agent")
    os.kill(task, signal.SIGKILL)
    job.wait_for_size(2)
    (task,) = slurm.hosts.pids_of("b", "attached_agent")
    os.kill(task, signal.SIGTERM)  # this machine leaves, and the run continues: nothing to requeue
    job.wait_for_size(1)
    job.hurry()
    assert slurm.wait(job.id, DEADLINE_S) == "COMPLETED", job.output()
    assert job.results() == {expected}, job.output()
    assert slurm.job(job.id)["Restarts"] == "0", job.output()
    assert [len(members) for members in job.generations()] == [3, 2, 3, 2, 1]  # nobody else was started again


@pytest.mark.slow
@pytest.mark.parametrize("slurm", [8], indirect=True)
def test_a_node_that_is_drained_stays_and_a_node_that_fails_costs_its_workers_alone(
    slurm: Slurm, tmp_path: Path, expected: str
) -> None:
    job = SlurmJob(slurm, tmp_path, hold_at=5, hold_s=0.3)
    job.wait_for_step(5)
    slurm.output("scontrol", "update", "nodename=n2", "state=drain", "reason=test")
    slurm.hosts.cut("c", silently=True)
    job.wait_for_size(2)
    job.wait_until(lambda: slurm.node_states()["n3"].startswith("down"), "Slurm knows that n3 is down")
    assert slurm.node_states()["n2"] == "draining"
    job.hurry()
    assert slurm.wait(job.id, DEADLINE_S) == "COMPLETED", job.output()
    assert job.results() == {expected}, job.output()


@pytest.mark.slow
def test_the_signal_before_the_time_limit_saves_and_the_job_is_requeued(slurm: Slurm, tmp_path: Path, expected: str) -> None:
    job = SlurmJob(slurm, tmp_path, "--requeue", hold_at=20, checkpoint=tmp_path / "checkpoints")
    for restarts, options in enumerate(([], ["--batch"]), 1):  # as --signal=TERM@60 and --signal=B:TERM@60 do
        job.wait_for_step(20 + 2 * restarts)
        slurm.output("scancel", "--signal=TERM", *options, job.id)
        job.wait_until(lambda count=str(restarts): slurm.job(job.id)["Restarts"] == count, "the job is requeued")
        job.wait_until(lambda count=restarts: job.output().count("lockstep: resumed at step") == count, "the run is resumed")
    job.hurry()
    assert slurm.wait(job.id, DEADLINE_S) == "COMPLETED", job.output()
    assert job.results() == {expected}, job.output()


def test_a_job_that_is_cancelled_ends_everywhere_and_is_not_requeued(slurm: Slurm, tmp_path: Path) -> None:
    job = SlurmJob(slurm, tmp_path, "--requeue", hold_at=5, checkpoint=tmp_path / "checkpoints")
    job.wait_for_step(5)
    slurm.output("scancel", job.id)
    assert slurm.wait(job.id, DEADLINE_S) == "CANCELLED", job.output()
    for host in slurm.hosts.names:
        wait_until(lambda host=host: not slurm.hosts.pids_of(host, "-m lockstep"), f"nothing is left on {host}", 20)
    assert slurm.job(job.id)["Restarts"] == "0", job.output()
    assert "requeued" not in job.output()
