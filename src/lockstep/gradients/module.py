"""HookedModule: the parameters and buffers of the user's module at the time it is hooked, and the forward hook that marks it.

Knows nothing of workers. A parameter belongs to one hooked module at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from lockstep.errors import UsageError
from lockstep.gradients.buffers import Buffers

_hooked_params: Any = WeakIdKeyDictionary()  # the parameters of all hooked modules


class OutputWatcher(Protocol):
    """Receives what a module's forward returned."""

    def watch_outputs(self, outputs: Any) -> None: ...


class ForwardHook:
    """The forward hook of a hooked module: passes the outputs of every forward to ``owner``.

    A copied or unpickled hook has no owner: a deep copy of the model is not hooked.
    """

    def __init__(self, owner: OutputWatcher | None = None) -> None:
        self.owner = owner

    def __call__(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        if torch.compiler.is_compiling() or self.owner is None:
            return
        self.owner.watch_outputs(outputs)

    def __deepcopy__(self, memo: Any) -> ForwardHook:
        return ForwardHook()

    def __reduce__(self) -> tuple[type[ForwardHook], tuple[()]]:
        return ForwardHook, ()


class HookedModule:
    """A module's parameters and buffers, without those named in ``ignore``.

    ``named``: all parameters with their names. ``params`` and ``names``: those that can have gradients. ``sparse``: indices in
    ``params`` of those that get sparse gradients.
    """

    def __init__(self, module: nn.Module, ignore: Sequence[str] = ()) -> None:
        self._module = module
        self.named = parameters_of(module, ignore)
        with_gradient = [(name, p) for name, p in self.named if p.is_floating_point() or p.is_complex()]
        self.names, self.params = [name for name, _ in with_gradient], [p for _, p in with_gradient]
        self.buffers = Buffers(module, ignore)
        embeddings = (m for m in module.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse)
        sparse = {id(embedding.weight) for embedding in embeddings}
        self.sparse = frozenset(i for i, p in enumerate(self.params) if id(p) in sparse)
        self._handles: list[RemovableHandle] = []

    def hook(self, owner: OutputWatcher) -> None:
        """Register the forward hook. From now on no other module may hook these parameters."""
        called = [self._module]
        if isinstance(self._module, (nn.ModuleList, nn.ModuleDict)):
            called += self._module.children()  # the container itself has no forward; its hook only marks it
        self._handles = [module.register_forward_hook(ForwardHook(owner)) for module in called]
        for _, param in self.named:
            _hooked_params[param] = True

    def unhook(self) -> None:
        """Undo ``hook``. May be called twice."""
        if self._handles:
            for handle in self._handles:
                handle.remove()
            self._handles = []
            for _, param in self.named:
                _hooked_params.pop(param, None)

    def require_unchanged(self) -> None:
        """Raises UsageError if the module does not have the parameters and persistent buffers that it had when it was hooked."""
        changed = self.buffers.added_or_removed()
        if changed:
            raise UsageError(
                f"buffer {changed[0]} was added or removed after Run(...) was created, so Run cannot average it. Register it with "
                "a tensor before Run(...), or with persistent=False if it is a cache that every worker can compute for itself."
            )
        now = list(self._module.named_parameters())
        if [id(p) for _, p in now] != [id(p) for _, p in self.named]:
            shown = ", ".join(sorted({name for name, _ in self.named} ^ {name for name, _ in now})[:3])
            raise UsageError(
                f"the model was changed after Run(...) was created: {shown or 'a parameter was replaced'}. Run cannot average the "
                "gradients of the new parameters. Change the model first, then create the optimizer and the Run."
            )


def parameters_of(module: nn.Module, ignore: Sequence[str]) -> list[tuple[str, nn.Parameter]]:
    """Returns each parameter once, in registration order, under its first name (tied parameters have several names).

    Raises:
        UsageError: If a parameter cannot be hooked, if a name in ``ignore`` does not exist, or if there is nothing to train.
    """
    known = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    known |= {name for name, _ in module.named_buffers(remove_duplicate=False)}
    unknown = sorted(set(ignore) - known)
    if unknown:
        some = ", ".join(sorted(known)[:8])
        raise UsageError(f"ignore names {unknown[0]!r}, but this module has no such parameter or buffer. It has: {some}, ...")
    found = []
    for name, param in module.named_parameters():
        if name in ignore:
            continue
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise UsageError(f"parameter {name} has no shape yet (a lazy module). Run one batch through the module first.")
        if type(param.data) is not Tensor and type(param.data) is not nn.Parameter:
            raise UsageError(f"parameter {name} is a {type(param.data).__name__}; only plain tensors can be replicated.")
        if param in _hooked_params:
            raise UsageError(
                f"parameter {name} belongs to another replicated module or Run already; it would be averaged twice. "
                "Close the other one first, or pass one module that contains both."
            )
        found.append((name, param))
    if not any(param.is_floating_point() or param.is_complex() for _, param in found):
        raise UsageError(f"this {type(module).__name__} has no parameters to train. Pass the model itself, not a loss.")
    return found


def any_hooked(module: nn.Module) -> bool:
    """Whether a parameter of ``module`` belongs to a hooked module."""
    return any(param in _hooked_params for param in module.parameters())


def device_of(params: Sequence[Tensor]) -> torch.device:
    """Returns the first CUDA device among the parameters, or the device of the first parameter if there is none."""
    return next((p.device for p in params if p.is_cuda), params[0].device)
