"""Runs that lose all workers at once, or are told to end, come back from disk to the same bits, on another number of workers."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lockstep.checkpoint.retention import Retention
from lockstep.checkpoint.storage import open_storage

HERE = Path(__file__).parents[2]
SCRIPT = HERE / "tests" / "scripts" / "resume.py"


class Started:
    """The script under `lockstep run` (or alone, with 0 workers), writing to ``place``."""

    def __init__(self, folder: Path, place: Path, workers: int, *options: str, **variables: str) -> None:
        self.folder = folder
        folder.mkdir()
        command = [sys.executable, str(SCRIPT), str(HERE), str(place)]
        if workers:
            launch = [
                "-m",
                "lockstep",
                "run",
                "-n",
                str(workers),
                "--run-dir",
                str(folder / "run"),
                "--hang-timeout",
                "5",
                *options,
            ]
            command[1:1] = launch
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "RESUME_NOTES": str(folder), **variables}
        with (folder / "output.txt").open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=HERE)

    @property
    def output(self) -> str:
        return (self.folder / "output.txt").read_text()

    def until_step(self, step: int, deadline_s: float = 60.0) -> None:
        end = time.monotonic() + deadline_s
        while self.step() < step:
            assert time.monotonic() < end, self.output
            assert self.process.poll() is None, self.output
            time.sleep(0.005)

    def step(self) -> int:
        note = self.folder / "step"
        return int(note.read_text() or 0) if note.exists() else 0

    def kill_workers(self) -> None:
        for note in self.folder.glob("pid-*"):
            os.kill(int(note.read_text()), signal.SIGKILL)

    def wait(self, deadline_s: float = 60.0) -> int:
        try:
            return self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"not done after {deadline_s} s:\n{self.output}") from None

    def result(self) -> str:
        """The bits at its end, the same on every worker."""
        assert self.wait() == 0, self.output
        (found,) = {note.read_text() for note in self.folder.glob("done-*")}
        return found


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("resume")
    return Started(folder / "alone", folder / "place", 0).result()


def saved_steps(place: Path) -> list[int]:
    return [folder.step for folder in Retention(open_storage(place)).published()]


@pytest.mark.parametrize(("before", "after", "loaders"), [(3, 2, "0"), (1, 4, "0"), (2, 1, "2")])
def test_killed_all_at_once_a_run_goes_on_from_its_checkpoint(
    before: int, after: int, loaders: str, expected: str, tmp_path: Path
) -> None:
    place = tmp_path / "place"
    first = Started(tmp_path / "first", place, before, RESUME_LOADERS=loaders)
    first.until_step(24)
    first.kill_workers()
    assert first.wait() == 128 + signal.SIGKILL
    assert re.search(r"The newest checkpoint is of step (14|21|28|35)", first.output), first.output
    second = Started(tmp_path / "second", place, after, RESUME_LOADERS=loaders)
    assert second.result() == expected
    assert re.search(rf"resumed at step \d+ from .* by {before} workers?; {after} now", second.output), second.output
    assert re.search(r"was locked by process \d+ on .*, which has ended without releasing it", second.output), second.output


@pytest.mark.parametrize("workers", [0, 2])
def test_a_second_run_in_the_same_place_is_refused(workers: int, expected: str, tmp_path: Path) -> None:
    place = tmp_path / "place"
    first = Started(tmp_path / "first", place, workers, "--hang-timeout", "60", RESUME_PAUSE_AT="11")
    first.until_step(11)
    owner = json.loads((place / "lock.json").read_text())
    second = Started(tmp_path / "second", place, workers)
    assert second.wait() == 1
    named = f"process {owner['pid']} on {owner['host']} (run {owner['run']}, since {owner['since']})"
    assert f"UsageError: the checkpoint place {place} is in use by another run: {named}" in second.output, second.output
    assert owner["pid"] == int((first.folder / "pid-0").read_text())
    assert second.step() == 0
    (first.folder / "continue").touch()
    assert first.result() == expected
    assert not (place / "lock.json").exists()


def test_a_run_that_stood_still_and_lost_its_place_does_not_save(expected: str, tmp_path: Path) -> None:
    """It is stopped, another run takes over, and it continues: both reach the same bits, one of them saves."""
    place = tmp_path / "place"
    first = Started(tmp_path / "first", place, 0)
    first.until_step(11)
    first.process.send_signal(signal.SIGSTOP)
    try:
        lock = json.loads((place / "lock.json").read_text())
        (place / "lock.json").write_text(json.dumps({**lock, "beat_at_s": lock["beat_at_s"] - 60}))  # as if a minute had passed
        second = Started(tmp_path / "second", place, 0, RESUME_EVERY="1 steps")
        second.until_step(20)
        assert f"was locked by process {first.process.pid} on" in second.output
    finally:
        first.process.send_signal(signal.SIGCONT)
    assert second.result() == expected
    assert first.result() == expected
    assert "was not written: rank 0: OSError: " in first.output, first.output
    assert saved_steps(place)[0] == 60


@pytest.mark.parametrize("workers", [0, 3])
def test_sigterm_saves_and_exits_with_0_and_the_same_command_goes_on(workers: int, expected: str, tmp_path: Path) -> None:
    place = tmp_path / "place"
    first = Started(tmp_path / "first", place, workers, RESUME_EVERY="10h")
    first.until_step(11)
    first.process.send_signal(signal.SIGTERM)
    assert first.wait(15) == 0, first.output
    (step,) = saved_steps(place)
    assert step >= 11
    if workers:
        assert f"stopped by SIGTERM at step {step}, which is saved" in first.output
    second = Started(tmp_path / "second", place, workers, RESUME_EVERY="10h")
    assert second.result() == expected
    assert f"resumed at step {step} from {place}" in second.output


def test_sigterm_to_every_process_saves_too(expected: str, tmp_path: Path) -> None:
    """As a batch system does it: to the workers and their loaders, and not through the agent."""
    place = tmp_path / "place"
    first = Started(tmp_path / "first", place, 2, RESUME_EVERY="10h", RESUME_LOADERS="1")
    first.until_step(11)
    workers = [int(note.read_text()) for note in first.folder.glob("pid-*")]
    for pid in [*workers, *(child for worker in workers for child in children_of(worker))]:
        os.kill(pid, signal.SIGTERM)
    assert first.wait(20) == 0, first.output
    (step,) = saved_steps(place)
    second = Started(tmp_path / "second", place, 3, RESUME_EVERY="10h")
    assert second.result() == expected
    assert f"resumed at step {step} from {place}" in second.output


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_sigterm_without_a_place_ends_as_before(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.read_text().replace("checkpoint=folder,", ""))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RESUME_NOTES": str(tmp_path)}
    command = [sys.executable, "-m", "lockstep", "run", "-n", "2", "--run-dir", str(tmp_path / "run"), str(script), str(HERE), "-"]
    with (tmp_path / "output.txt").open("wb") as output:
        process = subprocess.Popen(command, env=environment, cwd=HERE, stdout=output, stderr=subprocess.STDOUT)
    end = time.monotonic() + 60
    while not (tmp_path / "step").exists() and time.monotonic() < end:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait(15) == 143, (tmp_path / "output.txt").read_text()


def test_a_worker_lost_while_checkpoints_are_written_costs_none_of_them(expected: str, tmp_path: Path) -> None:
    place = tmp_path / "place"
    run = Started(tmp_path / "run", place, 3, "--max-respawns", "50", RESUME_EVERY="1 steps")
    for number, step in enumerate((10, 25, 40)):
        run.until_step(step)
        os.kill(int((run.folder / f"pid-{number}").read_text()), signal.SIGKILL)
    assert run.result() == expected
    assert saved_steps(place) == [60, 59, 58]
    assert len(list(place.iterdir())) == 3


def test_a_flipped_bit_is_named_and_healed_from_the_majority(expected: str, tmp_path: Path) -> None:
    run = Started(tmp_path / "run", tmp_path / "place", 3, RESUME_FLIP_AT="25")
    assert run.result() == expected  # it was found in the step in which it happened: nobody has used it
    assert "the replica of rank 1 differed after step 25, first in parameters." in run.output, run.output
    assert "It was restored from rank 0" in run.output


def test_checkpoints_made_while_replicas_differed_are_removed(tmp_path: Path) -> None:
    """Replicas are equal after step 20, differ from step 21 on, and are compared after step 25."""
    folder = tmp_path / "checkpoints"
    run = Started(tmp_path / "run", folder, 3, RESUME_FLIP_AT="21", RESUME_EVERY="2 steps", RESUME_KEEP="100")
    run.result()
    # keep=100 would let 22 and 24 stay. The checkpoint of step 25 was made instead of them.
    assert saved_steps(folder) == [*range(60, 25, -2), 25, *range(20, 0, -2)]


def test_two_workers_that_differ_stop_with_both_sums(tmp_path: Path) -> None:
    run = Started(tmp_path / "run", tmp_path / "place", 2, RESUME_FLIP_AT="25")
    assert run.wait() == 1
    assert re.search(
        r"CorruptionError: replicas differ after step 25, .* rank 0 has [0-9a-f]{32}, rank 1 has [0-9a-f]{32}", run.output
    )
