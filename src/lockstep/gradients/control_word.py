"""The control word: what every worker tells all others once per step, next to its last bucket. One small gather.

step | settings | wants | weights of my lanes | which parameters had gradients | which buffers changed
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from ctypes import string_at
from dataclasses import dataclass

import torch

from lockstep.comm.base import Comm, Pending

_HEAD = struct.Struct("<qqq")

WEIGHED, COUNTED = 1, 2
"""Some of my lanes were weighed by the user; some were counted."""
CHANGE = 4
"""Somebody waits to join or to leave: let us end this generation after the same step."""
SAVE = 8
"""A checkpoint is due, by my clock."""
WROTE = 16
"""My part of the checkpoint in flight is written, or has failed."""
PUBLISHED = 64
"""The last checkpoint is there, or has failed: I am rank 0, who sees to that."""
STOP = 32
"""The run was told to end: save, and leave after the same step."""


@dataclass(frozen=True)
class ControlWord:
    """One worker's word. ``settings``: a hash of what must be equal everywhere (learning rates, say)."""

    step: int
    settings: int
    wants: int
    weights: tuple[float, ...]
    present: bytes
    changed: bytes

    def pack(self, lanes: int) -> bytes:
        """Equally long on every worker, if ``lanes`` is the most any of them has; missing weights are -1."""
        weights = (*self.weights, *[-1.0] * (lanes - len(self.weights)))
        return _HEAD.pack(self.step, self.settings, self.wants) + struct.pack(f"<{lanes}d", *weights) + self.present + self.changed

    @staticmethod
    def unpack(data: bytes, lanes: int, params: int) -> ControlWord:
        weights = struct.unpack_from(f"<{lanes}d", data, _HEAD.size)
        at = _HEAD.size + 8 * lanes
        step, settings, wants = _HEAD.unpack_from(data)
        return ControlWord(step, settings, wants, tuple(w for w in weights if w >= 0), data[at : at + params], data[at + params :])


class Exchange:
    """The gather of all words, in flight."""

    def __init__(self, comm: Comm, word: ControlWord, lanes: int) -> None:
        self._mine = word
        self._lanes, self._params = lanes, len(word.present)
        self._pending: Pending | None = None
        if comm.size > 1:
            mine = torch.frombuffer(bytearray(word.pack(lanes)), dtype=torch.uint8)
            self._everyone = torch.empty(comm.size, len(mine), dtype=torch.uint8)
            self._pending = comm.all_gather(self._everyone, mine, f"the control word of step {word.step}")

    def wait(self) -> list[ControlWord]:
        """Every worker's word, by rank."""
        if self._pending is None:
            return [self._mine]
        self._pending.wait()
        return [ControlWord.unpack(string_at(row.data_ptr(), row.numel()), self._lanes, self._params) for row in self._everyone]


def union(flags: Sequence[bytes]) -> bytes:
    """Where at least one has a 1."""
    return bytes(map(max, zip(*flags, strict=True))) if len(flags) > 1 else flags[0]
