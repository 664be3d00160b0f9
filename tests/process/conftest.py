"""Fixtures of the process tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.hosts import Hosts, missing
from tests.launch import LaunchedRun
from tests.launch import launch as start
from tests.training_run import TrainingRun, undisturbed_result


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., LaunchedRun]]:
    """``tests.launch.launch`` in the test's folder. Kills what still runs when the test is over."""
    started: list[LaunchedRun] = []

    def launch_here(script: str | Path, *options: str, folder: Path = tmp_path, **settings: Any) -> LaunchedRun:
        started.append(start(script, *options, folder=folder, **settings))
        return started[-1]

    yield launch_here
    for run in started:
        run.stop()


@pytest.fixture
def train(tmp_path: Path) -> Iterator[Callable[..., TrainingRun]]:
    """Starts tests/scripts/train.py: ``train(workers, *options, **settings)``. Kills what still runs when the test is over."""
    started: list[TrainingRun] = []

    def train_here(workers: int, *options: str, folder: str = "run", **settings: Any) -> TrainingRun:
        started.append(TrainingRun(tmp_path / folder, workers, *options, **settings))
        return started[-1]

    yield train_here
    for run in started:
        run.stop()


@pytest.fixture
def hosts() -> Iterator[Callable[[int], Hosts]]:
    """``hosts(3)``: three machines, each a network namespace. Everything on them ends with the test."""
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    with ExitStack() as stack:
        yield lambda count: stack.enter_context(Hosts(count))


@pytest.fixture(scope="session")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the state after a run of tests/scripts/train.py to which nothing happens."""
    return undisturbed_result(tmp_path_factory.mktemp("undisturbed"))
