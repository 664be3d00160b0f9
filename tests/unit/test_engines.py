"""Engines: the command lines they make, and what they read. Real ssh, Slurm and MPI: tests/process/test_engine_*.py."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from lockstep.__main__ import main
from lockstep.engines.attached_agent import with_launch_address
from lockstep.engines.hostlist import expand
from lockstep.engines.ray_placement import bundle, needs_of_worker, workers_per_agent
from lockstep.engines.route import listen_host, source_address, without_loopback
from lockstep.engines.slurm import allocation, srun_command, was_stopped, workers_per_node
from lockstep.engines.ssh import Host, agent_start, parse_hosts
from lockstep.errors import UsageError

JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]"}


def test_hosts_have_a_name_a_user_and_a_number_of_workers() -> None:
    assert parse_hosts("a:4,b:2", None) == [Host("a", 4), Host("b", 2)]
    assert parse_hosts("me@a.example.org,[fe80::1%eth0]:2,localhost", 3) == [
        Host("me@a.example.org", 3),
        Host("fe80::1%eth0", 2),
        Host("localhost", 3),
    ]
    assert parse_hosts("a", None) == [Host("a", 1)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a:4,,b", "'' is not a host"),
        ("-oProxyCommand=x:1", "is not a host"),
        ("a:four", "'a:four' is not a host"),
        ("a:0", "a:0 has no worker"),
        ("a:1,a:2", "a is named twice"),
    ],
)
def test_wrong_hosts_are_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_hosts(text, None)


def test_ssh_gets_one_command_that_any_shell_reads_the_same_way() -> None:
    start = agent_start(Host("b", 2), ["ssh", "-F", "my config"], "/opt/my python", "/work/a b", ["10.0.0.1:5", "it's", "$x"])
    assert start.command[:3] == ("ssh", "-F", "my config")
    assert start.command[-2] == "b"
    assert "BatchMode=yes" in start.command
    assert shlex.split(start.command[-1]) == [
        *("cd", "/work/a b", "&&", "exec", "/opt/my python", "-m", "lockstep.engines.attached_agent", "10.0.0.1:5", "it's", "$x")
    ]
    local = agent_start(Host("localhost", 2), ["ssh"], "python", "/", ["10.0.0.1:5"])
    assert local.command == ("python", "-m", "lockstep.engines.attached_agent", "10.0.0.1:5")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("gpu[008-010,7],login-1", ["gpu008", "gpu009", "gpu010", "gpu7", "login-1"]),
        ("r[1-2]n[01-02]x", ["r1n01x", "r1n02x", "r2n01x", "r2n02x"]),
    ],
)
def test_hostlists_of_slurm(text: str, names: list[str]) -> None:
    assert expand(text) == names


@pytest.mark.parametrize("text", ["", "n[1-", "n[3-1]", "n[a]", "n1,,n2", "n]1["])
def test_what_is_no_hostlist_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a list of hosts"):
        expand(text)


def test_an_allocation_says_how_many_workers_a_node_has() -> None:
    assert workers_per_node(5, {"SLURM_TASKS_PER_NODE": "2(x3)"}) == 5
    assert workers_per_node(None, {"SLURM_TASKS_PER_NODE": "2(x3)"}) == 2
    assert workers_per_node(None, {"SLURM_TASKS_PER_NODE": "2(x3)", "SLURM_GPUS_ON_NODE": "8"}) == 8
    with pytest.raises(UsageError, match=r"SLURM_TASKS_PER_NODE=2\(x3\),1\). Say with -n"):
        workers_per_node(None, {"SLURM_TASKS_PER_NODE": "2(x3),1"})


def test_outside_an_allocation_and_inside_a_step_the_remedy_is_named() -> None:
    with pytest.raises(UsageError, match="SLURM_JOB_ID is not set"):
        allocation({})
    with pytest.raises(UsageError, match="started this command 6 times"):
        allocation({**JOB, "SLURM_STEP_NUM_TASKS": "6"})


def test_srun_starts_one_task_per_node_and_loses_no_task_with_another() -> None:
    command = srun_command(3, ["python", "x"])
    for option in ("--nodes=3", "--ntasks=3", "--kill-on-bad-exit=0", "--no-kill", "--input=all"):
        assert option in command
    assert command[-2:] == ["python", "x"]


def test_the_address_that_ssh_or_srun_came_from_is_an_address_of_the_head() -> None:
    assert with_launch_address("10.0.0.1:5", {}) == ["10.0.0.1:5"]
    assert with_launch_address("10.0.0.1:5", {"SSH_CONNECTION": "10.0.0.1 50 10.0.0.2 22"}) == ["10.0.0.1:5"]
    assert with_launch_address("10.0.0.1:5", {"SSH_CONNECTION": "fe80::1 50 fe80::2 22"}) == ["10.0.0.1:5", "[fe80::1]:5"]
    assert with_launch_address("10.0.0.1:5", {"SLURM_LAUNCH_NODE_IPADDR": "10.9.0.1"}) == ["10.0.0.1:5", "10.9.0.1:5"]


def test_the_head_listens_where_it_is_reached() -> None:
    assert source_address("127.0.0.1") == "127.0.0.1"
    assert source_address("no-such-name.invalid") is None
    assert without_loopback(["127.0.0.1", "10.0.0.1", "10.0.0.1"]) == ["10.0.0.1"]
    assert without_loopback(["::1"]) == ["::1"]
    assert listen_host(["10.0.0.1"]) == "10.0.0.1"
    assert listen_host(["10.0.0.1", "10.1.0.1"]) == "0.0.0.0"
    assert listen_host(["10.0.0.1", "fd00::1"]) == "::"


@pytest.mark.parametrize(
    ("workers", "per_node", "gpus", "expected"),
    [
        (6, None, 0, [6]),  # as few nodes as possible
        (12, None, 0, [6, 6]),  # and almost equally many workers on each
        (19, None, 0, [8, 8, 3]),
        (3, None, 1, [2, 1]),  # the third node has no GPU
        (5, 2, 1, [2, 2, 1]),  # Ray may add nodes
    ],
)
def test_ray_gets_an_agent_for_each_node(workers: int, per_node: int | None, gpus: int, expected: list[int]) -> None:
    nodes = [{"CPU": 8.0, "GPU": 2.0}, {"CPU": 8.0, "GPU": 2.0}, {"CPU": 3.0, "memory": 1e9}]
    assert workers_per_agent(workers, per_node, needs_of_worker(1, gpus), nodes) == expected


def test_what_ray_cannot_place_is_refused() -> None:
    with pytest.raises(UsageError, match="room for 3 workers with 2 CPU each, and -n is 4"):
        workers_per_agent(4, None, needs_of_worker(2, 0), [{"CPU": 5.0}, {"CPU": 2.0}])
    with pytest.raises(UsageError, match="a worker needs a CPU or a GPU"):
        needs_of_worker(0, 0)
    with pytest.raises(UsageError, match=r"3 workers of one node need 1.5 GPUs together"):
        bundle(3, needs_of_worker(1, 0.5))
    assert bundle(2, needs_of_worker(1, 0.5)) == {"CPU": 2.0, "GPU": 1.0}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--hosts", "a", "--engine", "slurm"], "exclude each other"),
        (["--engine", "slurm"], "SLURM_JOB_ID is not set"),
        (["--ssh", "ssh -v"], "there is no --hosts"),
        (["--python", "/x"], "--python is for several machines"),
        (["--hosts", "a:1,b", "--debug-rank", "0"], "--debug-rank gives a worker this terminal"),
        (["--engine", "ray"], "--engine ray needs -n"),
        (["--gpus-per-worker", "1"], "--gpus-per-worker is for --engine ray"),
        (["--engine", "ray", "-n", "2", "--listen", "x"], "--listen does nothing with --engine ray"),
        (["--engine", "ray", "-n", "2", "--runtime-env", "pip"], "--runtime-env is not JSON"),
        (["--engine", "ray", "-n", "2", "--working-dir", "no-such-folder"], "there is no folder no-such-folder"),
        (["--hosts", "a", "--ssh", "no-such-ssh"], "there is no program no-such-ssh"),
        (["--hosts", "a", "--ssh", "ssh 'x"], "cannot be split into words"),
        (["--hosts", "localhost", "--ssh", "true", "no-such-script.py"], "there is no script no-such-script.py"),
    ],
)
def test_options_that_cannot_work_together_are_refused(
    options: list[str], words: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("SLURM_JOB_ID", "LOCKSTEP_SSH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    assert main(["run", *options, "train.py"]) == 2
    said = capfd.readouterr().err
    assert words in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(("lines", "requeued"), [([], True), ([{"kind": "stop requested", "kill": False}], False)])
def test_a_run_that_a_person_has_stopped_is_not_requeued(tmp_path: Path, lines: list[dict[str, Any]], requeued: bool) -> None:
    end = {"kind": "end", "code": 0, "stopped_after": 40}
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*lines, end]))
    assert was_stopped(tmp_path) is requeued
