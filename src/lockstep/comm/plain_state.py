"""State dicts as plain data: a JSON skeleton and a list of tensors, and back. No pickle, so nothing in it can run.

Knows what a state dict may hold: dicts (with keys of str, int, float, bool or None), lists, tuples, Counters, tensors and plain
values. Anything else is a ``UsageError`` that names where it lies.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from lockstep.comm.base import bits
from lockstep.errors import UsageError

_PLAIN = (str, int, bool, type(None))


Path = tuple[str, ...]


class Stateful(Protocol):
    """A training run whose state can be captured as plain data and restored."""

    settings: dict[str, Any]

    def capture(self) -> dict[str, Any]: ...

    def restore(self, state: Mapping[str, Any], *, resumes: bool = False) -> None: ...

    def replicated(self) -> dict[str, Any]: ...

    def weights(self) -> dict[str, Tensor]: ...

    def persistent(self) -> set[str]: ...

    def aliases(self) -> dict[str, str]: ...


def flatten(value: Any, name: str) -> tuple[str, list[Tensor]]:
    """(skeleton, tensors). ``name`` begins the path in error messages."""
    skeleton, tensors, _ = flatten_named(value, name)
    return skeleton, tensors


def flatten_named(value: Any, name: str) -> tuple[str, list[Tensor], list[Path]]:
    """(skeleton, tensors, the keys that lead to each)."""
    packed, tensors, paths = pack(value, name)
    return json.dumps(packed), tensors, paths


def pack(value: Any, name: str) -> tuple[Any, list[Tensor], list[Path]]:
    """The same, but the skeleton is not yet text: values that JSON can hold, and that nobody else holds."""
    found: list[tuple[Path, Tensor]] = []
    packed = _pack(value, name, (), found)
    return packed, [tensor for _, tensor in found], [path for path, _ in found]


def unflatten(skeleton: str, tensors: Sequence[Tensor]) -> Any:
    return _unpack(json.loads(skeleton), tensors)


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """ "float32", where str() is slow and says "torch.float32"."""
    return str(dtype).removeprefix("torch.")


def digest(skeleton: str, tensors: Sequence[Tensor]) -> bytes:
    """Equal exactly if every bit is."""
    sha = hashlib.sha256(skeleton.encode())
    for tensor in tensors:
        sha.update(f"{tensor.dtype}{list(tensor.shape)}".encode())
        sha.update(buffer_of(tensor))
    return sha.digest()


def buffer_of(tensor: Tensor) -> Any:
    """A tensor's bytes, for whoever reads a buffer; without a copy where it lies contiguous on the host."""
    flat = bits(tensor.detach().contiguous().cpu())
    if flat.numel() == 0:
        return b""
    memory = (ctypes.c_char * flat.numel()).from_address(flat.data_ptr())
    memory._owner = flat  # type: ignore[attr-defined]  # keeps it alive
    return memory


def _pack(value: Any, name: str, at: Path, found: list[tuple[Path, Tensor]]) -> Any:
    if isinstance(value, Tensor):
        found.append((at, value))
        return {"tensor": [len(found) - 1, dtype_name(value.dtype), list(value.shape), value.device.type]}
    if isinstance(value, float):
        return {"float": value.hex()}
    if isinstance(value, _PLAIN) and not type(value).__module__.startswith("numpy"):
        return value
    if isinstance(value, Mapping):
        kind = "counter" if isinstance(value, Counter) else "dict"
        return {
            kind: [
                [_pack(k, f"{name}, a key", at, found), _pack(v, f"{name}[{k!r}]", (*at, str(k)), found)] for k, v in value.items()
            ]
        }
    if isinstance(value, (list, tuple)):
        packed = [_pack(item, f"{name}[{i}]", (*at, str(i)), found) for i, item in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": packed}
    raise UsageError(
        f"{name} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be sent to another worker or written to a "
        "checkpoint as plain data. Keep tensors and plain values there, or leave this object out of Run."
    )


def _unpack(packed: Any, tensors: Sequence[Tensor]) -> Any:
    if not isinstance(packed, dict):
        return packed
    ((kind, inside),) = packed.items()
    if kind == "tensor":
        return tensors[inside[0]]
    if kind == "float":
        return float.fromhex(inside)
    if kind in ("dict", "counter"):
        found = {_unpack(k, tensors): _unpack(v, tensors) for k, v in inside}
        return Counter(found) if kind == "counter" else found
    items = [_unpack(item, tensors) for item in inside]
    return tuple(items) if kind == "tuple" else items


def empty_tensors(skeleton: str, where: str) -> list[Tensor]:
    """Tensors of the shapes and dtypes that a skeleton names, to receive into: on the host if they lay there, else on ``where``."""
    found: dict[int, Tensor] = {}

    def visit(packed: Any) -> None:
        if isinstance(packed, dict):
            ((kind, inside),) = packed.items()
            if kind == "tensor":
                number, dtype, shape, device = inside
                found[number] = torch.empty(shape, dtype=getattr(torch, dtype), device="cpu" if device == "cpu" else where)
            elif kind != "float":
                for item in inside:
                    for part in item if kind in ("dict", "counter") else [item]:
                        visit(part)

    visit(json.loads(skeleton))
    return [found[number] for number in range(len(found))]
