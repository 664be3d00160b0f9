"""`lockstep doctor` on hosts in network namespaces, healthy and broken."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.cluster.address import Address
from lockstep.doctor.doctor_command import _reach_head
from tests.fork_server import ROOT
from tests.hosts import Hosts, missing_sshd
from tests.slurm import Slurm, missing_slurm
from tests.waiting import wait_until

FAKE_TORCH = """
__version__ = "2.12.0"

class cuda:
    is_available = staticmethod(lambda: False)
"""
TOKEN = "ab" * 32


def examine(hosts: Hosts, host: str, *options: str, folder: Path) -> tuple[int, list[str], str]:
    """Run the doctor on a host, in ``folder``. Returns its exit code, its findings, and what it wrote to standard error."""
    command = [sys.executable, "-m", "lockstep", "doctor", "--ssh", f"ssh -F {hosts.ssh_config}", *options]
    began = time.monotonic()
    process = hosts.run(host, command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    out, err = process.communicate(timeout=60)
    assert time.monotonic() - began < 20 + 5, "it takes less than 20 s, and the machine of the tests is busy"
    return process.returncode, out.splitlines(), err


pytestmark = pytest.mark.exclusive  # each machine imports torch, for which it has 15 s


@pytest.fixture
def three(hosts: Callable[[int], Hosts]) -> Hosts:
    if reason := missing_sshd():
        pytest.skip(reason)
    return hosts(3)


def test_healthy_hosts(three: Hosts, tmp_path: Path) -> None:
    sshd = {host: three.sshd(host).pid for host in "bc"}
    code, findings, err = examine(three, "a", "--hosts", "b:4,c", "--checkpoint", "new/place", folder=tmp_path)
    assert code == 0, (findings, err)
    assert {finding[:4] for finding in findings} <= {"ok  ", "warn"}
    text = "\n".join(findings)
    assert re.search(r"ok    torch \S+ on b and c\n", text)
    assert re.search(r"ok    Lockstep \S+ on this machine, b and c\n", text)
    assert "ok    each of this machine, b and c reaches the others\n" in text
    assert re.search(r"ok    clocks differ by at most \S+ ms\n", text)
    assert re.search(r"  b -> c \S+ .B/s, c -> b \S+ .B/s, \S+ ms", text)
    assert "ok    b and c can write to new/place and read from it" in text
    assert "lockstep: a run would start on 2 machines" in err
    assert not list(tmp_path.iterdir()), "the probes are removed, and the folders that were made for them"
    wait_until(lambda: three.pids("b") == [sshd["b"]] and three.pids("c") == [sshd["c"]], "nothing of the doctor runs any more")


def test_broken_hosts(three: Hosts, tmp_path: Path) -> None:
    """c has another torch, b and c cannot reach each other, the place is not common, and there is no host d."""
    (tmp_path / "fake" / "torch").mkdir(parents=True)
    (tmp_path / "fake" / "torch" / "__init__.py").write_text(FAKE_TORCH)
    three.sshd("b")
    three.sshd("c", env={"PYTHONPATH": f"{tmp_path / 'fake'}:{ROOT / 'src'}"})
    assert three.run("b", ["ip", "route", "add", "blackhole", three.address("c")]).wait(10) == 0
    code, findings, err = examine(three, "a", "--hosts", "b,c,d.invalid", "--checkpoint", "memory://place", folder=tmp_path)
    assert code == 1
    bad = "\n".join(finding for finding in findings if finding.startswith("FAIL"))
    assert "FAIL  d.invalid cannot be reached by ssh: " in bad
    assert re.search(
        r"torch differs: \S+ on b; 2\.12\.0 on c\. Install the same version on every machine: pip install torch==", bad
    )
    assert re.search(rf"FAIL  b cannot reach c: .*{three.address('c')}", bad)
    assert re.search(rf"FAIL  c cannot reach b: .*{three.address('b')}:\d+.*no answer", bad)
    assert "FAIL  b does not see what c wrote to memory://place: the place is not common. Use a folder" in bad
    assert bad.count("FAIL") == 6, bad
    assert "lockstep: a run would not start on 3 machines: mend what says FAIL above" in err


def test_this_machine_alone(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lockstep", "doctor", "--checkpoint", "/proc/nowhere"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    (bad,) = [line for line in done.stdout.splitlines() if line.startswith("FAIL")]
    assert bad.startswith("FAIL  this machine cannot write and read /proc/nowhere: ")
    assert bad.endswith("name another place with --checkpoint.")


def test_a_head(tmp_path: Path) -> None:
    (tmp_path / "token").touch(mode=0o600)
    (tmp_path / "token").write_text(TOKEN)
    command = [sys.executable, "-m", "lockstep", "head", "--listen", "127.0.0.1:0", "--token-file", "token", "--run-dir", "run"]
    head = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL)
    try:
        wait_until((tmp_path / "run" / "head.address").exists, "the head listens")
        address = (tmp_path / "run" / "head.address").read_text().strip()
        good, wrong = (_reach_head(Address.parse(address), bytes.fromhex(digits)) for digits in (TOKEN, "cd" * 32))
    finally:
        head.kill()
        head.wait()
    assert (good.level, good.text.partition(",")[0]) == ("ok", f"the head at {address} has this token")
    assert wrong.level == "FAIL"
    assert f"the head at {address} has another token" in wrong.text
    gone = _reach_head(Address.parse(address), bytes.fromhex(TOKEN))
    assert (gone.level, "refused" in gone.text) == ("FAIL", True)


def test_the_nodes_of_an_allocation(three: Hosts, tmp_path: Path) -> None:
    if reason := missing_slurm():
        pytest.skip(reason)
    with Slurm(three) as slurm:
        command = f'"{sys.executable}" -m lockstep doctor --engine slurm --checkpoint "{tmp_path}/checkpoints"'
        job = slurm.sbatch(f"#!/bin/sh\n{command}\n", "--nodes=3", "--ntasks-per-node=1", cwd=tmp_path)
        state = slurm.wait(job)
        text = (tmp_path / f"slurm-{job}.out").read_text()
        assert state == "COMPLETED", text + slurm.logs()
    assert "FAIL" not in text
    assert re.search(r"ok    torch \S+ on n1, n2 and n3\n", text)
    assert "ok    each of n1, n2 and n3 reaches the others\n" in text
    assert re.search(r"  n1 -> n3 \S+ .B/s, n3 -> n1 \S+ .B/s, \S+ ms", text)
    assert "ok    n1, n2 and n3 can write to " in text
    assert "a run would start on 3 machines" in text
