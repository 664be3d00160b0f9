"""The lock of a checkpoint place: who is refused, who takes it over, and what happens to a run that has lost it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.checkpoint import place_lock
from lockstep.checkpoint.checkpoints import SaveError
from lockstep.checkpoint.place_lock import FILE, Attempt, Owner, PlaceLock
from lockstep.checkpoint.storage import LocalStorage, Storage, open_storage
from lockstep.comm.base import Comm
from lockstep.errors import UsageError
from tests.threads import on_threads
from tests.unit.test_checkpoint_states import OneWeight, folders, open_checkpoints, published, refuse, until


@pytest.fixture(params=["local", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return open_storage(tmp_path if request.param == "local" else f"memory://lock/{tmp_path.name}/{os.getpid()}")


@pytest.fixture
def living() -> Iterator[Owner]:
    """The owner of another launch: a process that lives on this machine."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield Owner("theirs", "their-run", pid=process.pid, process=place_lock._process(process.pid))
        process.kill()


def elsewhere(owner: Owner) -> Owner:
    return replace(owner, machine="another machine", host="node17")


def put(storage: Storage, owner: Owner) -> None:
    assert storage.exchange(FILE, read(storage), owner.to_json())


def read(storage: Storage) -> bytes | None:
    return storage.read("", FILE, 4096) if storage.exists("", FILE) else None


def test_the_lock_is_free_after_its_release_and_at_first(storage: Storage) -> None:
    lock = PlaceLock(storage)
    assert lock.try_acquire("mine", "run") == Attempt(is_held=True)
    assert lock.is_held
    lock.release()
    lock.release()
    assert not lock.is_held
    assert read(storage) is None


def test_a_living_owner_refuses_others_and_is_named(storage: Storage, living: Owner) -> None:
    put(storage, living)
    attempt = PlaceLock(storage).try_acquire("mine", "run")
    assert not attempt.is_held
    assert f"is in use by another run: process {living.pid} on {living.host} (run their-run, since " in attempt.refusal
    assert f"end it (here: kill {living.pid}), or pass another folder to checkpoint=" in attempt.refusal
    assert read(storage) == living.to_json()


def test_a_process_that_has_ended_loses_the_lock_at_once(storage: Storage) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        owner = Owner("theirs", "their-run", pid=process.pid, process=place_lock._process(process.pid))
        process.kill()
        until(lambda: place_lock._process(process.pid) == "")  # nobody has waited for it yet
        put(storage, owner)
        attempt = PlaceLock(storage).try_acquire("mine", "run")
    assert attempt.is_held
    assert f"was locked by process {owner.pid} on" in attempt.notice
    assert "has ended without releasing it" in attempt.notice


def test_another_process_with_the_same_pid_is_not_the_owner(storage: Storage, living: Owner) -> None:
    put(storage, replace(living, process="1"))
    assert PlaceLock(storage).try_acquire("mine", "run").is_held


def test_a_process_that_lives_and_is_silent_loses_the_lock(storage: Storage, living: Owner) -> None:
    put(storage, replace(living, beat_at_s=time.monotonic() - place_lock.STALE_S - 1))
    assert PlaceLock(storage).try_acquire("mine", "run").is_held


def test_an_owner_on_another_machine_is_refused_after_its_next_heartbeat(storage: Storage, living: Owner) -> None:
    owner, lock = elsewhere(living), PlaceLock(storage)
    put(storage, owner)
    first = lock.try_acquire("mine", "run")
    assert not first.is_held
    assert not first.refusal
    assert re.search(r"was locked by process \d+ on node17 .* Waiting up to 30 s for a sign", first.notice)
    assert lock.try_acquire("mine", "run") == Attempt()
    put(storage, replace(owner, beat=1))
    assert "is in use by another run" in lock.try_acquire("mine", "run").refusal


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"launch": 3}', b"\xff", b"[" * 3000])
def test_a_lock_that_cannot_be_read_is_taken_over_after_a_while(
    content: bytes, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place_lock, "STALE_S", 0.05)
    assert storage.exchange(FILE, None, content)
    lock = PlaceLock(storage)
    assert "a process that did not write its name" in lock.try_acquire("mine", "run").notice
    until(lambda: lock.try_acquire("mine", "run").is_held)


def test_an_owner_on_another_machine_without_heartbeats_loses_the_lock(
    storage: Storage, living: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place_lock, "STALE_S", 0.05)
    put(storage, elsewhere(living))
    lock, attempts = PlaceLock(storage), list[Attempt]()
    until(lambda: attempts.append(lock.try_acquire("mine", "run")) or attempts[-1].is_held)
    assert "has given no sign for" in attempts[-1].notice


def test_other_workers_of_the_launch_take_the_lock_without_a_word(storage: Storage, living: Owner) -> None:
    put(storage, elsewhere(replace(living, launch="mine")))
    assert PlaceLock(storage).try_acquire("mine", "run") == Attempt(is_held=True)


def test_heartbeats_keep_the_lock_and_restore_a_file_that_was_removed(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place_lock, "HEARTBEAT_S", 0.01)
    lock = PlaceLock(storage)
    assert lock.try_acquire("mine", "").is_held
    lock.beat("run-1")

    def beats() -> int:
        owner = Owner.parse(read(storage) or b"")
        return owner.beat if owner is not None else -1

    until(lambda: beats() >= 2)
    owner = Owner.parse(read(storage) or b"")
    assert owner is not None
    assert owner.run == "run-1"
    found = None
    while found is None or not storage.exchange(FILE, found, None):
        found = read(storage)
    until(lambda: beats() > owner.beat)
    lock.release()
    assert read(storage) is None


