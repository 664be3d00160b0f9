"""Run folders are removed if they have nothing but files of Lockstep and no run uses them; what people put there is kept."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from pathlib import Path

import pytest

from lockstep.commands.clean_command import choose
from lockstep.launcher.run_folder import RunFolder, is_in_use
from lockstep.launcher.run_registry import register, registered_runs
from lockstep.launcher.run_removal import (
    NotRemovedError,
    check_removable,
    disk_bytes,
    foreign_files,
    remove_oldest,
    remove_run,
    without_parts,
)
from lockstep.launcher.run_status import RunStatus
from tests.recordings import make_run


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def full_run(path: Path) -> Path:
    """A folder with everything that a run may leave."""
    make_run(path, steps=20)
    for name in ("agent.pid", "zygote.txt", "outcome.json", "head.address", "function.pickle"):
        (path / name).write_text("1\n")
    for name in ("log.times", "stack.txt", "result.pickle"):
        (path / "workers" / "0" / name).write_text("x")
    (path / "ledger").mkdir()
    (path / "ledger" / "0.jsonl").write_text("{}\n")
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path / "agent.sock"))
    make_run(path / "machines" / "host-b", steps=5)
    make_run(path / "earlier-1", steps=5)
    return path


def test_a_run_folder_is_removed_with_all_that_lockstep_wrote(tmp_path: Path) -> None:
    run = full_run(tmp_path / "my run")
    register(run)
    register(run / "machines" / "host-b")
    assert foreign_files(run) == []
    size = disk_bytes(run)
    assert size > 10_000
    assert remove_run(run) == size
    assert not run.exists()
    assert registered_runs() == []
    assert not list((tmp_path / "state" / "lockstep" / "runs").iterdir())


@pytest.mark.parametrize(
    "name",
    [
        "model.pt",
        "checkpoints/step-000000100/manifest.json",
        "workers/0/notes.txt",
        "workers/plots/loss.png",
        "recording/my.csv",
        "ledger/summary.txt",
        "machines/host-b/model.pt",
        "machines/readme.txt",
        "earlier-1/model.pt",
        "earlier-x/events.jsonl",
        "events.jsonl.gz",
    ],
)
def test_what_somebody_else_has_put_there_keeps_the_whole_folder(tmp_path: Path, name: str) -> None:
    run = full_run(tmp_path / "run")
    before = {path for path in run.rglob("*") if path.is_file()}
    (run / name).parent.mkdir(parents=True, exist_ok=True)
    (run / name).write_text("years of work")
    top = Path(name).parts[0]
    with pytest.raises(NotRemovedError, match=rf"it has {top}.*, which Lockstep did not write"):
        remove_run(run)
    with pytest.raises(NotRemovedError):
        check_removable(run)
    assert {path for path in run.rglob("*") if path.is_file()} == before | {run / name}


def test_links_are_not_followed(tmp_path: Path) -> None:
    precious = full_run(tmp_path / "precious")
    (tmp_path / "link").symlink_to(precious)
    with pytest.raises(NotRemovedError, match="it is a link"):
        remove_run(tmp_path / "link")
    run = full_run(tmp_path / "run")
    (run / "workers" / "5").symlink_to(precious)
    with pytest.raises(NotRemovedError, match="it has workers/5, which Lockstep did not write"):
        remove_run(run)
    (run / "workers" / "5").unlink()
    (run / "events.jsonl").rename(tmp_path / "events.jsonl")
    (run / "events.jsonl").symlink_to(tmp_path / "events.jsonl")
    with pytest.raises(NotRemovedError):
        remove_run(run)
    assert (precious / "events.jsonl").exists()


def test_a_folder_without_events_is_no_run_folder(tmp_path: Path) -> None:
    (tmp_path / "workers").mkdir()
    with pytest.raises(NotRemovedError, match="it is no run folder"):
        remove_run(tmp_path)
    with pytest.raises(NotRemovedError, match="cannot be opened"):
        remove_run(tmp_path / "nothing")


def test_a_folder_that_a_run_uses_stays_and_so_does_that_of_its_machine(tmp_path: Path) -> None:
    run = RunFolder.create(str(tmp_path / "run"), 0.0)
    with pytest.raises(NotRemovedError, match="a run uses it"):
        remove_run(run.path)
    run.close()
    make_run(tmp_path / "run" / "machines" / "b", steps=2)
    machine = os.open(tmp_path / "run" / "machines" / "b", os.O_RDONLY)
    fcntl.flock(machine, fcntl.LOCK_EX)
    with pytest.raises(NotRemovedError, match="a run uses it"):
        remove_run(run.path)
    os.close(machine)
    remove_run(run.path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_of_another_user_stays(tmp_path: Path) -> None:
    run = full_run(tmp_path / "run")
    os.chown(run, 12345, -1)
    with pytest.raises(NotRemovedError, match="it belongs to another user"):
        remove_run(run)


def test_looking_whether_a_run_uses_a_folder_disturbs_no_run_that_begins_there(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    looking = os.open(tmp_path / "run", os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)

    class Instant:
        """`lockstep ls` looks at the folder while the run takes the lock, and has seen it after the first attempt."""

        def __init__(self) -> None:
            self.take = fcntl.flock

        def __call__(self, descriptor: int, kind: int) -> None:
            try:
                self.take(descriptor, kind)
            except BlockingIOError:
                self.take(looking, fcntl.LOCK_UN)
                raise

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fcntl, "flock", Instant())
        run = RunFolder.create(str(tmp_path / "run"), 0.0)
    os.close(looking)
    assert is_in_use(run.path)
    run.close()
    assert not is_in_use(run.path)


def test_the_files_of_trackers_are_removed_only_on_request(tmp_path: Path) -> None:
    run = full_run(tmp_path / "run")
    for folder in (run, run / "earlier-1"):
        (folder / "tracking" / "default").mkdir(parents=True)
        (folder / "tracking" / "default" / "metrics.csv").write_text("step,loss\n")
    with pytest.raises(NotRemovedError, match=r"it has tracking, the files of track=\. `lockstep clean --with-curves`"):
        remove_run(run)
    (run / "model\x1b.pt").touch()
    with pytest.raises(NotRemovedError, match=r"it has model\?\.pt, which Lockstep did not write"):
        remove_run(run, with_curves=True)
    (run / "model\x1b.pt").unlink()
    (run / "workers" / "tracking").mkdir()
    with pytest.raises(NotRemovedError, match="it has workers/tracking, which Lockstep did not write"):
        remove_run(run, with_curves=True)
    (run / "workers" / "tracking").rmdir()
    check_removable(run, with_curves=True)
    remove_run(run, with_curves=True)
    assert not run.exists()


def test_a_link_in_place_of_the_files_of_trackers_is_not_followed(tmp_path: Path) -> None:
    run = full_run(tmp_path / "run")
    (tmp_path / "curves").mkdir()
    (run / "tracking").symlink_to(tmp_path / "curves")
    with pytest.raises(NotRemovedError, match="it has tracking, which Lockstep did not write"):
        remove_run(run, with_curves=True)
    assert (tmp_path / "curves").exists()


# -- which runs --------------------------------------------------------------------------------------------


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Five finished runs with automatic names, the oldest first."""
    for second in range(5):
        make_run(tmp_path / "lockstep-runs" / f"20261118-22150{second}-4711", steps=2)
    return tmp_path / "lockstep-runs"


