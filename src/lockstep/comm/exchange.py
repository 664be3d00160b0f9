"""Conversations built from a Comm's operations: bytes from everyone, many tensors from one.

Knows nothing of gradients. Everything here is collective: all ranks must call it.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.comm.base import Comm, Pending, bits
from lockstep.errors import InvariantError, UsageError

Row = Sequence[str]
"""One line of a comparison: kind, name, value. For example "parameter", "body.weight", "shape [3, 4], ..."."""

CHUNK_BYTES = 64 << 20


def gather_bytes(comm: Comm, payload: bytes, what: str) -> list[bytes]:
    """Every rank's payload, by rank. Lengths may differ. Never unpickled."""
    lengths = torch.zeros(comm.size, 1, dtype=torch.int64)
    comm.all_gather(lengths, torch.tensor([len(payload)]), f"{what} (lengths)").wait()
    longest = max(1, int(lengths.max()))
    mine = torch.zeros(longest, dtype=torch.uint8)
    if payload:
        mine[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    everyone = torch.zeros(comm.size, longest, dtype=torch.uint8)
    comm.all_gather(everyone, mine, what).wait()
    return [ctypes.string_at(everyone[r].data_ptr(), int(lengths[r, 0])) for r in range(comm.size)]


class Broadcast:
    """Many tensors from one rank to all, in few messages: ``start`` on every rank, later ``finish``.

    Tensors travel in flat pieces of one dtype and device, so their number costs nothing on the wire.
    """

    def __init__(self, comm: Comm, tensors: Sequence[Tensor], source: int, what: str) -> None:
        self._receives = comm.rank != source
        self._flights: list[tuple[list[Tensor], Tensor, Pending]] = []
        for group in _pieces(tensors):
            flat = torch.cat([t.detach().reshape(-1) for t in group])
            self._flights.append((group, flat, comm.broadcast(bits(flat), source, what)))

    def finish(self, write: Callable[[Tensor, Tensor], object]) -> None:
        """Wait, and on receiving ranks call ``write(tensor, received)`` for each."""
        for group, flat, pending in self._flights:
            pending.wait()
            if self._receives:
                parts = flat.split([t.numel() for t in group])
                for tensor, part in zip(group, parts, strict=True):
                    write(tensor, part.view(tensor.shape))


def broadcast_in_place(comm: Comm, tensors: Sequence[Tensor], source: int, what: str) -> None:
    """Overwrite ``tensors`` with the source's, a bounded number of bytes at a time."""
    if comm.size == 1:
        return
    with torch.no_grad():
        for group in _pieces(tensors):
            Broadcast(comm, group, source, what).finish(Tensor.copy_)


def _pieces(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Group by (device, dtype), each piece at most CHUNK_BYTES unless a single tensor is larger."""
    pieces: list[list[Tensor]] = []
    open_: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], int]] = {}
    for tensor in tensors:
        if tensor.numel() == 0:
            continue
        key = (tensor.device, tensor.dtype)
        group, held = open_.get(key, ([], 0))
        if group and held + tensor.nbytes > CHUNK_BYTES:
            pieces.append(group)
            group, held = [], 0
        group.append(tensor)
        open_[key] = (group, held + tensor.nbytes)
    return pieces + [group for group, _ in open_.values()]


def require_equal(comm: Comm, rows: Sequence[Row], differ: str, remedy: str) -> None:
    """Compare ``rows`` with every rank's. All ranks must call it.

    Raises:
        UsageError: On every rank, with the first row in which a rank differs from rank 0.
    """
    if comm.size == 1:
        return
    text = json.dumps(rows).encode()
    digests = gather_bytes(comm, hashlib.sha256(text).digest(), "a fingerprint")
    if len(set(digests)) == 1:
        return
    everyone = [json.loads(each) for each in gather_bytes(comm, text, "what each rank has")]
    raise UsageError(f"{_describe_difference(everyone, differ)}. {remedy}")


def require_same_model(
    comm: Comm, params: Sequence[tuple[str, Tensor]], buffers: Sequence[tuple[str, Tensor]], settings: Mapping[str, Any]
) -> None:
    """Compare the model's layout and ``settings`` on all ranks. All ranks must call it.

    Raises:
        UsageError: On every rank, if a name, shape, stride, dtype, requires_grad or setting differs.
    """
    rows = [["setting", k, str(v)] for k, v in settings.items()] + [
        [kind, name, f"shape {list(t.shape)}, strides {list(t.stride())}, {t.dtype}, requires_grad={t.requires_grad}"]
        for kind, tensors in (("parameter", params), ("buffer", buffers))
        for name, t in tensors
    ]
    require_equal(
        comm, rows, "hold different models", "Build the same model with the same settings on every rank before replicating it."
    )


def _describe_difference(everyone: Sequence[Sequence[Row]], differ: str) -> str:
    """Name the first row in which a rank differs from rank 0, with both values."""
    for rank, other in enumerate(everyone):
        for at in range(max(len(everyone[0]), len(other))):
            mine = everyone[0][at] if at < len(everyone[0]) else None
            theirs = other[at] if at < len(other) else None
            if mine != theirs:
                return f"rank 0 and rank {rank} {differ}: rank 0 has {_show(mine)}, rank {rank} has {_show(theirs)}"
    raise InvariantError("the fingerprints of the ranks differ, but no row does")


def _show(row: Row | None) -> str:
    return "nothing more" if row is None else f"{row[0]} {row[1]} ({row[2]})"
