"""patch(): puts Lockstep's DistributedDataParallel where scripts and frameworks look up torch's class of that name."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch.nn.parallel.distributed
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from lockstep.replicas.ddp import DistributedDataParallel

_MODULES: tuple[Any, ...] = (torch.nn.parallel, torch.nn.parallel.distributed)
_MOST_NAMED = 3


class TorchPatch:
    """What ``lockstep.patch()`` returns. As a context manager, it undoes the patch at the end of the block."""

    def __init__(self) -> None:
        self._before: list[Any] = [module.DistributedDataParallel for module in _MODULES]
        for module in _MODULES:
            module.DistributedDataParallel = DistributedDataParallel

    def undo(self) -> None:
        """Put back what was there before. May be called twice.

        Models that are wrapped keep Lockstep's class, and so do modules that have imported it by name.
        """
        for module, before in zip(_MODULES, self._before):
            module.DistributedDataParallel = before
        self._before = []

    def __enter__(self) -> TorchPatch:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()


def patch() -> TorchPatch:
    """Put ``lockstep.DistributedDataParallel`` where ``torch.nn.parallel.DistributedDataParallel`` is looked up.

    For scripts and frameworks that make the wrapper themselves. Call it on every rank, before the modules that use the class are
    imported. A module that has imported torch's class by name keeps it, and a warning names the module. ``lockstep run`` calls
    this before the script if ``LOCKSTEP_DDP=1`` is set.

    Returns:
        An object whose ``undo()`` puts torch's class back. As a context manager, it does so at the end of the block.

    Example:
        For one model::

            with lockstep.patch():
                model = torch.nn.parallel.DistributedDataParallel(Net())
            assert isinstance(model, lockstep.DistributedDataParallel)
    """
    holders = _modules_with_torch_class()
    if holders:
        more = f" and {len(holders) - _MOST_NAMED} more" if len(holders) > _MOST_NAMED else ""
        warnings.warn(
            f"{', '.join(holders[:_MOST_NAMED])}{more} imported torch's DistributedDataParallel before lockstep.patch() and "
            "will use torch's class. Call lockstep.patch() before that import.",
            stacklevel=2,
        )
    return TorchPatch()


def _modules_with_torch_class() -> list[str]:
    """Returns the names of all imported modules that hold torch's class under a name of their own. torch's modules do not count."""
    others = [(name, module) for name, module in sys.modules.items() if name.split(".")[0] not in ("torch", "lockstep")]
    return sorted(name for name, module in others if any(value is TorchDDP for value in list(vars(module).values())))
