"""Layout: which worker writes which tensor of a state into which file. The same on every worker, from the state alone.

The model's tensors lie in files of their own, under the names of its state dict, so that any safetensors reader finds the weights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lockstep.checkpoint.manifest import INDEX, File
from lockstep.checkpoint.tensor_file import ITEM_BYTES
from lockstep.comm.plain_state import dtype_name, pack
from lockstep.errors import UsageError
from lockstep.plan.parts import spread


@dataclass(frozen=True)
class Layout:
    """``parts[writer]``: (file, numbers of its tensors). ``model``: state dict name -> number."""

    skeleton: Any
    tensors: Sequence[Tensor] = field(repr=False)
    names: tuple[str, ...]
    model: dict[str, int]
    parts: tuple[tuple[tuple[str, tuple[int, ...]], ...], ...]

    def index(self) -> bytes:
        """What sharded weights are found by elsewhere: {weight_map: {name: file}}."""
        home = {number: file for part in self.parts for file, numbers in part for number in numbers}
        total = sum(self.tensors[number].nbytes for number in self.model.values())
        table = {"metadata": {"total_size": total}, "weight_map": {name: home[number] for name, number in self.model.items()}}
        return json.dumps(table, indent=1).encode()

    def bytes_of(self, writer: int) -> int:
        return sum(self.tensors[number].nbytes for _, numbers in self.parts[writer] for number in numbers)


def lay_out_state(state: dict[str, Any], persistent: set[str], writers: int) -> Layout:
    """``state``: of a run (state.py); ``persistent``: names of buffers that belong to the model's state dict."""
    skeleton, tensors, paths = pack(state, "the state of the run")
    for tensor, path in zip(tensors, paths, strict=True):
        if dtype_name(tensor.dtype) not in ITEM_BYTES or tensor.layout is not torch.strided:
            raise UsageError(
                f"{'.'.join(path)} is a {tensor.dtype} tensor ({tensor.layout}), which a checkpoint cannot hold. Keep dense ones."
            )
    model = {
        path[1]: number
        for number, path in enumerate(paths)
        if path[0] == "parameters" or (path[0] == "buffers" and path[1] in persistent)
    }
    mine = set(model.values())
    kinds = {"model": sorted(mine), "state": [number for number in range(len(tensors)) if number not in mine]}
    parts: list[list[tuple[str, tuple[int, ...]]]] = [[] for _ in range(writers)]
    for kind, numbers in kinds.items():
        for writer, part in enumerate(spread([tensors[number].nbytes for number in numbers], writers)):
            if part:
                file = f"{kind}-{writer + 1:05d}-of-{writers:05d}.safetensors"
                parts[writer].append((file, tuple(numbers[at] for at in part)))
    of_number = {number: name for name, number in model.items()}
    names = _unique([of_number.get(number) or ".".join(path) for number, path in enumerate(paths)])
    return Layout(skeleton, tensors, names, model, tuple(map(tuple, parts)))


def index_file(content: bytes) -> dict[str, File]:
    return {INDEX: File(len(content), len(content), hashlib.sha256(content).hexdigest())}


def _unique(names: Sequence[str]) -> tuple[str, ...]:
    """Keys with dots in them could make two names alike."""
    seen: set[str] = set()
    found = []
    for number, name in enumerate(names):
        if name in seen or name == "__metadata__":
            name = f"{name} ({number})"
        seen.add(name)
        found.append(name)
    return tuple(found)
