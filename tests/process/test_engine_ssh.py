"""`lockstep run --hosts`: real sshd on hosts in network namespaces (tests/hosts.py)."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine_job import DEADLINE_S, EngineJob
from tests.hosts import Hosts, missing_sshd
from tests.training_run import SCRIPT
from tests.waiting import wait_until

TOKEN = re.compile(rb"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")


@pytest.fixture
def three(hosts: Callable[[int], Hosts]) -> Hosts:
    if reason := missing_sshd():
        pytest.skip(reason)
    return hosts(3)


class SshRun(EngineJob):
    """`lockstep run --hosts MACHINES`, typed on host a. Hosts b and c have an sshd, with the variables of the script."""

    def __init__(self, hosts: Hosts, folder: Path, machines: str, *options: str, **settings: Any) -> None:
        super().__init__(folder, self.stderr, lambda: self.process.poll() is not None)
        for host in "bc":
            hosts.sshd(host, self.environment(settings))
        ssh = ["--ssh", f"ssh -F {hosts.ssh_config}"]
        command = [sys.executable, "-m", "lockstep", "run", "--hosts", machines, "--run-dir", "run", *ssh, *options, str(SCRIPT)]
        with (folder / "stdout.txt").open("wb") as out, (folder / "stderr.txt").open("wb") as err:
            self.process = hosts.run("a", command, self.environment(settings), cwd=folder, stdout=out, stderr=err)

    def stderr(self) -> str:
        return (self.folder / "stderr.txt").read_text()


def nothing_is_left(hosts: Hosts, names: str) -> None:
    for host in names:
        wait_until(lambda host=host: not hosts.pids_of(host, "-m lockstep"), f"nothing is left on {host}", 20)


def test_all_agents_are_lost_at_once_and_the_run_resumes_from_its_checkpoint(three: Hosts, tmp_path: Path, expected: str) -> None:
    run = SshRun(three, tmp_path, "b:1,c:1", hold_at=10, checkpoint=tmp_path / "checkpoints")
    run.wait_for_step(10)
    for host in "bc":
        (ssh,) = three.pids_of("a", f" -- {host} cd ")
        os.kill(ssh, signal.SIGKILL)
    run.hurry()
    run.wait_for_text("lockstep: resumed at step 7 from ")
    assert run.process.wait(DEADLINE_S) == 0, run.output()
    assert run.results() == {expected}, run.output()


def test_the_bits_of_one_process_through_a_killed_ssh_and_a_killed_head(three: Hosts, tmp_path: Path, expected: str) -> None:
    run = SshRun(three, tmp_path, "localhost:1,b:2,c:1", hold_at=10, hold_s=0.3)
    run.wait_for_step(10)
    (ssh,) = three.pids_of("a", " -- c cd ")
    os.kill(ssh, signal.SIGKILL)
    run.wait_for_size(3)
    run.wait_for_size(4)
    assert "the agent on c has ended and is started again" in run.output()
    (head,) = three.pids_of("a", "-m lockstep head")
    os.kill(head, signal.SIGKILL)
    run.wait_for_text("the head was killed by SIGKILL and is started again")
    run.wait_for_text("continuing a run with 4 workers")
    run.hurry()
    assert run.process.wait(DEADLINE_S) == 0, run.output()
    assert run.results() == {expected}, run.output()
    nothing_is_left(three, "abc")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_everything_ends_when_the_command_ends_and_the_token_is_in_no_command_line_or_variable(
    three: Hosts, tmp_path: Path, number: int
) -> None:
    run = SshRun(three, tmp_path, "b:1,c:1", hold_at=5)
    run.wait_for_step(5)
    for pid in [pid for host in three.names for pid in three.pids(host)]:
        for name in ("cmdline", "environ"):
            assert not TOKEN.search(Path(f"/proc/{pid}/{name}").read_bytes()), (pid, name)
    run.process.send_signal(number)
    assert run.process.wait(DEADLINE_S) == (-9 if number == signal.SIGKILL else 130), run.output()
    nothing_is_left(three, "abc")


@pytest.mark.parametrize(
    ("machines", "fault", "words"),
    [
        ("b:1,nowhere:1", "", ["nowhere cannot be reached by ssh", "Could not resolve hostname nowhere", "without a question"]),
        ("b:1", "no key", ["b cannot be reached by ssh", "Permission denied"]),
        ("b:1", "no python", ["no agent could be started on b", "/no/python", "--python names another"]),
        ("b:1", "no lockstep", ["no agent could be started on b", "No module named", "lockstep", "--python names another"]),
    ],
)
def test_a_host_that_cannot_take_part_is_named_with_what_ssh_says(
    three: Hosts, tmp_path: Path, machines: str, fault: str, words: list[str]
) -> None:
    isolated = tmp_path / "python"
    isolated.write_text('#!/bin/sh\nexec /usr/bin/env -u PYTHONPATH python3 -I -S "$@"\n')
    isolated.chmod(0o755)
    options = {
        "": [],
        "no key": ["--ssh", f"ssh -F {three.ssh_config} -o PubkeyAuthentication=no"],
        "no python": ["--python", "/no/python"],
        "no lockstep": ["--python", str(isolated)],
    }
    run = SshRun(three, tmp_path, machines, *options[fault])
    assert run.process.wait(30) == 2, run.output()
    for word in words:
        assert word in run.output().splitlines()[-1], run.output()
    nothing_is_left(three, "ab")
