"""The loop over run.steps: a worker that is lost in a phase of a step costs that phase, and no other code runs twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fork_server import ROOT
from tests.launch import LaunchedRun

SCRIPT = ROOT / "tests" / "scripts" / "phases.py"
STEPS = 18
IN_BOTH = ["bucket", "end_of_lane", "control", "averaged", "confirmed", "before_step"]
GAPS = ["before 0", "between_backwards 0", *(f"{gap} {phase}" for phase in (0, 1) for gap in IN_BOTH), "end 1"]


class PhasesRun(LaunchedRun):
    """One run of tests/scripts/phases.py; ``settings`` become its PHASES_* variables."""

    def __init__(self, folder: Path, workers: int, *options: str, **settings: Any) -> None:
        env = {"OMP_NUM_THREADS": "1", **{f"PHASES_{name.upper()}": str(value) for name, value in settings.items()}}
        super().__init__(SCRIPT, "--hang-timeout", "5", *options, folder=folder, workers=workers, env=env)

    def wait_for_step(self, step: int) -> None:
        note = self.folder / "step"
        self.wait_until(lambda: note.exists() and int(note.read_text() or 0) >= step, f"step {step} is committed")

    def hurry(self) -> None:
        (self.folder / "hurry").touch()

    def code(self, worker: int) -> list[str]:
        """The code between phases that the worker has run."""
        return (self.folder / f"code-{worker}").read_text().splitlines()


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> str:
    return PhasesRun(tmp_path_factory.mktemp("phases"), 0).result()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., PhasesRun]]:
    started: list[PhasesRun] = []

    def start_here(name: str, workers: int, *options: str, **settings: Any) -> PhasesRun:
        started.append(PhasesRun(tmp_path / name, workers, *options, **settings))
        return started[-1]

    yield start_here
    for run in started:
        run.stop()


@pytest.mark.parametrize("workers", [2, 3, 5])
def test_any_number_of_workers_has_the_result_of_one(workers: int, result: str, start: Callable[..., PhasesRun]) -> None:
    assert start("run", workers).result() == result


@pytest.mark.parametrize("gap", GAPS)
def test_a_worker_killed_in_any_gap_of_any_phase_costs_that_phase(gap: str, result: str, start: Callable[..., PhasesRun]) -> None:
    run = start("run", 3, die_in=gap, hold_at=12)
    run.wait_for_generation(2)
    assert (run.folder / "died").exists()
    run.hurry()
    assert run.result() == result
    assert len(run.notes("done")) == 3
    for survivor in (0, 2):
        assert run.code(survivor) == [f"{step} {model}" for step in range(STEPS) for model in ("critic", "generator")]


def test_a_run_that_was_cut_resumes_to_the_same_result(result: str, start: Callable[..., PhasesRun], tmp_path: Path) -> None:
    run = start("run", 2, hold_at=7, checkpoint=tmp_path / "checkpoints")
    run.wait_for_step(8)
    run.kill(0)
    run.kill(1)
    assert run.wait() != 0
    assert start("again", 3, checkpoint=tmp_path / "checkpoints").result() == result


def test_a_stream_is_loaded_again_for_the_phase_that_is_repeated(start: Callable[..., PhasesRun]) -> None:
    run = start("run", 3, die_in="control 1", hold_at=12, stream=1)
    run.wait_for_generation(2)
    run.hurry()
    assert run.result() == start("alone", 0, stream=1).result()
