"""Which run a person means, and the registry of the runs of this machine, which must never stop a run."""

from __future__ import annotations

import json
import os
import pwd
import re
from pathlib import Path

import pytest

from lockstep.errors import UsageError
from lockstep.launcher.run_registry import find_run, forget_run, known_runs, register, registered_runs, registry_folder


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory. The registry is beside it."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    return tmp_path / "project"


def make_run(path: Path, at: float = 1000.0, *, registered: bool = True) -> Path:
    path.mkdir(parents=True)
    (path / "events.jsonl").write_text(json.dumps({"time": at, "kind": "command", "role": "run", "words": ["train.py"]}) + "\n")
    if registered:
        register(path)
    return path


# -- the registry --------------------------------------------------------------------------------------


def test_a_registered_run_is_found_until_its_folder_is_gone(tmp_path: Path) -> None:
    run = make_run(tmp_path / "far away" / "my run")
    assert registered_runs() == [run]
    (entry,) = (tmp_path / "state" / "lockstep" / "runs").iterdir()
    (run / "events.jsonl").unlink()
    run.rmdir()
    assert registered_runs() == []
    assert not entry.exists()


def test_an_entry_stays_while_its_folder_exists_but_cannot_be_read(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "events.jsonl").rename(run / "moved")
    assert registered_runs() == []
    (run / "moved").rename(run / "events.jsonl")
    assert registered_runs() == [run]


def test_registering_twice_makes_one_entry_and_forgetting_removes_it(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    register(run)
    assert registered_runs() == [run]
    forget_run(run)
    assert registered_runs() == []
    forget_run(run)


@pytest.mark.parametrize("content", ["", "{", "[]", "3", '{"path": 5}', '{"path": "relative/run"}', "[" * 100_000, "\0"])
def test_damaged_entries_are_left_alone(tmp_path: Path, content: str) -> None:
    run = make_run(tmp_path / "run")
    (tmp_path / "state" / "lockstep" / "runs" / "0123.json").write_text(content)
    assert registered_runs() == [run]


def test_a_home_that_is_a_file_or_missing_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    for home in (tmp_path / "file", Path("/proc"), Path("/nonexistent/home")):
        monkeypatch.setenv("XDG_STATE_HOME", str(home))
        register(tmp_path / "run")
        forget_run(tmp_path / "run")
        assert registered_runs() == []


def test_the_registry_is_below_home_unless_the_state_home_is_an_absolute_path(monkeypatch: pytest.MonkeyPatch) -> None:
    home = {"HOME": "/home/ada"}
    assert registry_folder(home) == Path("/home/ada/.local/state/lockstep/runs")
    assert registry_folder(home | {"XDG_STATE_HOME": "relative"}) == Path("/home/ada/.local/state/lockstep/runs")
    assert registry_folder(home | {"XDG_STATE_HOME": "/var/state"}) == Path("/var/state/lockstep/runs")
    assert registry_folder({}) == Path(pwd.getpwuid(os.getuid()).pw_dir, ".local/state/lockstep/runs")
    monkeypatch.setattr(os, "getuid", lambda: 4_000_123)  # a user that the system does not know
    assert registry_folder({}) is None


# -- what people type ------------------------------------------------------------------------------------


def test_a_run_is_found_by_its_folder_its_name_or_the_beginning_of_its_name(folder: Path, tmp_path: Path) -> None:
    local = make_run(folder / "lockstep-runs" / "20261118-221500-17", registered=False)
    other = make_run(tmp_path / "elsewhere" / "my first run")
    for text in ("lockstep-runs/20261118-221500-17", f"{local}/", "20261118-221500-17", "20261118", "2", "20261118-221500-17/"):
        assert find_run(text) == local
    for text in (str(other), "../elsewhere/my first run", "my first run", "my"):
        assert find_run(text) == other


def test_a_whole_name_wins_over_the_beginning_of_another(folder: Path) -> None:
    runs = folder / "lockstep-runs"
    short, _ = make_run(runs / "job"), make_run(runs / "job-2")
    assert find_run("job") == short


def test_a_name_that_several_runs_have_is_refused_with_their_folders(tmp_path: Path) -> None:
    one, two = make_run(tmp_path / "a" / "job"), make_run(tmp_path / "b" / "job")
    with pytest.raises(UsageError, match=re.escape("may be any of 2 runs") + ".*") as error:
        find_run("job")
    assert str(one) in str(error.value)
    assert str(two) in str(error.value)


def test_the_beginning_of_several_names_is_refused_with_the_names(folder: Path) -> None:
    for number in range(7):
        make_run(folder / "lockstep-runs" / f"20261118-{number}")
    with pytest.raises(UsageError, match=r"2026 may be any of 7 runs: 20261118-\d, .*, \.\.\.\. Type more of the name"):
        find_run("2026")


def test_last_is_the_newest_run_below_the_current_directory(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no run on this machine yet"):
        find_run("last")
    elsewhere = make_run(tmp_path / "elsewhere" / "run", at=5000.0)
    assert find_run("last") == elsewhere
    make_run(folder / "old", at=1000.0)
    newest = make_run(folder / "lockstep-runs" / "new", at=2000.0, registered=False)
    assert find_run("last") == newest
    assert known_runs()[0] == elsewhere


def test_last_is_the_whole_run_and_not_one_of_its_machines(folder: Path) -> None:
    run = make_run(folder / "job", at=1000.0)
    make_run(run / "machines" / "b", at=1001.0)
    assert find_run("last") == run


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "20261118-221500-71",
            "there is no run 20261118-221500-71. Did you mean 20261118-221500-17? `lockstep ls` lists the runs.",
        ),
        ("lst", "there is no run lst. Did you mean last? `lockstep ls` lists the runs."),
        ("package", "there is no run package: the folder exists, but has no events.jsonl. `lockstep ls` lists the runs."),
        ("lockstep-runs", "the folder has runs in it, lockstep-runs/20261118-221500-17 for example."),
        ("no/such/folder", "there is no run no/such/folder. `lockstep ls` lists the runs."),
        ("", "the name of the run is empty."),
    ],
)
def test_a_typo_is_one_sentence_with_what_to_type_instead(folder: Path, text: str, sentence: str) -> None:
    make_run(folder / "lockstep-runs" / "20261118-221500-17")
    (folder / "package").mkdir()
    with pytest.raises(UsageError) as error:
        find_run(text)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_a_name_that_is_no_text_is_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match="there is no run"):
        find_run(os.fsdecode(b"\xff"))
