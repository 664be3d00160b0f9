"""Frames: how a gather over gloo carries its name, so that ranks in different calls are found before data is used.

gloo compares nothing. If two ranks gather different numbers of bytes, gloo aborts the process; if the numbers are equal, each
rank takes the other's data for its own. Therefore every gather begins with a frame of one fixed size:

    | tag: name and size of the data | the first FRAME_BYTES of the data |

Operations of different kinds (a gather, a broadcast, a reduction, a fold) never match in gloo: they wait, and PeerHealth finds out.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from lockstep.comm.base import Pending
from lockstep.comm.blame import DifferentCalls
from lockstep.comm.operation import tag_of
from lockstep.comm.peer_health import PeerHealth

_TAG = struct.Struct("<q")
_ALL_BYTES = 1024
FRAME_BYTES = _ALL_BYTES - _TAG.size
"""Room for the control word of a model with a few hundred tensors."""


class Frames:
    """The frames of all ranks in one gather. Plain Python memory: an operation on a small tensor takes longer than the gather.

    Args:
        data: The bytes that this rank gathers, any number of them.
        size: The number of ranks.
        what: The name of the gather.
    """

    def __init__(self, data: Tensor, size: int, what: str) -> None:
        frame, self._everyone = bytearray(_ALL_BYTES), bytearray(size * _ALL_BYTES)
        _TAG.pack_into(frame, 0, tag_of(what, data.numel()))
        self._count = min(FRAME_BYTES, data.numel())
        self.mine = torch.frombuffer(frame, dtype=torch.uint8)
        self._rows = torch.frombuffer(self._everyone, dtype=torch.uint8).view(size, _ALL_BYTES)
        self.received = list(self._rows.unbind())
        if self._count:
            self.mine[_TAG.size : _TAG.size + self._count].copy_(data[: self._count])

    def differ(self) -> bool:
        """Whether the name of the gather, or the size of its data, differs between the ranks."""
        return len({_TAG.unpack_from(self._everyone, at) for at in range(0, len(self._everyone), _ALL_BYTES)}) > 1

    def copy_to(self, rows: Tensor) -> None:
        """Copy the data of rank r into ``rows[r]``."""
        if self._count:
            rows[:, : self._count].copy_(self._rows[:, _TAG.size : _TAG.size + self._count])


class FramePending:
    """A gather of frames over gloo. ``wait`` compares the frames, then copies their data into ``rows``."""

    def __init__(self, pending: Pending, health: PeerHealth, frames: Frames, rows: Tensor, number: int, what: str) -> None:
        self._pending, self._health, self._frames, self._rows = pending, health, frames, rows
        self._number, self._what = number, what

    def wait(self, timeout_s: float | None = None) -> None:
        self._pending.wait(timeout_s)
        if self._frames.differ():
            error = DifferentCalls("the ranks called different operations, or passed tensors of different sizes")
            raise self._health.explain(self._number, self._what, 0.0, error) from error
        self._frames.copy_to(self._rows)

    def done(self) -> bool:
        return self._pending.done()
