"""Spares on real runs: they stand by without disturbing anybody, take the place of a lost worker at once, and are started again."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import lockstep
from lockstep.launcher.worker import STACK_SIGNAL
from tests.cluster import Cluster
from tests.hosts import Hosts
from tests.launch import LaunchedRun
from tests.process.test_epochs import EpochsRun, epochs_run_by
from tests.training_run import TrainingRun

PATIENT = ("--hang-timeout", "30")


def await_spares(run: LaunchedRun, count: int) -> None:
    """Wait until ``count`` spares have stood by, since the run began."""
    run.wait_until(lambda: run.stderr().count("stands by as a spare") >= count, f"{count} spares have stood by")


def scale(run_dir: Path, size: int) -> str:
    """Returns what `lockstep scale` prints."""
    command = [sys.executable, "-m", "lockstep", "scale", str(run_dir), str(size)]
    return subprocess.run(command, check=True, timeout=60, capture_output=True, text=True).stdout.strip()


def cpu_ticks(pid: int) -> int:
    """What all threads of the process have used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


@pytest.mark.exclusive
def test_a_spare_takes_the_place_of_a_killed_worker_at_once_and_another_spare_starts(
    expected: str, train: Callable[..., TrainingRun]
) -> None:
    run = train(3, "--ledger", "--spares", "1", *PATIENT, hold_at=10)
    await_spares(run, 1)
    began = time.monotonic()
    run.kill(1)
    run.wait_for_generation(2)
    assert time.monotonic() - began < 1.0, run.dump()
    await_spares(run, 2)
    run.kill(2)
    run.wait_for_generation(4)
    await_spares(run, 3)
    run.hurry()
    run.require_undisturbed(expected)
    assert run.generations() == [[0, 1, 2], [0, 2], [0, 2, 3], [0, 3], [0, 3, 4]]
    assert set(run.notes("done")) == {"0", "3", "4"}
    lines = [re.sub(r" \(.*?\)", "", line) for line in run.stderr().splitlines() if re.search("stands by|go on|joined", line)]
    assert lines == [
        "lockstep: worker 3 stands by as a spare.",
        "lockstep: worker 1 died: SIGKILL. 2 workers go on; spare 3 takes its place.",
        "lockstep: spare 3 joined. 3 workers, generation 2.",
        "lockstep: worker 4 stands by as a spare.",
        "lockstep: worker 2 died: SIGKILL. 2 workers go on; spare 4 takes its place.",
        "lockstep: spare 4 joined. 3 workers, generation 4.",
        "lockstep: worker 5 stands by as a spare.",
    ]


def test_a_spare_that_is_not_needed_is_dismissed_silently_at_the_end(expected: str, train: Callable[..., TrainingRun]) -> None:
    run = train(2, "--ledger", "--spares", "2", *PATIENT, hold_at=10)
    await_spares(run, 2)
    run.hurry()
    run.require_undisturbed(expected)
    assert run.generations() == [[0, 1]]
    assert set(run.notes("done")) == {"0", "1"}
    told = [line for line in run.stderr().splitlines() if "stands by" not in line and " | " not in line]
    assert not [line for line in told if re.search("spare|died|ended with|failed", line)], run.stderr()
    for spare in (2, 3):
        assert run.log(spare) == ""


def test_a_spare_that_dies_is_replaced_and_disturbs_nobody(expected: str, train: Callable[..., TrainingRun]) -> None:
    run = train(2, "--ledger", "--spares", "1", *PATIENT, hold_at=10)
    for spare, number in ((2, signal.SIGKILL), (3, signal.SIGTERM)):
        await_spares(run, spare - 1)
        run.kill(spare, number)
    await_spares(run, 3)
    run.hurry()
    run.require_undisturbed(expected)
    assert run.generations() == [[0, 1]]


def test_two_workers_die_at_once_with_one_spare(expected: str, train: Callable[..., TrainingRun]) -> None:
    run = train(4, "--ledger", "--spares", "1", *PATIENT, hold_at=10)
    await_spares(run, 1)
    pids = run.workers()
    for worker in (0, 3):
        os.kill(pids[worker], signal.SIGKILL)
    run.wait_until(lambda: len(run.generations()) > 1 and len(run.generations()[-1]) == 4, "four workers train again")
    assert {1, 2, 4} <= set(run.generations()[-1])
    await_spares(run, 2)
    run.hurry()
    run.require_undisturbed(expected)
    assert len(run.notes("done")) == 4


def test_a_worker_that_hangs_is_killed_and_a_spare_that_waits_as_long_is_not(
    expected: str, train: Callable[..., TrainingRun]
) -> None:
    run = train(2, "--ledger", "--spares", "1", "--hang-timeout", "1", hold_at=10)
    await_spares(run, 1)
    (run.folder / "hang-1").touch()
    run.wait_for_generation(2)
    await_spares(run, 2)
    run.hurry()
    run.require_undisturbed(expected)
    assert run.generations() == [[0, 1], [0], [0, 2]]


