"""Damaged checkpoints (tests/fuzz.py): detected or harmless, never loaded wrongly."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tests.fuzz import Target, play


def test_damage_is_detected_or_harmless(tmp_path: Path) -> None:
    target = Target(tmp_path)
    target.restore()
    assert target.load() == "harmless"
    found = Counter(play(target, seed) for seed in range(500))
    assert found["detected"] > 250
    assert set(found) <= {
        "detected",
        "harmless",
        "not seen",
        "forged: taken",
        "forged: detected",
        "forged: refused",
        "forged: harmless",
    }
