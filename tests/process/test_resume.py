"""A run that loses all workers at once, or is told to end, resumes from disk to the same bits, on any number of workers."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.checkpoint.retention import Retention
from lockstep.checkpoint.storage import open_storage
from tests.launch import children_of
from tests.training_run import TrainingRun

PATIENT = ("--hang-timeout", "5")


def saved_steps(place: Path) -> list[int]:
    return [slot.step for slot in Retention(open_storage(place)).whole()]


@pytest.mark.parametrize(("before", "after", "loaders"), [(3, 2, 0), (1, 4, 0), (2, 1, 2)])
def test_killed_all_at_once_a_run_goes_on_from_its_checkpoint(
    before: int, after: int, loaders: int, expected: str, train: Callable[..., TrainingRun], tmp_path: Path
) -> None:
    place = tmp_path / "place"
    first = train(before, *PATIENT, folder="first", checkpoint=place, loaders=loaders, pace_s=0.005)
    first.wait_for_step(24)
    for worker in first.workers():
        first.kill(worker)
    assert first.wait() == 128 + signal.SIGKILL
    assert re.search(r"The newest checkpoint is of step (14|21|28|35)", first.output()), first.dump()
    second = train(after, *PATIENT, folder="second", checkpoint=place, loaders=loaders)
    assert second.result() == expected
    assert re.search(rf"resumed at step \d+ from .* by {before} workers?; {after} now", second.output()), second.dump()


@pytest.mark.parametrize("workers", [0, 3])
def test_sigterm_saves_and_exits_with_0_and_the_same_command_goes_on(
    workers: int, expected: str, train: Callable[..., TrainingRun], tmp_path: Path
) -> None:
    place = tmp_path / "place"
    first = train(workers, *PATIENT, folder="first", checkpoint=place, every="10h", hold_at=11, own_imports=workers == 0)
    first.wait_for_step(11)
    first.process.send_signal(signal.SIGTERM)
    assert first.wait(15) == 0, first.dump()
    (step,) = saved_steps(place)
    assert step >= 11
    if workers:
        assert f"stopped by SIGTERM at step {step}, which is saved" in first.output()
    second = train(workers, *PATIENT, folder="second", checkpoint=place, every="10h")
    assert second.result() == expected
    assert f"resumed at step {step} from {place}" in second.output()


def test_sigterm_to_every_process_saves_too(expected: str, train: Callable[..., TrainingRun], tmp_path: Path) -> None:
    """As a batch system does it: to the workers and their loaders, and not through the agent."""
    place = tmp_path / "place"
    first = train(2, *PATIENT, folder="first", checkpoint=place, every="10h", loaders=1, hold_at=11)
    first.wait_for_step(11)
    workers = list(first.workers().values())
    loaders = [child for worker in workers for child in children_of(worker)]
    assert len(loaders) >= 2
    for pid in [*workers, *loaders]:
        os.kill(pid, signal.SIGTERM)
    assert first.wait(20) == 0, first.dump()
    (step,) = saved_steps(place)
    second = train(3, *PATIENT, folder="second", checkpoint=place, every="10h")
    assert second.result() == expected
    assert f"resumed at step {step} from {place}" in second.output()


def test_sigterm_without_a_place_ends_as_before(train: Callable[..., TrainingRun]) -> None:
    run = train(2, *PATIENT, hold_at=1)
    run.wait_for_step(1)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait(15) == 143, run.dump()


def test_a_worker_lost_while_checkpoints_are_written_costs_none_of_them(
    expected: str, train: Callable[..., TrainingRun], tmp_path: Path
) -> None:
    place = tmp_path / "place"
    run = train(3, *PATIENT, "--max-respawns", "50", checkpoint=place, every="1 steps", pace_s=0.005, hold_at=45)
    for worker, step in enumerate((10, 25, 40)):
        run.wait_for_step(step)
        run.kill(worker)
    run.wait_until(lambda: not {0, 1, 2} & set(run.generations()[-1]), "all three are replaced")
    run.hurry()
    assert run.result() == expected
    assert saved_steps(place) == [60, 59, 58]
    assert len(list(place.iterdir())) == 3


def test_a_flipped_bit_is_named_and_healed_from_the_majority(
    expected: str, train: Callable[..., TrainingRun], tmp_path: Path
) -> None:
    run = train(3, *PATIENT, checkpoint=tmp_path / "place", flip_at=25)
    assert run.result() == expected  # it was found in the step in which it happened: nobody has used it
    assert "the replica of rank 1 differed after step 25, first in parameters." in run.output(), run.dump()
    assert "It was healed from rank 0" in run.output()


def test_checkpoints_with_a_wrong_bit_go(train: Callable[..., TrainingRun], tmp_path: Path) -> None:
    place = tmp_path / "place"
    run = train(3, *PATIENT, checkpoint=place, flip_at=23, every="12 steps", hold_at=30)
    run.wait_for_step(30)  # the bit flips after step 23 and is found after step 25, before three checkpoints are kept
    run.wait_until(lambda: saved_steps(place) == [25, 12], "the checkpoint of step 24 is removed, and one is saved after the check")
    run.hurry()
    run.result()


def test_two_workers_that_differ_stop_with_both_sums(train: Callable[..., TrainingRun], tmp_path: Path) -> None:
    run = train(2, *PATIENT, checkpoint=tmp_path / "place", flip_at=25)
    assert run.wait() == 1
    assert re.search(
        r"CorruptionError: replicas differ after step 25, .* rank 0 has [0-9a-f]{32}, rank 1 has [0-9a-f]{32}", run.output()
    )
