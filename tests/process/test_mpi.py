"""Open MPI's own mpirun: scripts that it starts, and agents that it starts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fork_server import ROOT
from tests.training_run import SCRIPT

pytestmark = pytest.mark.skipif(shutil.which("mpirun") is None, reason="MPI needs mpirun (Debian: openmpi-bin)")
MPIRUN = ("mpirun", "--oversubscribe", "--bind-to", "none")


def mpirun_environment() -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("LOCKSTEP_")}
    allow_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {**clean, **allow_root, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}", "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
def test_a_script_under_mpirun_gives_the_same_bits_as_alone(tmp_path: Path, expected: str) -> None:
    in_own_folder = f'mkdir $OMPI_COMM_WORLD_RANK && cd $OMPI_COMM_WORLD_RANK && exec "{sys.executable}" "{SCRIPT}"'
    command = [*MPIRUN, "-n", "3", "sh", "-c", in_own_folder]
    done = subprocess.run(command, cwd=tmp_path, env=mpirun_environment(), capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / str(rank) / "done-0").read_text().strip() for rank in range(3)] == [expected] * 3
