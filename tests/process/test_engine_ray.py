"""A real Ray cluster of three nodes: the bits of one process, also if a node is lost or the head is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.fork_server import ROOT
from tests.launch import LaunchedRun, is_running
from tests.ray_cluster import DEADLINE_S, RayCluster, RayDriver, RayTraining, missing_ray
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(missing_ray() is not None, reason=missing_ray() or "")

RESULTS = """
import lockstep
from lockstep.engines.ray import launch


def train(base):
    print("rank 0 says hello" if lockstep.World.detect().is_main else "not shown")
    if base < 0:
        raise ValueError("a negative base")
    return base + lockstep.World.detect().rank


if __name__ == "__main__":
    print("result", launch(train, 10, workers=2, address=ADDRESS, workers_per_node=1))
    try:
        launch(train, -1, workers=2, address=ADDRESS)
    except lockstep.WorkerError as error:
        print("error", error)
"""


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[RayCluster]:
    with RayCluster(3) as cluster:
        yield cluster


@pytest.fixture
def train(ray_cluster: RayCluster, tmp_path: Path) -> Iterator[Callable[..., RayTraining]]:
    """Starts tests/scripts/train.py on the cluster. Kills what still runs when the test is over."""
    ray_cluster.restore()
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
    run = train("--ledger", hold_at=20, hold_s=0.5)  # Ray takes a while
    run.wait_for_step(20)
    ray_cluster.remove_node()
    run.wait_for_size(4)
    run.wait_for_step(run.step() + 3)
    ray_cluster.add_node()
    run.wait_for_size(6)
    run.hurry()
    assert run.result(DEADLINE_S) == expected, run.dump()
    assert " is lost: " in run.stderr(), run.dump()
    assert not run.stdout(), "Ray's own messages are not among the output of rank 0"


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
    run = train(workers=2, hold_at=2, hold_s=0.5)
    run.wait_for_step(2)
    pids = [*run.pids(2), run.head_actor()]
    os.kill(run.process.pid, number)
    assert run.wait() == code, run.dump()
    wait_until(lambda: not any(map(is_running, pids)), "all workers and the head are gone")


def test_a_function_returns_what_rank_0_has_returned(ray_cluster: RayCluster, launch: Callable[..., LaunchedRun]) -> None:
    script = RESULTS.replace("ADDRESS", repr(ray_cluster.address))
    run = launch(script, workers=0, own_imports=True)
    assert run.wait(DEADLINE_S) == 0, run.dump()
    assert run.stdout().startswith("rank 0 says hello\nresult 10\n"), run.dump()
    assert "ValueError: a negative base" in run.stdout().partition("error ")[2], "the message has the traceback"
    assert "not shown" not in run.output()


def test_a_folder_is_copied_to_the_nodes_and_the_exit_code_comes_back(ray_cluster: RayCluster, tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "helper.py").write_text("code = 7")
    (tmp_path / "project" / "train.py").write_text("import os, sys, helper; print(os.getcwd(), *sys.argv); sys.exit(helper.code)")
    script = ("--working-dir", str(tmp_path / "project"), "train.py", "--lr", "1")
    run = RayDriver(ray_cluster, tmp_path / "elsewhere", None, *script, workers=2, address=ray_cluster.client_address)
    assert run.wait(DEADLINE_S) == 7, run.dump()
    assert run.stdout().endswith(" train.py --lr 1\n"), run.dump()
    assert str(tmp_path / "project") not in run.stdout()


@pytest.mark.slow
@pytest.mark.skipif(find_spec("pyarrow") is None, reason="Ray Train is not installed (pip install -e '.[frameworks]')")
def test_run_in_the_train_function_of_a_torch_trainer(ray_cluster: RayCluster, launch: Callable[..., LaunchedRun]) -> None:
    script = ROOT / "tests" / "scripts" / "train_ray.py"
    alone = launch(script, workers=0, env={"OMP_NUM_THREADS": "1"})
    assert alone.wait(DEADLINE_S) == 0, alone.dump()
    run = launch(script, workers=0, args=[ray_cluster.address], own_imports=True, env={"OMP_NUM_THREADS": "1"})
    assert run.wait(DEADLINE_S) == 0, run.dump()
    results = run.notes("done")
    assert set(results) == {"0-of-1", "0-of-2", "1-of-2"}, run.dump()
    assert len(set(results.values())) == 1, results
