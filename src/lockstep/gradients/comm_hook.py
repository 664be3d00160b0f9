"""Runs the communication hooks of torch's DDP on a DdpBucket.

``GradBucket`` has the methods of ``torch.distributed.GradBucket`` (which Python cannot construct), so that hooks such as
``fp16_compress_hook`` or ``powerSGD_hook`` run unchanged. As in torch, a hook must average by itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import PeerError, TorchUsageError
from lockstep.gradients.ddp_bucket import DdpBucket

Hook = Callable[[Any, Any], "torch.futures.Future[Tensor]"]


class GradBucket:
    """One bucket, with the interface that torch's hooks expect."""

    def __init__(self, bucket: DdpBucket, is_last: bool) -> None:
        self._bucket = bucket
        self._is_last = is_last
        self._buffer = bucket.flat

    def index(self) -> int:
        return self._bucket.index

    def buffer(self) -> Tensor:
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        return list(self._bucket.gradients)

    def parameters(self) -> list[Tensor]:
        return list(self._bucket.params)

    def is_last(self) -> bool:
        return self._is_last


class HookPending:
    """The Pending of a hook's future: ``wait`` also copies the result into the bucket."""

    def __init__(self, future: torch.futures.Future[Tensor], bucket: DdpBucket, what: str, timeout_s: float) -> None:
        self._future, self._bucket, self._what, self._timeout_s = future, bucket, what, timeout_s

    def wait(self, timeout_s: float | None = None) -> None:
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        deadline, pause_s = time.monotonic() + limit_s, 0.0
        while not self._future.done():  # a Future has no wait with a timeout
            if time.monotonic() > deadline:
                raise PeerError(
                    f"the communication hook did not finish {self._what} within {limit_s:g} s: "
                    "some rank did not call the hook, or the hook's own process group is stuck."
                )
            time.sleep(pause_s)
            pause_s = min(0.001, pause_s + 0.00002)
        try:
            result: Any = self._future.wait()
        except RuntimeError as error:
            raise PeerError(f"the communication hook failed in {self._what}: {str(error).splitlines()[0][:160]}") from error
        if isinstance(result, (list, tuple)):
            (result,) = result
        if not isinstance(result, Tensor) or result.numel() != self._bucket.flat.numel():
            found = f"{tuple(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
            raise TorchUsageError(
                f"the communication hook returned {found} for {self._what}. It must return a future of one tensor with the "
                f"{self._bucket.flat.numel()} elements of the bucket."
            )
        if result.data_ptr() != self._bucket.flat.data_ptr() or result.dtype != self._bucket.flat.dtype:
            self._bucket.flat.copy_(result.view(-1))

    def done(self) -> bool:
        return self._future.done()


def run_hook(hook: Hook, state: Any, bucket: DdpBucket, is_last: bool, what: str, timeout_s: float) -> HookPending:
    """Call the hook for one bucket. Does not wait. Raises TorchUsageError if the hook does not return a future."""
    future = hook(state, GradBucket(bucket, is_last))
    if not isinstance(future, torch._C.Future):
        raise TorchUsageError(
            f"the communication hook returned {type(future).__name__} for {what}. It must return a torch.futures.Future."
        )
    return HookPending(future, bucket, what, timeout_s)
