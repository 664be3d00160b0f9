"""The control word: what every worker sends to all others once per step, beside the last bucket. One small gather.

    step, position | settings hash | requests | weights of my lanes | which parameters had gradients | which buffers changed

Workers compare step and position before they use anything else of it: workers of different loops must not train together. It is
not part of the bucket: it must not be rounded to the bucket's dtype, and on CUDA it needs no synchronisation with the device.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from ctypes import string_at
from dataclasses import dataclass

import torch

from lockstep.comm.base import Comm
from lockstep.comm.blame import name_ranks
from lockstep.errors import UsageError

_HEAD = struct.Struct("<qqqqqqq")

Position = tuple[int, int, int, int]
"""Where a worker is: the stage of its loop (0 for the first loop of the script), epoch, index of the step in the epoch, phase."""

# Request bits. Plain integers: an operation on an IntFlag takes 0.8 us, and each step tests each bit of each worker.
WEIGHED, COUNTED = 1, 2
"""The user weighed some of this worker's lanes; some of its lanes were counted by samples."""
CHANGE = 4
"""A worker waits to join or to leave: end this generation after this step."""
SAVE = 8
"""A checkpoint is due by this worker's clock."""
WROTE = 16
"""This worker has written its part of the unfinished checkpoint, or has failed to."""
PUBLISHED = 64
"""The last checkpoint is published, or has failed. Rank 0 sets this bit, because it publishes checkpoints."""
STOP = 32
"""The run was asked to stop: save, and leave after this step."""


@dataclass(frozen=True)
class ControlWord:
    """The control word of one worker.

    ``settings_hash`` must be equal on all workers (learning rates, for example). ``weights``: of this worker's lanes.
    ``present[i]``: 1 if parameter i had a gradient. ``changed[i]``: 1 if buffer i changed.
    """

    step: int
    position: Position
    settings_hash: int
    requests: int
    weights: tuple[float, ...]
    present: bytes
    changed: bytes

    def pack(self, most_lanes: int) -> bytes:
        """Returns equally many bytes on every worker if ``most_lanes`` is the largest number of lanes of a worker."""
        weights = (*self.weights, *[-1.0] * (most_lanes - len(self.weights)))  # -1: no such lane
        head = _HEAD.pack(self.step, *self.position, self.settings_hash, self.requests)
        return head + struct.pack(f"<{most_lanes}d", *weights) + self.present + self.changed

    @staticmethod
    def unpack(data: bytes, most_lanes: int, params: int) -> ControlWord:
        weights = struct.unpack_from(f"<{most_lanes}d", data, _HEAD.size)
        at = _HEAD.size + 8 * most_lanes
        step, stage, epoch, index, phase, settings_hash, requests = _HEAD.unpack_from(data)
        return ControlWord(
            step,
            (stage, epoch, index, phase),
            settings_hash,
            requests,
            tuple(w for w in weights if w >= 0),
            data[at : at + params],
            data[at + params :],
        )


def exchange_words(comm: Comm, word: ControlWord, most_lanes: int) -> list[ControlWord]:
    """Returns the control words of all workers, by rank. Collective. ``most_lanes``: the largest number of lanes of a worker."""
    if comm.size == 1:
        return [word]
    mine = torch.frombuffer(bytearray(word.pack(most_lanes)), dtype=torch.uint8)
    everyone = torch.empty(comm.size, len(mine), dtype=torch.uint8)
    comm.all_gather(everyone, mine, f"the control word of step {word.step}").wait()
    return [ControlWord.unpack(string_at(row.data_ptr(), row.numel()), most_lanes, len(word.present)) for row in everyone]


def require_same_position(words: Sequence[ControlWord]) -> None:
    """Raises UsageError on every rank if the workers that sent ``words`` are not all at the same step of the same loop."""
    ranks: dict[tuple[int, Position], list[int]] = {}
    for rank, word in enumerate(words):
        ranks.setdefault((word.step, word.position), []).append(rank)
    if len(ranks) > 1:
        each = "; ".join(
            f"{name_ranks(found)} at step {step} of the run (loop {stage}, epoch {epoch}, step {index} of the epoch{_pass(phase)})"
            for (step, (stage, epoch, index, phase)), found in ranks.items()
        )
        raise UsageError(
            f"the workers are in different loops or steps: {each}. Every worker must run the same loops over run.shard(...) and "
            "leave them at the same step: look for a `break`, a `return` or an exception that only some workers reach."
        )


def _pass(phase: int) -> str:
    return f", pass {phase + 1} over its lanes" if phase else ""


def union(flags: Sequence[bytes]) -> bytes:
    """Returns 1 at each position where at least one of ``flags`` is 1."""
    return bytes(map(max, zip(*flags, strict=True))) if len(flags) > 1 else flags[0]
