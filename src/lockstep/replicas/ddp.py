"""DistributedDataParallel: Lockstep's replica behind the arguments and methods of torch's class of that name.

A script that swaps the import trains as before. docs/tutorials/torch_ddp.md lists the differences.
"""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from lockstep.comm.base import Comm
from lockstep.comm.process_group import choose_group, default_group, make_parameters_local
from lockstep.errors import TorchUsageError, UsageError
from lockstep.gradients.autograd_hooks import find_tensors, on_backward
from lockstep.gradients.comm_hook import Hook
from lockstep.gradients.module import any_hooked
from lockstep.replicas.ddp_devices import output_index, single_device, to_device
from lockstep.replicas.mixed_precision import LowPrecision, cast_buffers, cast_floating
from lockstep.replicas.replicate import Replica, ReplicaOptions, find_replica, replica_of
from lockstep.replicas.torch_internals import TorchLogger, TorchReducer, logging_data

_log = logging.getLogger("lockstep")
_POINTLESS = {
    "delay_all_reduce_named_params": "their gradients are averaged in buckets, with all others",
    "bucket_cap_mb_list": "the largest is taken; the sizes of the first and the last buckets are chosen by themselves",
    "batched_grad_copy": "gradients are always copied in batches",
    "skip_all_reduce_unused_params": "unused parameters are always found",
    "check_reduction": "it has no effect in torch either",
}
_BROADCAST_BYTES = 250 << 20


