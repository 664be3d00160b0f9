"""Captured functions on several workers, with a recorder that works on the host: the bits of one worker, also after a kill."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.capture_jobs import JOBS, LANES, Result, job
from tests.captured_run import GAPS, CapturedRun, require_survival
from tests.fake_graphs import capture_on_host
from tests.workers import run_workers


@pytest.fixture(scope="module")
def alone() -> Callable[[str], str]:
    known: dict[str, str] = {}

    def ask(name: str) -> str:
        if name not in known:
            ((plain, _),) = run_workers(job, 1, name, "cpu")
            known[name] = plain.digest
        return known[name]

    return ask


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", JOBS)
def test_captured_functions_have_the_bits_of_one_worker_without_them(name: str, size: int, alone: Callable[[str], str]) -> None:
    results: list[tuple[Result, Result]] = run_workers(job, size, name, "cpu", LANES, capture_on_host)
    for _, captured in results:
        assert captured.digest == alone(name)
        assert captured.replays["forward_backward"] > 0
        assert captured.replays["update"] > 0 or name == "accumulated"


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    return CapturedRun(tmp_path_factory.mktemp("plain"), 0, captured=False).result()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., CapturedRun]]:
    started: list[CapturedRun] = []

    def start_here(workers: int, **settings: Any) -> CapturedRun:
        started.append(CapturedRun(tmp_path / "run", workers, captured=True, **settings))
        return started[-1]

    yield start_here
    for run in started:
        run.stop()


@pytest.mark.parametrize("gap", GAPS)
def test_a_worker_killed_in_a_replayed_step_costs_nothing(gap: str, expected: str, start: Callable[..., CapturedRun]) -> None:
    require_survival(start(3, die_in=gap, hold_at=40), expected)
