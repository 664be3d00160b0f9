"""OuterVariables: the variables outside a captured function that its code reads by name: global ones, and of enclosing functions.

The function may be wrapped: by a decorator, functools.partial, a method, an object with ``__call__``. Python functions in the
variables of enclosing functions, and global ones of the same module, belong to its code, because it may call them.
"""

from __future__ import annotations

import dis
from collections.abc import Hashable, Iterator
from contextlib import suppress
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor

from lockstep.training.call_signature import PLAIN

_MOST_FUNCTIONS = 64
"""How many functions are looked into at most."""


class OuterVariables:
    """The outer variables of ``function``.

    A recording keeps their values: a number is part of what was recorded, and a tensor is read where it was. Attributes
    (``config.scale``), and what functions of other modules read, are not known.
    """

    def __init__(self, function: Any) -> None:
        self._function = function
        self._globals: dict[tuple[int, str], dict[str, Any]] | None = None
        self._cells: dict[int, tuple[str, Any]] = {}

    def values(self) -> tuple[tuple[str, Hashable], ...]:
        """Return the name and value of each that is a plain value or a tensor. Of a tensor: where it is, unless it is a number."""
        found = [(name, _of(value)) for name, value in self._found()]
        return tuple((name, value) for name, value in found if value is not None)

    def tensors(self) -> list[Tensor]:
        """Return those that are tensors."""
        return [value for _, value in self._found() if isinstance(value, Tensor)]

    def _found(self) -> Iterator[tuple[str, Any]]:
        if self._globals is None:  # not before the first call: the function may name what is defined below it
            self._globals = {}
            self._look_into(self._function, {})
        for (_, name), variables in self._globals.items():
            if name in variables:
                yield name, variables[name]
        for name, cell in self._cells.values():
            with suppress(ValueError):  # not assigned yet
                yield name, cell.cell_contents

    def _look_into(self, value: Any, seen: dict[int, Any]) -> None:
        """Note the variables that a callable reads, and the functions that it may call. ``seen`` contains what was looked into."""
        if id(value) in seen or len(seen) == _MOST_FUNCTIONS:
            return
        seen[id(value)] = value
        if isinstance(value, FunctionType):
            self._note(value, seen)
        elif isinstance(value, MethodType):
            self._look_into(value.__func__, seen)
        elif isinstance(value, partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                if part is value.func or _is_function(part):
                    self._look_into(part, seen)
        elif isinstance(type(value).__call__, FunctionType):
            self._look_into(type(value).__call__, seen)
        wrapped = getattr(value, "__dict__", {}).get("__wrapped__")
        if wrapped is not None:
            self._look_into(wrapped, seen)

    def _note(self, function: FunctionType, seen: dict[int, Any]) -> None:
        assert self._globals is not None
        variables = function.__globals__
        cells = list(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        self._cells |= {id(cell): (name, cell) for name, cell in cells}
        called = []
        for _, cell in cells:
            with suppress(ValueError):
                called.append(cell.cell_contents)
        if str(variables.get("__name__")).partition(".")[0] != "torch":
            names = sorted(set(_global_names(function.__code__)))
            self._globals |= {(id(variables), name): variables for name in names}
            called += [
                each for name in names if isinstance(each := variables.get(name), FunctionType) and each.__globals__ is variables
            ]
        for each in called:
            if _is_function(each):
                self._look_into(each, seen)


def _is_function(value: Any) -> bool:
    return isinstance(value, (FunctionType, MethodType, partial))


def _of(value: Any) -> Hashable | None:
    if isinstance(value, Tensor):
        if value.device.type == "cpu" and value.numel() == 1:
            return ("number", value.item())
        if value.layout is not torch.strided:
            return ("tensor", id(value))
        return ("tensor", value.data_ptr(), value.shape, value.stride(), value.dtype)
    return (type(value), value) if isinstance(value, PLAIN) else None


def _global_names(code: CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield str(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _global_names(constant)
