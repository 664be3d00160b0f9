"""Buffers: the buffers of a module (BatchNorm statistics), found once, and how to write them.

Note: how a buffer is written
-----------------------------
Torch's DDP rewrites buffers before each forward. That breaks a step with two forwards: tensors that the first forward saved have
changed. Lockstep writes them at the end of the backward, when no graph needs them. If a graph is still alive (a second backward
will follow), the buffer is replaced by a new tensor instead, and the graph keeps the old tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lockstep.comm.base import Comm
from lockstep.comm.exchange import Broadcast
from lockstep.errors import UsageError


class Buffers:
    """The buffers of ``module``, each once, without those named in ``ignore``."""

    def __init__(self, module: nn.Module, ignore: Sequence[str]) -> None:
        locations: dict[int, list[tuple[nn.Module, str]]] = {}  # a tied buffer has several
        self._names: list[str] = []
        for prefix, owner in module.named_modules():
            for name, buffer in owner._buffers.items():
                full = f"{prefix}.{name}" if prefix else name
                if buffer is not None and full not in ignore:
                    if id(buffer) not in locations:
                        self._names.append(full)
                    locations.setdefault(id(buffer), []).append((owner, name))
        self._locations = list(locations.values())
        self._module, self._persistent_names = module, _persistent_names(module)

    def added_or_removed(self) -> list[str]:
        """Returns the persistent buffers that were added or removed since. (Other buffers are caches that the model manages.)"""
        return sorted(self._persistent_names ^ _persistent_names(self._module))

    def require_dense(self) -> None:
        """Raises UsageError if a buffer is sparse or expanded: Run cannot average it."""
        for name, buffer in self.named():
            if buffer.layout is not torch.strided or any(
                stride == 0 and extent > 1 for stride, extent in zip(buffer.stride(), buffer.shape, strict=True)
            ):
                raise UsageError(
                    f"buffer {name} is sparse or expanded, but Run can average dense buffers only. Store it as buffer.contiguous()."
                )

    def tensors(self) -> list[Tensor]:
        found = (owner._buffers[name] for ((owner, name), *_) in self._locations)
        return [tensor for tensor in found if tensor is not None]

    def named(self) -> list[tuple[str, Tensor]]:
        return list(zip(self._names, self.tensors(), strict=True))

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """When the block ends, the buffers have the values they had at its beginning."""
        before = [(tensor, tensor.detach().clone()) for tensor in self.tensors()]
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, value in before:
                    if tensor.shape == value.shape:
                        tensor.copy_(value)

    def start_broadcast(self, comm: Comm, source: int, step: int) -> Broadcast | None:
        """Send the buffers of rank ``source`` to all ranks. Collective; does not wait. Returns None if there is nothing to do."""
        if comm.size == 1 or not self._locations:
            return None
        with torch.no_grad():
            return Broadcast(comm, self.tensors(), source, f"the buffers after step {step}")

    def finish_broadcast(self, broadcast: Broadcast) -> None:
        """Wait for the values, and write them."""
        with torch.no_grad():
            broadcast.finish(self.write)

    @staticmethod
    def may_write_in_place(buffer: Tensor) -> bool:
        """Whether no graph has saved the buffer."""
        return bool(buffer._use_count() == 1)  # type: ignore[attr-defined]

    def write(self, old: Tensor, value: Tensor) -> None:
        """Write ``value`` to the buffer ``old``, or replace the buffer if a graph has saved it."""
        if self.may_write_in_place(old):
            old.copy_(value)
            return
        fresh = value.clone()
        for location in self._locations:
            for owner, name in location:
                if owner._buffers[name] is old:
                    owner._buffers[name] = fresh


def _persistent_names(module: nn.Module) -> set[str]:
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, owner in module.named_modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None and name not in owner._non_persistent_buffers_set
    }
