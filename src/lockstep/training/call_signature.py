"""What a call of a captured function depends on: its arguments, and the variables outside it that it reads by name.

A *structure* describes nested tuples, lists and dicts of tensors and plain values without the contents of the tensors. It can be
compared and hashed, so it serves as the key of a recording; and it can be filled with other tensors.

    take_apart((x, {"mask": m, "scale": 2}))  ->  a structure, [x, m]
    put_together(structure, [x2, m2])         ->  (x2, {"mask": m2, "scale": 2})
"""

from __future__ import annotations

import dis
import enum
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from types import CodeType
from typing import Any

import torch
from torch import Tensor

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.memory_format, enum.Enum)

_TYPES = (Tensor, torch.nn.Parameter)


class CannotTakeApart(Exception):
    """A value is neither a tensor, nor plain, nor made of such values. The text says which and what it is."""


class Structure:
    """A nested value without the contents of its tensors. Two structures are equal if a recording for one serves the other."""

    __slots__ = ("_hash", "key")

    def __init__(self, key: Hashable) -> None:
        self.key, self._hash = key, hash(key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Structure) and self._hash == other._hash and self.key == other.key


def take_apart(value: Any, what: str) -> tuple[Structure, list[Tensor]]:
    """Return the structure of ``value`` and its tensors. ``what`` names the value in messages.

    Raises:
        CannotTakeApart: It contains something else.
    """
    tensors: list[Tensor] = []
    return Structure(_visit(value, what, tensors)), tensors


def put_together(structure: Structure, tensors: Sequence[Tensor]) -> Any:
    """Return the value that has this structure and these tensors."""
    return _build(structure.key, iter(tensors))


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return ``value`` with each tensor in tuples, lists and dicts changed. Other objects stay as they are."""
    if isinstance(value, Tensor):
        return change(value)
    if type(value) in (list, tuple):
        return type(value)(map_tensors(item, change) for item in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, change) for item in value))
    if type(value) is dict:
        return {name: map_tensors(item, change) for name, item in value.items()}
    return value


def empty_like(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on ``device`` to copy ``tensor`` into, with the same strides unless elements share memory."""
    if any(stride == 0 and extent > 1 for stride, extent in zip(tensor.stride(), tensor.shape, strict=True)):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def is_plain(tensor: Tensor) -> bool:
    """Whether the tensor is a view of one piece of memory: not sparse, and no subclass that keeps its values elsewhere."""
    return type(tensor) in _TYPES and tensor.layout is torch.strided


def addresses(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Return where each tensor is: the address of its memory, or that of the object if it is not plain. About 100 ns for each."""
    try:
        return tuple([tensor.data_ptr() if type(tensor) in _TYPES else id(tensor) for tensor in tensors])
    except RuntimeError:  # one is sparse
        return tuple([tensor.data_ptr() if is_plain(tensor) else id(tensor) for tensor in tensors])


def _visit(value: Any, what: str, tensors: list[Tensor]) -> Hashable:
    if isinstance(value, Tensor):
        if not is_plain(value) or value.is_nested:
            raise CannotTakeApart(f"{what} is a {type(value).__name__} with layout {value.layout}, not a plain tensor")
        if value.requires_grad and value.is_leaf:
            raise CannotTakeApart(f"{what} is a tensor that requires a gradient of its own")
        tensors.append(value)
        return ("tensor", value.shape, value.stride(), value.dtype)
    if isinstance(value, PLAIN):
        return ("value", type(value), value)
    if type(value) in (list, tuple):
        return (type(value), tuple(_visit(item, f"{what}[{i}]", tensors) for i, item in enumerate(value)))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return (type(value), tuple(_visit(item, f"{what}.{f}", tensors) for f, item in zip(value._fields, value, strict=True)))
    if type(value) is dict and all(isinstance(name, PLAIN) for name in value):
        return (dict, tuple(value), tuple(_visit(item, f"{what}[{name!r}]", tensors) for name, item in value.items()))
    raise CannotTakeApart(f"{what} is a {type(value).__name__}, not a tensor or a plain value, nor a tuple, list or dict of these")


def _build(key: Any, tensors: Iterator[Tensor]) -> Any:
    kind = key[0]
    if kind == "tensor":
        return next(tensors)
    if kind == "value":
        return key[2]
    if kind is dict:
        return dict(zip(key[1], [_build(item, tensors) for item in key[2]], strict=True))
    items = [_build(item, tensors) for item in key[1]]
    return kind(*items) if hasattr(kind, "_fields") else kind(items)


class OuterVariables:
    """The variables outside a function that its code reads by name: global ones, and those of enclosing functions.

    A recording keeps their values: a number is part of what was recorded, and a tensor is read where it was. Attributes
    (``config.scale``), and what functions called by it read, are not known.
    """

    def __init__(self, function: Any) -> None:
        function = getattr(function, "__func__", function)  # of a method
        code = getattr(function, "__code__", None)
        self._globals: dict[str, Any] = getattr(function, "__globals__", {})
        self._names = sorted(set(_global_names(code))) if code is not None else []
        cells = getattr(function, "__closure__", None) or ()
        self._cells = list(zip(code.co_freevars, cells, strict=True)) if code is not None else []

    def values(self) -> tuple[tuple[str, Hashable], ...]:
        """Return the name and value of each that is a plain value or a tensor. Of a tensor: where it is, unless it is a number."""
        found = [(name, _of(value)) for name, value in self._found()]
        return tuple((name, value) for name, value in found if value is not None)

    def tensors(self) -> list[Tensor]:
        """Return those that are tensors."""
        return [value for _, value in self._found() if isinstance(value, Tensor)]

    def _found(self) -> Iterator[tuple[str, Any]]:
        for name in self._names:
            if name in self._globals:
                yield name, self._globals[name]
        for name, cell in self._cells:
            with suppress(ValueError):  # not assigned yet
                yield name, cell.cell_contents


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
