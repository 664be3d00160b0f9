"""Lockstep: data-parallel training for PyTorch.

This module holds the public names only. Each is loaded when it is first used, so that the command line can start without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_MODULES = {
    "CorruptionError": "lockstep.errors",
    "DeviceError": "lockstep.errors",
    "DistributedDataParallel": "lockstep.replicas.ddp",
    "InvariantError": "lockstep.errors",
    "LockstepError": "lockstep.errors",
    "PeerError": "lockstep.errors",
    "Run": "lockstep.training.run",
    "UsageError": "lockstep.errors",
    "WorkerError": "lockstep.errors",
    "World": "lockstep.world",
    "launch": "lockstep.launcher.function_launch",
    "patch": "lockstep.replicas.torch_patch",
    "replica_of": "lockstep.replicas.replicate",
    "replicate": "lockstep.replicas.replicate",
}

__all__ = [
    "CorruptionError",
    "DeviceError",
    "DistributedDataParallel",
    "InvariantError",
    "LockstepError",
    "PeerError",
    "Run",
    "UsageError",
    "WorkerError",
    "World",
    "launch",
    "patch",
    "replica_of",
    "replicate",
]

if TYPE_CHECKING:
    from lockstep import engines as engines
    from lockstep import integrations as integrations
    from lockstep import track as track
    from lockstep.errors import CorruptionError, DeviceError, InvariantError, LockstepError, PeerError, UsageError, WorkerError
    from lockstep.launcher.function_launch import launch
    from lockstep.replicas.ddp import DistributedDataParallel
    from lockstep.replicas.replicate import replica_of, replicate
    from lockstep.replicas.torch_patch import patch
    from lockstep.training.run import Run
    from lockstep.world import World


def __getattr__(name: str) -> Any:
    if name in ("engines", "integrations", "track"):
        return importlib.import_module(f"lockstep.{name}")
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
