"""Fixtures of several unit tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lockstep.training import determinism


@pytest.fixture(autouse=True)
def _no_run_is_left_open() -> Iterator[None]:
    """A Run that a test leaves open would keep its process-wide settings, and other tests would run with them."""
    yield
    left = determinism._open
    if left:
        determinism._open = 0
        determinism._restore()
    assert left == 0, f"the test leaves {left} of its Runs open. Close each with run.close()"


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
