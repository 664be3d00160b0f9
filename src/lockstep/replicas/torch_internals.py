"""What frameworks read and call below torch's DistributedDataParallel: its logger, its logging data and its reducer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from torch import nn

from lockstep.errors import TorchUsageError
from lockstep.plan.buckets import BucketSpec

if TYPE_CHECKING:
    from lockstep.replicas.ddp import DistributedDataParallel


class TorchLogger:
    """``ddp.logger``: answers with Lockstep's figures."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ddp

    def _get_ddp_logging_data(self) -> SimpleNamespace:
        figures = logging_data(self._ddp)
        strings = {key: value for key, value in figures.items() if isinstance(value, str)}
        return SimpleNamespace(strs_map=strings, ints_map={key: value for key, value in figures.items() if key not in strings})


class TorchReducer:
    """``ddp.reducer``: takes the calls that frameworks make between forward and backward. None of them is needed."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ddp

    def prepare_for_forward(self) -> None: ...

    def prepare_for_backward(self, outputs: Any) -> None: ...

    def _rebuild_buckets(self) -> bool:
        return False  # the reducer makes a new plan by itself when it has learned the order of gradients

    def _set_static_graph(self) -> None: ...

    def _delay_all_reduce(self) -> None: ...

    def _check_reducer_finalized(self) -> None: ...

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        if sample_rate < 1:
            raise TorchUsageError(f"sample_rate={sample_rate} is not a rate. Pass 1 or more.")

    def _remove_autograd_hooks(self) -> None:
        self._ddp.replica.close()


def logging_data(ddp: DistributedDataParallel) -> dict[str, int | str]:
    """Return figures of ``ddp`` under the keys of torch's ``_get_ddp_logging_data``. Times are not measured."""
    params = [p for name, p in ddp.module.named_parameters() if name not in ddp.parameters_to_ignore and p.requires_grad]
    figures: dict[str, int | str] = {
        "module_name": type(ddp.module).__name__,
        "device_ids": ", ".join(map(str, ddp.device_ids or ())),
        "output_device": -1 if ddp.output_device is None else ddp.output_device,
        "broadcast_buffers": int(ddp.broadcast_buffers),
        "find_unused_parameters": int(ddp.find_unused_parameters),
        "gradient_as_bucket_view": 1,
        "static_graph": int(ddp.static_graph),
        "can_set_static_graph": 1,
        "has_sync_bn": int(any(isinstance(module, nn.SyncBatchNorm) for module in ddp.module.modules())),
        "is_multi_device_module": int(ddp.is_multi_device_module),
        "bucket_cap_bytes": ddp.bucket_bytes_cap,
        "dtypes": ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in params})),
        "num_parameter_tensors": len(params),
        "total_parameter_size_bytes": sum(p.nbytes for p in params),
        "unused_parameter_size": sum(p.nbytes for p in params if p.grad is None),
        "iteration": 0,
    }
    replica = ddp.connected_replica
    if replica is not None:
        comm, reducer = replica.comm, replica.reducer
        buckets = reducer.plan.buckets
        figures |= {
            "world_size": comm.size,
            "rank": comm.rank,
            "backend_name": comm.name,
            "iteration": reducer.step,
            "num_buckets_reduced": len(buckets),
            "bucket_sizes": ", ".join(str(_nbytes(bucket)) for bucket in buckets),
            "has_rebuilt_buckets": int(reducer.order_is_learned),
        }
        if reducer.order_is_learned:
            figures["rebuilt_bucket_sizes"] = figures["bucket_sizes"]
            figures["rebuilt_per_bucket_param_indices"] = ", ".join(
                " ".join(str(slot.param) for slot in bucket.slots) for bucket in buckets
            )
        if reducer.hook_name:
            figures["comm_hook"] = reducer.hook_name
    return figures


def _nbytes(bucket: BucketSpec) -> int:
    return sum(slot.numel for slot in bucket.slots) * bucket.itemsize
