"""Between tensors and bucket plans: what a plan must know of parameters, and where hooks should look up."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lockstep.plan.buckets import BucketPlan, ParamSpec

_HOST_BATCH_BYTES = 1 << 20


def specs_of(params: Sequence[Tensor], names: Sequence[str]) -> list[ParamSpec]:
    return [
        ParamSpec(name, p.numel(), p.element_size(), str(p.dtype), str(p.device)) for name, p in zip(names, params, strict=True)
    ]


def sentinels(plan: BucketPlan, count: int) -> bytes:
    """The last parameter of every bucket; on the host also one per megabyte, to copy while in cache."""
    mask = bytearray(count)
    for bucket in plan.buckets:
        held = 0
        for slot in bucket.slots:
            held += slot.numel * bucket.itemsize
            if held >= _HOST_BATCH_BYTES and bucket.device == "cpu":
                mask[slot.param], held = 1, 0
        mask[bucket.slots[-1].param] = 1
    return bytes(mask)
