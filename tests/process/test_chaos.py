"""Random schedules of faults against real runs (tests/chaos.py) end with the bits of an undisturbed run, and leave nothing."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.chaos import Expected, play, undisturbed


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Expected]:
    folder = tmp_path_factory.mktemp("undisturbed")
    return {scaler: undisturbed(folder / str(scaler), scaler=scaler) for scaler in (False, True)}


@pytest.mark.parametrize("seed", range(25))
def test_whatever_happens_the_run_ends_as_if_nothing_had_happened(seed: int, expected: dict[bool, Expected]) -> None:
    with tempfile.TemporaryDirectory(prefix="c") as folder:  # short: sockets of loader processes lie below it
        play(Path(folder) / "run", seed, expected)
