"""Fixtures of several unit tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lockstep.training import determinism


@pytest.fixture(autouse=True)
def _no_run_of_another_test_is_open() -> None:
    """A Run that an earlier test has left open (it raised on purpose) would keep its process-wide settings."""
    if determinism._open:
        determinism._open = 0
        determinism._restore()


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
