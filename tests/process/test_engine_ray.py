"""A real Ray cluster of three nodes: the bits of one process, also if a node is lost or the head is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launch import is_running
from tests.ray_cluster import DEADLINE_S, RayCluster, RayTraining, missing_ray
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(missing_ray() is not None, reason=missing_ray() or "")


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[RayCluster]:
    with RayCluster(3) as cluster:
        yield cluster


@pytest.fixture
def train(ray_cluster: RayCluster, tmp_path: Path) -> Iterator[Callable[..., RayTraining]]:
    """Starts tests/scripts/train.py on the cluster. Kills what still runs when the test is over."""
    started: list[RayTraining] = []

    def train_here(*options: str, **settings: Any) -> RayTraining:
        started.append(RayTraining(ray_cluster, tmp_path / "run", *options, **settings))
        return started[-1]

    yield train_here
    for run in started:
        run.stop()


def test_workers_of_three_nodes_train_to_the_bits_of_one_process(train: Callable[..., RayTraining], expected: str) -> None:
    run = train("--ledger")
    assert run.result(DEADLINE_S) == expected, run.dump()
    assert len(run.generations()[0]) == 6


def test_a_node_is_lost_and_another_one_takes_its_place(
    train: Callable[..., RayTraining], ray_cluster: RayCluster, expected: str
) -> None:
    run = train("--ledger", hold_at=20)
    run.wait_for_step(20)
    ray_cluster.remove_node()
    run.wait_for_size(4)
    run.wait_for_step(run.step() + 3)
    ray_cluster.add_node()
    run.wait_for_size(6)
    run.hurry()
    assert run.result(DEADLINE_S) == expected, run.dump()
    assert " is lost: " in run.stderr(), run.dump()


def test_the_actor_of_the_head_is_killed_and_ray_restarts_it(train: Callable[..., RayTraining], expected: str) -> None:
    run = train("--ledger", hold_at=20)
    run.wait_for_step(20)
    os.kill(run.head_actor(), signal.SIGKILL)
    run.wait_for_text("continuing a run with 6 workers on 3 machines", DEADLINE_S)
    os.kill(max(run.workers().items())[1], signal.SIGKILL)
    run.wait_for_size(5)
    run.wait_for_size(6)
    run.hurry()
    assert run.result(DEADLINE_S) == expected, run.dump()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_everything_ends_with_the_driver(train: Callable[..., RayTraining], number: int, code: int) -> None:
    run = train(hold_at=2)
    run.wait_for_step(2)
    pids = [*run.pids(6), run.head_actor()]
    os.kill(run.process.pid, number)
    assert run.wait() == code, run.dump()
    wait_until(lambda: not any(map(is_running, pids)), "all workers and the head are gone")
