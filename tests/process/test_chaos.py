"""Random fault schedules against real runs of four workers (tests/chaos.py): the bits of a run in which nothing happened."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos import play, undisturbed


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    return undisturbed(tmp_path_factory.mktemp("chaos") / "run")


@pytest.mark.parametrize("seed", range(25))
def test_whatever_happens_to_workers_the_weights_have_the_same_bits(seed: int, expected: str, tmp_path: Path) -> None:
    play(tmp_path / "run", seed, expected)
