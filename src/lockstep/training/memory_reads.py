"""MemoryReads: which memory the operations of a function read that they have not made, and whether they read a gradient.

A recording contains addresses. What it reads through an attribute (``criterion.weight``) is not known from its key, so that memory
must not be used for something else as long as the recording is kept.

``MemoryReads`` is a mode of torch's dispatcher, in which torch computes some derivatives in another way, with other bits. So it is
used only in a rehearsal, whose results are thrown away (gradients/cuda_graph.py: GraphRecorder).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lockstep.gradients.cuda_graph import CannotRecord
from lockstep.training.call_signature import is_plain

TOUCHES_GRADIENTS = (
    "it reads or changes param.grad after backward(), where a replay has the gradients of this call and not their average. Do that "
    "outside of it, or in the captured function that makes the step"
)


class MemoryReads(TorchDispatchMode):
    """In this context, note what operations read, in forward and in backward. Kernels that torch does not know are not seen."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.gradients: Collection[int] = ()
        """Addresses that only a backward may read: another operation raises CannotRecord."""
        self.has_met_gradient = False
        """Whether that has happened."""
        self._outside: dict[int, StorageWeakRef] = {}
        self._made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_in_backward = torch._C._current_graph_task_id() != -1
        for address, storage in _storages((args, kwargs)):
            if address in self.gradients and not is_in_backward:
                self.has_met_gradient = True
                raise CannotRecord(TOUCHES_GRADIENTS)
            if address not in self._made:
                self._outside[address] = StorageWeakRef(storage)
        results = func(*args, **kwargs)
        self._made.update(address for address, _ in _storages(results) if address not in self._outside)
        return results

    def outside(self, device: torch.device, known: Sequence[Tensor]) -> list[UntypedStorage]:
        """Return the memory on ``device`` that was read and that the function has not made, except that of ``known``.

        Called when the function has returned and its own tensors are gone: those that came from kernels of torch.compile were not
        seen when they were made.
        """
        addresses = {address for address, _ in _storages(known)}
        alive = [ref for address, ref in self._outside.items() if address not in addresses and not ref.expired()]
        storages = [UntypedStorage._new_with_weak_ptr(ref.cdata) for ref in alive]
        return [storage for storage in storages if storage is not None and storage.device.type == device.type]


def _storages(values: Any) -> Iterator[tuple[int, UntypedStorage]]:
    """Yield the address and the memory of each plain tensor in ``values``."""
    for value in tree_leaves(values):
        if isinstance(value, Tensor) and is_plain(value) and value.numel():
            storage = value.untyped_storage()
            yield storage.data_ptr(), storage
