"""The ledger's audit finds samples that were committed never or more than once, and refuses a ledger without commits."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lockstep.errors import UsageError
from lockstep.observe.ledger import Ledger, audit, read


def write_two_steps(folder: Path) -> None:
    """One epoch of samples 0 to 3 on two workers. Step 1 fails in generation 0 and commits in generation 1."""
    for worker, lanes in ((0, {0: [3, 1]}), (1, {1: [0]})):
        ledger = Ledger(str(folder), worker)
        ledger.record_samples(0, 0, (0, 0, 0), lanes)
        if worker == 0:
            ledger.record_commit(0, 0)
        ledger.record_samples(1, 0, (0, 0, 1), {0: [2]} if worker == 0 else {})
    ledger.record_samples(1, 1, (0, 0, 1), {0: [2]})
    ledger.record_commit(1, 1)


def test_every_sample_committed_once_is_correct_however_often_it_was_tried(tmp_path: Path) -> None:
    write_two_steps(tmp_path)
    assert audit(read(tmp_path), 4, 1) == []


def test_missing_and_repeated_samples_are_reported(tmp_path: Path) -> None:
    write_two_steps(tmp_path)
    lines = read(tmp_path)
    assert "never [4]" in audit(lines, 5, 1)[0]
    repeated = {"kind": "samples", "step": 2, "generation": 1, "position": (0, 0, 2), "lanes": {"0": [3]}}
    assert "more than once [3]" in audit([*lines, repeated, {"kind": "commit", "step": 2, "generation": 1}], 4, 1)[0]
    assert "step 1 committed in generations [0, 1]" in audit([*lines, {"kind": "commit", "step": 1, "generation": 0}], 4, 1)[0]


def test_a_missing_epoch_is_reported(tmp_path: Path) -> None:
    write_two_steps(tmp_path)
    assert audit(read(tmp_path), 4, 2) == ["samples of 1 epochs were committed, and 2 were expected"]


def test_a_missing_ledger_is_an_error(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(UsageError, match="there is no ledger in"):
            read(folder)


def test_a_ledger_without_commits_is_reported(tmp_path: Path) -> None:
    ledger = Ledger(str(tmp_path), 0)
    assert "no step was committed: the ledger has 0 lines" in audit(read(tmp_path), 4, 1)[0]
    ledger.record_samples(0, 0, (0, 0, 0), {0: [0, 1, 2, 3]})
    assert "no step was committed: the ledger has 1 lines" in audit(read(tmp_path), 4, 1)[0]


def test_a_torn_line_is_left_out_and_the_rest_is_read(tmp_path: Path) -> None:
    write_two_steps(tmp_path)
    path = tmp_path / "0.jsonl"
    path.write_bytes(path.read_bytes() + b'{"kind": "commit", "st')
    assert audit(read(tmp_path), 4, 1) == []


def test_a_full_disk_warns_once_and_does_not_end_training(tmp_path: Path) -> None:
    (tmp_path / "0.jsonl").symlink_to("/dev/full")
    ledger = Ledger(str(tmp_path), 0)
    with pytest.warns(UserWarning, match=r"cannot be written \(No space left on device\)"):
        ledger.record_commit(0, 0)
    ledger.record_commit(1, 0)  # a second warning would be an error here


def test_a_folder_that_is_gone_warns_and_does_not_end_training(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="No such file or directory"):
        ledger = Ledger(str(tmp_path / "gone" / "ledger"), 0)
    ledger.record_commit(0, 0)


def test_after_a_torn_line_the_next_one_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(str(tmp_path), 0)
    write, room = os.write, [5]

    def write_some(file: int, data: bytes) -> int:
        if room[0] == 0:
            raise OSError(28, "No space left on device")
        count = write(file, data[: room[0]])
        room[0] -= count
        return count

    monkeypatch.setattr(os, "write", write_some)
    with pytest.warns(UserWarning, match="No space left"):
        ledger.record_commit(0, 0)
    room[0] = 1000
    ledger.record_commit(1, 0)
    monkeypatch.undo()
    assert [line["step"] for line in read(tmp_path)] == [1]
