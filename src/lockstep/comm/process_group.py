"""Which torch process group a model's ranks are: the default group, a given group, or one dimension of a device mesh."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from lockstep.errors import TorchUsageError


def default_group() -> Any:
    """Return torch's default process group, or None if the script has not called ``init_process_group``."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def choose_group(process_group: Any, device_mesh: Any) -> Any:
    """Return ``process_group``, or the group of the one-dimensional ``device_mesh``, or the default group.

    Raises:
        TorchUsageError: If both are given, or if the mesh has several dimensions.
    """
    if device_mesh is None:
        return process_group if process_group is not None else default_group()
    if process_group is not None:
        raise TorchUsageError("process_group and device_mesh are both given, and each says who the ranks are. Pass one of them.")
    if device_mesh.ndim != 1:
        raise TorchUsageError(
            f"device_mesh has {device_mesh.ndim} dimensions, but data parallelism runs along one. Pass that dimension of it, for "
            'example device_mesh=mesh["dp"].'
        )
    return device_mesh.get_group(mesh_dim=0)


def make_parameters_local(module: nn.Module) -> None:
    """If tensor parallelism has made parameters of ``module`` DTensors, let the module hold their local parts between forwards.

    torch's class does the same for a device mesh that is one dimension of a larger mesh.
    """
    from torch.distributed.tensor import DTensor

    if any(isinstance(param, DTensor) for param in module.parameters()):
        from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

        _pre_dp_module_transform(module)
