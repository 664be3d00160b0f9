"""StepGate: ``step()`` of optimizers, schedulers and a GradScaler does nothing until the step's gradients are averaged.

A worker with several lanes runs the loop body several times per step, and only its last micro-batch has gradients to step with.
The gate replaces methods of the objects it is given, and restores them in ``close``. It knows nothing of lanes or workers: it asks
``may_step`` before a call, and calls ``stepped`` after an optimizer's step.
"""

from __future__ import annotations

import inspect
import sys
import types
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from lockstep.errors import UsageError

_SCALER_FRAMES = {GradScaler.step.__code__, GradScaler._maybe_opt_step.__code__}


class StepGate:
    """The gated objects of one run.

    ``may_step(call)`` says whether a call takes effect, and may raise. ``stepped()`` is called after an optimizer's step, also if a
    GradScaler has skipped it. ``takes_closure()`` says whether an optimizer may call a closure, which runs backward() again.
    """

    def __init__(
        self,
        objects: Sequence[Any],
        params: Sequence[Tensor],
        may_step: Callable[[str], bool],
        stepped: Callable[[], None],
        takes_closure: Callable[[], bool],
    ):
        self._may_step, self._stepped, self._takes_closure = may_step, stepped, takes_closure
        self._restore: list[Callable[[], None]] = []
        self._params = params
        self.called: list[Any] = []
        """The objects of the last gated calls, whether or not a call took effect. An observer of a function clears it before."""
        self._is_recording = False
        self.objects = objects
        self.optimizers = [each for each in objects if isinstance(each, Optimizer)]
        self.scalers = [each for each in objects if isinstance(each, GradScaler)]
        self.enabled_scalers = [each for each in self.scalers if each.is_enabled()]
        """The others have no scale and no state."""
        _require_sense(objects, self.optimizers, params)
        for each in objects:
            if isinstance(each, Optimizer):
                self._gate(each, "step", self._optimizer_step)
            elif isinstance(each, GradScaler):
                self._gate(each, "step", self._scaler_step)
                self._gate(each, "update", self._plain)
                self._gate(each, "unscale_", self._plain)
            else:
                self._gate(each, "step", self._plain)
                self._gate(each, "state_dict", self._clean)  # a scheduler's state is its __dict__, which contains the gated methods

    def names(self) -> list[str]:
        """Return a name for each object, as messages show it."""
        kinds = [type(each).__name__ for each in self.objects]
        return [kind if kinds.count(kind) == 1 else f"{kind} {kinds[: at + 1].count(kind)}" for at, kind in enumerate(kinds)]

    def settings_hash(self) -> int:
        """Return a hash of the hyperparameters of all optimizers. It must be equal on all workers."""
        return zlib.crc32(repr(self.describe()).encode())

    def describe(self) -> list[Any]:
        """Return the plain hyperparameters of each parameter group."""
        return [
            [("parameters", len(group["params"])), *sorted((k, _plain(v)) for k, v in group.items() if _is_plain(v))]
            for optimizer in self.optimizers
            for group in optimizer.param_groups
        ]

    def require_known_parameters(self) -> None:
        """Require that optimizers update only the model's parameters: parameter groups may have been added."""
        _require_model(self.optimizers, self._params)

    # -- a function that is captured (training/captured_update.py) ----------------------------

    def may_step(self, call: str) -> bool:
        """Return whether gated calls take effect now. ``call`` names the function that makes them."""
        return self._may_step(call)

    def stepped(self) -> None:
        """Optimizers have stepped in a replay."""
        self._stepped()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """In this context gated calls are made without being asked for, and commit nothing: they are recorded."""
        self._is_recording = True
        try:
            yield
        finally:
            self._is_recording = False

    def _takes_effect(self, target: Any, call: str) -> bool:
        del self.called[:-32]  # nobody clears it in a loop without captured functions
        self.called.append(target)
        return self._is_recording or self._may_step(call)

    def _has_stepped(self) -> None:
        if not self._is_recording:
            self._stepped()

    def close(self) -> None:
        for restore in reversed(self._restore):
            restore()
        self._restore = []

    def _gate(self, target: Any, name: str, behave: Callable[..., Any]) -> None:
        before = getattr(target, name, None)
        if before is None:
            return
        own = name in vars(target)

        def gated(whose: Any, *args: Any, **kwargs: Any) -> Any:
            if whose is not target:  # a copy of the object, which belongs to no Run
                return getattr(type(whose), name)(whose, *args, **kwargs)
            return behave(target, before, f"{type(target).__name__}.{name}()", args, kwargs)

        gated.__name__, gated.__doc__, gated.__wrapped__ = name, before.__doc__, before  # type: ignore[attr-defined]
        gated._lockstep_gate = True  # type: ignore[attr-defined]
        if hasattr(before, "_wrapped_by_lr_sched"):
            gated._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # else the scheduler warns of an overridden step
        setattr(target, name, types.MethodType(gated, target))
        self._restore.append(lambda: setattr(target, name, before) if own else delattr(target, name))

    def _plain(self, target: Any, call: Callable[..., Any], what: str, args: Any, kwargs: Any) -> Any:
        return call(*args, **kwargs) if self._takes_effect(target, what) else None

    def _clean(self, target: Any, call: Callable[..., Any], what: str, args: Any, kwargs: Any) -> Any:
        return {k: v for k, v in call(*args, **kwargs).items() if not hasattr(v, "_lockstep_gate")}

    def _optimizer_step(self, target: Optimizer, call: Callable[..., Any], what: str, args: Any, kwargs: Any) -> Any:
        if any(callable(arg) for arg in (*args, *kwargs.values())) and not self._takes_closure():
            raise UsageError(
                f"{what} was given a closure, which would run backward() again, once per worker. Call backward() yourself, "
                f"then {what} without arguments; or use the loop over run.steps(...), in which a closure can loop over the lanes."
            )
        if _needs_closure(target) and not self._takes_closure():
            raise UsageError(
                f"{type(target).__name__} needs a closure, which runs backward() several times per step: a loop over "
                "run.shard(...) cannot do that. Use the loop over run.steps(...), and loop over the lanes in the closure."
            )
        self._require_known_scaler(what)
        if not self._takes_effect(target, what):
            return None
        result = call(*args, **kwargs)
        self._has_stepped()
        return result

    def _scaler_step(self, target: GradScaler, call: Callable[..., Any], what: str, args: Any, kwargs: Any) -> Any:
        if not self._takes_effect(target, what):
            return None
        result = call(*args, **kwargs)
        self._has_stepped()  # also if an inf made it skip the optimizer: every worker skips the step alike
        return result

    def _require_known_scaler(self, what: str) -> None:
        frame = sys._getframe(3)
        for _ in range(3):
            if frame.f_code in _SCALER_FRAMES and frame.f_locals.get("self") not in self.scalers:
                raise UsageError(
                    f"{what} was called by a GradScaler that Run does not know: it would update its scale once per lane, not per "
                    "step. Pass it to Run after the optimizer: lockstep.Run(model, optimizer, scaler, ...)."
                )
            if frame.f_back is None:
                return
            frame = frame.f_back