@TorchDDP.register  # isinstance(ddp, torch.nn.parallel.DistributedDataParallel) is True; nothing is inherited
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
        broadcast_buffers: Whether to copy rank 0's buffers (BatchNorm statistics) to all ranks (default True), now and in every
            step. They are copied at the end of backward; torch copies them before forward.
        init_sync: Whether to copy rank 0's parameters and buffers to all ranks now.
        process_group: The torch process group whose members are the ranks. By default all ranks.
        bucket_cap_mb: Gradients are sent in buckets of about this many megabytes (default 25).
        find_unused_parameters: Accepted and not needed: unused parameters always work.
        check_reduction: Accepted and not used, as in torch.
        gradient_as_bucket_view: Accepted and not needed: gradients always are views of the buckets.
        static_graph: Accepted and not needed: the graph may be static or not.
        delay_all_reduce_named_params: Accepted and not needed: these parameters are averaged in buckets, with all others.
        param_to_hook_all_reduce: Must be given together with ``delay_all_reduce_named_params``, as in torch.
        mixed_precision: None, or torch's policy with ``param_dtype``, ``reduce_dtype`` and ``buffer_dtype``. Forward and backward
            use copies of the parameters in ``param_dtype``, gradients are sent in ``reduce_dtype``, and the parameters and their
            gradients keep their own dtype.
        device_mesh: A one-dimensional device mesh whose members are the ranks, instead of ``process_group``.
        skip_all_reduce_unused_params: Accepted and not needed: unused parameters always work.
        bucket_cap_mb_list: The largest of these sizes is used as ``bucket_cap_mb``.
        batched_grad_copy: Accepted and not needed: gradients are always copied in batches.
        forward_sync_buffers: The same as ``broadcast_buffers``, which it overrides; buffers are copied now in any case.
        init_sync_buffers: Whether ``init_sync`` copies buffers too; overrides what the two arguments above say of it.
        comm: How the ranks exchange gradients; see ``lockstep.replicate``.
        timeout_s: How long to wait for another rank before a ``PeerError`` names it.

    Raises:
        UsageError: If the module or an argument cannot be used, or differs between ranks (then on every rank). It is also a
            ``RuntimeError``, a ``ValueError`` and a ``TypeError``: the types that torch's class raises.
        PeerError: If another rank does not construct its wrapper within ``timeout_s``. It is a ``RuntimeError``.

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
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        init_sync_buffers: bool | None = None,
        *,
        comm: Comm | str | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        super().__init__()
        with _torch_errors():
            if (delay_all_reduce_named_params is None) != (param_to_hook_all_reduce is None):
                raise UsageError("delay_all_reduce_named_params and param_to_hook_all_reduce belong together. Pass both or none.")
            _log_pointless(
                delay_all_reduce_named_params=delay_all_reduce_named_params,
                bucket_cap_mb_list=bucket_cap_mb_list,
                batched_grad_copy=batched_grad_copy,
                skip_all_reduce_unused_params=skip_all_reduce_unused_params,
                check_reduction=check_reduction,
            )
            if not isinstance(module, nn.Module):
                raise UsageError(f"DistributedDataParallel takes a torch.nn.Module, not {type(module).__name__}.")
            self.process_group = choose_group(process_group, device_mesh)
            if device_mesh is not None:
                self.device_mesh = device_mesh
                make_parameters_local(module)
            self.module = module
            self.dim = dim
            self._device = single_device(module, device_ids)
            self.device_ids = None if self._device is None else [self._device.index]
            self.output_device = output_index(self._device, output_device)
            self._output_device = None if output_device is None else torch.device(output_device)
            self.find_unused_parameters, self.static_graph = find_unused_parameters, static_graph
            self.gradient_as_bucket_view, self.batched_grad_copy = gradient_as_bucket_view, batched_grad_copy
            self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
            self.require_forward_param_sync = True
            self.broadcast_bucket_size = _BROADCAST_BYTES
            self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
            devices = [p.device for name, p in module.named_parameters() if name not in self.parameters_to_ignore]
            self.device = devices[0] if devices else torch.device("cpu")
            self.device_type, self.is_multi_device_module = self.device.type, len(set(devices)) > 1
            self.mixed_precision = _require_policy(mixed_precision)
            bucket_mb = max(bucket_cap_mb_list) if bucket_cap_mb_list else 25 if bucket_cap_mb is None else bucket_cap_mb
            init_buffers = forward_sync_buffers is not None or broadcast_buffers is not False
            self._options = ReplicaOptions(
                bucket_mb=bucket_mb,
                broadcast_buffers=forward_sync_buffers if forward_sync_buffers is not None else broadcast_buffers is not False,
                init_sync=init_sync,
                ignore=_names_to_ignore(module, self.parameters_to_ignore),
                timeout_s=timeout_s,
                init_buffers=init_buffers if init_sync_buffers is None else init_sync_buffers,
                reduce_dtype=None if mixed_precision is None else mixed_precision.reduce_dtype or mixed_precision.param_dtype,
            )
            self.bucket_bytes_cap = int(bucket_mb * (1 << 20))
            self.bucket_bytes_cap_list = [int(size * (1 << 20)) for size in bucket_cap_mb_list or ()]
            self.bucket_bytes_cap_default = bucket_cap_mb is None and not bucket_cap_mb_list
            self._comm = comm if isinstance(comm, str) else None
            self._buffer_hook: _BufferHook | None = None
            self._replica: Replica | None = None
            self._syncs_when_connected = True
            _close_earlier_wrapper(module)
            if mixed_precision is not None and mixed_precision.buffer_dtype is not None:
                cast_buffers(module, mixed_precision.buffer_dtype, self._options.ignore)
            self._low_precision = self._make_low_precision()
            self._connect(self._options, comm, self.process_group)

    def _make_low_precision(self) -> LowPrecision | None:
        dtype = None if self.mixed_precision is None else self.mixed_precision.param_dtype
        return None if dtype is None else LowPrecision(self.module, dtype, self._options.ignore)

    def _connect(self, options: ReplicaOptions, comm: Comm | str | None, group: Any) -> Replica:
        """Hook the module. Collective. When this wrapper is gone, the module trains alone, as in torch."""
        replica = self._replica = Replica(self.module, options, comm, group=group)
        replica.is_wrapped = True
        replica.syncs = self._syncs_when_connected
        weakref.finalize(self, replica.close).atexit = False
        return replica

    @property
    def replica(self) -> Replica:
        """The Replica of the wrapped module."""
        return replica_of(self.module) if self._replica is None else self._replica

    @property
    def connected_replica(self) -> Replica | None:
        """The Replica, or None in a copy of a wrapper that has not run a backward yet."""
        return self._replica

    # -- one step ----------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the wrapped module, with inputs and outputs moved to ``device_ids`` and ``output_device`` if these were given."""
        if self._device is not None:
            inputs, kwargs = to_device(inputs, self._device), to_device(kwargs, self._device)
        if self._buffer_hook is not None:
            self._call_buffer_hook("PRE_FORWARD")
        if self._low_precision is None:
            outputs = self.module(*inputs, **kwargs)
            if self._is_unconnected():
                self._watch_unconnected(outputs)
        else:
            outputs = self._forward_low_precision(self._low_precision, inputs, kwargs)
        if self._buffer_hook is not None:
            self._call_buffer_hook("POST_FORWARD")
        return outputs if self._output_device is None else to_device(outputs, self._output_device)

    def _forward_low_precision(self, low_precision: LowPrecision, inputs: Any, kwargs: Any) -> Any:
        inputs, kwargs = cast_floating((inputs, kwargs), self.mixed_precision.param_dtype)
        copies = low_precision.copy()
        with low_precision.use(copies):
            outputs = self.module(*inputs, **kwargs)
        if self._is_unconnected():
            self._watch_unconnected(outputs)  # before the module holds the copies in backward: a Replica hooks the parameters
        low_precision.use_in_backward(copies, outputs)
        return outputs

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _watch_unconnected(self, outputs: Any) -> None:
        """This wrapper is a copy, or another wrapper has hooked the module since: connect when a backward comes."""
        if torch.is_grad_enabled():
            for tensor in find_tensors(outputs):
                on_backward(tensor, self._connect_in_backward)

    def _connect_in_backward(self) -> None:
        """Called inside a backward of a wrapper without connections. Collective, unless this backward is not averaged.

        Raises:
            UsageError: If another wrapper has hooked the module.
        """
        with _connecting, _torch_errors():
            if not self._syncs_when_connected or not self._is_unconnected():
                return
            if find_replica(self.module) is not None:
                raise UsageError(
                    f"two DistributedDataParallel wrap this {type(self.module).__name__}, and this is the older one: its gradients "
                    "would be averaged twice. Train through the wrapper that was made last, or delete that wrapper."
                )
            self._connect(replace(self._options, init_sync=False), self._comm, self.process_group).enter_backward()

    def _is_unconnected(self) -> bool:
        return self._replica is None or self._replica.replaced

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the next ``backward()`` averages gradients, as in torch. May be set."""
        return self._syncs_when_connected if self._replica is None else self._replica.syncs

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self._syncs_when_connected = value
        if self._replica is not None:
            self._replica.syncs = value

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without averaging them; see ``Replica.no_sync``. What counts is where ``backward()`` runs."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

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

    def join_hook(self, **kwargs: Any) -> Any:
        """Raises UsageError: torch's generic ``Join`` context cannot drive this class. Use ``join()``."""
        raise TorchUsageError("torch's Join([...]) cannot drive Lockstep's DistributedDataParallel. Use: with model.join(): ...")

    # -- communication hooks -----------------------------------------------------------------

    def register_comm_hook(self, state: Any, hook: Hook) -> None:
        """Replace the all-reduce of each bucket by ``hook(state, bucket)``, as in torch; see ``Replica.register_comm_hook``."""
        self.replica.register_comm_hook(state, hook)

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """torch's built-in hooks: ALLREDUCE is what happens anyway, FP16_COMPRESS sends gradients in float16."""
        if comm_hook_type.name == "FP16_COMPRESS":
            self.replica.reducer.set_reduce_dtype(torch.float16)

    def _register_buffer_comm_hook(self, state: Any, hook: Callable[..., Any], comm_hook_location: Any = None) -> None:
        """Call ``hook(state, named_buffers)`` before or after each training forward (default), instead of copying buffers."""
        if not callable(hook):
            raise TorchUsageError(f"a buffer communication hook must be callable, not {type(hook).__name__}.")
        self._buffer_hook = _BufferHook(hook, state, getattr(comm_hook_location, "name", "POST_FORWARD"))
        self.replica.broadcasts_buffers = False

    def _call_buffer_hook(self, location: str) -> None:
        hook = self._buffer_hook
        if hook is not None and hook.location == location and self.will_sync_module_buffers():
            buffers = self.named_module_buffers
            with torch.no_grad(), _unsafe_preserve_version_counter(tuple(buffers.values())):
                for future in hook.hook(hook.state, buffers) or ():
                    future.wait()

    # -- what torch's class offers to frameworks -----------------------------------------------

    @property
    def broadcast_buffers(self) -> bool:
        """Whether rank 0's buffers are copied to all ranks in every step. May be set; equal on all ranks."""
        return self._options.broadcast_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self._options = replace(self._options, broadcast_buffers=value)
        if self._replica is not None:
            self._replica.broadcasts_buffers = value and self._buffer_hook is None

    forward_sync_buffers = broadcast_buffers

    def will_sync_module_buffers(self) -> bool:
        """Whether a training step copies buffers between ranks, as in torch."""
        syncs = self.require_forward_param_sync and self.require_backward_grad_sync and self.broadcast_buffers
        return syncs and bool(self.named_module_buffers)

    @property
    def named_module_buffers(self) -> dict[str, Tensor]:
        """The buffers that are copied between ranks, by name."""
        return {name: buffer for name, buffer in self.module.named_buffers() if name not in self._options.ignore}

    @property
    def modules_buffers(self) -> list[Tensor]:
        """The buffers that are copied between ranks."""
        return list(self.named_module_buffers.values())

    @property
    def logger(self) -> TorchLogger:
        """An object with torch's method ``_get_ddp_logging_data``."""
        return TorchLogger(self)

    @property
    def reducer(self) -> TorchReducer:
        """An object with the methods of torch's reducer that frameworks call. They do nothing, because nothing needs them."""
        return TorchReducer(self)

    def _get_ddp_logging_data(self) -> dict[str, int | str]:
        """Lockstep's figures under torch's keys."""
        return logging_data(self)

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        self.reducer._set_ddp_runtime_logging_sample_rate(sample_rate)

    def _check_reducer_finalized(self) -> None:
        """Does nothing: a backward that is not complete raises."""

    def _remove_autograd_hooks(self) -> None:
        self.replica.close()

    @property
    def _distributed_rank(self) -> int:
        return self.replica.comm.rank

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
        """Changes ``static_graph`` only: the graph may be static or not."""
        self.static_graph = True

    # -- copies ------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """A copy has no connections. It evaluates at once, and connects in its first backward, which all ranks must run."""
        group = self.process_group
        if group is not None and group is not default_group():
            raise TorchUsageError(
                "a DistributedDataParallel with a process_group of its own cannot be copied or pickled, because a copy connects "
                "through the default process group. Copy or save .module instead, and wrap it again."
            )
        left_out = ("_replica", "process_group", "device_mesh", "_low_precision", "_buffer_hook")
        return {key: value for key, value in self.__dict__.items() if key not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.process_group, self._buffer_hook, self._replica = default_group(), None, None
        self._low_precision = self._make_low_precision()


_connecting = threading.RLock()


@dataclass(frozen=True)
class _BufferHook:
    """A buffer communication hook. ``location``: "PRE_FORWARD" or "POST_FORWARD"."""

    hook: Callable[..., Any]
    state: Any
    location: str


@contextmanager
def _torch_errors() -> Iterator[None]:
    """Raises a UsageError as a TorchUsageError, which is also of the types that torch's class raises."""
    try:
        yield
    except UsageError as error:
        if isinstance(error, TorchUsageError):
            raise
        raise TorchUsageError(str(error)).with_traceback(error.__traceback__) from None


def _log_pointless(**arguments: Any) -> None:
    """One debug line for each argument that was given and makes no difference."""
    for name, value in arguments.items():
        if value:
            _log.debug("DistributedDataParallel(%s=...) is not needed: %s.", name, _POINTLESS[name])


def _require_policy(policy: Any) -> Any:
    """Returns ``policy``. Raises UsageError unless it is None or has the attributes of torch's mixed-precision policy."""
    if policy is not None and not all(hasattr(policy, name) for name in ("param_dtype", "reduce_dtype", "buffer_dtype")):
        raise UsageError(
            f"mixed_precision={policy!r} is not a policy with param_dtype, reduce_dtype and buffer_dtype. Pass "
            "torch.nn.parallel.distributed._MixedPrecision(param_dtype=torch.bfloat16), or use torch.autocast."
        )
    return policy


def _close_earlier_wrapper(module: nn.Module) -> None:
    """If an earlier wrapper has hooked ``module``, the new wrapper takes its place."""
    earlier = find_replica(module)
    if earlier is not None and earlier.is_wrapped:
        earlier.replaced = True
        earlier.close()
    elif earlier is None and any_hooked(module):
        gc.collect()  # closes wrappers that are gone but for reference cycles


def _names_to_ignore(module: nn.Module, names: set[str]) -> tuple[str, ...]:
    """Returns the ``names`` that the module has. As in torch, others are allowed, and ".weight" is the module's own weight."""
    known = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return tuple(sorted({name.removeprefix(".") for name in names} & {name for name, _ in known}))
