"""Scaling many tensors gives the bits of scaling each."""

from __future__ import annotations

import pytest
import torch

from lockstep.gradients.partial_sums import multiply


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64])
def test_many_tensors_are_scaled_as_each_would_be(dtype: torch.dtype) -> None:
    """torch's own multi-tensor form rounds the factor to bf16 first: a third would be off by 0.2%."""
    tensors = [torch.randn(33, 7).to(dtype), torch.randn(5).to(dtype), torch.randn(()).to(dtype)]
    expected = [tensor * (1 / 3) for tensor in tensors]
    multiply(tensors, 1 / 3)
    assert all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True))
