"""DistributedDataParallel: Lockstep's replica behind the arguments and methods of torch's class of that name.

A script that swaps the import trains as before. docs/tutorials/torch_ddp.md lists the differences.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.comm.base import Comm
from lockstep.errors import UsageError
from lockstep.gradients.comm_hook import Hook
from lockstep.replicas.replicate import Replica, ReplicaOptions, replica_of

_NOT_SUPPORTED = {
    "delay_all_reduce_named_params": "all gradients are averaged in buckets",
    "param_to_hook_all_reduce": "all gradients are averaged in buckets",
    "mixed_precision": "use torch.autocast, or a model in the dtype you want",
    "device_mesh": "pass process_group=mesh.get_group() instead",
    "bucket_cap_mb_list": "pass bucket_cap_mb; the first and the last bucket are made small by themselves",
}


class DistributedDataParallel(nn.Module):
    """A drop-in replacement for ``torch.nn.parallel.DistributedDataParallel``.

    Wraps ``module``: every ``backward()`` leaves gradients averaged over all ranks. All ranks must construct it with modules of
    the same layout. ``torch.distributed.init_process_group`` is optional: without it the ranks are found from the launcher's
    variables. A process alone trains as without the wrapper.

    Args:
        module: The model. It is available as ``.module``, and names in the ``state_dict`` begin with ``module.``, as in torch.
        device_ids: None, or the one CUDA device of this process. Inputs are moved to it.
        output_device: If given, outputs are moved to this device.
        dim: Kept for torch's signature; stored and not used.
        broadcast_buffers: Whether to copy rank 0's buffers (BatchNorm statistics) to all ranks (default True). They are copied at
            the end of backward; torch copies them before forward.
        init_sync: Whether to copy rank 0's parameters and buffers to all ranks now.
        process_group: The torch process group whose members are the ranks. By default all ranks.
        bucket_cap_mb: Gradients are sent in buckets of about this many megabytes (default 25).
        find_unused_parameters: Accepted and not needed: unused parameters always work.
        check_reduction: Accepted and not used, as in torch.
        gradient_as_bucket_view: Accepted and not needed: gradients always are views of the buckets.
        static_graph: Accepted and not needed: the graph may be static or not.
        skip_all_reduce_unused_params: Accepted and not needed.
        batched_grad_copy: Accepted and not needed: gradients are always copied in batches.
        forward_sync_buffers: The same as ``broadcast_buffers``, which it overrides.
        comm: How the ranks exchange gradients; see ``lockstep.replicate``.
        timeout_s: How long to wait for another rank before a ``PeerError`` names it.

    Raises:
        UsageError: If the module or an argument cannot be used, or differs between ranks (then on every rank).
        PeerError: If another rank does not construct its wrapper within ``timeout_s``.

    Example:
        Only the import changes::

            from lockstep import DistributedDataParallel as DDP  # was: from torch.nn.parallel import ...

            model = DDP(Net())
            F.cross_entropy(model(x), y).backward()
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
                raise UsageError(f"DistributedDataParallel does not support {name}: {_NOT_SUPPORTED[name]}.")
        self._device = _single_device(module, device_ids)
        self._output_device = None if output_device is None else torch.device(output_device)
        self.device_ids = None if device_ids is None else list(device_ids)
        self.dim = dim
        self.module = module
        sync_buffers = forward_sync_buffers if forward_sync_buffers is not None else broadcast_buffers is not False
        options = ReplicaOptions(
            bucket_mb=25 if bucket_cap_mb is None else bucket_cap_mb,
            broadcast_buffers=sync_buffers,
            init_sync=init_sync,
            ignore=tuple(sorted(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))),
            timeout_s=timeout_s,
        )
        Replica(module, options, comm, group=process_group)
        self.process_group = process_group

    @property
    def replica(self) -> Replica:
        """The Replica of the wrapped module."""
        return replica_of(self.module)

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the next ``backward()`` averages gradients, as in torch. May be set."""
        return self.replica.syncs

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self.replica.syncs = value

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the wrapped module, with inputs and outputs moved to ``device_ids`` and ``output_device`` if these were given."""
        if self._device is not None:
            inputs, kwargs = _to_device(inputs, self._device), _to_device(kwargs, self._device)
        outputs = self.module(*inputs, **kwargs)
        return outputs if self._output_device is None else _to_device(outputs, self._output_device)

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients without averaging them; see ``Replica.no_sync``. What counts is where ``backward()`` runs."""
        return self.replica.no_sync()

    def join(
        self, divide_by_initial_world_size: bool = True, enable: bool = True, throw_on_early_termination: bool = False
    ) -> AbstractContextManager[None]:
        """Train with a different number of batches on each rank, as in torch. All ranks must enter the block.

        Args:
            divide_by_initial_world_size: Whether gradients are divided by the number of all ranks, or only of those that have data.
            enable: If False, the block does nothing.
            throw_on_early_termination: Whether to raise a ``PeerError`` on all ranks as soon as one has no more data.
        """
        return self.replica.join(divide_by_initial_world_size, enable, throw_on_early_termination)

    def register_comm_hook(self, state: Any, hook: Hook) -> None:
        """Replace the all-reduce of each bucket by ``hook(state, bucket)``, as in torch; see ``Replica.register_comm_hook``."""
        self.replica.register_comm_hook(state, hook)

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(module: nn.Module, params_and_buffers_to_ignore: Sequence[str]) -> None:
        module._ddp_params_and_buffers_to_ignore = params_and_buffers_to_ignore  # type: ignore[assignment]

    _active_ddp_module: Any = None
    """An instance of torch's class whose ``forward`` runs. Under ``lockstep.patch``, torch sets and reads it here."""

    @classmethod
    def _get_active_ddp_module(cls) -> Any:
        """``torch.compile`` asks for it to split graphs at torch's buckets. Instances of our class need no such splits."""
        return cls._active_ddp_module

    def _set_static_graph(self) -> None:
        """Does nothing: the graph may be static or not."""

    def __getstate__(self) -> dict[str, Any]:
        raise UsageError("a DistributedDataParallel cannot be pickled or copied, because of its connections. Save .module instead.")


def _single_device(module: nn.Module, device_ids: Sequence[int | torch.device] | None) -> torch.device | None:
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


def _to_device(value: Any, device: torch.device) -> Any:
    """Move all tensors in ``value`` and its containers to ``device``; other values stay as they are."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_to_device(v, device) for v in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_to_device(v, device) for v in value)
    if isinstance(value, dict):
        return type(value)((k, _to_device(v, device)) for k, v in value.items())
    return value
