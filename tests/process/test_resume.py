"""Runs that lose all workers, or are stopped, resume from disk to the same bits, also on another number of workers."""

from __future__ import annotations

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
    """tests/scripts/resume.py under `lockstep run` (or alone, with 0 workers), with its checkpoints in ``checkpoints``."""

    def __init__(self, folder: Path, checkpoints: Path, workers: int, *options: str, **variables: str) -> None:
        self.folder = folder
        folder.mkdir()
        command = [sys.executable, str(SCRIPT), str(HERE), str(checkpoints)]
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
        """Wait for the end. Returns a digest of the state, which is the same on every worker."""
        assert self.wait() == 0, self.output
        (found,) = {note.read_text() for note in self.folder.glob("done-*")}
        return found


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("resume")
    return Started(folder / "alone", folder / "checkpoints", 0).result()


def saved_steps(checkpoints: Path) -> list[int]:
    return [folder.step for folder in Retention(open_storage(checkpoints)).published()]


@pytest.mark.parametrize(("before", "after", "loaders"), [(3, 2, "0"), (1, 4, "0"), (2, 1, "2")])
def test_a_run_whose_workers_are_all_killed_resumes_from_its_checkpoint(
    before: int, after: int, loaders: str, expected: str, tmp_path: Path
) -> None:
    checkpoints = tmp_path / "checkpoints"
    first = Started(tmp_path / "first", checkpoints, before, RESUME_LOADERS=loaders)
    first.until_step(24)
    first.kill_workers()
    assert first.wait() == 128 + signal.SIGKILL
    assert re.search(r"The newest checkpoint is of step (14|21|28|35)", first.output), first.output
    second = Started(tmp_path / "second", checkpoints, after, RESUME_LOADERS=loaders)
    assert second.result() == expected
    assert re.search(rf"resumed at step \d+ from .* by {before} workers?; {after} now", second.output), second.output


@pytest.mark.parametrize("workers", [0, 3])
def test_sigterm_saves_and_exits_with_0_and_the_same_command_resumes(workers: int, expected: str, tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    first = Started(tmp_path / "first", checkpoints, workers, RESUME_EVERY="10h")
    first.until_step(11)
    first.process.send_signal(signal.SIGTERM)
    assert first.wait(15) == 0, first.output
    (step,) = saved_steps(checkpoints)
    assert step >= 11
    if workers:
        assert f"stopped by SIGTERM at step {step}, which is saved" in first.output
    second = Started(tmp_path / "second", checkpoints, workers, RESUME_EVERY="10h")
    assert second.result() == expected
    assert f"resumed at step {step} from {checkpoints}" in second.output


def test_sigterm_to_every_process_saves_too(expected: str, tmp_path: Path) -> None:
    """A batch system sends it to the workers and their loaders, not through the agent."""
    checkpoints = tmp_path / "checkpoints"
    first = Started(tmp_path / "first", checkpoints, 2, RESUME_EVERY="10h", RESUME_LOADERS="1")
    first.until_step(11)
    workers = [int(note.read_text()) for note in first.folder.glob("pid-*")]
    for pid in [*workers, *(child for worker in workers for child in children_of(worker))]:
        os.kill(pid, signal.SIGTERM)
    assert first.wait(20) == 0, first.output
    (step,) = saved_steps(checkpoints)
    second = Started(tmp_path / "second", checkpoints, 3, RESUME_EVERY="10h")
    assert second.result() == expected
    assert f"resumed at step {step} from {checkpoints}" in second.output


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_sigterm_without_checkpoints_exits_with_143(tmp_path: Path) -> None:
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


def test_workers_that_die_while_checkpoints_are_written_cost_no_checkpoint(expected: str, tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    run = Started(tmp_path / "run", checkpoints, 3, "--max-respawns", "50", RESUME_EVERY="1 steps")
    for number, step in enumerate((10, 25, 40)):
        run.until_step(step)
        os.kill(int((run.folder / f"pid-{number}").read_text()), signal.SIGKILL)
    assert run.result() == expected
    assert saved_steps(checkpoints) == [60, 59, 58]
    assert len(list(checkpoints.iterdir())) == 3


def test_a_flipped_bit_is_named_and_repaired_from_the_majority(expected: str, tmp_path: Path) -> None:
    run = Started(tmp_path / "run", tmp_path / "checkpoints", 3, RESUME_FLIP_AT="25")
    assert run.result() == expected  # the bit was found at the end of the step in which it was flipped, before it was used
    assert "the replica of rank 1 differed after step 25, first in parameters." in run.output, run.output
    assert "It was healed from rank 0" in run.output


def test_checkpoints_made_while_replicas_differed_are_removed(tmp_path: Path) -> None:
    """Replicas are equal after step 20, differ from step 21 on, and are compared after step 25."""
    checkpoints = tmp_path / "checkpoints"
    run = Started(tmp_path / "run", checkpoints, 3, RESUME_FLIP_AT="21", RESUME_EVERY="2 steps", RESUME_KEEP="100")
    run.result()
    # keep=100 would let 22 and 24 stay. The checkpoint of step 25 was made instead of them.
    assert saved_steps(checkpoints) == [*range(60, 25, -2), 25, *range(20, 0, -2)]


def test_two_workers_that_differ_stop_and_print_both_checksums(tmp_path: Path) -> None:
    run = Started(tmp_path / "run", tmp_path / "checkpoints", 2, RESUME_FLIP_AT="25")
    assert run.wait() == 1
    assert re.search(
        r"CorruptionError: replicas differ after step 25, .* rank 0 has [0-9a-f]{32}, rank 1 has [0-9a-f]{32}", run.output
    )
