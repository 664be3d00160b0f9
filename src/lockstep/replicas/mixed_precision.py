"""LowPrecision: computes forward and backward with copies of the parameters in a lower precision; the parameters are kept.

The copies are made by ``param.to(dtype)`` in every forward, so that autograd casts their gradients back into ``param.grad``, in the
precision of the parameter. The module holds the copies during forward, and again during backward: activation checkpoints compute
parts of the forward anew there. At all other times, it holds the parameters themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.gradients.autograd_hooks import find_tensors, on_backward

Copies = dict[nn.Parameter, Tensor]


class LowPrecision:
    """Copies of the floating-point parameters of ``module`` in ``dtype``, without those named in ``ignore``."""

    def __init__(self, module: nn.Module, dtype: torch.dtype, ignore: Sequence[str]) -> None:
        self._dtype = dtype
        self._locations: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}  # a tied parameter has several
        for prefix, owner in module.named_modules():
            for name, param in owner._parameters.items():
                full = f"{prefix}.{name}" if prefix else name
                if param is not None and param.is_floating_point() and full not in ignore:
                    self._locations.setdefault(param, []).append((owner, name))
        self._rnns = [owner for owner in module.modules() if isinstance(owner, nn.RNNBase)]

    def copy(self) -> Copies:
        """Return new copies. Autograd casts their gradients into those of the parameters."""
        return {param: param.to(self._dtype) for param in self._locations}

    @contextmanager
    def use(self, copies: Copies) -> Iterator[None]:
        """The module holds the copies inside the block."""
        self._hold(copies)
        try:
            yield
        finally:
            self._hold({})

    def use_in_backward(self, copies: Copies, outputs: Any) -> None:
        """The module holds the copies inside every backward that reaches ``outputs``."""
        if torch.is_grad_enabled():
            for tensor in find_tensors(outputs):
                on_backward(tensor, lambda: self._hold(copies), lambda: self._hold({}))

    def _hold(self, copies: Copies) -> None:
        """Put the copies into the module, or the parameter itself if there is no copy of it."""
        for param, locations in self._locations.items():
            held = copies.get(param, param)
            for owner, name in locations:
                owner._parameters[name] = held  # type: ignore[assignment]
        for rnn in self._rnns:
            rnn._flat_weights = [getattr(rnn, name) for name in rnn._flat_weights_names]


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Cast all floating-point tensors in ``value`` and its containers; other values stay as they are."""
    return torch.utils._pytree.tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, value)


def cast_buffers(module: nn.Module, dtype: torch.dtype, ignore: Sequence[str]) -> None:
    """Cast the floating-point buffers of ``module`` in place, without those named in ``ignore``."""
    for name, buffer in module.named_buffers():
        if buffer.is_floating_point() and name not in ignore:
            buffer.data = buffer.to(dtype)
