"""The buffers of a module (BatchNorm statistics): found once, rewritten without disturbing a graph that has saved them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lockstep.comm.base import Comm
from lockstep.comm.exchange import Broadcast


class Buffers:
    """A module's buffers, each once, and how to rewrite them (from one rank, say, after every synced backward).

    Torch rewrites them before each forward, which breaks a step with two forwards: the first
    one's saved tensors have changed. At the end of backward those are gone; where a graph is still
    alive (a second backward to come) the buffer is replaced by a new tensor instead, and the graph
    keeps the old.
    """

    def __init__(self, module: nn.Module, ignore: Sequence[str]) -> None:
        homes: dict[int, list[tuple[nn.Module, str]]] = {}
        self._names: list[str] = []
        for prefix, owner in module.named_modules():
            for name, buffer in owner._buffers.items():
                full = f"{prefix}.{name}" if prefix else name
                if buffer is not None and full not in ignore:
                    if id(buffer) not in homes:
                        self._names.append(full)
                    homes.setdefault(id(buffer), []).append((owner, name))
        self._homes = list(homes.values())
        self._module, self._kept = module, _persistent(module)

    def unsettled(self) -> list[str]:
        """Persistent buffers that have appeared or vanished since. (Others are caches, and the model's own business.)"""
        return sorted(self._kept ^ _persistent(self._module))

    def tensors(self) -> list[Tensor]:
        found = (owner._buffers[name] for ((owner, name), *_) in self._homes)
        return [tensor for tensor in found if tensor is not None]

    def named(self) -> list[tuple[str, Tensor]]:
        return list(zip(self._names, self.tensors(), strict=True))

    def start(self, comm: Comm, source: int, step: int) -> Broadcast | None:
        if comm.size == 1 or not self._homes:
            return None
        with torch.no_grad():
            return Broadcast(comm, self.tensors(), source, f"the buffers after step {step}")

    def finish(self, broadcast: Broadcast) -> None:
        with torch.no_grad():
            broadcast.finish(self.write)

    @staticmethod
    def is_free(buffer: Tensor) -> bool:
        """Whether no graph has saved it, so that it may be written in place."""
        return bool(buffer._use_count() == 1)  # type: ignore[attr-defined]

    def write(self, old: Tensor, value: Tensor) -> None:
        """``old`` becomes ``value``, or is replaced by it where a graph has saved it."""
        if self.is_free(old):
            old.copy_(value)
            return
        fresh = value.clone()
        for home in self._homes:
            for owner, name in home:
                if owner._buffers[name] is old:
                    owner._buffers[name] = fresh


def _persistent(module: nn.Module) -> set[str]:
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, owner in module.named_modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None and name not in owner._non_persistent_buffers_set
    }