def names(folder: Path) -> list[str]:
    return sorted(path.name[14:15] for path in folder.iterdir() if path.name.startswith("2026"))


def test_a_run_that_begins_leaves_only_the_newest_automatic_folders(runs: Path) -> None:
    (runs / "20261118-221500-4711" / "model.pt").write_text("precious")
    (runs / "my-run").mkdir()
    (runs / "my-run" / "events.jsonl").write_text("{}\n")
    remove_oldest(runs, keep=3)
    assert names(runs) == ["0", "2", "3", "4"], "the first has a file of the user"
    assert (runs / "my-run").exists()
    remove_oldest(runs, keep=50)
    assert names(runs) == ["0", "2", "3", "4"]
    remove_oldest(runs / "nothing", keep=0)


def test_a_run_that_still_runs_or_may_run_on_another_machine_is_not_removed(runs: Path) -> None:
    lock = os.open(runs / "20261118-221501-4711", os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    elsewhere = {"time": 1.0, "kind": "command", "role": "run", "words": [], "host": "another-host"}
    (runs / "20261118-221502-4711" / "events.jsonl").write_text(json.dumps(elsewhere) + "\n")
    remove_oldest(runs, keep=1)
    assert names(runs) == ["1", "2", "4"]
    os.close(lock)


def test_a_run_of_another_machine_to_which_nobody_has_written_for_two_weeks_is_removed(runs: Path) -> None:
    elsewhere = {"time": 1.0, "kind": "command", "role": "run", "words": [], "host": "another-host"}
    for second in (1, 2):
        (runs / f"20261118-22150{second}-4711" / "events.jsonl").write_text(json.dumps(elsewhere) + "\n")
    at = time.time() - 15 * 86400
    for entry in (runs / "20261118-221501-4711").rglob("*"):
        os.utime(entry, (at, at))
    remove_oldest(runs, keep=1)
    assert names(runs) == ["2", "4"]


def test_clean_removes_what_is_old_enough_but_never_the_newest() -> None:
    day = 86400.0
    ended = [RunStatus(Path(str(age)), "finished", ended=1e9 - age * day) for age in (1, 20, 30, 15, 2)]

    def chosen(older_than_days: float, keep: int) -> list[str]:
        return [str(each.path) for each in choose(ended, 1e9, older_than_s=older_than_days * day, keep=keep)]

    assert chosen(14, 0) == ["30", "20", "15"]
    assert chosen(14, 3) == ["30", "20"]
    assert chosen(14, 10) == []
    assert chosen(0, 0) == ["30", "20", "15", "2", "1"]
    assert chosen(25, 1) == ["30"]


def test_the_folder_of_a_machine_is_removed_with_the_run_and_not_counted(tmp_path: Path) -> None:
    run = full_run(tmp_path / "run")
    alone = make_run(tmp_path / "machines" / "b", steps=2)
    assert without_parts([run, run / "machines" / "host-b", alone]) == [run, alone]
