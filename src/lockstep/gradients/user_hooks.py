"""UserHooks: runs the user's post-accumulate-grad hooks when the averaged gradients are there.

A hook that was registered with ``param.register_post_accumulate_grad_hook`` runs inside backward, when this rank's own gradient is
complete. If the hook steps an optimizer and frees the gradient, the ranks would take different steps. UserHooks therefore replaces
each such hook by a ``DeferredHook``, which does nothing inside backward, and calls the hooks after the last bucket was averaged.
The optimizers of torch's ``_apply_optimizer_in_backward`` are treated in the same way.

Knows nothing of buckets or workers. A step in which no hook was registered costs nothing.
"""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_TORCH_MODULE = "torch.distributed.optim.apply_optimizer_in_backward"


class DeferredHook:
    """A hook of the user. Autograd calls this object, which does nothing; UserHooks calls ``hook``."""

    def __init__(self, hook: Callable[[Tensor], Any]) -> None:
        self.hook = hook

    def __call__(self, param: Tensor) -> None: ...


class HookDict(OrderedDict[int, Any]):
    """The hooks of one parameter, in place of torch's dict: a hook that is registered later is deferred at once."""

    index = 0
    owner: Callable[[], UserHooks | None] | None = None
    """A weak reference. None: hooks are not deferred."""

    def __setitem__(self, key: int, hook: Any) -> None:
        owner = None if self.owner is None else self.owner()
        super().__setitem__(key, hook if owner is None else owner.defer(self.index, hook))


def prepare(params: Sequence[Any]) -> None:
    """Give each parameter a HookDict, if it has no hooks yet. Call it before AutogradHooks registers its own hooks."""
    for param in params:
        if param._post_accumulate_grad_hooks is None:
            param._post_accumulate_grad_hooks = HookDict()


class UserHooks:
    """The user's hooks on ``params``, deferred. ``own``: for each parameter, the key of the hook of AutogradHooks."""

    def __init__(self, params: Sequence[Any], own: Sequence[int]) -> None:
        self._params = params
        self._hooks: list[dict[int, Any]] = [param._post_accumulate_grad_hooks for param in params]
        self._indices: dict[int, None] = {}
        """The parameters that have deferred hooks."""
        self._own = own
        self._plain = [index for index, hooks in enumerate(self._hooks) if not isinstance(hooks, HookDict)]
        """The parameters that had hooks before ``prepare``. Their dict is torch's, because the user's handles refer to it."""
        for index, hooks in enumerate(self._hooks):
            self._defer_all(index)
            if isinstance(hooks, HookDict):
                hooks.index, hooks.owner = index, weakref.ref(self)
        self.collect()

    def defer(self, index: int, hook: Any) -> DeferredHook:
        """The user has registered ``hook``. Returns what autograd shall call instead."""
        self._indices[index] = None
        return hook if isinstance(hook, DeferredHook) else DeferredHook(hook)

    def collect(self) -> list[int]:
        """Defer hooks of which ``defer`` was not told. Called in every forward, and when a backward begins.

        Returns:
            The parameters, by index, on which the user has registered hooks since the last call.
        """
        found = [index for index in self._plain if self._defer_all(index)]
        module = sys.modules.get(_TORCH_MODULE)
        if module is not None and module.param_to_optim_hook_handle_map:
            self._adopt(module.param_to_optim_hook_handle_map)
        return found

    def run(self) -> None:
        """Call the hooks of every parameter that has a gradient. Called on all ranks when the gradients are averaged."""
        with torch.no_grad():
            for index in list(self._indices):
                param = self._params[index]
                for deferred in list(self._hooks[index].values()):
                    if isinstance(deferred, DeferredHook) and param.grad is not None:
                        deferred.hook(param)

    def restore(self) -> None:
        """Autograd calls the hooks again from now on."""
        for index, hooks in enumerate(self._hooks):
            if isinstance(hooks, HookDict):
                hooks.owner = None
            if index in self._indices:
                for key, hook in list(hooks.items()):
                    hooks[key] = hook.hook if isinstance(hook, DeferredHook) else hook
        self._plain, self._indices = [], {}

    def _defer_all(self, index: int) -> bool:
        """Defer the hooks of one parameter. Returns whether there were any that were not deferred."""
        hooks, found = self._hooks[index], False
        for key, hook in list(hooks.items()):
            if key != self._own[index] and not isinstance(hook, DeferredHook):
                hooks[key] = self.defer(index, hook)  # under the same key: the user's handle can still remove it
                found = True
        return found

    def _adopt(self, handles: Any) -> None:
        """Replace the hooks of ``_apply_optimizer_in_backward``, which are on autograd's nodes, by hooks on the parameters."""
        for index, param in enumerate(self._params):
            found = handles.pop(param, ())
            for handle in found:
                handle.remove()
            if found:
                param.register_post_accumulate_grad_hook(_step_and_free)
                self._defer_all(index)


def _step_and_free(param: Tensor) -> None:
    for optimizer in param._in_backward_optimizers:  # type: ignore[attr-defined]
        optimizer.step()
    param.grad = None
