"""A fold on a CUDA stream over NCCL: an all-to-all of slices, the tree and an all-gather, all enqueued on the stream at once.

Nothing here waits for the device. So every rank issues its two collectives in the order of the calls, and one group suffices. A
copy within the memory of the device is cheap: what a collective needs in one range is copied into one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lockstep.comm.base import bits
from lockstep.comm.fold import fold_values, rows_of
from lockstep.plan.tree import Fold


def fold_on_stream(backend: Any, rank: int, size: int, tensor: Tensor, fold: Fold, scale: float | None) -> None:
    """Enqueue the fold of ``tensor`` on the current stream. Works of ``backend`` make that stream wait, not the host."""
    rows = rows_of(tensor, fold.width)
    numel, item, count = rows.shape[1], rows.element_size(), len(fold.held[rank])
    if numel == 0:
        return
    length = -(-numel // size)  # slices of one length, as an all-gather needs them; the last may be short or empty
    cuts = [(min(numel, s * length), min(numel, (s + 1) * length)) for s in range(size)]
    low, high = cuts[rank]
    send = rows[0] if count == 1 else torch.cat([row[a:b] for a, b in cuts for row in rows[:count]] or [rows[0, :0]])
    values = rows.new_empty(sum(map(len, fold.held)), high - low)
    sent = [count * (b - a) * item for a, b in cuts]
    received = [len(nodes) * (high - low) * item for nodes in fold.held]
    backend.alltoall_base(bits(values), bits(send), received, sent).wait()
    mine = rows.new_empty(length)
    fold_values(values.unbind(), fold, scale, [mine[: high - low]])
    whole = rows[0] if numel == size * length else rows.new_empty(size * length)
    backend._allgather_base(bits(whole), bits(mine)).wait()
    if whole.numel() != numel:
        rows[0].copy_(whole[:numel])
