"""Frames: how a gather over gloo carries its name, so that ranks in different calls are found before data is used.

gloo compares nothing. If two ranks gather different numbers of bytes, gloo aborts the process; if the numbers are equal, each
rank takes the other's data for its own. Therefore every gather begins with a frame of one fixed size:

    | tag: name and size of the data | the first FRAME_BYTES of the data |

Operations of different kinds (a gather, a broadcast, a reduction, a fold) never match in gloo: they wait, and PeerHealth finds out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.comm.base import Pending
from lockstep.comm.blame import DifferentCalls
from lockstep.comm.operation import tag_of
from lockstep.comm.peer_health import PeerHealth

_TAG_BYTES = 8
FRAME_BYTES = 1024 - _TAG_BYTES
"""Room for the control word of a model with a few hundred tensors."""


def pack_frame(data: Tensor, what: str) -> Tensor:
    """The frame of this rank. ``data``: any number of bytes."""
    frame = torch.empty(_TAG_BYTES + FRAME_BYTES, dtype=torch.uint8)
    frame.view(torch.int64)[0] = tag_of(what, data.numel())
    count = min(FRAME_BYTES, data.numel())
    if count:
        frame[_TAG_BYTES : _TAG_BYTES + count].copy_(data[:count])
    return frame


class FramePending:
    """A gather of frames. ``wait`` compares the tags, then copies the data of rank r into ``outputs[r]``."""

    def __init__(self, pending: Pending, health: PeerHealth, frames: Tensor, outputs: list[Tensor], number: int, what: str) -> None:
        self._pending, self._health, self._frames, self._outputs = pending, health, frames, outputs
        self._number, self._what = number, what

    def wait(self, timeout_s: float | None = None) -> None:
        self._pending.wait(timeout_s)
        if len(set(self._frames.view(torch.int64)[:, 0].tolist())) > 1:
            error = DifferentCalls("the ranks called different operations, or passed tensors of different sizes")
            raise self._health.explain(self._number, self._what, 0.0, error) from error
        for frame, output in zip(self._frames, self._outputs, strict=True):
            if count := min(FRAME_BYTES, output.numel()):
                output[:count].copy_(frame[_TAG_BYTES : _TAG_BYTES + count])

    def done(self) -> bool:
        return self._pending.done()
