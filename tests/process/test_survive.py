"""Faults one by one, at the place where each hurts, on real runs: see docs/design/commit.md for the gaps."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lockstep.observe.ledger import audit, read
from tests.chaos import EPOCHS, HANG_S, Chaos, undisturbed
from tests.lane_jobs import SAMPLES


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    return undisturbed(tmp_path_factory.mktemp("survive") / "run")


def events(folder: Path, kind: str = "event") -> list[Any]:
    path = folder / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [entry for entry in map(json.loads, lines) if entry["kind"] == kind]


def formed(folder: Path) -> list[list[int]]:
    """The members of every generation so far."""
    return [action["Form"]["members"] for entry in events(folder) for action in entry["actions"] if "Form" in action]


def until(condition: Any, deadline_s: float = 30.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def require_whole(chaos: Chaos, expected: str, finished: int | None = None) -> str:
    code, output = chaos.finish(60)
    assert code == 0, output
    assert chaos.results() == {expected}, output
    if finished is not None:
        assert len(list(chaos.folder.glob("done-*"))) == finished
    assert audit(read(chaos.folder / "ledger"), SAMPLES, EPOCHS) == []
    return output


GAPS = ["before_backward", "bucket", "end_of_backward", "control", "averaged", "stepped", "evaluate", "first_step", "last_step"]


@pytest.mark.parametrize("gap", GAPS)
def test_a_worker_killed_in_any_gap_of_a_step_costs_nothing(gap: str, expected: str, tmp_path: Path) -> None:
    os.environ["SURVIVE_DIE_IN"] = gap  # the script kills worker 1 there, once
    try:
        chaos = Chaos(tmp_path / "run", 3, "--ledger")
    finally:
        del os.environ["SURVIVE_DIE_IN"]
    output = require_whole(chaos, expected)
    assert "SIGKILL" in output
    assert (chaos.folder / f"died-in-{gap}").exists()


def test_survivors_keep_their_processes_and_a_replacement_joins(expected: str, tmp_path: Path) -> None:
    chaos = Chaos(tmp_path / "run", 3, "--ledger")
    until(lambda: formed(chaos.folder))
    before = chaos.workers()
    os.kill(before[1], signal.SIGKILL)
    until(lambda: len(formed(chaos.folder)) >= 3)
    after = chaos.workers()
    assert {0: before[0], 2: before[2]}.items() <= after.items()
    assert formed(chaos.folder)[:3] == [[0, 1, 2], [0, 2], [0, 2, 3]]
    require_whole(chaos, expected, finished=3)


def test_without_respawn_the_survivors_finish_alone(expected: str, tmp_path: Path) -> None:
    chaos = Chaos(tmp_path / "run", 2, "--ledger", "--no-respawn")
    until(lambda: formed(chaos.folder))
    os.kill(chaos.workers()[0], signal.SIGKILL)
    require_whole(chaos, expected, finished=1)


def test_a_stopped_worker_is_named_killed_and_replaced(expected: str, tmp_path: Path) -> None:
    chaos = Chaos(tmp_path / "run", 3, "--ledger")
    until(lambda: formed(chaos.folder))
    os.kill(chaos.workers()[2], signal.SIGSTOP)
    output = require_whole(chaos, expected)
    # The worker was stopped in a step, or on its way to it.
    reason = r"(worker \d waited for it|it did not leave generation 0)"
    assert re.search(rf"worker 2 \(rank 2, pid \d+\) hangs and is killed: {reason}", output), output
    assert re.search(r"worker 2 \(pid \d+\) hung and was killed; 2 workers continue, generation 1", output), output
    assert "stack.txt" in output


def test_a_worker_stopped_before_it_joins_is_killed_after_the_hang_timeout(expected: str, tmp_path: Path) -> None:
    chaos = Chaos(tmp_path / "run", 3, "--ledger")
    until(lambda: 1 in chaos.workers())
    os.kill(chaos.workers()[1], signal.SIGSTOP)  # as soon as its script runs
    require_whole(chaos, expected)
    killed_at = next(entry["time"] for entry in events(chaos.folder) if any("Kill" in action for action in entry["actions"]))
    joined_at = [entry["time"] for entry in events(chaos.folder) if "JoinRequested" in entry["event"]]
    assert killed_at - max(at for at in joined_at if at < killed_at) < HANG_S + 5


def test_sigterm_to_one_worker_lets_it_finish_the_step_and_leave(expected: str, tmp_path: Path) -> None:
    chaos = Chaos(tmp_path / "run", 3, "--ledger")
    until(lambda: formed(chaos.folder))
    os.kill(chaos.workers()[1], signal.SIGTERM)
    require_whole(chaos, expected, finished=2)
    assert formed(chaos.folder) == [[0, 1, 2], [0, 2]]


def test_a_run_is_scaled_up_and_down_while_it_runs(expected: str, tmp_path: Path) -> None:
    chaos = Chaos(tmp_path / "run", 2, "--ledger")
    until(lambda: formed(chaos.folder))
    for size, members in ((4, 4), (1, 1)):
        subprocess.run([sys.executable, "-m", "lockstep", "scale", str(chaos.folder), str(size)], check=True, timeout=30)
        until(lambda members=members: len(formed(chaos.folder)[-1]) == members)
    require_whole(chaos, expected, finished=1)


def test_all_at_once_ends_the_run_with_a_message(tmp_path: Path) -> None:
    chaos = Chaos(tmp_path / "run", 3)
    until(lambda: formed(chaos.folder))
    for pid in chaos.workers().values():
        os.kill(pid, signal.SIGKILL)
    code, output = chaos.finish(30)
    assert code == 128 + signal.SIGKILL
    assert "no worker is left: worker " in output
