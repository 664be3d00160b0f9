"""A worker is lost, stopped, dismissed or added at a chosen point of a real run, and the run ends with the same bits.

docs/internals/commit_protocol.md lists the gaps of a step.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable

import pytest

from tests.training_run import HANG_TIMEOUT_S, TrainingRun

GAPS = ["before_backward", "bucket", "end_of_backward", "control", "averaged", "stepped", "evaluate", "first_step", "last_step"]


@pytest.mark.parametrize("gap", GAPS)
def test_a_worker_killed_in_any_gap_of_a_step_costs_nothing(gap: str, expected: str, train: Callable[..., TrainingRun]) -> None:
    run = train(3, "--ledger", die_in=gap, hold_at=40)  # worker 1 kills itself there, once
    if gap != "last_step":
        run.wait_for_generation(2)
        assert run.generations() == [[0, 1, 2], [0, 2], [0, 2, 3]]
    run.hurry()
    run.require_undisturbed(expected)
    assert "SIGKILL" in run.output()
    assert (run.folder / f"died-in-{gap}").exists()


def test_a_worker_killed_while_gradients_are_added_in_another_dtype_costs_nothing(
    train: Callable[..., TrainingRun],
) -> None:
    expected = train(0, folder="alone", halves=1).result()
    run = train(3, "--ledger", die_in="bucket", hold_at=40, halves=1)
    run.wait_for_generation(2)
    run.hurry()
    run.require_undisturbed(expected)
    assert (run.folder / "died-in-bucket").exists()


def test_survivors_keep_their_processes_and_a_replacement_joins(expected: str, train: Callable[..., TrainingRun]) -> None:
    run = train(3, "--ledger", hold_at=10)
    run.wait_for_generation()
    before = run.workers()
    run.kill(1)
    run.wait_for_generation(2)
    after = run.workers()
    assert {0: before[0], 2: before[2]}.items() <= after.items()
    assert run.generations()[:3] == [[0, 1, 2], [0, 2], [0, 2, 3]]
    run.hurry()
    run.require_undisturbed(expected)
    assert len(run.notes("done")) == 3


@pytest.mark.exclusive
def test_survivors_continue_within_a_second_of_a_death(expected: str, train: Callable[..., TrainingRun]) -> None:
    run = train(3, "--ledger", "--hang-timeout", "30", hold_at=10)
    run.wait_for_generation()
    run.wait_for_step(5)
    killed_at = time.time()
    run.kill(1)
    run.wait_for_generation(1)
    formed_at = next(entry["time"] for entry in run.events() if any(a.get("Form", {}).get("number") == 1 for a in entry["actions"]))
    assert formed_at - killed_at < 1.0, run.dump()
    run.hurry()
    run.require_undisturbed(expected)


def test_a_worker_dies_while_another_leaves_and_not_all_notice_it_at_the_same_place(
    expected: str, train: Callable[..., TrainingRun]
) -> None:
    run = train(4, "--ledger", "--no-respawn", die_in="exchange", hold_at=10)
    run.wait_for_generation()
    run.kill(3, signal.SIGTERM)
    run.wait_until(lambda: run.generations()[-1] == [0, 2], "workers 0 and 2 continue")
    run.hurry()
    run.require_undisturbed(expected)
    assert (run.folder / "died-in-exchange").exists()
    assert run.generations() == [[0, 1, 2, 3], [0, 2]]


def test_without_respawn_the_survivors_finish_alone(expected: str, train: Callable[..., TrainingRun]) -> None:
    run = train(2, "--ledger", "--no-respawn", hold_at=10)
    run.wait_for_generation()
    run.kill(0)
    run.wait_for_generation(1)
    run.hurry()
    run.require_undisturbed(expected)
    assert set(run.notes("done")) == {"1"}
    assert run.generations() == [[0, 1], [1]]


def test_a_stopped_worker_is_named_killed_and_replaced(expected: str, train: Callable[..., TrainingRun]) -> None:
    run = train(3, "--ledger", hold_at=10)
    run.wait_for_generation()
    run.kill(2, signal.SIGSTOP)
    run.wait_for_generation(2)
    run.hurry()
    run.require_undisturbed(expected)
    assert run.generations() == [[0, 1, 2], [0, 1], [0, 1, 3]]
    # The worker was stopped in a step, or on its way to it.
    reason = r"(worker \d waited for it|it did not leave generation 0)"
    assert re.search(rf"worker 2 \(rank 2, pid \d+\) hangs and is killed: {reason}", run.output()), run.dump()
    assert re.search(r"worker 2 \(pid \d+\) hung and was killed\. 2 workers go on; ", run.output()), run.dump()
    assert "stack.txt" in run.output()


def test_the_stack_of_a_worker_that_hangs_says_where(expected: str, train: Callable[..., TrainingRun]) -> None:
    run = train(3, "--ledger", hold_at=10)
    run.wait_for_generation()
    (run.folder / "hang-1").touch()
    run.wait_for_generation(2)
    run.hurry()
    run.require_undisturbed(expected)
    stack = (run.run_dir / "workers" / "1" / "stack.txt").read_text()
    assert re.search(r'train.py", line \d+ in obey_files', stack), stack


def test_a_worker_stopped_before_it_joins_is_killed_after_the_hang_timeout(
    expected: str, train: Callable[..., TrainingRun]
) -> None:
    run = train(3, "--ledger")
    run.wait_until(lambda: 1 in run.workers(), "worker 1 runs its script")
    run.kill(1, signal.SIGSTOP)
    run.require_undisturbed(expected)
    killed_at = next(entry["time"] for entry in run.events() if any("Kill" in action for action in entry["actions"]))
    joined_at = [entry["time"] for entry in run.events() if "JoinRequested" in entry["event"]]
    assert killed_at - max(at for at in joined_at if at < killed_at) < HANG_TIMEOUT_S + 5


def test_sigterm_to_one_worker_lets_it_finish_the_step_and_leave(expected: str, train: Callable[..., TrainingRun]) -> None:
    run = train(3, "--ledger", hold_at=10)
    run.wait_for_generation()
    run.kill(1, signal.SIGTERM)
    run.wait_for_generation(1)
    run.hurry()
    run.require_undisturbed(expected)
    assert set(run.notes("done")) == {"0", "2"}
    assert run.generations() == [[0, 1, 2], [0, 2]]


def test_a_run_is_scaled_up_and_down_while_it_runs(expected: str, train: Callable[..., TrainingRun]) -> None:
    run = train(2, "--ledger", hold_at=10)
    run.wait_for_generation()
    for size in (4, 1):
        run.scale(size)
        run.wait_until(lambda size=size: len(run.generations()[-1]) == size, f"a generation has {size} members")
    run.hurry()
    run.require_undisturbed(expected)
    assert len(run.notes("done")) == 1


def test_all_at_once_ends_the_run_with_a_message(train: Callable[..., TrainingRun]) -> None:
    run = train(3, hold_at=10)
    run.wait_for_generation()
    for worker in run.workers():
        run.kill(worker)
    assert run.wait(30) == 128 + signal.SIGKILL
    assert "no worker is left: worker " in run.output()
