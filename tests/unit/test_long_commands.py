"""A command line may be long: its run is still known, and nobody takes a run of an unknown machine for one of this machine."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import UsageError
from lockstep.launcher.file_ends import first_objects
from lockstep.launcher.new_run import MAX_COMMAND_CHARS, bounded_words, create_run_folder
from lockstep.launcher.run_folder import RunFolder
from lockstep.launcher.run_removal import remove_oldest
from lockstep.launcher.run_status import LOST, UNKNOWN, read_status
from lockstep.recording.json_lines import LONGEST_LINE
from tests.commands import lockstep

SHARDS = [f"/datasets/shard-{number:06d}.tar" for number in range(1000)]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of another machine with 1000 arguments, which has not ended."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    path = tmp_path / "lockstep-runs" / "20261118-221500-4711"
    path.mkdir(parents=True)
    write(
        path, {"time": 1.0, "kind": "command", "role": "run", "words": ["train.py", *SHARDS], "host": "another-host", "pid": 4711}
    )
    return path


def write(path: Path, *lines: dict[str, Any]) -> None:
    (path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_run_with_a_long_command_line_has_its_script_its_start_and_its_machine(run: Path) -> None:
    found = read_status(run, ask=False)
    assert (found.words[0], len(found.words), found.began, found.host, found.state) == (
        "train.py",
        1001,
        1.0,
        "another-host",
        UNKNOWN,
    )


def test_its_folder_is_not_taken_and_not_removed(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="began on another-host, has not ended"):
        RunFolder.create(str(run), time.time())
    assert lockstep("clean", "--all", folder=tmp_path).code == 1
    remove_oldest(run.parent, keep=0)
    assert run.exists()


def test_a_line_beyond_the_limit_is_left_out_and_so_is_what_follows_it(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    file.write_text('{"a": 1}\n{"long": "' + "x" * LONGEST_LINE + '"}\n{"b": 1}\n')
    assert first_objects(file, 100) == [{"a": 1}]


def test_the_writer_shortens_a_command_that_is_too_long() -> None:
    assert bounded_words(["train.py", *SHARDS]) == ["train.py", *SHARDS]
    found = bounded_words(["train.py", *SHARDS * 10])
    assert found[:3] == ["train.py", *SHARDS[:2]]
    assert found[-1] == f"... and {10_001 - (len(found) - 1)} more"
    assert len(json.dumps(found)) < MAX_COMMAND_CHARS + 1000
    (word, rest) = bounded_words(["\udcff" * (1 << 20), "b"])
    assert len(word) <= MAX_COMMAND_CHARS
    assert rest in ("b", "... and 1 more")


def test_a_run_with_more_arguments_than_are_noted_is_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    create_run_folder(str(tmp_path / "run"), "run", ["train.py", *SHARDS * 50]).close()
    assert (tmp_path / "run" / "events.jsonl").stat().st_size < 2 * MAX_COMMAND_CHARS
    found = read_status(tmp_path / "run", ask=False)
    assert (found.host, found.state) == (socket.gethostname(), LOST)


# -- a run whose files do not name its machine -----------------------------------------------------------


@pytest.fixture(params=["", '{"time": 1.0, "kind": "com', '{"time": 1.0, "kind": "begin", "pid": 4711, "settings": {}}\n'])
def nameless(request: pytest.FixtureRequest, run: Path) -> Path:
    (run / "events.jsonl").write_text(request.param)
    return run


def test_a_run_of_an_unknown_machine_is_unknown(nameless: Path) -> None:
    assert read_status(nameless, ask=False).state == UNKNOWN


def test_a_run_of_an_unknown_machine_keeps_its_folder_until_nobody_writes_there(nameless: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not say on which machine it began, has not ended"):
        RunFolder.create(str(nameless), time.time())
    done = lockstep("clean", "--all", folder=tmp_path)
    assert "its files do not say on which machine it began. It may still run: somebody wrote there" in done.out
    remove_oldest(nameless.parent, keep=0)
    assert nameless.exists()
    at = time.time() - 15 * 86400
    os.utime(nameless / "events.jsonl", (at, at))
    RunFolder.create(str(nameless), time.time()).close()


def test_the_commands_say_that_its_machine_is_unknown(nameless: Path, tmp_path: Path) -> None:
    assert "unknown: its files do not say on which machine it began. It may still run" in lockstep("status", folder=tmp_path).out
    done = lockstep("stop", "last", folder=tmp_path)
    assert (done.code, done.err.count("its files do not say on which machine it began")) == (2, 1)
    assert "its files do not say on which machine it began" in lockstep("top", folder=tmp_path).err
