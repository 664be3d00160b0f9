"""The script of `lockstep render slurm`, given to a real sbatch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fork_server import ROOT
from tests.hosts import Hosts
from tests.slurm import Slurm, missing_slurm
from tests.training_run import SCRIPT
from tests.waiting import wait_until


@pytest.mark.slow
def test_slurms_signal_saves_a_checkpoint_and_the_job_is_requeued(hosts: Callable[[int], Hosts], tmp_path: Path) -> None:
    if reason := missing_slurm():
        pytest.skip(reason)
    program = tmp_path / "bin" / "lockstep"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m lockstep "$@"\n')
    program.chmod(0o755)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
    arguments = ["-n", "2", "--nodes", "2", "--time", "10", "-o", str(tmp_path / "job.sh"), str(SCRIPT)]
    subprocess.run([program, "render", "slurm", *arguments], env=environment, check=True, timeout=60)
    with Slurm(hosts(2)) as slurm:
        settings = [f"PATH={program.parent}:{os.environ['PATH']}", "OMP_NUM_THREADS=1", "TRAIN_HOLD_AT=10"]
        settings += [f"TRAIN_CHECKPOINT={tmp_path / 'checkpoints'}"]
        job = slurm.output("env", *settings, "sbatch", "--parsable", f"--chdir={tmp_path}", str(tmp_path / "job.sh")).strip()
        output = tmp_path / f"slurm-{job}.out"

        def reaches(condition: Callable[[], object], what: str) -> None:
            try:
                wait_until(condition, what, 90)
            except AssertionError as error:
                said = output.read_text() if output.exists() else ""
                raise AssertionError(f"{error}\n{said}\n{slurm.job(job)}\n{slurm.logs()}") from None

        step = tmp_path / "step"
        reaches(lambda: step.exists() and int(step.read_text() or 0) >= 10, "step 10 is committed")
        slurm.output("scancel", "--batch", "--signal=TERM", job)  # what --signal=B:TERM@60 does at the time limit
        reaches(lambda: slurm.job(job).get("Restarts") == "1", "the job is requeued")
        slurm.output("scancel", job)
    assert list((tmp_path / "checkpoints").glob("step-*/manifest.json"))
    assert f"job {job} is requeued" in output.read_text()
