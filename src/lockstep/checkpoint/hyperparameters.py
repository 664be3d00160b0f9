"""Hyperparameters of optimizers, in a script and in a checkpoint: which differ, and which of the two is used. Pure functions.

A hyperparameter is a plain value in an optimizer's ``param_groups``. If a scheduler changes the learning rate, the ``initial_lr``
that it keeps in the group is the learning rate that the script asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

Hyperparameters = dict[str, list[dict[str, Any]]]
"""Optimizer -> for each of its groups: name -> value, as JSON holds it (tuples are lists)."""


def read_hyperparameters(objects: Mapping[str, Any]) -> Hyperparameters:
    """Return the hyperparameters in the state dicts of optimizers. Other objects are passed over."""
    return {
        name: [_of_group(group) for group in state["param_groups"]]
        for name, state in objects.items()
        if isinstance(state, Mapping) and isinstance(state.get("param_groups"), list)
    }


def _of_group(group: Mapping[str, Any]) -> dict[str, Any]:
    values = {name: _plain(value) for name, value in group.items() if name not in ("params", "initial_lr")}
    if "initial_lr" in group:
        values["lr"] = _plain(group["initial_lr"])
    return {name: value for name, value in values.items() if value is not ...}


def _plain(value: Any) -> Any:
    """Return the value as JSON holds it; ``...`` if it cannot."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 and not value.is_complex() else ...
    if isinstance(value, list | tuple):
        items = [_plain(item) for item in value]
        return ... if ... in items else items
    return value if type(value) in (str, int, float, bool, type(None)) else ...


def names_of(script: Hyperparameters) -> list[str]:
    return sorted({name for groups in script.values() for group in groups for name in group})


def describe_differences(script: Hyperparameters, saved: Hyperparameters) -> list[str]:
    """Return a text for each hyperparameter that differs, such as "AdamW lr: 0.1 in the script, 0.01 in the checkpoint"."""
    found = []
    for optimizer, groups in script.items():
        before = saved.get(optimizer, [])
        for number, (now, then) in enumerate(zip(groups, before, strict=False)):
            where = f"{optimizer} group {number}" if len(groups) > 1 else optimizer
            for name in now.keys() & then.keys():
                if now[name] != then[name]:
                    found.append(f"{where} {name}: {now[name]!r} in the script, {then[name]!r} in the checkpoint")
    return sorted(found)


def override(objects: Mapping[str, Any], script: Hyperparameters, names: Sequence[str]) -> None:
    """Put the script's values of ``names`` into a checkpoint's state dicts, in place.

    If a scheduler changes the learning rate, its present value is scaled by the ratio of the two initial values.
    """
    for optimizer, groups in script.items():
        saved = objects[optimizer]["param_groups"] if optimizer in objects else []
        factors: dict[float, float] = {}
        for now, then in zip(groups, saved, strict=False):
            for name in names:
                if name == "lr" and "lr" in now and "initial_lr" in then:
                    factors[then["initial_lr"]] = now["lr"]
                    then["lr"] = _scaled(then["lr"], then["initial_lr"], now["lr"])
                    then["initial_lr"] = now["lr"]
                elif name in now and name in then and not isinstance(then[name], Tensor):
                    then[name] = tuple(now[name]) if isinstance(then[name], tuple) else now[name]
        for state in objects.values():
            _scale_scheduler(state, factors)


def _scaled(value: Any, before: float, after: float) -> Any:
    return value if before == after else after if value == before or not before else value * (after / before)


def _scale_scheduler(state: Any, new_of: Mapping[float, float]) -> None:
    """Change the learning rates that a scheduler keeps, also those of the schedulers inside it."""
    if isinstance(state, list | tuple):
        for each in state:
            _scale_scheduler(each, new_of)
    elif isinstance(state, dict) and new_of:
        base = state.get("base_lrs")
        if isinstance(base, list) and all(lr in new_of for lr in base):
            if isinstance(last := state.get("_last_lr"), list) and len(last) == len(base):
                state["_last_lr"] = [_scaled(lr, old, new_of[old]) for lr, old in zip(last, base, strict=True)]
            state["base_lrs"] = [new_of[lr] for lr in base]
        for each in state.values():
            _scale_scheduler(each, new_of)
