"""DistributedDataParallel: the engine behind the arguments and methods of torch's class of that name.

A script that swaps the import trains as before. What differs is in docs/ddp.md.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.comm.base import Comm
from lockstep.errors import UsageError
from lockstep.gradients.comm_hook import Hook
from lockstep.replicas.replicate import Replica, Settings, replica_of

_NOT_SUPPORTED = {
    "delay_all_reduce_named_params": "all gradients are averaged in buckets",
    "param_to_hook_all_reduce": "all gradients are averaged in buckets",
    "mixed_precision": "use torch.autocast, or a model in the dtype you want",
    "device_mesh": "pass process_group=mesh.get_group() instead",
    "bucket_cap_mb_list": "pass bucket_cap_mb; the first and the last bucket are small by themselves",
}


class DistributedDataParallel(nn.Module):
    """Wraps ``module``; gradients leave every backward averaged over the ranks.

    ``find_unused_parameters``, ``static_graph``, ``gradient_as_bucket_view``, ``batched_grad_copy``
    and ``skip_all_reduce_unused_params`` are accepted and change nothing: what they ask for always
    works. Without ``torch.distributed.init_process_group`` the world is found from the launcher's
    variables. All ranks must construct it.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: Any = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        *,
        skip_all_reduce_unused_params: bool = False,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        comm: Comm | str | None = None,
        timeout_s: float = 600.0,
        **others: Any,
    ) -> None:
        super().__init__()
        for name, value in others.items():
            if name not in _NOT_SUPPORTED:
                raise TypeError(f"DistributedDataParallel() got an unexpected keyword argument {name!r}")
            if value is not None:
                raise UsageError(f"DistributedDataParallel does not take {name}: {_NOT_SUPPORTED[name]}.")
        self._device = _single_device(module, device_ids)
        self._output_device = None if output_device is None else torch.device(output_device)
        self.device_ids = None if device_ids is None else list(device_ids)
        self.dim = dim
        self.module = module
        sync_buffers = forward_sync_buffers if forward_sync_buffers is not None else broadcast_buffers is not False
        settings = Settings(
            bucket_mb=25 if bucket_cap_mb is None else bucket_cap_mb,
            broadcast_buffers=sync_buffers,
            init_sync=init_sync,
            ignore=tuple(sorted(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))),
            timeout_s=timeout_s,
        )
        Replica(module, settings, comm, group=process_group)
        self.process_group = process_group

    @property
    def replica(self) -> Replica:
        return replica_of(self.module)

    @property
    def require_backward_grad_sync(self) -> bool:
        return self.replica.syncs

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self.replica.syncs = value

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self._device is not None:
            inputs, kwargs = _moved(inputs, self._device), _moved(kwargs, self._device)
        outputs = self.module(*inputs, **kwargs)
        return outputs if self._output_device is None else _moved(outputs, self._output_device)

    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards inside only accumulate; the next one outside averages the whole window."""
        return self.replica.no_sync()

    @contextmanager
    def join(
        self, divide_by_initial_world_size: bool = True, enable: bool = True, throw_on_early_termination: bool = False
    ) -> Iterator[None]:
        """As torch's: ranks that leave the block first shadow the others until all have left."""
        with self.replica.join(divide_by_initial_world_size, enable, throw_on_early_termination):
            yield

    def register_comm_hook(self, state: Any, hook: Hook) -> None:
        """As torch's: ``hook(state, bucket)`` replaces each bucket's all-reduce and must average by itself."""
        self.replica.register_comm_hook(state, hook)

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(module: nn.Module, params_and_buffers_to_ignore: Sequence[str]) -> None:
        module._ddp_params_and_buffers_to_ignore = params_and_buffers_to_ignore  # type: ignore[assignment]

    def _set_static_graph(self) -> None:
        """Nothing to do: a graph may be static or not."""

    def train(self, mode: bool = True) -> DistributedDataParallel:
        super().train(mode)
        return self

    def __getstate__(self) -> dict[str, Any]:
        raise UsageError("a DistributedDataParallel cannot be pickled or copied: its connections cannot. Save .module instead.")


def _single_device(module: nn.Module, device_ids: Sequence[int | torch.device] | None) -> torch.device | None:
    if device_ids is None or len(device_ids) == 0:
        return None
    found = sorted({str(p.device) for p in module.parameters()})
    if len(device_ids) != 1:
        raise UsageError(
            f"device_ids={list(device_ids)}: one process drives one device. Start a process per device and pass one id."
        )
    if any(name.startswith("cpu") for name in found):
        raise UsageError(
            f"device_ids={list(device_ids)} but the module's parameters lie on {', '.join(found)}. Leave device_ids out."
        )
    if len(found) > 1:
        raise UsageError(
            f"device_ids={list(device_ids)} but the module spans {', '.join(found)}. Leave device_ids out for such a module."
        )
    wanted = device_ids[0]
    device = torch.device("cuda", wanted) if isinstance(wanted, int) else torch.device(wanted)
    if str(device) != found[0]:
        warnings.warn(f"device_ids={list(device_ids)} but the module lies on {found[0]}; inputs go to {device}.", stacklevel=3)
    return device


def _moved(value: Any, device: torch.device) -> Any:
    """Inputs on ``device``, containers rebuilt; what is not a tensor stays."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_moved(v, device) for v in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_moved(v, device) for v in value)
    if isinstance(value, dict):
        return type(value)((k, _moved(v, device)) for k, v in value.items())
    return value
