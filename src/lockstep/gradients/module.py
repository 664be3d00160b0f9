"""What the engine must know of the user's module: its parameters, and that it is hooked.

Knows nothing of workers. A parameter belongs to one hooked module at most (``claim``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from lockstep.errors import UsageError

_claimed: Any = WeakIdKeyDictionary()  # parameters of hooked modules


def claim(params: Iterable[Tensor]) -> None:
    for param in params:
        _claimed[param] = True


def disclaim(params: Iterable[Tensor]) -> None:
    for param in params:
        _claimed.pop(param, None)


def parameters_of(module: nn.Module, ignore: Sequence[str]) -> list[tuple[str, nn.Parameter]]:
    """Each parameter once (tied ones have several names), in registration order."""
    known = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    known |= {name for name, _ in module.named_buffers(remove_duplicate=False)}
    unknown = sorted(set(ignore) - known)
    if unknown:
        some = ", ".join(sorted(known)[:8])
        raise UsageError(f"ignore names {unknown[0]!r}, which this module does not have. It has: {some}, ...")
    found = []
    for name, param in module.named_parameters():
        if name in ignore:
            continue
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise UsageError(f"parameter {name} has no shape yet (a lazy module). Run one batch through it before replicate().")
        if type(param.data) is not Tensor and type(param.data) is not nn.Parameter:
            raise UsageError(f"parameter {name} is a {type(param.data).__name__}; only plain tensors can be replicated.")
        if param in _claimed:
            raise UsageError(
                f"parameter {name} belongs to another replicated module or Run already; it would be averaged twice. "
                "Close that one first, or take the one module that contains both."
            )
        found.append((name, param))
    if not any(param.is_floating_point() or param.is_complex() for _, param in found):
        raise UsageError(f"this {type(module).__name__} has no parameters to train. Pass the model itself, not a loss.")
    return found


def device_of(params: Sequence[Tensor]) -> torch.device:
    """Where most of the work is: the first CUDA device among the parameters, else the CPU."""
    return next((p.device for p in params if p.is_cuda), params[0].device)


def sparse_of(module: nn.Module, params: Sequence[Tensor]) -> frozenset[int]:
    """Numbers of the parameters that will get sparse gradients."""
    weights = {id(m.weight) for m in module.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse}
    return frozenset(i for i, p in enumerate(params) if id(p) in weights)


class Watches(Protocol):
    """Who wants to see what a module's forward returned."""

    def watch_outputs(self, outputs: Any) -> None: ...


class Mark:
    """The forward hook by which a module is known as hooked, and its outputs to autograd.

    It copies and pickles as nothing: a deep copy of the model is not hooked.
    """

    def __init__(self, owner: Watches | None = None) -> None:
        self.owner = owner

    def __call__(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        if torch.compiler.is_compiling() or self.owner is None:
            return
        self.owner.watch_outputs(outputs)

    def __deepcopy__(self, memo: Any) -> Mark:
        return Mark()

    def __reduce__(self) -> tuple[type[Mark], tuple[()]]:
        return Mark, ()
