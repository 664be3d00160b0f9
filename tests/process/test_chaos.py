"""Random schedules of faults against real runs of four workers (tests/chaos.py) end with the bits of an undisturbed run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos import play


@pytest.mark.parametrize("seed", range(25))
def test_whatever_happens_to_workers_the_weights_have_the_same_bits(seed: int, expected: str, tmp_path: Path) -> None:
    play(tmp_path / "run", seed, expected)
