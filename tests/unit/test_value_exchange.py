"""The mean of values of several workers, over loopback."""

from __future__ import annotations

import torch

from lockstep.training.value_exchange import mean_of_values
from tests.threads import on_threads


def test_the_mean_of_equal_float64_tensors_is_exactly_that_tensor() -> None:
    """Their sum, divided by their number, is not: 0.1 + 0.1 + 0.1 is more than 0.3, and three times 1e308 is infinite."""
    value = torch.tensor([0.1, 1e308, -0.0], dtype=torch.float64)
    assert not torch.equal((value + value + value) / 3, value)
    for mean in on_threads(3, lambda comm: mean_of_values(comm, value)):
        assert mean.dtype is torch.float64
        assert mean.numpy().tobytes() == value.numpy().tobytes()
