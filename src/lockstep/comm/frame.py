"""Frames: how a gather over gloo carries its name, so that ranks in different calls are found before data is used.

gloo compares nothing. If two ranks gather different numbers of bytes, gloo aborts the process; if the numbers are equal, each
rank takes the other's data for its own. Therefore every gather begins with a frame of one fixed size:

    | tag: name and size of the data | whether this rank is connected over NCCL | the first FRAME_BYTES of the data |

Operations of different kinds (a gather, a broadcast, a reduction, a fold) never match in gloo: they wait, and PeerHealth finds out.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from lockstep.comm.base import Pending
from lockstep.comm.blame import DifferentCalls
from lockstep.comm.operation import tag_of
from lockstep.comm.peer_health import PeerHealth

_HEAD = struct.Struct("<q?")
_ALL_BYTES = 1024
FRAME_BYTES = _ALL_BYTES - _HEAD.size
"""Room for the control word of a model with a few hundred tensors."""


class Frames:
    """The frames of all ranks in one gather. Plain Python memory: an operation on a small tensor takes longer than the gather.

    Args:
        data: The bytes that this rank gathers, any number of them.
        size: The number of ranks.
        what: The name of the gather.
        is_connected: Whether this rank is connected with all others over NCCL (comm/torch_group.py).
    """

    def __init__(self, data: Tensor, size: int, what: str, *, is_connected: bool = False) -> None:
        frame, self._everyone = bytearray(_ALL_BYTES), bytearray(size * _ALL_BYTES)
        _HEAD.pack_into(frame, 0, tag_of(what, data.numel()), is_connected)
        self._count = min(FRAME_BYTES, data.numel())
        self.mine = torch.frombuffer(frame, dtype=torch.uint8)
        self._rows = torch.frombuffer(self._everyone, dtype=torch.uint8).view(size, _ALL_BYTES)
        self.received = list(self._rows.unbind())
        if self._count:
            self.mine[_HEAD.size : _HEAD.size + self._count].copy_(data[: self._count])

    def differ(self) -> bool:
        """Whether the name of the gather, or the size of its data, differs between the ranks."""
        return len({tag for tag, _ in self._heads()}) > 1

    def all_connected(self) -> bool:
        """Whether every rank is connected over NCCL."""
        return all(is_connected for _, is_connected in self._heads())

    def _heads(self) -> Iterator[tuple[int, bool]]:
        return (_HEAD.unpack_from(self._everyone, at) for at in range(0, len(self._everyone), _ALL_BYTES))  # type: ignore[misc]

    def copy_to(self, rows: Tensor) -> None:
        """Copy the data of rank r into ``rows[r]``."""
        if self._count:
            rows[:, : self._count].copy_(self._rows[:, _HEAD.size : _HEAD.size + self._count])


class FramePending:
    """A gather of frames over gloo. ``wait`` compares the frames, copies their data into ``rows``, then calls ``on_frames``."""

    def __init__(
        self,
        pending: Pending,
        health: PeerHealth,
        frames: Frames,
        rows: Tensor,
        number: int,
        what: str,
        on_frames: Callable[[Frames], None],
    ) -> None:
        self._pending, self._health, self._frames, self._rows = pending, health, frames, rows
        self._number, self._what, self._on_frames = number, what, on_frames

    def wait(self, timeout_s: float | None = None) -> None:
        self._pending.wait(timeout_s)
        if self._frames.differ():
            error = DifferentCalls("the ranks called different operations, or passed tensors of different sizes")
            raise self._health.explain(self._number, self._what, 0.0, error) from error
        self._frames.copy_to(self._rows)
        self._on_frames(self._frames)

    def done(self) -> bool:
        return self._pending.done()
