"""A fold on a CUDA stream, over NCCL: an all-to-all of slices, the tree, an all-gather, given to the stream at once.

Nothing here waits for the device, so every rank issues its two collectives in the order of the
calls, and one group will do. The device's memory is fast: what must be one stretch of it is copied.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lockstep.comm.base import bits
from lockstep.comm.fold import fold_here, rows_of
from lockstep.plan.tree import Fold


def fold_on_stream(backend: Any, rank: int, size: int, tensor: Tensor, fold: Fold, scale: float | None) -> None:
    """Give the fold of ``tensor`` to the current stream. ``backend``'s works make that stream wait, not the host."""
    rows = rows_of(tensor, fold.width)
    numel, item, held = rows.shape[1], rows.element_size(), len(fold.held[rank])
    if numel == 0:
        return
    length = -(-numel // size)  # slices of one size, as an all-gather wants them; the last may be short, or empty
    cuts = [(min(numel, s * length), min(numel, (s + 1) * length)) for s in range(size)]
    low, high = cuts[rank]
    send = rows[0] if held == 1 else torch.cat([row[a:b] for a, b in cuts for row in rows[:held]] or [rows[0, :0]])
    came = rows.new_empty(sum(map(len, fold.held)), high - low)
    sent = [held * (b - a) * item for a, b in cuts]
    received = [len(theirs) * (high - low) * item for theirs in fold.held]
    backend.alltoall_base(bits(came), bits(send), received, sent).wait()
    mine = rows.new_empty(length)
    fold_here(came.unbind(), fold, scale, [mine[: high - low]])
    whole = rows[0] if numel == size * length else rows.new_empty(size * length)
    backend._allgather_base(bits(whole), bits(mine)).wait()
    if whole.numel() != numel:
        rows[0].copy_(whole[:numel])
