"""Runs that lose all workers, or are stopped, resume from disk to the same bits, also on another number of workers."""

from __future__ import annotations

import json
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


def saved_steps(checkpoints: Path) -> list[int]:
    return [folder.step for folder in Retention(open_storage(checkpoints)).published()]


@pytest.mark.parametrize(("before", "after", "loaders"), [(3, 2, 0), (1, 4, 0), (2, 1, 2)])
def test_a_run_whose_workers_are_all_killed_resumes_from_its_checkpoint(
    before: int, after: int, loaders: int, expected: str, train: Callable[..., TrainingRun], tmp_path: Path
) -> None:
    checkpoints = tmp_path / "checkpoints"
    first = train(before, *PATIENT, folder="first", checkpoint=checkpoints, loaders=loaders, pace_s=0.005)
    first.wait_for_step(24)
    for worker in first.workers():
        first.kill(worker)
    assert first.wait() == 128 + signal.SIGKILL
    assert re.search(r"The newest checkpoint is of step (14|21|28|35)", first.output()), first.dump()
    second = train(after, *PATIENT, folder="second", checkpoint=checkpoints, loaders=loaders)
    assert second.result() == expected
    assert re.search(rf"resumed at step \d+ from .* by {before} workers?; {after} now", second.output()), second.dump()
    assert re.search(r"was locked by process \d+ on .*, which has ended without releasing it", second.output()), second.dump()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_second_run_in_the_same_place_is_refused(
    workers: int, expected: str, train: Callable[..., TrainingRun], tmp_path: Path
) -> None:
    place = tmp_path / "checkpoints"
    first = train(workers, *PATIENT, folder="first", checkpoint=place, hold_at=11)
    first.wait_for_step(11)
    owner = json.loads((place / "lock.json").read_text())
    second = train(workers, *PATIENT, folder="second", checkpoint=place)
    assert second.wait() == 1
    named = f"process {owner['pid']} on {owner['host']} (run {owner['run']}, since {owner['since']})"
    assert f"UsageError: the checkpoint place {place} is in use by another run: {named}" in second.output(), second.dump()
    assert second.step() == 0
    first.hurry()
    assert first.result() == expected
    assert not (place / "lock.json").exists()


def test_a_run_that_stood_still_and_lost_its_place_does_not_save(
    expected: str, train: Callable[..., TrainingRun], tmp_path: Path
) -> None:
    """The first run is stopped, a second run takes the place over, and the first continues: both reach the same bits, one saves."""
    place = tmp_path / "checkpoints"
    first = train(0, folder="first", checkpoint=place, hold_at=11)
    first.wait_for_step(11)
    first.process.send_signal(signal.SIGSTOP)
    try:
        lock = json.loads((place / "lock.json").read_text())
        (place / "lock.json").write_text(json.dumps({**lock, "beat_at_s": lock["beat_at_s"] - 60}))  # as if a minute had passed
        second = train(0, folder="second", checkpoint=place, every="1 steps")
        second.wait_for_step(20)
        assert f"was locked by process {lock['pid']} on" in second.output()
    finally:
        first.process.send_signal(signal.SIGCONT)
    first.hurry()
    assert second.result() == expected
    assert first.result() == expected
    assert "was not written: rank 0: OSError: " in first.output(), first.dump()
    assert saved_steps(place)[0] == 60


@pytest.mark.parametrize("workers", [0, 3])
def test_sigterm_saves_and_exits_with_0_and_the_same_command_resumes(
    workers: int, expected: str, train: Callable[..., TrainingRun], tmp_path: Path
) -> None:
    checkpoints = tmp_path / "checkpoints"
    first = train(workers, *PATIENT, folder="first", checkpoint=checkpoints, every="10h", hold_at=11, own_imports=workers == 0)
    first.wait_for_step(11)
    first.process.send_signal(signal.SIGTERM)
    assert first.wait(15) == 0, first.dump()
    (step,) = saved_steps(checkpoints)
    assert step >= 11
    if workers:
        assert f"stopped by SIGTERM at step {step}, which is saved" in first.output()
    second = train(workers, *PATIENT, folder="second", checkpoint=checkpoints, every="10h")
    assert second.result() == expected
    assert f"resumed at step {step} from {checkpoints}" in second.output()


