"""The loops of tutorials, over a plain range of epochs and over run.epochs, with code between the loops over the data.

Kills and resumes leave no trace of what is replayed, and a loop over run.epochs replays nothing of earlier epochs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fork_server import ROOT
from tests.launch import LaunchedRun

SCRIPTS = ROOT / "tests" / "scripts"


class EpochsRun(LaunchedRun):
    """One run of a script; ``options`` are those of `lockstep run`, and ``settings`` become EPOCHS_* variables of the script."""

    def __init__(self, script: str, folder: Path, workers: int, *options: str, **settings: Any) -> None:
        env = {"OMP_NUM_THREADS": "1", **{f"EPOCHS_{name.upper()}": str(value) for name, value in settings.items()}}
        super().__init__(SCRIPTS / script, "--hang-timeout", "5", *options, folder=folder, workers=workers, env=env)

    def wait_for_step(self, step: int) -> None:
        note = self.folder / "step"
        self.wait_until(lambda: note.exists() and int(note.read_text() or 0) >= step, f"step {step} is committed")

    def hurry(self) -> None:
        (self.folder / "hurry").touch()


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> str:
    return EpochsRun("epochs.py", tmp_path_factory.mktemp("epochs"), 0).result()


@pytest.fixture(scope="module")
def run_epochs_result(tmp_path_factory: pytest.TempPathFactory) -> str:
    return EpochsRun("run_epochs.py", tmp_path_factory.mktemp("run_epochs"), 0).result()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., EpochsRun]]:
    started: list[EpochsRun] = []

    def start_here(name: str, workers: int, script: str = "epochs.py", **settings: Any) -> EpochsRun:
        started.append(EpochsRun(script, tmp_path / name, workers, **settings))
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


# -- run.epochs --------------------------------------------------------------------------------------


def epochs_run_by(run: EpochsRun, worker: int) -> list[int]:
    """The epochs whose code this worker has run."""
    return [int(epoch) for epoch in run.notes("ran").get(str(worker), "").split()]


def test_run_epochs_has_the_same_result_on_three_workers(run_epochs_result: str, start: Callable[..., EpochsRun]) -> None:
    run = start("run", 3, "run_epochs.py")
    assert run.result() == run_epochs_result
    assert epochs_run_by(run, 0) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("place", "victim", "hold_at"),
    [("first loop", 0, 20), ("second loop", 1, 20), ("between", 0, 17), ("evaluated", 0, 24), ("left", 0, 30), ("left", 1, 30)],
)
def test_a_replacement_begins_with_the_current_epoch(
    place: str, victim: int, hold_at: int, run_epochs_result: str, start: Callable[..., EpochsRun]
) -> None:
    run = start("run", 3, "run_epochs.py", die_in=place, victim=victim, hold_at=hold_at)
    run.wait_for_generation(2)
    run.hurry()
    assert run.result() == run_epochs_result
    assert len(run.notes("done")) == 3
    assert set(epochs_run_by(run, 3)) <= ({2, 3, 4} if place != "left" else {4}), run.dump()


def test_a_replacement_that_is_slow_passes_the_epochs_that_are_over_meanwhile(
    run_epochs_result: str, start: Callable[..., EpochsRun]
) -> None:
    run = start("run", 3, "run_epochs.py", die_in="first loop", hold_at=24, stall_until=24)  # step 24 belongs to epoch 4
    run.wait_for_generation(2)
    run.hurry()
    assert run.result() == run_epochs_result
    assert epochs_run_by(run, 3) == [2, 4]


@pytest.mark.parametrize(("before", "after", "step", "epoch"), [(2, 3, 12, 2), (3, 1, 20, 3), (1, 2, 28, 4), (2, 2, 32, 5)])
def test_a_resumed_run_begins_with_the_epoch_of_the_checkpoint(
    before: int, after: int, step: int, epoch: int, run_epochs_result: str, start: Callable[..., EpochsRun], tmp_path: Path
) -> None:
    first = start("first", before, "run_epochs.py", hold_at=step, checkpoint=tmp_path / "checkpoints")
    first.wait_until(lambda: any(saved["step"] >= step for saved in first.events("saved")), f"step {step} is saved")
    for worker in first.workers():
        first.kill(worker)
    assert first.wait() != 0
    second = start("second", after, "run_epochs.py", checkpoint=tmp_path / "checkpoints")
    assert second.result() == run_epochs_result
    assert epochs_run_by(second, 0) == list(range(epoch, 5))
