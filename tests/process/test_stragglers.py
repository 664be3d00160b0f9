"""Stragglers of real runs: what the agent sees of workers that are stopped, and what it says of slow ones."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.hosts import Hosts, missing
from tests.launch import LaunchedRun
from tests.straggler_cases import LINK_20, STEP_MS, Batch, Case, judge, run

_WAITS = """
import os, pathlib, time
worker = os.environ["LOCKSTEP_WORKER"]
open(f"pid-{worker}", "w").write(f"{os.getpid()}\\n")
while not pathlib.Path("go").exists():
    time.sleep(0.01)
"""


def test_a_worker_that_was_stopped_is_in_the_events_when_it_continues(launch: Callable[..., LaunchedRun]) -> None:
    run = launch(_WAITS, "-n", "2")
    run.pids(2)
    run.kill(1, signal.SIGSTOP)
    time.sleep(0.3)  # how long it is stopped
    assert run.events("stopped") == []
    run.kill(1, signal.SIGCONT)
    run.wait_until(lambda: run.events("stopped"), "the stop is recorded")
    (stop,) = run.events("stopped")
    assert stop["worker"] == 1
    assert 0.25 < stop["seconds"] < 5.0
    assert abs(stop["at"] - stop["time"]) < 2.0
    (run.folder / "go").touch()
    assert run.wait() == 0, run.dump()


def test_many_stops_make_few_events_and_exits_are_still_seen(launch: Callable[..., LaunchedRun]) -> None:
    run = launch(_WAITS, "-n", "2", "--no-respawn")
    run.pids(2)
    began = time.monotonic()
    count = 0
    while time.monotonic() - began < 2.5:
        run.kill(0, signal.SIGSTOP)
        time.sleep(0.004)
        run.kill(0, signal.SIGCONT)
        time.sleep(0.006)
        count += 1
    run.wait_until(lambda: sum(each["times"] for each in run.events("stopped")) >= 0.9 * count, "almost all stops are counted")
    assert len(run.events("stopped")) <= 5
    assert 0.5 * 0.004 * count < sum(each["seconds"] for each in run.events("stopped")) < 4 * 0.004 * count
    run.kill(0, signal.SIGSTOP)
    run.kill(0, signal.SIGKILL)
    run.wait_until(lambda: any(each["how"] == "SIGKILL" for each in run.events("exited")), "the exit is seen", may_end=True)
    with suppress(ProcessLookupError):
        run.kill(1, signal.SIGKILL)
    run.wait()


def test_the_head_learns_of_stops_on_other_machines(hosts: Callable[[int], Hosts], tmp_path: Path) -> None:
    with Cluster(hosts(2), tmp_path / "cluster", hold_at=5, workers=1) as cluster:
        cluster.start(hang_timeout_s=20.0)
        cluster.wait_for_step(6)
        worker, pid = next((id, pid) for id, pid in cluster.workers().items() if pid in cluster.hosts.pids("b"))
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.3)  # how long it is stopped
        os.kill(pid, signal.SIGCONT)
        cluster.wait_until(lambda: cluster.head["a"].events("stopped"), "the head has recorded the stop")
        (stop,) = cluster.head["a"].events("stopped")
        assert stop["worker"] == worker
        assert 0.25 < stop["seconds"] < 5.0
        cluster.hurry()
        cluster.result()


@pytest.mark.exclusive
@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 3])
def test_a_slow_loader_a_slow_module_and_a_stopped_process_are_named(workers: int, tmp_path: Path) -> None:
    """A fifth of a step: other processes of this machine must not hide it. tests/straggler_cases.py has smaller delays."""
    late_ms = 0.2 * STEP_MS
    batch = Batch(workers, (Case(1, "loader", late_ms), Case(0, "forward", late_ms), Case(workers - 1, "stop", late_ms)))
    ran = run(batch, tmp_path / "run")
    results, _ = judge(0, batch, ran, None)
    assert [each.live is not None for each in results] == [True] * 3, (results, ran.events)


@pytest.mark.exclusive
@pytest.mark.slow
def test_a_slow_link_is_named(tmp_path: Path) -> None:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    batch = Batch(2, (Case(1, "link", LINK_20[2]),), lag=60)  # other processes of this machine slow the exchange down too
    ran = run(batch, tmp_path / "run")
    (result,), _ = judge(0, batch, ran, None)
    assert result.live is not None, (result, ran.events)
