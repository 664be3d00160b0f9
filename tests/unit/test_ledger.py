"""The ledger's audit finds samples that were committed never or more than once, and refuses a ledger without commits."""

from __future__ import annotations

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