def _require_sense(objects: Sequence[Any], optimizers: Sequence[Optimizer], params: Sequence[Tensor]) -> None:
    for each in objects:
        kind = type(each).__name__
        if isinstance(each, nn.Module):
            raise UsageError(
                f"Run takes one model, but got a second one, a {kind}. Put both into one module, such as nn.ModuleDict."
            )
        if not callable(getattr(each, "step", None)):
            raise UsageError(
                f"Run takes the model, then optimizers, schedulers and a GradScaler; a {kind} has no step(). Leave it out."
            )
        if hasattr(getattr(each, "step"), "_lockstep_gate"):  # noqa: B009
            raise UsageError(f"this {kind} belongs to another Run already. Close the other Run first: run.close().")
        if isinstance(each, LRScheduler) and not any(each.optimizer is o for o in optimizers):
            raise UsageError(
                f"the optimizer of this {kind} is not among Run's arguments. Pass it too: lockstep.Run(model, opt, sched)."
            )
    if not optimizers:
        raise UsageError("Run needs the optimizers of the model. Pass them: lockstep.Run(model, optimizer, ...).")
    _require_model(optimizers, params)


def _require_model(optimizers: Sequence[Optimizer], params: Sequence[Tensor]) -> None:
    known = {id(p) for p in params}
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        for group in optimizer.param_groups:
            for param in group["params"]:
                if id(param) not in known:
                    raise UsageError(
                        f"{kind} updates a parameter of shape {list(param.shape)} that does not belong to the model: its "
                        "gradient would not be averaged. Put its module into the model, or leave the parameter out."
                    )


def _is_plain(value: Any) -> bool:
    return isinstance(value, (bool, int, float, str, tuple)) or (
        isinstance(value, Tensor) and value.numel() == 1 and not value.is_cuda
    )


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value


def _needs_closure(optimizer: Optimizer) -> bool:
    arguments = inspect.signature(type(optimizer).step).parameters
    closure = arguments.get("closure")
    return isinstance(optimizer, torch.optim.LBFGS) or (closure is not None and closure.default is inspect.Parameter.empty)
