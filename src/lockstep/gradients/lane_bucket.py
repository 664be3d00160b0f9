"""A bucket of lanes: flat memory for as many partial sums of its gradients as a worker may hold (plan/tree.py).

    wire    | row 0: slot 0 |pad| slot 1 ... | row 1: slot 0 |pad| slot 1 ... | ...

Row 0 becomes the result; ``param.grad`` is a view of it. LaneBucket above 0 are used where lanes do not
divide evenly among workers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.comm.base import Comm, real
from lockstep.gradients.ddp_bucket import like
from lockstep.gradients.scale import headroom
from lockstep.plan.buckets import BucketSpec


class LaneBucket:
    """Memory for one ``BucketSpec``, ``width`` times. ``views[row][slot]`` is laid out like the slot's parameter."""

    def __init__(self, index: int, spec: BucketSpec, width: int, params: Sequence[Tensor], comm: Comm, lanes: int) -> None:
        self.index = index
        self.members = [slot.param for slot in spec.slots]
        first = params[self.members[0]]
        per_element = 2 if first.is_complex() else 1
        self.wire = comm.buffer(width * spec.numel * per_element, real(first.detach()).dtype, first.device)
        memory = torch.view_as_complex(self.wire.view(-1, 2)) if first.is_complex() else self.wire
        rows = memory.view(width, spec.numel)
        self.total = rows[0]
        self.views = [[like(rows[r], slot.offset, params[slot.param]) for slot in spec.slots] for r in range(width)]
        self.missing = len(self.members)
        self.headroom = headroom(first.dtype, lanes)