def test_a_lock_that_was_taken_over_is_neither_kept_alive_nor_released(storage: Storage, living: Owner) -> None:
    lock = PlaceLock(storage)
    assert lock.try_acquire("mine", "run").is_held
    put(storage, living)
    lock.beat()
    assert read(storage) == living.to_json()
    with pytest.raises(OSError, match="is in use by another run"):
        lock.require("mine", "run")
    lock.release()
    assert read(storage) == living.to_json()


def test_a_lock_that_nobody_uses_any_more_is_released(storage: Storage) -> None:
    lock = PlaceLock(storage)
    assert lock.try_acquire("mine", "run").is_held
    del lock
    until(lambda: read(storage) is None)


def test_of_many_that_find_the_lock_of_a_dead_process_one_gets_it(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    for _ in range(20):
        put(storage, replace(Owner("dead", "run"), pid=1 << 22, process="1"))
        content = read(storage)
        locks = [PlaceLock(open_storage(tmp_path)) for _ in range(8)]

        def take(comm: Comm, locks: list[PlaceLock] = locks, content: bytes | None = content) -> bool:
            return locks[comm.rank]._take(content, Owner(f"launch-{comm.rank}", "run")).is_held

        assert sum(on_threads(8, take)) == 1
        for lock in locks:
            lock.release()
        assert read(storage) is None


def test_a_lock_is_not_written_through_a_link(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("years of work")
    (tmp_path / "place").mkdir()
    (tmp_path / "place" / FILE).symlink_to(target)
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        PlaceLock(open_storage(tmp_path / "place")).try_acquire("mine", "run")
    assert target.read_text() == "years of work"


# -- checkpoints and their lock -------------------------------------------------------------------


def test_a_run_is_refused_on_every_worker_while_another_uses_the_place(tmp_path: Path, living: Owner) -> None:
    put(open_storage(tmp_path), living)

    def body(comm: Comm) -> str:
        with pytest.raises(UsageError) as caught:
            open_checkpoints(tmp_path, comm=comm).resume()
        return str(caught.value)

    first, second = on_threads(2, body)
    assert first == second
    assert f"is in use by another run: process {living.pid} on" in first


def test_a_run_that_has_lost_the_place_does_not_publish(tmp_path: Path, living: Owner) -> None:
    checkpoints = open_checkpoints(tmp_path)
    checkpoints.resume()
    checkpoints.save(1)
    put(open_storage(tmp_path), living)
    with pytest.raises(SaveError, match=r"was not written: rank 0: OSError: .* is in use by another run: process"):
        checkpoints.save(2)
    assert published(tmp_path) == [1]
    checkpoints.close()
    assert read(open_storage(tmp_path)) == living.to_json()


def test_the_newer_run_of_one_process_has_the_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    older = open_checkpoints(tmp_path)
    older.resume()
    newer = open_checkpoints(tmp_path)
    newer.resume()
    assert "was used by another Run of this process, which cannot save any more" in capsys.readouterr().err
    newer.save(1)
    newer.close()
    assert not (tmp_path / FILE).exists()


def test_a_place_that_cannot_be_locked_is_said_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = open_checkpoints(tmp_path)
    monkeypatch.setattr(LocalStorage, "exchange", refuse)
    assert not checkpoints.resume()
    assert "cannot be locked (PermissionError: [Errno 13] Permission denied)" in capsys.readouterr().err
    with pytest.raises(SaveError, match="Permission denied"):
        checkpoints.save(1)
    monkeypatch.undo()
    checkpoints.save(2)
    assert published(tmp_path) == [2]
    checkpoints.close()


def test_a_worker_that_becomes_rank_0_takes_the_lock_over(tmp_path: Path, living: Owner) -> None:
    """Rank 0 of two workers is lost. The survivor is rank 0 of the next generation, and takes the lock of its own launch."""
    kept: dict[int, Any] = {}
    comms: dict[int, Comm] = {}

    def begin(comm: Comm) -> None:
        kept[comm.rank] = open_checkpoints(tmp_path, comm=comm)
        comms[comm.rank] = comm
        kept[comm.rank].resume()

    on_threads(2, begin)
    storage = open_storage(tmp_path)
    owner = Owner.parse(read(storage) or b"")
    assert owner is not None
    put(storage, elsewhere(replace(living, launch=owner.launch)))  # as if rank 0 had been a process of another machine
    survivor = kept[1]
    survivor._comm = survivor._ownership._comm = lambda: open_checkpoints(tmp_path)._comm()
    survivor.new_generation()
    until(lambda: survivor._ownership._lock.is_held)
    survivor.save(3)
    assert published(tmp_path) == [3]
    survivor.close()
    assert not (tmp_path / FILE).exists()


def test_a_run_id_is_kept_by_resumed_runs(tmp_path: Path) -> None:
    from lockstep.checkpoint.retention import Retention

    def ids() -> list[str]:
        retention = Retention(open_storage(tmp_path))
        return [retention.manifest(folder).run for folder in retention.published()]

    for step in (1, 2):
        checkpoints = open_checkpoints(tmp_path, OneWeight())
        checkpoints.resume()
        checkpoints.save(step)
        checkpoints.close()
    first, second = ids()
    assert first == second
    assert re.fullmatch(r"[0-9a-f]{16}", first)
    checkpoints = open_checkpoints(tmp_path, OneWeight(), resume="never")
    assert not checkpoints.resume()
    checkpoints.save(1)
    checkpoints.close()
    assert len(set(ids())) == 2
    assert len(folders(tmp_path)) == 3
