"""UpdateWork: a captured function that makes the step: it clips gradients and calls optimizers and a GradScaler.

A recording contains addresses and plain numbers: those of the gradients (a change of workers moves them), of the optimizer's state,
and the hyperparameters. All of these are part of its key. What an optimizer computes on the host, such as its count of steps,
cannot be replayed: such an optimizer is not recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from copy import copy
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim.optimizer import Optimizer
from torch.utils._pytree import tree_leaves

from lockstep.gradients.cuda_graph import CannotRecord
from lockstep.gradients.lane_engine import LaneEngine
from lockstep.training.call_signature import addresses
from lockstep.training.captured_backward import Recorded
from lockstep.training.memory_reads import MemoryReads
from lockstep.training.step_gate import StepGate


class UpdateWork:
    """What a recording of an update needs, and what a replay must do besides. ``name``: of the user's function."""

    refuses_everything = True

    def __init__(self, engine: LaneEngine, gate: StepGate, name: str, is_in_loop: Callable[[], bool]) -> None:
        self._engine, self._gate, self._name, self._is_in_loop = engine, gate, name, is_in_loop
        self._states = _StateTensors()

    def is_now(self) -> bool:
        """Whether the gradients are averaged, and the calls in the function take effect. Otherwise it runs as it is."""
        return self._is_in_loop() and self._gate.may_step(f"{self._name}()")

    def objection(self) -> str | None:
        """Return why this call cannot be recorded, if that is known before."""
        if any(_stages(scaler) for scaler in self._gate.enabled_scalers):
            return f"scaler.unscale_() was called before {self._name}(): call it in {self._name}() too"
        if any((grad := param.grad) is not None and grad.layout is not torch.strided for param in self._engine.params):
            return "a parameter has a sparse gradient"
        return None

    def key(self) -> tuple[tuple[str, Hashable], ...]:
        optimizers = self._gate.optimizers
        return (
            ("the hyperparameters", tuple(_settings(optimizer) for optimizer in optimizers)),
            ("where the optimizers' states are", addresses(self._states.of(optimizers))),
            ("the gradients", tuple(0 if (g := param.grad) is None else g.data_ptr() for param in self._engine.params)),
            ("the settings of the scaler", tuple(_factors(scaler) for scaler in self._gate.enabled_scalers)),
        )

    def tensors(self) -> list[Tensor]:
        """Return the tensors whose addresses are part of ``key``."""
        settings = [value for optimizer in self._gate.optimizers for group in optimizer.param_groups for value in group.values()]
        gradients = [param.grad for param in self._engine.params if param.grad is not None]
        return [*gradients, *(value for value in settings if isinstance(value, Tensor)), *self._states.of(self._gate.optimizers)]

    def call(self, function: Callable[[], Any], reads: MemoryReads | None = None) -> Recorded:
        """Call the function for a recording, or with ``reads`` for a rehearsal.

        Leaves ``param.grad``, the states of the optimizers and the scalers as they were.
        """
        params = self._engine.params
        before = [param.grad for param in params]
        states = [dict(scaler._per_optimizer_states) for scaler in self._gate.enabled_scalers]
        self._gate.called.clear()
        try:
            optimizers = self._gate.optimizers
            with self._gate.recording(), self._engine.hooks_off(), _capturable(optimizers), _states_restored(optimizers):
                tensors = state_tensors(optimizers)
                returned = function()
                after = state_tensors(optimizers)
            reason = describe_replaced(tensors, after)
            if after.keys() != tensors.keys():
                reason = "it adds tensors to the state of an optimizer while it is recorded"
            if reason is not None:
                raise CannotRecord(reason)
            has_stepped = any(isinstance(each, (Optimizer, GradScaler)) for each in self._gate.called)
            cleared = self._cleared(before)
        finally:
            for scaler, state in zip(self._gate.enabled_scalers, states, strict=True):
                scaler._per_optimizer_states.clear()
                scaler._per_optimizer_states.update(state)
            for param, grad in zip(params, before, strict=True):
                param.grad = grad
        return Recorded(returned, [], cleared, has_stepped)

    def _cleared(self, before: list[Tensor | None]) -> list[int]:
        """Return the parameters whose gradients the function has set to None."""
        after = [param.grad for param in self._engine.params]
        if any(now is not None and now is not then for now, then in zip(after, before, strict=True)):
            raise CannotRecord("it puts other tensors into param.grad")
        if any(_stages(scaler) for scaler in self._gate.enabled_scalers):
            raise CannotRecord(f"scaler.update() is not called in it: call it in {self._name}() too")
        return [i for i, (now, then) in enumerate(zip(after, before, strict=True)) if now is None and then is not None]

    def after_replay(self, recorded: Recorded) -> None:
        """Do on the host what the function did: zero_grad() and the commit of the step."""
        for index in recorded.cleared:
            self._engine.params[index].grad = None
        if recorded.has_stepped:
            self._gate.stepped()


def host_state(optimizers: list[Optimizer]) -> dict[str, Any]:
    """Return what the optimizers keep on the host and may change in a step: counts in their state, groups and attributes."""
    found: dict[str, Any] = {}
    for place, optimizer in enumerate(optimizers):
        kind = f"{place} {type(optimizer).__name__}"
        for number, group in enumerate(optimizer.param_groups):
            found |= {f"{kind}: {k} of group {number}": v for k, v in group.items() if _is_number(v)}
        for number, (param, state) in enumerate(optimizer.state.items()):
            device = param.device.type if isinstance(param, Tensor) else ""
            if isinstance(state, dict):
                found |= {f"{kind}: {k} of parameter {number}": _number(v) for k, v in state.items() if _is_number(v, device)}
        found |= {f"{kind}: {k}": v for k, v in vars(optimizer).items() if type(v) in (int, float)}
    return found