def test_a_worker_that_leaves_is_replaced_by_the_spare_after_the_same_step(
    expected: str, train: Callable[..., TrainingRun]
) -> None:
    run = train(3, "--ledger", "--spares", "1", *PATIENT, hold_at=10)
    await_spares(run, 1)
    run.kill(1, signal.SIGTERM)
    await_spares(run, 2)
    run.hurry()
    run.require_undisturbed(expected)
    assert run.generations() == [[0, 1, 2], [0, 2, 3]]


def test_a_run_with_a_spare_is_scaled(expected: str, train: Callable[..., TrainingRun]) -> None:
    run = train(2, "--ledger", "--spares", "1", *PATIENT, hold_at=10)
    await_spares(run, 1)
    assert scale(run.run_dir, 3) == "scaling to 3 workers: 1 spare joins after the current step"
    run.wait_for_generation(1)
    await_spares(run, 2)
    scale(run.run_dir, 1)
    run.wait_for_generation(2)
    run.hurry()
    run.require_undisturbed(expected)
    assert run.generations() == [[0, 1], [0, 1, 2], [0]]
    assert set(run.notes("done")) == {"0"}


def test_a_resumed_run_has_spares_too(expected: str, train: Callable[..., TrainingRun], tmp_path: Path) -> None:
    first = train(2, "--spares", "1", *PATIENT, hold_at=20, checkpoint=tmp_path / "checkpoints")
    await_spares(first, 1)
    first.wait_for_step(21)
    first.process.send_signal(signal.SIGTERM)
    assert first.wait() == 0, first.dump()
    assert "failed" not in first.stderr()
    run = train(2, "--spares", "1", *PATIENT, folder="second", hold_at=30, checkpoint=tmp_path / "checkpoints")
    await_spares(run, 1)
    run.kill(0)
    run.wait_for_generation(2)
    run.hurry()
    assert run.result() == expected
    assert run.generations() == [[0, 1], [1], [1, 2]]


# -- while it waits ----------------------------------------------------------------------------------


@pytest.mark.exclusive
def test_a_spare_that_waits_uses_no_cpu_time_and_can_write_its_stack(train: Callable[..., TrainingRun]) -> None:
    run = train(2, "--spares", "1", *PATIENT, hold_at=10)
    await_spares(run, 1)
    pid = run.workers()[2]
    before, step = cpu_ticks(pid), run.step()
    run.wait_for_step(step + 5)  # a second or more
    assert cpu_ticks(pid) - before <= 1
    os.kill(pid, STACK_SIGNAL)
    stack = run.run_dir / "workers" / "2" / "stack.txt"
    run.wait_until(lambda: "in join_loop" in stack.read_text(), "the spare has written its stack")
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130
    assert "failed" not in run.stderr()


def test_a_script_that_raises_on_spares_alone_does_not_fail_the_run(launch: Callable[..., LaunchedRun]) -> None:
    run = launch(
        """
import os, time, torch, lockstep
from pathlib import Path
assert int(os.environ["LOCKSTEP_WORKER"]) < 2, "out of memory"
model = torch.nn.Linear(2, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
run = lockstep.Run(model, opt, lanes=2)
for (x,) in run.shard(torch.utils.data.TensorDataset(torch.ones(8, 2)), global_batch=2, epochs=1000):
    model(x).sum().backward()
    opt.step()
    time.sleep(0.01)
    if Path("enough").exists():
        break
""",
        *("-n", "2", "--spares", "1", "--max-respawns", "2", *PATIENT),
    )
    run.wait_for_text("No replacement is started: 2 replacements in a row died before they took part in a step (--max-respawns)")
    (run.folder / "enough").touch()
    assert run.wait() == 0, run.dump()
    assert run.stderr().count("Traceback") == 1
    assert run.generations() == [[0, 1]]


def test_a_script_without_a_run_gets_no_spares_and_one_worker_neither(launch: Callable[..., LaunchedRun], tmp_path: Path) -> None:
    script = "import torch.distributed as dist; dist.init_process_group('gloo'); dist.barrier(); dist.destroy_process_group()"
    run = launch(script, "-n", "2", "--spares", "1")
    assert run.wait() == 0, run.dump()
    assert "--spares has no effect" in run.stderr()
    assert not (run.run_dir / "workers" / "2").exists()
    run = launch("pass", "-n", "1", "--spares", "1", folder=tmp_path / "alone")
    assert run.wait() == 2
    assert "Start two workers or more with -n 2" in run.stderr()


def test_a_function_may_have_spares_too(tmp_path: Path) -> None:
    def fn() -> int:
        import torch

        model = torch.nn.Linear(2, 1)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        run = lockstep.Run(model, opt, lanes=2)
        died = tmp_path / "died"
        for (x,) in run.shard(torch.utils.data.TensorDataset(torch.ones(64, 2)), global_batch=2):
            stderr = (tmp_path / "run" / "events.jsonl").read_text()
            if run.rank == 1 and not died.exists() and "stands by" in stderr:
                died.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            model(x).sum().backward()
            opt.step()
            opt.zero_grad()
            time.sleep(0.02 if run.generation < 2 else 0.0)
        return run.generation

    assert lockstep.launch(fn, 2, run_dir=tmp_path / "run", spares=1) == [2, 2]


