"""The device to which DistributedDataParallel moves inputs and outputs: ``device_ids`` and ``output_device``, as in torch."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import UsageError


def output_index(device: torch.device | None, output_device: int | torch.device | None) -> int | None:
    """Returns the index of the CUDA device of outputs, as torch's attribute ``output_device`` has it."""
    if device is None:
        return None
    return device.index if output_device is None else torch.device(output_device).index


def single_device(module: nn.Module, device_ids: Sequence[int | torch.device] | None) -> torch.device | None:
    """Return the device of ``device_ids``, or None. Raises UsageError unless all parameters are on one CUDA device."""
    if device_ids is None or len(device_ids) == 0:
        return None
    found = sorted({str(p.device) for p in module.parameters()})
    if len(device_ids) != 1:
        raise UsageError(
            f"device_ids={list(device_ids)}: one process drives one device. Start a process per device and pass one id."
        )
    if len(found) > 1 or "cpu" in found:
        raise UsageError(
            f"device_ids={list(device_ids)} but the module's parameters are on {', '.join(found)}. Leave device_ids out."
        )
    wanted = device_ids[0]
    device = torch.device("cuda", wanted) if isinstance(wanted, int) else torch.device(wanted)
    if found and str(device) != found[0]:
        warnings.warn(f"device_ids={list(device_ids)} but the module is on {found[0]}; inputs are moved to {device}.", stacklevel=3)
    return device


def to_device(value: Any, device: torch.device) -> Any:
    """Move all tensors in ``value`` and its containers to ``device``; other values stay as they are."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(to_device(v, device) for v in value))
    if isinstance(value, (list, tuple)):
        return type(value)(to_device(v, device) for v in value)
    if isinstance(value, dict):
        return type(value)((k, to_device(v, device)) for k, v in value.items())
    return value