def describe_host_work(before: dict[str, Any], after: dict[str, Any]) -> str | None:
    """Return which of an optimizer's numbers on the host have changed in a step, or None if none has."""
    changed = [name for name in after if name in before and repr(before[name]) != repr(after[name])]
    if not changed:
        return None
    kind, what = changed[0].partition(" ")[2].split(": ")
    return (
        f"{kind} counts on the host ({what.split(' of ')[0]}). Construct it with fused=True or capturable=True, if it has these "
        "arguments, and its count is on the GPU"
    )


StateTensors = dict[tuple[int, str, str, int], Tensor]
"""(place of the optimizer, its class, name, number of the parameter) -> tensor."""


def state_tensors(optimizers: list[Optimizer]) -> StateTensors:
    """Return the tensors in the states of the optimizers."""
    return {
        (place, type(optimizer).__name__, str(name), number): value
        for place, optimizer in enumerate(optimizers)
        for number, state in enumerate(optimizer.state.values())
        for name, value in (state.items() if isinstance(state, dict) else ())
        if isinstance(value, Tensor)
    }


def describe_replaced(before: StateTensors, after: StateTensors) -> str | None:
    """Return which tensor of an optimizer's state was replaced by another one in a step, or None if none was."""
    for key, tensor in before.items():
        _, kind, name, _ = key
        if after.get(key) is not tensor:
            return (
                f"{kind} puts another tensor into its state for `{name}` in a step, and a replay would write to the old one. Let "
                f"it write `{name}` in place (copy_), or call {kind}.step() outside of it"
            )
    return None


class _StateTensors:
    """All tensors in the states of the optimizers, also in lists and dicts. Looked for again only if an entry may be another."""

    def __init__(self) -> None:
        self._entries: list[Any] = []
        self._ids: list[int] = []
        self._is_nested = False
        self._tensors: list[Tensor] = []

    def of(self, optimizers: list[Optimizer]) -> list[Tensor]:
        states = [state for optimizer in optimizers for state in optimizer.state.values()]
        entries = [*chain.from_iterable([state.values() if isinstance(state, dict) else (state,) for state in states])]
        ids = [*map(id, entries)]
        if ids != self._ids or self._is_nested:
            self._entries, self._ids = entries, ids  # the entries are kept, so that their ids belong to them
            self._is_nested = any(isinstance(entry, (list, tuple, dict)) for entry in entries)
            self._tensors = [value for value in tree_leaves(entries) if isinstance(value, Tensor)]
        return self._tensors


@contextmanager
def _states_restored(optimizers: list[Optimizer]) -> Iterator[None]:
    """At the end, put back what the states contained: tensors that a recording has put there do not have their values."""
    before = [(optimizer.state, {param: copy(state) for param, state in optimizer.state.items()}) for optimizer in optimizers]
    try:
        yield
    finally:
        for optimizer, (state, values) in zip(optimizers, before, strict=True):
            optimizer.state = state
            for param in [param for param in state if param not in values]:
                del state[param]
            for param, value in values.items():
                if isinstance(value, dict):
                    state[param].clear()
                    state[param].update(value)


def describe_settings(before: Any, after: Any) -> str:
    """Return which hyperparameter differs in two keys of ``UpdateWork``, and what to do."""
    for (kind, groups), (_, others) in zip(before, after, strict=True):
        for group, other in zip(groups, others, strict=True):
            for (name, value), (_, now) in zip(group, other, strict=False):
                if value != now:
                    return (
                        f"{kind}'s {name} is a number on the host, and it changes in every step. Pass {name}=torch.tensor(..., "
                        'device="cuda") and fused=True, if the optimizer takes them: schedulers then change it in place'
                    )
    return "the hyperparameters change in every step"


def _settings(optimizer: Optimizer) -> Hashable:
    groups = tuple(
        tuple((name, _setting(value)) for name, value in group.items() if name not in ("params", "param_names"))
        for group in optimizer.param_groups
    )
    return type(optimizer).__name__, groups


def _setting(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return ("number", _number(value)) if value.device.type == "cpu" and value.numel() == 1 else _address(value)
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return value  # type: ignore[no-any-return]


def _factors(scaler: GradScaler) -> Hashable:
    return scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()


def _stages(scaler: GradScaler) -> bool:
    """Whether the scaler has done a part of a step: unscale_() without step(), or step() without update()."""
    return any(state["stage"] is not OptState.READY for state in scaler._per_optimizer_states.values())


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _is_number(value: Any, device: str = "") -> bool:
    """Whether ``value`` is a number on the host. A tensor of a parameter on ``device`` is not, if it is there too."""
    if isinstance(value, Tensor):
        return value.device.type == "cpu" != device and value.numel() == 1
    return type(value) in (int, float)


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value


@contextmanager
def _capturable(optimizers: list[Optimizer]) -> Iterator[None]:
    """Let fused optimizers be recorded: they keep their count on the GPU anyway, but torch asks for ``capturable=True``."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    changed = [group for group in groups if group.get("fused") and group.get("capturable") is False]
    try:
        for group in changed:
            group["capturable"] = True
        yield
    finally:
        for group in changed:
            group["capturable"] = False
