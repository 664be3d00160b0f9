"""The ledger tells samples that were committed never or twice."""

from __future__ import annotations

from pathlib import Path

from lockstep.observe.ledger import Ledger, audit, read


def written(folder: Path) -> None:
    for worker, lanes in ((0, {0: [3, 1]}), (1, {1: [0]})):
        ledger = Ledger(str(folder), worker)
        ledger.holds(0, 0, (0, 0, 0), lanes)
        if worker == 0:
            ledger.commits(0, 0)
        ledger.holds(1, 0, (0, 0, 1), {0: [2]} if worker == 0 else {})
    ledger.holds(1, 1, (0, 0, 1), {0: [2]})  # again, in the next generation: the first time did not commit
    ledger.commits(1, 1)


def test_every_sample_once_is_fine_however_often_it_was_tried(tmp_path: Path) -> None:
    written(tmp_path)
    assert audit(read(tmp_path), 4) == []


def test_missing_and_repeated_samples_are_told(tmp_path: Path) -> None:
    written(tmp_path)
    lines = read(tmp_path)
    assert "never [4]" in audit(lines, 5)[0]
    again = {"holds": 2, "generation": 1, "place": (0, 0, 2), "lanes": {"0": [3]}}
    assert "more than once [3]" in audit([*lines, again, {"commits": 2, "generation": 1}], 4)[0]
    assert "step 1 committed in generations [0, 1]" in audit([*lines, {"commits": 1, "generation": 0}], 4)[0]
