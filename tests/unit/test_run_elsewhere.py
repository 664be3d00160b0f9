"""A run of another machine, seen through a folder that both share. Its lock may be seen here or not; its socket never answers."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lockstep.errors import UsageError
from lockstep.launcher.run_folder import RunFolder, last_written
from lockstep.launcher.run_status import SILENT, UNKNOWN, read_status
from tests.commands import lockstep

COMMAND = {"time": 1.0, "kind": "command", "role": "run", "words": ["train.py"], "host": "another-host", "pid": 4711}
END = {"time": 2.0, "kind": "end", "code": 0, "why": "all workers have finished"}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    path = tmp_path / "lockstep-runs" / "20261118-221500-4711"
    (path / "workers" / "0").mkdir(parents=True)
    (path / "workers" / "0" / "log.txt").write_text("step 1\n")
    note(path, COMMAND)
    with socket.socket(socket.AF_UNIX) as theirs, contextlib.chdir(path):  # the whole path may be too long for an address
        theirs.bind("agent.sock")
    return path


def note(path: Path, line: dict[str, object]) -> None:
    with open(path / "events.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """As a run has it."""
    folder = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def age(path: Path, seconds: float) -> None:
    """Nobody has written for so long."""
    at = time.time() - seconds
    for entry in path.rglob("*"):
        os.utime(entry, (at, at))


def files(path: Path) -> set[str]:
    return {str(entry.relative_to(path)) for entry in path.rglob("*")}


def test_it_is_unknown_whether_its_lock_is_seen_or_not(run: Path) -> None:
    assert read_status(run).state == UNKNOWN
    with locked(run):
        assert read_status(run).state == UNKNOWN
    (run / "events.jsonl").write_text(json.dumps(COMMAND | {"host": socket.gethostname()}) + "\n")
    with locked(run):
        assert read_status(run).state == SILENT


@pytest.mark.parametrize("words", [["stop", "last"], ["stop", "last", "--kill"], ["stop", "last", "--no-wait"]])
def test_stop_says_where_to_type_it(run: Path, tmp_path: Path, words: list[str]) -> None:
    done = lockstep(*words, folder=tmp_path)
    assert (done.code, done.out) == (2, "")
    assert done.err == (
        f"lockstep: the run cannot be stopped from {socket.gethostname()}: it began on another-host. Type `lockstep stop {run}` "
        "on that machine. If that machine is gone, the run is over.\n"
    )
    with locked(run):
        assert lockstep(*words, folder=tmp_path) == done


def test_status_and_top_name_its_machine(run: Path, tmp_path: Path) -> None:
    assert "unknown: it began on another-host. It may still run there: type" in lockstep("status", folder=tmp_path).out
    done = lockstep("top", folder=tmp_path)
    assert (
        done.err == f"lockstep: {run.name} may run on another machine: it began on another-host. `lockstep top` shows it there.\n"
    )


def test_a_run_takes_no_folder_from_it_while_it_may_still_run(run: Path) -> None:
    before = files(run)
    with pytest.raises(UsageError, match=r"the run in .* began on another-host, has not ended, and wrote there \d+ s ago\. Choose"):
        RunFolder.create(str(run), time.time())
    assert files(run) == before


def test_a_run_takes_the_folder_if_the_other_has_ended_or_nobody_writes_there(run: Path) -> None:
    age(run, 600)
    (run / "workers" / "0" / "log.txt").write_text("step 2\n")
    with pytest.raises(UsageError, match="began on another-host"):
        RunFolder.create(str(run), time.time())
    age(run, 600)
    assert 590 < time.time() - last_written(run) < 660
    RunFolder.create(str(run), time.time()).close()
    assert (run / "earlier-1" / "events.jsonl").exists()
    note(run, COMMAND)
    note(run, END)
    RunFolder.create(str(run), time.time()).close()
    assert (run / "earlier-2" / "events.jsonl").exists()


def test_clean_removes_it_if_nobody_writes_there(run: Path, tmp_path: Path) -> None:
    done = lockstep("clean", "--all", folder=tmp_path)
    assert done.code == 1
    why = "it began on another-host. It may still run: somebody wrote there \\d s ago. Wait until nobody has written for a day"
    left = rf"left     lockstep-runs/{run.name} \(\d s old\): {why}\n0 runs removed, 0 B; 1 left\.\n"
    assert re.fullmatch(left, done.out), done.out
    age(run, 2 * 86400)
    assert lockstep("clean", "--keep", "0", "--older-than", "3d", folder=tmp_path).out == "0 runs removed, 0 B; 1 left.\n"
    with locked(run):
        assert lockstep("clean", "--all", folder=tmp_path).out == "0 runs removed, 0 B; 0 left.\n"
    done = lockstep("clean", "--keep", "0", "--older-than", "1d", folder=tmp_path)
    assert (done.code, done.out[:9], run.exists()) == (0, "removed  ", False), done
