"""Open MPI's own mpirun: scripts that it starts, and agents that it starts."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster import PORT, Cluster
from tests.fork_server import ROOT
from tests.hosts import Hosts, missing_sshd
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


def test_agents_under_mpirun_on_two_hosts(hosts: Callable[[int], Hosts], tmp_path: Path, expected: str) -> None:
    if reason := missing_sshd():
        pytest.skip(reason)
    three = hosts(3)
    for host in "bc":
        three.sshd(host)
    with Cluster(three, tmp_path / "cluster") as cluster:
        head = cluster.start_head("a", min_workers=4)
        where = ["--host", "b,c", "--map-by", "ppr:1:node", "--wdir", str(cluster.folder)]
        network = ["--mca", "oob_tcp_if_include", "eth0", "--mca", "plm_rsh_agent", f"ssh -F {three.ssh_config}"]
        agent = ["agent", "--head", f"{three.address('a')}:{PORT}", "--token-file", str(cluster.token), "-n", "2"]
        variables = [word for name in ("PYTHONPATH", "OMP_NUM_THREADS", "TRAIN_HOLD_AT") for word in ("-x", name)]
        command = [*MPIRUN, *variables, *where, *network, sys.executable, "-m", "lockstep", *agent, str(SCRIPT)]
        env = {**mpirun_environment(), "TRAIN_HOLD_AT": "20"}
        with (tmp_path / "mpirun.txt").open("wb") as output:
            mpirun = three.run("a", command, env, cwd=cluster.folder, stdout=output, stderr=output)
        cluster.wait_for_step(20)
        for host in "bc":
            (agent_pid,) = three.pids_of(host, "-m lockstep agent")
            assert b"OMPI_COMM_WORLD_RANK=" in Path(f"/proc/{agent_pid}/environ").read_bytes()
            for zygote in three.pids_of(host, "lockstep.launcher.zygote"):
                assert not re.search(rb"\0(OMPI|PMIX)_", Path(f"/proc/{zygote}/environ").read_bytes())
        cluster.hurry()
        assert cluster.result() == expected, (tmp_path / "mpirun.txt").read_text()
        assert mpirun.wait(60) == 0, (tmp_path / "mpirun.txt").read_text()
        assert "starting 4 workers on" in head.stderr()
