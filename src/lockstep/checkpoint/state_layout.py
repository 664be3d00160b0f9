"""StateLayout: which worker writes which tensor of the state into which file. Every worker computes the same from the state alone.

The model's tensors are in files of their own, under the names of its state dict, so that any safetensors reader finds the weights.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lockstep.checkpoint.tensor_file import ITEM_BYTES
from lockstep.comm.plain_state import dtype_name, pack
from lockstep.errors import UsageError


@dataclass(frozen=True)
class StateLayout:
    """A state whose tensors are numbered, and the files that hold them."""

    skeleton: Any
    """The state without its tensors (comm/plain_state.py)."""
    tensors: Sequence[Tensor] = field(repr=False)
    names: tuple[str, ...]
    """One unique name for each tensor."""
    model: dict[str, int]
    """The model's state dict: name -> number of the tensor."""
    parts: tuple[tuple[tuple[str, tuple[int, ...]], ...], ...]
    """For each worker, its files: (name, numbers of the tensors in it)."""

    def index(self) -> bytes:
        """Return the content of ``model.safetensors.index.json``, by which other programs find sharded weights."""
        file_of = {number: file for part in self.parts for file, numbers in part for number in numbers}
        total = sum(self.tensors[number].nbytes for number in self.model.values())
        table = {"metadata": {"total_size": total}, "weight_map": {name: file_of[number] for name, number in self.model.items()}}
        return json.dumps(table, indent=1).encode()


def lay_out_state(state: dict[str, Any], persistent: set[str], writers: int) -> StateLayout:
    """Number the tensors of a run's state, and assign each to one of ``writers`` workers. ``persistent``: see ``Stateful``.

    Raises ``UsageError`` if the state holds something that a checkpoint cannot hold.
    """
    skeleton, tensors, paths = pack(state, "the state of the run")
    for tensor, path in zip(tensors, paths, strict=True):
        if dtype_name(tensor.dtype) not in ITEM_BYTES or tensor.layout is not torch.strided:
            raise UsageError(
                f"{'.'.join(path)} is a {tensor.dtype} tensor ({tensor.layout}), which a checkpoint cannot hold. "
                "Use a dense tensor of a dtype that safetensors knows."
            )
    model = {
        path[1]: number
        for number, path in enumerate(paths)
        if path[0] == "parameters" or (path[0] == "buffers" and path[1] in persistent)
    }
    weights = set(model.values())
    kinds = {"model": sorted(weights), "state": [number for number in range(len(tensors)) if number not in weights]}
    parts: list[list[tuple[str, tuple[int, ...]]]] = [[] for _ in range(writers)]
    for kind, numbers in kinds.items():
        for writer, part in enumerate(assign_to_writers([tensors[number].nbytes for number in numbers], writers)):
            if part:
                file = f"{kind}-{writer + 1:05d}-of-{writers:05d}.safetensors"
                parts[writer].append((file, tuple(numbers[index] for index in part)))
    weight_names = {number: name for name, number in model.items()}
    names = _make_unique([weight_names.get(number) or ".".join(path) for number, path in enumerate(paths)])
    return StateLayout(skeleton, tensors, names, model, tuple(map(tuple, parts)))


def assign_to_writers(sizes: Sequence[int], writers: int) -> tuple[tuple[int, ...], ...]:
    """Return for each writer the ascending indices of its tensors, so that all have about equally many bytes to write.

    The tensors are assigned from the largest to the smallest, each to the writer that has the fewest bytes so far.
    """
    assigned_bytes = [0] * writers
    parts: list[list[int]] = [[] for _ in range(writers)]
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        writer = assigned_bytes.index(min(assigned_bytes))
        assigned_bytes[writer] += sizes[index]
        parts[writer].append(index)
    return tuple(tuple(sorted(part)) for part in parts)


def _make_unique(names: Sequence[str]) -> tuple[str, ...]:
    """Two paths can give one name if a key contains a dot: the later one gets its number appended."""
    seen: set[str] = set()
    found = []
    for number, name in enumerate(names):
        if name in seen or name == "__metadata__":
            name = f"{name} ({number})"
        seen.add(name)
        found.append(name)
    return tuple(found)