def test_a_worker_dies_in_the_step_that_sigterm_ends_and_not_all_notice_it_at_the_same_place(
    expected: str, train: Callable[..., TrainingRun], tmp_path: Path
) -> None:
    checkpoints = tmp_path / "checkpoints"
    options = {"checkpoint": checkpoints, "every": "10h", "hold_at": 11, "die_in": "exchange"}
    first = train(3, *PATIENT, "--no-respawn", folder="first", **options)
    first.wait_for_step(11)
    first.process.send_signal(signal.SIGTERM)
    assert first.wait(15) == 0, first.dump()
    assert (first.folder / "died-in-exchange").exists()
    (step,) = saved_steps(checkpoints)
    assert f"stopped by SIGTERM at step {step}, which is saved" in first.output()
    second = train(2, *PATIENT, folder="second", checkpoint=checkpoints, every="10h")
    assert second.result() == expected


def test_sigterm_to_every_process_saves_too(expected: str, train: Callable[..., TrainingRun], tmp_path: Path) -> None:
    """A batch system sends it to the workers and their loaders, not through the agent."""
    checkpoints = tmp_path / "checkpoints"
    first = train(2, *PATIENT, folder="first", checkpoint=checkpoints, every="10h", loaders=1, hold_at=11)
    first.wait_for_step(11)
    workers = list(first.workers().values())
    loaders = [child for worker in workers for child in children_of(worker)]
    assert len(loaders) >= 2
    for pid in [*workers, *loaders]:
        os.kill(pid, signal.SIGTERM)
    assert first.wait(20) == 0, first.dump()
    (step,) = saved_steps(checkpoints)
    second = train(3, *PATIENT, folder="second", checkpoint=checkpoints, every="10h")
    assert second.result() == expected
    assert f"resumed at step {step} from {checkpoints}" in second.output()


def test_sigterm_without_checkpoints_exits_with_143(train: Callable[..., TrainingRun]) -> None:
    run = train(2, *PATIENT, hold_at=1)
    run.wait_for_step(1)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait(15) == 143, run.dump()


def test_sigterm_to_every_worker_without_checkpoints_exits_with_143(train: Callable[..., TrainingRun]) -> None:
    run = train(2, *PATIENT, hold_at=1)
    run.wait_for_step(1)
    for worker in run.workers():
        run.kill(worker, signal.SIGTERM)
    assert run.wait(15) == 143, run.dump()
    assert "all workers got SIGTERM and stopped at step" in run.output()


def test_workers_that_die_while_checkpoints_are_written_cost_no_checkpoint(
    expected: str, train: Callable[..., TrainingRun], tmp_path: Path
) -> None:
    checkpoints = tmp_path / "checkpoints"
    run = train(3, *PATIENT, "--max-respawns", "50", checkpoint=checkpoints, every="1 steps", pace_s=0.005, hold_at=45)
    for worker, step in enumerate((10, 25, 40)):
        run.wait_for_step(step)
        run.kill(worker)
    run.wait_until(lambda: not {0, 1, 2} & set(run.generations()[-1]), "all three are replaced")
    run.hurry()
    assert run.result() == expected
    assert saved_steps(checkpoints) == [60, 59, 58]
    assert len(list(checkpoints.iterdir())) == 3


def test_a_flipped_bit_is_named_and_repaired_from_the_majority(
    expected: str, train: Callable[..., TrainingRun], tmp_path: Path
) -> None:
    run = train(3, *PATIENT, checkpoint=tmp_path / "checkpoints", flip_at=25)
    assert run.result() == expected  # the bit was found at the end of the step in which it was flipped, before it was used
    assert "the replica of rank 1 differed after step 25, first in parameters." in run.output(), run.dump()
    assert "It was restored from rank 0" in run.output()


def test_checkpoints_made_while_replicas_differed_are_removed(train: Callable[..., TrainingRun], tmp_path: Path) -> None:
    """Replicas are equal after step 20, differ from step 21 on, and are compared after step 25."""
    checkpoints = tmp_path / "checkpoints"
    run = train(3, *PATIENT, checkpoint=checkpoints, flip_at=21, every="2 steps", keep=100, pace_s=0.005)
    run.result()
    # keep=100 would let 22 and 24 stay. The checkpoint of step 25 was made instead of them.
    assert saved_steps(checkpoints) == [*range(60, 25, -2), 25, *range(20, 0, -2)]


def test_two_workers_that_differ_stop_and_print_both_checksums(train: Callable[..., TrainingRun], tmp_path: Path) -> None:
    run = train(2, *PATIENT, checkpoint=tmp_path / "checkpoints", flip_at=25)
    assert run.wait() == 1
    assert re.search(
        r"CorruptionError: replicas differ after step 25, .* rank 0 has [0-9a-f]{32}, rank 1 has [0-9a-f]{32}", run.output()
    )
