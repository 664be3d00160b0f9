"""What a call of a captured function depends on: its arguments, and settings of torch. (And outer variables: outer_variables.py.)

A *structure* describes nested tuples, lists and dicts of tensors and plain values without the contents of the tensors. It can be
compared and hashed, so it serves as the key of a recording; and it can be filled with other tensors.

    take_apart((x, {"mask": m, "scale": 2}))  ->  a structure, [x, m]
    put_together(structure, [x2, m2])         ->  (x2, {"mask": m2, "scale": 2})
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable, Iterator, Sequence
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


def torch_settings(device: torch.device) -> tuple[Hashable, ...]:
    """Return the global settings that decide which kernels run on a GPU. Reading them takes a few microseconds."""
    backends: Any = torch.backends
    precision: Any = torch._C._get_fp32_precision_getter  # type: ignore[attr-defined]
    return (
        torch.is_autocast_enabled(device.type),
        torch.get_autocast_dtype(device.type),
        torch.get_default_dtype(),
        # not get_float32_matmul_precision() and allow_tf32: these raise if the script uses torch's newer settings
        *(precision("cuda", operation) for operation in ("all", "matmul", "conv", "rnn")),
        precision("generic", "all"),
        torch._C._get_cublas_allow_fp16_reduced_precision_reduction(),
        torch._C._get_cublas_allow_bf16_reduced_precision_reduction(),
        backends.cudnn.enabled,
        backends.cudnn.benchmark,
        backends.cudnn.deterministic,
        backends.cuda.flash_sdp_enabled(),
        backends.cuda.mem_efficient_sdp_enabled(),
        backends.cuda.math_sdp_enabled(),
        backends.cuda.cudnn_sdp_enabled(),
        torch.get_deterministic_debug_mode(),
    )


def _visit(value: Any, what: str, tensors: list[Tensor]) -> Hashable:
    if isinstance(value, Tensor):
        if not is_plain(value) or value.is_nested:
            raise CannotTakeApart(f"{what} is a {type(value).__name__} with layout {value.layout}, not a plain tensor")
        if value.requires_grad:
            owner = "of its own" if value.is_leaf else "for the function that computed it"
            raise CannotTakeApart(
                f"{what} requires a gradient {owner}, and a replay reads a copy of its values. Compute it in the captured "
                "function, or pass it without a gradient (detach)"
            )
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
