"""The writer of a checkpoint fails at each of its file operations in turn: the previous or the new one is there, whole."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from lockstep.checkpoint.retention import Retention
from lockstep.checkpoint.storage import open_storage
from tests.checkpoint_jobs import Job, faulty
from tests.workers import run_workers

pytestmark = pytest.mark.slow


def operations(tmp_path: Path) -> int:
    """How many there are in the second checkpoint of a job, which also removes the first."""
    job = Job(tmp_path / "count")
    job.step()
    job.save()
    job.step(2)
    with faulty(-1, None) as system:
        job.save()
    job.close()
    return system.count


def states(tmp_path: Path) -> list[str]:
    """The job's state at steps 1 and 3."""
    job = Job(tmp_path / "states")
    found = []
    for steps in (1, 2):
        job.step(steps)
        found.append(job.state())
    job.close()
    return found


def require_old_or_new(place: Path, expected: list[str], seen: set[str]) -> None:
    """What is there can be resumed from, and the next checkpoint tidies up."""
    job = Job(place)
    assert job.state() in expected
    seen.add(job.state())
    job.step()
    job.save()
    after = job.state()
    job.close()
    (slot,) = Retention(open_storage(place)).whole()
    assert [path.name for path in place.iterdir()] == [slot.folder]
    again = Job(place)
    assert again.state() == after
    again.close()


def die(rank: int, size: int, place: str, at: int) -> None:
    job = Job(place)
    job.step()
    job.save()
    job.step(2)
    with faulty(at, lambda name: os.kill(os.getpid(), signal.SIGKILL)):
        job.save()
    raise AssertionError("survived")


def test_killed_at_each_file_operation(tmp_path: Path) -> None:
    expected, seen = states(tmp_path), set[str]()
    count = operations(tmp_path)
    assert count > 25
    for at in range(count):
        place = tmp_path / f"killed-{at}"
        (outcome,) = run_workers(die, 1, str(place), at, check=False)
        assert outcome.signal == signal.SIGKILL, (at, outcome)
        require_old_or_new(place, expected, seen)
    assert seen == set(expected)  # early: the previous one; late: the new one


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EIO])
def test_refused_at_each_file_operation(number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected, seen = states(tmp_path), set[str]()

    def refuse(name: str) -> Any:
        raise OSError(number, os.strerror(number), name)

    for at in range(operations(tmp_path)):
        place = tmp_path / f"refused-{at}"
        job = Job(place)
        job.step()
        job.save()
        job.step(2)
        with faulty(at, refuse):
            job.save()
        assert job.state() == expected[1]  # training is not touched
        job.close()
        said = capsys.readouterr().err
        assert os.strerror(number) in said
        require_old_or_new(place, expected, seen)
    assert seen == set(expected)
