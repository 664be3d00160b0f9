"""BucketPlan: which gradient lies where. Pure; knows nothing of tensors.

A bucket is one flat buffer of one dtype on one device:

    element 0                                             numel      numel + presence
    | slot 0 ....|pad| slot 1 ........|pad| slot 2 ...|pad|  presence  |
                                                           last bucket only

Slots start on 64-byte boundaries, so that wide loads, cache lines and slices never straddle two gradients. Buckets are listed in
launch order: by the position of their last parameter in the order in which gradients become ready. The last bucket has one
presence element per planned parameter (gradients/ddp_reducer.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.errors import InvariantError, UsageError

ALIGN_BYTES = 64
EDGE_BYTES = 1 << 20
"""Size of the first bucket (so that sending starts early) and of the last one (its sending overlaps with no computation)."""
_HOST_REPORT_BYTES = 1 << 20


@dataclass(frozen=True)
class ParamSpec:
    """What a plan knows of one parameter. ``dtype`` and ``device`` are names, and are only compared for equality."""

    name: str
    numel: int
    itemsize: int
    dtype: str
    device: str

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize


@dataclass(frozen=True)
class Slot:
    """The place of one parameter's gradient in its bucket, in elements."""

    param: int
    offset: int
    numel: int


@dataclass(frozen=True)
class BucketSpec:
    """One message: a dtype, a device, the slots, and the number of presence elements."""

    dtype: str
    device: str
    itemsize: int
    slots: tuple[Slot, ...]
    numel: int
    presence: int = 0

    def __post_init__(self) -> None:
        step = max(1, ALIGN_BYTES // self.itemsize)
        end = 0
        for slot in self.slots:
            if slot.offset < end or slot.offset % step:
                raise InvariantError(f"slot {slot} overlaps its neighbour or is not on a {ALIGN_BYTES}-byte boundary")
            end = slot.offset + slot.numel
        if end > self.numel:
            raise InvariantError(f"slots end at {end}, past the bucket's {self.numel} elements")


@dataclass(frozen=True)
class BucketPlan:
    """All buckets, in launch order. The constructor raises InvariantError for a plan that is wrong."""

    params: tuple[int, ...]
    buckets: tuple[BucketSpec, ...]

    def __post_init__(self) -> None:
        placed = sorted(slot.param for bucket in self.buckets for slot in bucket.slots)
        if placed != sorted(self.params) or len(set(placed)) != len(placed):
            raise InvariantError(f"the plan places parameters {placed}, not each of {sorted(self.params)} once")
        for index, bucket in enumerate(self.buckets):
            expected = len(self.params) if index == len(self.buckets) - 1 else 0
            if bucket.presence != expected:
                raise InvariantError(f"bucket {index} has {bucket.presence} presence elements, not {expected}")

    def report_mask(self, count: int) -> bytes:
        """Returns 1 for each of ``count`` parameters at which the autograd hooks report to the reducer, otherwise 0.

        These are the last parameter of every bucket, and on the host one parameter per megabyte, so that gradients are copied
        while they are in the cache.
        """
        mask = bytearray(count)
        for bucket in self.buckets:
            unreported_bytes = 0
            for slot in bucket.slots:
                unreported_bytes += slot.numel * bucket.itemsize
                if unreported_bytes >= _HOST_REPORT_BYTES and bucket.device == "cpu":
                    mask[slot.param], unreported_bytes = 1, 0
            mask[bucket.slots[-1].param] = 1
        return bytes(mask)


def plan_buckets(specs: Sequence[ParamSpec], order: Sequence[int], cap_bytes: int, edge_bytes: int = EDGE_BYTES) -> BucketPlan:
    """Pack ``specs[i] for i in order`` (the order in which gradients become ready) into buckets.

    A bucket ends with the parameter with which it reaches ``cap_bytes``. The first and the last bucket end at ``edge_bytes``, and
    sizes fall towards the end of the order. Parameters that are not in ``order`` get no place in the plan.
    """
    if cap_bytes < 1:
        raise UsageError(
            f"bucket_mb is too small: a bucket must hold at least one byte, not {cap_bytes}. Pass a positive bucket_mb."
        )
    if len(set(order)) != len(order) or any(not 0 <= i < len(specs) for i in order):
        raise InvariantError(f"ready order {list(order)} must hold different indices below {len(specs)}")
    edge_bytes = min(edge_bytes, cap_bytes)
    caps = _caps([_padded_bytes(specs[i]) for i in order], cap_bytes, edge_bytes)
    position = {param: at for at, param in enumerate(order)}
    finished: list[list[int]] = []
    filling: dict[tuple[str, str], list[int]] = {}
    filled_bytes: dict[tuple[str, str], int] = {}
    for at, i in enumerate(order):
        if at and caps[at] != caps[at - 1]:
            finished += filling.values()
            filling, filled_bytes = {}, {}
        key = (specs[i].device, specs[i].dtype)
        filling.setdefault(key, []).append(i)
        filled_bytes[key] = filled_bytes.get(key, 0) + _padded_bytes(specs[i])
        if filled_bytes[key] >= (caps[at] if finished else edge_bytes):
            finished.append(filling.pop(key))
            del filled_bytes[key]
    finished += filling.values()
    finished.sort(key=lambda members: position[members[-1]])
    buckets = [
        _lay_out(specs, members, presence=len(order) if index == len(finished) - 1 else 0) for index, members in enumerate(finished)
    ]
    return BucketPlan(tuple(order), tuple(buckets))


def _caps(sizes: Sequence[int], cap_bytes: int, edge_bytes: int) -> list[int]:
    """Returns the cap at each position of the order. It falls towards the end: 25 25 16 4 1 MB.

    A bucket that fills near the end of the backward overlaps with little computation, so it should be small. Each cap below
    ``cap_bytes`` covers as many parameters as fit, at least one. If the last parameter alone fills a bucket (a tied embedding),
    smaller buckets before it would gain nothing.
    """
    caps, start, cap = [cap_bytes] * len(sizes), len(sizes), edge_bytes
    while start > 0 and cap < cap_bytes and sizes[-1] < cap_bytes:
        end, filled_bytes = start, 0
        while start > 0 and (start == end or filled_bytes + sizes[start - 1] <= cap):
            start -= 1
            filled_bytes += sizes[start]
            caps[start] = cap
        cap *= 4
    return caps


def _padded_bytes(spec: ParamSpec) -> int:
    return -(-spec.nbytes // ALIGN_BYTES) * ALIGN_BYTES


def _lay_out(specs: Sequence[ParamSpec], members: Sequence[int], presence: int) -> BucketSpec:
    first = specs[members[0]]
    slots, offset = [], 0
    for i in members:
        slots.append(Slot(i, offset, specs[i].numel))
        offset += _padded_bytes(specs[i]) // first.itemsize
    return BucketSpec(first.dtype, first.device, first.itemsize, tuple(slots), offset, presence)
