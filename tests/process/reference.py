"""What one process would get: the mean over ranks of each rank's gradients, computed on a plain copy."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

Grads = dict[str, Tensor | None]


def grads_of(model: nn.Module) -> Grads:
    return {name: None if p.grad is None else p.grad.detach().to_dense().clone() for name, p in model.named_parameters()}


def mean_grads(model: nn.Module, size: int, backward: Callable[[nn.Module, int], None], divisor: int | None = None) -> Grads:
    """``backward(model, rank)`` runs rank's part; a parameter that no rank touches stays None."""
    plain = copy.deepcopy(model)
    total: Grads = dict.fromkeys(dict(plain.named_parameters()))
    for rank in range(size):
        plain.zero_grad(set_to_none=True)
        backward(plain, rank)
        for name, grad in grads_of(plain).items():
            if grad is not None:
                so_far = total[name]
                total[name] = grad if so_far is None else so_far + grad
    return {name: None if grad is None else grad / (divisor or size) for name, grad in total.items()}


def require_grads(model: nn.Module, expected: Grads, tolerance: float = 1e-5) -> None:
    found = grads_of(model)
    for name, grad in expected.items():
        if grad is None:
            assert found[name] is None, f"{name} has a gradient where no rank used it"
        else:
            assert found[name] is not None, f"{name} has no gradient"
            torch.testing.assert_close(found[name], grad, atol=tolerance, rtol=tolerance, msg=lambda m, n=name: f"{n}: {m}")
