"""Which gradient lies where: parameter specs -> BucketPlan. Pure; knows nothing of tensors.

A bucket is one flat buffer of one dtype on one device:

    element 0                                             numel      numel + control
    | slot 0 ....|pad| slot 1 ........|pad| slot 2 ...|pad|  presence  |
                                                           last bucket only

Slots start on 64-byte boundaries, so that wide loads, cache lines and slices never straddle two
gradients. Buckets stand in launch order: by the ready position of their last parameter. The last
bucket carries one presence element per planned parameter (see grads/reducer.py).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from lockstep.errors import InvariantError, UsageError

ALIGN_BYTES = 64
EDGE_BYTES = 1 << 20
"""Size of the first bucket (so that the wire starts early) and of the last (so that little is exposed)."""


@dataclass(frozen=True)
class ParamSpec:
    """What a plan must know of one parameter. ``dtype`` and ``device`` are names, compared for equality only."""

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
    """Where one parameter's gradient lies in its bucket, in elements."""

    param: int
    offset: int
    numel: int


@dataclass(frozen=True)
class BucketSpec:
    """One message: a dtype, a device and the slots in it."""

    dtype: str
    device: str
    itemsize: int
    slots: tuple[Slot, ...]
    numel: int
    control: int = 0

    def __post_init__(self) -> None:
        step = max(1, ALIGN_BYTES // self.itemsize)
        end = 0
        for slot in self.slots:
            if slot.offset < end or slot.offset % step:
                raise InvariantError(f"slot {slot} overlaps its neighbour or is not on a {ALIGN_BYTES}-byte boundary")
            end = slot.offset + slot.numel
        if end > self.numel:
            raise InvariantError(f"slots end at {end}, past the bucket's {self.numel} elements")

    @property
    def nbytes(self) -> int:
        return (self.numel + self.control) * self.itemsize


@dataclass(frozen=True)
class BucketPlan:
    """All buckets, in launch order. Verified on construction: a wrong plan cannot exist."""

    params: tuple[int, ...]
    buckets: tuple[BucketSpec, ...]

    def __post_init__(self) -> None:
        placed = sorted(slot.param for bucket in self.buckets for slot in bucket.slots)
        if placed != sorted(self.params) or len(set(placed)) != len(placed):
            raise InvariantError(f"the plan places parameters {placed}, not each of {sorted(self.params)} once")
        for index, bucket in enumerate(self.buckets):
            expected = len(self.params) if index == len(self.buckets) - 1 else 0
            if bucket.control != expected:
                raise InvariantError(f"bucket {index} carries {bucket.control} presence elements, not {expected}")

    @property
    def nbytes(self) -> int:
        return sum(bucket.nbytes for bucket in self.buckets)

    def fingerprint(self) -> str:
        """Equal on two workers if and only if their plans are."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


def plan_buckets(specs: Sequence[ParamSpec], order: Sequence[int], cap_bytes: int, edge_bytes: int = EDGE_BYTES) -> BucketPlan:
    """Pack ``specs[i] for i in order`` (the order in which gradients become ready) into buckets.

    A bucket is closed by the parameter with which it reaches ``cap_bytes``; the first and the last
    one already at ``edge_bytes``, and sizes fall towards the end. Parameters not in ``order`` have no
    place in the plan.
    """
    if cap_bytes < 1:
        raise UsageError(f"a bucket must hold at least one byte, not {cap_bytes}. Pass a positive bucket_mb.")
    if len(set(order)) != len(order) or any(not 0 <= i < len(specs) for i in order):
        raise InvariantError(f"ready order {list(order)} is not a choice among {len(specs)} parameters")
    edge_bytes = min(edge_bytes, cap_bytes)
    caps = _caps([_room(specs[i]) for i in order], cap_bytes, edge_bytes)
    position = {param: at for at, param in enumerate(order)}
    closed: list[list[int]] = []
    open_: dict[tuple[str, str], list[int]] = {}
    held: dict[tuple[str, str], int] = {}
    for at, i in enumerate(order):
        if at and caps[at] != caps[at - 1]:
            closed += open_.values()
            open_, held = {}, {}
        key = (specs[i].device, specs[i].dtype)
        open_.setdefault(key, []).append(i)
        held[key] = held.get(key, 0) + _room(specs[i])
        if held[key] >= (caps[at] if closed else edge_bytes):
            closed.append(open_.pop(key))
            del held[key]
    closed += open_.values()
    closed.sort(key=lambda members: position[members[-1]])
    buckets = [
        _lay_out(specs, members, control=len(order) if index == len(closed) - 1 else 0) for index, members in enumerate(closed)
    ]
    return BucketPlan(tuple(order), tuple(buckets))


def _caps(rooms: Sequence[int], cap_bytes: int, edge_bytes: int) -> list[int]:
    """The cap that holds at each place in the order: it falls towards the end, 25 25 16 4 1 MB.

    A bucket that fills near the end of backward has little compute left to hide behind, so it had
    better be small. Each size of the ramp holds as much as fits, at least one parameter. Where the
    very last parameter is a giant (a tied embedding), a ramp before it hides nothing.
    """
    caps, start, cap = [cap_bytes] * len(rooms), len(rooms), edge_bytes
    while start > 0 and cap < cap_bytes and rooms[-1] < cap_bytes:
        end, held = start, 0
        while start > 0 and (start == end or held + rooms[start - 1] <= cap):
            start -= 1
            held += rooms[start]
            caps[start] = cap
        cap *= 4
    return caps


def _room(spec: ParamSpec) -> int:
    return -(-spec.nbytes // ALIGN_BYTES) * ALIGN_BYTES


def _lay_out(specs: Sequence[ParamSpec], members: Sequence[int], control: int) -> BucketSpec:
    first = specs[members[0]]
    slots, offset = [], 0
    for i in members:
        slots.append(Slot(i, offset, specs[i].numel))
        offset += _room(specs[i]) // first.itemsize
    return BucketSpec(first.dtype, first.device, first.itemsize, tuple(slots), offset, control)
