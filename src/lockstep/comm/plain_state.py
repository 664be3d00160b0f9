"""State dicts as plain data: a skeleton in JSON and a list of tensors, and back. No pickle, so reading one cannot run code.

A state dict may contain dicts (with keys of type str, int, float, bool or None), lists, tuples, Counters, tensors and plain values.
Anything else is a ``UsageError`` that names the path to it.
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

KeyPath = tuple[str, ...]
"""The keys and indices that lead to a tensor in a state dict."""


class Stateful(Protocol):
    """A training run whose state can be captured as plain data and restored."""

    settings: dict[str, Any]
    """The settings that define the arithmetic, such as lanes. A checkpoint records them, and a run that resumes compares them."""

    def capture(self) -> dict[str, Any]:
        """Return the whole state. Its tensors are those of the run, not copies."""

    def restore(self, state: Mapping[str, Any], *, resumes: bool = False) -> None:
        """Put a captured state in place of this one.

        ``resumes``: the state is a checkpoint's, and the script has not reached the place yet at which the checkpoint was made.
        There the state is restored again, without ``resumes``, if it differs.
        """

    def replicated(self) -> dict[str, Any]:
        """Return the part of the state that must have the same bits on every worker."""

    def weights(self) -> dict[str, Tensor]:
        """Return the model's state dict, with each tensor under one name."""

    def persistent(self) -> set[str]:
        """Return the names in the model's state dict: a buffer that is not among them is not persistent."""

    def aliases(self) -> dict[str, str]:
        """Return the names in the state dict that share another name's tensor: alias -> the name in ``weights``."""


def flatten(value: Any, name: str) -> tuple[str, list[Tensor]]:
    """Return (skeleton, tensors). ``name`` begins the path in error messages. Raises ``UsageError``."""
    skeleton, tensors, _ = flatten_named(value, name)
    return skeleton, tensors


def flatten_named(value: Any, name: str) -> tuple[str, list[Tensor], list[KeyPath]]:
    """Return (skeleton, tensors, the path to each tensor). Raises ``UsageError``."""
    packed, tensors, paths = pack(value, name)
    return json.dumps(packed), tensors, paths


def pack(value: Any, name: str) -> tuple[Any, list[Tensor], list[KeyPath]]:
    """Like ``flatten_named``, with the skeleton as new Python objects that ``json.dumps`` accepts."""
    found: list[tuple[KeyPath, Tensor]] = []
    packed = _pack(value, name, (), found)
    return packed, [tensor for _, tensor in found], [path for path, _ in found]


def unflatten(skeleton: str, tensors: Sequence[Tensor]) -> Any:
    """The inverse of ``flatten``."""
    return _unpack(json.loads(skeleton), tensors)


def empty_tensors(skeleton: str, device: str) -> list[Tensor]:
    """Allocate tensors of the shapes and dtypes in a skeleton, to receive into: host tensors on the host, others on ``device``."""
    found: dict[int, Tensor] = {}

    def visit(packed: Any) -> None:
        if isinstance(packed, dict):
            ((kind, content),) = packed.items()
            if kind == "tensor":
                number, dtype, shape, was_on = content
                found[number] = torch.empty(shape, dtype=getattr(torch, dtype), device="cpu" if was_on == "cpu" else device)
            elif kind != "float":
                for item in content:
                    for part in item if kind in ("dict", "counter") else [item]:
                        visit(part)

    visit(json.loads(skeleton))
    return [found[number] for number in range(len(found))]


def digest(skeleton: str, tensors: Sequence[Tensor]) -> bytes:
    """Return a SHA-256 that is equal for two states exactly if every bit of them is equal."""
    sha = hashlib.sha256(skeleton.encode())
    for tensor in tensors:
        sha.update(f"{tensor.dtype}{list(tensor.shape)}".encode())
        sha.update(buffer_of(tensor))
    return sha.digest()


def to_bytes(value: Any, name: str) -> tuple[str, bytes]:
    """Return (skeleton, the bytes of all tensors). ``name`` begins the path in error messages. Raises ``UsageError``."""
    skeleton, tensors = flatten(value, name)
    return skeleton, b"".join(bytes(buffer_of(tensor)) for tensor in tensors)


def from_bytes(skeleton: str, content: bytes, device: str = "cpu") -> Any:
    """The inverse of ``to_bytes``. Tensors that were not on the host are put on ``device``."""
    tensors = empty_tensors(skeleton, device)
    at = 0
    for tensor in tensors:
        if tensor.numel():
            bits(tensor).copy_(torch.frombuffer(bytearray(content[at : at + tensor.nbytes]), dtype=torch.uint8))
        at += tensor.nbytes
    return unflatten(skeleton, tensors)


def buffer_of(tensor: Tensor) -> Any:
    """Return a tensor's bytes as an object with the buffer protocol; no copy if the tensor is contiguous on the host."""
    flat = bits(tensor.detach().contiguous().cpu())
    if flat.numel() == 0:
        return b""
    memory = (ctypes.c_char * flat.numel()).from_address(flat.data_ptr())
    memory._owner = flat  # type: ignore[attr-defined]  # keeps the memory alive
    return memory


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """For example "float32"; cached, because ``str(dtype)`` is slow."""
    return str(dtype).removeprefix("torch.")


def _pack(value: Any, name: str, path: KeyPath, found: list[tuple[KeyPath, Tensor]]) -> Any:
    if isinstance(value, Tensor):
        found.append((path, value))
        return {"tensor": [len(found) - 1, dtype_name(value.dtype), list(value.shape), value.device.type]}
    if isinstance(value, float):
        return {"float": value.hex()}
    if isinstance(value, _PLAIN) and not type(value).__module__.startswith("numpy"):
        return value
    if isinstance(value, Mapping):
        kind = "counter" if isinstance(value, Counter) else "dict"
        return {
            kind: [
                [_pack(k, f"{name}, a key", path, found), _pack(v, f"{name}[{k!r}]", (*path, str(k)), found)]
                for k, v in value.items()
            ]
        }
    if isinstance(value, (list, tuple)):
        packed = [_pack(item, f"{name}[{i}]", (*path, str(i)), found) for i, item in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": packed}
    raise UsageError(
        f"{name} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be sent to another worker or written to a "
        "checkpoint as plain data. Keep tensors and plain values there, or leave this object out of Run."
    )


def _unpack(packed: Any, tensors: Sequence[Tensor]) -> Any:
    if not isinstance(packed, dict):
        return packed
    ((kind, content),) = packed.items()
    if kind == "tensor":
        return tensors[content[0]]
    if kind == "float":
        return float.fromhex(content)
    if kind in ("dict", "counter"):
        items = {_unpack(k, tensors): _unpack(v, tensors) for k, v in content}
        return Counter(items) if kind == "counter" else items
    values = [_unpack(item, tensors) for item in content]
    return tuple(values) if kind == "tuple" else values