# -- several loops -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run_epochs_result(tmp_path_factory: pytest.TempPathFactory) -> str:
    return EpochsRun("run_epochs.py", tmp_path_factory.mktemp("run_epochs"), 0).result()


def test_a_spare_follows_the_run_through_its_loops_and_joins_in_the_last_one(run_epochs_result: str, tmp_path: Path) -> None:
    run = EpochsRun("run_epochs.py", tmp_path / "run", 2, "--spares", "1", hold_at=10)
    try:
        await_spares(run, 1)  # in the first epochs, so that it follows the run through others
        run.wait_for_step(31)
        run.kill(1)
        run.wait_for_generation(2)
        run.hurry()
        assert run.result() == run_epochs_result
        assert run.generations() == [[0, 1], [0], [0, 2]]
        assert epochs_run_by(run, 2)[-1] == epochs_run_by(run, 0)[-1]
    finally:
        run.stop()


@pytest.mark.parametrize("place", ["first loop", "second loop", "between", "evaluated", "left"])
def test_a_spare_takes_over_wherever_a_worker_dies(place: str, run_epochs_result: str, tmp_path: Path) -> None:
    run = EpochsRun("run_epochs.py", tmp_path / "run", 3, "--spares", "1", die_in=place, hold_at=30)
    try:
        run.wait_for_generation(2)
        run.hurry()
        assert run.result() == run_epochs_result
        assert len(run.notes("done")) == 3
        assert run.generations()[-1] in ([0, 2, 3], [0, 2, 4]), run.dump()
    finally:
        run.stop()


# -- several machines --------------------------------------------------------------------------------


@pytest.fixture
def make(hosts: Callable[[int], Hosts], tmp_path: Path) -> Callable[..., Cluster]:
    return lambda count=3, **settings: Cluster(hosts(count), tmp_path / "cluster", **settings)


def await_cluster_spares(cluster: Cluster, count: int) -> None:
    head = cluster.head["a"]
    cluster.wait_until(lambda: head.stderr().count("stands by as a spare") >= count, f"{count} spares have stood by")


def test_on_several_machines_a_spare_takes_the_place_of_a_worker_of_its_machine(
    make: Callable[..., Cluster], expected: str
) -> None:
    with make(2, hold_at=20) as cluster:
        cluster.start("--spares", "2", "--ledger")
        await_cluster_spares(cluster, 2)
        members = cluster.generations()[0][2]
        assert len(members) == 4
        os.kill(cluster.workers()[members[-1]], signal.SIGKILL)
        cluster.wait_for_size(3)
        cluster.wait_for_size(4)
        assert cluster.generations()[-1][2] == [*members[:-1], 5]  # spare 4 is on machine a, spare 5 on machine b
        await_cluster_spares(cluster, 3)
        cluster.hurry()
        assert cluster.result() == expected, cluster.dump()
        cluster.require_ledger()


def test_spares_make_up_for_a_lost_machine_if_there_is_room(make: Callable[..., Cluster], expected: str) -> None:
    with make(3, hold_at=20) as cluster:
        cluster.start("--spares", "2", "--ledger")
        await_cluster_spares(cluster, 2)
        scale(cluster.head["a"].run_dir, 4)
        head = cluster.head["a"]
        cluster.wait_until(lambda: {entry["worker"] for entry in head.events("exited")} >= {4, 5}, "two workers have left")
        for number, spare in enumerate((6, 7)):
            os.kill(cluster.workers()[spare], signal.SIGKILL)
            await_cluster_spares(cluster, 3 + number)  # on the third machine, which has room
        members = cluster.generations()[-1][2]
        (machines,) = re.findall("starting 6 workers on (.*)", cluster.head["a"].stderr())
        cluster.kill_agent(re.findall("[abc]", machines)[1])
        cluster.wait_for_size(2)
        cluster.wait_for_size(4)
        assert cluster.generations()[-1][2] == [*members[:2], 8, 9], cluster.dump()
        cluster.hurry()
        assert cluster.result() == expected, cluster.dump()
        cluster.require_ledger()


def test_a_new_head_starts_the_spares_again(make: Callable[..., Cluster], expected: str) -> None:
    with make(2, hold_at=20) as cluster:
        cluster.start("--spares", "1", "--ledger")
        await_cluster_spares(cluster, 1)
        cluster.kill_head()
        head = cluster.start_head("a", "--ledger", "--spares", "1")
        cluster.wait_for_text(head, "continuing a run with 4 workers on 2 machines")
        await_cluster_spares(cluster, 1)
        members = cluster.generations()[-1][2]
        os.kill(cluster.workers()[members[0]], signal.SIGKILL)
        cluster.wait_for_size(3)
        cluster.wait_for_size(4)
        cluster.hurry()
        assert cluster.result() == expected, cluster.dump()
        cluster.require_ledger()
