"""The loop of tutorials: a plain range of epochs, with code between the loops. Kills and resumes leave no trace of its replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fork_server import ROOT
from tests.launch import LaunchedRun

SCRIPT = ROOT / "tests" / "scripts" / "epochs.py"


class EpochsRun(LaunchedRun):
    """One run of tests/scripts/epochs.py; ``settings`` become its EPOCHS_* variables."""

    def __init__(self, folder: Path, workers: int, *options: str, **settings: Any) -> None:
        env = {"OMP_NUM_THREADS": "1", **{f"EPOCHS_{name.upper()}": str(value) for name, value in settings.items()}}
        super().__init__(SCRIPT, "--hang-timeout", "5", *options, folder=folder, workers=workers, env=env)

    def wait_for_step(self, step: int) -> None:
        note = self.folder / "step"
        self.wait_until(lambda: note.exists() and int(note.read_text() or 0) >= step, f"step {step} is committed")

    def hurry(self) -> None:
        (self.folder / "hurry").touch()


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> str:
    return EpochsRun(tmp_path_factory.mktemp("epochs"), 0).result()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., EpochsRun]]:
    started: list[EpochsRun] = []

    def start_here(name: str, workers: int, *options: str, **settings: Any) -> EpochsRun:
        started.append(EpochsRun(tmp_path / name, workers, *options, **settings))
        return started[-1]

    yield start_here
    for run in started:
        run.stop()


def test_three_workers_have_the_result_of_one(result: str, start: Callable[..., EpochsRun]) -> None:
    assert start("run", 3).result() == result


@pytest.mark.parametrize("place", ["loop", "between", "evaluated"])
def test_a_killed_worker_is_replaced_and_its_replay_leaves_no_trace(
    place: str, result: str, start: Callable[..., EpochsRun]
) -> None:
    run = start("run", 3, die_in=place, hold_at=22)
    run.wait_for_generation(2)
    run.hurry()
    assert run.result() == result
    assert len(run.notes("done")) == 3


def test_a_killed_worker_is_replaced_while_checkpoints_are_saved_between_loops(
    result: str, start: Callable[..., EpochsRun], tmp_path: Path
) -> None:
    run = start("run", 3, die_in="evaluated", hold_at=22, checkpoint=tmp_path / "checkpoints")
    run.wait_for_generation(2)
    run.hurry()
    assert run.result() == result


@pytest.mark.parametrize(("before", "after", "step"), [(2, 3, 22), (3, 1, 13), (1, 2, 18), (2, 2, 26)])
def test_a_run_that_is_killed_resumes_without_a_trace_of_the_replay(
    before: int, after: int, step: int, result: str, start: Callable[..., EpochsRun], tmp_path: Path
) -> None:
    first = start("first", before, hold_at=step, checkpoint=tmp_path / "checkpoints")
    first.wait_for_step(step)
    for worker in first.workers():
        first.kill(worker)
    assert first.wait() != 0
    assert start("second", after, checkpoint=tmp_path / "checkpoints").result() == result


def test_a_finished_run_that_is_started_again_has_the_same_result(
    result: str, start: Callable[..., EpochsRun], tmp_path: Path
) -> None:
    for name in ("first", "second"):
        assert start(name, 2, checkpoint=tmp_path / "checkpoints").result() == result
