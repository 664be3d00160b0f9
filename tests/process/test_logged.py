"""Logged values are part of the state: each step once, complete and with the same bits, whichever worker dies, leaves or joins."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos import SCRIPT, Expected, Variant, environment, undisturbed
from tests.launch import LaunchedRun

Start = Callable[..., LaunchedRun]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Expected:
    return undisturbed(tmp_path_factory.mktemp("undisturbed") / "run", scaler=False)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[LaunchedRun] = []

    def start_here(workers: int, *, comm: str = "auto", checkpoints: bool = False, **settings: Any) -> LaunchedRun:
        variant = Variant(workers, comm, 1, checkpoints, loaders=0, scaler=False)
        env = environment(variant, tmp_path / "checkpoints", tmp_path)
        env |= {f"CHAOS_{name.upper()}": str(value) for name, value in settings.items()}
        started.append(LaunchedRun(SCRIPT, "--hang-timeout", "5", folder=tmp_path / "run", workers=workers, env=env))
        return started[-1]

    yield start_here
    for run in started:
        run.stop()


def require_logged(run: LaunchedRun, expected: Expected) -> None:
    assert run.result() == expected.result, run.dump()
    handed = [json.loads(line) for line in (run.folder / "logged.jsonl").read_text().splitlines()]
    assert [step for step, _ in handed] == sorted(expected.handed), "each step once"
    assert dict(handed) == expected.handed


@pytest.mark.parametrize("comm", ["shm", "gloo"])
@pytest.mark.parametrize("place", ["logged", "stepped"])
def test_what_a_worker_logged_before_the_optimizer_stepped_survives_it(
    place: str, comm: str, expected: Expected, start: Start
) -> None:
    run = start(3, comm=comm, die_in=place)
    run.wait_for_generation(1)
    (run.folder / "hurry").touch()
    require_logged(run, expected)


def test_a_worker_that_leaves_takes_no_logged_value_along(expected: Expected, start: Start) -> None:
    run = start(3, hold_at=2)
    run.wait_until(lambda: run.notes("pid").keys() >= {"0", "1", "2"} and run.generations(), "all workers have joined")
    run.scale(1)
    (run.folder / "hurry").touch()
    require_logged(run, expected)


def test_a_checkpoint_has_all_logged_values(expected: Expected, start: Start) -> None:
    first = start(3, checkpoints=True, hold_at=6)
    first.wait_until(lambda: (first.folder / "step").exists() and (first.folder / "step").read_text() == "6", "step 6")
    first.process.send_signal(signal.SIGTERM)
    (first.folder / "hurry").touch()
    assert first.wait(20) == 0, first.dump()
    second = start(2, checkpoints=True)  # in the same folder: logged.jsonl has the steps of both
    require_logged(second, expected)


def test_a_newcomer_that_joins_after_the_last_step_of_a_loop_logs_with_the_others(expected: Expected, start: Start) -> None:
    run = start(3, hold_at=4)  # the last step of the first loop
    run.wait_until(lambda: (run.folder / "step").exists() and (run.folder / "step").read_text() == "4", "step 4")
    run.kill(1)

    def asks_to_join() -> bool:
        return any(event["event"].get("JoinRequested", {}).get("stage") == 0 for event in run.events())

    run.wait_until(asks_to_join, "a newcomer waits at the first loop")
    (run.folder / "hurry").touch()
    require_logged(run, expected)
    assert run.generations() == [[0, 1, 2], [0, 2], [0, 2, 3]]
