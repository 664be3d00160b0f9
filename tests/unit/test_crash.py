"""The writer of a checkpoint fails at each of its file operations in turn: the previous or the new checkpoint is there, intact."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from lockstep.checkpoint.atomic_file import write_atomically
from lockstep.checkpoint.manifest import NAME
from lockstep.checkpoint.retention import Retention
from lockstep.checkpoint.storage import open_storage
from tests.checkpoint_jobs import FaultyOs, Job, faulty
from tests.workers import run_workers

pytestmark = pytest.mark.slow


def second_save(folder: Path) -> FaultyOs:
    """Return the file operations of a job's second checkpoint, which also removes the first."""
    job = Job(folder)
    job.step()
    job.save()
    job.step(2)
    with faulty(-1, None) as system:
        job.save()
    job.close()
    return system


def states(folder: Path) -> list[str]:
    """Return the job's state at steps 1 and 3."""
    job = Job(folder)
    found = []
    for steps in (1, 2):
        job.step(steps)
        found.append(job.state())
    job.close()
    return found


def require_old_or_new(folder: Path, expected: list[str], seen: set[str]) -> None:
    """The checkpoint in ``folder`` can be resumed from, and the next checkpoint removes all else."""
    job = Job(folder)
    assert job.state() in expected
    seen.add(job.state())
    job.step()
    job.save()
    after = job.state()
    job.close()
    (only,) = Retention(open_storage(folder)).published()
    assert [path.name for path in folder.iterdir()] == [only.name]
    again = Job(folder)
    assert again.state() == after
    again.close()


def die(rank: int, size: int, folder: str, at: int) -> None:
    job = Job(folder)
    job.step()
    job.save()
    job.step(2)
    with faulty(at, lambda name: os.kill(os.getpid(), signal.SIGKILL)):
        job.save()
    raise AssertionError("survived")


def test_killed_at_each_file_operation(tmp_path: Path) -> None:
    expected, seen = states(tmp_path / "states"), set[str]()
    count = len(second_save(tmp_path / "count").calls)
    assert count > 25
    for at in range(count):
        folder = tmp_path / f"killed-{at}"
        (outcome,) = run_workers(die, 1, str(folder), at, check=False)
        assert outcome.signal == signal.SIGKILL, (at, outcome)
        require_old_or_new(folder, expected, seen)
    assert seen == set(expected)  # early: the previous one; late: the new one


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EIO])
def test_refused_at_each_file_operation(number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected, seen = states(tmp_path / "states"), set[str]()

    def refuse(name: str) -> Any:
        raise OSError(number, os.strerror(number), name)

    for at in range(len(second_save(tmp_path / "count").calls)):
        folder = tmp_path / f"refused-{at}"
        job = Job(folder)
        job.step()
        job.save()
        job.step(2)
        with faulty(at, refuse):
            job.save()
        assert job.state() == expected[1]  # training is not touched
        job.close()
        said = capsys.readouterr().err
        assert os.strerror(number) in said
        require_old_or_new(folder, expected, seen)
    assert seen == set(expected)


def events_of(system: FaultyOs) -> list[tuple[str, Path]]:
    """The files and folders that were created, synced, renamed to, and removed, in this order."""
    opened: dict[int, Path] = {}
    events: list[tuple[str, Path]] = []
    for name, args, result in system.calls:
        if name == "open":
            opened[result] = Path(args[0])
            events += [("create", opened[result])] if args[1] & os.O_CREAT else []
        elif name == "fsync":
            events.append((name, opened[args[0]]))
        elif name in ("rename", "unlink"):
            events.append((name, Path(args[-1])))
    return events


def test_all_files_and_folders_are_synced_before_the_manifest_appears(tmp_path: Path) -> None:
    """A machine that crashes loses what was not synced, and may have done later operations before earlier ones."""
    events = events_of(second_save(tmp_path))
    (folder,) = tmp_path.iterdir()
    at = events.index(("rename", folder / NAME))
    created = [path for kind, path in events[:at] if kind == "create"]
    parts = [path for path in created if path.name in {each.name for each in folder.iterdir()}]
    assert len(parts) == len(list(folder.iterdir())) - 1  # without the manifest, which was created under another name
    for path in created:
        assert events.index(("fsync", path)) < at
    last_part = max(events.index(("create", path)) for path in parts)
    assert ("fsync", folder) in events[last_part:at]
    assert ("fsync", tmp_path) in events[:at]
    assert ("fsync", folder) in events[at:]


def test_a_checkpoint_is_removed_from_its_manifest_on(tmp_path: Path) -> None:
    events = events_of(second_save(tmp_path))
    first, *others = (at for at, (kind, _) in enumerate(events) if kind == "unlink")
    manifest = events[first][1]
    assert manifest.name == NAME
    assert len(others) >= 2
    assert ("fsync", manifest.parent) in events[first : others[0]]


def test_a_file_that_cannot_be_replaced_is_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "file"
    folder = os.open(tmp_path, os.O_DIRECTORY)
    write_atomically("file", [b"old"], folder)
    with faulty(-1, None) as system:
        write_atomically("file", [b"new", b"er"], folder)
    assert path.read_bytes() == b"newer"

    def refuse(name: str) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO), name)

    before_rename = [name for name, _, _ in system.calls].index("rename")
    for at in range(before_rename + 1):
        with faulty(at, refuse), pytest.raises(OSError, match="Input/output error"):
            write_atomically("file", [b"an", b"other"], folder)
        assert path.read_bytes() == b"newer"
        assert list(tmp_path.iterdir()) == [path]
    os.close(folder)
