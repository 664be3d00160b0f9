"""A run on several machines is seen and stopped at its head, and each agent's folder is known on its machine."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.commands import lockstep
from tests.hosts import Hosts


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def test_status_top_and_stop_work_at_the_head(hosts: Callable[[int], Hosts], tmp_path: Path) -> None:
    with Cluster(hosts(2), tmp_path / "cluster", hold_at=10) as cluster:
        head = cluster.start_head("a", min_workers=4)
        cluster.wait_until(lambda: (head.run_dir / "head.address").exists(), "the head listens")
        found = {line["name"]: line for line in map(json.loads, lockstep("ls", "--json", folder=tmp_path).out.splitlines())}
        assert (found["run"]["state"], found["run"]["role"]) == ("starting", "head")
        for host in "ab":
            cluster.start_agent(host)
        cluster.wait_for_step(10)
        live = json.loads(lockstep("status", head.run_dir, "--json", folder=tmp_path).out)["live"]
        assert (live["state"], live["members"], live["wanted"]) == ("running", 4, 4)
        assert {worker["pid"] for worker in live["workers"]} == set(cluster.workers().values())
        assert len({worker["host"] for worker in live["workers"]}) == 2
        done = lockstep("top", head.run_dir, "--once", folder=tmp_path)
        assert re.search(r"^RANK +WORKER +PID +HOST +STEP", done.out, re.MULTILINE), done.out
        agent = cluster.agent["a"]
        done = lockstep("stop", agent.run_dir, folder=tmp_path)
        assert done.code == 2
        assert "belongs to the agent of one machine. Stop the run at its head, or take this machine out of the run" in done.err
        assert f"`kill {agent.process.pid}`" in done.err
        assert lockstep("logs", agent.run_dir, folder=tmp_path).code == 0
        done = lockstep("logs", head.run_dir, folder=tmp_path)
        assert done.code == 1
        assert "The logs are in the run folders of its agents" in done.err
        states = {
            line["path"]: line["state"] for line in map(json.loads, lockstep("ls", "--json", folder=tmp_path).out.splitlines())
        }
        assert states == {str(member.run_dir): "running" for member in (head, *cluster.agent.values())}
        done = lockstep("stop", head.run_dir, folder=tmp_path)
        assert done.code == 0, done.err
        assert re.match(r"stopped at step \d+, which is not saved", done.out)
        assert cluster.wait(head) == 143


def test_a_head_that_waits_for_machines_is_stopped_too(hosts: Callable[[int], Hosts], tmp_path: Path) -> None:
    with Cluster(hosts(1), tmp_path / "cluster") as cluster:
        head = cluster.start_head("a", min_workers=4)
        cluster.wait_until(lambda: (head.run_dir / "head.address").exists(), "the head listens")
        done = lockstep("status", head.run_dir, folder=tmp_path)
        assert re.search(r"^state +starting; began", done.out, re.MULTILINE), done.out
        done = lockstep("stop", head.run_dir, folder=tmp_path)
        assert done.code == 0, done.err
        assert "the run has ended: stopped (stopped by SIGTERM before training). This run has saved no checkpoint." in done.out
        assert cluster.wait(head) == 143
