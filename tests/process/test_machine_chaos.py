"""Random schedules of faults against runs on three hosts (tests/machine_chaos.py) end with the bits of one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chaos import Expected, undisturbed
from tests.hosts import Hosts
from tests.machine_chaos import play


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Expected:
    return undisturbed(tmp_path_factory.mktemp("undisturbed") / "run", scaler=False)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_whatever_happens_to_machines_the_run_ends_as_if_nothing_had_happened(
    seed: int, expected: Expected, hosts: Callable[[int], Hosts], tmp_path: Path
) -> None:
    play(hosts(3), tmp_path / "run", seed, expected)
