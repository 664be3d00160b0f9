"""Random fault schedules against real runs of four workers (tests/chaos.py): the bits of a run in which nothing happened."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.chaos import play, undisturbed

SCHEDULES = range(25)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Future[str]]]:
    """Two at a time: each is asleep half of its time."""
    expected = undisturbed(tmp_path_factory.mktemp("chaos") / "run")
    with ThreadPoolExecutor(2) as pool:
        yield {seed: pool.submit(play, tmp_path_factory.mktemp("chaos") / "run", seed, expected) for seed in SCHEDULES}


@pytest.mark.parametrize("seed", SCHEDULES)
def test_whatever_happens_to_workers_the_weights_have_the_same_bits(seed: int, played: dict[int, Future[str]]) -> None:
    played[seed].result(timeout=600)
